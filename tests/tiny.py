"""The inputs of a trainer, built in code: a byte-level tokenizer, models for it, and data of uneven lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from datasets import Dataset
from model_zoo import BY_ID, Tiny
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}{{ 'a:' if add_generation_prompt }}"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with 260 tokens."""
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
# Returns the logits of its router, and no loss of them.
_AFMOE = {"num_hidden_layers": 2, "num_dense_layers": 0, "hidden_size": 32, "intermediate_size": 48, "num_experts": 4}
ROUTED = Tiny("afmoe", "afmoe", "AfmoeForCausalLM", "AfmoeConfig", {**_AFMOE, "moe_intermediate_size": 16})
TINY = {**BY_ID, ROUTED.name: ROUTED}
# Rows of `TINY`, and the changes to them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "wide": ("llama", {"hidden_size": 48}),
    "softcap": ("gemma2", {}),
    "scaled": ("granite", {}),
    "experts": ("qwen3_moe", {"router_aux_loss_coef": 0.1, "output_router_logits": False}),
    "routed": ("afmoe", {"num_experts_per_tok": 2, "output_router_logits": False}),
}


def model(name: str = "llama", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    row, changes = MODELS[name]
    config = {**TINY[row].config, **SIZES, **changes, **sizes}
    return dataclasses.replace(TINY[row], config=config).build(seed)


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
    """Return the same rows as "text", "completions", "pairs", "unpaired", "prompts" or "messages"."""
    shapes = {
        "text": lambda i, r: {"text": r["prompt"] + r["chosen"]},
        "completions": lambda i, r: {"prompt": r["prompt"], "completion": r["chosen"]},
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


# Each image is four tokens between a start and an end token.
IMAGE = {"boi_token": "<image>", "image_token": "<patch>", "eoi_token": "</image>"}
IMAGE_CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}</s>{% endfor %}{{ 'a:' if add_generation_prompt }}"
)


def processor() -> Gemma3Processor:
    """Return a processor for bytes and images of 8 x 8 pixels."""
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    tok = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, extra_special_tokens=IMAGE, chat_template=IMAGE_CHAT, **names
    )
    images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    return Gemma3Processor(images, tok, chat_template=IMAGE_CHAT, image_seq_length=4)


def vision_model(seed: int = 0) -> PreTrainedModel:
    zoo, tok = BY_ID["gemma3"], processor().tokenizer
    # The vision model itself does not cap the logits of its text model, but TRL's head would.
    text = {**zoo.config["text_config"], **SIZES, "final_logit_softcapping": None}
    ids = {f"{name}_id": tok.convert_tokens_to_ids(token) for name, token in IMAGE.items()}
    special = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos"))}
    return dataclasses.replace(zoo, config={**zoo.config, "text_config": text, **special, **ids}).build(seed)


def vision_dataset(kind: str) -> Dataset:
    """Return conversations of one message, each about an image of one colour."""

    def conversation(name: str, value: Any) -> Any:
        role = "user" if name == "prompt" else "assistant"
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    return Dataset.from_list(
        [
            {
                **{name: conversation(name, x) for name, x in row.items()},
                "images": [Image.new("RGB", (8, 8), (9 * i,) * 3)],
            }
            for i, row in enumerate(dataset(kind))
        ]
    )
