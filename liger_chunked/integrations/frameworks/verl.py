"""verl: its FSDP backend, and what its Megatron backend calls for a head. Labels are shifted already.

Run with verl 0.9.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.tensor_parallel import budget_of, even_shard
from liger_chunked.losses import LigerFusedLinearDistillationBase, LigerFusedLinearKLDivLoss
from liger_chunked.types import LogitOptions, VocabShard, described

__all__ = ["FusedLinearForPPO", "distill_from_hidden_states", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens' log-probabilities and entropies (N,), as `verl.utils.kernel.linear_cross_entropy`.

    dX is the rank's share, which Megatron's gather of the sequence sums.

    Args:
        hidden, labels: (..., H), (...).
        weight: this rank's rows.
        temperature: see `LogitOptions`.
        dist_process_group: the tensor-parallel group; None: one rank has all rows.
    """
    if reduction.lower() != "none":
        raise ValueError(f"reduction must be 'none', got {reduction!r}")
    shard = None if dist_process_group is None else even_shard(weight, dist_process_group, "partial")
    return _logps_and_entropy(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature, shard)


class FusedLinearForPPO(nn.Module):
    """The tokens' log-probabilities and entropies, as `verl.utils.experimental.torch_functional.FusedLinearForPPO`.

    The entropy is float32, not in the logits' dtype. `chunk_size` counts tokens. `impl_backend` is not used.
    """

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        budget = budget_of(self.chunk_size, vocab_weights)
        return _logps_and_entropy(hidden_states, vocab_weights, input_ids, temperature, logits_budget=budget)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    shard: VocabShard | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    stats = linear_token_stats(
        weight,
        hidden,
        labels,
        outputs=("logps", "entropy"),
        temperature=temperature,
        vocab_shard=shard,
        **options,
    )
    assert stats.logps is not None and stats.entropy is not None
    return stats.logps, stats.entropy


