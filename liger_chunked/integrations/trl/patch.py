"""`patch_trl`: every trainer of TRL computes its loss from hidden states.

TRL's trainers read log-probabilities from the head of `add_fused_lm_head`, or logits. A served trainer gets both from
`Heads`: the first by `linear_token_stats`, the second as stand-ins, whose losses are fused (see `defer_logits`).

    patch_trl            wraps the `__init__` of TRL's trainer classes
    the wrapped init     makes the trainer's class a subclass with `ServedTrainer`, and runs TRL's in `constructing`
    constructing         swaps TRL's `add_fused_lm_head` while a trainer is made, in every module that has it
    ServedTrainer        sets the heads when a public method of the trainer is called, and takes them off after `train`
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from trl.trainer.base_trainer import _BaseTrainer

from liger_chunked.arguments import Arguments, call_error
from liger_chunked.deferred.projection import projections_in
from liger_chunked.integrations.transformers.attach import check_head
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.forward import state_of
from liger_chunked.integrations.trl.heads import HEAD_BUDGET, Heads, HeadSettings, language_models
from liger_chunked.integrations.trl.stand_ins import lent, replaced, swapped, trainer_classes
from liger_chunked.shared_prefix.served import ROUTER, why_not_shared
from liger_chunked.types import budget_bytes, shown

P = ParamSpec("P")
T = TypeVar("T")

# Settings of experimental trainers whose losses compare whole distributions in an order of their own: sorted, or the
# largest ones. They would train on real logits without a word.
_READ_LOGITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "GOLDTrainer": ("use_uld_loss", lambda config: config.use_uld_loss),
    "IWOPDTrainer": ("loss_top_k", lambda config: config.distillation_objective != "iw_opd" and config.loss_top_k),
    "SDFTTrainer": ("distillation_mode", lambda config: config.distillation_mode == "topk_logits"),
    "SDPOTrainer": ("distillation_mode", lambda config: config.distillation_mode == "topk_logits"),
}

# Trainers with one sequence for a prompt.
_ALONE = ("SFTTrainer", "KTOTrainer")


_Trainer: Any = _BaseTrainer  # whose subclasses have attributes that it lacks


def _with_heads_set(name: str, *, until_end: bool = False) -> Any:
    """Return a method that calls TRL's of this name with the heads set; `until_end`: see `heads_set`."""

    def method(self: ServedTrainer, *args: Any, **kwargs: Any) -> Any:
        with self.heads_set(until_end=until_end):
            return getattr(super(ServedTrainer, self), name)(*args, **kwargs)

    return functools.wraps(getattr(_Trainer, name))(method)


class ServedTrainer(_Trainer):
    """What a served trainer has in addition to TRL's: its heads, which are set while it works."""

    # Of transformers' trainer, without the types that subclasses of it narrow.
    model: Any
    args: Any
    # Names that no trainer of a user has.
    _liger_heads: Heads
    _liger_depth = 0

    @contextmanager
    def heads_set(self, *, until_end: bool = False) -> Iterator[None]:
        """Set the heads; `until_end`: and take them off after the outermost call."""
        self._liger_heads.set(language_models(vars(self).values()))
        self._liger_depth += 1
        try:
            with swapped():
                yield
        finally:
            self._liger_depth -= 1
            if until_end and not self._liger_depth:
                self._liger_heads.take_off()

    train = _with_heads_set("train", until_end=True)
    evaluate = _with_heads_set("evaluate", until_end=True)
    predict = _with_heads_set("predict", until_end=True)
    # Also called by loops of users.
    training_step = _with_heads_set("training_step")
    prediction_step = _with_heads_set("prediction_step")
    compute_loss = _with_heads_set("compute_loss")
    _prepare_inputs = _with_heads_set("_prepare_inputs")


def served_class(cls: Any) -> Any:
    """Return the subclass of a trainer's class that `ServedTrainer` serves, with the same name."""
    if issubclass(cls, ServedTrainer):
        return cls
    bases = _server_of(cls), cls
    namespace = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    # The class of an earlier trainer: Python knows the subclasses that are alive, and a cache would keep them so.
    alike = (c for c in cls.__subclasses__() if c.__bases__ == bases and c.__qualname__ == cls.__qualname__)
    return next(alike, None) or type(cls.__name__, bases, namespace)


def _server_of(cls: Any) -> Any:
    """Return the mixin for a trainer's class: that of `DistillationTrainer`, unless a subclass has one of its names."""
    mro = cls.__mro__
    stock = next((i for i, c in enumerate(mro) if c.__module__ == "trl.trainer.distillation_trainer"), None)
    if stock is None:
        return ServedTrainer
    from liger_chunked.integrations.trl.losses import DistillationMixin, LossMixin  # imports this module

    names = {name for name in vars(LossMixin) | vars(DistillationMixin) if not name.startswith("__")}
    # The mixin comes before the user's class, and would hide its members.
    return DistillationMixin if all(names.isdisjoint(vars(c)) for c in mro[:stock]) else ServedTrainer


def config_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingArguments | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, TrainingArguments)), None)


