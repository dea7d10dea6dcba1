# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "transformers==5.9.0", "verl==0.9.1"]
# ///
"""verl 0.9.1: PPO steps of its FSDP engine, with `FusedLinearForPPO` of verl and of this library.

Environment: verl with all its dependencies, and torch 2.11.0 and transformers 5.9.0, which its extra "cpu" pins. No
module is a stub. verl has no platform for a CPU, so one is set through its plugin interface. Ray is installed, but not
started: the engine, which verl's workers hold, is built here.

Runs `FSDPEngineWithLMHead` (FSDP2 over one gloo rank, packed sequences, gradient checkpointing) on a tiny random Llama:
`train_batch` with verl's `ppo_loss`, a KL term, an entropy bonus and two micro-batches per step. All is float32.
Compares the loss of each step, and exits with 1 if one differs by more than 1e-5:

- steps 0 to 7, tied embeddings: ours against verl's `FusedLinearForPPO`
- steps 8 to 15, an own head: ours against verl's logits. verl's `FusedLinearForPPO` fails there with "mixed
  torch.Tensor and DTensor", because FSDP2 shards the head on its own, and verl does not call the head's forward.
- steps 16 to 19, on-policy distillation: `distill_from_hidden_states` against verl's "forward_kl_topk" of logits, whose
  top-k is the whole vocabulary. verl has no teacher that returns hidden states, so the batch has random ones.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import compare, count_calls
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils
from verl.utils.experimental import torch_functional
from verl.workers.config import (
    ActorConfig,
    DistillationConfig,
    DistillationLossConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from liger_chunked.integrations.frameworks.verl import FusedLinearForPPO, distill_from_hidden_states
from liger_chunked.losses import LigerFusedLinearKLDivLoss

STEPS, BATCH, PROMPT, RESPONSE, VOCAB, H_TEACHER = 8, 8, 5, 12, 512, 48


class PlatformCPU(PlatformCUDA):
    """Tell verl to put tensors on the CPU."""

    device_name = "cpu"
    device_module = torch.cpu

    def current_device(self) -> str:
        return "cpu"


def batch(step: int, fused: bool) -> TensorDict:
    """Return rollouts of random tokens, prompts padded on the left and responses on the right, as verl makes them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (BATCH, PROMPT + RESPONSE), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(BATCH):
        mask[row, : row % 3] = 0
        mask[row, PROMPT + RESPONSE - row % 4 :] = 0
    response_mask = mask[:, PROMPT:]
    logps = -6.2 + 0.1 * torch.randn(BATCH, RESPONSE, generator=generator)  # near those of a model that knows nothing
    data = {
        "input_ids": ids,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "old_log_probs": logps * response_mask,
        "ref_log_prob": logps * response_mask,
        "advantages": torch.randn(BATCH, 1, generator=generator) * response_mask,
    }
    td = left_right_2_no_padding(TensorDict(data, batch_size=BATCH))
    tensordict_utils.assign_non_tensor(
        td,
        use_remove_padding=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=BATCH // 2,
        use_fused_kernels=fused,
        temperature=0.7,
        calculate_entropy=True,
        global_batch_size=BATCH,
    )
    return td


def build(path: str, fused: bool) -> FSDPEngineWithLMHead:
    """Return a new engine with the weights of `path`. `fused`: verl's `use_fused_kernels`."""
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=path,
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=True,
            use_fused_kernels=fused,
            fused_kernel_options={"impl_backend": "torch"},
        ),
        FSDPEngineConfig(strategy="fsdp2", mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=STEPS, clip_grad=1.0),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def actor(strategy: str = "fsdp2", **options: Any) -> ActorConfig:
    return ActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=BATCH // 2, **options)


def train(path: str, fused: bool = True) -> list[float]:
    """Return the loss of each step of PPO."""
    engine, losses = build(path, fused), []
    config = actor(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    for step in range(STEPS):
        with engine.train_mode():
            output = engine.train_batch(batch(step, fused), partial(ppo_loss, config))
        losses.append(sum(output["loss"]))
    return losses


def teacher_head() -> torch.Tensor:
    return torch.randn(VOCAB, H_TEACHER, generator=torch.Generator().manual_seed(1)) / 4


def distillation_config(loss_mode: str, only: bool) -> DistillationConfig:
    """Return verl's settings. `only`: without `ppo_loss`."""
    loss = DistillationLossConfig(
        loss_mode=loss_mode,
        topk=VOCAB,
        use_task_rewards=not only,
        use_policy_gradient=False,
        loss_max_clamp=None,
        log_prob_min_clamp=None,
    )
    return DistillationConfig(distillation_loss=loss)


def give_teacher(data: TensorDict, step: int, only: bool, states: bool) -> None:
    """Put the teacher's hidden states in a batch (`states`), or its log-probabilities of the whole vocabulary."""
    offsets = data["input_ids"].offsets()
    n = data["input_ids"].values().shape[0]
    hidden = torch.randn(n, H_TEACHER, generator=torch.Generator().manual_seed(100 + step))
    teacher = {
        "teacher_hidden_states": hidden,
        "teacher_logprobs": (hidden @ teacher_head().T).log_softmax(-1),
        "teacher_ids": torch.arange(VOCAB).expand(n, -1).contiguous(),
    }
    for name, x in teacher.items():
        if states == (name == "teacher_hidden_states"):
            data[name] = torch.nested.nested_tensor_from_jagged(x, offsets)
    tensordict_utils.assign_non_tensor(
        data, distillation_use_topk=True, distillation_only=only, calculate_entropy=not only
    )


def distill(path: str, loss_mode: str, fused: bool) -> list[float]:
    """Return the loss of each step of on-policy distillation, of a student at temperature 0.7.

    Odd steps add verl's `ppo_loss`, for which the head computes log-probabilities and entropies too.
    """
    engine, losses = build(path, fused), []
    for step in range(STEPS // 2):
        only = step % 2 == 0
        data = batch(step, fused)
        give_teacher(data, step, only, states=fused)
        config = actor(entropy_coeff=0.01)
        loss_function = partial(distillation_ppo_loss, config, distillation_config(loss_mode, only))
        with engine.train_mode():
            output = engine.train_batch(data, loss_function)
        losses.append(sum(output["loss"]))
    return losses


def save(path: str, tie_word_embeddings: bool) -> None:
    """Save a tiny random model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie_word_embeddings,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def main() -> None:
    set_platform(PlatformCPU())
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with tempfile.TemporaryDirectory() as tied, tempfile.TemporaryDirectory() as untied:
        save(tied, tie_word_embeddings=True)
        save(untied, tie_word_embeddings=False)
        on_logits = train(untied, fused=False)  # first: the fused forward stays in the class of the model
        distilled = distill(untied, "forward_kl_topk", fused=False)
        stock = train(tied) + on_logits + distilled
        calls = count_calls(FusedLinearForPPO, "forward")
        torch_functional.FusedLinearForPPO = FusedLinearForPPO
        ours = train(tied) + train(untied)
        distill_from_hidden_states(teacher_head)
        calls_of_losses = count_calls(LigerFusedLinearKLDivLoss, "forward")
        ours += distill(untied, "hidden_states", fused=True)
        if not calls_of_losses:
            raise RuntimeError("the distillation did not run this library's loss")
    compare("verl", stock, ours, 1e-5, calls)


if __name__ == "__main__":
    main()
