"""Train a real model with TRL's trainers, stock and ours, and compare what it has learned.

python -m benchmarks.evidence --model smollm2.gguf --out FOLDER             every method, four seeds
python -m benchmarks.evidence --model smollm2.gguf --out FOLDER --timed --trainings grpo:0,1 distillation:0,1:float32
python -m benchmarks.evidence --model smollm2.gguf --out FOLDER --small     two layers and two steps, to try it
python -m benchmarks.evidence --collect FOLDER ... --out benchmarks/results     one file a method, from the FOLDERs

SmolLM2-135M-Instruct learns by SFT, DPO, KTO and GRPO, and teaches its own first layers by distillation
(`evidence_data.py` has the data and the held-out numbers). A seed chooses the order of the data, and what is sampled.
All contenders of a method start from the same weights, see the same rows and differ in nothing but:

    stock                    TRL's trainer
    liger-kernel layers      TRL's trainer on Liger-Kernel's norms, MLPs and rotary embedding
    liger_chunked            ours on our layers, without shared prompts, with TRL's loss
    liger_chunked, all on    also the library's own loss, shared prompts, and no pass for sequences of zero advantage

`grpo_top_p` samples with top-p. There ours takes the softmax over the ids that the sampler kept, and stock the one over
the whole vocabulary. These are two algorithms, so their results may differ.

First, one process times updates of larger batches, alone on the machine (`timed`). An update is forward, backward and
optimizer, without generation, at TRL's defaults: bfloat16 autocast, float32 parameters, every layer checkpointed. Then
several processes train (`trained`), seed by seed, because a small model leaves the GPU idle; those runs are not timed,
and keep their activations. After `--seconds`, no further run starts.

Each run is one line of FOLDER/*.jsonl, written when it ends, so that nothing is lost if the machine goes away.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # GKD is experimental in TRL

import torch
import torch.multiprocessing
from datasets import Dataset, disable_progress_bars
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from benchmarks import models
from benchmarks.evidence_data import MAX_ANSWER, Data, Judge, Row, Scores, exact
from benchmarks.harness import DEVICE, OURS, STOCK, Skipped, environment, synchronize
from benchmarks.trainers import patched
from examples.pretrained import load
from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)
from liger_chunked.integrations import trl as integration

LAYERS = "liger-kernel layers"
ALL_ON = f"{OURS}, all on"
SEEDS = 4
WARM, TIMED = 4, 12  # updates of a timed run
STUDENT_LAYERS = 10  # of the teacher's 30
GROUP = 8  # completions of a prompt
BETA = 0.1  # of DPO and KTO


@dataclass(frozen=True)
class Contender:
    """Which of the two trainers, the layers' kernels, and whether everything is on."""

    ours: bool
    layers: Callable[..., AbstractContextManager[Any]]
    all_on: bool = False


CONTENDERS = {
    STOCK: Contender(False, models.nobody),
    LAYERS: Contender(False, models.liger_kernel),
    OURS: Contender(True, models.ours),
    ALL_ON: Contender(True, models.ours, all_on=True),
}


@dataclass(frozen=True)
class Method:
    """A trainer of TRL and ours, its data, and its settings.

    Attributes:
        rows: which of `Data`'s sets; the sequences of a row are counted by the trainer.
        score: which of the `Judge`'s.
        curves: what TRL's log has of each step, to be kept.
        batch, timed_batch: rows of a training update, and of a timed one.
        settings: of the config.
        loss: the library's loss that equals the trainer's. None: TRL's trainer under `patch_trl` takes none.
        options: of our trainer, without everything on.
        everything: of our trainer, with everything on.
        needs: other models: a reference, or a teacher and a smaller student.
    """

    stock: Callable[..., Any]
    ours: Callable[..., Any]
    config: type
    rows: Callable[[Data, int], list[Row]]
    score: Callable[[Judge, PreTrainedModel], Scores]
    curves: tuple[str, ...]
    steps: int
    batch: int
    timed_batch: int
    settings: dict[str, Any]
    loss: Callable[[], nn.Module] | None
    options: dict[str, Any] = field(default_factory=dict)
    everything: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    contenders: tuple[str, ...] = tuple(CONTENDERS)


