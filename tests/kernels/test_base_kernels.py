"""The base kernels, on the device's path, compared with eager code in float64 and in the same dtype."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from base_ops import (
    DTYPES,
    ONE_EACH,
    Op,
    dynamo_warns,
    eager_clamped,
    error,
    every_op,
    every_op_not_interpreted,
    floor,
    labels,
    one_each,
    outputs_of,
    run,
    transformers_object,
    upstream,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import liger_chunked as lc
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning.generic import MAX_ROW
from liger_chunked.layers import glu, layer_norm, relu_squared, rms_norm, rope


@pytest.mark.few(
    7,
    "cpu-cross_entropy-mean-fp32",
    "cpu-layer_norm-fp16",
    "cpu-layer_norm-no_bias-fp32",
    "cpu-rms_norm-olmo2-fp16",
    "cpu-rms_norm-residual-bf16",
    "cpu-rms_norm_gated-sigmoid-fp32",
    "cpu-rope-halves-fp16",
)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@every_op
def test_values_and_gradients(op: Op, dtype: torch.dtype, device: str) -> None:
    for shape in op.shapes:
        inputs = op.sample(shape, dtype, device)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        grads = upstream(outputs_of(op.ours(*inputs)))
        ours, eager = run(op.ours, inputs, grads), run(op.eager, inputs, grads)
        expected = run(op.eager, exact, grads)
        for i, (value, peer, truth) in enumerate(zip(ours, eager, expected, strict=True)):
            assert value.shape == truth.shape
            bound = 1.1 * max(error(peer, truth), floor(dtype))
            assert error(value, truth) <= bound, f"{shape}, number {i} of outputs and gradients"
        for x, gradient in zip(inputs, ours[len(ours) - len(inputs) :], strict=True):
            assert gradient.dtype == x.dtype


@pytest.mark.few(3, "cpu-swiglu")
@pytest.mark.triton
@one_each
def test_path(op: Op, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device runs the kernels meant for it: no launch, or no function of the torch path."""

    def refuse(*_: Any) -> None:
        raise AssertionError("ran the other path")

    if device != "cuda" and not INTERPRETED:
        monkeypatch.setattr(Kernel, "__call__", refuse)
        run(op.ours, op.sample(op.shapes[0], torch.float32, device))
        return

    # The last two files have functions of the same names.
    files = ("logits_stats", "logits_grad", "divergence_sums", "divergence", "divergence_grad")
    shared = [importlib.import_module(f"liger_chunked.kernels.{name}") for name in files]
    for module in (glu, layer_norm, relu_squared, rms_norm, rope, *shared):
        hosts = [name for name in vars(module) if re.fullmatch(r"_\w+_torch_?", name)]
        assert hosts
        for name in hosts:
            monkeypatch.setattr(module, name, refuse)
    run(op.ours, op.sample(op.shapes[0], torch.float32, device))


@pytest.mark.few(2)
@every_op
def test_gradcheck(op: Op) -> None:
    shape = min(op.shapes, key=lambda shape: torch.Size(shape).numel() if shape[-1] > 2 else 1 << 30)
    inputs = [x.detach().double().requires_grad_() for x in op.sample(shape, torch.float64)]
    assert torch.autograd.gradcheck(op.ours, inputs, fast_mode=True)


def strided(x: Tensor) -> Tensor:
    """Return the same numbers, with gaps between the rows."""
    gaps = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    gaps[..., : x.shape[-1]] = x.detach()
    return gaps[..., : x.shape[-1]].requires_grad_(x.requires_grad)


def scattered(x: Tensor) -> Tensor:
    """Return the same numbers, with gaps between the columns."""
    gaps = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    gaps[..., 0] = x.detach()
    return gaps[..., 0].requires_grad_(x.requires_grad)


def permuted(x: Tensor) -> Tensor:
    """Return the same numbers, with the first dimension innermost in memory."""
    return x.detach().movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_(x.requires_grad)


