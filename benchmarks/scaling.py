"""The bytes that ranks exchange for a head and its loss, and a rank's memory, by formula, beside what was measured.

    python -m benchmarks.scaling        prints the tables; docs/benchmarks.md has the measured steps of several GPUs

`tests/ranks/test_scaling.py` counts the collectives of real steps, and compares them with these formulas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import OURS, RESULTS
from benchmarks.report import Run, by_age, load, spaced
from liger_chunked.engine.cutting import Budget, pieces

FLOAT32, FLOAT64, INT64 = 4, 8, 8  # bytes

# Of an H100 or H200, by their data sheets: bytes a second in one direction.
NVLINK = 450e9
INFINIBAND = 50e9  # a 400 Gb/s adapter for each GPU
NODE = 8  # GPUs
FLOPS = 720e12  # of the products a second, as benchmarks measure on an H200

MODELS = {
    "Llama-3-8B": (128256, 4096),
    "Qwen, H = 2048": (151936, 2048),
    "Qwen, H = 5120": (151936, 5120),
    "Qwen, H = 7168": (151936, 7168),
}
TOKENS = 8192  # of a step, on each rank of a split vocabulary
DTYPE = torch.bfloat16

Row = dict[str, Any]
Tasks = dict[str, dict[str, Row]]


class Collective(NamedTuple):
    """`given` are the bytes that each rank gives to it."""

    kind: str
    given: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends around a ring."""
        others = self.ranks - 1
        times = {"all_gather": others, "reduce_scatter": others / self.ranks, "all_reduce": 2 * others / self.ranks}
        return self.given * times[self.kind]


def sent(collectives: Iterable[Collective]) -> float:
    return sum(collective.sent for collective in collectives)


@dataclass(frozen=True)
class Exchange:
    """What a loss exchanges for each token.

    - `of_vocabulary`: for each head, the float32 numbers of its gathers, and whether 16-bit logits take a correction
    - `of_sequence`: the float32 numbers of each gather between ranks that split sequences
    - `targets`, `share`: whether these gather targets, and the loss of each rank
    """

    of_vocabulary: Sequence[tuple[Sequence[int], bool]]
    of_sequence: Sequence[int]
    targets: bool = True
    share: bool = False


# Maximum, sum of exponentials, target's logit; DPO and GRPO also log a mean logit or an entropy.
LOSSES = {
    "cross entropy": Exchange([([3], True)], [1], share=True),
    "DPO": Exchange([([3], True), ([4], True)], [1, 2]),
    "GRPO": Exchange([([4], True)], [2], share=True),
    "JSD": Exchange([([6, 2], False), ([], False)], [1], targets=False, share=True),
}


def of_statistics(loss: Exchange, n: int, ranks: int, itemsize: int) -> list[Collective]:
    found = []
    for gathers, corrected in loss.of_vocabulary:
        found += [Collective("all_gather", FLOAT32 * numbers * n, ranks) for numbers in gathers]
        if corrected and itemsize == 2:
            found.append(Collective("all_reduce", FLOAT32 * 2 * n, ranks))
    return found


