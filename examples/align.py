"""Run SFT, then DPO, twice from the same seed: once with fused losses and once with eager losses.

    python examples/align.py                      # English from Python's own documentation, a small Llama, on the CPU
    python examples/align.py --model path/or/name --data pairs.jsonl --device cuda --skip-eager --save aligned

The small Llama learns to continue passages (SFT), then to prefer their true continuations to corrupted ones (DPO). Some
topics are held out for evaluation. Each line of `pairs.jsonl` is an object with the strings `prompt`, `chosen` and
`rejected`, with the chat template applied.

`FusedLosses` is the only difference of the fused run: it passes the model's last hidden states and its `lm_head` to the
loss instead of logits. Needs torch, transformers, tqdm and matplotlib.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from align_data import (
    IGNORE_INDEX,
    Batch,
    DataError,
    Dataset,
    Encoder,
    Preference,
    english_preferences,
    read_preferences,
    shuffled_chunks,
    train_tokenizer,
)
from align_report import Evaluation, LargestTensor, Run, accuracy, curve_differences, draw, table
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LogitOptions,
    linear_token_stats,
    logit_options,
)

# The losses.


class DPOStep(NamedTuple):
    """The loss and, detached, the reward of each chosen sequence minus that of its rejected one."""

    loss: Tensor
    margins: Tensor


class Losses(Protocol):
    """The only difference between the two runs."""

    name: str

    def sft(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the mean negative log-probability over the target tokens."""

    def dpo(self, model: PreTrainedModel, reference: PreTrainedModel, batch: Batch) -> DPOStep:
        """Return the mean of `-log sigmoid(margin)` over the pairs."""

    def logps(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the log-probability of each sequence's target tokens, without gradient."""


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the input of the model's `lm_head`: (sequences, T, H)."""
    return model.base_model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state


class FusedLosses:
    """Passes hidden states and `lm_head` to the library. The full logits never exist at once."""

    name = "fused"

    def __init__(self, beta: float, options: LogitOptions) -> None:
        self.options = asdict(options)
        self.cross_entropy = LigerFusedLinearCrossEntropyLoss(**self.options)
        self.preference = LigerFusedLinearDPOLoss(beta=beta, use_ref_model=True, **self.options)

    def sft(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        head = model.get_output_embeddings()
        return self.cross_entropy(head.weight, hidden_states(model, batch), batch.target, head.bias)

    def dpo(self, model: PreTrainedModel, reference: PreTrainedModel, batch: Batch) -> DPOStep:
        head, ref_head = model.get_output_embeddings(), reference.get_output_embeddings()
        with torch.no_grad():
            ref_hidden = hidden_states(reference, batch)
        loss, metrics = self.preference(
            head.weight,
            hidden_states(model, batch),
            batch.target,
            head.bias,
            ref_input=ref_hidden,
            ref_weight=ref_head.weight,
            ref_bias=ref_head.bias,
        )
        return DPOStep(loss, metrics.chosen_rewards - metrics.rejected_rewards)

    @torch.no_grad()
    def logps(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        head = model.get_output_embeddings()
        stats = linear_token_stats(
            head.weight, hidden_states(model, batch), batch.target, head.bias, outputs=("logps",), **self.options
        )
        return stats.logps.sum(-1)


class EagerLosses:
    """Uses the model's own logits and plain PyTorch."""

    name = "eager"

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def _logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        return output.logits.float()

    def _sequence_logps(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        valid = batch.target != IGNORE_INDEX
        index = batch.target.where(valid, 0)[..., None]
        token_logps = self._logits(model, batch).log_softmax(-1).gather(-1, index)[..., 0]
        return token_logps.where(valid, 0).sum(-1)

    def sft(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        logits = self._logits(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=IGNORE_INDEX)

    def dpo(self, model: PreTrainedModel, reference: PreTrainedModel, batch: Batch) -> DPOStep:
        rewards = self.beta * (self._sequence_logps(model, batch) - self.logps(reference, batch))
        chosen, rejected = rewards.chunk(2)
        return DPOStep(-F.logsigmoid(chosen - rejected).mean(), (chosen - rejected).detach())

    @torch.no_grad()
    def logps(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        return self._sequence_logps(model, batch)


# One run: SFT, then DPO against a frozen copy of the SFT model.


class Phase(NamedTuple):
    """SFT or DPO: its number of steps and its learning rate."""

    name: str
    steps: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up over a tenth of the steps, then linear decay."""
        warmup = max(1, self.steps // 10)
        return self.learning_rate * min((step + 1) / warmup, (self.steps - step) / (self.steps - warmup + 1))


@dataclass(frozen=True)
class Settings:
    """The hyperparameters of a run."""

    seed: int
    batch_size: int  # texts in SFT, pairs in DPO
    beta: float
    adam_eps: float
    sft: Phase
    dpo: Phase


def optimise(
    model: PreTrainedModel,
    phase: Phase,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    adam_eps: float,
    run: Run,
) -> None:
    """Take one step of AdamW per batch. Records the largest tensor of the first step, and the peak memory, in `run`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.learning_rate, eps=adam_eps, weight_decay=0.0)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    largest = LargestTensor()
    model.train()
    # disable=None hides the progress bar if there is no terminal, which keeps logs clean.
    progress = tqdm(batches, desc=f"{run.name} {phase.name}", total=phase.steps, unit="step", disable=None)
    for step, batch in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = phase.rate(step)
        with largest if step == 0 else nullcontext():
            loss = loss_of(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    run.largest[phase.name] = largest.size
    if on_gpu:
        run.peak[phase.name] = torch.cuda.max_memory_allocated(model.device)


def evaluate(
    model: PreTrainedModel, losses: Losses, pairs: Sequence[Preference], encoder: Encoder, batch_size: int
) -> Evaluation:
    """Return the log-probabilities of the completions of `pairs`."""
    model.eval()
    logps, lengths = [], []
    for start in range(0, len(pairs), batch_size):
        batch = encoder.pairs(pairs[start : start + batch_size])
        logps.append(losses.logps(model, batch).view(2, -1))
        lengths.append((batch.target != IGNORE_INDEX).sum(-1).view(2, -1))
    return Evaluation(torch.cat(logps, -1).cpu(), torch.cat(lengths, -1).cpu())


def align(model: PreTrainedModel, losses: Losses, data: Dataset, encoder: Encoder, settings: Settings) -> Run:
    """Train `model` in place: SFT on the chosen texts, then DPO on the pairs."""
    run = Run(losses.name, settings.beta)
    started = time.perf_counter()

    def sft_loss(batch: Batch) -> Tensor:
        loss = losses.sft(model, batch)
        run.sft_loss.append(loss.item())
        return loss

    # Several pairs may share a text; SFT sees it once.
    texts = list({(pair.prompt, pair.chosen): pair for pair in data.train}.values())
    chunks = shuffled_chunks(texts, settings.batch_size, settings.sft.steps, settings.seed)
    optimise(model, settings.sft, map(encoder.texts, chunks), sft_loss, settings.adam_eps, run)

    reference = copy.deepcopy(model).eval().requires_grad_(False)
    run.evaluations["before"] = evaluate(reference, losses, data.held_out, encoder, settings.batch_size)

    def dpo_loss(batch: Batch) -> Tensor:
        loss, margins = losses.dpo(model, reference, batch)
        run.dpo_loss.append(loss.item())
        run.margin.append(margins.mean().item())
        return loss

    chunks = shuffled_chunks(data.train, settings.batch_size, settings.dpo.steps, settings.seed)
    optimise(model, settings.dpo, map(encoder.pairs, chunks), dpo_loss, settings.adam_eps, run)
    run.evaluations["after"] = evaluate(model, losses, data.held_out, encoder, settings.batch_size)
    run.seconds = time.perf_counter() - started
    print(
        f"{run.name}: SFT loss {run.sft_loss[0]:.3f} -> {run.sft_loss[-1]:.3f}, DPO loss {run.dpo_loss[0]:.3f} -> "
        f"{run.dpo_loss[-1]:.3f}, held-out accuracy {accuracy(run.reward_margin('after'))}, {run.seconds:.0f} s"
    )
    return run


# The model: a small Llama and its tokenizer, or a real one.


def small_tokenizer(data: Dataset, vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a BPE tokenizer on the training texts."""
    return train_tokenizer([pair.prompt + pair.chosen for pair in data.train], vocab_size)


def small_llama(vocab_size: int) -> PreTrainedModel:
    """Return a Llama with random weights, 0.9 million of them with a vocabulary of 4096."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


# The automatic budget holds the logits of at least 4096 tokens, so this demo's batches would be a single chunk. One MiB
# holds the logits of 64 tokens with a vocabulary of 4096.
SMALL_LOGITS_BUDGET = 2**20


# The command line.


class Summary(NamedTuple):
    """The results printed last, of the fused run unless stated otherwise."""

    curve_differences: dict[str, float]  # empty without an eager run
    preference_accuracy: float  # on `n_held_out` pairs
    reward_margin: float
    n_held_out: int
    largest_tensor: dict[str, dict[str, int]]  # bytes, by run and phase
    figure: Path


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="name or path of a causal language model; default: a small Llama")
    parser.add_argument("--data", type=Path, help="jsonl with prompt, chosen, rejected; default: pydoc_data.topics")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--sft-steps", type=int, default=160, help="default: %(default)s")
    parser.add_argument("--dpo-steps", type=int, default=80, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="texts in SFT, pairs in DPO (default: %(default)s)")
    parser.add_argument("--max-length", type=int, help="tokens of prompt and completion (default: 256; --model: 1024)")
    parser.add_argument("--sft-lr", type=float, help="default: 1.5e-3; with --model: 1e-5")
    parser.add_argument("--dpo-lr", type=float, help="default: 1.5e-4; with --model: 2e-6")
    parser.add_argument("--beta", type=float, default=0.1, help="scale of the rewards (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the small Llama (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="folder of the figure (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="folder for the aligned model of the fused run")
    parser.add_argument("--skip-eager", action="store_true", help="no second run")
    args = parser.parse_args(argv)
    for name in ("sft_steps", "dpo_steps", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    args.device = torch.device(args.device)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no GPU")
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings of a run.

    A small random model needs higher rates than a trained one. With these rates doubled, or Adam's usual eps of 1e-8,
    the training is chaotic: a difference in the last bit grows to the third digit within 100 steps, so the curves of
    two correct losses diverge.
    """
    sft_rate, dpo_rate, adam_eps = (1e-5, 2e-6, 1e-8) if args.model else (1.5e-3, 1.5e-4, 1e-5)
    return Settings(
        seed=args.seed,
        batch_size=args.batch_size,
        beta=args.beta,
        adam_eps=adam_eps,
        sft=Phase("SFT", args.sft_steps, args.sft_lr or sft_rate),
        dpo=Phase("DPO", args.dpo_steps, args.dpo_lr or dpo_rate),
    )


def load_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load or build the model, with the same weights on every call."""
    torch.manual_seed(args.seed)
    if args.model is None:
        return small_llama(len(tokenizer)).to(args.device)
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device)


def main(argv: Sequence[str] | None = None) -> Summary:
    args = parse_arguments(argv)
    try:
        data = english_preferences(args.seed) if args.data is None else read_preferences(args.data, args.seed)
    except DataError as error:
        sys.exit(f"align.py: {error}")
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else small_tokenizer(data, args.vocab_size)
    encoder = Encoder(tokenizer, args.max_length or (1024 if args.model else 256), args.device)
    settings = settings_of(args)
    budget = None if args.model else SMALL_LOGITS_BUDGET

    runs = []
    for name in ("fused",) if args.skip_eager else ("fused", "eager"):
        model = load_model(args, tokenizer)
        if name == "fused":
            print(
                f"{type(model).__name__}, {model.num_parameters():,} parameters, vocabulary {model.vocab_size:,}; "
                f"{len(data.train):,} pairs to train on, {len(data.held_out):,} held out"
            )
            options = replace(logit_options(model, ignore_index=IGNORE_INDEX), logits_budget=budget)
            losses: Losses = FusedLosses(args.beta, options)
        else:
            losses = EagerLosses(args.beta)
        runs.append(align(model, losses, data, encoder, settings))
        if name == "fused" and args.save:
            model.save_pretrained(args.save)
            tokenizer.save_pretrained(args.save)
        del model

    args.out.mkdir(parents=True, exist_ok=True)
    figure = args.out / "align.png"
    draw(runs, figure)
    print(f"curves: {figure}\n\n{table(runs, [pair.kind for pair in data.held_out])}")
    margins = runs[0].reward_margin("after")
    return Summary(
        curve_differences=curve_differences(*runs) if len(runs) == 2 else {},
        preference_accuracy=accuracy(margins).value,
        reward_margin=margins.mean().item(),
        n_held_out=len(data.held_out),
        largest_tensor={run.name: {phase: size.bytes for phase, size in run.largest.items()} for run in runs},
        figure=figure,
    )


if __name__ == "__main__":
    main()
