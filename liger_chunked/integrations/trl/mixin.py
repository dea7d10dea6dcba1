"""Code shared by all trainers: chunked heads, and a `loss` that replaces the trainer's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
import trl
from torch import Tensor, nn
from transformers import TrainingArguments

from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.trl.fused_output import add_chunked_lm_head
from liger_chunked.types import LogitOptions, budget_bytes

Loss = TypeVar("Loss", bound=nn.Module)

# Budget of a head that replaces TRL's. It bounds the memory of a step to that of TRL's head; see docs/tuning.md.
HEAD_BUDGET = 512 * 2**20
# The logit options that the model determines.
TRANSFORM = ("softcap", "logit_scale")


class LigerTrainerMixin:
    """For a trainer of TRL: adds chunked heads and the argument `loss`.

    Args:
        *args, **kwargs: of TRL's trainer.
        loss: replaces the trainer's loss; an instance of the trainer's `loss_kind`.
        logits_budget: the most bytes of logits that the trainer's own heads keep in memory at once, as a number or a
            string such as "512MiB", see `LogitOptions`. None means 512 MiB for a head that replaces TRL's, and an
            automatic choice otherwise. Not allowed with a `loss`, whose `logits_budget` then applies to these heads
            too.

    Raises:
        TypeError: the loss is of another class, or the budget of another type.
        ValueError: the loss ignores a label other than TRL's -100; the config sets `use_liger_kernel`; with a loss,
            `logits_budget` is given, or a config field that the loss replaces (`replaced_fields`) differs from both its
            default and the loss's value.
        RuntimeError: the trainer of this TRL release does not use a fused head, and would build logits.
    """

    # Set by TRL's trainer.
    accelerator: Any
    args: Any
    model: Any
    # Set by some of TRL's trainers. Only these may call the methods that read them.
    aux_loss_enabled: bool
    current_gradient_accumulation_steps: int
    router_aux_loss_coef: float
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    _tp_size: int

    # The class of which `loss` must be an instance; None if the trainer takes no loss.
    loss_kind: ClassVar[type[Any] | None] = None
    # Config fields that TRL reads for its loss, and that a `loss` replaces. The value is the equivalent attribute of
    # the loss, with which the config may agree, or None.
    replaced_fields: ClassVar[Mapping[str, str | None]] = MappingProxyType({})
    # The models that get no fused head from TRL.
    models_without_head: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *args: Any, loss: nn.Module | None = None, logits_budget: int | float | str | None = None, **kwargs: Any
    ) -> None:
        budget = budget_bytes(logits_budget)  # raises before anything is loaded
        if any(getattr(x, "use_liger_kernel", False) for x in (*args, kwargs.get("args"))):
            raise ValueError(
                "use_liger_kernel=True activates the package Liger-Kernel, whose losses would replace these heads: "
                "leave it off, and call liger_chunked.apply_liger_kernel(model) for layer kernels"
            )
        if loss is not None:
            self._check_loss(loss)
            self._check_config(loss, next((x for x in (*args, kwargs.get("args")) if _is_config(x)), None))
            if budget is not None:
                raise ValueError(
                    f"with loss=, logits_budget={logits_budget!r} of the trainer would not be read: pass it to the "
                    f"loss, {type(loss).__name__}(..., logits_budget={logits_budget!r})"
                )
            options: Any = loss.options
            budget = options.logits_budget
        self.loss_override: Any = loss
        self.logits_budget = budget
        with _chunked_heads(type(self), budget):
            super().__init__(*args, **kwargs)
        for name in self.models_without_head:
            model = getattr(self, name)
            if model is not None:
                add_chunked_lm_head(inner_model(model), logits_budget=budget)

    @property
    def mode_metrics(self) -> dict[str, list[float]]:
        """The metrics to log in the current mode, training or evaluation, by name."""
        return self._metrics["train" if self.model.training else "eval"]

    def gathered_mean(self, value: Tensor) -> float:
        """Return the mean of `value` over its items and the ranks, without samples repeated to fill up a last batch."""
        return self.accelerator.gather_for_metrics(value.detach()).mean().item()

    def global_mean(self, mean: Tensor, count: Tensor, *, with_repeated: bool = False) -> float:
        """Return the mean over the items of all ranks. This rank has `count` items with this `mean`; 0 without items.

        Excludes the ranks whose samples only fill up the last batch of an evaluation, unless `with_repeated`.
        """
        gather = self.accelerator.gather if with_repeated else self.accelerator.gather_for_metrics
        sums = gather(torch.stack([mean.detach() * count, count.to(mean.dtype)])[None]).sum(0)
        return (sums[0] / sums[1].clamp(min=1)).item()

    @property
    def _aux_inputs(self) -> dict[str, bool]:
        """The model input that requests the load-balancing loss of a mixture of experts."""
        return {"output_router_logits": True} if self.aux_loss_enabled else {}

    def _with_aux_loss(self, value: Tensor, aux_loss: Tensor | None, *, accumulates: bool = False) -> Tensor:
        """Add the load-balancing loss of a mixture of experts to `value`, and log it. If it is None, return `value`.

        Args:
            value: (), the loss of a micro-batch.
            aux_loss: (), a mean over the micro-batch.
            accumulates: gradients are summed over micro-batches, and `Trainer` expects the loss to average them.
        """
        if aux_loss is None:
            return value
        self.mode_metrics["aux_loss"].append(self.gathered_mean(aux_loss))
        steps = self.current_gradient_accumulation_steps if accumulates else 1
        return value + self.router_aux_loss_coef * aux_loss / steps

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        """Log how many tokens all ranks have trained on, including those of `inputs`."""
        if self.model.training:
            # Without padding there is no mask, and every position is a token.
            tokens = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["position_ids"].size(1)
            tokens = torch.as_tensor(tokens, device=self.accelerator.device)
            self._total_train_tokens += self.accelerator.gather_for_metrics(tokens).sum().item() // self._tp_size
        self.mode_metrics["num_tokens"] = [self._total_train_tokens]

    @staticmethod
    def _with_outputs(value: Tensor, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return `value`; with `return_outputs`, also the output of another forward, with logits."""
        if not return_outputs:
            return value
        with torch.no_grad():
            return value, model(**inputs)

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        """Reject, before anything is loaded, a loss that this trainer does not support."""
        if cls.loss_kind is None or not isinstance(loss, cls.loss_kind):
            expected = "no loss" if cls.loss_kind is None else f"a {cls.loss_kind.__name__}"
            got = f"the class {loss.__name__}" if isinstance(loss, type) else f"loss={type(loss).__name__}"
            raise TypeError(f"{cls.__name__} takes {expected}, got {got}")
        ignored = loss.options.ignore_index
        if ignored != -100:
            raise ValueError(f"TRL marks ignored tokens with the label -100, but the loss has ignore_index={ignored}")

    @classmethod
    def _check_config(cls, loss: Any, config: Any) -> None:
        """Reject config fields that `loss` replaces, unless they agree with `loss`.

        Raises:
            ValueError: fields of `replaced_fields` do not have TRL's defaults.
        """
        if config is None:
            return
        unread = []
        for name, default in _defaults(type(config)).items():
            if name not in cls.replaced_fields:
                continue
            value, same = getattr(config, name), cls.replaced_fields[name]
            if value == default:
                continue
            if same is None:
                unread.append(f"{name}={value!r}")
            elif _alone(value) != (own := _alone(_attribute(loss, same))):
                unread.append(f"{name}={value!r}" + ("" if own is _MISSING else f" (the loss has {same}={own!r})"))
        if unread:
            raise ValueError(
                f"with loss=, {cls.__name__} does not read these fields of {type(config).__name__}: "
                f"{', '.join(unread)}. Set the loss up as you want it, {type(loss).__name__}(...), and leave these "
                "fields at their defaults"
            )


