"""Long sequences on one GPU: stock, Liger-Kernel with its tiled MLP, and ours with tiles and checkpoints on the host.

python -m benchmarks.long_context                            the rows of "Longest sequences", steps and then lengths
python -m benchmarks.long_context --steps                    steps alone: times and peaks
python -m benchmarks.long_context --longest GRPO:llama-3.2-1b:8:8192       lengths alone, of one row

A row is `trainer:model:sequences:length`. SFT is a plain loop of forward, backward and AdamW; DPO and GRPO are TRL's
trainers, as in `benchmarks.trainers`; `GRPO-shared` has one prompt of 80% of each sequence for all sequences, and our
trainer shares it. All layers are checkpointed (not reentrant). Contenders:

    stock               transformers' model, TRL's trainer
    Liger-Kernel        its layers and its `LigerTiledSwiGLUMLP` in its own number of parts; in SFT its loss too
    whole, tiled        ours, with `tiled_mlp` None and "auto"
    host                "auto", and checkpoints on the host, by TRL's `OffloadActivations`, or torch's without TRL

Steps are measured at the row's length: the time and the peak. Then the longest sequence is searched that fits, to
within 5%, from that length or `--start`; every trial is a whole step. A trial that would take longer than what is left
of `--seconds` does not start. Set
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: tensors of gigabytes leave holes otherwise. Attention runs in cuDNN
for all contenders, which is faster on Hopper than torch's FlashAttention 2 (`--attention flash`); shared prompts run in
FlexAttention.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import models
from benchmarks.harness import DEVICE, DTYPE, OURS, STOCK, Row, Skipped, Table, check_triton, median_ms, synchronize
from benchmarks.steps import HEADROOM_MIB, StepRow, TrainingStep, allocated_mib, length_at, peak_of, steps_parser

ROWS = [
    "SFT:llama-3-8b:4:8192",
    "GRPO:llama-3.2-1b:8:8192",
    "GRPO-shared:llama-3.2-1b:32:8192",
    "DPO:llama-3.2-1b:8:8192",
]
SMALL = ["SFT:tiny-llama:2:256", "GRPO:tiny-llama:2:256", "GRPO-shared:tiny-llama:4:256", "DPO:tiny-llama:2:256"]
_CUDNN, _FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
_OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ATTENTION = {"cudnn": [_CUDNN, _FLASH, *_OTHERS], "flash": [_FLASH, _CUDNN, *_OTHERS]}  # by priority
GRID = 256 if DEVICE == "cuda" else 16  # tokens
PRECISION = 1.05  # of the longest sequence
LIGER = "Liger-Kernel"
WHOLE, TILED, HOST = (f"{OURS} {how}" for how in ("whole", "tiled", "host"))


@dataclass(frozen=True)
class Contender:
    """A contender.

    - `checkpoints`: where the inputs of the layers are between forward and backward
    - `kernels`: a context manager that patches models
    - `is_ours`: whether the trainer is ours
    """

    checkpoints: str = "device"
    kernels: Callable[..., AbstractContextManager[Any]] = models.nobody
    is_ours: bool = False


@contextmanager
def liger_tiled(*policies: Any, fused: bool) -> Iterator[None]:
    with models.liger_kernel(*policies, fused=fused):
        for model in policies:
            for layer in model.model.layers:
                layer.mlp = tiled_by_liger(layer.mlp, model.config)
        yield


def tiled_by_liger(mlp: Any, config: Any) -> Any:
    from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP

    with torch.device("meta"):
        theirs: Any = LigerTiledSwiGLUMLP(config)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(theirs, name).weight = getattr(mlp, name).weight
    return theirs


def ours(tiles: bool | str | None, checkpoints: str = "device") -> Contender:
    return Contender(checkpoints, partial(models.ours, tiled_mlp=tiles), is_ours=True)


CONTENDERS = {
    WHOLE: ours(None),
    TILED: ours("auto"),
    HOST: ours("auto", "host"),
    LIGER: Contender(kernels=liger_tiled),
    STOCK: Contender(),
}


@dataclass(frozen=True)
class Training:
    """A row: what trains, on how many sequences; the first `prompt` of each is a prompt."""

    trainer: str
    model: str
    sequences: int
    length: int

    @property
    def shares(self) -> bool:
        return self.trainer.endswith("-shared")

    @property
    def kind(self) -> str:
        return self.trainer.removesuffix("-shared")

    @property
    def prompt(self) -> float:
        return 0.8 if self.shares else {"DPO": 0.5, "GRPO": 0.25}.get(self.kind, 0.0)

    @property
    def name(self) -> str:
        return f"{self.trainer} {self.model}, {self.sequences} sequences"

    def contenders(self) -> dict[str, Contender]:
        if not self.shares:
            return CONTENDERS
        return {name: contender for name, contender in CONTENDERS.items() if contender.is_ours}

    def shape(self, length: int) -> tuple[int, int]:
        """Return (B, T) of what the layers get: with a shared prompt, all sequences are one."""
        if not self.shares:
            return self.sequences, length
        prompt = int(length * self.prompt)
        return 1, prompt + self.sequences * (length - prompt)

    def config(self) -> Any:
        return models.config_of(self.model)

    def seconds(self, length: int) -> float:
        """Return a step's time up to a factor: attention is quadratic, and runs at half the speed of other products."""
        config = self.config()
        sequences, n = self.shape(length)
        n_weights = config.num_hidden_layers * (4 * config.hidden_size + 3 * config.intermediate_size)
        products = config.hidden_size * (n_weights + config.vocab_size)
        # Shared prompts: each completion attends to the prompt and to itself.
        pairs = sequences * n * n if not self.shares else n * length
        return sequences * n * products * 8 + 2 * pairs * config.num_hidden_layers * config.hidden_size * 9

    def host_gib(self, length: int) -> float:
        config = self.config()
        a_layer = math.prod(self.shape(length)) * config.hidden_size * DTYPE.itemsize
        return 2 ** math.ceil(math.log2(a_layer)) * config.num_hidden_layers / 2**30


