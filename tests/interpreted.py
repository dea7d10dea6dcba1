"""What the tests change in Triton's interpreter, in their own processes and in those of ranks."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


def mend() -> None:
    patch_the_language_once()
    check_strides_in_bytes()


def check_strides_in_bytes() -> None:
    """Mend the interpreter of Triton 3.5, which wants descriptors' strides of 16 elements. The GPU wants 16 bytes."""
    from triton.runtime import interpreter

    handle: Any = interpreter.TensorDescHandle
    if "itemsize" in inspect.getsource(handle.validate):
        return

    def validate(self: Any) -> None:
        size = self.base.dtype.element_ty.primitive_bitwidth // 8
        assert self.base.data.item() % 16 == 0, "base must be 16-byte aligned"
        assert all(stride.data.item() * size % 16 == 0 for stride in self.strides[:-1]), "strides must be too"
        assert self.strides[-1].data.item() == 1, "last dim must be contiguous"

    handle.validate = validate


def patch_the_language_once() -> None:
    """Speed up Triton's interpreter, which replaces members of `triton.language` for each launch and each call.

    It looks through hundreds of members for that, and since Triton 3.6 takes its own back after a launch. Here they
    stay: what they do depends on no launch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules: dict[Any, frozenset[str]] = {}  # which a function uses: `tl`, `tl.core` or both
    patched: set[str] = set()
    scope = SimpleNamespace(restore=lambda: None)

    def patch_lang(function: Any) -> Any:
        if function not in modules:
            found = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            modules[function] = frozenset(module.__name__ for module in found if module in (tl, tl.core))
        if not modules[function] <= patched:
            patch(function)
            patched.update(modules[function])
        return scope

    interpreter._patch_lang = patch_lang
