"""TRL's trainers, without logits.

docs/trainers.md says where each one's loss comes from.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

REQUIRED = {"trl": "1.13", "transformers": "5.5"}


def check_versions() -> None:
    for package, oldest in REQUIRED.items():
        needs = f"liger_chunked.integrations.trl needs {package} >= {oldest}, found"
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(f"{needs} none: pip install 'liger_chunked[trl]'") from None
        from packaging.version import Version

        if Version(found) < Version(oldest):
            raise ImportError(f"{needs} {found}")


check_versions()

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

__all__ = sorted([*(f"Liger{kind}Trainer" for kind in _TRAINERS), "add_chunked_lm_head", "chunked_heads"])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not name.startswith("Liger"):
        return getattr(importlib.import_module(f"{__name__}.heads"), name)
    kind = name.removeprefix("Liger").removesuffix("Trainer")
    file, module = _TRAINERS[kind]
    mixin = getattr(importlib.import_module(f"{__name__}.{file}"), f"{kind}Mixin")
    of_trl = getattr(importlib.import_module(module), f"{kind}Trainer")
    doc = f"{mixin.__doc__.rstrip()}\n\n    For the arguments, see TRL's trainer and `LigerTrainerMixin`."
    bases: tuple[type[Any], ...] = (mixin, of_trl)
    older, heads = (importlib.import_module(f"{__name__}.{file}") for file in ("older", "heads"))
    if heads.reads_logits(of_trl, mixin.models_without_head):
        older.let_functions_take_stand_ins(of_trl)
        bases = (older.ReadsLogitsMixin, mixin, of_trl)
    trainer = type(name, bases, {"__module__": __name__, "__doc__": doc})
    return globals().setdefault(name, trainer)


def __dir__() -> list[str]:
    return __all__
