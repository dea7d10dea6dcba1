"""Code shared by the examples: a toy model and its tokenizer, or a real model, and sums to learn.

python examples/plain_loop.py                    a tiny random model, built here, on the CPU
python examples/plain_loop.py --model PATH       your model, on a GPU if there is one
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
IGNORE_INDEX = -100


def parser() -> argparse.ArgumentParser:
    """Return a parser with the options of every example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a path to a model; none: a tiny one, built in code")
    parser.add_argument("--steps", type=int, default=20)
    return parser


def on_gpu(options: argparse.Namespace) -> bool:
    """Whether to use the GPU. The tiny model stays on the CPU."""
    return options.model is not None and torch.cuda.is_available()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    vocabulary = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def load_model(path: str | None, dtype: torch.dtype, seed: int = 0) -> Any:
    return tiny_model(seed) if path is None else AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def load_tokenizer(path: str | None) -> Any:
    return byte_tokenizer() if path is None else AutoTokenizer.from_pretrained(path)


def sums(n: int = 64) -> list[dict[str, str]]:
    """Return sums, each with a right and a wrong answer."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(10), numbers.randrange(10)) for _ in range(n)]
    return [{"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"} for a, b in pairs]


def encode(tokenizer: Any, prompt: str, answer: str) -> dict[str, list[int]]:
    """Return `input_ids` of prompt and answer, and `labels`, which ignore the prompt."""
    start = tokenizer(prompt)["input_ids"]
    end = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": start + end, "labels": [IGNORE_INDEX] * len(start) + end}


def collate(rows: Iterable[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """Return `input_ids`, `labels` and `attention_mask` (B, T), padded on the right."""

    def padded(column: list[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in column], batch_first=True, padding_value=value)

    ids, labels = zip(*((row["input_ids"], row["labels"]) for row in rows), strict=True)
    return {
        "input_ids": padded(ids, 0),
        "labels": padded(labels, IGNORE_INDEX),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
    }
