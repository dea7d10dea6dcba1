"""What changes in memory between the head and the end of backward: stock's value, stock's error, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import BOUND, Case, Defer, V, World, check, deferred, fused, raises, refusable, run, stock
from torch import Tensor, nn


def loss_of(z: Any, **options: Any) -> Tensor:
    rows = z.reshape(-1, z.shape[-1])
    return F.cross_entropy(rows, torch.arange(rows.shape[0]) * 5 % rows.shape[1], **options)


def logps(z: Any, ids: Tensor) -> Any:
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


# What is taken from logits before they are edited

MADE: dict[str, Callable[[World, Any], Any]] = {
    "contiguous": lambda w, z: z.contiguous(),
    "contiguous-copy": lambda w, z: z.transpose(0, 1).contiguous(),
    "clone": lambda w, z: z.clone(),
    "times-1": lambda w, z: z * 1.0,
    "plus-0": lambda w, z: z + torch.zeros(V, dtype=z.dtype),
    "double": lambda w, z: z.double(),
    "float32": lambda w, z: z.float(),
    "to-copy": lambda w, z: z.to(z.dtype, copy=True),
    "view": lambda w, z: z.view(-1, V),
    "reshape-copy": lambda w, z: z.transpose(0, 1).reshape(-1, V),
    "slice": lambda w, z: z[:, 1:],
    "vocabulary": lambda w, z: z[..., : V - 2],
    "select": lambda w, z: z[1],
    "unbind": lambda w, z: z.unbind(0)[1],
    "split": lambda w, z: z.split(2, dim=1)[1],
    "rows": lambda w, z: z[:, [0, 2]],
    "mask": lambda w, z: z[w.mask],
    "index-select": lambda w, z: z.index_select(1, torch.tensor([3, 0])),
    "softcap": lambda w, z: (z / 3).tanh() * 3,
    "temperature": lambda w, z: z / 0.7,
    "log-softmax": lambda w, z: z.log_softmax(-1),
    "detach": lambda w, z: z.detach(),
    "data": lambda w, z: z.data,
    "alias": lambda w, z: z.view_as(z),
    "slice-of-copy": lambda w, z: (z * 2)[:, 1:],
    "cast-of-slice": lambda w, z: z[:, :-1].contiguous().to(torch.float64),
}  # fmt: skip


def assigned(where: Any, value: Any) -> Callable[[World, Any], Any]:
    def edit(w: World, z: Any) -> None:
        z[where] = value

    return edit


def masked_rows(w: World, z: Any) -> None:
    z[~w.mask] = 0.5


def without_grad(edit: Callable[[World, Any], Any]) -> Callable[[World, Any], Any]:
    def run(w: World, z: Any) -> None:
        with torch.no_grad():
            edit(w, z)

    return run


def augmented(operator: str, value: Any) -> Callable[[World, Any], Any]:
    def edit(w: World, z: Any) -> None:
        getattr(z, operator)(value)

    return edit


def data_assigned(w: World, z: Any) -> None:
    z.data = w.constant(*z.shape)


def by_numpy(w: World, z: Any) -> None:
    z.detach().numpy()[..., 3] = -5.0


def by_dlpack(w: World, z: Any) -> None:
    torch.from_dlpack(z.detach())[..., 3] = -5.0


EDITS: dict[str, Callable[[World, Any], Any]] = {
    "fill_": lambda w, z: z.fill_(0.25),
    "zero_": lambda w, z: z.zero_(),
    "ellipsis": assigned(..., 0.25),
    "class": assigned((..., 3), -5.0),
    "position": assigned((slice(None), 0), 0.25),
    "rows": masked_rows,
    "relu": lambda w, z: F.relu(z, inplace=True),
    "relu-module": lambda w, z: nn.ReLU(inplace=True)(z),
    "dropout": lambda w, z: F.dropout(z, 0.5, inplace=True),
    "masked_fill_": lambda w, z: z.masked_fill_(torch.arange(V) == 2, -3.0),
    "add_": lambda w, z: z.add_(w.adv[..., None]),
    "mul_": lambda w, z: z.mul_(2.0),
    "mul_-leaf": lambda w, z: z.mul_(w.leaf("factor", V)),
    "div_": lambda w, z: z.div_(0.7),
    "iadd": augmented("__iadd__", 1.0),
    "imul": augmented("__imul__", 3.0),
    "clamp_": lambda w, z: z.clamp_(-1, 1),
    "tanh_": lambda w, z: z.tanh_(),
    "exp_": lambda w, z: z.exp_(),
    "copy_": lambda w, z: z.copy_(w.leaf("other", *z.shape)),
    "index_fill_": lambda w, z: z.index_fill_(1, torch.tensor([0, 2]), 0.5),
    "scatter_": lambda w, z: z.scatter_(-1, w.ids[..., None], 0.5),
    "index_put_": lambda w, z: z.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(0.5, dtype=w.dtype)),
    "foreach-add": lambda w, z: torch._foreach_add_([z], 1.0),
    "foreach-mul": lambda w, z: torch._foreach_mul_([z], 2.0),
    "foreach-zero": lambda w, z: torch._foreach_zero_([z]),
    "out": without_grad(lambda w, z: torch.add(z.detach(), 1.0, out=z.detach())),
    "out-with-grad": lambda w, z: torch.add(z, 1.0, out=z),
    "out-of-others": without_grad(lambda w, z: torch.mul(w.adv[..., None], torch.ones(V).double(), out=z.detach())),
    "data-fill": lambda w, z: z.data.fill_(0.25),
    "data-class": lambda w, z: z.data.__setitem__((..., 3), -5.0),
    "data-mul": lambda w, z: z.data.mul_(2),
    "data-assigned": data_assigned,
    "detach-mul_": lambda w, z: z.detach().mul_(2),
    "no-grad-mul_": without_grad(lambda w, z: z.mul_(2)),
    "no-grad-class": without_grad(assigned((..., 3), -5.0)),
    "view-mul_": lambda w, z: z.view(-1, V)[2:].mul_(2),
    "slice-fill_": lambda w, z: z[:, 1:].fill_(0.25),
    "vocabulary-fill_": lambda w, z: z[..., V - 3 :].fill_(-9.0),
    "transpose-add_": lambda w, z: z.transpose(0, 1)[2].add_(1.0),
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "requires-grad": lambda w, z: z.requires_grad_(False),
    "none": lambda w, z: None,
}  # fmt: skip

READS: dict[str, Callable[[Any], Any]] = {
    "values": lambda x: (x * 1.0).sum(-1),
    "loss": lambda x: loss_of(x),
    "logps": lambda x: x.log_softmax(-1)[..., 0] + x.logsumexp(-1) + x.mean(-1),
}


def made_then_edited(make: str, edit: str, read: str, of: str) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.z()
        made = MADE[make](w, z)
        EDITS[edit](w, z)
        return [READS[read](x) for x in ((made,) if of == "made" else (made, z))]

    return program


def edited_copy(make: str, edit: str, read: str) -> Callable[[World], Any]:
    """The edit is of what was made: logits change if that is a view of them."""

    def program(w: World) -> Any:
        z = w.z()
        made = MADE[make](w, z)
        EDITS[edit](w, made)
        return [READS[read](x) for x in (z, made)]

    return program


def edited_after_the_loss(edit: str, loss: Callable[[World, Any], Any]) -> Callable[[World], Any]:
    """The loss has what its backward needs, or torch says that this has changed."""

    def program(w: World) -> Any:
        z = w.z()
        value = loss(w, z)
        EDITS[edit](w, z)
        return [value, loss(w, z)]

    return program


def check_all(programs: dict[str, Case], defer: Defer) -> None:
    """Check many programs, and say which of them differ."""
    wrong = {}
    for name, case in programs.items():
        try:
            check(case, defer)
        except Exception as error:
            wrong[name] = str(error).split("\n")[0][:200] if isinstance(error, AssertionError) else repr(error)[:200]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(programs)}:", *(f"{k}: {v}" for k, v in wrong.items())])


LOSSES: dict[str, Callable[[World, Any], Any]] = {
    "cross-entropy": lambda w, z: loss_of(z),
    "none": lambda w, z: loss_of(z, reduction="none"),
    "logps": lambda w, z: logps(z, w.ids),
    "gather": lambda w, z: z.gather(-1, w.ids[..., None]),
    "logsumexp": lambda w, z: z.logsumexp(-1),
    "mean": lambda w, z: z.mean(-1),
    "argmax": lambda w, z: z.argmax(-1),
    "softcap": lambda w, z: loss_of((z / 3).tanh() * 3),
    "slice": lambda w, z: loss_of(z[:, 1:]),
}


UNCOUNTED = ("data-fill", "data-class", "data-mul", "data-assigned", "numpy", "dlpack")
# These edits have no meaning for other shapes than that of logits.
OF_LOGITS = ("mul_-leaf", "masked_fill_", "rows", "add_", "scatter_", "out-of-others", "vocabulary-fill_")


def edits_of(edit: str) -> dict[str, Case]:
    def case(program: Callable[[World], Any], make: str = "") -> Case:
        uncounted = edit in UNCOUNTED
        refusable = edit == "data-assigned" and make == "float32"  # another dtype
        return Case(
            program,
            may_raise=True,
            refusable=refusable,
            uncounted=uncounted,
            bound=1e-5 if make == "float32" else BOUND,
        )

    cases = {
        f"{make}-{read}-{of}": case(made_then_edited(make, edit, read, of), make)
        for make in MADE
        for read, of in (("values", "both"), ("loss", "made"), ("logps", "both"))
    }
    cases |= {f"after-{name}": case(edited_after_the_loss(edit, loss)) for name, loss in LOSSES.items()}
    if edit not in OF_LOGITS:
        cases |= {
            f"edit-of-{make}-{read}": case(edited_copy(make, edit, read), make)
            for make in MADE
            for read in ("values", "loss")
        }
    return cases


@pytest.mark.parametrize("edit", EDITS)
def test_edits(edit: str) -> None:
    """In-place edits of logits, in each of 26 relations to what was made from the logits before."""
    check_all(edits_of(edit), deferred)


@pytest.mark.parametrize("edit", EDITS)
def test_edits_on_stock(edit: str) -> None:
    cases = {name: case for name, case in edits_of(edit).items() if "logps" not in name}
    check_all(cases, stock)
    # Most of them must have values to compare.
    has_error = [run(case.program, stock).error is not None for case in cases.values()]
    assert sum(has_error) < len(cases) / 3 or edit in ("out-with-grad", "requires-grad")  # which torch refuses


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
    "slice-start": (lambda z, t: z[:, t:], 1, 3),
    "slice-stop": (lambda z, t: z[:, :t], 4, 2),
    "slice-both": (lambda z, t: z[t - 1 : t, t:], 2, 1),
    "position": (lambda z, t: z[:, t], 1, 3),
    "select": (lambda z, t: z.select(1, int(t)), 1, 3),
    "narrow": (lambda z, t: z.narrow(1, t, 2), 1, 3),
    "rows": (lambda z, t: z[:, t], [0, 2], [1, 3]),
    "rows-2d": (lambda z, t: z[t], [[0, 2]], [[1, 1]]),
    "mask": (lambda z, t: z[t], [True, False, True], [False, True, False]),
    "mask-2d": (lambda z, t: z[t], torch.eye(3, 5, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool)),
    "index-select": (lambda z, t: z.index_select(1, t), [0, 2], [1, 3]),
    "times": (lambda z, t: z * t, 0.5, 2.0),
    "divided": (lambda z, t: z / t, 0.5, 2.0),
    "times-item": (lambda z, t: z * t.item(), 0.5, 2.0),
    "plus": (lambda z, t: z + t, 0.5, 2.0),
    "plus-vector": (lambda z, t: z + t, RANGE, RANGE.flip(0)),
    "minus-vector": (lambda z, t: z - t, RANGE, RANGE.flip(0)),
    "times-vector": (lambda z, t: z * t, RANGE, RANGE.flip(0)),
    "scale-in-place": (lambda z, t: z.mul_(t), 0.5, 2.0),
    "divided-in-place": (lambda z, t: z.div_(t), 0.5, 2.0),
    "added-in-place": (lambda z, t: z.add_(t), RANGE, RANGE.flip(0)),
    "masked-fill": (lambda z, t: z.masked_fill(t, -2.0), RANGE > 1, RANGE < 1),
    "softcap": (lambda z, t: (z / t).tanh() * t, 3.0, 5.0),
    "view-size": (lambda z, t: z.view(t, -1, V), 3, 5),
    "cast": (lambda z, t: z.to(t.dtype) + t, RANGE, RANGE.flip(0)),
}

# These read a number: a refusal would be for nothing.
OF_NUMBERS = ("slice-start", "slice-stop", "slice-both", "select", "narrow", "times-item", "view-size")


# What backward reads changes between forward and backward: torch's version error, or the gradient without the change

Make = Callable[[World], tuple[Tensor, Tensor]]


def refilled(make: Make, value: Any = None) -> Callable[[World], Any]:
    """`make` returns a loss and a tensor that its backward reads."""

    def program(w: World) -> Any:
        loss, read = make(w)
        with torch.no_grad():
            read.copy_(read.flip(0) if value is None else torch.as_tensor(value))
        loss.backward()
        return loss.detach()

    return program


def never_another(make: Make, value: Any = None) -> Case:
    """A loss that computes its gradient with its value reads nothing later: it may go on as if nothing changed."""
    return raises(RuntimeError, refilled(make, value))


def with_targets(use: Callable[[Any, Tensor], Tensor]) -> Make:
    def make(w: World) -> Any:
        y = w.ids.clone()
        return use(w.z(), y), y

    return make


def with_class_weights(w: World) -> Any:
    weight = RANGE.clone()
    return F.cross_entropy(w.rows(), w.y.view(-1), weight), weight


def with_factor(w: World) -> Any:
    t = torch.tensor([0.5], dtype=torch.float64)
    return loss_of(w.z() * t), t


def with_rows(w: World) -> Any:
    rows = torch.tensor([0, 2])
    return loss_of(w.z()[:, rows]), rows


def with_mask(w: World) -> Any:
    mask = torch.eye(3, 5, dtype=torch.bool)
    return loss_of(w.z()[mask]), mask


def with_teacher(w: World) -> Any:
    target = w.z_teacher().detach().softmax(-1)
    return F.kl_div(w.z().log_softmax(-1), target, reduction="batchmean"), target


def take_along_dim(z: Any, y: Tensor) -> Tensor:
    return torch.take_along_dim(z.log_softmax(-1), y[..., None], -1).mean()


TARGETS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "none": lambda z, y: F.cross_entropy(z.mT, y, reduction="none").square().mean(),
    "smoothing": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), label_smoothing=0.1),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(-1).view(-1, V), y.view(-1)),
    "row": lambda z, y: F.cross_entropy(z[0], y[0]),
    "gather": lambda z, y: z.gather(-1, y[..., None]).mean(),
    "logps": lambda z, y: logps(z, y).mean(),
    "logps-squared": lambda z, y: logps(z, y).square().mean(),
}
REFILLED: dict[str, Case] = {
    **{f"targets-{name}": never_another(with_targets(use)) for name, use in TARGETS.items()},
    # torch's take_along_dim keeps a copy of the ids. A copy of targets is what backward reads, not the targets.
    "targets-take": refusable(refilled(with_targets(take_along_dim))),
    "targets-copy": fused(refilled(with_targets(lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1).clone())))),
    "class-weights": never_another(with_class_weights),
    "factor": never_another(with_factor, [2.0]),
    "rows": never_another(with_rows),
    "mask": never_another(with_mask),
    "teacher": never_another(with_teacher),
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
    "weight-copy": lambda w, h: w.head.weight.copy_(w.head.weight.flip(0)),
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
        f"later-{name}-{'grad' if grad else 'no-grad'}": Case(
            changed_later(make, value, other, grad),
            may_raise=True,
            refusable=name not in OF_NUMBERS,
        )
        for name, (make, value, other) in CHANGED.items()
        for grad in (True, False)
    },
    **{f"refilled-{name}": case for name, case in REFILLED.items()},
    **{
        # With a gradient, stock says that what its backward reads has changed; argmax alone has no backward.
        f"{name}-{when}-{reader}-{'grad' if grad else 'no-grad'}": Case(
            between(change, READERS[reader], grad, when),
            may_raise=True,
            refusable=when == "head",
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
    **{f"metric-before-step-{n}": Case(steps(m, True)) for n, m in (("argmax", lambda z: z.argmax(-1)),)},
    **{
        f"metric-after-step-{n}": refusable(steps(m, False))
        for n, m in (("argmax", lambda z: z.argmax(-1)), ("softmax", lambda z: z.softmax(-1).square()))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_changes(name: str) -> None:
    check(CASES[name], deferred)


@pytest.mark.parametrize("name", CASES)
def test_changes_on_stock(name: str) -> None:
    check(CASES[name], stock)
