"""The "grouped_mm" experts of transformers, with kernels that gather their rows and sum them.

Stock code copies the tokens' rows by expert, and reads the second product three times and writes it twice to bring them
back and sum them. Our kernels read it once, and sum in float32 (docs/benchmarks.md, "Experts"). Under torch.compile
stock code runs, because Inductor fuses these operations too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from liger_chunked.integrations.transformers.detect import STOCK
from liger_chunked.kernels.backend import use_triton
from liger_chunked.kernels.operands import all_plain
from liger_chunked.layers.experts import add_bias_, combine_rows, gather_tokens, route
from liger_chunked.private import own_tensors

GROUPED = "grouped_mm"
EXPERTS_GATE = "_apply_gate"  # method of experts that `grouped_mm` serves
_STOCK: Any = getattr(moe, "grouped_mm_experts_forward", None)
_TOLERANCE = 1e-5  # relative, in float32


class _Decorated(nn.Module):
    def forward(self) -> None: ...


_WRAPPER = moe.use_experts_implementation(_Decorated).forward.__code__


def experts_method(cls: Any) -> Callable[..., Tensor] | None:
    """Return a forward for a subclass of `cls` that runs stock's code unless our kernels serve the call.

    None if `cls` defines its own forward. A forward that is set on `cls` later runs too.
    """
    stock = cls.forward
    code, cells = getattr(stock, "__code__", None), getattr(stock, "__closure__", None) or ()
    if code is not _WRAPPER or not any(cell.cell_contents is moe.ALL_EXPERTS_FUNCTIONS for cell in cells):
        return None

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if cls.forward is not stock:  # the user replaced it
            return cls.forward(self, *args, **kwargs)
        # Inductor fuses these operations itself.
        if kwargs or len(args) != 3 or torch.compiler.is_compiling() or not _serves(self, args):
            return stock(self, *args, **kwargs)
        return grouped_forward(self, *args)

    # Dynamo limits a code's compilations.
    method: Any = forward
    method.__code__ = method.__code__.replace()
    vars(method)[STOCK] = stock
    return method


def _serves(module: Any, args: tuple[Tensor, ...]) -> bool:
    return (
        getattr(module.config, "_experts_implementation", None) == GROUPED
        and moe.ALL_EXPERTS_FUNCTIONS.get(GROUPED) is _STOCK is not None
        and use_triton(args[0])  # float64, which grouped products refuse, has no kernels either
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and all_plain((*args, *own_tensors(module).values()))
        and _is_known(*(bool(getattr(module, name, False)) for name in _FLAGS))
    )


def grouped_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    index = top_k_index.reshape(hidden_states.shape[0], -1)
    routing = route(index, module.num_experts)
    has_norm = getattr(module, "has_post_expert_norm", False)
    into, bias = ("gate_up_proj", "gate_up_proj_bias") if module.has_gate else ("up_proj", "up_proj_bias")
    rows = gather_tokens(hidden_states, routing)
    rows = moe._grouped_linear(rows, getattr(module, into), routing.ends, is_transposed=module.is_transposed)
    if module.has_bias:
        rows = add_bias_(rows, getattr(module, bias), routing)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = moe._grouped_linear(rows, module.down_proj, routing.ends, is_transposed=module.is_transposed)
    if module.has_bias:
        rows = add_bias_(rows, module.down_proj_bias, routing)
    if has_norm:
        rows = module.post_expert_norm(rows)
    # Hooks may keep the output of a norm.
    weights = top_k_weights.reshape(index.shape)
    return combine_rows(rows, weights, routing, hidden_states.dtype, inplace=not has_norm)


_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")


class _Sample:
    """Experts with the attributes that we know. Code that reads others raises an error."""

    num_experts, width, inner = 4, 8, 16
    is_concatenated = True

    def __init__(self, flags: tuple[bool, ...]) -> None:
        vars(self).update(zip(_FLAGS, flags, strict=True))
        self.leaves: dict[str, Tensor] = {}
        into = "gate_up_proj" if self.has_gate else "up_proj"
        outputs = {into: (self.width, self.inner * (2 if self.has_gate else 1)), "down_proj": (self.inner, self.width)}
        for name, (n_in, n_out) in outputs.items():
            self._add(name, *((n_in, n_out) if self.is_transposed else (n_out, n_in)))
            if self.has_bias:
                self._add(f"{name}_bias", n_out)

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def _add(self, name: str, *shape: int) -> None:
        generator = torch.Generator().manual_seed(len(self.leaves))
        weight = torch.randn(self.num_experts, *shape, generator=generator, dtype=torch.float32, requires_grad=True)
        self.leaves[name] = weight
        setattr(self, name, weight)

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, -1)
        return torch.tanh(gate) * up

    act_fn = staticmethod(torch.tanh)
    post_expert_norm = staticmethod(torch.sin)

    def results(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        """Return the output, and the gradients of all leaves."""
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(6, self.width, generator=generator, dtype=torch.float32, requires_grad=True)
        weights = torch.rand(6, 2, generator=generator, dtype=torch.float32)
        index = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1], [1, 3]])  # one expert has no token
        if getattr(self, "_is_expert_parallel", False):
            weights = weights.masked_fill(index == 3, 0.0)
            index = index.masked_fill(index == 3, self.num_experts)
        weights.requires_grad_()
        output = forward(self, x.clone(), index, weights.clone())
        leaves = [x, weights, *self.leaves.values()]
        return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]


@functools.cache
def _is_known(*flags: bool) -> bool:
    """Whether `grouped_forward` computes what this version of transformers does for experts with these flags."""
    *_, has_norm, is_parallel = flags
    if has_norm and is_parallel:
        return False  # the norm's gradient would read rows of no expert
    # The caller may save tensors for a checkpoint, trace, or be in inference mode; a new thread does not.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_same_as_stock, flags).result()


def _same_as_stock(flags: tuple[bool, ...]) -> bool:
    try:
        with torch.autocast("cpu", enabled=False), torch.device("cpu"):
            sample = _Sample(flags)
            pairs = zip(sample.results(grouped_forward), sample.results(_STOCK), strict=True)
            return all(bool((ours - theirs).norm() <= _TOLERANCE * theirs.norm()) for ours, theirs in pairs)
    except Exception:  # such as an unknown attribute
        return False
