from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_chunked.cli import tables
from liger_chunked.cli.losses import LOSSES
from liger_chunked.testing import Sizes, full_loss, random_batch

FUSED, EAGER, FLOOR = "liger_chunked", "eager", "matrix products"
MEASURED = (FLOOR, FUSED, EAGER)  # in this order, of each loss
_FORMATS = (".svg", ".png", ".pdf")
_SECONDS = 0.4  # of each measurement


@dataclass(frozen=True)
class Row:
    """`mib` is above the inputs, gradients included; None on a CPU or after a `failure`."""

    loss: str
    name: str
    ms: float | None
    mib: float | None
    failure: str = ""


def default_sizes() -> dict[str, Any]:
    if torch.cuda.is_available():
        return {"shape": (4, 2048), "vocab_size": 128256, "hidden_size": 2048}
    return {"shape": (4, 64), "vocab_size": 8192, "hidden_size": 256}


@dataclass(frozen=True)
class Case:
    """What is measured, on the GPU in bfloat16 or on the CPU in float32."""

    names: Sequence[str]
    shape: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    logits_budget: str | None = None

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def n_rows(self) -> int:
        return len(MEASURED) * len(self.names)

    def __str__(self) -> str:
        where = torch.cuda.get_device_name() if self.device == "cuda" else "the CPU"
        tokens = " x ".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{tokens} tokens, vocabulary {self.vocab_size}, hidden size {self.hidden_size}, {dtype} on {where}"


def measure(case: Case) -> Iterator[Row]:
    """Yield a loss's matrix products, ours, and eager code with a float32 softmax."""
    device, dtype = case.device, case.dtype
    for name in case.names:
        loss: Any = LOSSES[name]()
        options = {} if case.logits_budget is None else {"logits_budget": case.logits_budget}
        fused: Any = type(loss)(**options)
        n, length = case.shape
        batch = _batch(loss, Sizes(n, length, case.hidden_size, case.vocab_size, case.hidden_size), device, dtype)
        leaves = [batch[key].requires_grad_() for key in ("weight", "input")]

        def fused_step(batch: dict[str, Tensor] = batch, fused: Any = fused) -> Tensor:
            result = fused(**batch)
            return result[0] if isinstance(result, tuple) else result

        def eager_step(batch: dict[str, Tensor] = batch, loss: Any = loss) -> Tensor:
            return full_loss(loss, batch)

        yield Row(name, FLOOR, _floor(batch, loss.options.ignore_index), None)
        yield _row(name, FUSED, fused_step, leaves)
        yield _row(name, EAGER, eager_step, leaves)


