"""What a trainer needs, built in code: a byte-level tokenizer, models of two layers, data of uneven lengths."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, head_dim=16)
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "wide": (LlamaConfig, LlamaForCausalLM, {"hidden_size": 48}),
    "softcap": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "scaled": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0}),
    "experts": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "router_aux_loss_coef": 0.1},
    ),
}


def model(family: str = "llama", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    config, cls, own = FAMILIES[family]
    torch.manual_seed(seed)
    return cls(config(**{**SIZES, **own, **sizes}))


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
