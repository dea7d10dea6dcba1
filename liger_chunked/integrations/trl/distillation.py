from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from liger_chunked.calls import altered
from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.transformers.head_input import with_transform
from liger_chunked.integrations.trl import across_tokenizers
from liger_chunked.integrations.trl.base import LigerTrainerMixin, apply_loss, rollout_inputs, with_outputs
from liger_chunked.integrations.trl.heads import HEAD_BUDGET, head_stats
from liger_chunked.losses import LigerFusedLinearDistillationBase, LigerFusedLinearJSDLoss
from liger_chunked.types import DistillationMetrics, Head, LogitOptions


class DistillationStep(NamedTuple):
    loss: Tensor
    metrics: DistillationMetrics
    entropy_sum: Tensor | None  # of the student, in nats


def distillation_step(
    model: nn.Module,
    teacher: nn.Module,
    loss: LigerFusedLinearDistillationBase,
    inputs: dict[str, Any],
    labels: Tensor,
    *,
    num_items: int | Tensor | None = None,
    with_entropy: bool = False,
) -> DistillationStep:
    """Apply `loss` inside the student's forward, which runs inside the teacher's.

    Heads are complete only inside their forwards. `with_entropy` costs one more GEMM.
    """

    def in_teacher(teacher_head: Head, teacher_input: HeadInput) -> DistillationStep:
        own = _with_teacher(loss, teacher_input.options)

        def in_student(head: Head, input: HeadInput) -> DistillationStep:
            step = apply_loss(
                head,
                input,
                loss=own,
                teacher_weight=teacher_head.weight,
                teacher_input=teacher_input.hidden_states,
                teacher_bias=teacher_head.bias,
                num_items=num_items,
            )
            entropy_sum = _entropy_sum(head, input, loss.options) if with_entropy else None
            return DistillationStep(step.loss, step.metrics, entropy_sum)

        return model(**inputs, labels=labels, head_fn=in_student)

    return inside_teacher(teacher, in_teacher, **inputs, labels=labels)


def inside_teacher(teacher: nn.Module, run: Callable[[Head, HeadInput], Any], **inputs: Any) -> Any:
    """Return `run(head, input)`, called in the teacher's forward, but in the gradient and autocast modes of this call.

    So the student in `run` is as it would be outside: it may have another precision than its teacher. Also, models that
    are copies share the `torch.autocast` of their forwards, and such an object restores the modes that it found last.
    """
    device = inputs["input_ids"].device.type
    modes = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
    with_gradient = torch.is_grad_enabled()
    results: list[Any] = []

    def in_teacher(head: Head, input: HeadInput) -> None:
        with torch.autocast(device, *modes), torch.set_grad_enabled(with_gradient):
            # The teacher's hooks would treat a returned loss as its output.
            results.append(run(head, input))

    teacher.eval()
    with torch.no_grad():
        teacher(**inputs, head_fn=in_teacher)
    return results[0]


def _with_teacher(loss: LigerFusedLinearDistillationBase, teacher: LogitOptions) -> LigerFusedLinearDistillationBase:
    options = loss.teacher_options
    if options is loss.options:  # the student's may differ
        options = LogitOptions(temperature=options.temperature)
    return altered(loss, teacher_options=with_transform(options, teacher))


@torch.no_grad()
def _entropy_sum(head: Head, input: HeadInput, options: LogitOptions) -> Tensor:
    stats = head_stats(head, input, ("entropy",), temperature=options.temperature, logits_budget=options.logits_budget)
    assert stats.entropy is not None
    return stats.entropy.sum()


class TeacherMixin(LigerTrainerMixin):
    loss_kind = LigerFusedLinearDistillationBase

    models_without_head: ClassVar[tuple[str, ...]] = ("teacher_model",)
    default_budget: ClassVar[int | None] = None

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        if loss.reduction != "mean":
            raise ValueError(f"{cls.__name__} trains on a mean over tokens, got reduction={loss.reduction!r}")

    def _distil(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        labels: Tensor,
        temperature: float,
        num_items: int | Tensor | None,
        with_entropy: bool = False,
    ) -> DistillationStep:
        loss = self.loss_override
        if loss is None:
            loss = LigerFusedLinearJSDLoss(
                beta=self.beta,
                temperature=temperature,
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
                logits_budget=self.default_budget if self.logits_budget is None else self.logits_budget,
            )
        teacher = self.teacher_model
        step = distillation_step(model, teacher, loss, inputs, labels, num_items=num_items, with_entropy=with_entropy)
        if loss is self.loss_override:
            self.mode_metrics["soft_loss"].append(step.metrics.soft_loss.item())
            if loss.weight_hard_loss:
                self.mode_metrics["hard_loss"].append(step.metrics.hard_loss.item())
            self.log_own_metrics(step.metrics)
        return step