StepOf = Callable[[int], TrainingStep]


@contextmanager
def prepared(training: Training, contender: Contender) -> Iterator[StepOf]:
    """Build what trains; return a function that makes a step on sequences of a length."""
    if contender.kernels is liger_tiled:
        check_triton()
        if find_spec("liger_kernel") is None:
            raise Skipped("Liger-Kernel is not installed")
    policy = models.build(training.model)
    offloading = host_checkpoints(policy) if contender.checkpoints == "host" else nullcontext()
    if training.kind == "SFT":
        with contender.kernels(policy, fused=True):
            yield plain_steps(training, policy, offloading)
        return
    with trainer_steps(training, contender, policy, offloading) as step_of:
        yield step_of


def host_checkpoints(model: Any) -> AbstractContextManager[Any]:
    """Return a context that holds saved tensors, and so the checkpoints, on the host."""
    if DEVICE == "cuda" and find_spec("trl") is not None:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        return get_act_offloading_ctx_manager(model=model)
    return save_on_cpu(pin_memory=DEVICE == "cuda")


def plain_steps(training: Training, policy: Any, offloading: AbstractContextManager[Any]) -> StepOf:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)

    def step_of(length: int) -> TrainingStep:
        torch.manual_seed(1)
        ids = torch.randint(3, models.vocabulary(training.model), (training.sequences, length), device=DEVICE)

        def backward() -> Tensor:
            with offloading:
                loss = policy(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
            return loss.detach()

        return TrainingStep(backward, optimizer)

    return step_of


@contextmanager
def trainer_steps(
    training: Training, contender: Contender, policy: Any, offloading: AbstractContextManager[Any]
) -> Iterator[StepOf]:
    from benchmarks import trainers

    kind = trainers.KINDS[training.kind]
    others = kind.others(training.model)
    if contender.is_ours:
        others["share_prefix"] = training.shares
    patched = [policy, *(x for x in others.values() if isinstance(x, torch.nn.Module))]
    trainer_class = kind.ours if contender.is_ours else kind.stock
    with tempfile.TemporaryDirectory() as folder, contender.kernels(*patched, fused=False):
        trainer = trainers.build(kind, trainer_class, policy, others, folder, training.sequences)

        def step_of(length: int) -> TrainingStep:
            group = training.sequences if training.shares else 2
            data = trainers.Completions.random(
                training.sequences, length, int(length * training.prompt), models.vocabulary(training.model), group
            )
            # GRPO without old log-probabilities is on the policy, as in the first step on its samples.
            batch = on_policy(data) if training.kind == "GRPO" else kind.batch(data, policy)

            def backward() -> Tensor:
                with offloading:
                    return trainer.training_step(trainer.model_wrapped, dict(batch), None)

            return TrainingStep(backward, trainer.optimizer)

        def on_policy(data: Any) -> dict[str, Any]:
            torch.manual_seed(2)
            return {**trainers.rollouts(data, policy), "advantages": torch.randn(len(data.ids), device=DEVICE)}

        yield step_of


@dataclass
class LongStepRow(StepRow):
    """A step; `peak_mib` is the peak with what stays allocated."""

    peak_mib: float | None = None

    def fill(self, step: TrainingStep, tokens: int, repeats: int, before_mib: float) -> None:
        """Measure a step as `StepRow` does, but time and memory in the same runs, because each takes seconds."""
        self.loss, self.grad_norm = step.first()
        gc.collect()
        self.resident_mib = round(allocated_mib() - before_mib, 1)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.ms = round(median_ms(step, repeats, warmup=0), 3)
        self.tokens_per_s = round(tokens / self.ms * 1e3, 1)
        if DEVICE == "cuda":
            self.peak_mib = round(torch.cuda.max_memory_allocated() / 2**20 - before_mib, 1)
            self.mib = round(self.peak_mib - self.resident_mib, 1)


@dataclass
class LongRow(Row):
    """The longest sequence.

    - `length`: the longest that fit, with its peak `mib`; 0 if none did
    - `too_long`: the shortest that did not fit; None if none was tried
    - `trials`: length, peak in MiB or None, and seconds of each step
    """

    length: int = 0
    too_long: int | None = None
    trials: list[tuple[int, float | None, float]] = field(default_factory=list)

    def measured(self, first: LongRow) -> str:
        peak = "" if self.mib is None else f" at {self.mib / 1024:.2f} GiB"
        end = "none longer was tried" if self.too_long is None else f"{self.too_long} does not fit"
        ratio = f"  x{self.length / first.length:.2f} {first.name}" if first.length and first is not self else ""
        return f"{self.length} tokens{peak}; {end}{ratio}"


def fill_step(training: Training, contender: Contender, repeats: int, row: LongStepRow) -> None:
    before = allocated_mib()
    with prepared(training, contender) as step_of:
        row.fill(step_of(training.length), training.sequences * training.length, repeats, before)


@dataclass(frozen=True)
class Limits:
    """Limits of a search.

    - `seconds`: no trial starts that would end later
    - `start`: tokens of the first long trial; None for those of the row
    - `host_gib`: pinned memory that checkpoints may take. torch rounds each tensor there up to a power of two.
    """

    seconds: float
    start: int | None
    host_gib: float


def fill_longest(training: Training, contender: Contender, limits: Limits, row: LongRow) -> None:
    if DEVICE == "cpu":
        raise Skipped("memory is only measured on a GPU")
    guess = training.length if limits.start is None else limits.start
    with prepared(training, contender) as step_of:
        search(training, contender, step_of, guess, limits, row)


def search(
    training: Training, contender: Contender, step_of: StepOf, guess: float, limits: Limits, row: LongRow
) -> None:
    """Try lengths from `guess` on, until one fits and one of at most 5% more does not."""
    end = time.perf_counter() + limits.seconds

    def trial(n: int) -> float | None:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()  # pinned buffers of other sizes
        begin = time.perf_counter()
        peak = peak_of(step_of(n))
        synchronize()
        seconds = time.perf_counter() - begin
        row.trials.append((n, peak, round(seconds, 2)))
        note = "does not fit" if peak is None else f"{peak / 1024:.2f} GiB"
        print(f"    {n}: {note}, {seconds:.1f} s", flush=True)
        return peak

    short = max(GRID, training.length // 4)
    trial(short)  # compiles kernels and creates the optimizer's states, so its time predicts little
    per_unit, timed = row.trials[0][2] / training.seconds(short), False
    n = int(guess) // GRID * GRID
    while n > 0:
        if contender.checkpoints == "host" and training.host_gib(n) > limits.host_gib:
            print(f"    {n}: more than {limits.host_gib:g} GiB on the host", flush=True)
            break
        if timed and time.perf_counter() + per_unit * training.seconds(n) > end:
            break
        peak = trial(n)
        if peak is None:
            row.too_long = n
        else:
            row.length, row.mib = n, round(peak, 1)
            per_unit, timed = row.trials[-1][2] / training.seconds(n), True
        n = next_trial(row)


def next_trial(row: LongRow) -> int:
    """Return the next length to try; 0 if the precision is reached."""
    fits, too_long = row.length, row.too_long
    if too_long is not None and too_long <= fits * PRECISION + GRID:
        return 0
    if too_long is None:
        # Between trials of these lengths memory is linear, except where the peak moves to another part of the step.
        peaks = sorted((n, peak) for n, peak, _ in row.trials if peak is not None)
        limit = length_at(peaks, capacity_mib()) or 0
        following = min(max(0.99 * limit, PRECISION * fits), 2 * fits)
    elif fits:
        following = math.sqrt(fits * too_long)
    else:
        failures = sum(peak is None for _, peak, _ in row.trials)
        following = too_long / 1.08 ** (2 ** (failures - 1))  # close to the first length first
    return max(int(following) // GRID * GRID, (fits // GRID + 1) * GRID)


def capacity_mib() -> float:
    total = torch.cuda.mem_get_info()[1] / 2**20 if DEVICE == "cuda" else 0.0
    return total - HEADROOM_MIB


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = steps_parser(__doc__ or "", "trainer:model:sequences:length", repeats=2, seconds=60.0)
    parse.add_argument("--steps", action="store_true", help="steps at the rows' lengths alone")
    parse.add_argument("--start", type=int, help="tokens of the first trial of a search (by the row)")
    parse.add_argument("--host-gib", type=float, default=96.0, help="pinned memory for checkpoints (%(default)s)")
    parse.add_argument("--attention", choices=ATTENTION, default="cudnn", help="of torch's SDPA (%(default)s)")
    args = parse.parse_args(arguments)
    with sdpa_kernel(ATTENTION[args.attention], set_priority=True):
        return measure(args)


def measure(args: Any) -> Path:
    table = Table("long_context", args, whole=not args.shapes and not args.steps and not args.longest)
    rows = [training_of(shape) for shape in args.shapes or (ROWS if DEVICE == "cuda" else SMALL)]
    if not args.longest:
        for training in rows:
            steps = {name: partial(fill_step, training, c, args.repeats) for name, c in training.contenders().items()}
            table.compare(f"{training.name} of {training.length}", facts(training), steps, LongStepRow)
    if not args.steps:
        limits = Limits(args.seconds, args.start, args.host_gib)
        for training in rows:
            contenders = training.contenders().items()
            searches = {name: partial(fill_longest, training, c, limits) for name, c in contenders}
            table.compare(f"{training.name}, longest", facts(training), searches, LongRow)
    return table.finish()


def training_of(shape: str) -> Training:
    trainer, model, sequences, length = shape.split(":")
    return Training(trainer, model, int(sequences), int(length))


def facts(training: Training) -> Mapping[str, float | str]:
    return {
        "trainer": training.trainer,
        "model": training.model,
        "sequences": training.sequences,
        "length": training.length,
    }


if __name__ == "__main__":
    main()
