"""`loss=` of the trainers: a loss of this library, or a user's, in place of TRL's.

The loss runs as the `head_fn` of the model's own forward, where wrappers have gathered the head. A trainer's mixin says
which tensors of a batch the loss gets. TRL's own method prepares the model's inputs, and logs: see `PolicyWithLoss`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.transformers.head_input import fitted
from liger_chunked.integrations.trl.heads import NO_AUX_LOSS, HeadSettings, fused_output
from liger_chunked.integrations.trl.patch import ServedTrainer, checked_share_prefix, config_in, constructing
from liger_chunked.integrations.trl.stand_ins import distilled, jsd_loss, lent, statistics
from liger_chunked.losses import LigerFusedLinearDistillationBase
from liger_chunked.types import Head, budget_bytes, described


class Step(NamedTuple):
    """What a loss gave inside a model's forward.

    - `target` (B, T): the labels that the loss read
    - `output`: TRL's `FusedCausalLMOutput`, if it was asked for the log
    """

    loss: Tensor
    metrics: Any
    target: Tensor
    aux_loss: Tensor | None
    output: Any = None


def loss_step(
    model: nn.Module,
    loss: nn.Module,
    inputs: dict[str, Any],
    labels: Tensor | None,
    *,
    length: int | None = None,
    logged: HeadSettings | None = None,
    **arguments: Any,
) -> Step:
    """Run `model` with `loss` as its head, at the model's logits transform.

    Args:
        inputs: of the model's forward.
        labels: (B, T), unshifted.
        length: how many of the last positions that predict the loss gets. None: all.
        logged: a head of TRL's, which a second projection computes without a gradient, for the log.
        **arguments: of the loss.
    """

    def run(head: Head, input: HeadInput) -> Step:
        positions = slice(None) if length is None else slice(-length - 1, -1)
        target, hidden_states = input.target[:, positions], input.hidden_states[:, positions]
        own = fitted(loss, input.options)
        result = own(head.weight, hidden_states, target=target, bias=head.bias, **arguments)
        value, metrics = result if isinstance(result, tuple) else (result, None)
        output = None
        if logged is not None:
            with torch.no_grad():
                output = fused_output(head, input, settings=logged)
        return Step(value, metrics, target, input.aux_loss, output)

    step: Step = model(**inputs, labels=labels, head_fn=run)
    return step


MULTIMODAL = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def rollout_inputs(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return the model's arguments, and labels: -100 unless the model wrote the token."""
    completion_mask = inputs["completion_mask"]
    written = completion_mask * inputs.get("tool_mask", 1)
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    not_written = torch.cat([torch.zeros_like(inputs["prompt_mask"]), written], dim=1) == 0
    model_inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
        **{name: inputs[name] for name in MULTIMODAL if name in inputs},
    }
    return model_inputs, input_ids.masked_fill(not_written, -100)


EARLIER = "install an earlier release, or leave loss= out"


