"""Benchmark training steps of TRL's trainers: stock, stock with Liger-Kernel's layer kernels, and ours.

python -m benchmarks.trainers                               every trainer, Llama-3.2-1B and Qwen2.5-0.5B
python -m benchmarks.trainers DPO:qwen2.5-0.5b:8:4096       trainer:model:sequences:length
python -m benchmarks.trainers --longest --task SimPO        the longest sequences that fit, two at a time
python -m benchmarks.trainers --offload-activations DPO:llama-3.2-1b:8:2048      offload activations to the CPU
python -m benchmarks.trainers --share                       shared prompts: trainer:model:sequences:length:prompt

A step is `training_step`, then AdamW, on one prepared batch: nothing is generated, tokenized or loaded. All contenders
start from the same random weights, in bfloat16 under TRL's default mixed precision. All layers are checkpointed,
attention is SDPA, and there is no padding. Layer kernels are applied to every model of a trainer. Liger-Kernel's fused
losses are not used, because TRL has no place for them. If our trainer keeps TRL's loss, "loss=" is ours with the
library's loss instead.

References are Gaussian steps away from the policy. Qwen2.5-0.5B has a teacher with the shape of Qwen2.5-1.5B,
Llama-3.2-1B one with its own shape; the divergence is the symmetric JSD, beta 0.5. DPO, KTO, ORPO and SimPO train on
the second half of each sequence, the others on the last three quarters. With `--share`, a shape names the length of its
prompts, a GRPO batch has one prompt for every 8 sequences, and one more contender is ours with `share_prefix="auto"`.
The other contenders share nothing. `--sequences-per-prompt 1` is a batch where nothing is shared.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # ORPO, CPO and GKD are experimental in TRL

import torch
import torch.nn.functional as F
from datasets import Dataset, disable_progress_bars
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.models.activation_offloading import get_act_offloading_ctx_manager

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, OURS_SHARED, STOCK, Table
from benchmarks.steps import TrainingStep, allocated_mib, compare, parts, steps_parser
from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)
from liger_chunked.integrations import trl as integration
from liger_chunked.integrations.trl import patch_trl

MODELS = ["llama-3.2-1b", "qwen2.5-0.5b"]
LAYERS = "liger-kernel layers"
OURS_WITH_LOSS = f"{OURS}, loss="
GRID = 1024  # tokens: step of the search for the longest sequences
TEACHERS = {"qwen2.5-0.5b": "qwen2.5-1.5b"}  # others: the student's shape
REFERENCE_NOISE = 0.1  # relative to the standard deviation of the policy's weights
IGNORE_INDEX = -100

disable_progress_bars()


@dataclass(frozen=True)
class Completions:
    """Sequences (n, T) without padding; the first `n_prompt` tokens are a prompt, which `group` sequences share."""

    ids: Tensor
    n_prompt: int

    @classmethod
    def random(cls, n: int, length: int, n_prompt: int, vocabulary: int, group: int = 2) -> Completions:
        torch.manual_seed(1)
        ids = torch.randint(3, vocabulary, (n, length), device=DEVICE)
        ids[:, :n_prompt] = ids[: -(-n // group), :n_prompt].repeat(group, 1)[:n]  # also where n is odd
        return cls(ids, n_prompt)

    @property
    def everywhere(self) -> Tensor:
        return torch.ones_like(self.ids)

    @property
    def mask(self) -> Tensor:
        mask = self.everywhere
        mask[:, : self.n_prompt] = 0
        return mask

    @property
    def labels(self) -> Tensor:
        return self.ids.masked_fill(self.mask == 0, IGNORE_INDEX)


Batch = dict[str, Any]


def pairs(data: Completions, policy: PreTrainedModel) -> Batch:
    return {"input_ids": data.ids, "attention_mask": data.everywhere, "completion_mask": data.mask}


def labelled(data: Completions, policy: PreTrainedModel) -> Batch:
    """Return a batch for KTO, which also pairs each prompt with its neighbour's completion."""
    mismatched = torch.cat([data.ids[:, : data.n_prompt], data.ids[:, data.n_prompt :].roll(1, 0)], dim=1)
    batch = pairs(data, policy)
    label = torch.arange(len(data.ids), device=DEVICE) % 2 == 0
    return {**batch, **{f"KL_{name}": x for name, x in batch.items()}, "KL_input_ids": mismatched, "label": label}


