"""Compare the loss curves of training with and without the kernels: same weights, batches and optimizer.

python -m benchmarks.convergence                                   four families; about ten minutes on one core
python -m benchmarks.convergence --families llama --steps 20

Small models with random weights train on English text for 200 steps: AdamW, warm-up and decay, clipped gradients.

    stock           the model as transformers builds it
    fused           after `apply_liger_kernel(model)`: all kernels on, several chunks of logits per step
    stock, nudged   stock from slightly different weights: shows how far rounding alone separates two curves

The first seed runs all three in float32 and in bfloat16 (parameters included), the other seeds stock and fused in
bfloat16. Seeds choose the initial weights only; all runs use the same batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_linear_schedule_with_warmup

from benchmarks.curves import BFLOAT16, FLOAT32, FUSED, NUDGED, STOCK, Convergence, Curve
from benchmarks.harness import DEVICE, RESULTS, environment, new_file
from examples.align_data import Batch, Encoder, english_preferences, shuffled_chunks, train_tokenizer
from liger_chunked import apply_liger_kernel

STEPS, SEEDS, BATCH_SIZE = 200, 3, 4  # a batch is four passages of 48 words, about 300 tokens
VOCABULARY, HIDDEN, HEADS = 2048, 128, 4
LOGITS_BUDGET = 2**18  # bytes: 32 tokens in float32, 64 in bfloat16
WARMUP, MAX_NORM = 0.1, 1.0
_DATA_SEED = 0

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gemma2": {
        **SIZES,
        "query_pre_attn_scalar": HIDDEN // HEADS,
        "sliding_window": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        **SIZES,
        "intermediate_size": 160,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,  # adds the auxiliary loss
        "router_aux_loss_coef": 0.02,
    },
}


def english_batches(steps: int, device: str) -> list[Batch]:
    """Return one batch per step: passages of `examples/align_data.py`, shuffled again in each epoch."""
    pairs = english_preferences(_DATA_SEED).train
    passages = list({(pair.prompt, pair.chosen): pair for pair in pairs}.values())
    tokenizer = train_tokenizer([pair.prompt + pair.chosen for pair in passages], VOCABULARY)
    encoder = Encoder(tokenizer, SIZES["max_position_embeddings"], torch.device(device))
    return [encoder.texts(chunk) for chunk in shuffled_chunks(passages, BATCH_SIZE, steps, _DATA_SEED)]


def build(family: str, dtype: str, seed: int, device: str) -> PreTrainedModel:
    """Build a model in training mode, with eager attention: it supports Gemma 2's softcap, and it is deterministic."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.to(device).train()


@torch.no_grad()
def nudge(model: PreTrainedModel) -> None:
    """Move every weight to the next float32. A bfloat16 step is up to 1%, so only one weight moves."""
    weights = model.parameters()
    if model.dtype == torch.bfloat16:
        weights = iter([model.base_model.layers[0].self_attn.q_proj.weight[:1, :1]])
    for weight in weights:
        weight.copy_(torch.nextafter(weight, weight.new_tensor(torch.inf)))


class Adam(NamedTuple):
    """The arguments of `torch.optim.AdamW` that decide how fast rounding differences grow.

    With the default `eps` of 1e-8, a weight whose gradient is mostly rounding error moves as far as any other, in a
    random direction.
    """

    lr: float = 1e-3
    eps: float = 1e-6


DEFAULT_ADAM = Adam()


def labelled(batch: Batch) -> dict[str, Tensor]:
    """Return the arguments of a model's forward."""
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": labels}


def train(model: PreTrainedModel, steps: Sequence[Mapping[str, Tensor]], adam: Adam) -> list[float]:
    """Train on the arguments of each step, and return the loss of every step, rounded to float32."""
    optimizer = torch.optim.AdamW(model.parameters(), **adam._asdict())
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP * len(steps)), len(steps))
    losses: list[Tensor] = []
    for arguments in steps:
        loss = model(**arguments).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return [round(loss, 7) for loss in torch.stack(losses).tolist()]


def variants(seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yield the dtype, variant and seed of each run of a family."""
    for dtype in (FLOAT32, BFLOAT16):
        for variant in (STOCK, FUSED, NUDGED):
            yield dtype, variant, 0
    for seed in range(1, seeds):
        for variant in (STOCK, FUSED):
            yield BFLOAT16, variant, seed


def trained(
    family: str, dtype: str, variant: str, seed: int, batches: Sequence[Batch], adam: Adam = DEFAULT_ADAM
) -> Curve:
    model = build(family, dtype, seed, batches[0].input_ids.device.type)
    if variant == FUSED:
        apply_liger_kernel(model, logits_budget=LOGITS_BUDGET)
    if variant == NUDGED:
        nudge(model)
    return Curve(family, dtype, variant, seed, train(model, [*map(labelled, batches)], adam))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    parse.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parse.add_argument("--seeds", type=int, default=SEEDS, help="of the runs in bfloat16 (default: %(default)s)")
    parse.add_argument("--lr", type=float, default=DEFAULT_ADAM.lr, help="of AdamW (default: %(default)s)")
    parse.add_argument("--eps", type=float, default=DEFAULT_ADAM.eps, help="of AdamW (default: %(default)s)")
    parse.add_argument("--device", choices=("cpu", "cuda"), default=DEVICE, help="default: %(default)s")
    parse.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args = parse.parse_args(arguments)
    for name in ("steps", "seeds"):
        if getattr(args, name) < 1:
            parse.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def main(arguments: Sequence[str] | None = None) -> Path:
    args = parse_arguments(arguments)
    adam = Adam(args.lr, args.eps)
    batches = english_batches(args.steps, args.device)
    settings = {
        "steps": args.steps,
        "seeds": args.seeds,
        "tokens_per_step": sum(int(batch.attention_mask.sum()) for batch in batches) / len(batches),
        "logits_budget": LOGITS_BUDGET,
        "optimizer": {**adam._asdict(), "warmup": WARMUP, "max_norm": MAX_NORM},
        "families": {family: FAMILIES[family] for family in args.families},
    }
    curves = []
    for family in args.families:
        for dtype, variant, seed in variants(args.seeds):
            begin = time.perf_counter()
            curve = trained(family, dtype, variant, seed, batches, adam)
            seconds = time.perf_counter() - begin
            print(
                f"{family:8s} {dtype:8s} seed {seed}  {variant:13s}  loss {curve.losses[0]:.4f} -> {curve.final:.4f}"
                f"  {seconds:.0f} s",
                flush=True,
            )
            curves.append(curve)
    asked = (args.families, args.steps, args.seeds, adam)
    whole = asked == (list(FAMILIES), STEPS, SEEDS, DEFAULT_ADAM)
    run = Convergence(environment(args.device), settings, curves, whole)
    path = new_file(args.out, "convergence", run.environment)
    run.write(path)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
