"""Code that looks for tensors, and ways to read one: each must find in deferred logits what it finds in stock ones."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_stock import (
    B,
    Case,
    T,
    V,
    World,
    check,
    deferred,
    fused,
    loss_of,
    raises,
    refusable,
    replaced,
)
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

# torch says in warnings that some of these are of no use, such as `.grad` of a tensor that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


# How frameworks walk over an output: by pytrees, by `isinstance`, by `torch.is_tensor`, by a `dtype`.
WALKS: dict[str, Callable[[Any], Any]] = {
    "map-only": lambda out: tree_map_only(torch.Tensor, lambda x: x * 2, out),
    "flatten": lambda out: (lambda leaves, spec: tree_unflatten(leaves, spec))(*tree_flatten(out)),
    "detach": lambda out: tree_map_only(torch.Tensor, lambda x: x.detach(), out),
}


def walked(walk: Callable[[Any], Any]) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = walk({"a": [(w.z(), 1)], "n": 3})["a"][0][0]
        w.note(z.requires_grad, z.dtype, tuple(z.shape))
        return loss_of(w, z)

    return program


def through_a_function(w: World) -> Any:
    """As DDP, FSDP2 and module hooks: all tensors of an output go through one autograd function."""
    flat, spec = tree_flatten({"logits": w.z(), "aux": w.x.sum()})
    index = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    through = Identity.apply(*[flat[i] for i in index])
    for i, x in zip(index, through, strict=True):
        flat[i] = x
    out = tree_unflatten(flat, spec)
    return loss_of(w, out["logits"]) + out["aux"]


# Functions of autograd


class Identity(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradients


class Squares(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x**2).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient[..., None]


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


FUNCTIONS: dict[str, Callable[[World], Any]] = {
    "squares": lambda w: Squares.apply(w.z()),
    "identity-of-two": lambda w: (lambda a, b: loss_of(w, a) + b.square().sum())(*Identity.apply(w.z(), w.hidden())),
    "dirty": lambda w: (lambda z: loss_of(w, Doubled.apply(z)) + loss_of(w, z))(w.z()),
    "after-a-loss": lambda w: (lambda z: loss_of(w, z) + Squares.apply(z).mean())(w.z()),
}


# The user's own monkeypatch of a torch function


def wrapped(owner: Any, name: str, use: Callable[[World, Any], Any]) -> Callable[[World], Any]:
    """A wrapper that counts its calls and doubles the result runs once for each call of the user."""

    def program(w: World) -> Any:
        original, calls = getattr(owner, name), []

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(len(args))
            return original(*args, **kwargs) * 2

        with replaced(owner, name, wrapper):
            result = use(w, w.z())
        w.note(len(calls))
        return result

    return program


def instrumented(w: World) -> Any:
    """A wrapper that reads what it is given, as loggers of shapes and numerics do."""
    original = F.cross_entropy

    @functools.wraps(original)
    def wrapper(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        w.note(tuple(input.shape), input.dtype, isinstance(input, torch.Tensor))
        return original(input, target, *args, **kwargs)

    with replaced(F, "cross_entropy", wrapper):
        return loss_of(w, w.z())


WRAPPED: dict[str, Case] = {
    "cross-entropy": fused(wrapped(F, "cross_entropy", loss_of)),
    "tensor-log-softmax": Case(
        wrapped(torch.Tensor, "log_softmax", lambda w, z: z.log_softmax(-1).gather(-1, w.ids[..., None]))
    ),
    "instrumented": fused(instrumented),
}


# Reading, copying and saving


def saved_and_loaded(z: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(z, file)
    file.seek(0)
    return torch.load(file, **options)


def in_numpy(w: World) -> Any:
    z = w.z().detach()
    return float(np.asarray(z).sum()), float(z.numpy().max()), tuple(np.exp(z.numpy()).shape), float(np.mean(z.numpy()))


def with_buffers(w: World) -> Any:
    """Written into memory that was there before."""
    z = w.z()
    out = torch.empty(B, T, V, dtype=w.dtype)
    with torch.no_grad():
        out.copy_(z)
        other = torch.zeros(2 * B, T, V, dtype=w.dtype)
        other[:B] = z
        torch.add(z, 1, out=other[B:])
    return out, other


def assigned_with_grad(w: World) -> Any:
    whole = torch.zeros(B, T + 1, V, dtype=w.dtype)
    whole[:, 1:] = w.z()
    return F.cross_entropy(whole.view(-1, V), torch.arange(B * (T + 1)) % V)


def of_logits(use: Callable[[Any], Any]) -> Callable[[World], Any]:
    return lambda w: use(w.z())


def read(use: Callable[[Any], Any]) -> Case:
    return Case(of_logits(use))


def read_detached(use: Callable[[Any], Any]) -> Case:
    return Case(lambda w: use(w.z().detach()))


def identities(w: World) -> Any:
    z = w.z()
    w.note(isinstance(z, torch.Tensor), torch.is_tensor(z), torch.is_floating_point(z), torch.is_complex(z))
    w.note(z.is_leaf, z.requires_grad, z.grad_fn is not None, z.device, z.dtype, z.layout, z.ndim, z.shape, z.stride())
    w.note(z.is_contiguous(), z.numel(), z.size(-1), z.dim(), z.element_size(), z.nbytes, z.storage_offset())
    w.note(z.output_nr, z.is_sparse, z.is_quantized, z.is_meta, z.is_cuda, z.retains_grad, z._version)
    w.note(len(z), z.T is not None if z.ndim == 2 else None, z.type(), z.is_inference(), z.is_nested, z.get_device())
    w.note(hash(z) == hash(z), z is z.requires_grad_(), z in [z], {z: 1}[z], callable(z.backward))
    return loss_of(w, z)


def inference_mode(w: World) -> Any:
    with torch.inference_mode():
        z = w.z()
        loss = loss_of(w, z)
        w.note(z.is_inference(), loss.is_inference(), z.requires_grad)
        return [loss.item(), z.argmax(-1).tolist()]


def grad_for_inference_logits(w: World) -> Any:
    """Inference tensors can't be saved for backward."""
    with torch.inference_mode():
        z = w.z()
    return (w.leaf("factor", V) * z).sum()