class DistillationMixin(TeacherMixin):
    """TRL's `DistillationTrainer`, with the gradient computed in forward.

    `loss` is a `LigerFusedLinearDistillationBase`, whose temperature the logged entropy uses. `logits_budget` is 1 GiB
    by default, for both models.
    """

    replaced_fields: ClassVar = {"beta": "beta", "temperature": "options.temperature"}
    models_without_head = ("model", "teacher_model")
    always_replaced: ClassVar = ("_compute_loss",)
    default_budget = 2 * HEAD_BUDGET

    def _compute_loss(
        self, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: int | Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        model_inputs, labels = rollout_inputs(inputs)
        step = self._distil(unwrapped_student, model_inputs, labels, self.temperature, num_items_in_batch, True)
        return step.loss, step.entropy_sum, (labels != -100).sum()


class GKDMixin(TeacherMixin):
    """TRL's `GKDTrainer` without logits. `loss` is a `LigerFusedLinearDistillationBase`."""

    replaced_fields: ClassVar = {"beta": "beta"}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        # TRL uses its temperature for sampling only.
        step = self._distil(model, model_inputs, inputs["labels"], 1.0, num_items_in_batch)
        return with_outputs(step.loss, model, model_inputs, return_outputs)


_OF_IMAGES = ("_raw_images", "_raw_prompts")  # what GOLD's batches hold for a teacher that sees images


class GOLDMixin(TeacherMixin):
    """TRL's `GOLDTrainer` without logits.

    With another tokenizer (`use_uld_loss`), the distance of sorted probabilities is computed chunk by chunk. With
    `uld_use_hybrid_loss`, TRL's code runs, with logits. Else `loss` may be a `LigerFusedLinearDistillationBase`.
    """

    replaced_fields: ClassVar = {"beta": "beta", "temperature": "options.temperature"}
    replaced_by_loss: ClassVar = ("_get_model_forward_kwargs",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._across_tokenizers and self.loss_override is not None:
            raise ValueError("a loss on one vocabulary cannot compare tokenizers: use_uld_loss takes no loss")

    @property
    def _across_tokenizers(self) -> bool:
        return self.use_uld_loss and self.teacher_tokenizer is not None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        if not self._is_served(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._across_tokenizers:
            return self._distance(model, inputs, return_outputs)
        model_inputs = self._model_inputs(inputs)
        step = self._distil(model, model_inputs, inputs["labels"], self.temperature, num_items_in_batch)
        return with_outputs(step.loss, model, model_inputs, return_outputs)

    def _model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        of_text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return of_text | self._get_model_forward_kwargs(inputs)

    def _is_served(self, inputs: dict[str, Any]) -> bool:
        """Whether TRL's trainer keeps images where we look for them. If not, its own loss runs, with logits."""
        if not self._across_tokenizers:
            return hasattr(self, "_get_model_forward_kwargs")
        names = ("_get_model_forward_kwargs", "_teacher_processor", "_build_teacher_vlm_inputs")
        if not (all(hasattr(self, name) for name in names) and across_tokenizers.is_served(self.uld_loss_fn)):
            return False
        return self._teacher_processor is None or inputs.keys() >= {*_OF_IMAGES}

    def _distance(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        uld, teacher = self.uld_loss_fn, self.teacher_model
        texts = inputs["original_completion_text"]
        of_teacher: dict[str, Tensor] = {}
        if self._teacher_processor is None:
            build = gold_trainer().build_teacher_inputs_from_texts
            # A function without this argument always computes the offsets.
            names = {"use_extended_uld"} & inspect.signature(build).parameters.keys()
            ids, labels, mask, offsets = build(
                self.teacher_tokenizer,
                inputs["original_prompt_text"],
                texts,
                **{name: getattr(uld, name) for name in names},
            )
        else:
            ids, labels, mask, offsets, of_teacher = self._build_teacher_vlm_inputs(
                texts, *(inputs[name] for name in _OF_IMAGES)
            )
        own = inputs.get("byte_offsets")
        if uld.use_extended_uld and own is None:
            raise ValueError("inputs must include byte_offsets with use_extended_uld=True: use TRL's data collator")
        aligned = across_tokenizers.align(
            uld,
            across_tokenizers.Side(inputs["labels"], inputs["input_ids"], own),
            across_tokenizers.Side(labels, ids, offsets),
        )
        model_inputs = self._model_inputs(inputs)
        device = self.accelerator.device

        def in_teacher(teacher_head: Head, teacher_input: HeadInput) -> Tensor:
            def in_student(head: Head, input: HeadInput) -> Tensor:
                sides = (head, input), (teacher_head, teacher_input)
                return across_tokenizers.distance(uld, aligned, *sides, self.logits_budget)

            return model(**model_inputs, labels=inputs["labels"], head_fn=in_student)

        of_teacher |= {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        loss = inside_teacher(teacher, in_teacher, **of_teacher)
        return with_outputs(loss, model, model_inputs, return_outputs)


def gold_trainer() -> Any:
    return importlib.import_module("trl.experimental.gold.gold_trainer")
