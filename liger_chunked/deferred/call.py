"""One call of a head, remembered, so that real logits or a loss can be computed later as if at the time of the call."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.deferred.inside import Compute, real_logits, run_inside
from liger_chunked.deferred.switches import Switches
from liger_chunked.private import has_children, own_tensors
from liger_chunked.private import version_of as version_of
from liger_chunked.types import LogitOptions


@dataclass(frozen=True)
class Transform:
    """`outer * tanh(inner * z)`, or `inner * z` without `outer`, of logits z."""

    inner: float = 1.0
    outer: float | None = None

    def times(self, factor: float) -> Transform | None:
        """None: a loss cannot express the product."""
        if not math.isfinite(factor) or factor == 0:
            return None
        if self.outer is None:
            return Transform(self.inner * factor)
        return Transform(self.inner, self.outer * factor) if factor > 0 else None

    def tanh(self) -> Transform | None:
        return Transform(self.inner, 1.0) if self.outer is None else None

    def options(self, **options: Any) -> LogitOptions:
        """Return it as softcap and scale: `softcap * tanh(logit_scale * z / softcap)`."""
        if self.outer is None:
            return LogitOptions(logit_scale=self.inner, **options)
        return LogitOptions(softcap=self.outer, logit_scale=self.inner * self.outer, **options)


class Call:
    """One call of a head: its input, and the modes that were active when the model called it.

    The product runs at most once for real logits, and once for each loss, always as if it ran then: with the same
    autocast, grad mode, weights, adapters and training mode. Dropout, as of an adapter, draws again each time.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, settings: Any) -> None:
        self.head, self.hidden, self.settings = head, hidden, settings
        device = hidden.device.type
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast: tuple[str, torch.dtype, bool, bool] = (
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
            torch.is_autocast_cache_enabled(),
        )
        self.device = _device_of(head, hidden)
        self.switches = Switches(head)
        self.tensors = _tensors_of(head)
        self.versions = [version_of(x) for x in (hidden, *self.tensors.values())]
        self.real: Tensor | None = None
        self.stand_ins: list[weakref.ref[Any]] = []  # all objects made from this call
        self.asked_by: str | None = None  # the function that needed real logits, and its place
        self.gave_zero = False  # whether `withheld` had an effect
        self.withheld = False  # cross entropies return 0, so that a loss shows the terms that the forward adds

    @property
    def dtype(self) -> torch.dtype:
        _, dtype, enabled, _ = self.autocast
        return dtype if enabled and self.hidden.dtype != torch.float64 else self.hidden.dtype

    @property
    def requires_grad(self) -> bool:
        return self.grad and any(x.requires_grad for x in (self.hidden, *self.tensors.values()))

    @contextlib.contextmanager
    def _as_called(self, grad: bool) -> Iterator[None]:
        device, dtype, enabled, cached = self.autocast
        with contextlib.ExitStack() as modes:
            if self.inference and not torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode())
            if grad != torch.is_grad_enabled() and not self.inference:
                modes.enter_context(torch.set_grad_enabled(grad))
            now = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            if now != (dtype, enabled):
                modes.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cached))
            yield

    def _with_its_weights(self, run: Callable[[], Any]) -> Any:
        """Run with the tensors that the head had when it was called; RuntimeError if their values are gone."""
        now = _tensors_of(self.head)
        # accelerate's offloading puts new meta tensors in place of those that it takes away.
        same = now.keys() == self.tensors.keys() and all(
            now[name] is x or (x.is_meta and now[name].is_meta) for name, x in self.tensors.items()
        )
        versions = [version_of(x) for x in (self.hidden, *self.tensors.values())]
        if versions != self.versions or (not same and any(map(_is_freed, self.tensors.values()))):
            what = "the hidden states" if versions[0] != self.versions[0] else "the weights"
            raise RuntimeError(
                f"{what} of {name_of(self.head)} changed after the model called it, and its deferred logits were "
                "not computed before. Compute the loss, or read the logits, before the optimizer steps (and, with a "
                "head that a framework shards, inside the model's forward); or get logits at once: "
                "model(..., skip_logits=False), or handle.remove() of defer_logits"
            )
        with self.switches.restored():
            if same:
                return run()
            # torch.func.functional_call had put other tensors in, and has taken them out again.
            tensors = {f"head.{name}": x for name, x in self.tensors.items()}
            return torch.func.functional_call(_Runner(self.head, run), tensors)

    def logits(self) -> Tensor:
        if self.real is None:
            # Not in the mode of who reads them: others may need their gradient.
            with torch.inference_mode(self.inference), self._as_called(self.grad):
                self.real = self._with_its_weights(functools.partial(real_logits, self.head, self.hidden))
            assert self.real is not None
        return self.real

    def run(self, compute: Compute) -> Any:
        """Return `compute(head, hidden_states)`, called where the head would multiply."""
        with self._as_called(self.grad and torch.is_grad_enabled()):
            return self._with_its_weights(functools.partial(run_inside, self.head, self.hidden, compute))

    def as_computed_now(self, result: Tensor) -> Tensor:
        """Return a loss as an ordinary tensor, which others may save for their backward, outside of inference mode."""
        return result.clone() if result.is_inference() and not torch.is_inference_mode_enabled() else result


class _Runner(nn.Module):
    def __init__(self, head: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.head, self.run = head, run

    def forward(self) -> Any:
        return self.run()


def _tensors_of(head: nn.Module) -> dict[str, Tensor]:
    if not has_children(head):  # most heads: without walking through modules
        return own_tensors(head)
    return {**dict(head.named_parameters(remove_duplicate=False)), **dict(head.named_buffers(remove_duplicate=False))}


def _device_of(head: nn.Module, hidden: Tensor) -> torch.device:
    """Return the device of the logits: with `device_map`, a hook of accelerate moves the hidden states there."""
    device = getattr(getattr(head, "_hf_hook", None), "execution_device", None)
    return hidden.device if device is None else torch.empty(0, device=device).device


def _is_freed(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.numel() > 0 and x.untyped_storage().nbytes() == 0


def name_of(head: nn.Module) -> str:
    return f"the head ({type(head).__name__})"
