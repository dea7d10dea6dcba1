"""Shared by the scripts of frameworks on Megatron-Core: a tiny GPTModel on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

VOCAB, LENGTH = 512, 16


def initialize(rank: int, ranks: int, folder: str) -> None:
    """Start gloo and Megatron's groups, all ranks tensor parallel, and let Megatron put its tensors on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    random.get_cuda_rng_tracker().fork = torch.random.fork_rng
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(f"{folder}/store", ranks))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def config_of(ranks: int, **options: Any) -> Any:
    """Return a TransformerConfig of a small model on the CPU; `options` are more of its fields."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def build(ranks: int, tied: bool) -> Any:
    """Return a GPTModel with random weights, the same in each call."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)
    return GPTModel(
        config_of(ranks),
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions and the attention mask of `batch` sequences."""
    return torch.arange(LENGTH).expand(batch, -1), torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
