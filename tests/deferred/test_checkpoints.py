"""Checkpoints, hooks of saved tensors, autocast, and heads in another dtype than their body."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import (
    B,
    Case,
    Defer,
    H,
    T,
    V,
    World,
    check,
    deferred,
    fused,
    is_tensor,
    logps,
    loss_of,
    raises,
    replaced,
    run,
    stock,
)
from table import relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_chunked.kernels import backend


def remembered(w: World, z: Any) -> Any:
    w.seen.append(z)
    return z


@pytest.fixture(autouse=True)
def small_blocks() -> Any:
    """The kernels on a CPU take blocks of rows too: let one be smaller than the logits."""
    with replaced(backend, "TORCH_BLOCK", {"cpu": 4 * V}):
        yield


# Checkpoints

Loss = Callable[[World, Any], Any]
Checkpoint = Callable[..., Any]


def of_the_loss(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    return lambda w: cp(lambda z: loss(w, z), w.z())


def of_the_head(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    return lambda w: loss(w, remembered(w, cp(w.head, w.hidden())))


def of_head_and_loss(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    return lambda w: cp(lambda h: loss(w, remembered(w, w.head(h))), w.hidden())


def of_the_body(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    return lambda w: loss(w, remembered(w, w.head(cp(w.model.body, w.x))))


def of_the_model(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    return lambda w: loss(w, cp(w.model, w.x))


def of_model_and_loss(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    return lambda w: cp(lambda x: loss(w, w.model(x)), w.x)


def of_each_sequence(cp: Checkpoint, loss: Loss) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.z()
        parts = [cp(F.cross_entropy, row, ids) for row, ids in zip(z, w.ids, strict=True)]
        return torch.stack(parts).sum()

    return program


PLACES = {
    "loss": of_the_loss,
    "head": of_the_head,
    "head-and-loss": of_head_and_loss,
    "body": of_the_body,
    "model": of_the_model,
    "model-and-loss": of_model_and_loss,
    "each-sequence": of_each_sequence,
}
CHECKPOINTS: dict[str, Checkpoint] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "other": functools.partial(checkpoint, use_reentrant=False),
}


LOSSES: dict[str, Loss] = {"loss": loss_of, "logps": logps}


def twice(reentrant: bool) -> Callable[[World], Any]:
    """Backward twice through one checkpoint."""

    def program(w: World) -> Any:
        loss = checkpoint(lambda x: loss_of(w, w.model(x)), w.x, use_reentrant=reentrant)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return loss.detach()

    return program


def with_real_logits(reentrant: bool) -> Callable[[World], Any]:
    return lambda w: checkpoint(lambda z: z.softmax(-1).square().sum(), w.z(), use_reentrant=reentrant)


def edited_inside(reentrant: bool) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        def part(x: Tensor) -> Any:
            z = w.model(x)
            z[..., 0] = -3.0
            return loss_of(w, z)

        return checkpoint(part, w.x, use_reentrant=reentrant)

    return program


# Hooks of saved tensors


def saved(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[], Any]:
    return lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)


OFFLOADS: dict[str, Callable[[], Any]] = {
    "copies": saved(lambda x: x.detach().clone(), lambda x: x),
    "numpy": saved(lambda x: x.detach().numpy().copy(), lambda x: torch.from_numpy(x)),
    # As an offloader of activations that has a way for floating point and one for the rest.
    "by-kind": saved(lambda x: (x.is_floating_point(), x.detach().clone()), lambda packed: packed[1]),
}


def offloaded(mode: Callable[[], Any], loss: Loss, around: str) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        with mode() if around in ("all", "head") else contextlib.nullcontext():
            z = w.model(w.x)
            if around == "all":
                return loss(w, z)
        with mode() if around == "loss" else contextlib.nullcontext():
            return loss(w, z)

    return program


CASES: dict[str, Case] = {
    **{
        # A reentrant checkpoint of the head alone gives its caller a result without the graph inside.
        f"{how}-{place}-{loss}": Case(
            PLACES[place](CHECKPOINTS[how], LOSSES[loss]), fused=how != "reentrant" or place not in ("head", "model")
        )
        for how in CHECKPOINTS
        for place in PLACES
        for loss in LOSSES
    },
    **{
        f"{'reentrant' if r else 'other'}-{program.__name__}": case(program(r))
        for r in (True, False)
        for program, case in ((with_real_logits, Case), (edited_inside, Case))
    },
    "other-twice": fused(twice(False)),
    "reentrant-twice": fused(twice(True)),
    **{
        f"saved-{mode}-{around}-{loss}": fused(offloaded(OFFLOADS[mode], LOSSES[loss], around))
        for mode in OFFLOADS
        for around in ("all", "head", "loss")
        for loss in LOSSES
    },
    "saved-copies-real": Case(offloaded(OFFLOADS["copies"], lambda w, z: z.softmax(-1).square().sum(), "all")),
}


@pytest.mark.parametrize("name", CASES)
def test_checkpoints(name: str) -> None:
    check(CASES[name], deferred)


PRODUCT = 2 * B * T * H * V


@pytest.mark.parametrize("loss", LOSSES)
def test_one_recomputation(loss: str) -> None:
    """A checkpoint runs the fused loss twice, each time with at most its own three products."""
    program = of_head_and_loss(CHECKPOINTS["other"], LOSSES[loss])
    once = run(lambda w: LOSSES[loss](w, w.z()), deferred, watched=True).watch.flops
    again = run(program, deferred, watched=True).watch.flops
    assert again <= once + 3 * PRODUCT


@pytest.mark.parametrize("loss", LOSSES)
def test_saved_tensors_are_small(loss: str) -> None:
    """Hooks of saved tensors get hidden states, weights and targets, and nothing of the size of the logits."""
    sizes: list[int] = []
    kinds: set[type] = set()

    def pack(x: Tensor) -> Tensor:
        kinds.add(type(x))
        sizes.append(x.numel() if type(x) in (Tensor, nn.Parameter) else 0)
        return x

    check(fused(offloaded(saved(pack, lambda x: x), LOSSES[loss], "all")))
    sizes.clear()
    run(offloaded(saved(pack, lambda x: x), LOSSES[loss], "all"), deferred)
    assert sizes and max(sizes) < B * T * V


# Dtypes: an error of at most 1.1 times eager code's own, against float64

SIZES = (4, 24, 32, 211)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def smoothed(w: World, z: Any) -> Tensor:
    return F.cross_entropy(z.float().flatten(0, 1) if z.dtype != FP64 else z.flatten(0, 1), w.y.flatten(),
                           label_smoothing=0.1)  # fmt: skip


def shifted(w: World, z: Any) -> Tensor:
    z = z.float() if z.dtype != FP64 else z
    return F.cross_entropy(z[:, :-1].contiguous().view(-1, z.shape[-1]), w.y[:, 1:].reshape(-1))


OF_DTYPE: dict[str, Loss] = {
    "loss": loss_of,
    "smoothed": smoothed,
    "shifted": shifted,
    "logps": logps,
    "logsumexp": lambda w, z: torch.logsumexp(z, -1),
    "mean": lambda w, z: z.mean(-1),
    "softcap": lambda w, z: loss_of(w, torch.tanh(z / 5) * 5),
    "softmax": lambda w, z: z.softmax(-1).square().sum(-1),
}


SEEDS = range(8)


def check_errors(program: Callable[[World], Any], dtypes: tuple[torch.dtype, torch.dtype], defer: Defer) -> None:
    """Values and gradients have eager code's dtypes, and at most 1.1 times its error: a root mean square over batches.

    That of n numbers is itself only known to about 1 / sqrt(2 n), and the bound is wider by this for both.
    """
    errors: dict[str, tuple[list[float], list[float], int]] = {}
    for seed in SEEDS:
        body, head = dtypes
        options: dict[str, Any] = {"rounded": dtypes, "sizes": SIZES, "seed": seed}
        exact = run(program, stock, dtype=FP64, **options)
        eager = run(program, stock, dtype=body, head_dtype=head, **options)
        ours = run(program, defer, dtype=body, head_dtype=head, **options)
        for outcome in (exact, eager, ours):
            if outcome.error is not None:
                raise outcome.error
        named = [{**dict(enumerate(x.values)), **x.gradients} for x in (ours, eager, exact)]
        for name, right in named[2].items():
            mine, theirs = named[0][name], named[1][name]
            if not is_tensor(right):
                assert isinstance(right, torch.dtype) or mine == theirs
                continue
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
            of_ours, of_eager, _ = errors.setdefault(str(name), ([], [], right.numel() * len(SEEDS)))
            of_ours.append(relative_error(mine, right))
            of_eager.append(relative_error(theirs, right))
    for name, (of_ours, of_eager, n) in errors.items():
        mean, bound = (sum(e * e for e in x) ** 0.5 / len(SEEDS) ** 0.5 for x in (of_ours, of_eager))
        assert mean <= (1.1 + n**-0.5) * bound + 2e-7, f"{name}: {mean / bound:.2f} times eager code's error"


def under_autocast(loss: Loss, where: str) -> Callable[[World], Any]:
    """float64 has no autocast: its program is the exact one."""

    def program(w: World) -> Any:
        def autocast(here: bool) -> Any:
            return torch.autocast("cpu", BF16, enabled=here and w.dtype != FP64)

        with autocast(where in ("all", "model")):
            h = w.hidden()
            with autocast(where in ("head", "head-and-loss", "all", "model")):
                z = remembered(w, w.head(h))
                if where in ("head-and-loss", "all"):
                    return loss(w, z)
        with autocast(where == "loss"):
            return loss(w, z)

    return program


# Idioms of which no logits exist, in any dtypes.
STAYS_FUSED = ("loss", "shifted", "logps")


def check_stays_fused(program: Callable[[World], Any], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    found = run(program, deferred, dtype=dtypes[0], head_dtype=dtypes[1])
    assert found.error is None and found.is_deferred and not found.is_computed


@pytest.mark.few(8)
@pytest.mark.parametrize("where", ["head", "loss", "head-and-loss", "model", "all"])
@pytest.mark.parametrize("loss", OF_DTYPE)
def test_autocast(loss: str, where: str) -> None:
    program = under_autocast(OF_DTYPE[loss], where)
    check_errors(program, (FP32, FP32), deferred)
    if loss in STAYS_FUSED:
        check_stays_fused(program, (FP32, FP32))


def cast_by_a_hook(loss: Loss) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        w.head.register_forward_pre_hook(lambda head, args: (args[0].to(head.weight.dtype),))
        return loss(w, w.z())

    return program


def backward_of(loss: Loss, upstream: float) -> Loss:
    """A loss whose program runs its own backward, from this upstream gradient."""

    def program(w: World, z: Any) -> Any:
        value = loss(w, z)
        value.backward(torch.full_like(value, upstream))
        return value.detach()

    return program


# In bfloat16 the forward rounds its finished gradients, and the backward multiplies them by the upstream gradient,
# which rounds them again unless it is a power of two. Eager code has the upstream gradient in its logits' gradient,
# before the one rounding. Its error is 1.08 to 1.4 times smaller then, in losses that cast logits to float32: without
# the cast, eager code rounds more often than this. In float16 the sums stay in float32 until the backward.
ROUNDED_AGAIN = ("smoothed", "shifted")
COMBINATIONS = [(a, b) for a in (BF16, FP16, FP32) for b in (BF16, FP16, FP32)]


def name_of(dtypes: tuple[torch.dtype, torch.dtype]) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in dtypes)


@pytest.mark.few(8)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=name_of)
@pytest.mark.parametrize("loss", OF_DTYPE)
def test_a_cast_before_the_head(loss: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Such as a head in float32 on a body in bfloat16."""
    program = OF_DTYPE[loss]
    if dtypes[1] == BF16 and loss in ROUNDED_AGAIN:
        program = backward_of(program, 1.0)  # `test_another_upstream_rounds_once_more` has other upstream gradients
    check_errors(cast_by_a_hook(program), dtypes, deferred)
    if loss in STAYS_FUSED:
        check_stays_fused(cast_by_a_hook(OF_DTYPE[loss]), dtypes)


@pytest.mark.parametrize("upstream", [2.0, 1.3])
@pytest.mark.parametrize("body", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("loss", ROUNDED_AGAIN)
def test_another_upstream_rounds_once_more(loss: str, body: torch.dtype, upstream: float) -> None:
    """The head's bfloat16 gradients for another upstream gradient are those for 1 times it, rounded once."""

    def gradients(factor: float) -> dict[str, Any]:
        program = cast_by_a_hook(backward_of(OF_DTYPE[loss], factor))
        outcome = run(program, deferred, dtype=body, head_dtype=BF16, sizes=SIZES)
        if outcome.error is not None:
            raise outcome.error
        return outcome.gradients

    ones, others = gradients(1.0), gradients(upstream)
    for name in ("model.head.weight", "model.head.bias"):
        assert torch.equal(others[name], (ones[name].float() * upstream).to(BF16)), name


@pytest.mark.parametrize("dtypes", [(a, b) for a, b in COMBINATIONS if a != b], ids=name_of)
def test_mixed_dtypes_are_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """As by torch's own product."""
    case = raises(RuntimeError, lambda w: loss_of(w, w.z()))
    check(case, deferred, dtype=dtypes[0], head_dtype=dtypes[1])
