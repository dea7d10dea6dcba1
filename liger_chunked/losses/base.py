"""What losses share: checks of their settings after they are built, and the engine's call for token statistics.

The checks run after `__init__`, because a subclass may set attributes after the base's `__init__` returned.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from liger_chunked.arguments import of_constructor
from liger_chunked.calls import FixedSettings, LossType
from liger_chunked.engine import Fused, Group, Objective, Rows, fused_loss
from liger_chunked.types import OUTPUTS, LogitOptions, LossHead
from liger_chunked.what_ran import RECORD, Record


def check_declared(loss: Any, name: str, statistics: tuple[str, ...], scopes: tuple[str, ...]) -> None:
    """Check `token_outputs` and `scope`, unless they are properties."""
    outputs, scope = getattr(loss, "token_outputs", ()), getattr(loss, "scope", None)
    if isinstance(outputs, str) or not (hasattr(outputs, "__get__") or isinstance(outputs, (tuple, list))):
        example = (outputs if isinstance(outputs, str) else "entropy",)
        raise TypeError(f"{name}.token_outputs must be a tuple of names, such as {example!r}, got {outputs!r}")
    if isinstance(outputs, (tuple, list)):
        unknown = [field for field in outputs if field not in statistics]
        if unknown:
            raise ValueError(f"{name}.token_outputs must name fields of TokenStats {statistics}, got {unknown}")
    if scope is None or hasattr(scope, "__get__"):
        return
    if not scopes:
        raise ValueError(f"{name}.scope is not read, got {scope!r}: compute each sequence's loss from that sequence")
    if scope not in scopes:
        raise ValueError(f"{name}.scope must be one of {scopes}, got {scope!r}")


# Attributes that hold settings.
_HOLDERS = frozenset(("options", "settings", "loss_types"))


@functools.cache
def _settings_of(cls: type) -> frozenset[str]:
    """Return the names of the settings of a class: the arguments of the library's constructors among its bases.

    These include the keywords of `**options`, such as `temperature`, which a user may take for attributes.
    """
    own = [base for base in cls.__mro__ if base.__module__.startswith("liger_chunked.") and "__init__" in vars(base)]
    return _HOLDERS.union(*(of_constructor(base).names for base in own))


class FusedLoss(FixedSettings, metaclass=LossType):
    """The base class of all losses. Settings are the constructor's: to set one of a finished loss raises.

    `Loss(weight, input, ..., beta=0.2)` is `Loss(beta=0.2)(weight, input, ...)`; mypy accepts only the second.
    """

    options: LogitOptions

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        constructor = vars(cls).get("__init__")
        if constructor is not None and constructor.__doc__ is None:  # else `help` of it shows nn.Module's
            constructor.__doc__ = cls.__doc__

    def logged_metrics(self, metrics: Any) -> Mapping[str, float | Tensor]:
        """Return metrics of your own that a `Liger*Trainer` logs beside its own, by name. Override it; it returns none.

        Args:
            metrics: what the call returned beside the loss, such as `PreferenceMetrics`; None for a cross entropy
                without `return_...` flags.

        Returns:
            Numbers, or floating-point or bool tensors: (), or (n,) with one value for each example of the batch. The
            trainer logs their means over values, ranks and steps, without the samples that a last batch repeats.
        """
        return {}

    def _check_after_init(self) -> None:
        if "training" not in vars(self) or not hasattr(self, "options"):
            name = type(self).__name__
            raise RuntimeError(f"{name}.__init__ does not call super().__init__(): call it first, with beta and so on")
        self._fixed = _settings_of(type(self))
        vars(self)[RECORD] = Record(self)


class StatsLoss(FusedLoss):
    """A loss on token statistics. Subclasses override the properties."""

    _statistics: ClassVar[tuple[str, ...]] = OUTPUTS  # that `token_outputs` may name
    _scopes: ClassVar[tuple[str, ...]] = ()
    _skips_rows: ClassVar[bool] = False  # whether tokens without a gradient are common enough to look for them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_declared(cls, cls.__name__, cls._statistics, cls._scopes)

    def _check_after_init(self) -> None:
        super()._check_after_init()
        check_declared(self, type(self).__name__, self._statistics, self._scopes)

    @property
    def _group(self) -> Group:
        """The tokens that a chunk must not split."""
        raise NotImplementedError

    @property
    def _whole_batch(self) -> bool:
        """Whether the objective needs all groups at once."""
        return False

    @property
    def _outputs(self) -> tuple[str, ...]:
        """The statistics that loss and metrics read."""
        raise NotImplementedError

    @property
    def _differentiates(self) -> tuple[str, ...]:
        """The statistics that the gradient may reach."""
        raise NotImplementedError

    def _fuse(
        self,
        head: LossHead,
        input: Tensor,
        rows: Rows,
        objective: Objective,
        class_weight: Tensor | None = None,
    ) -> Fused:
        return fused_loss(
            head,
            input,
            rows,
            objective,
            outputs=self._outputs,
            differentiates=self._differentiates,
            options=self.options,
            whole_batch=self._whole_batch,
            class_weight=class_weight,
            skips_rows=self._skips_rows,
            owner=self,
        )


class SequenceLoss(StatsLoss):
    """A loss of sequences' log-probabilities, which may compare with those of a reference.

    - `use_ref_model`: True requires a reference in each call, False refuses one, None allows one, and warns if the
      formula reads that of a call without one
    """

    token_outputs: tuple[str, ...] = ()
    beta: float
    use_ref_model: bool | None

    @property
    def needs_token_ref_logps(self) -> bool:
        """Whether `ref_logps` must hold one value a token, because the loss weighs or compares single tokens.

        Trainers refuse such a loss before they precompute one sum a sequence.
        """
        return False

    @property
    def _outputs(self) -> tuple[str, ...]:
        return ("logps", "mean_logits", *self.token_outputs)

    @property
    def _differentiates(self) -> tuple[str, ...]:
        return ("logps", *self.token_outputs)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, {self.options}"
