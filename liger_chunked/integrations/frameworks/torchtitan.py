"""torchtitan, from 0.3.

Run with torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from liger_chunked.device import is_capturing, is_on_gpu
from liger_chunked.integrations.tensor_parallel import call_in_forward, even_shard
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import VocabShard

__all__ = ["FusedLinearCrossEntropyLoss"]

IGNORE_INDEX = -100


class FusedLinearCrossEntropyLoss(ChunkedLossWrapper):
    """The sum of the tokens' cross entropy over `global_valid_tokens`, without chunks of the sequence.

    Takes hidden states (B, T, H), and shifted labels (B, T), -100 where ignored; (T, H) and (T,) from
    torchtitan's main branch (read at commit b5bcd76 of 2026-08-21).

    The loss runs inside the forward of `lm_head`, with FSDP's hooks. With tensor parallelism and "spmd_types", the
    hidden states' gradient is the rank's share, which the backward of the norm sums.

    With `cuda_graphs`, ignored tokens are tokens of weight 0: loss and gradients are the same but for rounding, and no
    number depends on how many labels a batch ignores. A graph's replays have other labels than its capture, and their
    count, which Trainer knows on the host, does not reach the loss. Ignored tokens then cost as much as others, and
    their hidden states must be finite.

    `compile_config` is not used. Raises RuntimeError under a CUDA graph without `cuda_graphs`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Settings of the loss.

        Attributes:
            global_vocab_size: needed with "spmd_types", unless ranks have equally many rows of the head.
            cuda_graphs: True with torchtitan's CUDA graphs. False leaves ignored tokens out of all products, and needs
                `training.disable_cuda_graphs`: their number is read on the host.
            logits_budget: see `LogitOptions`.
        """

        global_vocab_size: int | None = None
        cuda_graphs: bool = False
        logits_budget: int | str | None = None

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.config = config
        self.lm_head: nn.Module | None = None

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.lm_head is None:
            raise ValueError("lm_head must be set before the first call: call set_lm_head")
        if get_spmd_backend() == "full_dtensor":
            raise ValueError("spmd_backend must be 'spmd_types' or 'partial_dtensor', got 'full_dtensor'")
        if not self.config.cuda_graphs and is_on_gpu(pred) and is_capturing():
            raise RuntimeError(
                "a captured step computes ignored labels too, by kernels that earlier steps may not have compiled: set "
                "cuda_graphs=True in the loss's Config, or set training.disable_cuda_graphs"
            )
        if self.config.cuda_graphs and isinstance(self.lm_head, FSDPModule):
            # As ChunkedLossWrapper does: gathered inside the head's forward, the weight would leave an event for the
            # next FSDP module to wait for. That event is from before the capture, and a capture cannot wait for it.
            with spmd.no_typecheck():
                self.lm_head.unshard()
        with spmd.local():
            loss = call_in_forward(self.lm_head, self._loss_of_tokens, pred, labels, global_valid_tokens)
        if spmd.is_type_checking():
            spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}

    def _loss_of_tokens(self, hidden: Tensor, labels: Tensor, global_valid_tokens: Tensor | None) -> Tensor:
        """Return the sum of the tokens' losses, divided by `global_valid_tokens` if given.

        The loss divides, and not its caller: a division after it would round 16-bit gradients once more.
        """
        head: Any = self.lm_head
        token_weights = None
        if self.config.cuda_graphs:
            counts = labels != IGNORE_INDEX
            token_weights, labels = counts.to(torch.float32), labels.where(counts, 0)
        reduction = "sum" if global_valid_tokens is None else "mean"
        loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction, logits_budget=self.config.logits_budget)(
            head.weight,
            hidden,
            labels,
            head.bias,
            vocab_shard=self._shard(head.weight),
            token_weights=token_weights,
            num_items=global_valid_tokens,
        )
        assert isinstance(loss, Tensor)
        return loss

    def _shard(self, weight: Tensor) -> VocabShard | None:
        if get_spmd_backend() != "spmd_types" or spmd_mesh_size("tp") == 1:
            return None
        group, vocab_size = current_spmd_mesh().get_group("tp"), self.config.global_vocab_size
        if vocab_size is None:
            return even_shard(weight, group, "partial")
        rows = -(-vocab_size // dist.get_world_size(group))  # as in torch.chunk
        return VocabShard(group, min(vocab_size, rows * dist.get_rank(group)), vocab_size, input_grad="partial")
