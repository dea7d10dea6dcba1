"""An `AutoModelForCausalLM` that returns patched models."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from liger_chunked.integrations.transformers.apply import apply_liger_kernel
from liger_chunked.integrations.transformers.families import SWITCHES

_OPTIONS = {"logits_budget", *SWITCHES}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models are patched by `apply_liger_kernel`.

    `from_pretrained` and `from_config` also take the keyword arguments of `apply_liger_kernel`.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        options = _options(kwargs)
        return _patched(super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), options)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        options = _options(kwargs)
        return _patched(super().from_config(*args, **kwargs), options)


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs.pop(name) for name in list(kwargs) if name in _OPTIONS}


def _patched(model: Any, options: dict[str, Any]) -> Any:
    apply_liger_kernel(model, **options)
    return model
