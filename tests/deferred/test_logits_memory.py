"""The memory and products of programs with deferred logits, against those with stock ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Defer, World, deferred, differences, logps, loss_of, replaced, run, stock
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

from liger_chunked import defer_logits
from liger_chunked.kernels import backend

SIZES = (4, 16, 8, 61)
B, T, H, V = SIZES
PRODUCT = 2 * B * T * H * V


@pytest.fixture(autouse=True)
def small_blocks() -> Any:
    """The kernels on a CPU take blocks of rows too: let one be smaller than the logits."""
    with replaced(backend, "TORCH_BLOCK", {"cpu": 4 * V}):
        yield


def by_position(w: World) -> Any:
    z = w.z()
    return sum(F.cross_entropy(z[:, t], w.ids[:, t]) for t in range(T))


def by_position_with_a_mask(w: World) -> Any:
    z, losses = w.z(), []
    for t in range(T):
        losses.append(F.cross_entropy(z[:, t, :], w.y[:, t], reduction="none", ignore_index=-100))
    return torch.stack(losses, 1).sum(1)


def logps_by_position(w: World) -> Any:
    z = w.z()
    return torch.stack([F.log_softmax(z[:, t], -1).gather(-1, w.ids[:, t, None])[:, 0] for t in range(T)], 1)


def by_sequence(w: World) -> Any:
    return torch.stack([F.cross_entropy(z, ids) for z, ids in zip(w.z(), w.ids, strict=True)])


def by_chunk(w: World) -> Any:
    pairs = zip(w.z().chunk(4, 1), w.ids.chunk(4, 1), strict=True)
    return sum(F.cross_entropy(z.reshape(-1, V), ids.reshape(-1)) for z, ids in pairs)


def accuracy(w: World) -> Any:
    z = w.z()
    return loss_of(w, z), (z.argmax(-1) == w.y).double().mean()


def metrics_without_grad(w: World) -> Any:
    z = w.z()
    loss = loss_of(w, z)
    with torch.no_grad():
        return loss, z.argmax(-1), z.logsumexp(-1), z.mean(-1)


# Name: (program, products more than stock's)
FUSED: dict[str, tuple[Callable[[World], Any], int]] = {
    "loss": (lambda w: loss_of(w, w.z()), 0),
    "loss-none": (lambda w: F.cross_entropy(w.z().flatten(0, 1), w.ids.flatten(), reduction="none"), 1),
    "logps": (lambda w: logps(w, w.z()), 1),
    "logps-of-logsumexp": (lambda w: (lambda z: z.gather(-1, w.ids[..., None])[..., 0] - z.logsumexp(-1))(w.z()), 2),
    "nll": (lambda w: F.nll_loss(w.z().flatten(0, 1).log_softmax(-1), w.ids.flatten()), 1),
    "accuracy": (accuracy, 1),
    "metrics-without-grad": (metrics_without_grad, 3),
    "logsumexp": (lambda w: w.z().logsumexp(-1), 1),
    "argmax": (lambda w: w.z().argmax(-1), 0),
    "mean": (lambda w: w.z().mean(-1), 1),
    "two-losses": (lambda w: (lambda z: loss_of(w, z) + logps(w, z).mean())(w.z()), 4),
    "by-chunk": (by_chunk, 0),
}
# Fused or not: never more than stock.
AS_STOCK: dict[str, Callable[[World], Any]] = {
    "by-position": by_position,
    "by-position-mask": by_position_with_a_mask,
    "logps-by-position": logps_by_position,
    "by-sequence": by_sequence,
    "by-chunk": by_chunk,
    "softmax": lambda w: w.z().softmax(-1).square().sum(-1),
    "softmax-then-loss": lambda w: (lambda z: (z.softmax(-1).square().sum(-1), loss_of(w, z)))(w.z()),
    "softmax-then-metrics": lambda w: (lambda z: (z.softmax(-1)[..., 0], z.argmax(-1), z.logsumexp(-1)))(w.z()),
    "softmax-then-logps": lambda w: (lambda z: (z.softmax(-1)[..., 0], logps(w, z), z.mean(-1)))(w.z()),
    "copy-then-logits": lambda w: (lambda z: ((z * 2).sin().sum(-1), z.sin().sum(-1)))(w.z()),
    "slice-then-logits": lambda w: (lambda z: (z[:, 1:].sin().sum(-1), z.sin().sum(-1)))(w.z()),
    "rows-then-loss": lambda w: (lambda z: (z[w.mask].sin().sum(-1), loss_of(w, z)))(w.z()),
    "detached-then-loss": lambda w: (lambda z: (z.detach().sin().sum(-1), loss_of(w, z)))(w.z()),
    "entropy-then-loss": lambda w: (
        lambda z: (-(z.softmax(-1) * z.log_softmax(-1)).sum(-1).detach(), loss_of(w, z))
    )(w.z()),
    "no-grad-read-then-loss": lambda w: (lambda z: (read_without_grad(z), loss_of(w, z)))(w.z()),
    "edited-then-loss": lambda w: loss_of(w, w.z().clamp_(-2, 2)),
}  # fmt: skip


def read_without_grad(z: Any) -> Tensor:
    with torch.no_grad():
        return z.softmax(-1).max(-1).values


def outcomes(program: Callable[[World], Any], defer: Defer) -> tuple[Any, Any]:
    exact, found = (run(program, d, watched=True, sizes=SIZES) for d in (stock, defer))
    for outcome in (exact, found):
        if outcome.error is not None:
            raise outcome.error
    assert not (texts := differences(found, exact, 1e-12)), texts
    return exact, found


@pytest.mark.parametrize("name", FUSED)
def test_no_tensor_of_the_size_of_logits(name: str) -> None:
    program, more = FUSED[name]
    exact, found = outcomes(program, deferred)
    assert not found.is_computed
    assert found.watch.largest < B * T * V <= exact.watch.largest
    assert found.watch.peak < exact.watch.peak
    assert found.watch.flops <= exact.watch.flops + more * PRODUCT


@pytest.mark.parametrize("name", AS_STOCK)
def test_no_more_than_stock(name: str) -> None:
    """No more products than stock's three, so real logits are computed once for all of their readers.

    A loss for each position takes a fourth: all but the first compute their gradient in the backward, so that not all
    of them keep one of the weight. Of memory, a few small tensors more.
    """
    exact, found = outcomes(AS_STOCK[name], deferred)
    assert found.watch.flops <= exact.watch.flops * (4 / 3 if name.startswith("by-") else 1)
    assert found.watch.peak <= 1.05 * exact.watch.peak


# What stays alive


class Token:
    pass


class Marked(Function):
    """The identity. Its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def graph_of(w: World) -> tuple[Any, Any]:
    """Return logits, and a weak reference to what the graph behind them holds."""
    token = Token()
    z = w.head(Marked.apply(w.hidden(), token))
    return z, weakref.ref(token)


