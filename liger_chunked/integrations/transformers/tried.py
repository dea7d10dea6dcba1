"""Try a head on a small copy of its model: whether it trained without logits, or what asked for them."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from liger_chunked.deferred import Deferral, DeferredLogits, set_deferral
from liger_chunked.deferred.defer import refusal_of
from liger_chunked.deferred.request import requested
from liger_chunked.deferred.swap import stock_class
from liger_chunked.integrations.transformers.detect import head_of
from liger_chunked.integrations.transformers.small import config_of, inputs_of

_MOST_PARAMETERS = 4_000_000  # a step takes a fraction of a second

_KNOWN: dict[Any, str | None] = {}


def why_logits(model: PreTrainedModel) -> str | None:
    """Return what a small copy of a model does with the logits of a training step; None if it needs none.

    None too if no small copy can be made or run: then the model shows it, and is right either way.
    """
    cls = stock_class(type(model))
    try:
        key = (cls, model.config.to_json_string(use_diff=False))
    except Exception:  # a config of the user's
        return None
    if key not in _KNOWN:
        with _apart():
            try:
                config = config_of(model.config)
                config._attn_implementation = "eager"
                with torch.device("meta"):  # a config with sizes of other names stays large
                    n_parameters = sum(p.numel() for p in cls(config).parameters())
                small = cls(config).train() if n_parameters <= _MOST_PARAMETERS else None
                _KNOWN[key] = None if small is None else training_step(small, inputs_of(cls.__name__))
            except Exception:
                _KNOWN[key] = None
    return _KNOWN[key]


def training_step(model: PreTrainedModel, inputs: dict[str, Any]) -> str | None:
    """Run a step with labels, and return what asked for logits; None if nothing did."""
    head = head_of(model)
    if head is None:
        return "it has no lm_head"
    if (reason := refusal_of(head)) is not None:
        return reason
    set_deferral(head, Deferral())
    try:
        sources: list[Any] = []
        with requested(sources=sources):
            outputs = model(**inputs)
    finally:
        set_deferral(head, None)
    asked_by = next((source.asked_by for source in sources if source.asked_by is not None), None)
    if asked_by is not None:
        return f"{asked_by} takes real logits"
    if outputs.loss is None:
        return "its forward returns no loss"
    return None if isinstance(outputs.logits, DeferredLogits) else "its forward takes real logits"


@contextlib.contextmanager
def _apart() -> Any:
    """Leave no trace: no warnings or log lines, and the caller's random numbers and modes."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)  # torch.manual_seed also seeds GPUs
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
