from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.transformers.attach import rebind
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.head_input import fitted
from liger_chunked.integrations.trl import heads, references
from liger_chunked.shared_prefix.served import ROUTER, why_not_shared
from liger_chunked.types import Head, budget_bytes, described

_LOGGER = logging.getLogger(__name__)


class Step(NamedTuple):
    """What a loss gave inside a model's forward.

    - `target` (B, T): the labels that the loss read
    - `logged`: what `apply_loss` was asked to compute for the log, or None
    """

    loss: Tensor
    metrics: Any
    target: Tensor
    aux_loss: Tensor | None
    logged: Any = None


def loss_step(
    model: nn.Module,
    loss: nn.Module,
    inputs: dict[str, Any],
    labels: Tensor | None,
    *,
    length: int | None = None,
    **arguments: Any,
) -> Step:
    """Run `model` with `apply_loss` as its head. `labels` (B, T) are unshifted."""
    apply = functools.partial(apply_loss, loss=loss, length=length, **arguments)
    return model(**inputs, labels=labels, head_fn=apply)


def apply_loss(
    head: Head,
    input: HeadInput,
    *,
    loss: nn.Module,
    length: int | None = None,
    logged: tuple[str, ...] = (),
    **arguments: Any,
) -> Step:
    """Run `loss` as a `head_fn`, with the model's logits transform, on the last `length` positions that predict.

    `logged` names fields of `TokenStats`, which a second projection computes without a gradient, for the log.
    """
    positions = slice(None) if length is None else slice(-length - 1, -1)
    target = input.target[:, positions]
    hidden_states = input.hidden_states[:, positions]
    own = fitted(loss, input.options)
    result = own(head.weight, hidden_states, target=target, bias=head.bias, **arguments)
    value, metrics = result if isinstance(result, tuple) else (result, None)
    stats = None
    if logged:
        own_input = dataclasses.replace(input, hidden_states=hidden_states, shift_labels=target)
        options = {name: getattr(own.options, name) for name in ("temperature", "logits_budget", "logits_dtype")}
        with torch.no_grad():
            stats = heads.head_stats(head, own_input, logged, **options)
    return Step(value, metrics, target, input.aux_loss, stats)


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


MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

_Trainer: Any = object


