"""Benchmark losses on a vocabulary split over GPUs, and training steps of sharded models, communication included.

    python -m benchmarks.distributed                          all GPUs; on a CPU, two processes and small shapes
    python -m benchmarks.distributed --part losses --minutes 8
    python -m benchmarks.distributed 8192:4096:128256         tokens:hidden:vocabulary
    python -m benchmarks.distributed TP:DPO:llama-3-8b:4:2048      TP or FSDP:SFT or DPO:model:sequences:length

Rows are printed and saved as they are measured, the most important shapes first. A contender that raises an error on
one rank, or does not answer, is a row with its reason; the others go on in new processes (`benchmarks/ranks.py`).

Losses: forward and backward of the whole batch. Times and peaks are those of the slowest and the largest rank. The
floor is the products of one rank's rows: three, and one for a reference or teacher. All contenders do these products.

- `liger_chunked`: a `VocabShard`; "reduce_scatter" has hidden states that are split over the sequence
- "no communication": the same on a process group whose collectives do nothing; its results are meaningless. The
  difference to the row above is the exposed communication
- "gathered weight": gather the weight, compute a share of the sequences with plain torch or with this library's
  unsplit loss, reduce and scatter dW: what FSDP does
- "gathered logits": gather the logits, compute the whole loss with plain torch on each rank: what transformers does
- "loss_parallel": torch's cross entropy on logits that are a DTensor
- "liger-kernel": `liger_fused_linear_scaled_cross_entropy_tp` of Liger-Kernel 0.8.5, the losses in plain torch on its
  log-probabilities. It runs native kernels if the separate package `liger-cute-kernels` with NVSHMEM is installed, and
  otherwise chunks of 512 tokens in plain torch. "logits" is its `LigerVocabParallelCrossEntropy` on a rank's logits.
  Its JSD, DPO and GRPO losses know no split vocabulary.

Training steps: see `benchmarks/sharded_steps.py`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.distillation import SOFT, jsd
from benchmarks.harness import (
    DEVICE,
    OURS,
    LossRow,
    Skipped,
    Table,
    check_triton,
    gemm_floor,
    head_weight,
    hidden_states,
    median_ms,
    parser,
    peak_mib,
    synchronize,
)
from benchmarks.preference import BETA, dpo
from benchmarks.ranks import Answer, RankFailure, Ranks, Request, agreed, serve
from benchmarks.vocab_shard import only_rank
from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    VocabShard,
)
from liger_chunked.engine.collectives import gather_tensor

SHAPES = ["8192:4096:128256", "16384:2048:151936"]
STEPS = [
    "TP:SFT:llama-3-8b:4:4096",
    "FSDP:SFT:llama-3.2-1b:8:4096",
    "TP:DPO:llama-3.2-1b:8:2048",
    "FSDP:DPO:llama-3-8b:4:2048",
    "TP:SFT:llama-3.2-1b:8:4096",
    "FSDP:SFT:llama-3-8b:4:4096",
    "TP:DPO:llama-3-8b:4:2048",
    "FSDP:DPO:llama-3.2-1b:8:2048",
]
SMALL = ["64:32:1024", "TP:SFT:tiny-llama-tp:2:32", "FSDP:SFT:tiny-llama-tp:2:32"]
SMALL += ["TP:DPO:tiny-llama-tp:4:32", "FSDP:DPO:tiny-llama-tp:4:32"]
ROWS = 8  # sequences
TIMED_MS = 400
ROW_SECONDS, STEP_SECONDS = 60.0, 120.0  # after which a contender counts as hung
REFERENCED = ("DPO", "JSD")  # one product more

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Batch(NamedTuple):
    """A rank's batch. Its heads have the rank's rows of the vocabulary, or all."""

    x: Tensor  # (B, L, H)
    w: Tensor  # (V, H)
    t: Tensor  # (B, L)
    ref_x: Tensor
    ref_w: Tensor
    advantages: Tensor  # (B,)

    def rows(self, index: Tensor) -> Batch:
        names = ("x", "t", "ref_x", "advantages")
        return self._replace(**{name: getattr(self, name)[index] for name in names})

    @property
    def shard(self) -> VocabShard:
        rows = self.w.shape[0]
        return VocabShard(None, dist.get_rank() * rows, dist.get_world_size() * rows)


@functools.lru_cache(maxsize=1)
def batch_of_rank(n: int, h: int, v: int) -> Batch:
    """Return a batch that is the same on all ranks, and this rank's rows of the heads."""
    ranks = dist.get_world_size()
    if n % (ROWS * ranks) or v % ranks:
        raise Skipped(f"{ranks} ranks cannot split {ROWS} sequences of {n / ROWS:g} tokens, or {v} classes, equally")
    torch.manual_seed(0)
    x, whole = hidden_states(ROWS, n // ROWS, h), head_weight(v, h)
    w = whole.chunk(ranks)[dist.get_rank()].clone()
    t = torch.randint(v, (ROWS, n // ROWS), device=DEVICE)
    # Close to its reference: large margins would saturate the loss.
    ref_x = x + 0.1 * hidden_states(*x.shape)
    return Batch(x, w, t, ref_x, w.clone(), torch.randn(ROWS, device=DEVICE))


Fused = Callable[..., Tensor]
LOSSES: dict[str, Callable[[], Fused]] = {
    "cross entropy": lambda: of_ours(LigerFusedLinearCrossEntropyLoss(), lambda b: (b.w, b.x, b.t)),
    "DPO": lambda: of_ours(LigerFusedLinearDPOLoss(beta=BETA), lambda b: (b.w, b.x, b.t, None, b.ref_x, b.ref_w)),
    "GRPO": lambda: of_ours(LigerFusedLinearGRPOLoss(), lambda b: (b.w, b.x, b.t, b.advantages)),
    "JSD": lambda: of_ours(LigerFusedLinearJSDLoss(**SOFT), lambda b: (b.w, b.x, b.ref_w, b.ref_x)),
}


def of_ours(loss: torch.nn.Module, arguments: Callable[[Batch], tuple[Tensor | None, ...]]) -> Fused:
    def run(batch: Batch, **options: Any) -> Tensor:
        found = loss(*arguments(batch), **options)
        return found[0] if isinstance(found, tuple) else found

    return run


def of_log_probabilities(loss: str, logps: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Tensor:
    """Return a loss in plain torch; `logps(x, w)` are (B, L)."""
    policy = logps(batch.x, batch.w)
    if loss == "DPO":
        with torch.no_grad():
            reference = logps(batch.ref_x, batch.ref_w).sum(-1)
        lengths = torch.full_like(batch.t[:, 0], batch.t.shape[1])
        return dpo(policy.sum(-1), lengths, reference)
    if loss == "GRPO":
        return -((policy - policy.detach()).exp() * batch.advantages[:, None]).mean()
    return -policy.mean()


def of_logits(loss: str, logits: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Tensor:
    """Return a loss in plain torch; `logits(x, w)` are those of the whole vocabulary."""
    if loss == "JSD":
        with torch.no_grad():
            teacher = logits(batch.ref_x, batch.ref_w).float()
        return jsd(logits(batch.x, batch.w).float(), teacher).mean()

    def logps(x: Tensor, w: Tensor) -> Tensor:
        return logits(x, w).float().log_softmax(-1).gather(-1, batch.t[..., None])[..., 0]

    return of_log_probabilities(loss, logps, batch)


class Gathered(torch.autograd.Function):
    """Gather rows. Backward sums their gradient over the ranks, and returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_tensor(x, None).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(), *gradient.shape[1:])
        _reduce_scatter(own, gradient.contiguous())
        return own


class GatheredColumns(torch.autograd.Function):
    """Gather columns for a loss that all ranks compute. Backward returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cat(gather_tensor(x, None).unbind(), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]


class Copied(torch.autograd.Function):
    """Return the input. Backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


@dataclass
class Contender:
    """`loss(batch)`, its input and, if a rank's loss is a share, whether to sum them."""

    loss: Callable[[Batch], Tensor]
    batch: Batch
    is_share: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def split(loss: str, batch: Batch) -> Contender:
    fused, shard = LOSSES[loss](), batch.shard
    return Contender(lambda b: fused(b, vocab_shard=shard), batch)


def scattered(loss: str, batch: Batch) -> Contender:
    fused, shard = LOSSES[loss](), batch.shard
    shard = VocabShard(None, shard.start, shard.vocab_size, "reduce_scatter")
    own = {name: getattr(batch, name).chunk(shard.ranks, 1)[dist.get_rank()].contiguous() for name in ("x", "ref_x")}
    return Contender(lambda b: fused(b, vocab_shard=shard), batch._replace(**own))


def silent(loss: str, batch: Batch) -> Contender:
    fused, shard = LOSSES[loss](), batch.shard
    shard = VocabShard(_fake_group(), shard.start, shard.vocab_size)
    return Contender(lambda b: fused(b, vocab_shard=shard), batch, around=only_rank)


@functools.cache
def _fake_group() -> Any:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    return dist.new_group(backend="fake")


def gathered_weight(loss: str, batch: Batch, whole: Callable[[Batch], Tensor]) -> Contender:
    ranks, groups = dist.get_world_size(), ROWS // 2 if loss == "DPO" else ROWS
    if groups % ranks:
        raise Skipped(f"{ranks} ranks cannot share {groups} {'pairs' if loss == 'DPO' else 'sequences'} equally")
    own = (torch.arange(ROWS, device=DEVICE) % groups % ranks == dist.get_rank()).nonzero()[:, 0]

    def run(b: Batch) -> Tensor:
        w = Gathered.apply(b.w)
        ref_w = gather_tensor(b.ref_w, None).flatten(0, 1) if loss in REFERENCED else b.ref_w
        return whole(b._replace(w=w, ref_w=ref_w)) / ranks

    return Contender(run, batch.rows(own), is_share=True)


def gathered_weight_in_torch(loss: str, batch: Batch) -> Contender:
    return gathered_weight(loss, batch, lambda b: of_logits(loss, lambda x, w: x @ w.t(), b))


def gathered_weight_in_ours(loss: str, batch: Batch) -> Contender:
    return gathered_weight(loss, batch, LOSSES[loss]())


def gathered_logits(loss: str, batch: Batch) -> Contender:
    def logits(x: Tensor, w: Tensor) -> Tensor:
        return GatheredColumns.apply(Copied.apply(x) @ w.t())

    return Contender(lambda b: of_logits(loss, logits, b), batch)


def loss_parallel(loss: str, batch: Batch) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))

    def run(b: Batch) -> Tensor:
        logits = Copied.apply(b.x.flatten(0, 1)) @ b.w.t()
        value = F.cross_entropy(DTensor.from_local(logits.float(), mesh, [Shard(1)]), b.t.flatten())
        return value.to_local() if isinstance(value, DTensor) else value

    return Contender(run, batch, around=loss_parallel)


def liger(loss: str, batch: Batch) -> Contender:
    check_triton()
    from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp as nll

    def logps(x: Tensor, w: Tensor) -> Tensor:
        return -nll(x.flatten(0, 1), w, batch.t.flatten(), dist.group.WORLD).view(batch.t.shape)

    return Contender(lambda b: of_log_probabilities(loss, logps, b), batch)


def liger_logits(loss: str, batch: Batch) -> Contender:
    check_triton()
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    nll = LigerVocabParallelCrossEntropy()

    def logps(x: Tensor, w: Tensor) -> Tensor:
        return -nll(Copied.apply(x) @ w.t(), batch.t, tp_group=dist.group.WORLD)

    return Contender(lambda b: of_log_probabilities(loss, logps, b), batch)


SILENT = f"{OURS}, no communication"
CONTENDERS: dict[str, Callable[[str, Batch], Contender]] = {
    OURS: split,
    SILENT: silent,
    "gathered weight, torch": gathered_weight_in_torch,
    "liger-kernel": liger,
    f"{OURS}, reduce_scatter": scattered,
    f"gathered weight, {OURS}": gathered_weight_in_ours,
    "gathered logits, torch": gathered_logits,
    "liger-kernel, logits": liger_logits,
    "loss_parallel, torch": loss_parallel,
}
ONLY = {  # the losses of a contender that has not all
    "liger-kernel": ("cross entropy", "DPO", "GRPO"),
    "liger-kernel, logits": ("cross entropy", "DPO", "GRPO"),
    "loss_parallel, torch": ("cross entropy",),
}


@dataclass
class RanksRow(LossRow):
    """Of all ranks; contenders must agree on the loss and on the norms of dX and dW."""

    loss: float | None = None
    input_norm: float | None = None
    weight_norm: float | None = None

    def measured(self, first: LossRow) -> str:
        if self.loss is None:
            return super().measured(first)
        norms = f"|dX| {self.input_norm:.4g}  |dW| {self.weight_norm:.4g}"
        return f"{super().measured(first)}  loss {self.loss:.5f}  {norms}"


def measure_loss(loss: str, contender: str, n: int, h: int, v: int, timed_ms: float) -> Answer:
    """Measure a contender on this rank, at the same time as on the others, for about `timed_ms` milliseconds."""
    made = CONTENDERS[contender](loss, batch_of_rank(n, h, v))
    batch = made.batch._replace(x=made.batch.x.requires_grad_(), w=made.batch.w.requires_grad_())
    leaves = (batch.x, batch.w)
    last: list[Tensor] = []

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        with made.around():
            value = made.loss(batch)
            value.backward()
        last[:] = [value.detach()]

    try:
        run()
        synchronize()
        found: Answer = {} if contender == SILENT else _compared(last[0], leaves, made)
        peak = peak_mib(run, leaves)
        found["mib"] = None if peak is None else agreed(peak)
        found["ms"] = ranks_ms(run, timed_ms)
        return found
    finally:
        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_(False)


def _compared(value: Tensor, leaves: tuple[Tensor, Tensor], made: Contender) -> Answer:
    """Return the loss, and the norms of the whole gradients."""
    x, w = (leaf.grad for leaf in leaves)
    assert x is not None and w is not None
    n = made.batch.t.numel()
    x_is_part = made.is_share or x.shape[:2].numel() < n
    loss, of_x, of_w = value.double(), x.double().square().sum(), w.double().square().sum()
    for total, is_part in ((loss, made.is_share), (of_x, x_is_part), (of_w, True)):
        if is_part:
            dist.all_reduce(total)
    return {"loss": loss.item(), "input_norm": of_x.sqrt().item(), "weight_norm": of_w.sqrt().item()}


def ranks_ms(run: Callable[[], object], timed_ms: float) -> float:
    """Return the median time of a warm step on the slowest rank. All ranks repeat it equally often."""
    estimate = agreed(median_ms(run, repeats=3, warmup=1))
    repeats = min(31, max(5, int(timed_ms / estimate)))
    return round(agreed(median_ms(run, repeats, warmup=2)), 4)


def floors(n: int, h: int, v: int) -> Answer:
    found = gemm_floor(n, h, v // dist.get_world_size())
    return {"all": agreed(found.all), "logits": agreed(found.logits)}


def handle(request: Request) -> Answer:
    what, arguments = request["what"], request.get("arguments", {})
    if what == "start":
        return {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"}
    if what == "floor":
        return floors(**arguments)
    if what == "loss":
        return measure_loss(**arguments)
    from benchmarks import sharded_steps

    assert what == "step"
    batch_of_rank.cache_clear()
    return sharded_steps.measure(**arguments)


@dataclass
class Run:
    """A benchmark in progress: its table, its ranks, and the time at which no row may start."""

    table: Table
    ranks: Ranks
    end: float

    def ask(self, what: str, seconds: float, /, **arguments: Any) -> list[Answer]:
        left = self.end - time.monotonic()
        if left < 0:
            self.table.whole = False
            raise Skipped(f"the {self.table.args.minutes:g} minutes are over")
        return self.ranks.ask({"what": what, "arguments": arguments}, min(seconds, max(left, 1.0)))

    def fill(self, row: Any, what: str, seconds: float, /, **arguments: Any) -> None:
        answers = self.ask(what, seconds, **arguments)
        for name, value in answers[0].items():
            setattr(row, name, value)

    def losses(self, n: int, h: int, v: int) -> None:
        size = {"n": n, "h": h, "v": v}
        for loss in LOSSES:
            task = f"{loss} {n}x{h}x{v}, {self.ranks.world} ranks"
            names = [name for name in CONTENDERS if loss in ONLY.get(name, tuple(LOSSES))]
            if not self.table.wanted(task, names):
                continue
            try:
                floor = self.ask("floor", ROW_SECONDS, **size)[0]
            except (Skipped, RankFailure) as failure:
                print(f"\n{task}: {failure}", flush=True)
                self.table.whole = False
                continue
            floor_ms = floor["all"] + (floor["logits"] if loss in REFERENCED else 0.0)

            def fill(row: RanksRow, name: str, loss: str = loss, floor_ms: float = floor_ms) -> None:
                self.fill(row, "loss", ROW_SECONDS, loss=loss, contender=name, timed_ms=TIMED_MS, **size)
                assert row.ms is not None
                row.times_floor = round(row.ms / floor_ms, 4)

            fills = {name: functools.partial(fill, name=name) for name in names}
            facts = {"floor_ms": floor_ms, "tokens": n, "hidden": h, "vocabulary": v, "ranks": self.ranks.world}
            self.table.compare(task, facts, fills, RanksRow, f"floor {floor_ms:.2f} ms")

    def steps(self, way: str, kind: str, model: str, n: int, length: int) -> None:
        from benchmarks import sharded_steps
        from benchmarks.steps import StepRow

        def fill(row: StepRow, name: str) -> None:
            arguments = {"way": way, "kind": kind, "model": model, "n": n, "length": length}
            self.fill(row, "step", STEP_SECONDS, contender=name, **arguments)

        names = sharded_steps.CONTENDERS[way]
        facts = {"way": way, "trainer": kind, "model": model, "sequences": n, "length": length}
        self.table.compare(
            f"{way} {kind} {model} {n}x{length}, {self.ranks.world} ranks",
            {**facts, "ranks": self.ranks.world},
            {name: functools.partial(fill, name=name) for name in names},
            StepRow,
        )


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = parser(__doc__ or "", peer_seconds=1800)
    parse.add_argument("shapes", nargs="*", help=f"default: {' '.join(SHAPES + STEPS)}")
    parse.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="processes (%(default)s)")
    parse.add_argument("--part", choices=("all", "losses", "steps"), default="all", help="of the default shapes")
    parse.add_argument("--minutes", type=float, default=60.0, help="after which no row starts (%(default)s)")
    args = parse.parse_args(arguments)
    end = time.monotonic() + 60 * args.minutes
    table = Table("distributed", args, whole=not args.shapes and args.part == "all")
    table.environment["ranks"] = args.ranks
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # the first rank has the same GPU
    default = SHAPES + STEPS if DEVICE == "cuda" else SMALL
    if args.part != "all":
        default = [shape for shape in default if shape[0].isdigit() == (args.part == "losses")]
    with Ranks("benchmarks.distributed", args.ranks) as ranks:
        run = Run(table, ranks, end)
        for shape in args.shapes or default:
            parts = [int(part) if part.isdigit() else part for part in shape.split(":")]
            (run.losses if isinstance(parts[0], int) else run.steps)(*parts)
    return table.finish()


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        serve(handle)
    else:
        main()