_PREFERENCES = ("loss", "rewards/accuracies", "rewards/margins")
_DPO = Method(
    DPOTrainer,
    integration.LigerDPOTrainer,
    DPOConfig,
    Data.preferences,
    Judge.preferences,
    _PREFERENCES,
    steps=60,
    batch=16,
    timed_batch=96,
    settings={"learning_rate": 1e-5, "beta": BETA},
    loss=partial(LigerFusedLinearDPOLoss, beta=BETA),
    options={"share_prefix": False},
    everything={"share_prefix": "auto"},
    needs="reference",
)
_SHARES_NOTHING = {"share_prefix": False, "skip_zero_advantage": False}
_SHARES = {"share_prefix": "auto", "skip_zero_advantage": "auto"}
_GRPO = Method(
    GRPOTrainer,
    integration.LigerGRPOTrainer,
    GRPOConfig,
    Data.prompts,
    Judge.questions,
    ("loss", "reward", "frac_reward_zero_std", "entropy", "completions/mean_length"),
    steps=40,
    batch=8 * GROUP,
    timed_batch=16 * GROUP,
    settings={
        "learning_rate": 2e-5,
        "num_generations": GROUP,
        "max_completion_length": MAX_ANSWER,
        "temperature": 1.0,
    },
    loss=partial(LigerFusedLinearGRPOLoss.from_loss_type, "dapo"),  # TRL's default
    options=_SHARES_NOTHING,
    everything=_SHARES,
)
METHODS = {
    "sft": Method(
        SFTTrainer,
        integration.LigerSFTTrainer,
        SFTConfig,
        Data.text,
        Judge.text,
        ("loss", "entropy", "mean_token_accuracy"),
        steps=60,
        batch=16,
        timed_batch=64,
        settings={"learning_rate": 2e-5},
        loss=LigerFusedLinearCrossEntropyLoss,
    ),
    "dpo": _DPO,
    "kto": replace(
        _DPO,
        stock=KTOTrainer,
        ours=integration.LigerKTOTrainer,
        config=KTOConfig,
        rows=Data.labelled,
        batch=32,
        timed_batch=192,
        loss=partial(LigerFusedLinearKTOLoss, beta=BETA),
        options={},
        everything={},
        curves=("loss", "rewards/margins", "kl"),
    ),
    "grpo": _GRPO,
    "grpo_top_p": replace(
        _GRPO,
        settings={**_GRPO.settings, "top_p": 0.9},
        options={**_SHARES_NOTHING, "kept_ids": True},
        everything={**_SHARES, "kept_ids": True},
        contenders=(STOCK, ALL_ON),
    ),
    "distillation": Method(
        GKDTrainer,
        patched(GKDTrainer),
        GKDConfig,
        Data.messages,
        Judge.divergence,
        ("loss",),
        steps=80,
        batch=16,
        timed_batch=32,  # so that stock has memory for the logits
        settings={"learning_rate": 5e-4, "lmbda": 0.0, "beta": 0.0, "temperature": 1.0},
        loss=None,
        needs="teacher",
    ),
}


class Job(NamedTuple):
    """One run: timed updates, or a training with its held-out numbers.

    `float32` leaves bfloat16 out, to see which differences are rounding.
    """

    method: str
    contender: str
    seed: int
    timed: bool
    float32: bool = False


def timed_jobs(methods: Sequence[str]) -> list[Job]:
    return [Job(name, contender, 0, timed=True) for name in methods for contender in METHODS[name].contenders]