class _Distillation:
    """What passes from a micro-batch to the head inside the model's forward, and from there to the engine's outputs.

    prepare_model_inputs    reads the teacher's hidden states of the micro-batch, and what else it computes
    the head's forward      computes the divergences, where FSDP has gathered the head
    prepare_model_outputs   moves them to where verl's fused heads leave such values, `output.fused_linear_aux`

    In between they are a part of the output's `log_probs`: FSDP gathers the head again for the backward when gradients
    reach what its forward has returned.
    """

    def __init__(
        self,
        teacher_weight: Tensor | Callable[[], Tensor],
        loss: Callable[..., LigerFusedLinearDistillationBase],
        teacher_options: LogitOptions,
        logits_budget: int | float | str | None,
    ) -> None:
        self.teacher_weight = teacher_weight
        self.loss = functools.partial(
            loss, reduction="none", weight_soft_loss=1.0, teacher_options=teacher_options, logits_budget=logits_budget
        )
        self.teacher_input: Tensor | None = None  # (1, n, H_teacher); None: this micro-batch is not distilled
        self.mask: Tensor | None = None  # (1, n), True where the loss reads a divergence
        self.only = False  # whether neither log-probabilities nor entropies are read
        self.is_measured = False  # whether the output's `log_probs` hold divergences

    def read(self, engine: Any, micro_batch: Any, settings: Callable[..., Any]) -> None:
        """Take the teacher's states of a micro-batch. `settings` is verl's `get_non_tensor_data`."""
        self.teacher_input, self.mask, self.is_measured = None, None, False
        nested = teacher_states(micro_batch, settings, use_fused_kernels=False)
        if nested is None:
            return
        states, mask = nested.values()[None], positions_before_responses(micro_batch)[None]
        if getattr(engine, "use_ulysses_sp", False):
            from verl.utils.ulysses import slice_input_tensor

            states, mask = slice_input_tensor(states, dim=1), slice_input_tensor(mask, dim=1)
        self.teacher_input, self.mask = states, mask
        self.only = settings(micro_batch, "distillation_only", False) and not settings(
            micro_batch, "calculate_entropy", False
        )

    def measure(self, hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
        """Return the divergences (1, n) of hidden states (1, n, H)."""
        assert self.teacher_input is not None
        head = self.teacher_weight() if callable(self.teacher_weight) else self.teacher_weight
        self.teacher_weight = head.to(hidden.device)
        losses, _ = self.loss(temperature=temperature)(
            weight, hidden, self.teacher_weight, self.teacher_input.to(hidden.dtype), mask=self.mask
        )
        self.is_measured = True
        return losses

    def move(self, output: Any) -> None:
        """Move the divergences of a model's output from `log_probs`."""
        if self.teacher_input is None:
            return
        if not self.is_measured:
            raise ValueError(
                "the model's forward did not call FusedLinearForPPO, which computes the divergences of "
                "teacher_hidden_states: set fused_kernel_options.impl_backend='torch'"
            )
        losses, *logps = output.log_probs.unbind()
        output.log_probs = logps[0] if logps else None
        whole = torch.ones_like(losses)  # a softmax over the whole vocabulary has all of the mass
        output.fused_linear_aux = SimpleNamespace(distillation_losses=losses, student_mass=whole, teacher_mass=whole)
        self.teacher_input = self.mask = None

    def head(self) -> type[FusedLinearForPPO]:
        """Return the class that takes the place of verl's."""
        distillation = self

        class DistillingLinearForPPO(FusedLinearForPPO):
            def forward(self, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float = 1.0) -> Any:
                if distillation.teacher_input is None:
                    return super().forward(hidden_states, vocab_weights, input_ids, temperature)
                losses = distillation.measure(hidden_states, vocab_weights, temperature)
                if distillation.only:
                    return losses[None], None
                logps, entropy = super().forward(hidden_states, vocab_weights, input_ids, temperature)
                return torch.stack([losses, logps]), entropy

        return DistillingLinearForPPO


def teacher_states(micro_batch: Any, settings: Callable[..., Any], *, use_fused_kernels: bool) -> Tensor | None:
    """Return the nested (B, j, H_teacher) of a micro-batch that is distilled from hidden states, or None.

    Args:
        settings: verl's `get_non_tensor_data`.
        use_fused_kernels: what holds where the batch does not say it.

    Raises ValueError: the head is not fused, or the states are not those of the tokens.
    """
    if not settings(micro_batch, "distillation_use_topk", False) or "teacher_hidden_states" not in micro_batch:
        return None
    for name, default in (("use_fused_kernels", use_fused_kernels), ("use_remove_padding", True)):
        if not settings(micro_batch, name, default):
            raise ValueError(f"teacher_hidden_states need {name}=True: the head computes their divergences")
    states, ids = micro_batch["teacher_hidden_states"], micro_batch["input_ids"]
    if not states.is_nested or states.values().shape[0] != ids.values().shape[0]:
        raise ValueError(
            "teacher_hidden_states must be a nested tensor (B, j, H_teacher) with the "
            f"{ids.values().shape[0]} tokens of input_ids, got {described(states)}"
        )
    return states


def positions_before_responses(micro_batch: Any) -> Tensor:
    """Return (tokens,) bool, True at the positions that predict a token of a response, which verl's losses read."""
    ids, responses = micro_batch["input_ids"], micro_batch["responses"]
    ends, lengths = ids.offsets()[1:], ids.offsets().diff()
    if responses.is_nested:
        n_responses = responses.offsets().diff()
    else:
        n_responses = micro_batch["attention_mask"][:, -responses.shape[1] :].sum(1)
    left = torch.repeat_interleave(ends, lengths) - torch.arange(ids.values().shape[0], device=ends.device)
    return (left > 1) & (left <= 1 + torch.repeat_interleave(n_responses, lengths))


def register_loss(loss_mode: str) -> None:
    """Give verl's config a distillation loss: the divergences `distillation_losses` of the engine's outputs.

    Raises ValueError: `loss_mode` is registered already.
    """
    from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss
    from verl.workers.utils.padding import no_padding_2_padding

    def divergences(
        config: Any, distillation_config: Any, model_output: dict[str, Any], data: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        if "distillation_losses" not in model_output:
            raise ValueError(f"loss_mode={loss_mode!r} needs teacher_hidden_states in the batch, got none")
        return no_padding_2_padding(model_output["distillation_losses"], data), {}

    # "use_topk" is how verl asks its engine for divergences of each token.
    register_distillation_loss(DistillationLossSettings(names=[loss_mode], use_topk=True))(divergences)


def distill_from_hidden_states(
    teacher_weight: Tensor | Callable[[], Tensor],
    loss: Callable[..., LigerFusedLinearDistillationBase] = LigerFusedLinearKLDivLoss,
    *,
    loss_mode: str = "hidden_states",
    teacher_options: LogitOptions | None = None,
    logits_budget: int | float | str | None = None,
) -> None:
    """Give verl's FSDP engine a distillation loss over the whole vocabulary, from a teacher's hidden states.

    `verl_megatron` has the same for verl's Megatron engine.

    Call it in each process of verl, as from a module of `VERL_USE_EXTERNAL_MODULES`: the config checks names of losses.
    Set `use_fused_kernels=True`, with the backend "torch", and `distillation.distillation_loss.loss_mode`. The batch
    has `teacher_hidden_states`, a nested tensor (B, j, H_teacher) like `input_ids`: the last hidden states of the
    teacher on the student's sequences. verl 0.9.1 has no server that returns them. Nothing else changes: verl's
    `loss_max_clamp`, `loss_agg_mode`, task rewards and policy gradient act on each token's divergence, (B, response).
    Only positions that predict a response are computed, and no logits are stored.

    Args:
        teacher_weight: (V_teacher, H_teacher), the teacher's head, or a function that loads it, called in the first
            step of each worker. Rows beyond the student's vocabulary are not read.
        loss: makes the loss from its keywords, such as `functools.partial(LigerFusedLinearKLDivLoss, reverse=True)`.
            The default is the forward KL, that of verl's "forward_kl_topk".
        loss_mode: the name that verl's config gives to this loss.
        teacher_options: of the teacher's logits. None: no transform, temperature 1, as verl's teachers have it. The
            student's logits have the engine's temperature.
        logits_budget: as in the losses.

    Raises:
        ImportError: verl is not installed.
        ValueError: `loss_mode` is registered already.
    """
    from verl.utils import tensordict_utils
    from verl.utils.experimental import torch_functional
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    distillation = _Distillation(teacher_weight, loss, teacher_options or LogitOptions(), logits_budget)
    register_loss(loss_mode)
    prepare_inputs = FSDPEngineWithLMHead.prepare_model_inputs
    prepare_outputs = FSDPEngineWithLMHead.prepare_model_outputs

    @functools.wraps(prepare_inputs)
    def with_teacher(self: Any, micro_batch: Any) -> Any:
        distillation.read(self, micro_batch, tensordict_utils.get_non_tensor_data)
        return prepare_inputs(self, micro_batch)

    @functools.wraps(prepare_outputs)
    def with_divergences(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        distillation.move(output)
        return prepare_outputs(self, output, *args, **kwargs)

    FSDPEngineWithLMHead.prepare_model_inputs = with_teacher
    FSDPEngineWithLMHead.prepare_model_outputs = with_divergences
    torch_functional.FusedLinearForPPO = distillation.head()