@pytest.mark.few(3)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("layout", [strided, scattered, permuted])
@every_op_not_interpreted
def test_layouts(op: Op, layout: Callable[[Tensor], Tensor], device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    expected = run(op.ours, inputs)
    views = [layout(x) for x in inputs]
    grads = [layout(g) if g.ndim > 1 else g for g in upstream(outputs_of(op.ours(*inputs)))]
    for value, same in zip(run(op.ours, views, grads), expected, strict=True):
        # float32: the torch path sums in another order in another layout.
        torch.testing.assert_close(value, same, rtol=1e-5, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.triton
@one_each
def test_upstream_of_stride_zero(op: Op, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    ones = [torch.ones_like(y) for y in outputs_of(op.ours(*inputs))]
    expanded = [torch.ones((), device=device).expand(y.shape) for y in ones]
    for value, same in zip(run(op.ours, inputs, expanded), run(op.ours, inputs, ones), strict=True):
        assert torch.equal(value, same)


@pytest.mark.triton
def test_targets_of_any_stride(device: str) -> None:
    x, target = torch.randn(7, 30, device=device), torch.arange(7, device=device)
    apart = torch.stack([target, torch.full_like(target, -100)], 1)[:, 0]
    assert apart.stride() == (2,)
    assert torch.equal(lc.liger_cross_entropy(x, apart), lc.liger_cross_entropy(x, target))


@pytest.mark.few(3, "cpu-swiglu-gpt_oss")
@pytest.mark.triton
@every_op_not_interpreted
def test_frozen_inputs(op: Op, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    *_, expected = [run(op.ours, inputs)[-len(inputs) :]]
    for frozen in range(len(inputs)):
        if len(inputs) == 1:
            break
        for i, x in enumerate(inputs):
            x.requires_grad_(i != frozen)
        gradients = run(op.ours, inputs)[1 - len(inputs) :]
        for value, same in zip(gradients, expected[:frozen] + expected[frozen + 1 :], strict=True):
            # A few units in the last place, because computing less may change the order of a sum.
            torch.testing.assert_close(value, same, rtol=1e-6, atol=1e-7)


@pytest.mark.few(3)
@pytest.mark.triton
@every_op_not_interpreted
def test_without_a_graph(op: Op, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.bfloat16, device)
    with_graph = outputs_of(op.ours(*inputs))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            outputs = outputs_of(op.ours(*inputs))
        for y, same in zip(outputs, with_graph, strict=True):
            assert not y.requires_grad and torch.equal(y, same) and y.stride() == same.stride()


@pytest.mark.few(4)
@pytest.mark.triton
@one_each
def test_inputs_stay_and_backward_repeats(op: Op, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    copies = [x.detach().clone() for x in inputs]
    outputs = outputs_of(op.ours(*inputs))
    first = torch.autograd.grad(outputs, inputs, upstream(outputs), retain_graph=True)
    second = torch.autograd.grad(outputs, inputs, upstream(outputs))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(x, copy) and x._version == 0 for x, copy in zip(inputs, copies, strict=True))


# A rotation is linear: its gradient is the inverse rotation, which has derivatives of its own.
ROTATIONS = [op for op in ONE_EACH if op.id.startswith("rope")]
ONCE = [op for op in ONE_EACH if op not in ROTATIONS]
once_differentiable = pytest.mark.parametrize("op", ONCE, ids=lambda op: op.id)


@pytest.mark.few(1)
@pytest.mark.parametrize("op", ROTATIONS, ids=lambda op: op.id)
def test_second_derivative_of_a_rotation(op: Op) -> None:
    """Derivatives by inputs and upstream gradients, of both orders, equal those of eager code in float64."""
    inputs = op.sample(op.shapes[0], torch.float64)

    def penalty(function: Callable[..., Any]) -> list[Tensor]:
        outputs = outputs_of(function(*inputs))
        grads = [g.requires_grad_() for g in upstream(outputs)]
        value = sum((o.sin() * g).sum() for o, g in zip(outputs, grads, strict=True))
        gradients = torch.autograd.grad(value, inputs, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in gradients), [*inputs, *grads], create_graph=True)
        return [*again, *torch.autograd.grad(sum(g.square().sum() for g in again), inputs)]

    for ours, exact in zip(penalty(op.ours), penalty(op.eager), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.few(2)
@once_differentiable
@pytest.mark.parametrize("linear", [True, False], ids=["constant-upstream", "upstream-of-the-inputs"])
def test_second_derivative_by_any_input_is_refused(op: Op, linear: bool) -> None:
    """Tested with `autograd.grad`, and with an additional term whose second derivative exists."""
    inputs = op.sample(op.shapes[0], torch.float64)

    def again(function: Callable[..., Any], first: int, by: int) -> Tensor | None:
        outputs = outputs_of(function(*inputs))
        value = sum(
            (o * g).sum() if linear else o.square().sum() for o, g in zip(outputs, upstream(outputs), strict=True)
        )
        (gradient,) = torch.autograd.grad(value, inputs[first], create_graph=True)
        decay = inputs[by].square().sum()
        (decay_gradient,) = torch.autograd.grad(decay, inputs[by], create_graph=True)
        penalty = gradient.square().sum() + decay_gradient.sum()
        return torch.autograd.grad(penalty, inputs[by])[0] - 2

    for first in range(len(inputs)):
        for by in range(len(inputs)):
            try:
                ours = again(op.ours, first, by)
            except RuntimeError as error:
                assert "second derivatives" in str(error)
            else:
                # The gradient does not depend on this input.
                assert linear
                torch.testing.assert_close(ours, again(op.eager, first, by))


class Block(torch.nn.Module):
    """All kernels in sequence."""

    def __init__(self) -> None:
        super().__init__()
        config = SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu")
        self.norm = lc.LigerRMSNorm(16)
        self.mlp = lc.LigerSwiGLUMLP(config)
        self.out = lc.LigerLayerNorm(16)
        self.loss = lc.LigerCrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        normal, x = self.norm(x, x * 0.5)
        x = x + self.mlp(normal)
        angle = torch.arange(x.shape[1], device=x.device)[None, :, None].expand(1, -1, 4) * 0.3
        heads = x.unflatten(-1, (4, 4))
        q, k = lc.liger_rotary_pos_emb(heads, heads * 2, angle.cos(), angle.sin(), unsqueeze_dim=2)
        return self.loss(self.out((q + k).flatten(-2)), target)


def step(model: Callable[..., Tensor], block: Block, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    loss = model(x, labels(x))
    loss.backward()
    return [loss.detach(), *(p.grad for p in block.parameters())]


@dynamo_warns
# Inductor compiles C++ for half a minute. By default, tests/engine/test_compile.py has a step by it.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_a_compiled_model_compiles_twice_for_any_length(backend: str, device: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    counter, block = CompileCounterWithBackend(backend), Block().to(device)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for tokens in (5, 7, 12, 31):
        x = torch.randn(2, tokens, 16, device=device)
        for value, same in zip(step(compiled, block, x), step(block, block, x), strict=True):
            torch.testing.assert_close(value, same)
    assert counter.frame_count <= 2  # one for the first length, one for all others


@pytest.mark.few(4, "cpu-rms_norm-residual")
@pytest.mark.triton
@every_op_not_interpreted
def test_no_rows(op: Op, device: str) -> None:
    shape = (0, *op.shapes[0][1:])
    inputs = op.sample(shape, torch.float32, device)
    values = run(op.ours, inputs)
    for x, gradient in zip(inputs, values[-len(inputs) :], strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))
    assert all(y.isfinite().all() for y in values)


_NUMBERS = torch.tensor([nan, inf, -inf, 0.0, -1.0, 1.0, 2.0, -2.0, 2.5, -2.5])


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("upstream", [1.0, inf, nan])
@pytest.mark.parametrize("limit", [2.0, None])
def test_numbers_that_are_not_finite_in_a_clamped_unit(limit: float | None, upstream: float, device: str) -> None:
    """NaN passes a clamp, and its gradient does not; a number at the limit has one as in the installed torch."""
    found = []
    for function in (
        partial(lc.liger_swiglu, limit=limit, offset=1.0),
        partial(eager_clamped, limit=limit, offset=1.0),
    ):
        gate, up = (x.to(device).flatten().requires_grad_() for x in torch.meshgrid(_NUMBERS, _NUMBERS, indexing="ij"))
        y = function(gate, up)
        found.append((y, *torch.autograd.grad(y, (gate, up), torch.full_like(y, upstream))))
    (y, dgate, dup), (expected, *gradients) = found
    torch.testing.assert_close(y, expected, equal_nan=True)
    for ours, theirs in zip((dgate, dup), gradients, strict=True):
        # An infinity times zero, which eager code meets in more places, is NaN.
        known = ~theirs.isnan() if limit is None or upstream != 1.0 else torch.ones_like(theirs, dtype=torch.bool)
        torch.testing.assert_close(ours[known], theirs[known], equal_nan=True)
    if limit is None:
        assert dgate.isnan()[: len(_NUMBERS)].all() and dup.isnan().view(len(_NUMBERS), -1)[0].all()


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("upstream", [1.0, inf, nan])
def test_numbers_that_are_not_finite_in_a_squared_relu(upstream: float, device: str) -> None:
    x = _NUMBERS.to(device).requires_grad_()
    values = []
    for y in (lc.liger_relu_squared(x), F.relu(x).square()):
        values.append((y, *torch.autograd.grad(y, x, torch.full_like(y, upstream))))
    for ours, theirs in zip(*values, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="launches a kernel on a part of its tensors")
def test_more_neighbouring_columns_than_an_int32() -> None:
    gate = torch.randn(64)
    y, numbers = torch.zeros(32), (0, 0, 0, 2**30 + 1, 1, 1.0, inf, 0.0, "silu", False, 32)
    glu._forward_kernel((1, 1, 1), (gate, None, y), numbers, 1)
    torch.testing.assert_close(y, F.silu(gate[::2]) * gate[1::2])
    dgate, numbers = torch.zeros(64), (0, 0, 0, 0, 0, 2**30 + 1, 1, 1.0, inf, 0.0, "silu", False, 32)
    glu._backward_kernel((1, 1, 1), (torch.ones(32), gate, None, dgate, None), numbers, 1)
    torch.testing.assert_close(dgate[1::2], F.silu(gate[::2]))


@pytest.mark.triton
def test_wide_rows_take_the_torch_path(device: str) -> None:
    x = torch.randn(2, MAX_ROW + 1, device=device)
    weight = torch.randn(MAX_ROW + 1, device=device)
    torch.testing.assert_close(lc.liger_rms_norm(x, weight), F.rms_norm(x, x.shape[-1:], weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(70_001, 64), (140_001, 16_384)],  # over the limit of 65,535 for a grid's y; over 2 ** 31 elements
    ids=str,
)
def test_long(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(shape[1], device="cuda", dtype=torch.bfloat16)
    tail = slice(-3, None)

    def rope(x: Tensor) -> Tensor:
        heads = x.view(1, len(x), -1, 32).transpose(1, 2)
        angle = torch.linspace(0, 3, 16, device=x.device).repeat(2).expand(1, len(x), 32)
        return lc.liger_rotary_pos_emb(heads, heads[:, :1], angle.cos(), angle.sin())[0][0].transpose(0, 1)

    rows: list[Callable[[Tensor], Tensor]] = [
        lambda x: lc.liger_rms_norm(x, w),
        lambda x: lc.liger_layer_norm(x, w),
        lambda x: lc.liger_swiglu(x, x),
        lc.liger_swiglu,
        rope,
        lambda x: lc.liger_cross_entropy(x, torch.full((len(x),), 5, device=x.device), reduction="none"),
    ]
    for function in rows:
        x.requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        end = x.detach()[tail].requires_grad_()
        y_end = function(end)
        (gradient_end,) = torch.autograd.grad(y_end, end, torch.ones_like(y_end))
        assert torch.equal(y[tail], y_end) and torch.equal(gradient[tail], gradient_end)


# Compared with the modules of transformers.


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "offset", "casting"),
    [
        ("llama.LlamaRMSNorm", 0.0, "llama"),
        ("qwen3.Qwen3RMSNorm", 0.0, "llama"),
        ("glm4.Glm4RMSNorm", 0.0, "llama"),
        ("phi3.Phi3RMSNorm", 0.0, "llama"),
        ("gemma.GemmaRMSNorm", 1.0, "gemma"),
        ("gemma3.Gemma3RMSNorm", 1.0, "gemma"),
        ("olmo2.Olmo2RMSNorm", 0.0, "olmo2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rms_norm_of_transformers(name: str, offset: float, casting: Any, dtype: torch.dtype, device: str) -> None:
    theirs = transformers_object(name)(96, eps=1e-5).to(device, dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        theirs.weight.normal_()
    ours = lc.LigerRMSNorm(96, 1e-5, offset=offset, casting=casting).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 7, 96).to(device, dtype)
    value, same = ours(x), theirs(x)
    if device == "cpu" and not INTERPRETED:
        assert torch.equal(value, same)
    else:  # another summation order: in float32 up to a unit in each step; the interpreter truncates twice
        ulps = 4 if dtype == torch.float32 else 2 if INTERPRETED else 1
        torch.testing.assert_close(value, same, rtol=ulps * torch.finfo(dtype).eps, atol=0)


# Corner cases of single operations.


@pytest.mark.few(4)
@pytest.mark.triton
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("columns", [3, 16, 33, 64])
def test_norms_keep_the_factor_of_each_column(columns: int, gated: bool, device: str) -> None:
    """A row's factor has the same bits for all of its columns and for the backward."""
    x = torch.randn(513, columns, device=device)
    gate = torch.full_like(x, 100.0) if gated else None  # whose sigmoid is 1
    y, rstd, _ = torch.ops.liger_chunked.rms_norm(x, None, None, gate, 1e-6, 0.0, False, "sigmoid", gated, 1)
    assert torch.equal(y, x * rstd[:, None])
    y, stats = torch.ops.liger_chunked.layer_norm(x, None, None, 1e-6)
    assert torch.equal(y, (x - stats[0][:, None]) * stats[1][:, None])


@pytest.mark.triton
def test_cross_entropy_in_place(device: str) -> None:
    x = torch.randn(4, 33, device=device, requires_grad=True)
    logits = x * 1.0
    loss = lc.liger_cross_entropy(logits, labels(logits), inplace=True)
    expected = torch.autograd.grad(lc.liger_cross_entropy(x, labels(x)), x)[0]
    gradient = torch.autograd.grad(loss, x, retain_graph=True)[0]
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(logits, gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_nothing(reduction: Any, device: str) -> None:
    logits = torch.randn(4, 33, device=device, requires_grad=True)
    target = torch.full((4,), 7, device=device)
    loss = lc.liger_cross_entropy(logits, target, ignore_index=7, reduction=reduction, label_smoothing=0.1)
    loss.sum().backward()
    assert not loss.any() and not logits.grad.any()


def test_operators_keep_their_word() -> None:
    """`torch.library.opcheck` accepts their schema, fake outputs and aliasing."""
    x, w, row = torch.randn(3, 8), torch.randn(8), torch.rand(3)
    q, k, angle = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 4)
    samples: dict[str, list[tuple[Any, ...]]] = {
        "rms_norm": [
            (x, w, None, None, 1e-6, 0.0, True, "silu", False, 1),
            (x.t(), None, x.t(), None, 1e-6, 1.0, False, "silu", False, 1),
            (x, w, None, x, 1e-6, 0.0, True, "sigmoid", False, 1),
            (x, w, None, x, 1e-6, 0.0, True, "silu", True, 2),
        ],
        "rms_norm_backward": [
            (x, None, x, w, row, None, 0.0, "silu", False, 1, True, True),
            (x, x, x, None, row, None, 0.0, "silu", False, 1, True, False),
            (x, None, x, w, row, x, 0.0, "sigmoid", False, 1, True, True),
            (x, None, x, w, torch.rand(6), x, 0.0, "silu", True, 2, True, True),
        ],
        "layer_norm": [(x, w, None, 1e-6)],
        "layer_norm_backward": [(x, x, w, torch.stack((row, row)), True, None, torch.bfloat16)],
        "glu": [
            (x, x, "silu", False, 1.0, inf, 0.0),
            (x, None, "gelu", False, 1.0, inf, 0.0),
            (x, None, "silu", True, 1.7, 7.0, 1.0),
        ],
        "glu_backward": [
            (x, x, x, "silu", False, 1.0, inf, 0.0),
            (x[:, :4], x, None, "gelu_tanh", False, 1.0, inf, 0.0),
            (x[:, :4], x, None, "silu", True, 1.7, 7.0, 1.0),
        ],
        "relu_squared": [(x, None), (x.t(), x.t())],
        "rotary_pos_emb": [
            (q.transpose(1, 2).contiguous().transpose(1, 2), k, angle, angle, 4, False, False, True, False),
            (q, k, angle, angle, 4, True, False, False, True),
        ],
    }
    for name, calls in samples.items():
        for arguments in calls:
            operator = getattr(torch.ops.liger_chunked, name).default
            torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


X, W = torch.randn(2, 3, 8), torch.ones(8)


Q, K, ANGLE = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)


Z, T = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)


IDS, NAN = torch.arange(3)[None], float("nan")


rope_of = lc.liger_rotary_pos_emb


BAD_INPUT: list[tuple[str, type[Exception], str, Callable[[], object]]] = [
    ("norm-int", TypeError, "x must be a floating-point tensor, got", lambda: lc.liger_rms_norm(T, W)),
    ("norm-weight", ValueError, r"weight must be \(8,\)", lambda: lc.liger_rms_norm(X, W[:7])),
    ("norm-casting", ValueError, "casting must be one of", lambda: lc.liger_rms_norm(X, W, casting="bert")),
    ("norm-residual", ValueError, "residual must have the shape", lambda: lc.liger_rms_norm(X, W, residual=X[:1])),
    ("norm-residual-dtype", TypeError, "dtype of x", lambda: lc.liger_rms_norm(X, W, residual=X.half())),
    ("gated-shape", ValueError, "gate must have the shape", lambda: lc.liger_rms_norm_gated(X, X[:1], W)),
    ("gated-int", TypeError, "gate must be a floating", lambda: lc.liger_rms_norm_gated(X, X.int(), W)),
    ("gated-casting", ValueError, "casting must", lambda: lc.liger_rms_norm_gated(X, X, W, casting="bert")),
    ("gated-act", ValueError, "activation must", lambda: lc.liger_rms_norm_gated(X, X, W, activation="gelu")),
    ("gated-groups", ValueError, "groups must divide", lambda: lc.liger_rms_norm_gated(X, X, W, groups=3)),
    ("relu_squared-int", TypeError, "x must be a floating-point", lambda: lc.liger_relu_squared(T)),
    ("layer_norm-bias", ValueError, r"bias must be \(8,\)", lambda: lc.liger_layer_norm(X, W, W[:1])),
    ("glu-shape", ValueError, "up must have the shape", lambda: lc.liger_swiglu(X, X[:1])),
    ("glu-dtype", TypeError, "up must be a tensor of the dtype", lambda: lc.liger_swiglu(X, X.half())),
    ("glu-odd", ValueError, "must be even", lambda: lc.liger_swiglu(X[..., :7])),
    ("glu-limit", ValueError, "limit must be a finite positive", lambda: lc.liger_swiglu(X, X, limit=0.0)),
    ("glu-alpha", ValueError, "alpha must be a finite positive", lambda: lc.liger_swiglu(X, X, alpha="1.7")),  # type: ignore[arg-type]
    ("glu-offset", ValueError, "offset must be a finite number", lambda: lc.liger_swiglu(X, X, offset=inf)),
    ("glu-interleaved", ValueError, "interleaved=True is for", lambda: lc.liger_swiglu(X, X, interleaved=True)),
    ("glu-approximate", ValueError, "approximate must be one of", lambda: lc.liger_geglu(X, X, "erf")),
    ("rope-heads", ValueError, "four dimensions", lambda: lc.liger_rotary_pos_emb(Q[0], K, ANGLE, ANGLE)),
    ("rope-device", ValueError, "agree on dtype, dev", lambda: lc.liger_rotary_pos_emb(Q, K.to("meta"), *[ANGLE] * 2)),
    ("rope-tokens", ValueError, "cos must be", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE[:, :2], ANGLE)),
    ("rope-sin", ValueError, "sin must be", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE, ANGLE[..., :4])),
    ("rope-rotary_dim", ValueError, "rotary_dim must", lambda: rope_of(Q, K, ANGLE, ANGLE, rotary_dim=10)),
    ("rope-float", ValueError, "rotary_dim must", lambda: rope_of(Q, K, ANGLE, ANGLE, rotary_dim=4.0)),  # type: ignore[arg-type]
    ("rope-halves", ValueError, "needs interleaved", lambda: rope_of(Q, K, ANGLE, ANGLE, deinterleave=True)),
    ("rope-dim", ValueError, "unsqueeze_dim must be", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE, ANGLE, None, 3)),
    ("rope-ids", ValueError, "leave position_ids out", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE, ANGLE, IDS)),
    ("ce-target", ValueError, r"target must be in \[0, 8\)", lambda: lc.liger_cross_entropy(Z, T + 8)),
    ("ce-float", TypeError, "target must be a tensor of class", lambda: lc.liger_cross_entropy(Z, T.float())),
    ("ce-shape", ValueError, r"target must be \(3,\)", lambda: lc.liger_cross_entropy(Z, T[:2])),
    ("ce-reduction", ValueError, "reduction must be one of", lambda: lc.liger_cross_entropy(Z, T, reduction="avg")),
    ("ce-smoothing", ValueError, "label_smoothing must be", lambda: lc.liger_cross_entropy(Z, T, label_smoothing=2.0)),
    ("ce-square", ValueError, "_square_scale must", lambda: lc.liger_cross_entropy(Z, T, lse_square_scale=-1e-4)),
    ("ce-square-nan", ValueError, "_square_scale must", lambda: lc.liger_cross_entropy(Z, T, lse_square_scale=NAN)),
    ("ce-padding", ValueError, "set ignore_index=-1$", lambda: lc.liger_cross_entropy(Z, T - T - 1)),
    ("ce-softcap", ValueError, "softcap must be", lambda: lc.liger_cross_entropy(Z, T, softcap=-1.0)),
    ("swiglu-act", ValueError, "hidden_act must be", lambda: lc.LigerSwiGLUMLP(SimpleNamespace(hidden_act="gelu"))),
]  # fmt: skip


@pytest.mark.few(30)
@pytest.mark.parametrize(("kind", "match", "call"), [row[1:] for row in BAD_INPUT], ids=[row[0] for row in BAD_INPUT])
def test_bad_input(kind: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=match):
        call()
