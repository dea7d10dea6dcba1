"""What a trainer needs, built in code: a byte-level tokenizer, models of the zoo for it, data of uneven lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from datasets import Dataset
from model_zoo import BY_ID
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}{{ 'a:' if add_generation_prompt }}"


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, 260 tokens."""
    vocabulary = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=CHAT, **names)


SIZES = dict(
    vocab_size=300,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_id=2,
)
# Rows of the zoo, and how they differ.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "wide": ("llama", {"hidden_size": 48}),
    "softcap": ("gemma2", {}),
    "scaled": ("granite", {}),
    "experts": ("qwen3_moe", {"router_aux_loss_coef": 0.1, "output_router_logits": False}),
}


def model(name: str = "llama", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    tiny, changes = MODELS[name]
    config = {**BY_ID[tiny].config, **SIZES, **changes, **sizes}
    return dataclasses.replace(BY_ID[tiny], config=config).build(seed)


def _text(generator: torch.Generator, length: int) -> str:
    return "".join(chr(97 + i) for i in torch.randint(26, (length,), generator=generator).tolist())


def rows(n: int = 16, scale: int = 1) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "prompt": _text(generator, scale * (3 + i % 3)),
            "chosen": _text(generator, scale * (4 + 2 * (i % 4))),
            "rejected": _text(generator, scale * (5 + 3 * (i % 3))),
        }
        for i in range(n)
    ]


def dataset(kind: str, scale: int = 1) -> Dataset:
    """The same rows as "text", "pairs", "unpaired", "prompts" or "messages"."""
    shapes = {
        "text": lambda i, r: {"text": r["prompt"] + r["chosen"]},
        "pairs": lambda i, r: r,
        "unpaired": lambda i, r: {
            "prompt": r["prompt"],
            "completion": r["rejected" if i % 3 else "chosen"],
            "label": i % 3 == 0,
        },
        "prompts": lambda i, r: {"prompt": r["prompt"]},
        "messages": lambda i, r: {
            "messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["chosen"]}]
        },
    }
    return Dataset.from_list([shapes[kind](i, row) for i, row in enumerate(rows(scale=scale))])
