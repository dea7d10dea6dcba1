"""The trainers with `loss=`, `kept_ids` and `skip_zero_advantage`: subclasses of TRL's.

For the other arguments, see `LossMixin`, `RolloutsMixin` and TRL's trainers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import use_adapter

from liger_chunked.integrations.trl.losses import EARLIER, DistillationMixin, LoggedByTRL, PolicyWithLoss, Step
from liger_chunked.integrations.trl.policy import LigerGRPOTrainer as LigerGRPOTrainer
from liger_chunked.integrations.trl.policy import LigerRLOOTrainer as LigerRLOOTrainer
from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)

_LOGGER = logging.getLogger(__name__)


class LigerSFTTrainer(LoggedByTRL, SFTTrainer):
    """TRL's `SFTTrainer` with `loss=`.

    `loss` is a `LigerFusedLinearCrossEntropyLoss` with `reduction="mean"`, and excludes `compute_loss_func`.

        LigerSFTTrainer(model, train_dataset=texts, loss=LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4))
    """

    loss_kind = LigerFusedLinearCrossEntropyLoss
    takes_means = True
    replaced_fields: ClassVar = {"loss_type": None, "label_smoothing_factor": "label_smoothing"}
    replaced_methods = ()  # TRL has one method alone, which runs with `loss` too
    lent_attributes: ClassVar = {"label_smoother": None}  # TRL's reads logits

    def _check_made(self) -> None:
        if self.loss_override is not None and self.compute_loss_func is not None:
            raise ValueError("loss= and compute_loss_func both take the place of TRL's loss: pass one of them")

    def _value(self, step: Step, num_items: Any) -> Tensor:
        value = step.loss
        # num_items counts all ranks; gradients are averaged.
        if self.args.average_tokens_across_devices and num_items is not None:
            value = value * (self.accelerator.num_processes // self.get_tp_size())
        return self._with_aux_loss(step, value, 1 if num_items is None else self.current_gradient_accumulation_steps)

    def _log_metrics(self, metrics: Any) -> None:
        if metrics is not None and metrics.z_loss is not None:
            self._liger_metrics["z_loss"].append(self.gathered_mean(metrics.z_loss))


SAMPLE_WEIGHT = "sample_weight"  # a column, with the name that scikit-learn and Keras give such weights


@dataclasses.dataclass
class _WithWeights:
    """A collator that adds the weights of examples to a batch, float32 (n,), because TRL's drop unknown columns."""

    collate: Any

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(examples)
        weights = [example[SAMPLE_WEIGHT] for example in examples if example.get(SAMPLE_WEIGHT) is not None]
        if not weights or SAMPLE_WEIGHT in batch:  # a collator of the user may add them
            return batch
        if len(weights) < len(examples):
            raise ValueError(
                f"{SAMPLE_WEIGHT} must be a number for each example, got None for {len(examples) - len(weights)} of "
                f"{len(examples)}: write 1.0 for an example that counts once"
            )
        return {**batch, SAMPLE_WEIGHT: torch.tensor(weights, dtype=torch.float32)}


# A trainer with a reference model loads none.
_NONE: Any = object()