def grad_disabled_then_enabled(w: World) -> Any:
    with torch.no_grad():
        z = w.z()
    with torch.enable_grad():
        return loss_of(w, z) + w.leaf("factor", V).sum()


def texts(w: World) -> Any:
    """What a text shows of values is left open: it must be one, and name shape or values."""
    z = w.z()
    return [isinstance(f(z), str) and len(f(z)) > 10 for f in (repr, str, format, lambda x: f"{x!r}")]


def copied(copier: Callable[[Any], Any]) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = copier(w.z())
        w.note(z.requires_grad, z.shape)
        return loss_of(w, z)

    return program


def copied_model(copier: Callable[[Any], Any]) -> Callable[[World], Any]:
    """A copy of a model runs its own weights."""

    def program(w: World) -> Any:
        w.model.remember = None
        twin = copier(w.model)
        w.model.remember = twin.remember = w.seen.append
        with torch.no_grad():
            twin.head.weight.mul_(2)
        for name, p in twin.named_parameters():
            w.leaves[f"twin.{name}"] = p
        return loss_of(w, w.model(w.x)), loss_of(w, twin(w.x))

    return program


def functional_call(w: World) -> Any:
    weights = {f"head.{name}": (2 * p).detach().requires_grad_() for name, p in w.head.named_parameters()}
    w.leaves |= weights
    return loss_of(w, torch.func.functional_call(w.model, weights, (w.x,)))


def made_a_leaf(w: World) -> Any:
    z = w.z().detach().requires_grad_()
    w.leaves["z"] = z
    w.note(z.is_leaf, z.requires_grad)
    return loss_of(w, z)


HAS_EINOPS = importlib.util.find_spec("einops") is not None
if HAS_EINOPS:
    import einops

    EINOPS: dict[str, Case] = {
        "einops-rearrange": fused(
            lambda w: F.cross_entropy(einops.rearrange(w.z(), "b t v -> (b t) v"), w.ids.flatten())
        ),
        "einops-classes": fused(lambda w: F.cross_entropy(einops.rearrange(w.z(), "b t v -> b v t"), w.y)),
        "einops-reduce": Case(lambda w: einops.reduce(w.z(), "b t v -> b v", "mean")),
    }
else:
    EINOPS = {}

