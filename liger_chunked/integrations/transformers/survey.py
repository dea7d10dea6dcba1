"""Tell which heads and layers of transformers' classes are served, on small models of default configs."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from liger_chunked.integrations.transformers import tried
from liger_chunked.integrations.transformers.found import found_in
from liger_chunked.integrations.transformers.overrides import LAYER_SWITCHES
from liger_chunked.integrations.transformers.small import config_of, inputs_of


def _names(mapping: dict[str, Any]) -> list[str]:
    values = [names if isinstance(names, (list, tuple)) else (names,) for names in mapping.values()]
    return sorted({name for names in values for name in names})


CAUSAL = _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = [name for name in _names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) if name not in CAUSAL]


def small_model(name: str) -> PreTrainedModel:
    cls = getattr(transformers, name)
    config = config_of(cls.config_class())
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return cls(config).train()


class Row(NamedTuple):
    name: str
    head: str  # "fused", "logits", "not run" or "not built"
    layers: tuple[str, ...]  # switches of `apply_liger_kernel`
    reason: str

    def __str__(self) -> str:
        return f"{self.name:43s} {self.head:9s} {', '.join(self.layers):36s} {self.reason}".rstrip()

    @property
    def markdown(self) -> str:
        head = ": ".join(filter(None, (self.head, self.reason))).replace("|", "\\|")
        return f"| `{self.name}` | {', '.join(self.layers)} | {head} |"


def class_names(patterns: Sequence[str] = ()) -> list[str]:
    """Return the causal and image-text-to-text classes that match a pattern; by default all."""
    names = CAUSAL + IMAGE_TEXT
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatch.fnmatchcase(name.lower(), pattern.lower())}
        if not matches:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or [f"{pattern.rstrip('*')[:3]}*"]
            raise ValueError(
                f"{pattern!r} matches no causal or image-text-to-text class of transformers "
                f"{transformers.__version__}, expected a name or a pattern, such as {', '.join(close)}"
            )
        found |= matches
    return [name for name in names if name in found or not patterns]


def survey(name: str) -> Row:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _survey(name)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _survey(name: str) -> Row:
    try:
        model = small_model(name)
    except Exception as error:
        return Row(name, "not built", (), _sentence(f"{type(error).__name__}: {error}"))
    found = found_in(model, False)
    layers = tuple(switch for switch in (*LAYER_SWITCHES, "rope") if switch in found.switches)
    try:
        with torch.no_grad():
            reason = tried.training_step(model, inputs_of(name))
    except Exception as error:
        return Row(name, "not run", layers, _sentence(f"{type(error).__name__}: {error}"))
    return Row(name, "fused", layers, "") if reason is None else Row(name, "logits", layers, _sentence(reason))


def _sentence(text: str) -> str:
    text = re.sub(r"\S+/site-packages/", "", " ".join(text.split()))  # no path of this machine
    return re.split(r"\.? *\. ", text)[0].rstrip(".")


def lines(names: Iterable[str]) -> Iterator[str]:
    rows = []
    for name in names:
        rows.append(survey(name))
        yield str(rows[-1])
    yield _summary(rows)


def page(names: Iterable[str]) -> str:
    rows = [survey(name) for name in names]
    return "\n".join([_INTRODUCTION, _summary(rows), "", *_HEADER, *(row.markdown for row in rows)])


def _summary(rows: Sequence[Row]) -> str:
    fused, failed = (sum(row.head == head for row in rows) for head in ("fused", "not built"))
    return f"{len(rows)} classes of transformers {transformers.__version__}: {fused} fused heads, {failed} not built."


_HEADER = ("| class | layers | head |", "|---|---|---|")
_INTRODUCTION = """# Supported models

`liger-chunked models --markdown` wrote this page: what `apply_liger_kernel` does with the causal and image-text-to-text
classes of transformers. Each row is one training step of a small copy with random weights: the class's default config,
made small, and a call with labels, whose head [defers its logits](deferred-logits.md). No class was judged by its code.
`liger-chunked models "Qwen*"` runs the rows of the transformers that you have.

- **layers**: switches of `apply_liger_kernel` that match at least one layer. Its report for a model names the classes,
  and those that it left alone.
- **head**: *fused*, if the step computed its loss without logits. Otherwise *logits*, with the code that needed them.
  Such a model trains with real logits: the same loss and gradients, and the memory of stock.
- *not built*, *not run*: transformers cannot build the small copy from the default config here, or cannot run it.
"""
