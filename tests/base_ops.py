"""Table of the base kernels: each operation, equivalent eager code, and inputs for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import exhaustive
from torch import Tensor

import liger_chunked as lc
from liger_chunked.kernels.backend import INTERPRETED

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# Rounding the exact result costs at most eps / sqrt(12) in the norm. Triton's interpreter truncates, which doubles the
# error, and doubles it again if an intermediate is rounded too. float32 sums have another order.
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


def eager_gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, activation: str = "silu", casting: str = "llama",
    gate_first: bool = False, groups: int = 1,
) -> Tensor:  # fmt: skip
    y, activated = wide(x), getattr(F, activation)(wide(gate))
    y = (y * activated if gate_first else y).unflatten(-1, (groups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)
    y = y.to(x.dtype) if casting == "llama" else y
    y = y if weight is None else weight * y
    return (y if gate_first else y * activated).to(x.dtype)


def our_gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    return lc.liger_rms_norm_gated(x, gate, weight, 1e-6, **options)


def eager_glu(gate: Tensor, up: Tensor | None = None, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return activation(gate) * up


def eager_clamped(
    gate: Tensor, up: Tensor | None = None, *, alpha: float = 1.0, limit: float | None = None, offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    if up is None:
        gate, up = (gate[..., ::2], gate[..., 1::2]) if interleaved else gate.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


# Constants are exact in every dtype, so that all compute the same function.


def rotation(tokens: int, rotary_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = 0.3 ** torch.arange(rotary_dim // 2)
    angle = (torch.arange(tokens)[:, None] * frequencies).repeat(1, 2)[None]
    return angle.cos().bfloat16().to(like), angle.sin().bfloat16().to(like)


def turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def eager_rope(
    q: Tensor, k: Tensor, *, share: float = 1.0, interleaved: bool = False, deinterleave: bool = False,
    heads_dim: int = 1,
) -> Any:  # fmt: skip
    tokens, rotary_dim = q.shape[3 - heads_dim], int(share * q.shape[-1])
    cos, sin = (x.unsqueeze(heads_dim) for x in rotation(tokens, rotary_dim, q))
    if interleaved:
        cos, sin = (x[..., : rotary_dim // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        rotary = rotary * cos + turned(rotary, interleaved) * sin
        if deinterleave:
            rotary = torch.cat((rotary[..., ::2], rotary[..., 1::2]), dim=-1)
        return torch.cat((rotary, rest), dim=-1)

    return rotated(q), rotated(k)


def our_rope(
    q: Tensor, k: Tensor, *, share: float = 1.0, heads_dim: int = 1, half_width: bool = False, inplace: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    rotary_dim = int(share * q.shape[-1])
    cos, sin = rotation(q.shape[3 - heads_dim], rotary_dim, q)
    if half_width:
        cos, sin, options = (
            cos[..., : rotary_dim // 2],
            sin[..., : rotary_dim // 2],
            {**options, "rotary_dim": rotary_dim},
        )
    if inplace:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    return lc.liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=heads_dim, inplace=inplace, **options)


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


@dataclass(frozen=True)
class Op:
    """One variant of an operation: ours and eager code, both taking tensors of the shapes that `make` gives."""

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
    (3, 5, 64),  # several rows per program
    (2, 896),  # not a power of two
    (19, 1500),  # one row at a time, several rows per program
    (5, 3),
    (33,),
)


GROUPED = ((3, 5, 64), (2, 896), (19, 1500), (7, 12))  # columns, of four groups


HALVES = ((3, 5, 64), (2, 2049), (1, 1), (7, 130))


PACKED = ((3, 5, 64), (2, 4098), (1, 2), (7, 130))


HEADS = ((2, 3, 5, 16), (1, 4, 3, 24), (2, 1, 1, 64))  # batch, query heads, tokens, head size


LOGITS = ((2, 5, 131), (4, 5000))


def norm(id: str, offset: float = 0.0, casting: str = "llama", weight: bool = True, residual: bool = False) -> Op:
    def shapes(s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (s, s[-1:], s) if residual else (s, s[-1:]) if weight else (s,)

    eager = partial(eager_rms_norm, offset=offset, cast_first=casting == "llama")
    return Op(f"rms_norm-{id}", partial(our_rms_norm, offset=offset, casting=casting), eager, shapes, NORM_SHAPES)


def gated_norm(id: str, weight: bool = True, **options: Any) -> Op:
    def shapes(s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (s, s, s[-1:]) if weight else (s, s)

    given = NORM_SHAPES if options.get("groups", 1) == 1 else GROUPED
    ours, eager = partial(our_gated_norm, **options), partial(eager_gated_norm, **options)
    return Op(f"rms_norm_gated-{id}", ours, eager, shapes, given)


def gated(id: str, ours: Callable[..., Tensor], activation: Callable[[Tensor], Tensor], packed: bool = False) -> Op:
    eager = partial(eager_glu, activation=activation)
    return Op(id, ours, eager, lambda s: (s,) if packed else (s, s), PACKED if packed else HALVES)


def clamped(id: str, packed: bool = True, **options: Any) -> Op:
    ours, eager = partial(lc.liger_swiglu, **options), partial(eager_clamped, **options)
    make, shapes = (lambda s: (s,), PACKED) if packed else (lambda s: (s, s), HALVES)
    return Op(f"swiglu-{id}", ours, eager, make, shapes, lambda x: 3 * x)  # beyond the limit


def rotary(id: str, **options: Any) -> Op:
    def shapes(s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        batch, heads, tokens, size = s
        if options.get("heads_dim") == 2:
            return (batch, tokens, heads, size), (batch, tokens, 1, size)
        return s, (batch, 1, tokens, size)

    eager = partial(
        eager_rope, **{name: value for name, value in options.items() if name not in ("inplace", "half_width")}
    )
    return Op(f"rope-{id}", partial(our_rope, **options), eager, shapes, HEADS)


def cross_entropy(id: str, **options: Any) -> Op:
    ours, eager = partial(our_cross_entropy, **options), partial(eager_cross_entropy, **options)
    return Op(f"cross_entropy-{id}", ours, eager, lambda s: (s,), LOGITS, lambda x: 3 * x)


gelu_tanh = partial(F.gelu, approximate="tanh")


geglu_erf = partial(lc.liger_geglu, approximate="none")


OPS = [
    norm("llama"),
    norm("gemma", offset=1.0, casting="gemma"),
    norm("olmo2", casting="olmo2"),
    norm("no_weight", weight=False),
    norm("residual", residual=True),
    gated_norm("silu"),
    gated_norm("sigmoid", activation="sigmoid", casting="olmo2"),
    gated_norm("no_weight", weight=False),
    gated_norm("first", gate_first=True),
    gated_norm("groups", gate_first=True, groups=4),
    gated_norm("first-olmo2", activation="sigmoid", casting="olmo2", gate_first=True, groups=4),
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
    clamped("interleaved", interleaved=True),
    clamped("gpt_oss", alpha=1.703125, limit=2.0, offset=1.0, interleaved=True),
    clamped("minimax", alpha=1.703125, limit=2.0, offset=1.0),
    clamped("limit", packed=False, limit=2.0),
    gated("geglu-tanh", lc.liger_geglu, gelu_tanh),
    gated("geglu-erf", geglu_erf, F.gelu),
    gated("geglu-packed", lc.liger_geglu, gelu_tanh, packed=True),
    Op("relu_squared", lc.liger_relu_squared, lambda x: F.relu(x).square(), lambda s: (s,), HALVES),
    rotary("halves"),
    rotary("partial", share=0.5),
    rotary("interleaved", share=0.5, interleaved=True),
    rotary("interleaved-whole", interleaved=True),
    rotary("half_width", half_width=True),
    rotary("deinterleave", share=0.5, interleaved=True, deinterleave=True),
    rotary("deinterleave-whole", interleaved=True, deinterleave=True, heads_dim=2, half_width=True),
    rotary("heads_last", heads_dim=2),
    rotary("inplace", inplace=True),
    rotary("inplace-interleaved", share=0.5, interleaved=True, heads_dim=2, inplace=True),
    cross_entropy("mean", reduction="mean"),
    cross_entropy("sum-weighted", reduction="sum", weighted=True),
    cross_entropy("everything", reduction="mean", smoothing=0.1, square=1e-2, softcap=5.0, weighted=True),
    cross_entropy("none", reduction="none", smoothing=0.2),
]


every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.id)


# One per operator, for tests of the code around a kernel.
ONE_EACH = [op for op in OPS if op.id in (
    "rms_norm-residual", "rms_norm_gated-silu", "rms_norm_gated-groups", "layer_norm",
    "swiglu", "swiglu-packed", "swiglu-gpt_oss", "relu_squared", "rope-partial", "rope-deinterleave",
    "cross_entropy-everything",
)]  # fmt: skip


one_each = pytest.mark.parametrize("op", ONE_EACH, ids=lambda op: op.id)

# Of every row; in Triton's interpreter, which takes a hundred times as long, of one per operator.
every_op_not_interpreted = pytest.mark.parametrize(
    "op", [exhaustive([op], op.id, INTERPRETED and op not in ONE_EACH) for op in OPS]
)


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y) for y in outputs]


def run(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor] | None = None) -> list[Tensor]:
    """Return the outputs, then the gradients of the inputs that require one."""
    outputs = outputs_of(function(*inputs))
    grads = upstream(outputs) if grads is None else grads
    wanted = [x for x in inputs if x.requires_grad]
    # An in-place result of a frozen input has no gradient either.
    paired = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad([y for y, _ in paired], wanted, [g for _, g in paired])
    return [*(y.detach() for y in outputs), *gradients]


def error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def dynamo_warns(test: Callable[..., None]) -> Callable[..., None]:
    """Ignore the compiler's own warnings."""
    for message in (
        ".*should not be instantiated:DeprecationWarning",  # it instantiates the Functions that it traces
        ".*torch.jit.script_method.*:DeprecationWarning",  # on import
        ".*TensorFloat32 tensor cores.*:UserWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",  # of its inputs
    ):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test


def transformers_object(name: str) -> Any:
    model, _, attribute = name.partition(".")
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, attribute)