def training_jobs(specifications: Sequence[str]) -> list[Job]:
    """Return the trainings of `method:seed,seed` and `method:seed,seed:float32`. A seed is complete before the next.

    Raises:
        ValueError: an unknown method, or another form.
    """
    found = []
    for specification in specifications:
        name, seeds, *dtype = specification.split(":")
        if name not in METHODS or dtype not in ([], ["float32"]):
            raise ValueError(f"expected method:seed,seed or method:seed,seed:float32, got {specification!r}")
        found += [
            Job(name, contender, int(seed), timed=False, float32=bool(dtype))
            for seed in seeds.split(",")
            for contender in METHODS[name].contenders
        ]
    return sorted(found, key=lambda job: (job.float32, job.seed))  # stable: methods keep their order


class Watch(TrainerCallback):
    """Times each update and its peak memory. `leave_out` takes what runs inside it out of the time.

    Attributes:
        ms: of each update.
        mib: peak of each update, above what was allocated when the run began; empty on a CPU.
        left_out_ms: of each update.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.mib: list[float] = []
        self.left_out_ms: list[float] = []
        self._before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        self._left_out = 0.0

    def leave_out(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            begin = time.perf_counter()
            found = run(*args, **kwargs)
            synchronize()
            self._left_out += time.perf_counter() - begin
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return found

        return timed

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._left_out, self._begin = 0.0, time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.ms.append((time.perf_counter() - self._begin - self._left_out) * 1e3)
        self.left_out_ms.append(self._left_out * 1e3)
        if DEVICE == "cuda":
            self.mib.append((torch.cuda.max_memory_allocated() - self._before) / 2**20)


def first_layers(model: PreTrainedModel, n: int) -> PreTrainedModel:
    """Return a copy of a model with its first `n` layers."""
    whole, model.model.layers = model.model.layers, model.model.layers[:n]
    try:
        student = copy.deepcopy(model)
    finally:
        model.model.layers = whole
    student.config.num_hidden_layers = n
    if getattr(student.config, "layer_types", None):
        student.config.layer_types = student.config.layer_types[:n]
    return student


class Bench:
    """A process's model and data, on which it runs jobs.

    Args:
        source: of the model, see `examples.pretrained.load`.
        small: a model of two layers, two steps and little data, to try the code.
    """

    def __init__(self, source: str, *, small: bool) -> None:
        model, tokenizer = load(source)
        if small:
            model = first_layers(model, 2)
        self.small = small
        self.data = Data(tokenizer, limit=4 if small else None)
        self.judge = Judge(model.to(DEVICE), self.data)
        self.environment = {**environment(), "model": Path(source).stem}

    def _policy(self, needs: str) -> PreTrainedModel:
        pretrained = self.judge.pretrained
        layers = 1 if self.small else STUDENT_LAYERS
        policy = first_layers(pretrained, layers) if needs == "teacher" else copy.deepcopy(pretrained)
        return policy.requires_grad_(True).train()

    def untrained(self, name: str) -> Scores:
        """Return the held-out numbers before training."""
        method = METHODS[name]
        return method.score(self.judge, self._policy(method.needs).eval())

    def run(self, job: Job) -> Row:
        """Return what a job measured, ready for JSON."""
        method, contender = METHODS[job.method], CONTENDERS[job.contender]
        set_seed(job.seed)
        watch = Watch()
        policy = self._policy(method.needs)
        others: dict[str, Any] = {}
        if method.needs == "reference":
            others["ref_model"] = copy.deepcopy(self.judge.pretrained)
        elif method.needs == "teacher":
            others["teacher_model"] = copy.deepcopy(self.judge.pretrained)
        every = [policy, *others.values()]
        if method.config is GRPOConfig:
            others["reward_funcs"] = exact
        if contender.ours:
            others |= method.everything if contender.all_on else method.options
            if contender.all_on and method.loss is not None:
                others["loss"] = method.loss()
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contender.layers(*every, fused=False):
            trainer = (method.ours if contender.ours else method.stock)(
                model=policy,
                args=self._config(method, job, folder),
                processing_class=self.data.tokenizer,
                train_dataset=Dataset.from_list(method.rows(self.data, job.seed)),
                **others,
            )
            if job.timed:
                trainer.add_callback(watch)
                if isinstance(trainer, GRPOTrainer):
                    trainer._generate_and_score_completions = watch.leave_out(trainer._generate_and_score_completions)
            trainer.train()
            weights = policy.state_dict()
        result: Row = {**job._asdict(), "seconds": round(time.perf_counter() - started, 1)}
        if job.timed:
            steps = slice(1 if self.small else WARM, None)
            found = {"ms": watch.ms, "mib": watch.mib, "generation_ms": watch.left_out_ms}
            return result | {name: [round(x, 2) for x in values[steps]] for name, values in found.items()}
        log = [row for row in trainer.state.log_history if "loss" in row]
        result["curves"] = {name: [row.get(name) for row in log] for name in method.curves}
        trained = self._policy(method.needs)
        trained.load_state_dict(weights)
        result["scores"] = _plain(method.score(self.judge, trained.eval()))
        return result

    def _config(self, method: Method, job: Job, folder: str) -> Any:
        steps = WARM + TIMED if job.timed else method.steps
        batch = method.timed_batch if job.timed else method.batch
        if self.small:
            steps, batch = 2, GROUP if method.config is GRPOConfig else 4
        return method.config(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=min(5, steps // 2),
            # TRL logs entropies, which cost a pass where sequences are skipped: not in timed updates.
            logging_steps=10_000 if job.timed else 1,
            gradient_checkpointing=job.timed,
            bf16=DEVICE == "cuda" and not job.float32,
            use_cpu=DEVICE == "cpu",
            dataloader_pin_memory=DEVICE == "cuda",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=job.seed,
            **method.settings,
        )


def _plain(scores: Scores) -> Row:
    return {name: score._asdict() for name, score in scores.items()}


def _freed() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


class Turn(NamedTuple):
    """What the processes share: the next training, when they may start, and when the last one may."""

    next: Any  # a shared integer
    start: Any  # an event
    deadline: float  # of time.time()


def work(index: int, args: argparse.Namespace, turn: Turn) -> None:
    """Run jobs until none is left. The first process also runs the timed ones, before the others start."""
    disable_progress_bars()
    out = args.out / f"process-{index}.jsonl"
    bench = Bench(args.model, small=args.small)
    timed, trainings = timed_jobs(args.timed), training_jobs(args.trainings)

    def record(row: Row) -> None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def attempt(job: Job) -> None:
        begin = time.time()
        try:
            row = bench.run(job)
        except Skipped as reason:
            row = {**job._asdict(), "failure": str(reason)}
        except Exception as error:  # recorded; the other jobs go on
            traceback.print_exc()
            row = {**job._asdict(), "failure": f"{type(error).__name__}: {error}"[:500]}
        record(row)
        _freed()
        told = {k: v for k, v in row.items() if k in ("failure", "scores", "seconds")}
        if job.timed and "ms" in row:
            told["ms"], told["mib"] = sorted(row["ms"])[len(row["ms"]) // 2], max(row["mib"], default=None)
        print(f"{time.time() - begin:6.1f} s  {job}: {told}", flush=True)

    if index == 0:
        record({"environment": bench.environment, "args": {k: str(v) for k, v in vars(args).items()}})
        end = time.time() + args.timed_seconds
        for job in timed:
            if time.time() < end:
                attempt(job)
        turn.start.set()
        for name in dict.fromkeys(job.method for job in trainings):
            record({"method": name, "untrained": _plain(bench.untrained(name))})
    turn.start.wait()
    slowest = 0.0
    while True:
        with turn.next.get_lock():
            index_of_job = turn.next.value
            turn.next.value += 1
        if index_of_job >= len(trainings) or time.time() + slowest > turn.deadline:
            return
        begin = time.time()
        attempt(trainings[index_of_job])
        slowest = max(slowest, time.time() - begin)


def run(args: argparse.Namespace) -> None:
    """Start the processes, and wait for them."""
    args.out.mkdir(parents=True, exist_ok=True)
    context: SpawnContext = torch.multiprocessing.get_context("spawn")
    turn = Turn(context.Value("i", 0), context.Event(), time.time() + args.seconds)
    processes = [context.Process(target=work, args=(index, args, turn)) for index in range(args.processes)]
    for process in processes:
        process.start()
    # A first process that died must not keep the others waiting.
    while processes[0].is_alive() and not turn.start.is_set():
        time.sleep(0.5)
    turn.start.set()
    for process in processes:
        process.join()


def collect(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write `evidence_<method>-<commit>.json`, one file a method. A job in a later folder replaces an earlier one.

    The commit and the environment are those of the first folder. A run of another card or commit names these itself.
    """
    rows, where = [], None
    for folder in folders:
        lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        own = next(row["environment"] for row in found if "environment" in row)
        where = own if where is None else where
        elsewhere = {name: own[name] for name in ("device", "commit") if own[name] != where[name]}
        rows += [row | elsewhere if "contender" in row else row for row in found]
    assert where is not None, "a folder"
    rows.sort(key=lambda row: "failure" not in row)  # what succeeded elsewhere replaces a failure
    of_jobs = {tuple(row.get(name, False) for name in Job._fields): row for row in rows if "contender" in row}
    untrained = {row["method"]: row["untrained"] for row in rows if "untrained" in row}
    order, written = list(CONTENDERS), []
    runs = sorted(of_jobs.values(), key=lambda row: (row["seed"], order.index(row["contender"])))
    for name, method in METHODS.items():
        own = [row for row in runs if row["method"] == name]
        if not own:
            continue
        sizes = {"steps": method.steps, "batch": method.batch, "timed_batch": method.timed_batch}
        content = {
            "environment": where,
            "method": name,
            "settings": {**sizes, **method.settings},
            "untrained": untrained.get(name),
            "timed": [row for row in own if row["timed"]],
            "trained": [row for row in own if not row["timed"] and not row.get("float32")],
            "trained_float32": [row for row in own if row.get("float32")],
        }
        path = out / f"evidence_{name}-{where['commit'][:7] or 'unknown'}.json"
        path.write_text(_lines(_rounded(content)) + "\n")
        written.append(path)
    return written


