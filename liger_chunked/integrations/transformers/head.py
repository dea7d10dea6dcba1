"""The head inside its model: code that runs where `lm_head` and the loss would, on every call of `model.forward`.

`attach_head(model)` teaches a model one keyword, `head_fn`:

    model(input_ids, labels=labels, head_fn=fn)     # returns fn(head: Head, input: HeadInput), whatever that is

The backbone runs as ever, then `fn` instead of the projection. All of it happens inside `model.forward`, and `fn`
inside the forward of `lm_head` itself, so that what hooks either of them (DDP, FSDP, ZeRO, `device_map`) has done its
work: the parameters that `fn` sees are whole, and their gradients are reduced as always. Everything is looked up on the
call, as PEFT and FSDP replace modules after a model was patched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from liger_chunked.integrations.transformers.experts import balance_of
from liger_chunked.integrations.transformers.patches import Patches, forward_slot
from liger_chunked.types import Head, LogitOptions


@dataclass(frozen=True)
class HeadInput:
    """What reaches the head of a model, and what its loss was called with.

    - `hidden_states` (B, T, H): of the backbone, those that `logits_to_keep` keeps
    - `options`: how this model transforms its logits, and the label that takes part in nothing
    - `outputs`: what the backbone returned
    - `labels`, `shift_labels` (B, T), `num_items_in_batch`: as `model.forward` got them, None where it did not
    - `aux_loss` (): the load-balancing loss of a mixture of experts, not weighted; None where no router logits were
      asked for, by the call or the config, or where the model's own loss has no such term
    - `aux_loss_coef`: the weight of `aux_loss` in the model's own loss
    """

    hidden_states: Tensor
    options: LogitOptions
    outputs: ModelOutput
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    num_items_in_batch: int | Tensor | None = None
    aux_loss: Tensor | None = None
    aux_loss_coef: float = 0.0

    @property
    def target(self) -> Tensor:
        """(B, T) what each position predicts: `shift_labels`, otherwise the label of the next position.

        Raises:
            ValueError: the call had no labels.
        """
        target = self.shift_labels
        if target is None:
            if self.labels is None:
                raise ValueError("this head_fn needs a target: pass labels= or shift_labels= to the model")
            target = F.pad(self.labels[..., 1:], (0, 1), value=self.options.ignore_index)
        return target.to(self.hidden_states.device)


HeadFn = Callable[[Head, HeadInput], Any]

# These leave out a transform that their text config names.
_NO_SOFTCAP = {"Gemma3ForConditionalGeneration"}


def _names(kind: type) -> set[str]:
    """Of a class and its bases: FSDP makes a subclass, under a name of its own, of what it shards."""
    return {base.__name__ for base in kind.__mro__}


def logit_options(model: PreTrainedModel, *, ignore_index: int = -100) -> LogitOptions:
    """The transform that `model.forward` applies to its logits, from its text config.

    Scales go by several names: `logit_scale` (Cohere), `output_multiplier`, `lm_head_multiplier` (Falcon-H1), and
    `logits_scaling`, which divides (Granite), except where it multiplies (HyperCLOVA X).
    """
    config = model.config.get_text_config()
    scales = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    scale = next((scale for scale in scales if scale is not None), None)
    logits_scaling = getattr(config, "logits_scaling", None)
    if scale is None and logits_scaling is not None:
        scale = logits_scaling if config.model_type == "hyperclovax" else 1 / logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitOptions(
        ignore_index=ignore_index,
        softcap=None if _NO_SOFTCAP & _names(type(model)) else softcap,
        logit_scale=1.0 if scale is None else scale,
    )


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside DDP, FSDP, DeepSpeed, `torch.compile` and PEFT.

    Raises:
        TypeError: there is none.
    """
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None), nn.Module):
            model = inner
        elif callable(get_base_model := getattr(model, "get_base_model", None)):
            model = get_base_model()
        else:
            raise TypeError(f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head.

    Raises:
        ValueError: the model has none.
    """
    # A base_model_prefix that names no attribute (MllamaForCausalLM's) makes base_model the model itself.
    backbone = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    return backbone


# What may lie around a Linear and does nothing but call it.
_TRANSPARENT = {"FullyShardedDataParallel", "ModulesToSaveWrapper", "ModuleDict"}


def projections(model: PreTrainedModel) -> list[nn.Linear]:
    """The Linear modules of which `lm_head` calls one, and adds nothing to it.

    Raises:
        ValueError: there is no `lm_head`, or it computes something else than `x @ weight.T + bias`.
    """
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    linear = [m for m in lm_head.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
    others = [m for m in lm_head.modules() if m not in linear and not _TRANSPARENT & _names(type(m))]
    if others or not linear:
        kind = type((others or [lm_head])[0])
        raise ValueError(
            f"lm_head is computed by {kind.__module__}.{kind.__name__}, of which a weight and a bias are only a "
            "part: a fused loss would ignore the rest (of LoRA, the low-rank term). Take lm_head out of "
            "target_modules; to train it all the same, name it in modules_to_save"
        )
    return linear


def _whole(parameter: Any) -> Any:
    # Tensor parallelism shards the vocabulary; every rank holds all rows of the input, so the gradient is a slice.
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def arguments(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `model.forward`, all by name: its backbone may order them otherwise."""
    if not args:
        return kwargs
    _, *names = inspect.signature(type(model).forward).parameters
    return dict(zip(names, args, strict=False)) | kwargs


def run_backbone(model: PreTrainedModel, **kwargs: Any) -> HeadInput:
    """The backbone on the arguments of `model.forward`, as `model.forward` itself would run it.

    The arguments that belong to head and loss do not reach it: `labels`, `shift_labels`, `num_items_in_batch`,
    `ignore_index`, `logits_to_keep`.
    """
    labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    num_items_in_batch = kwargs.pop("num_items_in_batch", None)
    logits_to_keep = kwargs.pop("logits_to_keep", 0)
    options = logit_options(model, ignore_index=kwargs.pop("ignore_index", -100))
    balance = balance_of(model)
    if balance is not None and not balance.asked(model, kwargs.get("output_router_logits")):
        balance = None
    if balance is not None:
        if balance.refusal is not None:
            raise ValueError(
                f"the load-balancing loss of {type(model).__name__} cannot be computed: {balance.refusal}; pass "
                "output_router_logits=False, or set it so in the config, to train without it"
            )
        kwargs["output_router_logits"] = True
    kwargs.setdefault("use_cache", False)
    kwargs["return_dict"] = True

    outputs = backbone_of(model)(**kwargs)
    aux_loss: Any = None
    aux_loss_coef = 0.0
    if balance is not None:
        aux_loss, aux_loss_coef = balance.loss(model, outputs, kwargs.get("attention_mask")), balance.coefficient(model)
    return HeadInput(
        hidden_states=_kept(outputs.last_hidden_state, logits_to_keep),
        options=options,
        outputs=outputs,
        labels=labels,
        shift_labels=shift_labels,
        num_items_in_batch=num_items_in_batch,
        aux_loss=aux_loss,
        aux_loss_coef=aux_loss_coef,
    )


def _kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The positions that `logits_to_keep` names: the last so many (0: all), an index for every sample or one for each,
    or, flattened, where a mask is True.
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.ndim < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


def run_head(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    """`head_fn(head, input)`, from within the forward of `lm_head`, where its parameters are whole.

    Raises:
        ValueError: `lm_head` is more than a weight and a bias, such as one with a LoRA adapter.
    """
    lm_head = model.get_output_embeddings()
    if _is_bare(lm_head):
        return _at_projection(lm_head, input.hidden_states, input=input, head_fn=head_fn)
    return _run_inside(model, input, head_fn)


def _is_bare(lm_head: nn.Module | None) -> bool:
    """Whether nothing but `nn.Linear.forward` would run: then a compiler need not stop before the head."""
    if type(lm_head) is not nn.Linear:
        return False
    hooks = (lm_head._forward_pre_hooks, lm_head._forward_hooks, lm_head._backward_pre_hooks, lm_head._backward_hooks)
    return not any(hooks) and "forward" not in lm_head.__dict__


def _at_projection(projection: nn.Linear, hidden_states: Tensor, *, input: HeadInput, head_fn: HeadFn) -> Any:
    head = Head(_whole(projection.weight), _whole(projection.bias))
    return head_fn(head, replace(input, hidden_states=hidden_states.to(head.weight.device)))


@torch.compiler.disable
def _run_inside(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    patches = Patches()
    for projection in projections(model):
        forward = functools.partial(_at_projection, projection, input=input, head_fn=head_fn)
        patches.set(projection, forward_slot(projection), forward)
    try:
        return model.get_output_embeddings()(input.hidden_states)
    finally:
        patches.undo()