class LigerTrainerMixin(_Trainer):
    """Adds chunked heads and the argument `loss` to a trainer of TRL.

    Args:
        loss: replaces the trainer's; a `loss_kind`. Config fields in `replaced_fields` must have TRL's defaults or
            agree.
        logits_budget: see `LogitOptions`. None: 512 MiB for heads that replace TRL's, else automatic. Not with `loss`.

    Raises:
        TypeError: an argument that neither this class nor TRL's trainer has, with the nearest name.
        ValueError: contradicting arguments, or the config sets `use_liger_kernel`.
    """

    loss_kind: ClassVar[type[Any] | None] = None
    # Config fields of TRL's loss, and equivalent attributes of `loss`, or None.
    replaced_fields: ClassVar[Mapping[str, str | None]] = {}
    models_without_head: ClassVar[tuple[str, ...]] = ()
    # Private methods of TRL's trainer that `loss` replaces, or which are replaced in any case.
    replaced_by_loss: ClassVar[tuple[str, ...]] = ()
    always_replaced: ClassVar[tuple[str, ...]] = ()
    share_prefix: bool | str = False

    def __init__(
        self, *args: Any, loss: nn.Module | None = None, logits_budget: int | float | str | None = None, **kwargs: Any
    ) -> None:
        budget, logits_dtype = budget_bytes(logits_budget), None  # raises before loading
        config = config_in(args, kwargs)
        check_keywords(type(self), kwargs, config)
        if getattr(config, "use_liger_kernel", False):
            raise ValueError(
                "use_liger_kernel=True activates the package Liger-Kernel, whose losses would replace these heads: "
                "leave it off, and call liger_chunked.apply_liger_kernel(model) for layer kernels"
            )
        if loss is not None:
            self._check_loss(loss)
            self._check_config(loss, config)
            if budget is not None:
                raise ValueError(
                    f"with loss=, logits_budget={logits_budget!r} of the trainer would not be read: pass it to the "
                    f"loss, {type(loss).__name__}(..., logits_budget={logits_budget!r})"
                )
            options: Any = loss.options
            # The heads' log-probabilities, of the old policy and the reference, are compared with those of the loss.
            budget, logits_dtype = options.logits_budget, options.logits_dtype
        self.loss_override: Any = loss
        self.logits_budget = budget
        # TRL casts such a head itself, without an adapter.
        casts = getattr(config, "cast_lm_head_to_fp32", False)
        heads.check_has_methods(type(self), (*self.always_replaced, *(self.replaced_by_loss if loss else ())))
        if loss is not None:
            heads.check_reads_loss(type(self), LigerTrainerMixin, (*self.always_replaced, *self.replaced_by_loss))
        self._logits_dtype = logits_dtype
        for x in (*args, *kwargs.values()):
            if isinstance(x, nn.Module):
                heads.hand_over(x)  # before TRL sets this trainer's autocast on a teacher or reference
        trained = [] if loss is None else [(name, x) for name, x in loss.named_parameters() if x.requires_grad]
        with heads.replaced_heads(self._replace_head), nullcontext() if casts else heads.lora_heads(type(self)):
            super().__init__(*args, **kwargs)
        self._check_trains(trained)
        self.add_heads()
        rebind(self.model, inner_model(self.model))

    def _check_trains(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Raise ValueError unless the model trains these parameters of the loss.

        The optimizer, DDP and checkpoints know those of the model alone.
        """
        known = {id(x) for x in self.model.parameters() if x.requires_grad}
        for name, x in parameters:
            if id(x) not in known:
                raise ValueError(
                    f"{type(self.loss_override).__name__} has the trainable parameter {name} {described(x)}, which the "
                    "model does not train, and so no optimizer would: register the loss on the model before, as in "
                    "model.own_loss = loss, or freeze the parameter. An adapter freezes what the model had before it"
                )

    def add_heads(self) -> None:
        """Give chunked heads to the models that have none of TRL's."""
        if heads.reads_logits(type(self), self.models_without_head):
            for inner in self._inner_models("model", "ref_model"):
                self._replace_head(inner)
        for inner in self._inner_models(*self.models_without_head):
            self._add_head(inner, self.logits_budget)

    def _replace_head(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        """Run in place of TRL's `add_fused_lm_head`."""
        budget = heads.HEAD_BUDGET if self.logits_budget is None else self.logits_budget
        self._add_head(model, budget, *args, **kwargs)

    def _add_head(self, model: PreTrainedModel, budget: int | None, *args: Any, **kwargs: Any) -> None:
        # A router loss counts shared tokens once. Then no model of the trainer shares them: the log-probabilities of a
        # policy and of its equal reference would differ by rounding.
        share_prefix = not self._has_router_loss and self.share_prefix
        kwargs |= {"logits_budget": budget, "logits_dtype": self._logits_dtype, "share_prefix": share_prefix}
        heads.add_chunked_lm_head(model, *args, **kwargs)

    @property
    def _has_router_loss(self) -> bool:
        return getattr(self, "aux_loss_enabled", False)  # which TRL sets before it adds heads

    def _inner_models(self, *names: str) -> list[PreTrainedModel]:
        models = (getattr(self, name, None) for name in names)
        return [inner_model(model) for model in models if model is not None]

    @property
    def mode_metrics(self) -> dict[str, list[float]]:
        metrics = getattr(self, "_metrics", None)  # of TRL, which logs them; a release without it logs none
        return defaultdict(list) if metrics is None else metrics["train" if self.model.training else "eval"]

    def log_token_mean(self, name: str, values: Tensor, target: Tensor) -> None:
        """Log the mean of `values` (B, T), 0 at ignored tokens, over the tokens of `target` (B, T) on all ranks."""
        n_tokens = (target != -100).sum()
        self.mode_metrics[name].append(self.global_mean(values.sum() / n_tokens.clamp(min=1), n_tokens))

    def gathered_mean(self, value: Tensor) -> float:
        return self.accelerator.gather_for_metrics(value.detach()).mean().item()

    def own_metrics(self, metrics: Any, *, of_nothing: bool | None = None) -> dict[str, float]:
        """Return what the loss given as `loss` adds to the log, see `logged_metrics`.

        Args:
            of_nothing: whether this rank skipped all sequences, so that its metrics have no value: the mean is that of
                the other ranks, or NaN, which TRL does not log, if there is none. None: ranks skip none.
        """

        def mean(x: float | Tensor) -> float:
            values = torch.as_tensor(x, dtype=torch.float32, device=self.accelerator.device)
            if of_nothing is None:
                return self.gathered_mean(values)
            value = torch.zeros_like(values).mean() if of_nothing else values.detach().mean()
            # Counted, because `nanmean` would hide the NaN of a rank with sequences.
            pair = torch.stack([value, torch.full_like(value, not of_nothing)])
            total, n_ranks = self.accelerator.gather_for_metrics(pair[None]).sum(0)
            return (total / n_ranks).item()

        return {name: mean(x) for name, x in self.loss_override.logged_metrics(metrics).items()}

    def log_own_metrics(self, metrics: Any, *, of_nothing: bool | None = None) -> None:
        for name, value in self.own_metrics(metrics, of_nothing=of_nothing).items():
            self.mode_metrics[name].append(value)

    def global_mean(
        self,
        mean: Tensor,
        count: Tensor,
        *,
        with_repeated: bool = False,
        others: Tensor | float = 0.0,
        total: Tensor | None = None,
    ) -> float:
        """Average the ranks' means, weighted by `count`; by default without repeated samples.

        Args:
            others: the sum of the values that `mean` leaves out.
            total: how many values there are with these. None: `count`.
        """
        gather = self.accelerator.gather if with_repeated else self.accelerator.gather_for_metrics
        values = mean.detach() * count + others
        sums = gather(torch.stack([values, (count if total is None else total).to(mean.dtype)])[None]).sum(0)
        return (sums[0] / sums[1].clamp(min=1)).item()

    @property
    def _aux_inputs(self) -> dict[str, bool]:
        return {"output_router_logits": True} if self.aux_loss_enabled else {}

    def _with_aux_loss(self, value: Tensor, aux_loss: Tensor | None, *, accumulates: bool = False) -> Tensor:
        """Add and log `aux_loss`; `accumulates`: averaged over micro-batches."""
        if aux_loss is None:
            return value
        self.mode_metrics["aux_loss"].append(self.gathered_mean(aux_loss))
        steps = self.current_gradient_accumulation_steps if accumulates else 1
        return value + self.router_aux_loss_coef * aux_loss / steps

    def _finished(self, value: Tensor, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if self.model.training:
            tokens = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["position_ids"].size(1)
            tokens = torch.as_tensor(tokens, device=self.accelerator.device)
            if hasattr(self, "_total_train_tokens"):
                n_tokens = self.accelerator.gather_for_metrics(tokens).sum().item()
                self._total_train_tokens += n_tokens // getattr(self.accelerator.parallelism_config, "tp_size", 1)
        if hasattr(self, "_total_train_tokens"):
            self.mode_metrics["num_tokens"] = [self._total_train_tokens]
        return with_outputs(value, model, inputs, return_outputs)

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        if cls.loss_kind is None or not isinstance(loss, cls.loss_kind):
            expected = "no loss" if cls.loss_kind is None else f"a {cls.loss_kind.__name__}"
            got = f"the class {loss.__name__}" if isinstance(loss, type) else f"loss={type(loss).__name__}"
            raise TypeError(f"{cls.__name__} takes {expected}, got {got}")
        ignored = loss.options.ignore_index
        if ignored != -100:
            raise ValueError(f"TRL marks ignored tokens with the label -100, but the loss has ignore_index={ignored}")

    @classmethod
    def _check_config(cls, loss: Any, config: Any) -> None:
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


class SharedPromptsMixin(LigerTrainerMixin):
    """Trainers with several sequences per prompt.

    Args:
        share_prefix: compute a prompt once for its sequences: "auto" if the model allows it and a tenth of a batch's
            tokens is saved; True raises ValueError for other models (docs/shared_prefix.md).
    """

    def __init__(self, *args: Any, share_prefix: bool | str = "auto", **kwargs: Any) -> None:
        if share_prefix not in (True, False, "auto"):
            raise ValueError(f"share_prefix must be 'auto', True or False, got {share_prefix!r}")
        parallelism = getattr(config_in(args, kwargs), "parallelism_config", None)
        if getattr(parallelism, "cp_size", 1) > 1 or getattr(parallelism, "sp_size", 1) > 1:
            if share_prefix is True:
                raise ValueError("share_prefix=True needs whole sequences, and parallelism_config splits them")
            share_prefix = False
        self.share_prefix = share_prefix
        super().__init__(*args, **kwargs)
        if share_prefix == "auto" and self._has_router_loss:
            _LOGGER.info("%s computes shared prompts once for each sequence: %s", type(self).__name__, ROUTER)
        reason = (ROUTER if self._has_router_loss else why_not_shared(self.model)) if share_prefix is True else None
        if reason is not None:
            raise ValueError(f"{type(inner_model(self.model)).__name__} cannot share prompts: {reason}")


def check_keywords(trainer: type, given: Iterable[str], config: TrainingArguments | None) -> None:
    """Raise TypeError for keywords that neither the mixins nor TRL's trainer have.

    TRL would name its own class, which is not the one that was called.

    Args:
        given: the keywords that the mixins pass on.
        config: of the call; None: TRL's class of configs is read from the annotation.
    """
    kinds = trainer.__mro__
    start = kinds.index(LigerTrainerMixin) + 1
    signatures = [inspect.signature(vars(kind)["__init__"]) for kind in kinds[:-1] if "__init__" in vars(kind)]
    n_own = sum("__init__" in vars(kind) for kind in kinds[:start])
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known: dict[str, inspect.Parameter] = {}
    for i, signature in enumerate(signatures):
        parameters = signature.parameters
        # TRL's come last, because their annotations say which class of configs it takes.
        known |= {name: x for name, x in parameters.items() if x.kind in named and name != "self"}
        if i >= n_own and not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            break
    else:
        return  # takes any, in this version of TRL
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    name = unknown[0]
    configs = [type(config)] if config is not None else [*get_args(known["args"].annotation)] if "args" in known else []
    of_config = next((x for x in configs if dataclasses.is_dataclass(x)), None)
    fields = [field.name for field in dataclasses.fields(of_config)] if of_config is not None else []
    close = [name] if name in fields else difflib.get_close_matches(name, [*known, *fields], n=1, cutoff=0.6)
    refused = f"{trainer.__name__} has no argument {name!r}"
    if not close:
        raise TypeError(f"{refused}: it takes {', '.join(known)}")
    if close[0] in known:
        raise TypeError(f"{refused}: did you mean {close[0]!r}?")
    assert of_config is not None
    field = f"args={of_config.__name__}({close[0]}=...)"
    raise TypeError(f"{refused}: " + (f"it is set in {field}" if close[0] == name else f"did you mean {field}?"))


def config_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingArguments | None:
    return next((x for x in (*args, kwargs.get("args")) if isinstance(x, TrainingArguments)), None)


def check_loads_reference(trainer: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a trainer for GRPO or RLOO, called so, cannot load the reference of its KL term.

    Raises TypeError, as `check_keywords` does, for a misspelt `peft_config`, with which it would need no reference.
    """
    config = config_in(args, kwargs)
    check_keywords(trainer, kwargs, config)
    if getattr(config, "beta", 0.0) and not _has_adapter((*args, *kwargs.values())):
        references.check_name(trainer.__name__, args[0] if args else kwargs.get("model"), references.SAVE_FIRST)


def _has_adapter(arguments: Iterable[Any]) -> bool:
    """Whether a config of PEFT is given: the policy without its adapter is then the reference."""
    return any(hasattr(x, "peft_type") for x in arguments)


_MISSING: Any = object()


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name, _MISSING)


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def with_outputs(value: Tensor, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
    """Return `value`; with `return_outputs`, also the output, with logits, of another forward."""
    if not return_outputs:
        return value
    with torch.no_grad():
        return value, model(**inputs)


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


class ReferenceMixin(LigerTrainerMixin):
    """Trainers whose loss compares with a reference: DPO and KTO.

    With `loss=`, the column "sample_weight" of a data set, one number for an example, is the loss's `example_weights`.
    """

    ref_columns: ClassVar[tuple[str, ...]]
    logged_stats: ClassVar[tuple[str, ...]] = ("entropy",)
    replaced_by_loss: ClassVar = ("_compute_loss",)
    # Of transformers' trainer.
    data_collator: Any
    _signature_columns: Any

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: PreTrainedModel | None = None,
        args: Any = None,
        *others: Any,
        loss: Any = None,
        **kwargs: Any,
    ) -> None:
        # Before the reference: a misspelt `ref_model` or `peft_config` is a reference that is missing.
        check_keywords(type(self), kwargs, config_in((args, *others), kwargs))
        if self.loss_kind is not None and isinstance(loss, self.loss_kind) and loss.use_ref_model is False:
            given = ["a ref_model"] if ref_model is not None else []
            settings = ("precompute_ref_log_probs", "sync_ref_model")
            given += [f"{name}=True" for name in settings if getattr(args, name, False)]
            if given:
                raise ValueError(f"{type(loss).__name__} takes no reference, got {' and '.join(given)}")
            ref_model = _NONE
        self._check_precomputed(loss, args)
        references.check_forwards(model, ref_model)
        if not _has_adapter((*others, *kwargs.values())):
            references.check_parameters(model, ref_model)
            if ref_model is None and not getattr(args, "precompute_ref_log_probs", False):
                references.check_name(type(self).__name__, model, references.PASS_ONE)
        super().__init__(model, ref_model, args, *others, loss=loss, **kwargs)
        # An adapter that TRL has added freezes the rest.
        references.check_parameters(self.model, self.ref_model)
        weighs = SAMPLE_WEIGHT in (getattr(self.train_dataset, "column_names", None) or ())
        if loss is not None:
            self.data_collator = _WithWeights(self.data_collator)
            keeps_columns = hasattr(super(), "_set_signature_columns_if_needed") and hasattr(self, "_signature_columns")
            if weighs and not keeps_columns:
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

    @classmethod
    def _check_precomputed(cls, loss: Any, args: Any) -> None:
        """Raise ValueError, before any pass over the data set, if sums per sequence are not enough for `loss`."""
        if cls.loss_kind is None or not isinstance(loss, cls.loss_kind):
            return
        if loss.needs_token_ref_logps and getattr(args, "precompute_ref_log_probs", False):
            ld_alpha = getattr(loss, "ld_alpha", None)
            setting = "" if ld_alpha is None else f"(ld_alpha={ld_alpha})"
            raise ValueError(
                f"{type(loss).__name__}{setting} needs reference log-probabilities per token, but "
                "precompute_ref_log_probs=True keeps one sum a sequence: set precompute_ref_log_probs=False, so that "
                f"the reference runs in each step{'' if ld_alpha is None else ', or leave ld_alpha out of the loss'}"
            )

    @property
    def ref_model(self) -> Any:
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        self._ref_model = None if model is _NONE else model

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs, return_outputs)
        inputs = dict(inputs)  # of the caller
        weights = inputs.pop(SAMPLE_WEIGHT, None)
        others = ("completion_mask", "label")
        model_inputs = {
            name: x for name, x in inputs.items() if name not in others and not name.startswith(("ref_", "KL_"))
        }
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        length = labels.shape[1] - 1
        arguments = self._loss_arguments(model, inputs)
        if weights is not None:
            arguments["example_weights"] = torch.as_tensor(weights, device=labels.device)
        if loss.use_ref_model is not False:
            arguments["ref_logps"] = self._ref_logps(model_inputs, inputs, labels)
        arguments["logged"] = self.logged_stats
        step = loss_step(model, loss, model_inputs | self._aux_inputs, labels, length=length, **arguments)
        self.log_token_mean("entropy", step.logged.entropy, step.target)
        self._log_metrics(step)
        self.log_own_metrics(step.metrics)
        return self._finished(self._with_aux_loss(step.loss, step.aux_loss), model, model_inputs, return_outputs)

    def _loss_arguments(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _log_metrics(self, step: Step) -> None:
        raise NotImplementedError

    def _ref_logps(self, model_inputs: dict[str, Any], inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Return (B, T - 1), one per label, or (B,) if precomputed."""
        if self.precompute_ref_logps:
            sums = torch.cat([inputs[name] for name in self.ref_columns])
            return self._of_sequences(sums, inputs["completion_mask"])
        with self._reference() as reference:
            logps = reference(**model_inputs, labels=labels, fused_lm_head=True).log_probs
        return logps[:, 1 - labels.shape[1] :]

    @contextmanager
    def _reference(self) -> Iterator[nn.Module]:
        """Yield the reference without gradients: a model, or the policy with its adapter "ref" or without."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                yield self.ref_model
                return
            policy = self.accelerator.unwrap_model(self.model)
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                yield self.model

    def _of_sequences(self, sums: Tensor, mask: Tensor) -> Tensor:
        return sums / mask[:, 1:].sum(-1).clamp(min=1) if self.loss_override.average_log_prob else sums
