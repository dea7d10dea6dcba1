"""The memory of a whole training step, by a formula of sizes, and whether it fits a GPU.

With P parameters of which t are trained, w bytes of a weight, N tokens, L layers, H and I of a layer, and one GPU:

| part | bytes | |
|---|---|---|
| weights | P w | all of them |
| reference | P w | a second model; 0 with an adapter, whose base it is, with `ref_logps`, and for losses without one |
| gradients, optimizer | t w, 2 t w | AdamW: two states in the dtype of the weights |
| checkpoints | N H r L | the input of each layer; r: 4 with float32 weights, else 2, as of the residual stream |
| layer | N (23 H + 8 I) | the layer that is recomputed, in 16 bits: attention, and gate, up, product and gradient |
| loss | `estimate_memory` | less dW, which is among the gradients |

The layer and the loss do not come at once: the larger one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

import liger_chunked as library
from liger_chunked.cli import tables
from liger_chunked.cli.losses import LOSSES, REFERENCED

# Bytes that a step should leave free: CUDA's context, cuBLAS and fragmentation take 1 to 2 GiB.
_SPARE = 3 << 30


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder: what the formula reads of a config."""

    vocab_size: int
    hidden_size: int
    inner: int  # of all experts that a token takes
    layers: int
    parameters: int
    lora: int  # parameters of LoRA of rank 1 on all linear layers of the decoder

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        """Count the parameters of a decoder with gated MLPs; ValueError names what a config lacks."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in names if not isinstance(config.get(name), int)]:
            raise ValueError(f"--model has no {', '.join(missing)}: the formula is of decoders with gated MLPs")
        v, h, i, n_layers, n_heads = (config[name] for name in names)
        width = config.get("head_dim") or h // n_heads
        n_kv = config.get("num_key_value_heads") or n_heads
        counts = (config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
        experts = next(filter(None, counts), 1)
        inner = config.get("moe_intermediate_size") or i if experts > 1 else i
        attention = 2 * h * width * (n_heads + n_kv)
        embeddings = v * h if config.get("tie_word_embeddings") else 2 * v * h
        parameters = embeddings + n_layers * (attention + 3 * h * inner * experts + 2 * h) + h
        lora = n_layers * (4 * h + 2 * width * (n_heads + n_kv) + 3 * experts * (h + inner))
        chosen = config.get("num_experts_per_tok", 1) if experts > 1 else 1
        return cls(v, h, inner * chosen, n_layers, parameters, lora)


@dataclass(frozen=True)
class Step:
    """A step of a loss on `shape` (sequences, tokens), with every layer checkpointed."""

    loss: str
    sizes: Sizes
    shape: tuple[int, ...]
    dtype: torch.dtype
    lora_rank: int = 0  # 0: all weights are trained
    ref_logps: bool = False  # computed before: no reference is in memory

    def parts(self) -> dict[str, int]:
        sizes, width, tokens = self.sizes, self.dtype.itemsize, prod(self.shape)
        adapter = self.lora_rank * sizes.lora
        trained = adapter or sizes.parameters
        of_loss = library.estimate_memory(
            LOSSES[self.loss](),
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            shape=self.shape,
            dtype=self.dtype,
            autocast=torch.bfloat16 if self.dtype == torch.float32 else None,
            trainable_head=not adapter,
        )
        loss = of_loss.peak - min(of_loss.weight_grad, sizes.vocab_size * sizes.hidden_size * width)
        layer = tokens * (23 * sizes.hidden_size + 8 * sizes.inner)
        has_reference = self.loss in REFERENCED and not adapter and not self.ref_logps
        return {
            "weights": (sizes.parameters + adapter) * width,
            "reference": sizes.parameters * width * has_reference,
            "gradients": trained * width,
            "optimizer": 2 * trained * width,
            "checkpoints": tokens * sizes.hidden_size * max(2, width) * sizes.layers,
            "layer or loss": max(layer, loss),
        }


def show(step: Step, gpu: int) -> bool:
    """Print the parts, what they assume, and whether they fit; return the last."""
    parts = step.parts()
    total, name = sum(parts.values()), str(step.dtype).removeprefix("torch.")
    shape, size = " x ".join(map(str, step.shape)), f"{step.sizes.parameters / 1e9:.2f} billion parameters"
    title = f"{step.loss}, {shape} tokens, {size}"
    kind = f"LoRA of rank {step.lora_rank} on all linear layers" if step.lora_rank else "all weights"
    notes = [
        f"Assumed: {kind} trained by AdamW, weights, gradients and its two states in {name}"
        + (", bfloat16 autocast" if step.dtype == torch.float32 else "")
        + ", every layer checkpointed, one GPU.",
        "Trainers of TRL load float32 weights unless the model is given in bfloat16: --dtype says which.",
        "Not counted: CUDA's context, cuBLAS and fragmentation, 1 to 2 GiB in all, and a sampler beside the step.",
    ]
    tables.show(f"{title}: GiB", ["", "total", *parts], [["step", *map(_gib, (total, *parts.values()))]], notes)
    fits = total <= gpu
    is_tight = fits and gpu - total < _SPARE
    verdict = "fits, but tightly" if is_tight else "fits" if fits else "does not fit"
    left = f", less than {_SPARE >> 30} GiB is left for what is not counted" if is_tight else ""
    print(f"{verdict}: {_gib(total)} of {_gib(gpu)} GiB{left}")
    return fits


def _gib(n: int) -> str:
    return f"{n / 2**30:.1f}"