OTHERS: dict[str, Case] = {
    "through-a-function": Case(through_a_function),
    "identities": fused(identities),
    "inference-mode": fused(inference_mode),
    "inference-then-grad": raises(RuntimeError, grad_for_inference_logits),
    "no-grad-then-grad": fused(grad_disabled_then_enabled),
    "texts": Case(texts),
    "bool": raises(RuntimeError, of_logits(bool)),
    "float": read(lambda z: (float(z[0, 0, 0]), z[1, 2, 3].item(), int(z[0, 0, 1] * 10))),
    "item-of-many": raises(RuntimeError, of_logits(lambda z: z.item())),
    "numpy-with-grad": raises(RuntimeError, of_logits(lambda z: z.numpy())),
    "asarray-with-grad": raises(RuntimeError, of_logits(lambda z: np.asarray(z))),
    "numpy": Case(in_numpy),
    "dlpack": read_detached(torch.from_dlpack),
    "dlpack-with-grad": raises(BufferError, of_logits(lambda z: torch.from_dlpack(z))),
    "buffers": Case(with_buffers),
    "assigned": Case(assigned_with_grad),
    "data-ptr": read_detached(lambda z: (z.data_ptr() != 0, z.untyped_storage().nbytes())),
    "tensor-class": read(lambda z: torch.Tensor.argmax(z, -1)),
    "ops": read(lambda z: torch.ops.aten.sum.dim_IntList(z, [-1])),
    "reflected": read(lambda z: 2 * z + (1 - z) + 1 / (z * z + 1) + 2.0**z),
    "copy": Case(copied(copy.copy)),
    "deepcopy-with-grad": raises(RuntimeError, copied(copy.deepcopy)),
    "deepcopy": Case(copied(lambda z: copy.deepcopy(z.detach()))),
    "pickle-with-grad": refusable(copied(lambda z: pickle.loads(pickle.dumps(z)))),
    "pickle": Case(copied(lambda z: pickle.loads(pickle.dumps(z.detach())))),
    "save": Case(copied(lambda z: saved_and_loaded(z.detach(), weights_only=True))),
    "share-memory": Case(copied(lambda z: z.detach().clone().share_memory_())),
    "model-deepcopy": fused(copied_model(copy.deepcopy)),
    "model-pickle": fused(copied_model(lambda m: pickle.loads(pickle.dumps(m)))),
    "model-save": fused(copied_model(lambda m: saved_and_loaded(m, weights_only=False))),
    "functional-call": fused(functional_call),
    "leaf": Case(made_a_leaf),
    "requires-grad-false": raises(RuntimeError, of_logits(lambda z: z.requires_grad_(False))),
    "no-attribute": raises(AttributeError, of_logits(lambda z: z.nothing)),
}

CASES: dict[str, Case] = {
    **{f"walk-{name}": fused(walked(walk)) for name, walk in WALKS.items()},
    **{f"function-{name}": Case(program) for name, program in FUNCTIONS.items()},
    **{f"wrapped-{name}": case for name, case in WRAPPED.items()},
    **OTHERS,
    **EINOPS,
}


@pytest.mark.parametrize("name", CASES)
def test_containers(name: str) -> None:
    check(CASES[name], deferred)


def test_deferred_logits_are_tensors() -> None:
    w = World()
    z = w.z()
    assert isinstance(z, torch.Tensor) and torch.is_tensor(z) and not z.is_computed and z.asked_by is None
    assert type(z.tensor()) is Tensor and z.is_computed and z.tensor() is z.tensor()
    assert z.tensor().requires_grad and z.tensor().grad_fn is not None
    torch.testing.assert_close(z.tensor(), F.linear(w.hidden(), w.head.weight, w.head.bias))


@pytest.mark.parametrize(
    ("name", "use"), [("sigmoid", torch.sigmoid), ("relu", F.relu), ("sort", lambda z: torch.sort(z))]
)
def test_who_asked(name: str, use: Callable[[Any], Any]) -> None:
    z = World().z()
    use(z)
    assert z.is_computed and z.asked_by is not None and name in z.asked_by


def test_evaluation_mode_is_stock() -> None:
    w = World()
    w.model.eval()
    assert type(w.z()) is Tensor
    w.model.train()
    w.handles[0].remove()
    assert type(w.z()) is Tensor
