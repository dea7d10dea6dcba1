"""Quantized heads: equal to heads with the dequantized weight, or refused.

torchao and bitsandbytes run where they are installed; stand-ins of their classes run everywhere.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from spies import memory_beside
from table import Batch, assert_rounds_as_eager_code, assert_same, relative_error
from test_lora_head import (
    PEFT_WARNINGS,
    dpo,
    dpo_on_logits,
    gradients_of,
    labelled,
    logps_of,
    sft,
    sft_on_logits,
    tiny_llama,
)
from torch import Tensor, nn

from liger_chunked import KeptIds, apply_liger_kernel, attach_head, linear_token_stats
from liger_chunked.deferred.request import requested
from liger_chunked.types import Head

pytestmark = [PEFT_WARNINGS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

aten: Any = torch.ops.aten


class TorchAOBaseTensor(Tensor):
    """Imitates the tensors of torchao, which hold no data and have their own product."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, **attributes: Any) -> Any:
        self = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, requires_grad=False)
        self.qdata, self.scale = qdata, scale
        vars(self).update({"act_quant_kwargs": None, "act_pre_scale": None, "activation_quantization": None})
        vars(self).update(attributes)
        return self

    @classmethod
    def of(cls, weight: Tensor, **attributes: Any) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, **attributes)

    def dequantize(self) -> Tensor:
        return self.qdata * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear and isinstance(args[1], cls):
            return nn.functional.linear(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.detach.default:
            (x,) = args
            names = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")
            return cls(x.qdata, x.scale, **{name: getattr(x, name) for name in names})
        raise NotImplementedError(function)


class Int8Tensor(TorchAOBaseTensor):
    pass


class Int4Tensor(TorchAOBaseTensor):
    pass


class Linear4bit(nn.Linear):
    """Stands for that of bitsandbytes: its weight holds codes in no shape of a head."""

    def __init__(self, weight: Tensor, compute_dtype: torch.dtype | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        absmax = weight.abs().max()
        codes = (weight / absmax * 7).round().to(torch.int8).view(torch.uint8).reshape(-1, 1)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.quant_state = SimpleNamespace(absmax=absmax, shape=weight.shape)
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantize_4bit(self.weight, self.quant_state)
        return nn.functional.linear(x.to(self.compute_dtype), weight.to(self.compute_dtype)).to(x.dtype)


class Linear8bitLt(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("never called")


def dequantize_4bit(codes: Tensor, state: Any) -> Tensor:
    return codes.view(torch.int8).reshape(state.shape).to(state.absmax.dtype).mul_(state.absmax / 7)


Made = tuple[nn.Module, Tensor]  # a module, and its dequantized weight


def stand_in_torchao(weight: Tensor) -> Made:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(Int8Tensor.of(weight), requires_grad=False)
    return module, Int8Tensor.of(weight).dequantize()


def stand_in_4bit(weight: Tensor) -> Made:
    module = Linear4bit(weight, weight.dtype)
    return module, dequantize_4bit(module.weight, module.quant_state)


def quietly(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def real_torchao(name: str, weight: Tensor, **arguments: Any) -> Made:
    torchao = quietly("torchao.quantization")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    # Only the format in float8 has scales in float64.
    dtype = weight.dtype if name.startswith("Float8") or weight.dtype != torch.float64 else torch.float32
    module.weight = nn.Parameter(weight.to(dtype))
    torchao.quantize_(module, getattr(torchao, name)(**arguments))
    return module, module.weight.dequantize()


def real_4bit(weight: Tensor, **arguments: Any) -> Made:
    bnb = quietly("bitsandbytes")
    compute = arguments.pop("compute_dtype", weight.dtype)
    module = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, compute_dtype=compute, **arguments)
    module.load_state_dict({"weight": weight.float() if weight.dtype == torch.float64 else weight})
    module = module.to("cpu")
    return module, bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)


FORMATS: dict[str, Callable[[Tensor], Made]] = {
    "stand-in of torchao": stand_in_torchao,
    "stand-in of bitsandbytes": stand_in_4bit,
    "torchao float8": functools.partial(real_torchao, "Float8WeightOnlyConfig"),
    "torchao int8": functools.partial(real_torchao, "Int8WeightOnlyConfig"),
    "torchao intx": functools.partial(real_torchao, "IntxWeightOnlyConfig"),
    "nf4": functools.partial(real_4bit, quant_type="nf4", compress_statistics=False),
    "fp4, nested": functools.partial(real_4bit, quant_type="fp4"),
}


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = SimpleNamespace(Linear4bit=Linear4bit, Linear8bitLt=Linear8bitLt)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", modules)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", SimpleNamespace(dequantize_4bit=dequantize_4bit))


@pytest.fixture(params=FORMATS)
def format(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if "stand-in" in request.param:
        use_stand_ins(monkeypatch)
    return request.param


def llama(vocab_size: int = 160) -> Any:
    return tiny_llama(vocab_size=vocab_size, hidden_size=64)


def models(
    format: str, targets: list[str], dtype: torch.dtype = torch.float64, vocab_size: int = 160
) -> tuple[Any, Any]:
    """Return a model with a quantized head, and the same with the dequantized weight, both with LoRA."""
    made = []
    for dequantized in (False, True):
        torch.manual_seed(0)
        model = llama(vocab_size).to(dtype)
        module, weight = FORMATS[format](model.lm_head.weight.detach())
        if dequantized:
            module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        model.lm_head = module
        # PEFT then takes its layer for bitsandbytes.
        model.is_loaded_in_4bit = format.startswith(("nf4", "fp4")) and not dequantized
        torch.manual_seed(1)
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        for name, p in model.named_parameters():
            p.data = p.data.to(dtype) if "lora_" in name else p.data
        made.append(model.train())
    return made[0], made[1]


def fused_dpo(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        ref_logps = model(**batch, head_fn=logps_of)
    return model(**batch, head_fn=functools.partial(dpo, budget=None, ref_logps=ref_logps))


def fused_sft(model: Any, batch: dict[str, Tensor], budget: int | None = None) -> Tensor:
    return model(**batch, head_fn=functools.partial(sft, budget=budget))


TRAINED = {
    "sft": (fused_sft, sft_on_logits),
    "sft in chunks": (functools.partial(fused_sft, budget=3 * 8 * 160), sft_on_logits),
    "dpo": (fused_dpo, dpo_on_logits),
}


def assert_equal_gradients(model: Any, found: Tensor, eager: Any, expected: Tensor) -> None:
    ours, theirs = gradients_of(model, found), gradients_of(eager, expected)
    assert ours.keys() == theirs.keys() and any("lora_B" in name for name in ours)
    assert_same(ours, theirs, 1e-9)


@pytest.mark.few(4, "stand-in of bitsandbytes-sft-head")
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["backbone", "head"])
@pytest.mark.parametrize("loss", TRAINED)
def test_equal_to_the_dequantized_head(format, targets, loss):
    model, eager = models(format, targets)
    if format in ("nf4", "fp4, nested") and "lm_head" in targets:
        assert type(model.get_base_model().lm_head).__module__ == "peft.tuners.lora.bnb"
    attach_head(model)
    fused, on_logits = TRAINED[loss]
    batch = labelled()
    found, expected = fused(model, batch), on_logits(eager, batch)
    assert relative_error(found.detach(), expected.detach()) < 1e-9
    assert_equal_gradients(model, found, eager, expected)


@pytest.mark.few(3)
def test_kept_ids(format):
    """A few rows of a quantized head, with its adapter, against the dequantized one's whole logits."""
    model, eager = models(format, ["q_proj", "lm_head"])
    attach_head(model)
    batch = labelled()
    target = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    lists = [[y, (y + 7) % 160, (y + 3) % 160] if y >= 0 else [] for y in target.flatten().tolist()]
    kept = KeptIds.from_lists(lists)

    def statistics(head: Any, input: Any) -> Tensor:
        return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, kept=kept).logps

    found = model(**batch, head_fn=statistics)
    keeps = torch.tensor([[not ids or i in ids for i in range(160)] for ids in lists]).view(*target.shape, 160)
    logits = eager(**{name: x for name, x in batch.items() if name != "labels"}).logits
    log_p = logits.masked_fill(~keeps, -torch.inf).log_softmax(-1)
    expected = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0].masked_fill(target < 0, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert_equal_gradients(model, found.sum(), eager, expected.sum())


def logps(model: Any, x: Tensor, target: Tensor) -> Tensor:
    def compute(head: Head, hidden_states: Tensor) -> Tensor:
        stats = linear_token_stats(head.weight, hidden_states, target, head.bias)
        assert stats.logps is not None
        return stats.logps

    with requested(defer=True):
        logits = model.lm_head(x)
    return logits.run(compute)


@pytest.mark.few(2)
@pytest.mark.parametrize("format", [name for name in FORMATS if "stand-in" not in name], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_error_is_that_of_the_modules_own_product(format, dtype):
    """In bfloat16, also from hidden states in float32, as of norms that PEFT has cast."""

    def batch_of(seed: int) -> tuple[Batch, Batch, Batch]:
        generator = torch.Generator().manual_seed(seed)
        model = llama()
        model.lm_head, weight = FORMATS[format]((torch.randn(160, 64, generator=generator) / 8).bfloat16())
        x, upstream = torch.randn(5, 7, 64, generator=generator).bfloat16(), torch.randn(5, 7, generator=generator)
        target = torch.randint(160, (5, 7), generator=generator)

        def run(logits: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Batch:
            leaf = x.to(dtype, copy=True).requires_grad_()
            values = logits(leaf)
            if values.ndim == 3:
                values = values.log_softmax(-1).gather(-1, target[..., None])[..., 0]
            (values * upstream).sum().backward()
            return {"logps": values.detach().double(), "gradient": leaf.grad.double()}

        exact = run(lambda x: nn.functional.linear(x, weight.double()), torch.float64)
        eager = run(lambda x: model.lm_head(x).float(), torch.bfloat16)
        return run(lambda x: logps(model, x, target), dtype), eager, exact

    assert_rounds_as_eager_code(map(batch_of, range(8)))


@pytest.mark.few(1)
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("format", ["stand-in of torchao", "stand-in of bitsandbytes"], indirect=True)
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["backbone", "head"])
def test_memory(format, targets):
    """One dequantized copy, which a loss frees in its forward."""
    model, _ = models(format, targets, torch.float32, vocab_size=5003)
    attach_head(model)
    batch = labelled()
    model(**batch, head_fn=logps_of)  # checks the head
    with memory_beside(*model.parameters(), *model.buffers(), *batch.values()) as memory:
        loss = fused_sft(model, batch, budget=3 * 4 * 5003)
        copy = 5003 * 64 * 4
        assert memory.largest == copy
        assert memory.alive < copy
        loss.backward()
    # The copy, the logits, and the gradients of adapters.
    assert memory.peak < copy + 3 * 4 * 5003 + 4 * 3 * 4 * 5003 + (1 << 18)


def unserved_gptq() -> nn.Module:
    module = nn.Module()
    module.register_buffer("qweight", torch.zeros(8, 160, dtype=torch.int32))
    return module


def with_weight(weight: Tensor, cls: type = nn.Linear, requires_grad: bool = False) -> nn.Module:
    module = cls(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=requires_grad)
    return module


def packed(weight: Tensor) -> nn.Module:
    module = Linear4bit(weight, None)
    module.quant_state.packing_format_for_cpu = True
    return module


def not_quantized_yet(weight: Tensor) -> nn.Module:
    module = Linear4bit(weight, None)
    module.quant_state = None
    return module


def fp8() -> nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    return FP8Linear(64, 160, block_size=(32, 32))


WEIGHT = torch.randn(160, 64, generator=torch.Generator().manual_seed(0))
LEAVE_OUT = r"\. Leave lm_head out of quantization \(llm_int8_skip_modules, modules_to_not_convert\)"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bitsandbytes in 8 bits": (
        lambda: with_weight(torch.zeros(160, 64, dtype=torch.int8), Linear8bitLt),
        rf"computed by .*Linear8bitLt: .* it also rounds the hidden states to 8 bits{LEAVE_OUT}",
    ),
    "torchao with dynamic activations": (
        lambda: with_weight(Int8Tensor.of(WEIGHT, act_quant_kwargs=object())),
        rf"Linear, whose weight is a .*Int8Tensor: .* its act_quant_kwargs also changes the hidden states{LEAVE_OUT}",
    ),
    "torchao with AWQ": (
        lambda: with_weight(Int8Tensor.of(WEIGHT, act_pre_scale=torch.ones(64))),
        rf"whose weight is a .*Int8Tensor: .* its act_pre_scale also changes the hidden states{LEAVE_OUT}",
    ),
    "torchao int4": (
        lambda: with_weight(Int4Tensor.of(WEIGHT)),
        rf"whose weight is a .*Int4Tensor: .* its format is none of bitsandbytes' Linear4bit and .*{LEAVE_OUT}",
    ),
    "trainable": (
        lambda: with_weight(Int8Tensor.of(WEIGHT), requires_grad=True),
        rf"whose weight is a .*Int8Tensor: .* its weight requires a gradient{LEAVE_OUT}",
    ),
    "FP8": (fp8, rf"computed by .*FP8Linear: .* its format is none of .*{LEAVE_OUT}"),
    "GPTQ": (unserved_gptq, rf"computed by torch.nn.modules.module.Module: .* its format is none of .*{LEAVE_OUT}"),
}


@pytest.mark.few(3, "lora-GPTQ")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("with_lora", [False, True], ids=["alone", "lora"])
def test_other_formats_are_refused(case, with_lora, monkeypatch):
    use_stand_ins(monkeypatch)
    make, message = REFUSED[case]
    model = llama()
    if with_lora:
        config = peft.LoraConfig(r=3, target_modules=["lm_head"])
        peft.get_peft_model(model, config)
        model.lm_head.base_layer = make()
    else:
        model.lm_head = make()
    with pytest.raises(ValueError, match=message):
        attach_head(model)
    report = apply_liger_kernel(model)
    assert "lm_head is computed by" in str(report) and "Leave lm_head out of quantization" in str(report)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (packed, "repacked the weight of lm_head, a Linear4bit, for inference on this CPU"),
        (not_quantized_yet, "a Linear4bit whose weight is not quantized yet"),
    ],
)
def test_weights_without_values_are_refused(make, message, monkeypatch):
    use_stand_ins(monkeypatch)
    model = llama()
    model.lm_head = make(WEIGHT)
    attach_head(model)
    with pytest.raises(ValueError, match=message):
        model(**labelled(), head_fn=logps_of)
