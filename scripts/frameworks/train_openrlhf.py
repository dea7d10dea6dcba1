# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "torch==2.11.0", "transformers==5.15.0", "peft", "accelerate", "datasets", "einops", "torchdata", "aiohttp",
#     "pillow", "sympy", "pylatexenc", "tqdm",
# ]
#
# [tool.frameworks]
# no-deps = ["openrlhf==0.11.2"]
# ///
"""OpenRLHF 0.11.2: steps of its SFT trainer and of its PPO trainer, with `Actor` and with our `FusedActor`.

Environment: transformers 5.15.0, which OpenRLHF pins, torch 2.11.0, and OpenRLHF without its other dependencies. Stubs:
DeepSpeed, Ray, vLLM and flash-attn, which need a GPU or are not used here. A plain AdamW takes the place of DeepSpeed's
engine, with the same division by the number of accumulated micro-batches.

Runs `SFTTrainer.fit` (two micro-batches per update) and `ActorPPOTrainer.training_step` (a KL term, an entropy bonus, a
temperature) on a tiny random Llama. Samples are padded: packing needs flash-attn. Compares the loss of each micro-batch
of SFT (steps 0 to 11), then the policy loss and the entropy of each PPO step (12 to 27), and exits with 1 if one
differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from common import compare, count_calls, stub

stub("deepspeed", "flash_attn", "ray", "vllm")
sys.modules["flash_attn.ops"] = None  # type: ignore[assignment]  # OpenRLHF then computes log-probabilities with torch

from openrlhf.models import Actor, PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer  # noqa: E402
from openrlhf.trainer.sft_trainer import SFTTrainer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from liger_chunked.integrations.frameworks import openrlhf as adapter  # noqa: E402

VOCAB, BATCH, LENGTH, MICRO_BATCHES, PPO_STEPS = 512, 4, 24, 12, 8


ARGS = SimpleNamespace(
    model=SimpleNamespace(aux_loss_coef=0.0),
    ds=SimpleNamespace(packing_samples=False),
    logger=SimpleNamespace(wandb=SimpleNamespace(key=None), tensorboard_dir=None, logging_steps=1),
    eval=SimpleNamespace(steps=-1),
    ckpt=SimpleNamespace(save_steps=-1),
    train=SimpleNamespace(batch_size=2, dynamic_batch_enable=False),
    actor=SimpleNamespace(entropy_coef=0.01),
    algo=SimpleNamespace(kl=SimpleNamespace(use_loss=True, init_coef=0.1, estimator="k3", unbiased_gradient=False)),
)


class Strategy:
    """In place of `DeepspeedStrategy`."""

    ring_attn_group = None
    args = ARGS

    def __init__(self, actor: Any, accumulated_gradient: int) -> None:
        self.accumulated_gradient = accumulated_gradient
        self.optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
        self.losses: list[float] = []
        actor.model.global_steps = 0

    def is_rank_0(self) -> bool:
        return False  # no progress bars

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        return values

    def backward(self, loss: torch.Tensor, *args: Any) -> None:
        self.losses.append(loss.item())
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, **kwargs: Any) -> None:
        if len(self.losses) % self.accumulated_gradient == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            model.model.global_steps += 1

    def get_grad_norm(self, model: Any) -> float:
        return 0.0


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, the attention mask and the mask of the loss, padded on the left as in OpenRLHF's PPO."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB // 8, (BATCH, LENGTH), generator=generator)
    attention = torch.ones_like(ids)
    for row in range(BATCH):
        attention[row, : 2 * row] = 0
    loss = attention.clone()
    loss[:, : LENGTH // 2] = 0
    return ids, attention, loss


def sft(actor: Any) -> list[float]:
    strategy = Strategy(actor, accumulated_gradient=2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(strategy.optimizer, 1.0)
    # (1, ...): OpenRLHF's batches have a dimension that its trainer squeezes.
    batches = [tuple(x[:, None] for x in samples(seed)) for seed in range(MICRO_BATCHES)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    SFTTrainer(actor, strategy, strategy.optimizer, loader, None, scheduler, max_epochs=1).fit(copy.deepcopy(ARGS))
    return strategy.losses


class Trainer(ActorPPOTrainer):
    """Without the replay buffer, vLLM's engines and the process groups."""

    def __init__(self, actor: Any) -> None:
        self.strategy: Any = Strategy(actor, accumulated_gradient=1)
        self.args, self.actor, self.ema_model = ARGS, actor, None
        self.actor_optim = self.strategy.optimizer
        self.actor_scheduler = torch.optim.lr_scheduler.ConstantLR(self.actor_optim, 1.0)
        self.actor_loss_fn = PolicyLoss()
        self.aux_loss = False
        self.replay_buffer = None


def ppo(actor: Any) -> list[float]:
    trainer, values = Trainer(actor), []
    for step in range(PPO_STEPS):
        ids, attention, _ = samples(100 + step)
        generator = torch.Generator().manual_seed(step)
        shape = (BATCH, LENGTH // 2)
        experience = Experience(
            sequences=ids,
            attention_mask=attention,
            action_mask=torch.ones(shape, dtype=torch.bool),
            action_log_probs=-6.2 + 0.1 * torch.randn(shape, generator=generator),
            base_action_log_probs=-6.2 + 0.1 * torch.randn(shape, generator=generator),
            advantages=torch.randn(shape, generator=generator),
            info={},
        )
        metrics = trainer.training_step(experience, kl_ctl=0.1, step=step)["metrics"]
        values += [trainer.strategy.losses[-1], metrics["entropy_loss"].item()]
    return values


def main() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    calls = count_calls(adapter, "linear_token_stats")
    results = []
    with tempfile.TemporaryDirectory() as path:
        LlamaForCausalLM(config).save_pretrained(path)
        for actor in (Actor, adapter.FusedActor):
            build = partial(actor, path, attn_implementation="sdpa")  # bfloat16 weights, then float32
            results.append(sft(build().float()) + ppo(build(temperature=0.7).float()))
    compare("openrlhf", *results, 1e-5, calls)


if __name__ == "__main__":
    main()
