"""Cache what `head_check.py` finds about each model, until the model changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import head_check
from liger_chunked.integrations.transformers.detect import STOCK
from liger_chunked.integrations.transformers.head_check import HeadFacts
from liger_chunked.types import LogitOptions

_CHECKED = "_liger_checked_heads"
_CHECKED_MODELS: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_KEPT = 8
_IN_ANY_STATE = {"training", "use_cache"}


def _settings(model: PreTrainedModel) -> list[dict[str, Any]]:
    between = (m for child in model.children() if next(child.parameters(), None) is None for m in child.modules())
    owners = (model, model.config, model.config.get_text_config(), *between)
    plain = {bool, int, float, str, type(None)}
    return [{n: x for n, x in vars(o).items() if type(x) in plain and n not in _IN_ANY_STATE} for o in owners]


class _CheckedHead:
    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.facts = head_check.check_head(model, forward)
        self.has_causal_loss = False
        self._config, self._settings = model.config, _settings(model)

    def holds_for(self, config: Any, settings: list[dict[str, Any]], forward: Callable[..., Any]) -> bool:
        return self.forward is forward and self._config is config and self._settings == settings


class _CheckedHeads:
    """A model's checked heads, not copied with it."""

    def __init__(self) -> None:
        self.heads: list[_CheckedHead] = []

    def __reduce__(self) -> Any:
        return (_CheckedHeads, ())


def _known(model: PreTrainedModel, forward: Callable[..., Any]) -> _CheckedHead | None:
    known = vars(model).get(_CHECKED)
    if known is None:
        return None
    now = model.config, _settings(model), forward
    return next((checked for checked in known.heads if checked.holds_for(*now)), None)


REASON = "a patched model checks its head, and a fused loss waits for the device; compile without fullgraph=True"


@torch.compiler.disable(reason=REASON)
def head_facts(
    model: PreTrainedModel, forward: Callable[..., Any] | None = None, *, causal_loss: bool = False
) -> HeadFacts:
    """Return the cached facts about the head of `forward`, by default the class's."""
    if forward is None:
        of_class = type(model).forward
        forward = getattr(of_class, STOCK, of_class)
    checked = _known(model, forward)
    if checked is None:
        checked = _CheckedHead(model, forward)
        heads = vars(model).setdefault(_CHECKED, _CheckedHeads()).heads
        heads[:] = [checked, *heads[: _KEPT - 1]]
        _CHECKED_MODELS.add(model)
    if causal_loss and not checked.has_causal_loss:
        head_check.check_loss(model, forward)
        checked.has_causal_loss = True
    return checked.facts


def forget_facts(owner: PreTrainedModel | type[PreTrainedModel]) -> None:
    for model in list(_CHECKED_MODELS):
        if model is owner or (isinstance(owner, type) and isinstance(model, owner)):
            vars(model).pop(_CHECKED, None)
            _CHECKED_MODELS.discard(model)


def logit_options(model: PreTrainedModel, *, ignore_index: int = -100) -> LogitOptions:
    """Return the transform that `model.forward` applies to its logits.

    Measured, not read from the config. `logit_scale` includes a factor before `lm_head`.

    Raises ValueError unless the logits are a scale and softcap of `lm_head(last_hidden_state)`.

    >>> from transformers import GraniteConfig, GraniteForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = GraniteForCausalLM(GraniteConfig(**sizes, num_hidden_layers=1, logits_scaling=8.0))
    >>> logit_options(model).logit_scale
    0.125
    """
    return with_ignore_index(head_facts(model).options, ignore_index)


def with_ignore_index(options: LogitOptions, ignore_index: int) -> LogitOptions:
    return options if ignore_index == options.ignore_index else replace(options, ignore_index=ignore_index)
