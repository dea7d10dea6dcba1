from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import ModelOutput

from liger_chunked.calls import altered
from liger_chunked.types import Head, LogitOptions

T = TypeVar("T")


@dataclass(frozen=True)
class HeadInput:
    """A head's input, and its loss's arguments.

    - `hidden_states` (B, T, H), which `logits_to_keep` selects
    - `options`: transform of the logits, and ignored label
    - `outputs`: of the model's forward, without logits
    - `labels`, `shift_labels` (B, T), `num_items_in_batch`: arguments of `model.forward`
    - `aux_loss` (): the load-balancing loss of experts; None unless the call or the config asks for router logits.
      Mixtral's, if the forward returns router logits alone
    - `added_loss` (): the terms that the forward adds to its cross entropy, such as the weighted `aux_loss`
    """

    hidden_states: Tensor
    options: LogitOptions
    outputs: ModelOutput
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    num_items_in_batch: int | Tensor | None = None
    aux_loss: Tensor | None = None
    added_loss: Tensor | None = None

    @property
    def target(self) -> Tensor:
        """(B, T): `shift_labels`, or else the next labels."""
        target = self.shift_labels
        if target is None:
            if self.labels is None:
                raise ValueError("this head_fn needs a target: pass labels= or shift_labels= to the model")
            target = F.pad(self.labels[..., 1:], (0, 1), value=self.options.ignore_index)
        return target.to(self.hidden_states.device)

    def loss(self, loss: Callable[..., T], head: Head, **tensors: Any) -> T:
        """Return the value of `loss`, at the model's softcap and scale.

        `tensors` are more arguments, such as `num_items=input.num_items_in_batch`, which is not passed by itself.

        Raises ValueError if the loss has different ones.

        >>> def head_fn(head, input):
        ...     return input.loss(LigerFusedLinearCrossEntropyLoss(), head)
        """
        own = fitted(loss, self.options)
        value: T = own(head.weight, self.hidden_states, target=self.target, bias=head.bias, **tensors)
        return value


TRANSFORM = ("softcap", "logit_scale")


def with_transform(own: LogitOptions, model: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> LogitOptions:
    """Return a loss's options with the model's; they must agree."""
    plain = LogitOptions()
    for name in names:
        given, of_model = getattr(own, name), getattr(model, name)
        if given not in (getattr(plain, name), of_model):
            raise ValueError(f"the loss has {name}={given}, but the model is trained with {name}={of_model}")
    return dataclasses.replace(own, **{name: getattr(model, name) for name in names})


def fitted(loss: Callable[..., Any], options: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> Any:
    own: Any = loss
    return altered(own, options=with_transform(own.options, options, names))


HeadFn: TypeAlias = Callable[[Head, HeadInput], Any]


def kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Select the last positions (int; 0: all), (K,) for all samples, (B, K), or a mask (B, T)."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.ndim < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)
