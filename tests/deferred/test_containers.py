"""Code that looks for tensors, and ways to read one: each must find in deferred logits what it finds in stock ones."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import importlib.util
import io
import operator
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
    raises,
    refusable,
    replaced,
    stock,
)
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

# torch says in warnings that some of these are of no use, such as `.grad` of a tensor that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def loss_of(w: World, z: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, V), w.y.reshape(-1))


# What frameworks do with the output of a model


def accelerate_to_fp32(x: Any) -> Any:
    """As accelerate's `convert_to_fp32`, which its wrapper of a model's forward applies to the output."""

    def is_half(t: Any) -> bool:
        return (hasattr(t, "dtype") or isinstance(t, torch.Tensor)) and t.dtype in (torch.float16, torch.bfloat16)

    if isinstance(x, tuple | list):
        return type(x)(*map(accelerate_to_fp32, x)) if hasattr(x, "_fields") else type(x)(map(accelerate_to_fp32, x))
    if isinstance(x, Mapping):
        return type(x)({k: accelerate_to_fp32(v) for k, v in x.items()})
    return x.float() if is_half(x) else x


def apply_to_collection(data: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """As Lightning's, by which Fabric casts outputs and moves batches."""
    if isinstance(data, kind):
        return function(data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: apply_to_collection(getattr(data, f.name), kind, function) for f in dataclasses.fields(data)}
        return dataclasses.replace(data, **fields)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(apply_to_collection(x, kind, function) for x in data))
    if isinstance(data, Mapping):
        return type(data)({k: apply_to_collection(v, kind, function) for k, v in data.items()})
    if isinstance(data, list | tuple):
        return type(data)(apply_to_collection(x, kind, function) for x in data)
    return data


def recursive_detach(x: Any) -> Any:
    """As transformers' `nested_detach` and accelerate's `recursively_apply`."""
    if isinstance(x, list | tuple):
        parts = [recursive_detach(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, Mapping):
        return type(x)({k: recursive_detach(v) for k, v in x.items()})
    return x.detach() if isinstance(x, torch.Tensor) else x


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None
    name: str = "output"


class Pair(NamedTuple):
    logits: Any
    extra: int


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bare": (lambda z: z, lambda out: out),
    "tuple": (lambda z: (z, None), lambda out: out[0]),
    "list": (lambda z: [1, z], lambda out: out[1]),
    "dict": (lambda z: {"logits": z, "n": 3}, lambda out: out["logits"]),
    "ordered": (lambda z: collections.OrderedDict(logits=z), lambda out: out["logits"]),
    "named": (lambda z: Pair(z, 2), lambda out: out.logits),
    "dataclass": (lambda z: Output(z), lambda out: out.logits),
    "nested": (lambda z: {"a": [(z, 1)]}, lambda out: out["a"][0][0]),
}
WALKS: dict[str, Callable[[Any], Any]] = {
    "tree-map": lambda out: tree_map(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, out),
    "tree-map-only": lambda out: tree_map_only(torch.Tensor, lambda x: x * 2, out),
    "tree-flatten": lambda out: (lambda leaves, spec: tree_unflatten(leaves, spec))(*tree_flatten(out)),
    "tree-stop-gradient": lambda out: tree_map_only(torch.Tensor, lambda x: x.detach(), out),
    "is-tensor": lambda out: tree_map(lambda x: x / 2 if torch.is_tensor(x) else x, out),
    "fp32": accelerate_to_fp32,
    "cast": lambda out: apply_to_collection(out, torch.Tensor, lambda x: x.to(torch.float64)),
    "cast-down-and-up": lambda out: apply_to_collection(out, torch.Tensor, lambda x: x.float().double()),
    "collection-scale": lambda out: apply_to_collection(out, torch.Tensor, lambda x: x * 3),
    "detach": recursive_detach,
    "device": lambda out: apply_to_collection(out, torch.Tensor, lambda x: x.to("cpu", non_blocking=True)),
    "clone": lambda out: apply_to_collection(out, torch.Tensor, lambda x: x.clone()),
    "view-as": lambda out: apply_to_collection(out, torch.Tensor, lambda x: x.view_as(x)),
}