KEPT: dict[str, Callable[[World, Any], Any]] = {
    "nothing": lambda w, z: None,
    "detached": lambda w, z: z.detach(),
    "detached-view": lambda w, z: z.detach().view(-1, V),
    "data": lambda w, z: z.data,
    "shape": lambda w, z: z.shape,
    "argmax": lambda w, z: z.argmax(-1),
    "loss-value": lambda w, z: loss_of(w, z).detach(),
    "computed-and-detached": lambda w, z: (z.softmax(-1), z.detach())[1],
}


@pytest.mark.parametrize("defer", [deferred, stock], ids=["deferred", "stock"])
@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_what_is_kept_pins_no_graph(kept: str, after_backward: bool, defer: Defer) -> None:
    """As a trainer that keeps detached logits of all steps for its metrics."""
    gc.collect()
    gc.disable()
    try:
        w = World(defer, sizes=SIZES)
        z, token = graph_of(w)
        loss = loss_of(w, z)
        keep = KEPT[kept](w, z)
        if after_backward:
            loss.backward()
        del z, loss
        assert token() is None
        del keep
    finally:
        gc.enable()


@pytest.mark.parametrize("defer", [deferred, stock], ids=["deferred", "stock"])
def test_hidden_states_are_freed(defer: Defer) -> None:
    """With the logits and the loss, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        w = World(defer, sizes=SIZES)
        h = w.hidden() * 2
        freed = weakref.ref(h)
        z = w.head(h)
        loss = loss_of(w, z)
        accuracy = (z.argmax(-1) == w.y).double().mean()
        del h
        loss.backward()
        del z, loss
        assert freed() is None and accuracy >= 0
    finally:
        gc.enable()


def test_hidden_states_are_freed_with_the_heads_backward():
    """The backward of the layers below holds their gradient alone, as after a Linear of torch."""
    expired = []

    class Below(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            expired.append(storage.expired())
            return g

    for defers in (False, True):
        head = nn.Linear(8, 50)
        if defers:
            defer_logits(head)
        hidden = Below.apply(torch.randn(6, 8, requires_grad=True)) * 1
        storage = StorageWeakRef(hidden.untyped_storage())
        loss = F.cross_entropy(head(hidden).float(), torch.arange(6))
        del hidden
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert expired == [True, True]
