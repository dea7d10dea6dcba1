# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "transformers==5.9.0", "verl==0.9.1", "megatron-core==0.19.2"]
# ///
"""verl 0.9.1 with Megatron-Core 0.19.2: PPO steps of its Megatron engine, on logits and with `FusedOutputProcessor`.

Environment: verl and megatron-core with all their dependencies, and torch 2.11.0 and transformers 5.9.0, which verl's
extra "cpu" pins. No package is a stub. verl has no platform for a CPU, so one is set through its plugin interface. Ray
is installed, but not started. verl's fused head runs in Triton, so the losses are compared with those of its logits.

Runs `MegatronEngineWithLMHead.forward_backward_batch`, which packs sequences, on two gloo ranks with tensor
parallelism, with verl's `ppo_loss` with a KL term and an entropy bonus, and two micro-batches per step. The engine's
constructor is not run: its bridge makes layers of Transformer Engine, which needs a GPU. It gets a `GPTModel` of
Megatron's local layers with an attention of this script, because the local one refuses packed sequences, and AdamW. A
schedule of this script stands in for Megatron's, which puts a counter on a GPU. All is float32. Compares the loss of
each step, and exits with 1 if one differs by more than 1e-5:

- steps 0 to 7, an own head
- steps 8 to 15, tied embeddings and sequence parallelism. Megatron's norm without Transformer Engine refuses it, so it
  is not told, and this script sums the gradients of what all ranks hold.
- steps 16 to 19, on-policy distillation: `distill_from_hidden_states` against verl's "forward_kl_topk" of logits, whose
  top-k is the whole vocabulary. verl has no teacher that returns hidden states, so the batch has random ones.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import compare, count_calls
from megatron_common import VOCAB, config_of, initialize
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from train_verl import STEPS, PlatformCPU, actor, batch, distillation_config, give_teacher, teacher_head

RANKS = 2


class PackedAttention(nn.Module):
    """Causal attention of packed sequences."""

    def __init__(self, **_unused: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True)
        found = torch.cat([scaled_dot_product_attention(*qkv, is_causal=True) for qkv in parts], 1)
        return found.transpose(0, 1).flatten(1)


def schedule(
    *, forward_step_func: Any, data_iterator: Any, model: list[Any], num_microbatches: int, **_unused: Any
) -> list[Any]:
    """Run the forward and backward of each micro-batch, as Megatron does without pipeline parallelism."""
    found = []
    for _ in range(num_microbatches):
        output, loss_of = forward_step_func(data_iterator, model[0])
        loss, reduced = loss_of(output)
        (loss / num_microbatches).backward()
        found.append(reduced)
    return found


def build(tied: bool, sequence_parallel: bool) -> Any:
    """Return a GPTModel with random weights, the same in each call."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)
    config = config_of(RANKS, sequence_parallel=sequence_parallel, apply_rope_fusion=False)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )


def engine_of(model: Any, fused: bool) -> Any:
    """Return verl's engine around a model. `fused`: verl's `use_fused_kernels`."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine = object.__new__(MegatronEngineWithLMHead)
    engine.module, engine.tf_config, engine.enable_routing_replay = [model], model.config, False
    engine.engine_config = SimpleNamespace(
        use_fused_kernels=fused,
        use_remove_padding=True,
        dynamic_context_parallel=False,
        context_parallel_size=1,
        pad_to_length=False,
        pad_bshd_to_minibatch_max=False,
        entropy_from_logits_with_chunking=False,
        router_replay=SimpleNamespace(mode="disabled"),
    )
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        mtp=SimpleNamespace(enable=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine.is_value_model = False
    engine._maybe_enable_fused_kernels()
    return engine


def train(steps: range, fused: bool, tied: bool = False, distilled: str | None = None) -> list[float]:
    """Return the loss of each step. `distilled`: the loss mode of a distillation; None: PPO."""
    model = build(tied, sequence_parallel=tied)
    engine, losses = engine_of(model, fused), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in steps:
        data = batch(step, fused)
        if distilled is None:
            from verl.workers.utils.losses import ppo_loss

            config = actor("megatron", entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
            loss = partial(ppo_loss, config)
        else:
            from verl.trainer.distillation.losses import distillation_ppo_loss

            only = step % 2 == 0
            give_teacher(data, step, only, states=fused)
            config = actor("megatron", entropy_coeff=0.01)
            loss = partial(distillation_ppo_loss, config, distillation_config(distilled, only))
        found = engine.forward_backward_batch(data, loss)
        if model.config.sequence_parallel:
            for name, p in model.named_parameters():
                if "norm" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
                    dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(found["loss"]))
    return losses


def worker(rank: int, folder: str) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from verl.plugin.platform.platform_manager import set_platform

    set_platform(PlatformCPU())
    import verl.models.mcore.model_forward_fused as of_megatron
    from verl.workers.engine.megatron import transformer_impl

    from liger_chunked.integrations.frameworks.verl_megatron import FusedOutputProcessor, distill_from_hidden_states
    from liger_chunked.losses import LigerFusedLinearKLDivLoss

    initialize(rank, RANKS, folder)
    make_norm = WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **options: Any) -> Any:
        return make_norm(cls, SimpleNamespace(**vars(config) | {"sequence_parallel": False}), *args, **options)

    WrappedTorchNorm.__new__ = norm
    transformer_impl.get_forward_backward_func = lambda: schedule
    stock, ours = [], []
    for tied in (False, True):
        stock += train(range(STEPS), fused=False, tied=tied)
    stock += train(range(STEPS // 2), fused=False, distilled="forward_kl_topk")

    calls = count_calls(FusedOutputProcessor, "__call__")
    of_megatron.fused_output_processor = FusedOutputProcessor()
    for tied in (False, True):
        ours += train(range(STEPS), fused=True, tied=tied)
    distill_from_hidden_states(teacher_head)
    calls_of_losses = count_calls(LigerFusedLinearKLDivLoss, "forward")
    ours += train(range(STEPS // 2), fused=True, distilled="hidden_states")
    if not calls_of_losses:
        raise RuntimeError("the distillation did not run this library's loss")
    if rank == 0:
        torch.save((stock, ours, dict(calls)), f"{folder}/losses")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), RANKS)
        stock, ours, calls = torch.load(f"{folder}/losses")
    compare("verl", stock, ours, 1e-5, Counter(calls))


if __name__ == "__main__":
    main()