def walked(container: str, walk: str) -> Callable[[World], Any]:
    into, out_of = CONTAINERS[container]

    def program(w: World) -> Any:
        z = out_of(WALKS[walk](into(w.z())))
        w.note(z.requires_grad, z.dtype, tuple(z.shape))
        return loss_of(w, z)

    return program


WALKED = {
    f"{walk}-{container}": Case(
        walked(container, walk), fused=walk != "cast-down-and-up", bound=1e-6 if walk == "cast-down-and-up" else 1e-12
    )
    for container in CONTAINERS
    for walk in WALKS
    if container != "bare" or walk != "tree-flatten"
}


def gathered(w: World) -> Any:
    """As DataParallel's gather, with replicas on one device."""
    outputs = [w.model(x) for x in w.x.split(1)]
    assert all(isinstance(x, torch.Tensor) for x in outputs)
    return loss_of(w, torch.cat(outputs, 0))


def found_by_isinstance(w: World) -> Any:
    """As FSDP's hooks: those that need backward are tensors with a gradient in the flattened output."""
    out = {"logits": w.z(), "n": 1}
    tensors = [x for x in tree_flatten(out)[0] if torch.is_tensor(x) and x.requires_grad]
    w.note(len(tensors))
    for x in tensors:
        x.register_hook(lambda g: w.note(tuple(g.shape)))
    return loss_of(w, out["logits"])


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


class ReversedGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * gradient, None


