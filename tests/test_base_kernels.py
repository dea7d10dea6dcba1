"""The base kernels, on whichever path serves the device, against eager code in float64 and in the same dtype."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import liger_chunked as lc
from liger_chunked.kernels import glu, layer_norm, logits_divergence, pointwise_divergence, rms_norm, rope
from liger_chunked.kernels.backend import INTERPRETED, MAX_ROW

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rounding the exact result costs at most eps / sqrt(12) in the norm. Triton's interpreter truncates, which costs twice
# that, and twice where an intermediate is rounded too. float32 sums add in another order.
FLOOR = 4.0 if INTERPRETED else 1.0


def floor(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return 4 * eps if dtype == torch.float32 else FLOOR * eps / 12**0.5


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def eager_rms_norm(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *, offset: float, cast_first: bool
) -> Any:
    if residual is not None:
        x = x + residual
    y = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-6)
    if weight is not None:
        w = weight if offset == 0 else offset + wide(weight)
        y = w * (y.to(x.dtype) if cast_first else y)
    y = y.to(x.dtype)
    return y if residual is None else (y, x)


def our_rms_norm(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *, offset: float, casting: Any
) -> Any:
    return lc.liger_rms_norm(x, weight, 1e-6, offset=offset, casting=casting, residual=residual)


def eager_glu(gate: Tensor, up: Tensor | None = None, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return activation(gate) * up


# Constants are numbers that every dtype holds, so that all compute the same function.


def rotation(tokens: int, rotary_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = 0.3 ** torch.arange(rotary_dim // 2)
    angle = (torch.arange(tokens)[:, None] * frequencies).repeat(1, 2)[None]
    return angle.cos().bfloat16().to(like), angle.sin().bfloat16().to(like)


def turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def eager_rope(q: Tensor, k: Tensor, *, share: float = 1.0, interleaved: bool = False, heads_dim: int = 1) -> Any:
    tokens, rotary_dim = q.shape[3 - heads_dim], int(share * q.shape[-1])
    cos, sin = (x.unsqueeze(heads_dim) for x in rotation(tokens, rotary_dim, q))
    if interleaved:
        cos, sin = (x[..., : rotary_dim // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat((rotary * cos + turned(rotary, interleaved) * sin, rest), dim=-1)

    return rotated(q), rotated(k)


def our_rope(
    q: Tensor, k: Tensor, *, share: float = 1.0, interleaved: bool = False, heads_dim: int = 1, inplace: bool = False
) -> Any:
    cos, sin = rotation(q.shape[3 - heads_dim], int(share * q.shape[-1]), q)
    if inplace:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    return lc.liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=heads_dim, interleaved=interleaved, inplace=inplace)


def labels(logits: Tensor) -> Tensor:
    target = torch.arange(logits[..., 0].numel(), device=logits.device) * 7 % logits.shape[-1]
    target[1::3] = -100
    return target.view(logits.shape[:-1])


def class_weights(logits: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, logits.shape[-1], device=logits.device).bfloat16().to(logits.dtype)


def eager_cross_entropy(
    logits: Tensor, *, reduction: str, smoothing: float = 0.0, square: float = 0.0, softcap: float | None = None,
    weighted: bool = False,
) -> Tensor:  # fmt: skip
    z, target = wide(logits).flatten(0, -2), labels(logits).flatten()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    weight = wide(class_weights(logits)) if weighted else None
    loss = F.cross_entropy(z, target, weight, reduction=reduction, label_smoothing=smoothing)
    valid = target != -100
    z_loss = square * z.logsumexp(-1).square() * valid
    if reduction == "none":
        return (loss + z_loss).view(logits.shape[:-1])
    return loss + z_loss.sum() / (valid.sum() if reduction == "mean" else 1)


def our_cross_entropy(
    logits: Tensor, *, reduction: Any, smoothing: float = 0.0, square: float = 0.0, softcap: float | None = None,
    weighted: bool = False,
) -> Tensor:  # fmt: skip
    return lc.liger_cross_entropy(
        logits,
        labels(logits),
        class_weights(logits) if weighted else None,
        reduction=reduction,
        label_smoothing=smoothing,
        lse_square_scale=square,
        softcap=softcap,
    )


def log_teacher(x: Tensor) -> Tensor:
    log_p = torch.sin(torch.arange(x.numel(), device=x.device)).view(x.shape).log_softmax(-1)
    return (log_p * 16).round().div(16).to(x.dtype)


def teacher(x: Tensor) -> Tensor:
    return log_teacher(x.float()).exp().bfloat16().to(x.dtype)


def eager_kl(x: Tensor, *, reduction: str, log_target: bool) -> Tensor:
    t = wide((log_teacher if log_target else teacher)(x))
    scale = x.shape[1] if reduction == "mean" else 1  # "mean" warns in torch
    reduction = "batchmean" if reduction == "mean" else reduction
    return F.kl_div(wide(x), t, reduction=reduction, log_target=log_target) / scale


def our_kl(x: Tensor, *, reduction: Any, log_target: bool) -> Tensor:
    target = (log_teacher if log_target else teacher)(x)
    return lc.liger_kl_div(x, target, reduction=reduction, log_target=log_target)


def eager_jsd(x: Tensor, *, beta: float) -> Tensor:
    log_q, log_p = wide(x), wide(log_teacher(x))
    q, p = log_q.exp(), log_p.exp()
    if beta in (0.0, 1.0):
        rows = (p * (log_p - log_q) if beta == 0.0 else q * (log_q - log_p)).sum(1)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        rows = (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(1)
    return rows[labels(x) != -100].mean()


def eager_tvd(x: Tensor, *, reduction: str) -> Tensor:
    terms = 0.5 * (wide(x) - wide(teacher(x))).abs() * (labels(x) != -100)[:, None]
    rows = (labels(x) != -100).sum()
    return {"none": terms, "batchmean": terms.sum() / rows, "mean": terms.mean() * x.shape[0] / rows}[reduction]


def teacher_logits(x: Tensor) -> Tensor:
    return (3 * torch.cos(torch.arange(x.numel(), device=x.device))).view(x.shape).bfloat16().to(x.dtype)


def eager_with_logits(
    x: Tensor, *, kind: str, beta: float = 0.0, temperature: float = 1.0, reduction: str = "batchmean"
) -> Tensor:
    log_p, log_q = ((wide(z) / temperature).log_softmax(-1) for z in (x, teacher_logits(x)))
    p, q = log_p.exp(), log_q.exp()
    if kind == "tvd":
        rows = 0.5 * (p - q).abs().sum(-1)
    elif kind == "kl":
        rows = (q * (log_q - log_p)).sum(-1)
    elif kind == "reverse_kl":
        rows = (p * (log_p - log_q)).sum(-1)
    else:
        log_m = (beta * q + (1 - beta) * p).log()
        rows = (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)
    valid = labels(x) != -100
    total = (rows * valid).sum()
    return {
        "none": rows * valid,
        "sum": total,
        "batchmean": total / valid.sum().clamp(min=1),
        "mean": total / valid.sum().clamp(min=1) / x.shape[-1],
    }[reduction]


def our_with_logits(x: Tensor, *, kind: str, inplace: bool = False, **options: Any) -> Tensor:
    function = {
        "kl": lc.liger_kl_div_with_logits,
        "reverse_kl": partial(lc.liger_kl_div_with_logits, reverse=True),
        "jsd": lc.liger_jsd_with_logits,
        "tvd": lc.liger_tvd_with_logits,
    }[kind]
    return function(x, teacher_logits(x), labels(x), inplace=inplace, **options)


@dataclass(frozen=True)
class Op:
    """One variant of one operation: ours and eager code, both of tensors of the shapes that `make` gives."""

    id: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    make: Callable[[tuple[int, ...]], tuple[tuple[int, ...], ...]]
    shapes: tuple[tuple[int, ...], ...]
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.clone

    def sample(self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sampled = (self.prepare(torch.randn(s, generator=generator)) for s in self.make(shape))
        return [x.to(device, dtype).requires_grad_() for x in sampled]


NORM_SHAPES = (
    (3, 5, 64),  # several rows a program
    (2, 896),  # no power of two
    (19, 1500),  # one row a program, several programs' worth of rows for each
    (5, 3),
    (33,),
)
HALVES = ((3, 5, 64), (2, 2049), (1, 1), (7, 130))
PACKED = ((3, 5, 64), (2, 4098), (1, 2), (7, 130))
HEADS = ((2, 3, 5, 16), (1, 4, 3, 24), (2, 1, 1, 64))  # batch, query heads, tokens, head size
ROWS = ((5, 131), (3, 2500))
LOGITS = ((2, 5, 131), (4, 5000))
PAIRS = ((2, 3, 131), (3, 2500))


def norm(id: str, offset: float = 0.0, casting: str = "llama", weight: bool = True, residual: bool = False) -> Op:
    def shapes(s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (s, s[-1:], s) if residual else (s, s[-1:]) if weight else (s,)

    eager = partial(eager_rms_norm, offset=offset, cast_first=casting == "llama")
    return Op(f"rms_norm-{id}", partial(our_rms_norm, offset=offset, casting=casting), eager, shapes, NORM_SHAPES)


def gated(id: str, ours: Callable[..., Tensor], activation: Callable[[Tensor], Tensor], packed: bool = False) -> Op:
    eager = partial(eager_glu, activation=activation)
    return Op(id, ours, eager, lambda s: (s,) if packed else (s, s), PACKED if packed else HALVES)


def rotary(id: str, **options: Any) -> Op:
    def shapes(s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        batch, heads, tokens, size = s
        if options.get("heads_dim") == 2:
            return (batch, tokens, heads, size), (batch, tokens, 1, size)
        return s, (batch, 1, tokens, size)

    eager = partial(eager_rope, **{name: value for name, value in options.items() if name != "inplace"})
    return Op(f"rope-{id}", partial(our_rope, **options), eager, shapes, HEADS)


def cross_entropy(id: str, **options: Any) -> Op:
    ours, eager = partial(our_cross_entropy, **options), partial(eager_cross_entropy, **options)
    return Op(f"cross_entropy-{id}", ours, eager, lambda s: (s,), LOGITS, lambda x: 3 * x)


def with_logits(id: str, **options: Any) -> Op:
    ours, eager = partial(our_with_logits, **options), partial(eager_with_logits, **options)
    return Op(f"with_logits-{id}", ours, eager, lambda s: (s,), PAIRS, lambda x: 3 * x)


def pointwise(id: str, ours: Callable[..., Tensor], eager: Callable[..., Tensor], probs: bool = False) -> Op:
    return Op(id, ours, eager, lambda s: (s,), ROWS, lambda x: x.softmax(-1) if probs else x.log_softmax(-1))


def our_jsd(x: Tensor, beta: float) -> Tensor:
    return lc.liger_jsd(x, log_teacher(x), labels(x), beta=beta)


def our_tvd(x: Tensor, reduction: Any) -> Tensor:
    return lc.liger_tvd(x, teacher(x), labels(x), reduction=reduction)


def kl(reduction: str, log_target: bool) -> Op:
    options = {"reduction": reduction, "log_target": log_target}
    id = f"kl-{reduction}-log" if log_target else f"kl-{reduction}"
    return pointwise(id, partial(our_kl, **options), partial(eager_kl, **options))


gelu_tanh = partial(F.gelu, approximate="tanh")
geglu_erf = partial(lc.liger_geglu, approximate="none")
OPS = [
    norm("llama"),
    norm("gemma", offset=1.0, casting="gemma"),
    norm("olmo2", casting="olmo2"),
    norm("no_weight", weight=False),
    norm("residual", residual=True),
    Op(
        "layer_norm",
        lc.liger_layer_norm,
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        lambda s: (s, s[-1:], s[-1:]),
        NORM_SHAPES,
    ),
    Op(
        "layer_norm-no_bias",
        lc.liger_layer_norm,
        lambda x, w: F.layer_norm(x, x.shape[-1:], w),
        lambda s: (s, s[-1:]),
        ((3, 5, 64),),
    ),
    gated("swiglu", lc.liger_swiglu, F.silu),
    gated("swiglu-packed", lc.liger_swiglu, F.silu, packed=True),
    gated("geglu-tanh", lc.liger_geglu, gelu_tanh),
    gated("geglu-erf", geglu_erf, F.gelu),
    gated("geglu-packed", lc.liger_geglu, gelu_tanh, packed=True),
    rotary("halves"),
    rotary("partial", share=0.5),
    rotary("interleaved", share=0.5, interleaved=True),
    rotary("interleaved-whole", interleaved=True),
    rotary("heads_last", heads_dim=2),
    rotary("inplace", inplace=True),
    rotary("inplace-interleaved", share=0.5, interleaved=True, heads_dim=2, inplace=True),
    cross_entropy("mean", reduction="mean"),
    cross_entropy("sum-weighted", reduction="sum", weighted=True),
    cross_entropy("everything", reduction="mean", smoothing=0.1, square=1e-2, softcap=5.0, weighted=True),
    cross_entropy("none", reduction="none", smoothing=0.2),
    kl("batchmean", log_target=False),
    kl("mean", log_target=True),
    kl("none", log_target=True),
    *(pointwise(f"jsd-{beta}", partial(our_jsd, beta=beta), partial(eager_jsd, beta=beta)) for beta in (0.0, 0.1, 1.0)),
    *(
        pointwise(
            f"tvd-{reduction}", partial(our_tvd, reduction=reduction), partial(eager_tvd, reduction=reduction), True
        )
        for reduction in ("batchmean", "mean", "none")
    ),
    with_logits("kl", kind="kl"),
    with_logits("kl-reverse", kind="reverse_kl", temperature=2.0, reduction="sum"),
    with_logits("jsd", kind="jsd", beta=0.5, temperature=2.0),
    with_logits("jsd-0.1", kind="jsd", beta=0.1, reduction="mean"),
    with_logits("tvd", kind="tvd", reduction="none"),
]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.id)
# One for each operator: what is said of the machinery around a kernel holds for all that it computes.
ONE_EACH = [op for op in OPS if op.id in (
    "rms_norm-residual", "layer_norm", "swiglu", "swiglu-packed", "rope-partial", "cross_entropy-everything", "jsd-0.1",
    "with_logits-jsd",
)]  # fmt: skip
one_each = pytest.mark.parametrize("op", ONE_EACH, ids=lambda op: op.id)


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y) for y in outputs]


def run(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor] | None = None) -> list[Tensor]:
    """The outputs, and after them the gradients of the inputs that want one."""
    outputs = outputs_of(function(*inputs))
    grads = upstream(outputs) if grads is None else grads
    wanted = [x for x in inputs if x.requires_grad]
    # In place, what is made of a frozen input has no gradient either.
    paired = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad([y for y, _ in paired], wanted, [g for _, g in paired])
    return [*(y.detach() for y in outputs), *gradients]


def error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


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


@pytest.mark.triton
@one_each
def test_path(op: Op, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the device is there for are the ones that ran."""
    other = "torch" if device == "cuda" or INTERPRETED else "triton"

    def refuse(*_: Any) -> None:
        raise AssertionError(f"ran the {other} path")

    # Functions have the names of the last two.
    files = ("logits_stats", "logits_grad", "divergence_sums", "divergence", "divergence_grad")
    shared = [importlib.import_module(f"liger_chunked.kernels.{name}") for name in files]
    pattern = rf"_(forward|backward|rope|sums?|second_sweep|grad|logits_\w+|divergence_grad)_{other}_?"
    for module in (glu, layer_norm, pointwise_divergence, rms_norm, rope, *shared):
        hosts = [name for name in vars(module) if re.fullmatch(pattern, name)]
        assert hosts
        for name in hosts:
            monkeypatch.setattr(module, name, refuse)
    run(op.ours, op.sample(op.shapes[0], torch.float32, device))


