from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_chunked as library
from liger_chunked.cli import tables
from liger_chunked.cli.losses import LOSSES
from liger_chunked.testing import Sizes, evaluate, evaluate_full, random_batch

_VALUES = ("loss", "value")  # the other parts are gradients
# An error may be 1.1 times eager code's in the same dtype, plus roundings.
_RATIO, _ROUNDINGS = 1.1, {torch.float32: 4.0, torch.bfloat16: 1.0}


@dataclass(frozen=True)
class Result:
    """Relative errors against float64 of the value or gradient that comes closest to its limit.

    Args:
        part: which it is, such as "loss" or "weight" for the gradient by the weight.
        error: of the fused code.
        eager: of plain PyTorch in the same dtype.
        bound: the largest that `error` may be.
    """

    name: str
    dtype: torch.dtype
    part: str
    error: float
    eager: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def _relative(x: Tensor, expected: Tensor) -> float:
    expected = expected.double().to(x.device)
    return float((x.double() - expected).norm() / expected.norm().clamp(min=1e-12))


def _compared(
    name: str, dtype: torch.dtype, found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]
) -> Result:
    """Return the value or gradient whose error is the largest part of its bound."""
    floor = _ROUNDINGS[dtype] * torch.finfo(dtype).eps
    results = []
    for key, expected in exact.items():
        of_eager = _relative(eager[key], expected)
        results.append(Result(name, dtype, key, _relative(found[key], expected), of_eager, _RATIO * of_eager + floor))
    return max(results, key=lambda r: r.error / r.bound if r.error == r.error else float("inf"))


def _to(batch: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    def moved(key: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.is_floating_point():
            return x.to(device)
        return x.to(device, dtype if key.endswith(("weight", "input", "bias")) else torch.float32)

    return {key: moved(key, x) for key, x in batch.items()}


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in batch.items()}


def losses(device: torch.device, seed: int) -> Iterator[Result]:
    on_gpu = device.type == "cuda"
    sizes = Sizes(12, 64, 512, 32003, 768) if on_gpu else Sizes(12, 7, 16, 301, 24)
    for name, make in LOSSES.items():
        if name == "token-stats":
            continue
        loss: Any = make()
        batch = random_batch(loss, seed, sizes)
        for dtype in (torch.float32, torch.bfloat16):
            given = _to(batch, device, dtype)
            budget = sizes.vocab * dtype.itemsize * sizes.length * 3
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="logits_budget=", category=UserWarning)
                found = evaluate(type(loss)(logits_budget=budget), given)
            yield _compared(name, dtype, found, evaluate_full(loss, given), evaluate_full(loss, _doubled(given)))


def frozen_head(device: torch.device, seed: int) -> Iterator[Result]:
    """Compare a step that takes the fused epilogue on Hopper: large, bfloat16, frozen head."""
    n, hidden, vocab = 2048, 1024, 65536 + 128
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(n, hidden, device=device, generator=generator).bfloat16()
    weight = (torch.randn(vocab, hidden, device=device, generator=generator) / hidden**0.5).bfloat16()
    target = torch.randint(vocab, (n,), device=device, generator=generator)

    def run(loss: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        own = x.to(dtype).requires_grad_()
        value = loss(weight.to(dtype), own)
        return {"loss": value.detach(), "input": torch.autograd.grad(value, own)[0]}

    def eager(weight: Tensor, x: Tensor) -> Tensor:
        z = x @ weight.t()
        return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), target)

    def fused(weight: Tensor, x: Tensor) -> Tensor:
        value = library.LigerFusedLinearCrossEntropyLoss()(weight, x, target)
        assert isinstance(value, Tensor)
        return value

    dtype = torch.bfloat16
    yield _compared(
        "cross-entropy, frozen head", dtype, run(fused, dtype), run(eager, dtype), run(eager, torch.float64)
    )


def _rms_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.to(_wide(x))
    return w * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-6)


def _swiglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _geglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _gated_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate = _shuffled(x)
    return (_rms_norm(x, w, b) * F.silu(gate.to(_wide(gate)))).to(x.dtype)