class ReferenceMixin(LoggedByTRL):
    """Trainers whose loss compares with a reference: DPO and KTO.

    With `loss=`, the column "sample_weight" of a data set, one number for an example, is the loss's `example_weights`.
    """

    # The columns of a batch with the reference's sums, one for each part of it. TRL reads precomputed ones.
    ref_columns: ClassVar[tuple[str, ...]]
    lent_attributes: ClassVar = {"precompute_ref_logps": True}
    # Of transformers' trainer.
    data_collator: Any
    _signature_columns: Any

    def __init__(
        self, model: Any, ref_model: Any = None, args: Any = None, *others: Any, loss: Any = None, **kwargs: Any
    ) -> None:
        if self.loss_kind is not None and isinstance(loss, self.loss_kind):
            self._check_reference(loss, ref_model, args)
            ref_model = _NONE if loss.use_ref_model is False else ref_model
        super().__init__(model, ref_model, args, *others, loss=loss, **kwargs)
        weighs = SAMPLE_WEIGHT in (getattr(self.train_dataset, "column_names", None) or ())
        if loss is not None:
            self.data_collator = _WithWeights(self.data_collator)
            if weighs and not hasattr(self, "_signature_columns"):
                raise RuntimeError(
                    "this release of transformers chooses columns in another way than its Trainer did in 5.24, so the "
                    f"column {SAMPLE_WEIGHT!r} of train_dataset would be dropped: remove it, or install an earlier "
                    "release"
                )
        elif weighs:
            _LOGGER.warning(
                "%s trains without the column %r: TRL's loss takes no weights of examples, one given as loss= does",
                type(self).__name__,
                SAMPLE_WEIGHT,
            )

    @classmethod
    def _check_reference(cls, loss: Any, ref_model: Any, args: Any) -> None:
        """Raise ValueError, before any pass over the data set, for a reference that `loss` cannot read."""
        precomputes = getattr(args, "precompute_ref_log_probs", False)
        given = ["a ref_model"] if ref_model is not None else []
        given += [
            f"{name}=True" for name in ("precompute_ref_log_probs", "sync_ref_model") if getattr(args, name, False)
        ]
        if loss.use_ref_model is False and given:
            raise ValueError(f"{type(loss).__name__} takes no reference, got {' and '.join(given)}")
        if loss.needs_token_ref_logps and precomputes:
            ld_alpha = getattr(loss, "ld_alpha", None)
            setting = "" if ld_alpha is None else f"(ld_alpha={ld_alpha})"
            raise ValueError(
                f"{type(loss).__name__}{setting} needs reference log-probabilities per token, but "
                "precompute_ref_log_probs=True keeps one sum a sequence: set precompute_ref_log_probs=False, so that "
                f"the reference runs in each step{'' if ld_alpha is None else ', or leave ld_alpha out of the loss'}"
            )

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        temperature = loss.options.temperature
        compares = loss.use_ref_model is not False or getattr(loss, "reference_point", None) == "kl"
        if compares and temperature != 1.0:
            raise ValueError(
                f"{type(loss).__name__} has temperature={temperature}, and {cls.__name__} computes the reference's "
                "log-probabilities at temperature 1: leave the temperature of the loss at 1"
            )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = getattr(self, "_signature_columns", None)
        if self.loss_override is not None and columns is not None and SAMPLE_WEIGHT not in columns:
            self._signature_columns = [*columns, SAMPLE_WEIGHT]

    @property
    def ref_model(self) -> Any:
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        self._ref_model = None if model is _NONE else model

    def _check_made(self) -> None:
        if self.loss_override is not None:
            self.beta = self.loss_override.beta  # the scale of logged rewards

    def _loss_arguments(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> dict[str, Any]:
        weights = inputs.pop(SAMPLE_WEIGHT, None)
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        arguments: dict[str, Any] = {"length": labels.shape[1] - 1}
        if weights is not None:
            arguments["example_weights"] = torch.as_tensor(weights, device=labels.device)
        sums = torch.zeros(len(labels), device=labels.device)
        if self.loss_override.use_ref_model is not False:
            arguments["ref_logps"] = ref_logps = self._ref_logps(inputs, labels)
            sums = ref_logps if ref_logps.ndim == 1 else self._of_sequences(ref_logps.sum(-1), labels)
        inputs |= dict(zip(self.ref_columns, sums.chunk(len(self.ref_columns)), strict=True))
        return arguments

    def _ref_logps(self, inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Return (B, T - 1), one per label, or (B,) if precomputed."""
        if self.precompute_ref_logps:
            return self._of_sequences(torch.cat([inputs[name] for name in self.ref_columns]), labels)
        others = ("completion_mask", "label")
        model_inputs = {
            name: x for name, x in inputs.items() if name not in others and not name.startswith(("ref_", "KL_"))
        }
        with self._reference() as reference:
            logps: Tensor = reference(**model_inputs, labels=labels, fused_lm_head=True).log_probs
        return logps[:, 1 - labels.shape[1] :]

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """Yield the reference without gradients: a model, or the policy with its adapter "ref" or without."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                yield self.ref_model
                return
            policy = self.accelerator.unwrap_model(self.model)
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                yield self.model

    def _of_sequences(self, sums: Tensor, labels: Tensor) -> Tensor:
        """Return sums over sequences (B,), or the means of their tokens if the loss compares those."""
        n_tokens = (labels[:, 1:] != -100).sum(-1).clamp(min=1)
        return sums / n_tokens if self.loss_override.average_log_prob else sums


class LigerDPOTrainer(ReferenceMixin, DPOTrainer):
    """TRL's `DPOTrainer` with `loss=`.

    `loss` is a `LigerFusedLinearPreferenceBase`; if it rejects a reference, none is loaded.

        LigerDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, loss=LigerFusedLinearSimPOLoss(beta=2.0))
    """

    loss_kind = LigerFusedLinearPreferenceBase
    replaced_fields: ClassVar = {
        "beta": "beta",
        "loss_type": "loss_types",
        "loss_weights": "loss_weights",
        "label_smoothing": "settings.label_smoothing",
        "ld_alpha": "ld_alpha",
        "f_divergence_type": "settings.f_divergence_type",
        "f_alpha_divergence_coef": "settings.f_alpha_divergence_coef",
        "discopop_tau": "settings.discopop_tau",
        "use_weighting": "use_weighting",
    }
    ref_columns = ("ref_chosen_logps", "ref_rejected_logps")

    def _log_metrics(self, metrics: Any) -> None:
        logs = self._liger_metrics
        if self.loss_override.compute_nll_loss:
            logs["nll_loss"].append(self.gathered_mean(metrics.nll_loss))
        # TRL computes these of its own loss.
        for name, value in {
            "rewards/chosen": metrics.chosen_rewards,
            "rewards/rejected": metrics.rejected_rewards,
            "rewards/accuracies": metrics.reward_accuracies,
            "rewards/margins": metrics.reward_margins,
            "logps/chosen": metrics.chosen_logps,
            "logps/rejected": metrics.rejected_logps,
        }.items():
            logs[name][-1:] = [self.gathered_mean(value)]


class LigerKTOTrainer(ReferenceMixin, KTOTrainer):
    """TRL's `KTOTrainer` with `loss=`.

    `loss` is a `LigerFusedLinearUnpairedPreferenceBase` without a reference point, or with "kl", which needs
    `KTOConfig(loss_type="kto")` for mismatched completions.
    """

    loss_kind = LigerFusedLinearUnpairedPreferenceBase
    replaced_fields: ClassVar = {
        "beta": "beta",
        "desirable_weight": "desirable_weight",
        "undesirable_weight": "undesirable_weight",
    }
    ref_columns = ("ref_logps",)

    def _check_made(self) -> None:
        super()._check_made()
        loss = self.loss_override
        if loss is not None and not hasattr(super(), "_compute_kl_logps"):
            raise RuntimeError(f"this release of TRL has no _compute_kl_logps that loss= could replace: {EARLIER}")
        if loss is not None and loss.reference_point == "kl" and not self.calculate_KL:
            raise ValueError(
                f"{type(loss).__name__} asks for the reference point 'kl'; {type(self).__name__} needs "
                "KTOConfig(loss_type='kto') for it"
            )

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        if loss.reference_point == "delta":
            raise ValueError(
                f"{type(loss).__name__} asks for the reference point 'delta'; {cls.__name__} estimates none"
            )

    def _loss_arguments(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> dict[str, Any]:
        desirable = torch.as_tensor(inputs["label"], dtype=torch.bool, device=self.accelerator.device)
        ratios, kl = torch.zeros(len(desirable), device=desirable.device), None
        if self.loss_override.reference_point == "kl":
            ratios = self._kl_ratios(model, inputs)
            kl = self.accelerator.gather_for_metrics(ratios.mean()).mean()
        arguments = super()._loss_arguments(model, inputs, num_items)
        inputs["ref_KL_logps"] = -ratios  # TRL logs the mean of a difference, see `_compute_kl_logps`
        return {**arguments, "preference_labels": desirable, "kl": kl}

    @torch.no_grad()
    def _kl_ratios(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return (B,) log-ratios of the policy to the reference on mismatched completions."""
        ratios = self._compute_kl_logps(model, inputs)
        if self.loss_override.use_ref_model is not False:
            if self.precompute_ref_logps:
                ratios = ratios - inputs["ref_KL_logps"]
            else:
                with self._reference() as reference:
                    ratios = ratios - self._compute_kl_logps(reference, inputs)
        labels = inputs["KL_input_ids"].masked_fill(inputs["KL_completion_mask"] == 0, -100)
        return self._of_sequences(ratios, labels)

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> Any:
        if isinstance(model, PolicyWithLoss):  # the policy has run, or the loss does not ask
            return torch.zeros_like(batch["ref_KL_logps"])
        return super()._compute_kl_logps(model, batch)


class LigerDistillationTrainer(DistillationMixin, DistillationTrainer):
    """TRL's `DistillationTrainer` with `loss=`, a `LigerFusedLinearDistillationBase`.

    Its temperature is the logged entropy's. TRL's own loss reads hidden states and weights, and not the models' heads:
    without `loss`, a `LigerFusedLinearJSDLoss` takes its place too, within `logits_budget` for both models' logits.
    """
