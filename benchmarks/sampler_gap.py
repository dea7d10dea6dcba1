"""Compare a policy's log-probabilities with its sampler's, over GRPO on a tiny model.

python -m benchmarks.sampler_gap                100 steps, about a minute on a CPU
python -m benchmarks.sampler_gap --model PATH   top-p sampling on a real model, see `of_model`

The sampler runs in float32. The trainer runs the same weights under bfloat16 autocast, and computes log-probabilities
of the sampled tokens with `linear_token_stats`, with logits in bfloat16 or in float32 (`logits_dtype`). Rewards count
tokens of the lower half of the vocabulary. One run trains with each kind of logits. Every step also records the gap of
eager bfloat16 code on the same hidden states.

- `gap`: mean of |log p_trainer - log p_sampler| over tokens
- `ratio`: mean of |p_trainer / p_sampler - 1|, the importance ratio's distance from 1
- `of_head`: mean of |log p_trainer - log p| with `p` in float64 from the trainer's own hidden states: the head's part
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TopPLogitsWarper

from benchmarks.harness import DEVICE, RESULTS, environment, new_file
from liger_chunked import LigerFusedLinearGRPOLoss, linear_token_stats
from liger_chunked.integrations.transformers import record_kept_ids

VOCAB, PROMPT, LENGTH, GROUP, PROMPTS = 4096, 8, 24, 8, 4
LOGITS = {"bfloat16 logits": None, "float32 logits": torch.float32}
EAGER = "eager, bfloat16 logits"


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(DEVICE)
    nn.init.normal_(model.lm_head.weight, std=0.15)  # logits of a standard deviation near 2
    return model


@torch.no_grad()
def sample(model: LlamaForCausalLM, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ids (B, PROMPT + LENGTH) and the sampler's log-probabilities (B, LENGTH), in float32."""
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT), generator=generator, device=DEVICE)
    ids = prompts.repeat_interleave(GROUP, 0)
    for _ in range(LENGTH):
        p = model(input_ids=ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    logps = model(input_ids=ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return ids, logps.gather(-1, ids[:, PROMPT:, None])[..., 0]


def advantages(ids: Tensor) -> Tensor:
    rewards = (ids[:, PROMPT:] < VOCAB // 2).float().mean(1).view(PROMPTS, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def run(logits: str, n_steps: int) -> dict[str, Any]:
    model, generator = build(), torch.Generator(DEVICE).manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss = LigerFusedLinearGRPOLoss(logits_dtype=LOGITS[logits])
    found: dict[str, list[dict[str, float]]] = {logits: [], EAGER: []}
    rewards = []
    for _ in range(n_steps):
        ids, sampled = sample(model, generator)
        target, scores = ids[:, PROMPT:], advantages(ids)
        with torch.autocast(DEVICE, torch.bfloat16):
            states = model.model(input_ids=ids).last_hidden_state[:, PROMPT - 1 : -1]
        head, states = model.lm_head.weight.bfloat16(), states.bfloat16()
        ways: dict[str, Callable[[], Tensor | None]] = {
            logits: lambda: linear_token_stats(head, states, target, logits_dtype=LOGITS[logits]).logps,  # noqa: B023
            EAGER: lambda: (states @ head.t()).float().log_softmax(-1).gather(-1, target[..., None])[..., 0],  # noqa: B023
        }
        with torch.no_grad():
            exact = (states.double() @ head.double().t()).log_softmax(-1).gather(-1, target[..., None])[..., 0]
            for name, way in ways.items():
                logps = way()
                assert logps is not None
                apart = logps.double() - sampled.double()
                found[name].append(
                    {
                        "gap": float(apart.abs().mean()),
                        "ratio": float(apart.expm1().abs().mean()),
                        "of_head": float((logps.double() - exact).abs().mean()),
                    }
                )
        value, _ = loss(head, states, target, scores, old_logps=sampled)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        rewards.append(float((target < VOCAB // 2).float().mean()))
    means = {
        name: {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]} for name, steps in found.items()
    }
    return {"trains_with": logits, "reward": [rewards[0], rewards[-1]], "means": means}


# Top-p sampling on a real model

TOP_P = 0.9
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fox and a river.",
    "Explain why the sky is blue to a child.",
    "Give me three tips for learning to cook.",
    "What is 17 times 23? Think step by step.",
    "Describe a rainy day in a city.",
)


def gap_of(logps: Tensor, sampled: Tensor, valid: Tensor) -> dict[str, float]:
    """Return how importance ratios of an update spread around 1; a token that top-p drops has ratio 0."""
    ratio = (logps.double() - sampled.double())[valid].exp()
    return {
        "mean": float(ratio.mean()),
        "std": float(ratio.std()),
        "abs_deviation": float((ratio - 1).abs().mean()),
        "largest": float(ratio.max()),
        "dropped": float((ratio == 0).double().mean()),
    }


@torch.no_grad()
def of_model(path: Path, n_tokens: int, samples: int) -> dict[str, Any]:
    """Sample with top-p 0.9 in bfloat16, score the tokens anew in bfloat16 and float32, and compare three softmaxes.

    The sampler is transformers' `generate` with its cache; the update runs whole sequences.

    - "whole": over the vocabulary
    - "filtered": over what the same top-p keeps of the update's logits, by eager code
    - "kept": over the ids that the sampler kept (`linear_token_stats(kept=)`)
    """
    # A GGUF file needs the package gguf.
    folder, source = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    sampler: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **source).to(DEVICE).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **source)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in QUESTIONS
    ]
    prompts = tokenizer(chats, return_tensors="pt", padding=True).to(DEVICE)
    torch.manual_seed(0)
    with record_kept_ids(sampler) as recorder:
        output = sampler.generate(
            **prompts, do_sample=True, temperature=1.0, top_k=0, top_p=TOP_P, max_new_tokens=n_tokens,
            num_return_sequences=samples, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    n_prompt, ids = recorder.prompt_length, output.sequences
    completions = ids[:, n_prompt:]
    is_end = completions == tokenizer.eos_token_id
    valid = is_end.cumsum(1) - is_end.long() == 0
    target = completions.masked_fill(~valid, -100)
    sampled = torch.stack([x.float().log_softmax(-1) for x in output.scores], 1)
    sampled = sampled.gather(-1, completions[..., None])[..., 0]
    kept = recorder.kept_ids(target)
    mask = torch.cat([prompts["attention_mask"].repeat_interleave(samples, 0), torch.ones_like(completions)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ways: dict[str, dict[str, Any]] = {"whole": {}, "kept": {"kept": kept}}
    gaps: dict[str, dict[str, dict[str, float]]] = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        model = sampler.to(dtype)  # the same weights
        states = model.model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        states, head = states[:, n_prompt - 1 : -1], model.lm_head.weight
        gaps[name] = {}
        for way, options in ways.items():
            logps = linear_token_stats(head, states, target, logits_dtype=torch.float32, **options).logps
            assert logps is not None
            gaps[name][way] = gap_of(logps, sampled, valid)
        logits = TopPLogitsWarper(TOP_P)(None, (states @ head.T).float().flatten(0, 1))
        filtered = logits.log_softmax(-1).gather(-1, completions.reshape(-1, 1)).view_as(target)
        gaps[name]["filtered"] = gap_of(filtered, sampled, valid)
    n_kept = kept.offsets.diff()[valid.flatten()].double()
    return {
        "model": path.name,
        "top_p": TOP_P,
        "temperature": 1.0,
        "tokens": int(valid.sum()),
        "kept_ids": {"mean": float(n_kept.mean()), "share_of_one": float((n_kept == 1).double().mean())},
        "ratios": gaps,
    }


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--steps", type=int, default=100)
    parse.add_argument("--model", type=Path, help="folder of a model, or its GGUF file")
    parse.add_argument("--tokens", type=int, default=128, help="most tokens of a completion, with --model")
    parse.add_argument("--samples", type=int, default=4, help="completions of a prompt, with --model")
    parse.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args = parse.parse_args(arguments)
    about = environment()
    if args.model is not None:
        found = of_model(args.model, args.tokens, args.samples)
        for dtype, gaps in found["ratios"].items():
            for way, gap in gaps.items():
                print(f"{dtype:9s} {way:9s} " + "  ".join(f"{key} {value:.4f}" for key, value in gap.items()))
        path = new_file(args.out, "sampler_gap_model", about)
        path.write_text(json.dumps({"family": "sampler_gap_model", "environment": about, **found}, indent=1))
        print(f"wrote {path}")
        return path
    runs = []
    for logits in LOGITS:
        runs.append(run(logits, args.steps))
        print(f"trains with {logits}: reward {runs[-1]['reward'][0]:.3f} to {runs[-1]['reward'][1]:.3f}")
        for name, means in runs[-1]["means"].items():
            print(f"  {name:24s} " + "  ".join(f"{key} {value:.3e}" for key, value in means.items()), flush=True)
    path = new_file(args.out, "sampler_gap", about)
    path.write_text(
        json.dumps({"family": "sampler_gap", "steps": args.steps, "environment": about, "runs": runs}, indent=1)
    )
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