def _relu_squared(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(x).square()


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (max(1, x.shape[1] // 128), -1)).transpose(0, 1)[None]


def _angles(q: Tensor) -> tuple[Tensor, Tensor]:
    half = q.shape[3] // 2
    places, frequencies = (torch.arange(n, device=q.device, dtype=torch.float64) for n in (q.shape[2], half))
    angles = (places[:, None] * 1e-4 ** (frequencies / half)).repeat(1, 2)[None]
    return angles.cos().to(q.dtype), angles.sin().to(q.dtype)


def _rope(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q = _heads(x)
    cos, sin = _angles(q)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat([-second, first], -1) * sin


def _fused_rope(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q = _heads(x)
    return library.liger_rotary_pos_emb(q, q.detach(), *_angles(q))[0]


def _cross_entropy(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(x.to(_wide(x)), torch.arange(len(x), device=x.device) % x.shape[1])


def _shuffled(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Kernel and eager code, of x (N, D), a weight and a bias (D,).
_KERNELS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "liger_rms_norm": (lambda x, w, b: library.liger_rms_norm(x, w, 1e-6), _rms_norm),
    "liger_rms_norm_gated": (lambda x, w, b: library.liger_rms_norm_gated(x, _shuffled(x), w, 1e-6), _gated_norm),
    "liger_layer_norm": (lambda x, w, b: library.liger_layer_norm(x, w, b, 1e-6), _layer_norm),
    "liger_swiglu": (lambda x, w, b: library.liger_swiglu(x), _swiglu),
    "liger_geglu": (lambda x, w, b: library.liger_geglu(x, approximate="tanh"), _geglu),
    "liger_relu_squared": (lambda x, w, b: library.liger_relu_squared(x), _relu_squared),
    "liger_rotary_pos_emb": (_fused_rope, _rope),
    "liger_cross_entropy": (
        lambda x, w, b: library.liger_cross_entropy(x, torch.arange(len(x), device=x.device) % x.shape[1]),
        _cross_entropy,
    ),
}


def kernels(device: torch.device, seed: int) -> Iterator[Result]:
    n, d = (1024, 4096) if device.type == "cuda" else (8, 130)
    generator = torch.Generator(device).manual_seed(seed)
    inputs = [torch.randn(shape, device=device, generator=generator) for shape in ((n, d), (d,), (d,))]
    for name, (kernel, eager) in _KERNELS.items():
        for dtype in (torch.float32, torch.bfloat16):

            def run(function: Callable[..., Tensor], of: torch.dtype, dtype: torch.dtype = dtype) -> dict[str, Tensor]:
                given = [x.to(dtype).to(of).requires_grad_() for x in inputs]
                y = function(*given)
                upstream = torch.linspace(-1, 1, y.numel(), device=device, dtype=y.dtype).view_as(y) if y.ndim else None
                gradients = torch.autograd.grad(y, given, upstream, allow_unused=True)
                found = {f"by input {i}": g for i, g in enumerate(gradients) if g is not None}
                return {"value": y.detach(), **found}

            yield _compared(name, dtype, run(kernel, dtype), run(eager, dtype), run(eager, torch.float64))


def results(device: torch.device, seed: int) -> Iterator[Result]:
    yield from kernels(device, seed)
    yield from losses(device, seed)
    if device.type == "cuda":
        yield from frozen_head(device, seed)


def show(seed: int) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Each kernel and loss in two dtypes. On a GPU, kernels compile first, which takes minutes.
    total = 2 * (len(_KERNELS) + len(LOSSES) - 1) + (device.type == "cuda")
    done = tables.counted(results(device, seed), total, "checked", lambda r: r.name)
    rows = []
    for r in done:
        dtype, part = str(r.dtype).removeprefix("torch."), r.part if r.part in _VALUES else f"gradient: {r.part}"
        numbers = (f"{x:.1e}" for x in (r.error, r.eager, r.bound))
        rows.append([r.name, dtype, part, *numbers, "ok" if r.passed else "WRONG"])
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    tables.show(
        f"Relative errors against float64 on {name}",
        ["", "dtype", "worst part", "error", "eager", "allowed", ""],
        rows,
        notes=[
            "worst part: the value, or the gradient, that comes closest to what is allowed.",
            f"eager: the error of plain PyTorch in the same dtype. allowed: {_RATIO} times that, plus a rounding.",
            "In bfloat16 both errors of grpo may be large: a rounding that moves a ratio over its clipping bound",
            "changes the whole gradient of a token.",
        ],
    )
    wrong = [r for r in done if not r.passed]
    print(f"{len(done) - len(wrong)} of {len(done)} are right")
    return 1 if wrong else 0
