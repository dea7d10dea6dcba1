# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "torch==2.11.0", "transformers==5.6.2", "beartype", "jaxtyping", "loguru", "numpy", "rich", "tomli", "tomli-w",
#     "prime-pydantic-config",
# ]
#
# [tool.frameworks]
# no-deps = [
#     "prime-rl @ https://github.com/PrimeIntellect-ai/prime-rl/archive/559b44772e471d1538537b8805cc77f3824a5e64.tar.gz",
#     "prime-rl-configs @ https://github.com/PrimeIntellect-ai/prime-rl/archive/559b44772e471d1538537b8805cc77f3824a5e64.tar.gz#subdirectory=packages/prime-rl-configs",
# ]
# ///
"""prime-rl 0.8.0 (commit 559b447): training steps with its injected head and loss, and with our heads in their place.

Environment: transformers 5.6.2, which prime-rl pins, and torch 2.11.0. Stubs: vLLM, ring-flash-attn, torchtitan, flash
linear attention, tilelang, dion, wandb, quack, verifiers and renderers, which its models and utilities import.

Its trainer is one function that needs CUDA and an orchestrator. The steps here are its micro-step, in order:
`inject_prime_lm_head` with a chunk size, labels and a temperature for each token, `shift_tensor_right`, `compute_loss`
with the default loss (DPPO with a KL term) over packed sequences, `backward`, SGD. Compares the loss of each step, and
exits with 1 if one differs by more than 1e-5: steps 0 to 7 are Llama's, and 8 to 15 Gemma 2's, whose head has a
softcap. All is float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from common import compare, count_calls, stub

stub("vllm", "ring_flash_attn", "torchtitan", "fla", "tilelang", "dion", "wandb", "quack", "verifiers", "renderers")

from prime_rl.configs.trainer import DefaultLossConfig  # noqa: E402
from prime_rl.trainer.models.layers import lm_head, lm_head_gemma  # noqa: E402
from prime_rl.trainer.rl import loss as prime_loss  # noqa: E402

from liger_chunked.integrations.frameworks.prime_rl import FusedOutputLinear, GemmaFusedOutputLinear  # noqa: E402

STEPS, VOCAB, LENGTHS = 8, 512, [14, 20, 9]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def train(config: Any) -> list[float]:
    """Return the loss of each step, from equal random weights."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    lm_head.inject_prime_lm_head(model, chunk_size=16)
    # Not Adam: it divides by the gradient's size, so rounding of tiny gradients becomes whole steps, and these losses
    # are sums of both signs near zero.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loss_fn = prime_loss.setup_rl_loss_fn(DefaultLossConfig())
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB // 8, (1, sum(LENGTHS)), generator=generator)
        temperature = 0.5 + torch.rand(ids.shape, generator=generator)
        sampled = -math.log(VOCAB) + 0.1 * torch.randn(ids.shape, generator=generator)
        advantages = torch.randn(ids.shape, generator=generator)
        mask = positions > 3  # prompts of four tokens
        out = model(
            input_ids=ids,
            position_ids=positions,
            labels=prime_loss.shift_tensor_left(ids),
            temperature=temperature,
        )
        logps = prime_loss.shift_tensor_right(out["logprobs"], pad_value=-math.log(VOCAB))
        loss, _ = prime_loss.compute_loss(
            *(x.squeeze().split(LENGTHS) for x in (logps, sampled)),
            None,
            *(x.squeeze().split(LENGTHS) for x in (advantages, mask)),
            None,
            None,
            None,
            rl_loss_fn=loss_fn,
            rl_scale=int(mask.sum()),
            ce_scale=1,
            ref_kl_scale=1,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    llama = transformers.LlamaConfig(**SIZES)
    gemma = transformers.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=3.0, sliding_window=64)
    stock = train(llama) + train(gemma)
    calls = count_calls(FusedOutputLinear, "forward")
    lm_head.FusedOutputLinear = FusedOutputLinear
    lm_head_gemma.GemmaFusedOutputLinear = GemmaFusedOutputLinear
    ours = train(llama) + train(gemma)
    compare("prime-rl", stock, ours, 1e-5, calls)


if __name__ == "__main__":
    main()
