"""Whole training steps: their measurements, and a search for the longest sequences that fit.

The learning rate is 0. A step does all of its work, but every step of every contender starts from the same weights.

    tok/s        tokens of a step over its median time
    peak         peak of allocated memory in a step, everything included
    above        the part of the peak that exists only during a step: without weights and optimizer state
    loss, norm   loss of the first step and norm of its gradient; contenders must agree
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import DEVICE, Row, Skipped, Table, is_out_of_memory, median_ms, parser, peak_mib

HEADROOM_MIB = 2048.0  # part of the card's memory for its context, and for what tensors cannot use


@dataclass(frozen=True)
class TrainingStep:
    """Forward and backward, which return the loss, then the step of `optimizer` (torch's or accelerate's)."""

    backward: Callable[[], Tensor]
    optimizer: Any

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def first(self) -> tuple[float, float]:
        """Run the first step; return its loss and gradient norm. Compiles kernels and creates the optimizer state."""
        loss = self.backward()
        gradients = (p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


def allocated_mib() -> float:
    return torch.cuda.memory_allocated() / 2**20 if DEVICE == "cuda" else 0.0


@dataclass
class StepRow(Row):
    """A training step; `mib` is its memory above `resident_mib`, which stays allocated between steps.

    `kernels` is the report of our `apply_liger_kernel`, by lines.
    """

    tokens_per_s: float | None = None
    resident_mib: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    kernels: list[str] | None = None

    def fill(self, step: TrainingStep, tokens: int, repeats: int, before_mib: float) -> None:
        """Measure a step.

        Args:
            step: a step that has not run yet.
            tokens: tokens per step.
            repeats: timed repetitions.
            before_mib: memory that was allocated before the model.
        """
        self.loss, self.grad_norm = step.first()
        self.mib = peak_mib(step, ())
        if self.mib is not None:
            self.resident_mib = round(allocated_mib() - before_mib, 1)
        self.ms = round(median_ms(step, repeats, warmup=0), 3)
        self.tokens_per_s = round(tokens / self.ms * 1e3, 1)

    def measured(self, first: StepRow) -> str:
        memory = ""
        if self.mib is not None and self.resident_mib is not None:
            memory = f"  peak {(self.mib + self.resident_mib) / 1024:6.1f} GiB, {self.mib / 1024:6.2f} above"
        same = f"  loss {self.loss:.5f}  norm {self.grad_norm:.4g}"
        if first is not self:
            same += f"  apart {apart(self.loss, first.loss):.1e}, {apart(self.grad_norm, first.grad_norm):.1e}"
            same += f"  x{self.tokens_per_s / first.tokens_per_s:.3f} {first.name}"
        return f"{self.tokens_per_s:9.0f} tok/s  {self.ms:9.1f} ms{memory}{same}"


@dataclass
class CompiledStepRow(StepRow):
    graphs: int | None = None

    def measured(self, first: StepRow) -> str:
        graphs = "" if self.graphs is None else f"  {self.graphs} graphs"
        return super().measured(first) + graphs


def apart(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12)


@dataclass
class LongestRow(Row):
    """The longest sequence whose step fits, with its peak `mib`, and the next length on the grid that does not fit.

    - `length`: tokens of each sequence of the batch; 0 if none fits
    - `too_long`: None if time ran out before a length did not fit
    - `extrapolated`: in that case, where the line through the last two peaks reaches the card's memory
    """

    length: int | None = None
    too_long: int | None = None
    extrapolated: int | None = None

    def fill(self, step_of: Callable[[int], TrainingStep], start: int, grid: int, seconds: float) -> None:
        """Search for the length; `step_of(n)` is a step on sequences of n tokens.

        Raises:
            Skipped: there is no GPU.
        """
        if DEVICE == "cpu":
            raise Skipped("memory is only measured on a GPU")
        capacity = torch.cuda.mem_get_info()[1] / 2**20 - HEADROOM_MIB

        def peak_at(n: int) -> float | None:
            begin = time.perf_counter()
            peak = peak_of(step_of(n))
            note = "does not fit" if peak is None else f"{peak / 1024:.1f} GiB"
            print(f"    {n}: {note}, {time.perf_counter() - begin:.1f} s", flush=True)
            return peak

        peak_at(start)  # compiles kernels, so its time predicts nothing
        found = longest(peak_at, start, grid, capacity, seconds)
        self.length, self.too_long = found.fits, found.too_long
        if found.peaks:
            self.mib = found.peaks[-1][1]
        if found.too_long is None and (limit := length_at(found.peaks, capacity)):
            self.extrapolated = int(limit) // grid * grid

    def measured(self, first: LongestRow) -> str:
        end = "the time was over" if self.too_long is None else f"{self.too_long} does not fit"
        if self.extrapolated is not None:
            end += f"; the line through its peaks ends at {self.extrapolated}"
        peak = "" if self.mib is None else f" at {self.mib / 1024:.1f} GiB"
        return f"{self.length} tokens{peak}; {end}"


def peak_of(step: TrainingStep) -> float | None:
    """Return the peak memory of a step in MiB; None if it does not fit."""
    try:
        peak_mib(step, ())
        peak = torch.cuda.max_memory_allocated() / 2**20
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        peak = None
    # Free the gradients here: only now the exception is gone, with the frames that hold activations.
    step.optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    return peak


Peaks = list[tuple[int, float]]


class Search(NamedTuple):
    """The largest length that fits, the smallest known not to fit, and the peaks of those that fit, in order."""

    fits: int
    too_long: int | None
    peaks: Peaks


def longest(peak_at: Callable[[int], float | None], start: int, grid: int, capacity: float, seconds: float) -> Search:
    """Find the largest multiple of `grid` that fits.

    Doubles the length until one does not fit, then bisects. If the line through the last two peaks meets `capacity`
    inside the interval, that length is tried instead, because memory is almost linear in the tokens.

    Args:
        peak_at: returns the peak at a length, or None if it does not fit.
        start: the first length, a multiple of `grid`.
        seconds: start no trial that would end later. A trial's time is estimated as length to the power of 1.5, because
            attention is quadratic in the length and the rest is linear.

    >>> longest(lambda n: 10 + 2 * n if n <= 45 else None, start=4, grid=4, capacity=100, seconds=60)[:2]
    (44, 48)
    """
    end = time.perf_counter() + seconds
    fits, too_long, n = 0, None, start
    peaks: Peaks = []
    while True:
        begin = time.perf_counter()
        peak = peak_at(n)
        now = time.perf_counter()
        if peak is None:
            too_long = n
        else:
            fits = n
            peaks.append((n, peak))
        if too_long is not None and too_long - fits <= grid:
            break
        last, n = n, _next(fits, too_long, grid, length_at(peaks, capacity))
        if now + (now - begin) * (n / last) ** 1.5 > end:
            break
    return Search(fits, too_long, peaks)


def length_at(peaks: Peaks, capacity: float) -> float | None:
    """Return where the line through the last two peaks meets `capacity`; None if there is no such line."""
    if len(peaks) < 2 or peaks[-1][1] <= peaks[-2][1]:
        return None
    (n0, y0), (n1, y1) = peaks[-2:]
    return n1 + (capacity - y1) * (n1 - n0) / (y1 - y0)


def _next(fits: int, too_long: int | None, grid: int, limit: float | None) -> int:
    """Return a length above `fits`, and below `too_long` if given: close to `limit` if that is in between."""
    upper = 2 * fits if too_long is None else too_long - grid
    guess: float = upper if too_long is None else (fits + too_long) / 2
    if limit is not None and fits - grid < limit < upper + grid:
        guess = limit
    return min(max(int(guess) // grid * grid, fits + grid), upper)


def compare(
    table: Table,
    names: Mapping[str, str],
    n: int,
    length: int,
    fills: Mapping[str, Callable[[Any], None]],
    kind: type[StepRow] = StepRow,
) -> None:
    """Measure every contender at steps of `n` sequences of `length` tokens; with `--longest`, search for the length.

    Args:
        table: receives the rows.
        names: names of the trained things, such as the model, by kind.
        n: sequences per batch.
        length: tokens per sequence, or the first length of a search.
        fills: one function per contender, see `Table.compare`.
        kind: class of the rows, without `--longest`.
    """
    what, shape = " ".join(names.values()), {**names, "sequences": n, "length": length}
    if table.args.longest:
        table.compare(f"{what} {n} at a time", shape, fills, LongestRow)
    else:
        table.compare(f"{what} {n}x{length}", shape, fills, kind)


def steps_parser(description: str, shapes: str, repeats: int, seconds: float) -> argparse.ArgumentParser:
    parse = parser(description, peer_seconds=1800)
    parse.add_argument("shapes", nargs="*", help=shapes)
    parse.add_argument("--repeats", type=int, default=repeats, help="steps that are timed (%(default)s)")
    parse.add_argument("--no-checkpointing", action="store_true", help="keep the activations of every layer")
    parse.add_argument("--longest", action="store_true", help="search the longest sequence that fits instead")
    parse.add_argument("--seconds", type=float, default=seconds, help="of such a search (%(default)s)")
    return parse


def parts(shape: str) -> Iterable[Any]:
    """
    >>> list(parts("llama-3-8b:4:4096"))
    ['llama-3-8b', 4, 4096]
    """
    return (int(part) if part.isdigit() else part for part in shape.split(":"))