class LossMixin(ServedTrainer):
    """A trainer of TRL with the arguments `loss`, `logits_budget` and `share_prefix`.

    Args:
        loss: replaces the trainer's; a `loss_kind`. Config fields in `replaced_fields` must have TRL's defaults or
            agree. None: TRL's own loss, as with `patch_trl`.
        logits_budget, share_prefix: see `patch_trl`. With `loss`, the budget is the loss's.

    Raises:
        TypeError: a loss of another kind.
        ValueError: contradicting arguments, or a setting that cannot be served.
    """

    loss_kind: ClassVar[type[Any] | None] = None
    takes_means: ClassVar[bool] = False  # whether `loss` must average over tokens
    # Config fields of TRL's loss, and equivalent attributes of `loss`, or None.
    replaced_fields: ClassVar[Mapping[str, str | None]] = {}
    # Methods that compute TRL's loss, and that `loss` is in the place of.
    replaced_methods: ClassVar[tuple[str, ...]] = ("_compute_loss",)
    loss_override: Any = None

    def __init__(
        self,
        *args: Any,
        loss: nn.Module | None = None,
        logits_budget: int | float | str | None = None,
        share_prefix: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        budget, logits_dtype = budget_bytes(logits_budget), None  # raises before loading
        if loss is not None:
            config = config_in(args, kwargs)
            self._check_loss(loss)
            self._check_config(loss, config)
            of_trl = [vars(cls) for cls in type(self).__mro__ if cls.__module__.partition(".")[0] == "trl"]
            if gone := [name for name in self.replaced_methods if not any(name in x for x in of_trl)]:
                raise RuntimeError(f"this release of TRL has no {gone[0]} that loss= could replace: {EARLIER}")
            if (name := self._overridden()) is not None:
                raise TypeError(
                    f"with loss=, {name} of {type(self).__name__} would not be called: override compute_loss, which "
                    "calls the loss by super(), or leave loss= out"
                )
            if budget is not None:
                raise ValueError(
                    f"with loss=, logits_budget={logits_budget!r} of the trainer would not be read: pass it to the "
                    f"loss, {type(loss).__name__}(..., logits_budget={logits_budget!r})"
                )
            options: Any = loss.options
            # The heads' log-probabilities, of the old policy and the reference, are compared with those of the loss.
            budget, logits_dtype = options.logits_budget, options.logits_dtype
        self.loss_override = loss
        trained = [] if loss is None else [(name, x) for name, x in loss.named_parameters() if x.requires_grad]
        settings: Any = {"logits_budget": budget, "logits_dtype": logits_dtype}
        with constructing(self, args, kwargs, share_prefix=checked_share_prefix(share_prefix), **settings):
            super().__init__(*args, **kwargs)
            self._check_trains(trained)
            self._check_made()

    def _overridden(self) -> str | None:
        """Return which of `replaced_methods` is a user's: of a subclass, or set on the instance."""
        for name in self.replaced_methods:
            owner = next((cls for cls in type(self).__mro__ if name in vars(cls)), LossMixin)
            if name in vars(self) or owner.__module__.partition(".")[0] not in ("trl", "liger_chunked"):
                return name
        return None

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        if cls.loss_kind is None or not isinstance(loss, cls.loss_kind):
            expected = "no loss" if cls.loss_kind is None else f"a {cls.loss_kind.__name__}"
            got = f"the class {loss.__name__}" if isinstance(loss, type) else f"loss={type(loss).__name__}"
            raise TypeError(f"{cls.__name__} takes {expected}, got {got}")
        if (ignored := loss.options.ignore_index) != -100:
            raise ValueError(f"TRL marks ignored tokens with the label -100, but the loss has ignore_index={ignored}")
        if cls.takes_means and loss.reduction != "mean":
            raise ValueError(f"{cls.__name__} trains on a mean over tokens, got reduction={loss.reduction!r}")

    @classmethod
    def _check_config(cls, loss: Any, config: Any) -> None:
        """Raise ValueError for fields of the config that set up TRL's loss, and neither are defaults nor agree."""
        if config is None:
            return
        of_trl = next((c for c in type(config).__mro__ if c.__module__.partition(".")[0] == "trl"), type(config))
        unread = []
        for field in (field for field in dataclasses.fields(of_trl) if field.name in cls.replaced_fields):
            factory: Any = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            value, same = getattr(config, field.name), cls.replaced_fields[field.name]
            if field.name == "loss_type" and value in ("nll", "chunked_nll"):  # SFT's, the second in chunks
                continue
            own = _MISSING if same is None else _alone(functools.reduce(_attribute, same.split("."), loss))
            if value != default and _alone(value) != own:
                of_loss = "" if own is _MISSING else f" (the loss has {same}={own!r})"
                unread.append(f"{field.name}={value!r}{of_loss}")
        if unread:
            raise ValueError(
                f"with loss=, {cls.__name__} does not read these fields of {type(config).__name__}: "
                f"{', '.join(unread)}. Set the loss up as you want it, {type(loss).__name__}(...), and leave these "
                "fields at their defaults"
            )

    def _check_trains(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Raise ValueError unless the model trains these parameters of the loss.

        The optimizer, DDP and checkpoints know those of the model alone, and checkpoints of a model with adapters know
        the adapters and what `modules_to_save` names.
        """
        known = {id(x): name for name, x in self.model.named_parameters() if x.requires_grad}
        adapts = getattr(self.model, "peft_config", None) is not None
        for name, x in parameters:
            if id(x) not in known:
                raise ValueError(
                    f"{type(self.loss_override).__name__} has the trainable parameter {name} {described(x)}, which the "
                    "model does not train, and so no optimizer would: register the loss on the model before, as in "
                    "model.own_loss = loss, or freeze the parameter. An adapter freezes what the model had before it"
                )
            if adapts and ".modules_to_save." not in known[id(x)]:
                raise ValueError(
                    f"{type(self.loss_override).__name__} has the trainable parameter {name} {described(x)}, which "
                    "PEFT would train and not save: set model.own_loss = loss before the adapter, name it in "
                    "modules_to_save=['own_loss'] of the adapter's config, and pass the copy that PEFT trains, "
                    "loss=model.base_model.model.own_loss.modules_to_save['default']; or freeze the parameter"
                )

    def _check_made(self) -> None:
        """Raise ValueError for a loss that the trainer, which is made, cannot serve."""

    @property
    def _liger_metrics(self) -> dict[str, list[float]]:
        """The metrics of TRL's next log; a release without them logs none."""
        metrics = getattr(self, "_metrics", None)
        return defaultdict(list) if metrics is None else metrics["train" if self.model.training else "eval"]

    def gathered_mean(self, value: Tensor) -> float:
        return self.accelerator.gather_for_metrics(value.detach()).mean().item()

    def log_own_metrics(self, metrics: Any, *, of_nothing: bool | None = None) -> None:
        """Log what the loss given as `loss` adds, see `logged_metrics`.

        Args:
            of_nothing: whether this rank skipped all sequences, so that its metrics have no value: the mean is that of
                the other ranks, or NaN, which TRL does not log, if there is none. None: ranks skip none.
        """
        for name, x in self.loss_override.logged_metrics(metrics).items():
            value = torch.as_tensor(x, dtype=torch.float32, device=self.accelerator.device).detach()
            if of_nothing is None:
                mean = self.gathered_mean(value)
            else:
                # Counted, because `nanmean` would hide the NaN of a rank with sequences.
                value = torch.zeros_like(value).mean() if of_nothing else value.mean()
                pair = torch.stack([value, torch.full_like(value, not of_nothing)])
                total, n_ranks = self.accelerator.gather_for_metrics(pair[None]).sum(0)
                mean = (total / n_ranks).item()
            self._liger_metrics[name].append(mean)

    def _with_aux_loss(self, step: Step, value: Tensor, steps: int = 1) -> Tensor:
        """Add the weighted router loss, averaged over `steps` micro-batches, to a loss."""
        if not getattr(self, "aux_loss_enabled", False):
            return value
        if step.aux_loss is None:
            raise ValueError(NO_AUX_LOSS)
        return value + self.router_aux_loss_coef * step.aux_loss / steps


class PolicyWithLoss:
    """The policy as TRL's `compute_loss` gets it, so that TRL's own code prepares its inputs and logs.

    TRL's call with `fused_lm_head=True` runs a loss in the policy's forward. TRL gets its statistics of the same head
    without a gradient, and logs from them; the loss that it computes of them is not used.

    Args:
        model: the policy.
        loss: runs at TRL's arguments of the call.
        logged: the head of TRL's call.
        arguments: of `loss_step`, beside these.
    """

    def __init__(self, model: nn.Module, loss: Any, logged: HeadSettings, arguments: dict[str, Any]) -> None:
        self.model, self.loss, self.arguments = model, loss, arguments
        self.step: Step | None = None
        self.logged = dataclasses.replace(logged, temperature=loss.options.temperature)

    def __call__(self, *, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        if not fused_lm_head:  # for `compute_metrics`
            return self.model(**inputs)
        self.step = step = loss_step(self.model, self.loss, inputs, labels, logged=self.logged, **self.arguments)
        output = step.output
        if getattr(self.loss, "average_log_prob", False):  # TRL sums
            output.log_probs /= output.label_mask.sum(-1, keepdim=True).clamp(min=1)
        return output


class LoggedByTRL(LossMixin):
    """Trainers whose `compute_loss` of TRL's runs with `loss=` too, and logs: SFT, DPO and KTO."""

    # What TRL's method reads of the trainer in the meantime.
    lent_attributes: ClassVar[Mapping[str, Any]] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        if self.loss_override is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        with self.heads_set():
            arguments = self._loss_arguments(model, inputs, num_items_in_batch)
            policy: Any = PolicyWithLoss(model, self.loss_override, self._liger_heads.settings_of(model), arguments)
            with lent(self, **self.lent_attributes):
                result = super().compute_loss(policy, inputs, return_outputs, num_items_in_batch)
        if policy.step is None:
            raise RuntimeError(
                f"this release of TRL makes no call with fused_lm_head=True, where loss= runs: {EARLIER}"
            )
        self._log_metrics(policy.step.metrics)
        self.log_own_metrics(policy.step.metrics)
        value = self._value(policy.step, num_items_in_batch)
        return (value, result[1]) if return_outputs else value

    def _loss_arguments(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> dict[str, Any]:
        """Return arguments of `loss_step`, and change a batch to one for TRL's `compute_loss`."""
        return {"num_items": num_items}

    def _value(self, step: Step, num_items: Any) -> Tensor:
        return self._with_aux_loss(step, step.loss)

    def _log_metrics(self, metrics: Any) -> None:
        """Log what TRL's loss has not, and correct what TRL has logged of it."""


_MISSING: Any = object()


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name, _MISSING)


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


class DistillationMixin(LossMixin):
    """See `LigerDistillationTrainer`."""

    loss_kind = LigerFusedLinearDistillationBase
    takes_means = True
    replaced_fields: ClassVar = {"beta": "beta", "temperature": "options.temperature"}
    replaced_methods = ("_compute_loss", "_get_last_hidden_state")

    def _check_made(self) -> None:
        if self.loss_override is not None and not hasattr(self, "_forward_redirection"):
            raise RuntimeError(f"this release of TRL has no _forward_redirection that loss= could replace: {EARLIER}")

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        is_trls = self._overridden() is not None or not hasattr(self, "_forward_redirection")
        if self.loss_override is None and is_trls:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with lent(self, _forward_redirection=_called_outside):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Any:
        """Return the loss, and the sum of the entropies and the number of tokens, of which TRL logs the mean."""
        if getattr(self, "_forward_redirection", None) is not _called_outside:
            return super()._compute_loss(model, inputs, num_items)
        own = self.loss_override
        budget = self._liger_heads.plain.logits_budget
        loss = jsd_loss(self.beta, self.temperature, budget) if own is None else own
        model_inputs, labels = rollout_inputs(inputs)
        length = inputs["completion_ids"].shape[1]
        target = labels[:, -length:]
        self.teacher_model.eval()
        with torch.no_grad():
            teacher_logits = self.teacher_model(**model_inputs, use_cache=False).logits[:, -length - 1 : -1]
        logits = model(**model_inputs, use_cache=False).logits[:, -length - 1 : -1]
        value, metrics = distilled(loss, logits, teacher_logits, target, num_items=num_items)
        with torch.no_grad():
            entropy: Any = statistics(logits.detach() / loss.options.temperature, target, "entropy").entropy
        if own is not None:
            self._liger_metrics["soft_loss"].append(metrics.soft_loss.item())
            if own.weight_hard_loss:
                self._liger_metrics["hard_loss"].append(metrics.hard_loss.item())
            self.log_own_metrics(metrics)
        return value, entropy.sum(), (target != -100).sum()


def _called_outside(model: nn.Module, student: nn.Module, method: Any, *args: Any) -> Any:
    """Call TRL's method of a student with the wrapped model, and outside of its forward, which the method runs."""
    return method(model, *args[1:])