@every_op
def test_gradcheck(op: Op) -> None:
    shape = min(op.shapes, key=lambda shape: torch.Size(shape).numel() if shape[-1] > 2 else 1 << 30)
    inputs = [x.detach().double().requires_grad_() for x in op.sample(shape, torch.float64)]
    assert torch.autograd.gradcheck(op.ours, inputs, fast_mode=True)


def strided(x: Tensor) -> Tensor:
    """The same numbers, with gaps between the rows."""
    gaps = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    gaps[..., : x.shape[-1]] = x.detach()
    return gaps[..., : x.shape[-1]].requires_grad_(x.requires_grad)


def scattered(x: Tensor) -> Tensor:
    """The same numbers, with gaps between the columns."""
    gaps = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    gaps[..., 0] = x.detach()
    return gaps[..., 0].requires_grad_(x.requires_grad)


def permuted(x: Tensor) -> Tensor:
    """The same numbers, with the first dimension as the innermost in memory."""
    return x.detach().movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_(x.requires_grad)


@pytest.mark.triton
@pytest.mark.parametrize("layout", [strided, scattered, permuted])
@every_op
def test_layouts(op: Op, layout: Callable[[Tensor], Tensor], device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    expected = run(op.ours, inputs)
    views = [layout(x) for x in inputs]
    grads = [layout(g) if g.ndim > 1 else g for g in upstream(outputs_of(op.ours(*inputs)))]
    for value, same in zip(run(op.ours, views, grads), expected, strict=True):
        # float32: another layout is another order of the torch path's sums.
        torch.testing.assert_close(value, same, rtol=1e-5, atol=1e-6)


@pytest.mark.triton
@pytest.mark.parametrize("by_token", [False, True])
def test_rope_keeps_the_layout(by_token: bool, device: str) -> None:
    def heads(n: int, by_token: bool) -> Tensor:
        shape = (2, 5, n, 8) if by_token else (2, n, 5, 8)
        x = torch.randn(shape, device=device)
        return x.transpose(1, 2) if by_token else x

    inputs = [heads(n, by_token).requires_grad_() for n in (4, 2)]
    outputs = our_rope(*inputs)
    # Attention may hand its gradients back in another layout.
    gradients = torch.autograd.grad(outputs, inputs, [heads(n, not by_token) for n in (4, 2)])
    for x, y, gradient in zip(inputs, outputs, gradients, strict=True):
        assert x.stride() == y.stride() == gradient.stride()


@pytest.mark.triton
def test_rope_of_few_columns_of_a_wide_head(device: str) -> None:
    """Tiles are as large as what passes lets them be."""
    heads = torch.randn(1, 2, 3, 1024, device=device)
    ours, eager = (op(heads, heads, share=2 / 1024)[0] for op in (our_rope, eager_rope))
    torch.testing.assert_close(ours, eager)


@pytest.mark.triton
@one_each
def test_upstream_of_stride_zero(op: Op, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    ones = [torch.ones_like(y) for y in outputs_of(op.ours(*inputs))]
    expanded = [torch.ones((), device=device).expand(y.shape) for y in ones]
    for value, same in zip(run(op.ours, inputs, expanded), run(op.ours, inputs, ones), strict=True):
        assert torch.equal(value, same)


@pytest.mark.triton
@every_op
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
            # A few units in the last place: who computes less may add up in another order.
            torch.testing.assert_close(value, same, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        assert not any(y.requires_grad for y in outputs_of(op.ours(*inputs)))


@pytest.mark.triton
def test_frozen_weight_computes_no_gradient(device: str) -> None:
    x, weight, rstd = torch.randn(4, 64, device=device), torch.ones(64, device=device), torch.ones(4, device=device)
    assert rms_norm._backward(x, None, x, weight, rstd, 0.0, True, False)[1] is None
    assert rms_norm._backward(x, None, x, weight, rstd, 0.0, False, True)[0] is None
    stats = torch.stack((rstd, rstd))
    assert layer_norm._backward(x, x, weight, stats, True, None, None)[1:] == (None, None)
    assert layer_norm._backward(x, x, weight, stats, False, None, torch.float32)[:2] == (None, None)


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


@one_each
def test_second_derivative_is_refused(op: Op) -> None:
    inputs = op.sample(op.shapes[0], torch.float32)
    outputs = outputs_of(op.ours(*inputs))
    grads = [g.requires_grad_() for g in upstream(outputs)]
    gradients = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(g.sum() for g in gradients).backward()


def dynamo_warns(test: Callable[..., None]) -> Callable[..., None]:
    """Let the compiler's own warnings pass."""
    for message in (
        ".*should not be instantiated:DeprecationWarning",  # it makes instances of the Functions that it traces
        ".*torch.jit.script_method.*:DeprecationWarning",  # on import
        ".*TensorFloat32 tensor cores.*:UserWarning",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test


@dynamo_warns
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@one_each
def test_compile(op: Op, backend: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(op.ours, fullgraph=True, backend=backend)
    for shape in op.shapes[:2]:
        inputs = op.sample(shape, torch.float32, device)
        for value, same in zip(run(compiled, inputs), run(op.ours, inputs), strict=True):
            assert torch.equal(value, same)
        if len(inputs) > 1:
            inputs[1].requires_grad_(False)
            for value, same in zip(run(compiled, inputs), run(op.ours, inputs), strict=True):
                assert torch.equal(value, same)


@dynamo_warns
@pytest.mark.parametrize("reentrant", [False, True])
@one_each
def test_compile_under_autocast_and_checkpointing(op: Op, reentrant: bool, device: str) -> None:
    torch.compiler.reset()
    again = partial(checkpoint, op.ours, use_reentrant=reentrant)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    inputs = op.sample(op.shapes[0], torch.float32, device)
    expected = run(op.ours, inputs)
    with torch.autocast(device, torch.bfloat16):
        outputs = outputs_of(compiled(*inputs))
        torch.autograd.backward(outputs, upstream(outputs))
    for value, same in zip((*outputs, *(x.grad for x in inputs)), expected, strict=True):
        assert torch.equal(value, same)


class Block(torch.nn.Module):
    """All of them in a row."""

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


@dynamo_warns
def test_compile_a_model(device: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, backend="inductor")
    x = torch.randn(2, 5, 16, device=device)
    target = labels(x)
    gradients = []
    for model in (block, compiled):
        block.zero_grad()
        loss = model(x, target)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in block.parameters())])
    for value, same in zip(*gradients, strict=True):
        torch.testing.assert_close(value, same)


@dynamo_warns
def test_compile_compiles_twice_for_any_length(device: str) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for tokens in (5, 7, 12, 31):
        x = torch.randn(2, tokens, 16, device=device)
        torch.testing.assert_close(compiled(x, labels(x)), block(x, labels(x)))
    assert counter.frame_count <= 2  # of the first length, and of all


@pytest.mark.parametrize("reentrant", [False, True])
@one_each
def test_activation_checkpointing(op: Op, reentrant: bool, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    again = partial(checkpoint, op.ours, use_reentrant=reentrant)
    outputs = outputs_of(again(*inputs))
    torch.autograd.backward(outputs, upstream(outputs))
    for x, same in zip(inputs, run(op.ours, inputs)[-len(inputs) :], strict=True):
        assert torch.equal(x.grad, same)


@every_op
def test_autocast_changes_nothing(op: Op, device: str) -> None:
    inputs = op.sample(op.shapes[0], torch.float32, device)
    expected = run(op.ours, inputs)
    with torch.autocast(device, torch.bfloat16):
        values = run(op.ours, inputs)
    for value, same in zip(values, expected, strict=True):
        assert torch.equal(value, same)


@pytest.mark.triton
@every_op
def test_no_rows(op: Op, device: str) -> None:
    shape = (0, *op.shapes[0][1:])
    inputs = op.sample(shape, torch.float32, device)
    values = run(op.ours, inputs)
    for x, gradient in zip(inputs, values[-len(inputs) :], strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))
    assert all(y.isfinite().all() for y in values)


@pytest.mark.triton
def test_wide_rows_take_the_torch_path(device: str) -> None:
    x = torch.randn(2, MAX_ROW + 1, device=device)
    weight = torch.randn(MAX_ROW + 1, device=device)
    torch.testing.assert_close(lc.liger_rms_norm(x, weight), F.rms_norm(x, x.shape[-1:], weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "shape",
    [(70_001, 64), (140_001, 16_384)],  # past the 65,535 of a grid's y; past 2 ** 31 elements
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
        lambda x: lc.liger_jsd_with_logits(x, x.detach().flip(1), reduction="none"),
    ]
    for function in rows:
        x.requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        end = x.detach()[tail].requires_grad_()
        y_end = function(end)
        (gradient_end,) = torch.autograd.grad(y_end, end, torch.ones_like(y_end))
        assert torch.equal(y[tail], y_end) and torch.equal(gradient[tail], gradient_end)


# How the models of transformers have it.


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
    else:  # another order of the sum: in float32 up to a unit in each step; the interpreter truncates twice
        ulps = 4 if dtype == torch.float32 else 2 if INTERPRETED else 1
        torch.testing.assert_close(value, same, rtol=ulps * torch.finfo(dtype).eps, atol=0)


def transformers_object(name: str) -> Any:
    model, _, attribute = name.partition(".")
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, attribute)


def test_rms_norm_with_a_float32_weight_promotes_as_llama_does() -> None:
    theirs, ours = transformers_object("llama.LlamaRMSNorm")(64), lc.LigerRMSNorm(64)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert ours(x).dtype == theirs(x).dtype == torch.float32
    assert torch.equal(ours(x), theirs(x))
    assert lc.LigerRMSNorm(64, offset=1.0, casting="gemma")(x).dtype == torch.bfloat16


@pytest.mark.triton
@pytest.mark.parametrize(("model", "share"), [("llama", 1.0), ("phi3", 0.75), ("glm4", 0.5), ("olmo2", 1.0)])
def test_rotary_embedding_of_transformers(model: str, share: float, device: str) -> None:
    theirs = transformers_object(f"{model}.apply_rotary_pos_emb")
    # As attention makes them: views of projections, heads after tokens in memory.
    q, k = (torch.randn(2, 5, heads, 32, device=device).transpose(1, 2) for heads in (6, 2))
    cos, sin = (x.expand(2, -1, -1) for x in rotation(5, int(32 * share), q))
    ours = lc.liger_rotary_pos_emb(q, k, cos, sin, interleaved=model == "glm4")
    for value, same, x in zip(ours, theirs(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(value, same)
        assert value.stride() == x.stride()


def test_rotary_embedding_by_position_ids() -> None:
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    cos, sin = (x[0] for x in rotation(9, 16, q))
    ids = torch.tensor([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]])
    by_ids = lc.liger_rotary_pos_emb(q, k, cos, sin, ids)
    gathered = lc.liger_rotary_pos_emb(q, k, cos[ids], sin[ids])
    assert all(torch.equal(a, b) for a, b in zip(by_ids, gathered, strict=True))


def test_rotary_embedding_keeps_the_dtype_under_float32_angles() -> None:
    q, k = torch.randn(1, 2, 5, 16).bfloat16(), torch.randn(1, 2, 5, 16).bfloat16()
    cos, sin = rotation(5, 16, q.float())
    value, _ = lc.liger_rotary_pos_emb(q, k, cos, sin)
    same, _ = transformers_object("olmo2.apply_rotary_pos_emb")(q, k, cos, sin)
    assert value.dtype == torch.bfloat16
    assert torch.equal(value, same)


def projections(x: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Four heads of queries and two of keys, of 8: views, as attention has them, or not."""
    if kind == "packed":
        qkv = x @ weight
        q, k = qkv[..., :32], qkv[..., 32:]
    elif kind == "split":
        q, k = (x @ weight).split([32, 16], dim=-1)
    else:
        q, k = x @ weight[:, :32], x @ weight[:, 32:]
    q, k = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k))
    return (q.clone(), k.clone()) if kind == "no view" else (q, k)


@pytest.mark.triton
@pytest.mark.parametrize(("share", "interleaved"), [(1.0, False), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("kind", ["no view", "of one each", "packed"])
def test_rotary_embedding_in_place(kind: str, share: float, interleaved: bool, device: str) -> None:
    x, weight = torch.randn(2, 5, 6, device=device), torch.randn(6, 48, device=device, requires_grad=True)
    cos, sin = rotation(5, int(8 * share), x)
    found = []
    for inplace in (False, True):
        q, k = projections(x, weight, kind)
        versions = q._version, k._version
        rotated = lc.liger_rotary_pos_emb(q, k, cos, sin, interleaved=interleaved, inplace=inplace)
        for before, after, version in zip((q, k), rotated, versions, strict=True):
            assert (after.data_ptr() == before.data_ptr()) == inplace == (before._version > version)
            assert not inplace or torch.equal(before, after)
        upstreams = upstream(rotated)
        copies = [g.clone() for g in upstreams]
        found.append([*rotated, *torch.autograd.grad(rotated, weight, upstreams)])
        assert all(torch.equal(g, copy) for g, copy in zip(upstreams, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.triton
def test_rotary_embedding_in_place_without_gradient(device: str) -> None:
    x, weight = torch.randn(2, 5, 6, device=device), torch.randn(6, 48, device=device, requires_grad=True)
    with torch.no_grad():
        q, k = projections(x, weight, "split")
        expected = our_rope(q, k)
        rotated = lc.liger_rotary_pos_emb(q, k, *rotation(5, 8, x), inplace=True)
    for y, before, same in zip(rotated, (q, k), expected, strict=True):
        assert torch.equal(y, same) and torch.equal(before, same) and not y.requires_grad


def test_rotary_embedding_in_place_refuses_before_it_writes() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    angles = rotation(3, 8, q)
    parameter = torch.randn(1, 2, 3, 8, requires_grad=True)
    split = projections(torch.randn(1, 3, 6, requires_grad=True), torch.randn(6, 48), "split")
    for kind, message, given in (
        (ValueError, "q is a leaf that requires a gradient", (parameter, k)),
        (ValueError, "k is a leaf that requires a gradient, or a view", (q, parameter[:, :1])),
        (ValueError, "q must have memory of its own for each element", (q[:, :1].expand(1, 4, 3, 8), k)),
        (ValueError, "k must have memory of its own for each element", (q, torch.randn(1, 1, 8, 3).mT)),
        (RuntimeError, "function that returns multiple views", split),
    ):
        copies = [x.detach().clone() for x in given]
        with pytest.raises(kind, match=message):
            lc.liger_rotary_pos_emb(*given, *angles, inplace=True)
        assert all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))


@dynamo_warns
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("kind", ["no view", "of one each", "packed"])
def test_compile_rotary_embedding_in_place(kind: str, with_gradient: bool, device: str) -> None:
    torch.compiler.reset()
    x, weight = torch.randn(2, 5, 6, device=device), torch.randn(6, 48, device=device, requires_grad=with_gradient)
    cos, sin = rotation(5, 8, x)

    def attention(weight: Tensor) -> tuple[Tensor, ...]:
        q, k = projections(x, weight, kind)
        rotated = lc.liger_rotary_pos_emb(q, k, cos, sin, inplace=True)
        return *rotated, q * 1, k * 1  # the given ones hold the results too

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    found = run(compiled, [weight]) if with_gradient else compiled(weight)
    expected = run(attention, [weight]) if with_gradient else attention(weight)
    for value, same in zip(found, expected, strict=True):
        torch.testing.assert_close(value, same)


@dynamo_warns
def test_compile_rotary_embedding_in_place_of_what_is_given(device: str) -> None:
    torch.compiler.reset()
    q, k = torch.randn(1, 2, 3, 8, device=device), torch.randn(1, 1, 3, 8, device=device)
    angles = rotation(3, 8, q)
    expected = lc.liger_rotary_pos_emb(q, k, *angles)
    compiled = torch.compile(partial(lc.liger_rotary_pos_emb, inplace=True), fullgraph=True, backend="aot_eager")
    for y, before, same in zip(compiled(q, k, *angles), (q, k), expected, strict=True):
        assert torch.equal(y, same) and torch.equal(before, same)


@pytest.mark.parametrize(
    ("name", "ours", "activation"),
    [("llama.LlamaMLP", lc.LigerSwiGLUMLP, "silu"), ("gemma.GemmaMLP", lc.LigerGEGLUMLP, "gelu_pytorch_tanh")],
)
def test_mlp_of_transformers(name: str, ours: Any, activation: str) -> None:
    config = SimpleNamespace(hidden_size=16, intermediate_size=40, hidden_act=activation, mlp_bias=False)
    theirs, mlp = transformers_object(name)(config), ours(config)
    mlp.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(mlp(x), theirs(x))


# Corners of single operations.


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


@pytest.mark.triton
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_nothing(reduction: Any, device: str) -> None:
    logits = torch.randn(4, 33, device=device, requires_grad=True)
    target = torch.full((4,), 7, device=device)
    loss = lc.liger_cross_entropy(logits, target, ignore_index=7, reduction=reduction, label_smoothing=0.1)
    loss.sum().backward()
    assert not loss.any() and not logits.grad.any()


@pytest.mark.triton
def test_divergences_of_events_without_probability(device: str) -> None:
    log_q = torch.randn(3, 40, device=device).log_softmax(-1)
    log_p = log_q.clone()
    log_p[:, 5:] = -torch.inf
    log_p = log_p.log_softmax(-1)
    for function, student, teacher in (
        (partial(lc.liger_kl_div, log_target=True), log_q, log_p),
        (lc.liger_kl_div, log_q, log_p.exp()),
        (partial(lc.liger_kl_div, log_target=True, reduction="none"), log_q, log_p),
        (partial(lc.liger_jsd, beta=0.0), log_q, log_p),
        (partial(lc.liger_jsd, beta=0.3), log_q, log_p),
        (partial(lc.liger_jsd, beta=0.3), log_p, log_q),
        (partial(lc.liger_jsd, beta=1.0), log_p, log_q),
    ):
        x = student.clone().requires_grad_()
        loss = function(x, teacher)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all() and gradient.isfinite().all()


WITH_LOGITS: dict[str, Callable[..., Tensor]] = {
    "kl": lc.liger_kl_div_with_logits,
    "kl-reverse": partial(lc.liger_kl_div_with_logits, reverse=True),
    "jsd": partial(lc.liger_jsd_with_logits, beta=0.3),
    "tvd": lc.liger_tvd_with_logits,
}
each_with_logits = pytest.mark.parametrize("function", WITH_LOGITS.values(), ids=WITH_LOGITS)


@pytest.mark.triton
@each_with_logits
def test_divergence_with_logits_in_place(function: Callable[..., Tensor], device: str) -> None:
    x = torch.randn(2, 3, 33, device=device, requires_grad=True)
    t, shift_labels = teacher_logits(x), labels(x)
    logits = x * 1.0
    loss = function(logits, t, shift_labels, inplace=True)
    expected = torch.autograd.grad(function(x, t, shift_labels), x)[0]
    gradient = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(gradient, expected) and torch.equal(logits, gradient)
    assert torch.equal(t, teacher_logits(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


@pytest.mark.triton
@each_with_logits
def test_divergence_with_logits_of_nothing(function: Callable[..., Tensor], device: str) -> None:
    """Ignored rows have neither value nor gradient, whatever is in them."""
    x, t = torch.randn(4, 33, device=device), torch.randn(4, 33, device=device)
    shift_labels = torch.tensor([3, 7, 7, 5], device=device)
    expected = function(x[::3], t[::3])
    x[1:3], t[1] = torch.tensor([torch.nan, -torch.inf], device=device)[:, None], torch.inf
    x.requires_grad_()
    for reduction in ("batchmean", "none"):
        loss = function(x, t, shift_labels, ignore_index=7, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert gradient.isfinite().all() and not gradient[1:3].any() and gradient[0].any() and gradient[3].any()
        torch.testing.assert_close(loss.sum() / (2 if reduction == "none" else 1), expected)
    nothing = function(x, t, torch.full_like(shift_labels, 7), ignore_index=7)
    (gradient,) = torch.autograd.grad(nothing, x)
    assert nothing == 0 and not gradient.any()


@pytest.mark.triton
@pytest.mark.parametrize("masked", ["both", "teacher", "student"])
@each_with_logits
def test_divergence_with_logits_of_minus_infinity(function: Callable[..., Tensor], masked: str, device: str) -> None:
    """Tokens that a model forbids: what eager code with `0 log 0 = 0` makes of them."""
    x, t = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device)
    for z in {"both": (x, t), "teacher": (t,), "student": (x,)}[masked]:
        z[:, 5:30] = -torch.inf
    x.requires_grad_()
    loss = function(x, t)
    if (function is WITH_LOGITS["kl"] and masked == "student") or (
        function is WITH_LOGITS["kl-reverse"] and masked == "teacher"
    ):
        assert loss == torch.inf
        return
    (gradient,) = torch.autograd.grad(loss, x)
    # The same of a student whose forbidden tokens have hardly any probability.
    near = x.detach().double().clamp(min=-80).requires_grad_()
    expected = function(near, t.double().clamp(min=-80 if masked != "teacher" else -torch.inf))
    # Sums of float32 against float64; a gradient is a difference of probabilities, and keeps fewer digits of them.
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, near)[0].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.triton
def test_divergence_with_logits_takes_a_teacher_of_another_dtype(device: str) -> None:
    x, t = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device).bfloat16()
    assert torch.equal(lc.liger_jsd_with_logits(x, t), lc.liger_jsd_with_logits(x, t.float()))


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (
            lc.LigerKLDIVWithLogitsLoss("sum", reverse=True, temperature=2.0),
            partial(our_with_logits, kind="reverse_kl"),
        ),
        (lc.LigerJSDWithLogits(0.3, reduction="sum", temperature=2.0), partial(our_with_logits, kind="jsd", beta=0.3)),
        (lc.LigerTVDWithLogitsLoss("sum", temperature=2.0), partial(our_with_logits, kind="tvd")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_divergence_with_logits_as_a_module(module: torch.nn.Module, function: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 33)
    value = module(x, teacher_logits(x), labels(x))
    assert torch.equal(value, function(x, reduction="sum", temperature=2.0))
    assert "reduction='sum'" in repr(module) and "temperature=2.0" in repr(module)


@pytest.mark.parametrize(
    "module", [rms_norm, layer_norm, glu, rope, pointwise_divergence, logits_divergence], ids=lambda m: m.__name__[22:]
)
def test_operators_keep_their_word(module: Any) -> None:
    """Schema, fake outputs and aliasing, as torch.library checks them."""
    x, w, row = torch.randn(3, 8), torch.randn(8), torch.rand(3)
    q, k, angle = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
    samples: dict[str, list[tuple[Any, ...]]] = {
        "rms_norm": [(x, w, None, 1e-6, 0.0, True), (x.t(), None, x.t(), 1e-6, 1.0, False)],
        "rms_norm_backward": [(x, None, x, w, row, 0.0, True, True), (x, x, x, None, row, 0.0, True, False)],
        "layer_norm": [(x, w, None, 1e-6)],
        "layer_norm_backward": [(x, x, w, torch.stack((row, row)), True, None, torch.bfloat16)],
        "glu": [(x, x, "silu"), (x, None, "gelu")],
        "glu_backward": [(x, x, x, "silu"), (x[:, :4], x, None, "gelu_tanh")],
        "rotary_pos_emb": [(q.transpose(1, 2).contiguous().transpose(1, 2), k, angle, angle, False, True, False)],
        "logits_divergence": [(x, x, "forward_kl", 0.0, 0.0, 0.0, 2.0), (x.t(), x.t(), "tvd", 0.0, 0.0, 0.0, 1.0)],
        "logits_divergence_backward": [
            (x, x, [row] * 8, row, "mixture", 0.3, 0.7, 0.3, 2.0, False),
            (x.t(), x.t(), [torch.rand(8)] * 7, torch.rand(8), "reverse_kl", 0.0, 0.0, 0.0, 1.0, False),
        ],
        "pointwise_divergence": [(x, x, "jsd", 0.3)],
        "pointwise_divergence_backward": [(x, x, row, "kl", 0.0)],
    }
    prefix = {"rope": "rotary_pos_emb"}.get(module.__name__.rpartition(".")[2], module.__name__.rpartition(".")[2])
    checked = [name for name in samples if name.startswith(prefix)]
    assert checked
    for name in checked:
        for arguments in samples[name]:
            operator = getattr(torch.ops.liger_chunked, name).default
            torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


X, W = torch.randn(2, 3, 8), torch.ones(8)
Q, K, ANGLE = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
Z, T = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
BAD_INPUT: list[tuple[str, type[Exception], str, Callable[[], object]]] = [
    ("norm-int", TypeError, "x must be a floating-point tensor, got", lambda: lc.liger_rms_norm(T, W)),
    ("norm-weight", ValueError, r"weight must be \(8,\)", lambda: lc.liger_rms_norm(X, W[:7])),
    ("norm-casting", ValueError, "casting must be one of", lambda: lc.liger_rms_norm(X, W, casting="bert")),
    ("norm-residual", ValueError, "residual must have the shape", lambda: lc.liger_rms_norm(X, W, residual=X[:1])),
    ("norm-residual-dtype", TypeError, "dtype of x", lambda: lc.liger_rms_norm(X, W, residual=X.half())),
    ("layer_norm-bias", ValueError, r"bias must be \(8,\)", lambda: lc.liger_layer_norm(X, W, W[:1])),
    ("glu-shape", ValueError, "up must have the shape", lambda: lc.liger_swiglu(X, X[:1])),
    ("glu-dtype", TypeError, "up must be a tensor of the dtype", lambda: lc.liger_swiglu(X, X.half())),
    ("glu-odd", ValueError, "must be even", lambda: lc.liger_swiglu(X[..., :7])),
    ("glu-approximate", ValueError, "approximate must be one of", lambda: lc.liger_geglu(X, X, "erf")),
    ("rope-heads", ValueError, "four dimensions", lambda: lc.liger_rotary_pos_emb(Q[0], K, ANGLE, ANGLE)),
    ("rope-device", ValueError, "agree on dtype, dev", lambda: lc.liger_rotary_pos_emb(Q, K.to("meta"), *[ANGLE] * 2)),
    ("rope-tokens", ValueError, "cos must be", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE[:, :2], ANGLE)),
    ("rope-sin", ValueError, "sin must be", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE, ANGLE[..., :4])),
    ("rope-dim", ValueError, "unsqueeze_dim must be", lambda: lc.liger_rotary_pos_emb(Q, K, ANGLE, ANGLE, None, 3)),
    ("ce-target", ValueError, r"target must be in \[0, 8\)", lambda: lc.liger_cross_entropy(Z, T + 8)),
    ("ce-float", TypeError, "target must be a tensor of class", lambda: lc.liger_cross_entropy(Z, T.float())),
    ("ce-shape", ValueError, r"target must be \(3,\)", lambda: lc.liger_cross_entropy(Z, T[:2])),
    ("ce-reduction", ValueError, "reduction must be one of", lambda: lc.liger_cross_entropy(Z, T, reduction="avg")),
    ("ce-smoothing", ValueError, "label_smoothing must be", lambda: lc.liger_cross_entropy(Z, T, label_smoothing=2.0)),
    ("ce-softcap", ValueError, "softcap must be", lambda: lc.liger_cross_entropy(Z, T, softcap=-1.0)),
    ("kl-shape", ValueError, "target must have the shape", lambda: lc.liger_kl_div(Z, Z[:2])),
    ("kl-ndim", ValueError, r"input must be \(N, V\)", lambda: lc.liger_kl_div(X, X)),
    ("jsd-beta", ValueError, r"beta must be in \[0, 1\]", lambda: lc.liger_jsd(Z, Z, beta=1.5)),
    ("jsd-labels", ValueError, "shift_labels must be", lambda: lc.liger_jsd(Z, Z, T[:2])),
    ("jsd-labels-device", ValueError, "on cpu, one for each row of log_q", lambda: lc.liger_jsd(Z, Z, T.to("meta"))),
    ("tvd-grad", ValueError, "q gets no gradient", lambda: lc.liger_tvd(Z, Z.clone().requires_grad_())),
    ("logits-shape", ValueError, "teacher_logits must have the shape", lambda: lc.liger_tvd_with_logits(Z, Z[:, 1:])),
    ("logits-int", TypeError, "teacher_logits must be a floating", lambda: lc.liger_jsd_with_logits(Z, T)),
    ("logits-grad", ValueError, "get no grad", lambda: lc.liger_jsd_with_logits(Z, Z.clone().requires_grad_())),
    ("logits-labels", ValueError, r"shift_labels must be \(3,\)", lambda: lc.liger_jsd_with_logits(Z, Z, T[:2])),
    ("logits-device", ValueError, "on cpu, one for each", lambda: lc.liger_jsd_with_logits(Z, Z, T.to("meta"))),
    ("logits-beta", ValueError, r"beta must be in \[0, 1\]", lambda: lc.liger_jsd_with_logits(Z, Z, beta=-1)),
    ("logits-reduction", ValueError, "reduction must", lambda: lc.liger_kl_div_with_logits(Z, Z, reduction="avg")),
    ("logits-temp", ValueError, "temperature must", lambda: lc.liger_kl_div_with_logits(Z, Z, temperature=0.0)),
    ("swiglu-act", ValueError, "hidden_act must be", lambda: lc.LigerSwiGLUMLP(SimpleNamespace(hidden_act="gelu"))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "match", "call"), [row[1:] for row in BAD_INPUT], ids=[row[0] for row in BAD_INPUT])
def test_bad_input(kind: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=match):
        call()
