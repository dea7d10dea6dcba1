"""Benchmark the base kernels, forward and backward, against torch (eager, compiled, its own kernels) and Liger-Kernel.

python -m benchmarks.base_kernels                      tokens x width of Llama-3-8B and of Qwen2.5-0.5B
python -m benchmarks.base_kernels --only ours
python -m benchmarks.base_kernels --variants           those that newer model families need, instead

The floor is the time of a copy of the bytes that the operation must move. Rows are timed as CUDA graphs, except for the
last tasks, where launch time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_chunked as lc
from benchmarks.harness import DEVICE, Table, parser

Function = Callable[..., Any]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
try:
    import liger_kernel.transformers.functional as liger
except ImportError:
    liger = None


class Backward:
    """Outputs with their upstream gradients; `backward` runs the backward pass once."""

    def __init__(self, outputs: Any, grads: list[Tensor]) -> None:
        self.outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        self.grads = grads

    def backward(self) -> None:
        torch.autograd.backward(self.outputs, self.grads)


def measure(
    table: Table,
    task: str,
    units: float,
    contenders: Iterator[tuple[str, Function]],
    leaves: dict[str, Tensor],
    exact: Function,
    graph: bool = True,
) -> None:
    """Measure every contender at one task that moves `units` bytes."""
    shapes = [y.shape for y in Backward(exact(*(leaf.detach().double() for leaf in leaves.values())), []).outputs]
    torch.manual_seed(1)
    grads = [torch.randn(shape, device=DEVICE, dtype=torch.float32).to(DTYPE) for shape in shapes]

    def expected() -> dict[str, Tensor]:
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves.values()]
        outputs = Backward(exact(*wide), []).outputs
        return dict(zip(leaves, torch.autograd.grad(outputs, wide, [g.double() for g in grads]), strict=True))

    given = [leaf.detach().clone() for leaf in leaves.values()]

    def loss_of(function: Function) -> Function:
        # Some contenders write into their upstream gradients, and into their inputs.
        own = [g.clone() for g in grads]
        for leaf, x in zip(leaves.values(), given, strict=True):
            leaf.detach().copy_(x)

        def loss(*inputs: Tensor) -> Backward:
            result = Backward(function(*inputs), own)
            result.grads = [g.to(y.dtype) for g, y in zip(own, result.outputs, strict=True)]
            return result

        return loss

    floor = units / table.environment["copy_tb_per_s"] / 1e9
    builders = {name: partial(loss_of, function) for name, function in contenders}
    table.measure(task, floor, {"bytes": units}, builders, list(leaves.values()), leaves, expected, graph=graph)


def sample(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device=DEVICE)).to(DTYPE).requires_grad_()


def compared(
    ours: Function, eager: Function, peer: Function | None, **torchs: Function
) -> Iterator[tuple[str, Function]]:
    yield "liger_chunked", ours
    yield "eager", eager
    yield "torch.compile(eager)", torch.compile(eager)
    yield from torchs.items()
    if liger is not None and peer is not None:
        yield "liger-kernel", peer


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def eager_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm(table: Table, *shape: int, graph: bool = True) -> None:
    x, w = sample(*shape), sample(shape[-1])
    contenders = compared(
        lc.liger_rms_norm,
        eager_rms_norm,
        lambda x, w: liger.liger_rms_norm(x, w, 1e-6),
        **{"F.rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)},
    )
    task = f"RMSNorm {'x'.join(map(str, shape))}{'' if graph else ', launches included'}"
    measure(table, task, 5 * x.numel() * x.element_size(), contenders, {"x": x, "w": w}, eager_rms_norm, graph)


def add_rms_norm(table: Table, *shape: int) -> None:
    def eager(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager_rms_norm(total, w), total

    x, residual, w = sample(*shape), sample(*shape), sample(shape[-1])
    contenders = compared(lambda x, residual, w: lc.liger_rms_norm(x, w, residual=residual), eager, None)
    leaves = {"x": x, "residual": residual, "w": w}
    # Both leaves get the same gradient. Autograd copies it for the first, for every contender: 2 of the 10 units.
    task = f"x + residual, RMSNorm {'x'.join(map(str, shape))}"
    measure(table, task, 10 * x.numel() * x.element_size(), contenders, leaves, eager)


def layer_norm(table: Table, *shape: int, graph: bool = True) -> None:
    def eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w, b)

    x, w, b = sample(*shape), sample(shape[-1]), sample(shape[-1])
    contenders = compared(lc.liger_layer_norm, eager, lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5))
    task = f"LayerNorm {'x'.join(map(str, shape))}{'' if graph else ', launches included'}"
    measure(table, task, 5 * x.numel() * x.element_size(), contenders, {"x": x, "w": w, "b": b}, eager, graph)


def gated(table: Table, n: int, width: int) -> None:
    gate, up = sample(n, width), sample(n, width)
    units = 8 * gate.numel() * gate.element_size()
    gelu = partial(F.gelu, approximate="tanh")
    for name, ours, activation in (("SwiGLU", lc.liger_swiglu, F.silu), ("GeGLU", lc.liger_geglu, gelu)):

        def eager(gate: Tensor, up: Tensor, activation: Function = activation) -> Tensor:
            return activation(gate) * up

        def peer(gate: Tensor, up: Tensor, name: str = name) -> Any:
            return getattr(liger, f"liger_{name.lower()}")(gate, up)

        contenders = compared(ours, eager, peer)
        leaves = {"gate": gate.detach().clone().requires_grad_(), "up": up.detach().clone().requires_grad_()}
        measure(table, f"{name} {n}x{width}", units, contenders, leaves, eager)


def packed(table: Table, n: int, width: int) -> None:
    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    x = sample(n, 2 * width)
    contenders = compared(lc.liger_swiglu, eager, None)
    measure(table, f"SwiGLU {n}x(2x{width})", 4 * x.numel() * x.element_size(), contenders, {"x": x}, eager)


def rotary(table: Table, batch: int, tokens: int, q_heads: int, k_heads: int, size: int) -> None:
    angle = torch.arange(tokens, device=DEVICE)[:, None] * 1e4 ** -torch.linspace(0, 1, size // 2, device=DEVICE)
    cos, sin = (x.repeat(1, 2)[None].to(DTYPE) for x in (angle.cos(), angle.sin()))

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        def rotated(x: Tensor) -> Tensor:
            halves = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
            return x * cos.unsqueeze(1).to(x.dtype) + halves * sin.unsqueeze(1).to(x.dtype)

        return rotated(q), rotated(k)

    q, k = (sample(batch, tokens, n, size).detach().transpose(1, 2).requires_grad_() for n in (q_heads, k_heads))
    contenders = compared(
        lambda q, k: lc.liger_rotary_pos_emb(q, k, cos, sin),
        eager,
        lambda q, k: liger.liger_rope(q, k, cos, sin),
    )
    units = 4 * (q.numel() + k.numel()) * q.element_size()
    measure(table, f"RoPE {batch}x{tokens}x({q_heads}+{k_heads})x{size}", units, contenders, {"q": q, "k": k}, eager)


def variant(table: Table, task: str, passes: int, ours: Function, eager: Function, leaves: dict[str, Tensor]) -> None:
    """Measure a variant that moves `passes` times the bytes of `x`, or of `q` and `k`."""
    units = passes * sum(x.numel() * x.element_size() for name, x in leaves.items() if name in ("x", "q", "k"))
    measure(table, task, units, compared(ours, eager, None), leaves, eager)


def gated_norm(table: Table, task: str, *shape: int, groups: int = 0) -> None:
    """Measure the gated norm of Qwen3-Next, or that of Mamba 2 if it has groups."""

    def normal(x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (max(groups, 1), -1))
        return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)

    def eager(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        activated = F.silu(wide(gate))
        if groups:
            return w * normal(wide(x) * activated).to(x.dtype)
        return (w * normal(wide(x)).to(x.dtype) * activated).to(x.dtype)

    def ours(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        return lc.liger_rms_norm_gated(x, gate, w, gate_first=bool(groups), groups=max(groups, 1))

    x, gate, w = sample(*shape), sample(*shape), sample(shape[-1])
    name = f"gated RMSNorm of {task} {'x'.join(map(str, shape))}"
    variant(table, name, 8, ours, eager, {"x": x, "gate": gate, "w": w})


def clamped(table: Table, task: str, n: int, width: int, interleaved: bool, alpha: float, offset: float) -> None:
    def eager(x: Tensor) -> Tensor:
        gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + offset) * (gate * torch.sigmoid(gate * alpha))

    ours = partial(lc.liger_swiglu, alpha=alpha, limit=7.0, offset=offset, interleaved=interleaved)
    x = sample(n, 2 * width, scale=3.0)
    variant(table, f"clamped SwiGLU of {task} {n}x(2x{width})", 4, ours, eager, {"x": x})


def relu_squared(table: Table, n: int, width: int) -> None:
    x = sample(n, width)
    variant(table, f"ReLU squared {n}x{width}", 5, lc.liger_relu_squared, lambda x: F.relu(x).square(), {"x": x})


def layer_norm_scaled(table: Table, *shape: int) -> None:
    def eager(x: Tensor, w: Tensor) -> Tensor:
        centred = wide(x) - wide(x).mean(-1, keepdim=True)
        return (wide(w) * (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5))).to(x.dtype)

    x, w = sample(*shape), sample(shape[-1])
    name = f"LayerNorm of Cohere {'x'.join(map(str, shape))}"
    variant(table, name, 5, lc.liger_layer_norm, eager, {"x": x, "w": w})


def rotary_variants(table: Table, tokens: int) -> None:
    """Measure rotary functions as the models call them, on queries and keys with heads after tokens in memory."""

    def angles(size: int) -> tuple[Tensor, Tensor]:
        angle = torch.arange(tokens, device=DEVICE)[:, None] * 1e4 ** -torch.linspace(0, 1, size // 2, device=DEVICE)
        return angle.cos()[None], angle.sin()[None]

    def parts(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
        return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)

    def measured(task: str, q_heads: int, k_heads: int, size: int, ours: Function, eager: Function) -> None:
        q, k = (sample(4, tokens, n, size).detach().transpose(1, 2).requires_grad_() for n in (q_heads, k_heads))
        name = f"RoPE of {task} 4x{tokens}x({q_heads}+{k_heads})x{size}"
        variant(table, name, 4, ours, lambda q, k: (eager(q), eager(k)), {"q": q, "k": k})

    def rotation(cos: Tensor, sin: Tensor, interleaved: bool, join: Function) -> Function:
        def eager(x: Tensor) -> Tensor:
            x1, x2 = parts(x, interleaved)
            c, s = (y.unsqueeze(1).to(x.dtype) for y in (cos, sin))
            return join(x1 * c - x2 * s, x2 * c + x1 * s)

        return eager

    def halves(y1: Tensor, y2: Tensor) -> Tensor:
        return torch.cat((y1, y2), dim=-1)

    def complex_product(cos: Tensor, sin: Tensor) -> Function:
        def eager(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2))
            product = pairs * torch.complex(cos, sin).unsqueeze(1).to(pairs.dtype)
            return torch.view_as_real(product).flatten(3).type_as(x)

        return eager

    cos, sin = angles(64)
    ours = partial(lc.liger_rotary_pos_emb, cos=cos, sin=sin, rotary_dim=64)
    measured("GPT-OSS", 64, 8, 64, ours, rotation(cos, sin, False, halves))
    ours = partial(lc.liger_rotary_pos_emb, cos=cos, sin=sin, rotary_dim=64, interleaved=True, deinterleave=True)
    measured("DeepSeek-V3", 128, 1, 64, ours, rotation(cos, sin, True, halves))
    cos, sin = angles(128)
    freqs = torch.complex(cos, sin)
    ours = lambda q, k: lc.liger_rotary_pos_emb(q, k, freqs.real, freqs.imag, rotary_dim=128, interleaved=True)  # noqa: E731
    measured("Llama 4", 40, 8, 128, ours, complex_product(cos, sin))
    cos, sin = angles(32)
    whole = [y.repeat(1, 1, 2) for y in (cos, sin)]

    def partly(x: Tensor) -> Tensor:
        rotated = rotation(cos, sin, False, halves)(x[..., :32])
        return torch.cat((rotated, x[..., 32:]), dim=-1)

    measured("Qwen3-Next", 16, 2, 128, partial(lc.liger_rotary_pos_emb, cos=whole[0], sin=whole[1]), partly)
    cos, sin = angles(256)
    repeated = [y.repeat(1, 1, 2) for y in (cos, sin)]

    def separately(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(lc.liger_rotary_pos_emb(x, x.detach()[:, :0], *repeated)[0] for x in (q, k))

    measured("Gemma 4", 16, 8, 256, separately, rotation(cos, sin, False, halves))


def variants(table: Table, cut: int) -> None:
    n = 16384 // cut
    gated_norm(table, "Qwen3-Next", n, 32, 128)
    gated_norm(table, "Nemotron-H", n, 8192 // cut, groups=8)
    clamped(table, "GPT-OSS", 4 * n, 2880 // min(cut, 8), True, 1.702, 1.0)
    clamped(table, "MiniMax-M3", 4 * n, 3072 // min(cut, 8), False, 1.702, 1.0)
    clamped(table, "DeepSeek-V4", 4 * n, 2048 // min(cut, 8), False, 1.0, 0.0)
    relu_squared(table, n, 18432 // min(cut, 8))
    layer_norm_scaled(table, n, 8192 // min(cut, 8))
    rotary_variants(table, 4096 // cut)


def cross_entropy(table: Table, n: int, vocab: int, graph: bool = True) -> None:
    def eager(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    def peer(logits: Tensor) -> Tensor:
        loss = liger.liger_cross_entropy(logits, target)
        return loss[0] if isinstance(loss, tuple) else loss

    logits, target = sample(n, vocab), torch.randint(vocab, (n,), device=DEVICE)
    contenders = compared(
        lambda logits: lc.liger_cross_entropy(logits, target),
        eager,
        None if graph else peer,  # it waits for the device, which a CUDA graph cannot capture
        **{"F.cross_entropy, no upcast": lambda logits: F.cross_entropy(logits, target)},
    )
    units = 3 * logits.numel() * logits.element_size()
    task = f"cross entropy of logits {n}x{vocab}{'' if graph else ', launches included'}"
    measure(table, task, units, contenders, {"logits": logits}, eager, graph)


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = parser(__doc__ or "", peer_seconds=120)
    parse.add_argument("--variants", action="store_true", help="the variants that newer model families need, instead")
    args = parse.parse_args(arguments)
    table = Table("base_kernels_variants" if args.variants else "base_kernels", args)
    torch.manual_seed(0)
    cut = 1 if DEVICE == "cuda" else 64
    (variants if args.variants else layers)(table, cut)
    return table.finish()


def layers(table: Table, cut: int) -> None:
    for n, hidden, width in ((16384 // cut, 4096 // cut, 14336 // cut), (4096 // cut, 896 // cut, 4864 // cut)):
        rms_norm(table, n, hidden)
        add_rms_norm(table, n, hidden)
        layer_norm(table, n, hidden)
        gated(table, n, width)
        packed(table, n, width)
    rms_norm(table, 16384 // cut, 32, 128)  # queries and keys
    rotary(table, 4, 4096 // cut, 32, 8, 128)
    rotary(table, 1, 4096 // cut, 14, 2, 64)
    cross_entropy(table, 4096 // cut, 128256 // cut)
    rms_norm(table, 4096 // cut, 2048 // cut, graph=False)
    layer_norm(table, 4096 // cut, 2048 // cut, graph=False)
    cross_entropy(table, 4096 // cut, 128256 // cut, graph=False)


if __name__ == "__main__":
    main()