def sides(data: Completions, policy: PreTrainedModel) -> Batch:
    """Return a batch for ORPO and CPO, with chosen and rejected in separate tensors."""
    fields = {"input_ids": data.ids, "attention_mask": data.everywhere, "labels": data.labels}
    halves = {name: x.chunk(2) for name, x in fields.items()}
    return {f"{side}_{name}": x[i] for i, side in enumerate(("chosen", "rejected")) for name, x in halves.items()}


def messages(data: Completions, policy: PreTrainedModel) -> Batch:
    return {"input_ids": data.ids, "attention_mask": data.everywhere, "labels": data.labels}


def rollouts(data: Completions, policy: PreTrainedModel) -> Batch:
    halves = {"prompt": slice(data.n_prompt), "completion": slice(data.n_prompt, None)}
    ids = {f"{name}_ids": data.ids[:, half] for name, half in halves.items()}
    masks = {f"{name}_mask": data.everywhere[:, half] for name, half in halves.items()}
    return {**ids, **masks, "num_items_in_batch": data.mask.sum()}


@torch.no_grad()
def scored_rollouts(data: Completions, policy: PreTrainedModel) -> Batch:
    """Return a batch for GRPO, with advantages, and old log-probabilities close to the policy's."""
    logps = []
    for row in data.ids:
        hidden = policy.base_model(row[None], use_cache=False).last_hidden_state[0, data.n_prompt - 1 : -1]
        blocks = zip(hidden.split(1024), row[data.n_prompt :].split(1024), strict=True)  # limits the logits' memory
        logps.append(torch.cat([-F.cross_entropy(policy.lm_head(h).float(), t, reduction="none") for h, t in blocks]))
    old_logps = torch.stack(logps)
    torch.manual_seed(2)
    old_logps += 0.1 * torch.randn_like(old_logps)
    advantages = torch.randn(len(old_logps), device=DEVICE)
    return {**rollouts(data, policy), "advantages": advantages, "old_per_token_logps": old_logps}


def reference(name: str) -> Batch:
    """Return a reference close to the policy: large margins would saturate the loss."""
    model = models.build(name, checkpointing=False)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(REFERENCE_NOISE * p.std() * torch.randn_like(p))
    return {"ref_model": model}


def teacher(name: str) -> Batch:
    return {"teacher_model": models.build(TEACHERS.get(name, name), seed=1, checkpointing=False)}


def reward(name: str) -> Batch:
    return {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}


def nothing(name: str) -> Batch:
    return {}


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL, and our subclass of it, or what makes it under `patch_trl`.

    - `batch`: builds the input of its `compute_loss`
    - `rows`: rows of the dataset that its constructor needs, and never reads
    - `others`: further models in its arguments, with the policy's shape
    - `settings`: of its config
    - `prompt`: share of a sequence that it does not train on
    - `sequences`: sequences per batch
    - `loss`: the library's loss that equals the trainer's, if our trainer keeps TRL's loss
    - `group`: sequences per prompt, with `--share`
    """

    stock: Callable[..., Any]
    ours: Callable[..., Any]
    config: type
    batch: Callable[[Completions, PreTrainedModel], Batch]
    rows: list[Batch]
    others: Callable[[str], Batch] = nothing
    settings: Batch = field(default_factory=dict)
    prompt: float = 0.5
    sequences: int = 8
    loss: Callable[[], torch.nn.Module] | None = None
    group: int = 2


def patched(trainer: type) -> Callable[..., Any]:
    """Return what makes a trainer of TRL's under `patch_trl`, whose settings it takes too."""

    def make(*, share_prefix: bool | str = "auto", **arguments: Any) -> Any:
        with patch_trl(share_prefix=share_prefix):
            return trainer(**arguments)

    return make


_PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
_LABELLED = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
_MESSAGES = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
_PROMPTS = [{"prompt": "a"}]
_KEEP = {"remove_unused_columns": False}  # TRL would warn, then do the same
KINDS = {
    "SFT": Kind(
        SFTTrainer,
        integration.LigerSFTTrainer,
        SFTConfig,
        messages,
        _MESSAGES,
        prompt=0.25,
        loss=LigerFusedLinearCrossEntropyLoss,
    ),
    "DPO": Kind(
        DPOTrainer, integration.LigerDPOTrainer, DPOConfig, pairs, _PAIRS, reference, loss=LigerFusedLinearDPOLoss
    ),
    "KTO": Kind(
        KTOTrainer,
        integration.LigerKTOTrainer,
        KTOConfig,
        labelled,
        _LABELLED,
        reference,
        loss=LigerFusedLinearKTOLoss,
    ),
    "ORPO": Kind(ORPOTrainer, patched(ORPOTrainer), ORPOConfig, sides, _PAIRS, settings=_KEEP),
    "SimPO": Kind(
        CPOTrainer,
        patched(CPOTrainer),
        CPOConfig,
        sides,
        _PAIRS,
        settings={**_KEEP, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "GRPO": Kind(
        GRPOTrainer,
        integration.LigerGRPOTrainer,
        GRPOConfig,
        scored_rollouts,
        _PROMPTS,
        reward,
        prompt=0.25,
        loss=partial(LigerFusedLinearGRPOLoss.from_loss_type, "dapo"),
        group=8,
    ),
    "GKD": Kind(
        GKDTrainer,
        patched(GKDTrainer),
        GKDConfig,
        messages,
        _MESSAGES,
        teacher,
        settings={"lmbda": 0.0, "beta": 0.5},
        prompt=0.25,
        sequences=3,  # the most whose logits stock holds in 80 GB
    ),
    "Distillation": Kind(
        DistillationTrainer,
        integration.LigerDistillationTrainer,
        DistillationConfig,
        rollouts,
        _PROMPTS,
        teacher,
        settings={"beta": 0.5},
        prompt=0.25,
    ),
}
SHAPES = [f"{name}:{model}:{kind.sequences}:2048" for model in MODELS for name, kind in KINDS.items()]
LONGEST = [f"{name}:{MODELS[0]}:2:2048" for name in KINDS]
SHARED = [
    "GRPO:qwen2.5-0.5b:16:2560:2048",
    "GRPO:llama-3.2-1b:8:2560:2048",
    "DPO:llama-3.2-1b:16:1536:1024",
]
SHARED_LONGEST = ["GRPO:llama-3.2-1b:8:2560:2048"]
SHARED_SMALL = ["GRPO:tiny-qwen2:8:40:32", "DPO:tiny-llama:4:40:24"]
SMALL = [f"{name}:{model}:4:32" for name, model in zip(KINDS, ["tiny-llama", "tiny-qwen2"] * len(KINDS), strict=False)]


class Contender(NamedTuple):
    """A kind's trainer class, the context manager that patches its models, and what it passes to the trainer."""

    side: Literal["stock", "ours"]
    kernels: Callable[..., Any]
    brings_loss: bool = False
    shares: bool = False


CONTENDERS = {
    STOCK: Contender("stock", models.nobody),
    OURS: Contender("ours", models.ours),
    OURS_WITH_LOSS: Contender("ours", models.ours, brings_loss=True),
    LAYERS: Contender("stock", models.liger_kernel),
    OURS_SHARED: Contender("ours", models.ours, shares=True),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, which the trainers require."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_ = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    chat = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, chat_template=chat, **special)


def dataset(rows: list[Batch]) -> Dataset:
    # Pass a fingerprint: computing one inspects pyarrow, which fails if pyarrow is on PYTHONPATH but not installed.
    return Dataset(InMemoryTable.from_pylist(rows), fingerprint="benchmark")


def build(
    kind: Kind, trainer_class: Callable[..., Any], policy: PreTrainedModel, others: Batch, folder: str, n: int
) -> Any:
    """Build a trainer in the state after `train()` has begun."""
    batch_size = {"per_device_train_batch_size": n}
    if kind.config is GRPOConfig:
        batch_size["num_generations"] = n  # whatever the batches hold: nothing is generated
    trainer = trainer_class(
        model=policy,
        args=kind.config(
            output_dir=folder,
            use_cpu=DEVICE == "cpu",
            bf16=DEVICE == "cuda",
            gradient_checkpointing=policy.is_gradient_checkpointing,
            learning_rate=0.0,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            **batch_size,
            **kind.settings,
        ),
        processing_class=tokenizer(),
        train_dataset=dataset((kind.rows * n)[:n]),
        **others,
    )
    trainer._prepare_inputs = lambda inputs: inputs  # they are prepared already; GRPO's would be generated
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    return trainer


def fill(row: Any, table: Table, name: str, model: str, n: int, length: int, prompt: int | None, group: int) -> None:
    """Measure a contender. `prompt` is the length of all prompts; None for the kind's share of a sequence."""
    before = allocated_mib()
    kind = KINDS[name]
    side, kernels, brings_loss, shares = CONTENDERS[row.name]
    policy = models.build(model, checkpointing=not table.args.no_checkpointing)

    def data(length: int) -> Batch:
        n_prompt = int(length * (kind.prompt if prompt is None else prompt / whole))
        return kind.batch(Completions.random(n, length, n_prompt, models.vocabulary(model), group), policy)

    whole = length
    batch = data(length)
    others = kind.others(model)
    every = [policy, *(x for x in others.values() if isinstance(x, PreTrainedModel))]
    if brings_loss:
        assert kind.loss is not None
        others["loss"] = kind.loss()
    if side == "ours":
        others["share_prefix"] = "auto" if shares else False
    with tempfile.TemporaryDirectory() as folder, kernels(*every, fused=False):
        trainer = build(kind, getattr(kind, side), policy, others, folder, n)
        # The context that `activation_offloading=True` puts around a step; GRPO's config lacks that field.
        offload = table.args.offload_activations
        offloading = get_act_offloading_ctx_manager(trainer.model) if offload else nullcontext()

        def step_on(batch: Batch) -> TrainingStep:
            def backward() -> Tensor:
                with offloading:
                    return trainer.training_step(trainer.model_wrapped, dict(batch), None)

            return TrainingStep(backward, trainer.optimizer)

        if table.args.longest:
            row.fill(lambda length: step_on(data(length)), length, GRID, table.args.seconds)
        else:
            row.fill(step_on(batch), n * length, table.args.repeats, before)


def measure(table: Table, name: str, model: str, n: int, length: int, prompt: int | None = None) -> None:
    kind, share = KINDS[name], table.args.share
    group = table.args.sequences_per_prompt or (kind.group if share else 2)
    data = {"name": name, "model": model, "n": n, "length": length, "prompt": prompt, "group": group}
    fills = {
        contender: partial(fill, table=table, **data)
        for contender, (_, _, brings_loss, shares) in CONTENDERS.items()
        if (not brings_loss or (kind.loss is not None and not share)) and share >= shares
    }
    names = {"trainer": name, "model": model}
    if share:
        names |= {"prompt": f"prompt {prompt}", "group": f"{group} a prompt"}
    compare(table, names, n, length, fills)


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = steps_parser(__doc__ or "", "trainer:model:sequences:length", repeats=5, seconds=30)
    parse.add_argument("--offload-activations", action="store_true", help="TRL's activation_offloading=True")
    parse.add_argument("--share", action="store_true", help="compare with shared prompts")
    parse.add_argument("--sequences-per-prompt", type=int, help="default: 2; with --share, 8 for GRPO")
    args = parse.parse_args(arguments)
    default = SMALL if DEVICE == "cpu" else LONGEST if args.longest else SHAPES
    if args.share:
        default = SHARED_SMALL if DEVICE == "cpu" else SHARED_LONGEST if args.longest else SHARED
    family = "_".join(["trainers", *["shared"] * args.share, *["longest"] * args.longest])
    if args.offload_activations:
        family = "trainers_offloading"
    table = Table(family, args, whole=not args.shapes)
    for shape in args.shapes or default:
        measure(table, *parts(shape))
    return table.finish()


if __name__ == "__main__":
    main()
