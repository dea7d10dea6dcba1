"""verl, Megatron backend: the output processor of its fused forward, and distillation from a teacher's hidden states.

Read in verl 0.9.1: `verl/models/mcore/model_forward_fused.py`, `verl/workers/engine/megatron/transformer_impl.py`. verl
calls the processor with Megatron-Core 0.18 or newer. With an older one it replaces the model's forward, which calls
`liger_chunked.integrations.frameworks.verl.linear_cross_entropy`.

Run with verl 0.9.1 and Megatron-Core 0.19.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.frameworks.megatron import OutputProcessor
from liger_chunked.integrations.frameworks.verl import positions_before_responses, register_loss, teacher_states
from liger_chunked.losses import LigerFusedLinearDistillationBase, LigerFusedLinearKLDivLoss
from liger_chunked.types import LogitOptions, TokenStats, described

__all__ = ["FusedOutputProcessor", "distill_from_hidden_states"]


class FusedOutputProcessor:
    """The tokens' log-probabilities and entropies, as verl's `fused_output_processor`.

        import verl.models.mcore.model_forward_fused as of_megatron

        of_megatron.fused_output_processor = FusedOutputProcessor()

    verl packs a micro-batch into one row of n tokens, and shifts its labels. Both results are (1, n), float32. Unlike
    verl's, this also serves MuP's output multiplier, a head with a bias, and tensor parallelism without sequence
    parallelism, where it sums the hidden states' gradient over the ranks. verl's leaves each rank its share there.

    Args:
        vocab_size: without padding. None: padded rows are in the softmax, as in verl.
        logits_budget: see `LogitOptions`.
    """

    def __init__(self, *, vocab_size: int | None = None, logits_budget: int | float | str | None = None) -> None:
        self.vocab_size, self.logits_budget = vocab_size, logits_budget
        self._process = OutputProcessor(linear_token_stats, vocab_size=vocab_size)

    def __call__(self, *, context: Any, **given: Any) -> Any:
        """Return verl's `CausalLMOutputForPPO`.

        Args:
            context: has a `temperature`, of all tokens.
            **given: what Megatron passes to an output processor.

        Raises ValueError if the head is not plain rows of the vocabulary.
        """
        stats = self._stats(context.temperature, given)
        return self._output(given["hidden_states"], stats.logps, stats.entropy)

    def _stats(self, temperature: float, given: dict[str, Any]) -> TokenStats:
        """Return `logps` and `entropy`, (1, n) each."""
        options = {"outputs": ("logps", "entropy"), "temperature": temperature, "logits_budget": self.logits_budget}
        stats: TokenStats = self._process(context=options, **given)
        return stats

    def _output(self, hidden: Tensor, logps: Tensor | None, entropy: Tensor | None) -> Any:
        from verl.utils.model import CausalLMOutputForPPO

        return CausalLMOutputForPPO(hidden_states=hidden, log_probs=logps, entropy=entropy)


class _DistillingProcessor(FusedOutputProcessor):
    """Computes divergences from a teacher too, which leave the model with the log-probabilities.

    read         takes the teacher's states of the micro-batch
    packing      remembers how verl packs the labels of this micro-batch
    __call__     packs the states alike, and computes the divergences
    split        takes them out of what verl has unpacked

    The output's `log_probs` are (1, n, 2), divergences first, or (1, n, 1) where nothing reads log-probabilities. verl
    gathers them over context-parallel ranks and unpacks them as it does with (1, n).
    """

    def __init__(
        self,
        teacher_weight: Tensor | Callable[[], Tensor],
        loss: Callable[..., LigerFusedLinearDistillationBase],
        teacher_options: LogitOptions,
        vocab_size: int | None,
        logits_budget: int | float | str | None,
    ) -> None:
        super().__init__(vocab_size=vocab_size, logits_budget=logits_budget)
        self.teacher_weight = teacher_weight  # a function until the first step, then this rank's rows
        self.rows: Tensor | None = None
        self.loss = functools.partial(
            loss, reduction="none", weight_soft_loss=1.0, teacher_options=teacher_options, logits_budget=logits_budget
        )
        self.states: Tensor | None = None  # nested (B, j, H_teacher); None: this micro-batch is not distilled
        self.mask: Tensor | None = None  # nested (B, j), True where verl reads a divergence
        self.packed: Callable[[Tensor], Tensor] | None = None
        self.only = False  # whether neither log-probabilities nor entropies are read

    def read(self, engine: Any, micro_batch: Any, settings: Callable[..., Any]) -> None:
        """Take the teacher's states of a micro-batch. `settings` is verl's `get_non_tensor_data`."""
        is_fused = engine.engine_config.use_fused_kernels
        self.states = teacher_states(micro_batch, settings, use_fused_kernels=is_fused)
        self.mask = self.packed = None
        if self.states is None:
            return
        mask = positions_before_responses(micro_batch)
        self.mask = torch.nested.nested_tensor_from_jagged(mask, micro_batch["input_ids"].offsets())
        self.only = settings(micro_batch, "distillation_only", False) and not settings(
            micro_batch, "calculate_entropy", False
        )

    def packing(self, preprocess: Callable[..., Any]) -> Callable[..., Any]:
        """Return verl's `preprocess_thd_engine`, which leaves the packing of labels here."""

        @functools.wraps(preprocess)
        def preprocess_thd_engine(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("need_roll"):  # labels are rolled, so that they are those of the next token
                options = kwargs | {"pre_process": True, "need_roll": False}
                self.packed = lambda x: preprocess(x, **options)[0]
            return preprocess(*args, **kwargs)

        return preprocess_thd_engine

    def __call__(self, *, context: Any, **given: Any) -> Any:
        if self.states is None:
            return super().__call__(context=context, **given)
        losses = self._divergences(context.temperature, given)
        self.states = self.mask = None
        if self.only:
            return self._output(given["hidden_states"], losses[..., None], None)
        stats = self._stats(context.temperature, given)
        assert stats.logps is not None
        return self._output(given["hidden_states"], torch.stack([losses, stats.logps], -1), stats.entropy)

    def _divergences(self, temperature: float, given: dict[str, Any]) -> Tensor:
        """Return the divergences (1, n) of this rank's packed tokens, 0 where none is read."""
        if self.packed is None:
            raise ValueError("verl's preprocess_thd_engine must be called with need_roll=True for the labels, got none")
        assert self.states is not None and self.mask is not None
        hidden, layer = given["hidden_states"], given["output_layer"]
        weight = layer.weight if given["output_weight"] is None else given["output_weight"]
        states, mask = self.packed(self.states), self.packed(self.mask)
        if layer.sequence_parallel:  # the rank's part of the tokens, as of the student's: the loss gathers both
            states = states[:, dist.get_rank(layer.tp_group) * hidden.shape[0] :][:, : hidden.shape[0]]
        context = {
            "teacher_weight": self._rows_of_teacher(weight, layer.tp_group),
            "teacher_input": states.to(hidden.dtype),
            "mask": mask,
        }

        def divergences(weight: Any, hidden: Tensor, *, target: Any, logit_scale: float = 1.0, **options: Any) -> Any:
            # Without the target: there is no hard loss.
            losses, _ = self.loss(temperature=temperature, logit_scale=logit_scale)(weight, hidden, **options)
            return losses

        found: Tensor = OutputProcessor(divergences, vocab_size=self.vocab_size)(context=context, **given)
        return found

    def _rows_of_teacher(self, weight: Tensor, group: Any) -> Tensor:
        """Return the teacher's rows of the ids whose rows of the student this rank has."""
        if self.rows is None:
            head = self.teacher_weight() if callable(self.teacher_weight) else self.teacher_weight
            n, ranks = weight.shape[0], dist.get_world_size(group)
            wanted = n * ranks if self.vocab_size is None else self.vocab_size
            # All ranks find this error. The loss would find it on the last ones alone, and the others would wait.
            if head.shape[0] < wanted:
                raise ValueError(
                    f"teacher_weight must have a row for each of the student's {wanted}, got {described(head)}: pass "
                    "vocab_size, the student's number of tokens without padding"
                )
            start = dist.get_rank(group) * n
            self.rows = head[start : start + n].to(weight.device)
        return self.rows

    def split(self, output: Any) -> Any:
        """Return verl's outputs with `distillation_losses` taken out of `log_probs`, each nested (B, j)."""
        if self.states is not None:
            raise ValueError(
                "the model did not call verl's fused_output_processor, which computes the divergences of "
                "teacher_hidden_states: they need Megatron-Core 0.18 or newer, and a GPTModel"
            )
        both = output["log_probs"] if isinstance(output, dict) else None
        if both is None or both.dim() != 3:
            return output
        losses, *logps = (torch.nested.nested_tensor_from_jagged(x, both.offsets()) for x in both.values().unbind(-1))
        others = {name: x for name, x in output.items() if name != "log_probs"}
        return others | {"distillation_losses": losses} | ({"log_probs": logps[0]} if logps else {})


def distill_from_hidden_states(
    teacher_weight: Tensor | Callable[[], Tensor],
    loss: Callable[..., LigerFusedLinearDistillationBase] = LigerFusedLinearKLDivLoss,
    *,
    loss_mode: str = "hidden_states",
    teacher_options: LogitOptions | None = None,
    vocab_size: int | None = None,
    logits_budget: int | float | str | None = None,
) -> None:
    """Give verl's Megatron engine a distillation loss over the whole vocabulary, from a teacher's hidden states.

    Call it in each process of verl, as from a module of `VERL_USE_EXTERNAL_MODULES`. It also sets a
    `FusedOutputProcessor`. Set `use_fused_kernels=True`, and `distillation.distillation_loss.loss_mode`. The batch and
    the results are those of `distill_from_hidden_states` in `verl.py`. Each rank computes with its rows of both heads,
    and with its part of the tokens under context parallelism. With sequence parallelism it gathers the states of both
    models. No logits are stored.

    Args:
        teacher_weight: (V_teacher, H_teacher), the teacher's head, or a function that loads it, called in the first
            step of each worker that has the student's head, which keeps this rank's rows.
        loss: makes the loss from its keywords, such as `functools.partial(LigerFusedLinearKLDivLoss, reverse=True)`:
            one with a `closed_form`, if ranks split the vocabulary. The default is the forward KL.
        loss_mode: the name that verl's config gives to this loss.
        teacher_options: of the teacher's logits. None: no transform, temperature 1. The student's logits have the
            engine's temperature.
        vocab_size: of the student, without padding, also for log-probabilities and entropies. None: padded rows are in
            the softmax, as in verl, and the teacher needs a row for each.
        logits_budget: see `LogitOptions`.

    Raises:
        ImportError: verl or Megatron-Core is not installed.
        ValueError: `loss_mode` is registered already.
    """
    import verl.models.mcore.model_forward_fused as of_megatron
    from verl.utils import tensordict_utils
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    processor = _DistillingProcessor(teacher_weight, loss, teacher_options or LogitOptions(), vocab_size, logits_budget)
    register_loss(loss_mode)
    prepare_inputs = MegatronEngineWithLMHead.prepare_model_inputs
    prepare_outputs = MegatronEngineWithLMHead.prepare_model_outputs

    @functools.wraps(prepare_inputs)
    def with_teacher(self: Any, batch: Any) -> Any:
        processor.read(self, batch, tensordict_utils.get_non_tensor_data)
        return prepare_inputs(self, batch)

    @functools.wraps(prepare_outputs)
    def with_divergences(self: Any, output: Any, data: Any) -> Any:
        return prepare_outputs(self, processor.split(output), data)

    MegatronEngineWithLMHead.prepare_model_inputs = with_teacher
    MegatronEngineWithLMHead.prepare_model_outputs = with_divergences
    of_megatron.preprocess_thd_engine = processor.packing(of_megatron.preprocess_thd_engine)
    of_megatron.fused_output_processor = processor