def of_split_vocabulary(
    loss: Exchange, n: int, h: int, ranks: int, itemsize: int, scattered: bool = False
) -> list[Collective]:
    """Return the collectives of a step of n tokens, apart from 8 or 16 bytes that compare the ranks' targets.

    If `scattered`, ranks split the hidden states too.
    """
    found = of_statistics(loss, n, ranks, itemsize)
    if not scattered:
        return [*found, Collective("all_reduce", FLOAT32 * n * h, ranks)]
    found += [Collective("all_gather", itemsize * n // ranks * h, ranks)] * len(loss.of_vocabulary)
    return [*found, Collective("reduce_scatter", FLOAT32 * n * h, ranks)]


def of_split_sequence(loss: Exchange, n: int, ranks: int) -> list[Collective]:
    """Return the collectives of a step of n tokens on each rank."""
    found = [Collective("all_gather", 2 * INT64, ranks)]  # batch and length
    if loss.targets:
        found.append(Collective("all_gather", INT64 * n, ranks))
    found += [Collective("all_gather", FLOAT32 * numbers * n, ranks) for numbers in loss.of_sequence]
    if loss.share:
        found.append(Collective("all_gather", FLOAT64, ranks))
    return found


def of_gathered_weight(v: int, h: int, ranks: int, itemsize: int) -> list[Collective]:
    """Return the collectives of a step that gathers the head, as FSDP does, and reduces and scatters dW."""
    own = itemsize * -(-v // ranks) * h
    return [Collective("all_gather", own, ranks), Collective("reduce_scatter", own * ranks, ranks)]


def of_gathered_logits(n: int, v: int, h: int, ranks: int, itemsize: int) -> list[Collective]:
    return [
        Collective("all_gather", itemsize * n * v // ranks, ranks),
        Collective("all_reduce", itemsize * n * h, ranks),
    ]


class Memory(NamedTuple):
    """Bytes on a rank, of a step without the fused epilogue."""

    weight: int
    logits: int
    dw: int
    accumulator: int  # float32 dW of several chunks, which is rounded to `dw` at the end
    dx: int
    chunk_dx: int  # float32, to be summed over the ranks

    @property
    def step(self) -> int:
        """The peak above the weight and the hidden states."""
        of_chunk = self.logits + self.chunk_dx + (self.accumulator or self.dw)
        return self.dx + max(of_chunk, self.accumulator + self.dw)


def memory(n: int, v: int, h: int, ranks: int, dtype: torch.dtype = DTYPE) -> Memory:
    """Return what a cross entropy step of n tokens holds: automatic budget, everything trainable."""
    rows = -(-v // ranks)
    chunk = pieces(n, Budget(None, rows, h, dtype.itemsize).logits(n, dtype.itemsize) // rows)[0].stop
    weight = rows * h * dtype.itemsize
    return Memory(
        weight=weight,
        logits=chunk * rows * dtype.itemsize,
        dw=weight,
        accumulator=rows * h * FLOAT32 if chunk < n else 0,
        dx=n * h * dtype.itemsize,
        chunk_dx=chunk * h * FLOAT32 if ranks > 1 else 0,
    )


class Times(NamedTuple):
    """Seconds of a cross entropy step: its products, one of them, and its collectives."""

    products: float
    dw: float
    before: float  # hidden states and statistics, which the products wait for
    dx: float

    @property
    def exposed(self) -> float:
        return self.before + max(0.0, self.dx - self.dw)


def times(n: int, v: int, h: int, ranks: int, bandwidth: float, scattered: bool = False) -> Times:
    product = 2 * n * h * v / ranks / FLOPS
    *before, dx = of_split_vocabulary(LOSSES["cross entropy"], n, h, ranks, DTYPE.itemsize, scattered)
    return Times(3 * product, product, sent(before) / bandwidth, dx.sent / bandwidth)


def bandwidth(ranks: int, stride: int = 1) -> float:
    """Return the bytes a second that a rank sends, among ranks that are `stride` GPUs apart.

    Between nodes, a collective runs one ring through the adapter of each of its GPUs in a node.
    """
    if ranks * stride <= NODE:
        return NVLINK
    return min(NVLINK, INFINIBAND * max(1, NODE // stride))


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _kb(n_bytes: float) -> str:
    return f"{n_bytes / 1e3:,.1f} kB" if n_bytes >= 999.5 else f"{n_bytes:.0f} B"


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds >= 1e-5 else "< 0.01"


def wire() -> str:
    """Bytes that a rank sends for each token of a cross entropy step, and two other ways."""
    rows, loss = [], LOSSES["cross entropy"]
    for name, (v, h) in MODELS.items():
        for ranks in (2, 4, 8):
            whole = of_split_vocabulary(loss, TOKENS, h, ranks, DTYPE.itemsize)
            *before, dx = whole
            scattered = of_split_vocabulary(loss, TOKENS, h, ranks, DTYPE.itemsize, scattered=True)
            weight = of_gathered_weight(v, h, ranks, DTYPE.itemsize)
            logits = of_gathered_logits(TOKENS, v, h, ranks, DTYPE.itemsize)
            every = (sent(before), dx.sent, sent(whole), sent(scattered), sent(weight), sent(logits))
            rows.append([name, ranks, *(_kb(x / TOKENS) for x in every)])
    split = ["statistics", "dX, all-reduce", "**sum**", "sum, with scattered hidden states"]
    return _table(["", "TP", *split, "gathered weight", "gathered logits"], rows)


def overlap() -> str:
    """Milliseconds of a cross entropy step."""
    rows = []
    for name, (v, h) in MODELS.items():
        for ranks in (2, 8, 2 * NODE):
            speed = bandwidth(ranks)
            of_step, scattered = (times(TOKENS, v, h, ranks, speed, way) for way in (False, True))
            exposed = [f"{_ms(x.exposed)} ({x.exposed / x.products:.1%})" for x in (of_step, scattered)]
            cells = (of_step.products, of_step.dw, of_step.before, of_step.dx)
            rows.append([name, ranks, f"{speed / 1e9:.0f}", *map(_ms, cells), *exposed])
    header = ["", "TP", "GB/s", "all products", "product of dW", "statistics", "dX, all-reduce"]
    return _table([*header, "exposed", "exposed, scattered"], rows)


def losses() -> str:
    """Bytes for each token and loss."""
    rows = []
    for name, loss in LOSSES.items():
        of_tp = [sent(of_statistics(loss, TOKENS, ranks, DTYPE.itemsize)) / TOKENS for ranks in (2, 8)]
        of_cp = [sent(of_split_sequence(loss, TOKENS, ranks)) / TOKENS for ranks in (2, 8, 16)]
        gathers = " + ".join(f"{sum(numbers)}" for numbers, _ in loss.of_vocabulary if numbers)
        rows.append([name, gathers, *map(_kb, of_tp), " + ".join(map(str, loss.of_sequence)), *map(_kb, of_cp)])
    header = ["", "numbers, TP", "TP 2", "TP 8", "numbers, CP", "CP 2", "CP 8", "CP 16"]
    return _table(header, rows)


def large() -> str:
    """Of a rank in large jobs, with the head's rows sharded by FSDP over all ranks that do not split the vocabulary."""
    rows = []
    for name in ("Llama-3-8B", "Qwen, H = 7168"):
        v, h = MODELS[name]
        for tp, cp, dp in ((1, 1, 8), (8, 1, 8), (1, 1, 1024), (8, 1, 128), (8, 4, 128), (8, 16, 128)):
            others = cp * dp
            split = of_split_vocabulary(LOSSES["cross entropy"], TOKENS, h, tp, DTYPE.itemsize) if tp > 1 else []
            sequence = of_split_sequence(LOSSES["cross entropy"], TOKENS, cp) if cp > 1 else []
            weight = of_gathered_weight(-(-v // tp), h, others, DTYPE.itemsize)
            step = times(TOKENS, v, h, tp, bandwidth(tp))
            exposed = step.exposed + sent(sequence) / bandwidth(cp, tp)
            of_weight = sent(weight) / bandwidth(others, tp)
            of_token = [_kb(sent(x) / TOKENS) if x else "" for x in (split, sequence, weight)]
            job = f"{tp} × {cp} × {dp}"
            rows.append([name, f"{tp * others:,}", job, *of_token, *map(_ms, (step.products, exposed, of_weight))])
    header = ["", "GPUs", "TP × CP × DP", "TP", "CP", "FSDP", "products, ms", "exposed, ms", "FSDP, ms"]
    return _table(header, rows)


def held() -> str:
    """MiB on a rank."""
    rows = []
    for name, (v, h) in MODELS.items():
        for n in (TOKENS, 8 * TOKENS):
            for ranks in (1, 2, 4, 8):
                found = memory(n, v, h, ranks)
                dw, dx = found.accumulator or found.dw, found.dx + found.chunk_dx
                cells = (found.weight, found.logits, dw, dx, found.step, n * v * DTYPE.itemsize)
                rows.append([name, f"{n:,}", ranks, *map(_mib, cells)])
    return _table(["", "tokens", "TP", "weight", "logits", "dW", "dX", "**peak**", "all logits"], rows)


_SPLIT_TASK = re.compile(r"(.+) (\d+)x(\d+)x(\d+), one of (\d) ranks, no communication")


def local() -> str:
    """Measured steps of one rank without communication."""
    content = json.loads((RESULTS / "vocab_shard-c69e6f1.json").read_text())
    rows = []
    for row in content["rows"]:
        match = _SPLIT_TASK.fullmatch(row["task"])
        # Without the fused epilogue, as the formula.
        if match is None or match[1] not in LOSSES or row["name"] != f"{OURS}, logits":
            continue
        n, h, v, ranks = map(int, match.groups()[1:])
        formula = memory(n, v, h, ranks).step
        shape = f"{n} × {h} × {v}"
        of_row = f"{row['ms']:.1f}", f"{row['times_floor']:.2f}", f"{row['mib']:,.0f}"
        rows.append([match[1], shape, ranks, *of_row, _mib(formula)])
    header = ["", "tokens × H × V", "ranks", "ms", "× floor", "MiB", "MiB by formula"]
    return _table(header, rows)


def whole(folder: Path = RESULTS) -> str:
    """Measured steps with communication. A later run of a task on the same kind of GPU replaces an earlier one.

    A task that this library alone ran is left out.
    """
    _, _, of_losses = _several_gpus(folder)
    parts = [
        _by_task("time over the floor", of_losses, lambda row: f"{row['times_floor']:.2f}"),
        _by_task("peak MiB", of_losses, lambda row: f"{row['mib']:,.0f}"),
    ]
    return "\n\n".join([training(folder), *parts])


def training(folder: Path = RESULTS) -> str:
    """Measured training steps on several GPUs."""
    runs, of_steps, _ = _several_gpus(folder)
    parts = [
        _by_task("tokens a second and GPU", of_steps, lambda row: f"{row['tokens_per_s']:,.0f}"),
        _by_task("peak GiB", of_steps, lambda row: f"{(row['mib'] + row['resident_mib']) / 1024:.1f}"),
    ]
    kinds: dict[str, list[str]] = {}
    for path, run in runs.items():
        kinds.setdefault(f"{run.environment['ranks']} ranks, {run.title}", []).append(f"`{path.name}`")
    return "\n\n".join([*parts, "; ".join(f"{', '.join(names)}: {where}" for where, names in kinds.items()) + "."])


def _several_gpus(folder: Path) -> tuple[dict[Path, Run], Tasks, Tasks]:
    """Return the runs, and the rows of training steps and of losses that other contenders ran too."""
    paths = [path for path in by_age(folder, "distributed") if "-cpu-" not in path.name]
    runs = {path: load(path) for path in paths}
    cells = {f"{spaced(task)}, {_gpu(run)}": rows for run in runs.values() for task, rows in run.cells.items()}
    cells = {task: rows for task, rows in cells.items() if any(OURS not in name for name in rows)}
    # A step has no floor.
    of_losses = {task: rows for task, rows in cells.items() if any("times_floor" in row for row in rows.values())}
    of_steps = {task: rows for task, rows in cells.items() if task not in of_losses}
    return runs, of_steps, of_losses


def _gpu(run: Run) -> str:
    return str(run.environment["device"]).removeprefix("NVIDIA ").split()[0]


def _by_task(what: str, cells: dict[str, dict[str, Row]], of_row: Callable[[Row], str]) -> str:
    """Return a row for each task, and a column for each contender."""
    names = list(dict.fromkeys(name for rows in cells.values() for name in rows))

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        return of_row(row) if row["failure"] is None else row["failure"].partition(":")[0]

    return _table([what, *names], ([task, *(cell(rows.get(name)) for name in names)] for task, rows in cells.items()))


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (wire, losses, overlap, large, held, local, whole)
}


def main() -> None:
    for name, table in TABLES.items():
        print(f"{name}: {table.__doc__}\n\n{table()}\n")


if __name__ == "__main__":
    main()
