"""What changes in memory between the head and the end of backward: stock's value, stock's error, or a refusal.

Random programs (programs.py) edit logits and their copies in place. Here other tensors change: what operations on
logits read, targets, hidden states and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Case, V, World, check, deferred, fused, raises, refusable
from torch import Tensor, nn


def loss_of(z: Any, **options: Any) -> Tensor:
    rows = z.reshape(-1, z.shape[-1])
    return F.cross_entropy(rows, torch.arange(rows.shape[0]) * 5 % rows.shape[1], **options)


def logps(z: Any, ids: Tensor) -> Any:
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


# Edits of logits beside views and copies of them that were made before. Random programs have such edits in chains, but
# draw each of these rarely.

MADE: dict[str, Callable[[Any], Any]] = {
    "view": lambda z: z.view(-1, V),
    "slice": lambda z: z[:, 1:],
    "copy": lambda z: z.clone(),
}


def by_numpy(w: World, z: Any) -> None:
    z.detach().numpy()[..., 3] = -5.0


def by_data(w: World, z: Any) -> None:
    z.data = w.constant(*z.shape)


EDITS: dict[str, Callable[[World, Any], Any]] = {
    "foreach-mul": lambda w, z: torch._foreach_mul_([z], 2.0),
    "foreach-zero": lambda w, z: torch._foreach_zero_([z]),
    "out": lambda w, z: torch.add(z.detach(), 1.0, out=z.detach()),
    "scatter_": lambda w, z: z.scatter_(-1, w.ids[..., None], 0.5),
    "copy_": lambda w, z: z.copy_(w.leaf("other", *z.shape)),
    "dropout": lambda w, z: F.dropout(z, 0.5, inplace=True),
    "numpy": by_numpy,
    "data": by_data,
}


def edited(make: Callable[[Any], Any], edit: Callable[[World, Any], Any], of_made: bool) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.z()
        made = make(z)
        edit(w, made if of_made and made.ndim == z.ndim else z)
        return [y for x in (made, z) for y in ((x * 1.0).sum(-1), loss_of(x))]

    return program


# Tensors that an operation on logits reads, and that change later


def changed_later(
    make: Callable[[Any, Any], Any], value: Any, other: Any, with_grad: bool = True
) -> Callable[[World], Any]:
    """`make(logits, t)` takes the tensor t at its value of then, `other` comes before anything is read."""

    def program(w: World) -> Any:
        t = torch.as_tensor(value).clone()
        with torch.set_grad_enabled(with_grad):
            z = w.z()
            made = make(z, t)
            t.copy_(torch.as_tensor(other))
            return [made.sum(-1), loss_of(made)]

    return program


RANGE = torch.linspace(0.5, 2, V, dtype=torch.float64)
CHANGED: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
    "slice": (lambda z, t: z[t - 1 : t, t:], 2, 1),
    "position": (lambda z, t: z[:, t], 1, 3),
    "narrow": (lambda z, t: z.narrow(1, t, 2), 1, 3),
    "rows": (lambda z, t: z[:, t], [0, 2], [1, 3]),
    "mask": (lambda z, t: z[t], torch.eye(3, 5, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool)),
    "index-select": (lambda z, t: z.index_select(1, t), [0, 2], [1, 3]),
    "times": (lambda z, t: z * t, 0.5, 2.0),
    "times-item": (lambda z, t: z * t.item(), 0.5, 2.0),
    "plus-vector": (lambda z, t: z + t, RANGE, RANGE.flip(0)),
    "times-vector": (lambda z, t: z * t, RANGE, RANGE.flip(0)),
    "divided-in-place": (lambda z, t: z.div_(t), 0.5, 2.0),
    "added-in-place": (lambda z, t: z.add_(t), RANGE, RANGE.flip(0)),
    "masked-fill": (lambda z, t: z.masked_fill(t, -2.0), RANGE > 1, RANGE < 1),
    "softcap": (lambda z, t: (z / t).tanh() * t, 3.0, 5.0),
    "view-size": (lambda z, t: z.view(t, -1, V), 3, 5),
    "cast": (lambda z, t: z.to(t.dtype) + t, RANGE, RANGE.flip(0)),
}
# These read a number: a refusal would be for nothing.
OF_NUMBERS = ("slice", "narrow", "times-item", "view-size")


# What backward reads changes between forward and backward: torch's version error, or the gradient without the change

Make = Callable[[World], tuple[Tensor, Tensor]]


def refilled(make: Make, value: Any = None) -> Case:
    """`make` returns a loss and a tensor that its backward reads.

    A loss that computes its gradient with its value reads nothing later: it may go on as if nothing changed.
    """

    def program(w: World) -> Any:
        loss, read = make(w)
        with torch.no_grad():
            read.copy_(read.flip(0) if value is None else torch.as_tensor(value))
        loss.backward()
        return loss.detach()

    return raises(RuntimeError, program)


def with_targets(use: Callable[[Any, Tensor], Tensor]) -> Make:
    def make(w: World) -> Any:
        y = w.ids.clone()
        return use(w.z(), y), y

    return make


def with_read(use: Callable[[World, Tensor], Tensor], value: Any) -> Make:
    def make(w: World) -> Any:
        t = torch.as_tensor(value).clone()
        return use(w, t), t

    return make


def with_teacher(w: World) -> Any:
    target = w.z_teacher().detach().softmax(-1)
    return F.kl_div(w.z().log_softmax(-1), target, reduction="batchmean"), target


TARGETS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "none": lambda z, y: F.cross_entropy(z.mT, y, reduction="none").square().mean(),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(-1).view(-1, V), y.view(-1)),
    "gather": lambda z, y: z.gather(-1, y[..., None]).mean(),
    "logps-squared": lambda z, y: logps(z, y).square().mean(),
}
REFILLED: dict[str, Case] = {
    **{f"targets-{name}": refilled(with_targets(use)) for name, use in TARGETS.items()},
    "class-weights": refilled(with_read(lambda w, t: F.cross_entropy(w.rows(), w.y.view(-1), t), RANGE)),
    "factor": refilled(with_read(lambda w, t: loss_of(w.z() * t), torch.tensor([0.5], dtype=torch.float64)), [2.0]),
    "rows": refilled(with_read(lambda w, t: loss_of(w.z()[:, t]), [0, 2])),
    "mask": refilled(with_read(lambda w, t: loss_of(w.z()[t]), torch.eye(3, 5, dtype=torch.bool))),
    "teacher": refilled(with_teacher),
}


# Hidden states and weights change


def between(
    change: Callable[[World, Tensor], Any], read: Callable[[World, Any], Any], grad: bool = True, when: str = "head"
) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        with torch.set_grad_enabled(grad):
            h = w.hidden().clone()
            z = w.head(h)
            w.seen.append(z)
            value = None if when == "head" else read(w, z)
            with torch.no_grad():
                change(w, h)
            return read(w, z) if value is None else value

    return program


def new_weight(w: World, h: Tensor) -> None:
    w.head.weight = nn.Parameter(w.constant(V, h.shape[-1]))


def new_head(w: World, h: Tensor) -> None:
    w.model.head = nn.Linear(h.shape[-1], V, dtype=w.dtype)


CHANGES: dict[str, Callable[[World, Tensor], Any]] = {
    "hidden": lambda w, h: h.mul_(2),
    "hidden-slice": lambda w, h: h[:, 1:].zero_(),
    "weight": lambda w, h: w.head.weight.mul_(2),
    "weight-row": lambda w, h: w.head.weight[3].zero_(),
    "foreach": lambda w, h: torch._foreach_mul_(list(w.head.parameters()), 2.0),
    "sgd": lambda w, h: (
        [setattr(p, "grad", torch.ones_like(p)) for p in w.head.parameters()],
        torch.optim.SGD(w.head.parameters(), lr=0.1).step(),
        w.head.zero_grad(),
    ),
}
READERS: dict[str, Callable[[World, Any], Any]] = {
    "loss": lambda w, z: loss_of(z),
    "logps": lambda w, z: logps(z, w.ids),
    "values": lambda w, z: (z * 1.0).sum(-1),
    "argmax": lambda w, z: z.argmax(-1),
}


def steps(metric: Callable[[Any], Any], before: bool) -> Callable[[World], Any]:
    """A metric after `optimizer.step()`: that of the old weights, or a refusal."""

    def program(w: World) -> Any:
        optimizer = torch.optim.SGD(w.model.parameters(), lr=0.1)
        z = w.z()
        loss = loss_of(z)
        early = metric(z.detach()) if before else None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), early if before else metric(z.detach())]

    return program


CASES: dict[str, Case] = {
    **{
        f"{edit}-{make}-{'made' if of_made else 'logits'}": Case(
            edited(MADE[make], EDITS[edit], of_made), may_raise=True, uncounted=edit in ("numpy", "data")
        )
        for edit in EDITS
        for make in MADE
        for of_made in (False, True)
        if not (edit == "scatter_" and of_made)
    },
    **{
        f"later-{name}-{'grad' if grad else 'no-grad'}": Case(
            changed_later(make, value, other, grad), may_raise=True, refusable=name not in OF_NUMBERS
        )
        for name, (make, value, other) in CHANGED.items()
        for grad in (True, False)
    },
    **{f"refilled-{name}": case for name, case in REFILLED.items()},
    # A copy of targets is what backward reads, not the targets.
    "targets-copy": fused(
        refilled(with_targets(lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1).clone()))).program
    ),
    **{
        # With a gradient, stock says that what its backward reads has changed; argmax alone has no backward.
        f"{name}-{when}-{reader}-{'grad' if grad else 'no-grad'}": Case(
            between(change, READERS[reader], grad, when), may_raise=True, refusable=when == "head"
        )
        for name, change in CHANGES.items()
        for when in ("head", "loss")
        for reader in READERS
        for grad in (True, False)
    },
    "bias": refusable(between(lambda w, h: w.head.bias.mul_(2), READERS["loss"])),
    "new-weight": fused(between(new_weight, READERS["loss"])),
    "new-head": fused(between(new_head, READERS["loss"])),
    "frozen-head": Case(
        lambda w: (w.head.requires_grad_(False), between(CHANGES["weight"], READERS["loss"])(w))[1], may_raise=True
    ),
    "metric-before-step": Case(steps(lambda z: z.argmax(-1), True)),
    "metric-after-step": refusable(steps(lambda z: z.softmax(-1).square(), False)),
}


@pytest.mark.parametrize("name", CASES)
def test_changes(name: str) -> None:
    check(CASES[name], deferred)
