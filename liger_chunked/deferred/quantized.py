"""Quantized heads, dequantized for each call.

Formats that also round hidden states are refused: no weight has the same product.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.deferred.swap import stock_forward
from liger_chunked.private import own_tensors

# Weight-only tensors of torchao, and attributes that are None unless hidden states are rounded too.
_TORCHAO = {
    "Float8Tensor": ("act_quant_kwargs",),
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}

_SERVED = f"bitsandbytes' Linear4bit and torchao's weight-only {', '.join(_TORCHAO)}"


def _of_bitsandbytes(module: nn.Module, name: str) -> bool:
    cls = getattr(sys.modules.get("bitsandbytes.nn"), name, None)
    return cls is not None and isinstance(module, cls) and stock_forward(module) is cls.forward


def is_4bit(module: nn.Module) -> bool:
    return _of_bitsandbytes(module, "Linear4bit")


def _of_torchao(x: Any) -> bool:
    return any(base.__name__ == "TorchAOBaseTensor" for base in type(x).__mro__)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module has a tensor of torchao, of integers, or of floats of one byte."""
    own = own_tensors(module).values()
    return is_4bit(module) or any(_of_torchao(x) or not x.is_floating_point() or x.itemsize == 1 for x in own)


def refusal(module: nn.Module) -> str | None:
    weight: Any = own_tensors(module).get("weight")
    if is_4bit(module):
        why = None
    elif _of_bitsandbytes(module, "Linear8bitLt"):
        why = "it also rounds the hidden states to 8 bits"
    elif not _of_torchao(weight) or type(weight).__name__ not in _TORCHAO:
        why = f"its format is none of {_SERVED}"
    else:
        used = [name for name in _TORCHAO[type(weight).__name__] if getattr(weight, name) is not None]
        why = f"its {used[0]} also changes the hidden states" if used else None
    if why is None and weight is not None and weight.requires_grad:
        why = "its weight requires a gradient"
    of_weight = f", whose weight is a {type(weight).__module__}.{type(weight).__name__}" if _of_torchao(weight) else ""
    return None if why is None else f"{of_weight}: a fused loss cannot dequantize it, because {why}"


@torch.no_grad()
def dequantized(module: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a module's dequantized `weight`, as its product with hidden states of `dtype` uses it.

    Autocast casts the product, not the weight.
    """
    if is_4bit(module):
        state = getattr(weight, "quant_state", None) or module.quant_state
        if state is None:
            raise ValueError("lm_head is a Linear4bit whose weight is not quantized yet: move the model to its device")
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                "bitsandbytes has repacked the weight of lm_head, a Linear4bit, for inference on this CPU: load the "
                "model again, and train before it is evaluated"
            )
        dtype = module.compute_dtype or dtype
        result = sys.modules["bitsandbytes.functional"].dequantize_4bit(weight.detach(), state)
    else:
        result = weight.dequantize()
    return result if torch.is_autocast_enabled(result.device.type) else result.to(dtype)
