"""TRL's trainers, without logits.

docs/trainers.md says where each one's loss comes from.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from liger_chunked import versions

versions.require(__name__, "transformers", "trl")

# `LigerXTrainer` is a file's `XMixin` over TRL's `XTrainer`. Imported on first use: trl.experimental warns.
_TRAINERS = {
    "SFT": ("sft", "trl"),
    "DPO": ("preference", "trl"),
    "ORPO": ("preference", "trl.experimental.orpo"),
    "CPO": ("preference", "trl.experimental.cpo"),
    "OnlineDPO": ("preference", "trl.experimental.online_dpo"),
    "KTO": ("unpaired", "trl"),
    "GRPO": ("policy", "trl"),
    "RLOO": ("policy", "trl"),
    "Distillation": ("distillation", "trl"),
    "GKD": ("distillation", "trl.experimental.gkd"),
    "GOLD": ("distillation", "trl.experimental.gold"),
}

_NAMES = sorted([*(f"Liger{kind}Trainer" for kind in _TRAINERS), "add_chunked_lm_head", "chunked_heads"])


def __getattr__(name: str) -> Any:
    if name == "__all__":  # for `import *`, which a name that is listed and missing would fail
        return [name for name in _NAMES if hasattr(sys.modules[__name__], name)]
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not name.startswith("Liger"):
        return getattr(importlib.import_module(f"{__name__}.heads"), name)
    kind = name.removeprefix("Liger").removesuffix("Trainer")
    file, module = _TRAINERS[kind]
    mixin = getattr(importlib.import_module(f"{__name__}.{file}"), f"{kind}Mixin")
    try:
        of_trl = getattr(importlib.import_module(module), f"{kind}Trainer")
    except (ImportError, AttributeError, RuntimeError) as error:  # trl wraps any error in its files into the last
        # hasattr needs an AttributeError, whose text `from ... import` drops: it would say "cannot import name" alone.
        kind_of_error = ImportError if _is_from_import() else AttributeError
        found = versions.installed("trl")
        raise kind_of_error(f"{name} needs {kind}Trainer from {module}, not found in TRL {found}: {error}") from error
    doc = f"{mixin.__doc__.rstrip()}\n\n    For the arguments, see TRL's trainer and `LigerTrainerMixin`."
    trainer = type(name, (mixin, of_trl), {"__module__": __name__, "__doc__": doc})
    return globals().setdefault(name, trainer)


def _is_from_import() -> bool:
    """Whether `from ... import` called `__getattr__`: a function of importlib asks a package for each name there."""
    frame = inspect.currentframe()  # None in a Python without frames: then the answer is no
    caller = frame and frame.f_back and frame.f_back.f_back
    return caller is not None and "importlib" in caller.f_globals.get("__name__", "")


def __dir__() -> list[str]:
    return _NAMES