_MISSING: Any = object()


def _is_config(x: Any) -> bool:
    return isinstance(x, TrainingArguments)


def _defaults(config: type[Any]) -> dict[str, Any]:
    """Return the field defaults of the config's TRL class. A subclass of that class may have other defaults."""
    of_trl = next((c for c in config.__mro__ if c.__module__.partition(".")[0] == "trl"), config)
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(of_trl)
    }


def _attribute(x: Any, path: str) -> Any:
    """Return the attribute of `x` at a dotted path, or `_MISSING`."""
    for name in path.split("."):
        x = getattr(x, name, _MISSING)
    return x


def _alone(value: Any) -> Any:
    """Return the only element of a list; TRL makes a list of a single loss type."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


@contextmanager
def _chunked_heads(trainer: type[LigerTrainerMixin], logits_budget: int | None) -> Iterator[None]:
    """Replace TRL's `add_fused_lm_head` by ours while a trainer is built.

    They call it with the temperature, precision and statistics that they need, and may score a reference before they
    are done. A head that is added afterwards would not know these settings, and would miss that scoring.

    Raises:
        RuntimeError: TRL does not call it, and the model gets no head from this library.
    """
    modules: list[Any] = [sys.modules[cls.__module__] for cls in trainer.__mro__]
    theirs = [(module, module.add_fused_lm_head) for module in modules if "add_fused_lm_head" in vars(module)]
    if not theirs and "model" not in trainer.models_without_head:
        raise RuntimeError(
            f"TRL {trl.__version__} gives {trainer.__name__} no fused head to replace, and would build its logits; "
            "TRL 1.15 and 1.16 do"
        )
    budget = HEAD_BUDGET if logits_budget is None else logits_budget
    try:
        for module, function in theirs:
            module.add_fused_lm_head = functools.wraps(function)(
                functools.partial(add_chunked_lm_head, logits_budget=budget)
            )
        yield
    finally:
        for module, function in theirs:
            module.add_fused_lm_head = function


def with_transform(own: LogitOptions, model: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> LogitOptions:
    """Return the options `own` of a loss with the logits transform of the model.

    Raises:
        ValueError: the loss has a transform that differs from the model's.
    """
    plain = LogitOptions()
    for name in names:
        given, of_model = getattr(own, name), getattr(model, name)
        if given not in (getattr(plain, name), of_model):
            raise ValueError(f"the loss has {name}={given}, but the model is trained with {name}={of_model}")
    return dataclasses.replace(own, **{name: getattr(model, name) for name in names})


def fitted(loss: Loss, options: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> Loss:
    """Return a copy of `loss` with the logits transform of the model; see `with_transform`."""
    own: Any = copy.copy(loss)
    own.options = with_transform(own.options, options, names)
    return own