def _lines(content: Row) -> str:
    """Return JSON with one line for each field and each run, so that a change of a run is one line of a diff."""
    fields = []
    for name, value in content.items():
        rows = [json.dumps(row) for row in value] if isinstance(value, list) else None
        text = json.dumps(value) if rows is None else "[\n  " + ",\n  ".join(rows) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}"


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.6g}")
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else x


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a .gguf file, or a name or folder of Hugging Face")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--collect", type=Path, nargs="+", metavar="FOLDER", help="write one file a method, and stop")
    parser.add_argument(
        "--timed", nargs="*", choices=METHODS, default=list(METHODS), help="methods whose updates to time"
    )
    every = [f"{name}:{','.join(map(str, range(SEEDS)))}" for name in METHODS]
    parser.add_argument("--trainings", nargs="*", default=every, help="such as grpo:0,1 or dpo:0:float32")
    parser.add_argument("--processes", type=int, default=1 if DEVICE == "cpu" else 6)
    parser.add_argument("--seconds", type=float, default=3600, help="no run starts later (default: %(default)s)")
    parser.add_argument("--timed-seconds", type=float, default=600, help="no timed run starts later")
    parser.add_argument("--small", action="store_true", help="two layers and two steps, to try the code")
    args = parser.parse_args(arguments)
    if args.collect:
        print(*collect(args.collect, args.out), sep="\n")
        return
    if args.model is None:
        parser.error("--model is missing")
    try:
        training_jobs(args.trainings)
    except ValueError as error:
        parser.error(str(error))
    run(args)


if __name__ == "__main__":
    main()