def _batch(loss: Any, sizes: Sizes, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Reference and old log-probabilities are random: only their size matters."""
    small = random_batch(loss, 0, sizes._replace(sequences=2, length=2, hidden=1, vocab=2, teacher_hidden=1))
    generator = torch.Generator(device).manual_seed(0)
    n, length, hidden, vocab, teacher_hidden = sizes
    shapes = {
        "weight": (vocab, hidden),
        "input": (n, length, hidden),
        "teacher_weight": (vocab, teacher_hidden),
        "teacher_input": (n, length, teacher_hidden),
        "old_logps": (n, length),
        "ref_logps": (n, length),
        "advantages": (n,),
    }
    batch: dict[str, Any] = {}
    for key in small.keys() - {"bias"}:
        if key == "target":
            batch[key] = torch.randint(vocab, (n, length), generator=generator, device=device)
        elif key == "preference_labels":
            batch[key] = torch.arange(n, device=device) % 2 == 0
        elif key in shapes:
            x = torch.randn(shapes[key], generator=generator, device=device)
            is_large = key.endswith(("weight", "input"))
            x = -x.abs() if key.endswith("logps") else x
            batch[key] = (x / x.shape[-1] ** 0.5 if key.endswith("weight") else x).to(dtype if is_large else x.dtype)
        else:
            batch[key] = small[key]
    return batch


def _row(loss: str, name: str, step: Callable[[], Tensor], leaves: list[Tensor]) -> Row:
    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        step().backward()

    try:
        run()  # compiles kernels
        return Row(loss, name, _ms(run), _peak(run, leaves))
    except torch.OutOfMemoryError:
        return Row(loss, name, None, None, "out of memory")
    finally:
        for leaf in leaves:
            leaf.grad = None


def _floor(batch: dict[str, Any], ignore_index: int) -> float:
    n = int((batch["target"] != ignore_index).sum())
    total = 0.0
    for weight, products in ((batch["weight"], 3), (batch.get("teacher_weight"), 1)):
        if weight is None:
            continue
        rows = min(n, 8192)
        weight = weight.detach()
        x = torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
        z = torch.empty(rows, weight.shape[0], device=weight.device, dtype=weight.dtype)
        logits = lambda x=x, weight=weight, z=z: torch.mm(x, weight.t(), out=z)  # noqa: E731
        if products == 1:
            total += _ms(logits) * n / rows
            continue
        dx, dw = torch.empty_like(x), torch.empty_like(weight)

        def run(x: Tensor = x, z: Tensor = z, dx: Tensor = dx, dw: Tensor = dw, weight: Tensor = weight) -> None:
            torch.mm(x, weight.t(), out=z)
            torch.mm(z, weight, out=dx)
            torch.mm(z.t(), x, out=dw)

        total += _ms(run) * n / rows
    return total


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _ms(run: Callable[[], object]) -> float:
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        _synchronize()
        begin = time.perf_counter()
        run()
        _synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def _peak(run: Callable[[], object], leaves: list[Tensor]) -> float | None:
    if not torch.cuda.is_available():
        return None
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    _synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def show(case: Case, rows: Iterator[Row], figure: Path | None) -> None:
    done = tables.counted(rows, case.n_rows, "measured", lambda row: f"{row.loss}, {row.name}")
    floors = {row.loss: row.ms for row in done if row.name == FLOOR}
    shown = []
    for row in done:
        floor = floors[row.loss]
        ratio = "" if row.ms is None or not floor else f"{row.ms / floor:.2f}"
        time_ = row.failure if row.ms is None else f"{row.ms:.2f}"
        shown.append([row.loss, row.name, time_, ratio, "" if row.mib is None else f"{row.mib:.0f}"])
    tables.show(
        f"Forward and backward of {case}",
        ["loss", "", "ms", "x matrix products", "MiB above the inputs"],
        shown,
        notes=[
            "x matrix products: the time over that of the products alone, three of tokens x hidden size x vocabulary",
            "(logits and both gradients), and one more with a teacher. eager: all logits, with a float32 softmax.",
            "MiB above the inputs: the peak of the step, with gradients; only on a GPU.",
        ],
    )
    if figure is not None:
        _draw(done, figure)
        print(f"drew {figure}")


def check_figure(path: Path) -> None:
    """Raise ValueError if `path` cannot be drawn. To be called first, because measuring takes minutes."""
    if find_spec("matplotlib") is None:
        raise ValueError("--figure needs matplotlib: pip install matplotlib")
    if path.suffix not in _FORMATS:
        raise ValueError(f"--figure must end in one of {', '.join(_FORMATS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--figure: there is no folder {str(path.parent)!r}")


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    losses = list(dict.fromkeys(row.loss for row in rows))
    colours = ["#8b949e", "#0072B2", "#555555"]
    drawing = Figure(figsize=(7, 0.6 + 0.6 * len(losses)), layout="constrained")
    axes = drawing.subplots()
    for i, (name, colour) in enumerate(zip(MEASURED, colours, strict=True)):
        times = {row.loss: row.ms for row in rows if row.name == name}
        axes.barh(
            [j + 0.27 * (i - 1) for j in range(len(losses))],
            [times[x] or 0 for x in losses],
            0.25,
            color=colour,
            label=name,
        )
    axes.set_yticks(range(len(losses)), losses)
    axes.invert_yaxis()
    axes.set_xlabel("ms, forward and backward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawing.savefig(path)