class CrossEntropyByHand(Function):
    """As chunked losses in public code: an in-place log-softmax on a copy, and the gradient in its place."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor) -> Tensor:
        logp = z.detach().clone()
        logp -= logp.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logp, target)
        return -logp.gather(-1, target[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logp, target = ctx.saved_tensors
        p = logp.exp()
        p[torch.arange(len(target)), target] -= 1
        return p * (gradient / len(target)), None


class NewStyle(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0].cos()


kept_apply = Squares.apply


def in_a_list(w: World) -> Any:
    """A Function that is given logits in a list gets no gradient, neither stock nor deferred."""

    class OfList(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:
            return x.sum() + others[0].sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return gradient.expand(B, T, 6), None

    return OfList.apply(w.x, [w.z()])


FUNCTIONS: dict[str, Callable[[World], Any]] = {
    "squares": lambda w: Squares.apply(w.z()),
    "squares-view": lambda w: Squares.apply(w.rows()[:4]),
    "squares-scaled": lambda w: Squares.apply(w.z() * 0.5),
    "squares-softcap": lambda w: Squares.apply((w.z() / 3).tanh() * 3),
    "kept-apply": lambda w: kept_apply(w.z()),
    "identity": lambda w: loss_of(w, Identity.apply(w.z())[0]),
    "identity-of-two": lambda w: (lambda a, b: loss_of(w, a) + b.square().sum())(*Identity.apply(w.z(), w.hidden())),
    "reversed": lambda w: loss_of(w, ReversedGradient.apply(w.z(), 0.3)),
    "by-hand": lambda w: CrossEntropyByHand.apply(w.rows(), w.ids.flatten()),
    "new-style": lambda w: NewStyle.apply(w.z()).sum(-1),
    "in-a-list": in_a_list,
    "after-a-loss": lambda w: (lambda z: loss_of(w, z) + Squares.apply(z).mean())(w.z()),
    "edited-then": lambda w: (lambda z: Squares.apply(z.mul_(2)))(w.z()),
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
    "cross-entropy-module": fused(
        wrapped(F, "cross_entropy", lambda w, z: nn.CrossEntropyLoss()(z.view(-1, V), w.y.view(-1)))
    ),
    "log-softmax": Case(wrapped(F, "log_softmax", lambda w, z: F.log_softmax(z, dim=-1).gather(-1, w.ids[..., None]))),
    "torch-log-softmax": Case(
        wrapped(torch, "log_softmax", lambda w, z: torch.log_softmax(z, -1).gather(-1, w.ids[..., None]))
    ),
    "tensor-log-softmax": Case(
        wrapped(torch.Tensor, "log_softmax", lambda w, z: z.log_softmax(-1).gather(-1, w.ids[..., None]))
    ),
    "softmax": Case(wrapped(F, "softmax", lambda w, z: F.softmax(z, -1).square().sum(-1))),
    "logsumexp": Case(wrapped(torch, "logsumexp", lambda w, z: torch.logsumexp(z, -1))),
    "gather": Case(wrapped(torch, "gather", lambda w, z: torch.gather(z.log_softmax(-1), -1, w.ids[..., None]))),
    "nll": Case(wrapped(F, "nll_loss", lambda w, z: F.nll_loss(z.view(-1, V).log_softmax(-1), w.ids.flatten()))),
    "instrumented": fused(instrumented),
}


# Reading, copying and saving


def saved_and_loaded(z: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(z, file)
    file.seek(0)
    return torch.load(file, **options)


def vmapped(w: World) -> Any:
    return torch.vmap(lambda row: row.logsumexp(-1))(w.z())


def vmapped_loss(w: World) -> Any:
    return torch.vmap(F.cross_entropy)(w.z(), w.ids)


def grad_of_logits(w: World) -> Any:
    return torch.func.grad(lambda z: loss_of(w, z))(w.z().detach())


def by_dlpack(w: World) -> Any:
    return torch.from_dlpack(w.z().detach())


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


def in_memory(use: Callable[[Any], Any]) -> Callable[[World], Any]:
    return lambda w: use(w.z().detach())


def identities(w: World) -> Any:
    z = w.z()
    w.note(isinstance(z, torch.Tensor), torch.is_tensor(z), torch.is_floating_point(z), torch.is_complex(z))
    w.note(z.is_leaf, z.requires_grad, z.grad_fn is not None, z.device, z.dtype, z.layout, z.ndim, z.shape, z.stride())
    w.note(z.is_contiguous(), z.numel(), z.size(-1), z.dim(), z.element_size(), z.nbytes, z.storage_offset())
    w.note(z.output_nr, z.is_sparse, z.is_quantized, z.is_meta, z.is_cuda, z.retains_grad, z._version)
    w.note(len(z), z.T is not None if z.ndim == 2 else None, z.type(), z.is_inference(), z.is_nested, z.get_device())
    w.note(hash(z) == hash(z), z is z.requires_grad_(), z in [z], {z: 1}[z], callable(z.backward))
    return loss_of(w, z)


def identities_of_copies(w: World) -> Any:
    z = w.z()
    made = [z.view(-1, V), z[:, 1:], z.float(), z.detach(), z * 2, z.mT, z.transpose(0, 1).contiguous(), z / 3]
    for x in [*made, z.transpose(0, 1), z.log_softmax(-1), z[w.mask], z[..., 2:], z[:, [0]], z[0].expand(2, T, V)]:
        w.note(x.shape, x.stride(), x.dtype, x.requires_grad, x.is_leaf, x.is_contiguous(), x.storage_offset())
    w.note(z.view(-1, V)._is_view(), z[:, 1:]._is_view(), z.clone()._is_view(), (z * 2)._base is None)
    w.note(torch.result_type(z, 1), torch.can_cast(z.dtype, torch.float32), z.new_zeros(2), z.new_tensor([1.0]))
    w.note(torch.zeros_like(z), torch.ones_like(z[..., 0]), torch.empty_like(z).shape, torch.full_like(z, 2.0))
    return loss_of(w, z)


def no_grad(w: World) -> Any:
    with torch.no_grad():
        z = w.z()
        loss = loss_of(w, z)
    w.note(z.requires_grad, z.is_leaf, z.grad_fn is None, loss.requires_grad)
    return loss, z.logsumexp(-1), loss_of(w, z)


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


def loops(w: World) -> Any:
    z = w.z()
    total = 0.0
    for row, ids in zip(z, w.ids, strict=True):
        total = total + F.cross_entropy(row, ids)
    first, *rest = z
    return total, first.logsumexp(-1), len(rest), [tuple(x.shape) for x in reversed(z)]


def truth(use: Callable[[Any], Any]) -> Callable[[World], Any]:
    return lambda w: use(w.z())


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


def einsum(w: World) -> Any:
    return torch.einsum("btv,vh->bth", w.z().softmax(-1), w.head.weight)


def detached_in_place(w: World) -> Any:
    z = w.model(w.x[0])
    z.detach_()
    w.note(z.requires_grad, z.grad_fn is None, z.is_leaf)
    return F.cross_entropy(z, w.ids[0])


def made_a_leaf(w: World) -> Any:
    z = w.z().detach().requires_grad_()
    w.leaves["z"] = z
    w.note(z.is_leaf, z.requires_grad)
    return loss_of(w, z)


def stored_in_a_module(w: World) -> Any:
    module = nn.Module()
    module.register_buffer("z", w.z().detach())
    return module.state_dict()["z"].sum()


def as_parameter(w: World) -> Any:
    p = nn.Parameter(w.z().detach())
    loss_of(w, p).backward()
    return p.grad


def of_types(w: World) -> Any:
    z = w.z()
    return z.double(), z.type(torch.float64), z.to(w.x), z.type_as(w.x), z.to("cpu"), z.cpu()


def distributions(w: World) -> Any:
    z = w.z()
    d = torch.distributions.Categorical(logits=z)
    sample = d.sample()
    return d.log_prob(w.ids), d.entropy(), sample


def sampled(w: World) -> Any:
    z = w.z().detach()
    drawn = torch.multinomial(z[:, -1].softmax(-1), 2)
    return drawn, torch.sort(z, -1).indices, torch.topk(z, 2).indices, z.kthvalue(2)[0]


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
    "gathered": Case(gathered),
    "found-by-isinstance": fused(found_by_isinstance),
    "through-a-function": Case(through_a_function),
    "identities": fused(identities),
    "identities-of-copies": Case(identities_of_copies),
    "no-grad": fused(no_grad),
    "inference-mode": fused(inference_mode),
    "inference-then-grad": raises(RuntimeError, grad_for_inference_logits),
    "no-grad-then-grad": fused(grad_disabled_then_enabled),
    "loops": Case(loops),
    "texts": Case(texts),
    "bool": raises(RuntimeError, truth(bool)),
    "bool-of-one": Case(truth(lambda z: bool(z[0, 0, 0] > -100))),
    "float": Case(truth(lambda z: (float(z[0, 0, 0]), z[1, 2, 3].item(), int(z[0, 0, 1] * 10)))),
    "item-of-many": raises(RuntimeError, truth(lambda z: z.item())),
    "index": raises(TypeError, truth(lambda z: [1, 2, 3][z[0, 0, 0]])),
    "contains": Case(truth(lambda z: 1e9 in z)),
    "tolist": Case(truth(lambda z: z.tolist())),
    "tolist-of-view": Case(truth(lambda z: (z.view(-1, V)[2:] * 2).tolist())),
    "numpy-with-grad": raises(RuntimeError, truth(lambda z: z.numpy())),
    "asarray-with-grad": raises(RuntimeError, truth(lambda z: np.asarray(z))),
    "numpy": Case(in_numpy),
    "numpy-force": Case(truth(lambda z: float(z.numpy(force=True).sum()))),
    "dlpack": Case(by_dlpack),
    "dlpack-with-grad": raises(BufferError, truth(lambda z: torch.from_dlpack(z))),
    "buffers": Case(with_buffers),
    "assigned": Case(assigned_with_grad),
    "data-ptr": Case(in_memory(lambda z: (z.data_ptr() != 0, z.untyped_storage().nbytes()))),
    "as-tensor": Case(truth(lambda z: torch.as_tensor(z).sum(-1))),
    "asarray": Case(in_memory(lambda z: torch.asarray(z).sum(-1))),
    "torch-tensor": Case(truth(lambda z: torch.tensor(z).sum(-1))),
    "tensor-class": Case(truth(lambda z: torch.Tensor.argmax(z, -1))),
    "tensor-class-logsumexp": Case(truth(lambda z: torch.Tensor.logsumexp(z, -1))),
    "tensor-class-getitem": Case(truth(lambda z: torch.Tensor.__getitem__(z, 0).sum(-1))),
    "ops": Case(truth(lambda z: torch.ops.aten.sum.dim_IntList(z, [-1]))),
    "ops-log-softmax": Case(truth(lambda z: torch.ops.aten._log_softmax(z, -1, False)[..., 0])),
    "special": Case(truth(lambda z: torch.special.log_softmax(z, -1)[..., 0])),
    "operators": Case(truth(lambda z: (operator.mul(z, 2) + 1 - z / 3) @ torch.ones(V, 2, dtype=z.dtype))),
    "reflected": Case(truth(lambda z: 2 * z + (1 - z) + 1 / (z * z + 1) + 2.0**z)),
    "comparisons": Case(truth(lambda z: (z > 0, z == z, z <= 1, z.isnan(), torch.isfinite(z), torch.equal(z, z)))),
    "allclose": Case(truth(lambda z: torch.allclose(z, z + 0))),
    "copy": Case(copied(copy.copy)),
    "deepcopy-with-grad": raises(RuntimeError, copied(copy.deepcopy)),
    "deepcopy": Case(copied(lambda z: copy.deepcopy(z.detach()))),
    "pickle-with-grad": refusable(copied(lambda z: pickle.loads(pickle.dumps(z)))),
    "pickle": Case(copied(lambda z: pickle.loads(pickle.dumps(z.detach())))),
    "save": Case(copied(lambda z: saved_and_loaded(z.detach(), weights_only=True))),
    "save-in-a-dict": Case(copied(lambda z: saved_and_loaded({"z": z.detach()}, weights_only=True)["z"])),
    "share-memory": Case(copied(lambda z: z.detach().clone().share_memory_())),
    "model-deepcopy": fused(copied_model(copy.deepcopy)),
    "model-pickle": fused(copied_model(lambda m: pickle.loads(pickle.dumps(m)))),
    "model-save": fused(copied_model(lambda m: saved_and_loaded(m, weights_only=False))),
    "functional-call": fused(functional_call),
    "vmap": refusable(vmapped),
    "vmap-loss": refusable(vmapped_loss),
    "func-grad": refusable(grad_of_logits),
    "einsum": Case(einsum),
    "detach_": Case(detached_in_place),
    "leaf": Case(made_a_leaf),
    "buffer": Case(stored_in_a_module),
    "parameter": Case(as_parameter),
    "types": Case(of_types),
    "distributions": Case(distributions),
    "sampled": Case(sampled),
    "requires-grad-false": raises(RuntimeError, truth(lambda z: z.requires_grad_(False))),
    "no-attribute": raises(AttributeError, truth(lambda z: z.nothing)),
    "attribute": Case(truth(lambda z: (setattr(z, "mine", 3), z.mine)[1])),
    "dict-and-loss": fused(lambda w: {"loss": loss_of(w, w.z()), "n": 3}),
    "dataclass-and-loss": fused(lambda w: (lambda z: Output(None, loss_of(w, z)))(w.z())),
    "namespace": fused(lambda w: loss_of(w, types.SimpleNamespace(logits=w.z()).logits)),
    "weak-key": fused(lambda w: (lambda z: (torch.utils.weak.WeakIdKeyDictionary({z: 1})[z], loss_of(w, z)))(w.z())),
}

CASES: dict[str, Case] = {
    **WALKED,
    **{f"function-{name}": Case(program) for name, program in FUNCTIONS.items()},
    **{f"wrapped-{name}": case for name, case in WRAPPED.items()},
    **OTHERS,
    **EINOPS,
}


@pytest.mark.parametrize("name", CASES)
def test_containers(name: str) -> None:
    check(CASES[name], deferred)


@pytest.mark.parametrize("name", CASES)
def test_containers_on_stock(name: str) -> None:
    check(CASES[name], stock)


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
