from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

_ROOT = "liger_kernel"
_HERE = "liger_chunked.compat"
_LOSSES = (f"{_HERE}.chunked_loss", f"{_HERE}.chunked_loss.functional")
_LAYERS = (f"{_HERE}.transformers", f"{_HERE}.transformers.functional", f"{_HERE}.ops")
_OPS = (f"{_HERE}.ops",)
# Liger-Kernel's modules, and those of `compat` that serve or refuse their names.
_SERVED: dict[str, tuple[str, ...]] = {
    "": (_HERE,),
    "chunked_loss": _LOSSES[:1],
    "chunked_loss.functional": _LOSSES[1:],
    "transformers": _LAYERS[:1],
    "transformers.functional": _LAYERS[1:],
    "ops": _OPS,
    **{
        f"chunked_loss.{name}": _LOSSES
        for name in """
            cosine_similarity_loss cpo_loss dpo_loss fused_linear_distillation fused_linear_ppo
            fused_linear_preference fused_linear_unpaired_preference grpo_loss jsd_loss kto_loss orpo_loss simpo_loss
        """.split()
    },
    **{
        f"transformers.{name}": _LAYERS
        for name in """
            auto_model cross_entropy dyt fused_add_rms_norm fused_ce_tvd fused_linear_cross_entropy fused_linear_jsd
            fused_linear_kl_div geglu group_norm grpo_loss jsd kl_div layer_norm llama4_rope mhc mlp
            modulated_rms_norm monkey_patch multi_token_attention poly_norm qwen2vl_mrope relu_squared rms_norm rope
            softmax sparsemax swiglu tiled_mlp trainer_integration tvd vocab_parallel_cross_entropy
        """.split()
    },
    **{
        f"ops.{name}": _OPS
        for name in """
            cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu grpo_loss jsd kl_div
            layer_norm rms_norm rope swiglu tiled_mlp tvd
        """.split()
    },
}


class _Finder(MetaPathFinder, Loader):
    """Finds Liger-Kernel's modules below the name of a package.

    Below `liger_kernel` it finds all and refuses others. Below this package it finds the modules inside `chunked_loss`,
    `transformers` and `ops`, which are no files here.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.root and not fullname.startswith(f"{self.root}."):
            return None
        if self._name_of(fullname) in _SERVED:
            return spec_from_loader(fullname, self, is_package=True)
        if self.root == _ROOT:
            served = ", ".join(f"{_ROOT}.{name}".removesuffix(".") for name in _SERVED if "." not in name)
            raise ModuleNotFoundError(
                f"{fullname} is not served: liger_chunked.compat stands for liger_kernel and has {served}; see "
                "docs/compare.md",
                name=fullname,
            )
        return None

    def _name_of(self, fullname: str) -> str:
        return fullname.removeprefix(self.root).removeprefix(".")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        served = [import_module(name) for name in _SERVED[self._name_of(module.__name__)]]

        def lookup(name: str) -> Any:
            unknown = []
            for source in served:
                try:
                    return getattr(source, name)
                except AttributeError as error:
                    unknown.append(error)
            raise unknown[0]

        module.__doc__ = served[0].__doc__
        if module.__name__ == _ROOT:
            # Frameworks compare it with the oldest liger_kernel that they take. They get no: their own patches expect
            # internals of that package. Without a version, transformers raises InvalidVersion.
            vars(module)["__version__"] = "0"
        vars(module)["__getattr__"] = lookup
        vars(module)["__dir__"] = lambda: sorted({name for source in served for name in dir(source)})


_finder = _Finder(_ROOT)
# Last, so that it is asked for what is no file alone.
sys.meta_path.append(_Finder(_HERE))


def _imported() -> list[str]:
    return [name for name in sys.modules if name == _ROOT or name.startswith(f"{_ROOT}.")]


def install(*, force: bool = False) -> None:
    """Let every `import liger_kernel` from now on resolve to `liger_chunked.compat`.

    Raises RuntimeError if Liger-Kernel is already imported, or installed and `force` is False.
    """
    if _finder in sys.meta_path:
        return
    if _imported():
        raise RuntimeError("liger_kernel is already imported: call liger_chunked.compat.install() before its import")
    if not force and find_spec(_ROOT) is not None:
        raise RuntimeError(
            "Liger-Kernel is installed: uninstall it, or call liger_chunked.compat.install(force=True) to hide it"
        )
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo `install`. Modules imported meanwhile keep their names."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for name in _imported():
            del sys.modules[name]