def budget_of_model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the budget that `apply_liger_kernel` gave the model of a trainer with these arguments, or TRL's heads'."""
    for model in language_models([kwargs.get("model"), *args]):
        state = state_of(inner_model(model))
        if state is not None and state.fusion is not None and state.fusion.logits_budget is not None:
            return state.fusion.logits_budget
    return HEAD_BUDGET


# Kinds of functions whose call only makes what runs later.
_RUN_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
# While a trainer is made, TRL's modules have functions of ours.
_MAKING = threading.RLock()


@contextmanager
def constructing(
    trainer: ServedTrainer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    logits_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    share_prefix: bool | str = "auto",
) -> Iterator[None]:
    """Run the `__init__` of TRL's trainer with these arguments inside the block, with our heads.

    Raises:
        ValueError: a setting of the trainer or its config that cannot be served.
    """
    config = config_in(args, kwargs)
    if getattr(config, "use_liger_kernel", False):
        raise ValueError(
            "use_liger_kernel=True activates the package Liger-Kernel, whose losses would replace these heads: leave "
            "it off, and call liger_chunked.apply_liger_kernel(model) for layer kernels"
        )
    for name, (field, reads) in _READ_LOGITS.items():
        if config is not None and any(cls.__name__ == name for cls in type(trainer).__mro__) and reads(config):
            raise ValueError(
                f"{field}={getattr(config, field)!r} of {type(config).__name__} makes {name} read whole distributions, "
                "which need their logits: change it, or make this trainer outside of patch_trl"
            )
    parallelism = getattr(config, "parallelism_config", None)
    splits = getattr(parallelism, "cp_size", 1) > 1 or getattr(parallelism, "sp_size", 1) > 1
    if splits and share_prefix is True:
        raise ValueError("share_prefix=True needs whole sequences, and parallelism_config splits them")
    alone = not {cls.__name__ for cls in type(trainer).__mro__}.isdisjoint(_ALONE)
    if alone and share_prefix is True:
        raise ValueError(f"share_prefix=True: the sequences of {type(trainer).__name__} have no prompts in common")
    budget = budget_of_model(args, kwargs) if logits_budget is None else logits_budget
    heads = Heads(HeadSettings(logits_budget=budget))
    shares: list[PreTrainedModel] = []
    maker = threading.get_ident()

    def add_head(model: PreTrainedModel, *settings: Any, **named: Any) -> Any:
        if threading.get_ident() != maker:  # the other thread makes another trainer
            return NotImplemented
        # A router loss counts shared tokens once. Then no model of the trainer shares them: the log-probabilities of a
        # policy and of its equal reference would differ by rounding. TRL sets this attribute before it adds heads.
        share = False if splits or alone or getattr(trainer, "aux_loss_enabled", False) else share_prefix
        named |= {"logits_budget": budget, "logits_dtype": logits_dtype, "share_prefix": share}
        heads.give(model, HeadSettings(*settings, **named))
        shares.append(model)
        return None

    trainer._liger_heads = heads
    weakref.finalize(trainer, heads.take_off).atexit = False
    try:
        heads.set(language_models((*args, *kwargs.values())))  # before TRL prepares a reference or a teacher
        casts = getattr(config, "cast_lm_head_to_fp32", False)  # TRL does so itself, without an adapter
        heads_are_ours = replaced({"add_fused_lm_head": add_head}, of_anyone=True)
        with _MAKING, heads_are_ours, nullcontext() if casts else _lora_heads(type(trainer)):
            yield
        heads.set(language_models(vars(trainer).values()))
        if share_prefix is True:
            _check_shares(trainer, shares)
    except BaseException:
        heads.take_off()
        raise


def _check_shares(trainer: Any, models: list[PreTrainedModel]) -> None:
    if not models:
        raise ValueError(
            f"share_prefix=True: {type(trainer).__name__} reads the logits of whole batches, and cannot share prompts"
        )
    reason = ROUTER if getattr(trainer, "aux_loss_enabled", False) else why_not_shared(trainer.model)
    if reason is not None:
        raise ValueError(f"{type(inner_model(trainer.model)).__name__} cannot share prompts: {reason}")


class _Unsupported(type):
    """Replaces PEFT's `BaseTunerLayer` where TRL refuses an adapter on `lm_head`; ValueError for those we refuse."""

    def __instancecheck__(cls, lm_head: Any) -> bool:
        projections_in(lm_head)
        return False


class _UnsupportedAdapter(metaclass=_Unsupported):
    pass


@contextmanager
def _lora_heads(trainer: type[Any]) -> Iterator[None]:
    """Let a trainer's `__init__` accept LoRA on `lm_head`."""
    with ExitStack() as stack:
        for module in {sys.modules.get(cls.__module__) for cls in trainer.__mro__}:
            if "BaseTunerLayer" in getattr(module, "__dict__", {}):
                stack.enter_context(lent(module, BaseTunerLayer=_UnsupportedAdapter))
        yield


def _suggests_names(init: Callable[P, T]) -> Callable[P, T]:
    """Make arguments that a constructor does not take raise the TypeError that suggests the right name."""
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if (error := call_error(owner, init, args, kwargs, Arguments(()))) is not None:
            raise error
        return init(*args, **kwargs)

    return checked


class patch_trl:
    """Let trainers of TRL compute their losses from hidden states, on chunks of logits.

    Each trainer of TRL that is made while the patch is active is served: the stable and the experimental ones, and
    subclasses of them. It trains and logs what it does without the patch, and leaves its models as it found them. The
    patch is active at once, until `undo`. It is a context manager and a decorator too:

        patch = patch_trl(); ...; patch.undo()

        with patch_trl(logits_budget="256MiB"):
            trainer = GRPOTrainer(...)
        trainer.train()

        @patch_trl()
        def main(): ...

    Blocks may be nested, also those of one patch. Decorating a function with a patch undoes it outside of the
    function's calls, unless it is in a block. A trainer that was made under a patch is served for its whole life.

    Args:
        model: only serve trainers of this model (the argument `model` of the trainer, maybe wrapped by PEFT), with
            their references and teachers. None: all trainers of this process.
        logits_budget: most bytes of logits in memory at once, see `LogitOptions`. None: what the model has by
            `apply_liger_kernel`, else 512 MiB.
        share_prefix: compute a prompt once for its sequences, in DPO, GRPO, RLOO and subclasses of these: "auto" if the
            model allows it and a tenth of a batch's tokens is saved; True raises ValueError for other trainers and
            models; see docs/shared_prefix.md.

    Raises:
        TypeError: `model` contains no transformers model.
        ValueError: an argument that cannot be served; the trainer's `__init__` raises it for a setting of its own.
    """

    _active: list[patch_trl] = []  # noqa: RUF012 - of all instances, one entry for each `_apply`
    _wrapped = ExitStack()  # restores TRL's classes

    @_suggests_names
    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        logits_budget: int | float | str | None = None,
        share_prefix: bool | str = "auto",
    ) -> None:
        self._model = None if model is None else inner_model(model)
        if self._model is not None:
            check_head(self._model)
        self._settings: dict[str, Any] = {
            "logits_budget": budget_bytes(logits_budget),
            "share_prefix": checked_share_prefix(share_prefix),
        }
        self._n_blocks = 0  # `with` blocks of this patch that are open
        self._apply()

    def _apply(self) -> None:
        with _MAKING:
            if not patch_trl._active:
                _wrap_trainers()
            patch_trl._active.append(self)

    def _leave(self) -> None:
        """Undo the newest `_apply` of this patch, if there is one."""
        with _MAKING:
            if self in patch_trl._active:
                newest = max(i for i, patch in enumerate(patch_trl._active) if patch is self)
                del patch_trl._active[newest]
                if not patch_trl._active:
                    patch_trl._wrapped.close()

    def undo(self) -> None:
        """Leave TRL as it was. Trainers that were made before stay served."""
        while self in patch_trl._active:
            self._leave()

    def __enter__(self) -> patch_trl:
        # The outermost block takes over what the constructor has applied.
        if self._n_blocks or self not in patch_trl._active:
            self._apply()
        self._n_blocks += 1
        return self

    def __exit__(self, *_: Any) -> None:
        self._n_blocks -= 1
        self._leave()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        if not self._n_blocks:
            self.undo()
        if any(is_kind(function) for is_kind in _RUN_LATER):
            raise TypeError(f"patch_trl would end before {shown(function)} runs: use `with patch_trl():` inside it")

        @functools.wraps(function)
        def patched(*args: P.args, **kwargs: P.kwargs) -> T:
            with patch_trl(self._model, **self._settings):
                return function(*args, **kwargs)

        return patched

    def _serves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._model is None:
            return True
        given = kwargs.get("model", args[0] if args else None)
        return isinstance(given, nn.Module) and any(inner_model(x) is self._model for x in language_models([given]))


def checked_share_prefix(share_prefix: bool | str) -> bool | str:
    if not (isinstance(share_prefix, bool) or share_prefix == "auto"):
        raise ValueError(f"share_prefix must be 'auto', True or False, got {shown(share_prefix)}")
    return share_prefix


def _wrap_trainers() -> None:
    """Wrap the `__init__` of TRL's trainers, and of those that are imported later."""
    for cls in trainer_classes():
        _wrap(cls)

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(_BaseTrainer, cls).__init_subclass__(**kwargs)
        _wrap(cls)

    _Trainer.__init_subclass__ = classmethod(__init_subclass__)
    patch_trl._wrapped.callback(delattr, _Trainer, "__init_subclass__")


def _wrap(cls: type) -> None:
    stock = vars(cls).get("__init__")
    if stock is None or cls.__module__.partition(".")[0] != "trl":
        return

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        patch = next((x for x in reversed(patch_trl._active) if x._serves(args, kwargs)), None)
        if patch is None or isinstance(self, ServedTrainer):
            stock(self, *args, **kwargs)
            return
        kind: Any = type(self)
        self.__class__ = served_class(kind)
        with constructing(self, args, kwargs, **patch._settings):
            stock(self, *args, **kwargs)

    patch_trl._wrapped.enter_context(lent(cls, __init__=__init__))
