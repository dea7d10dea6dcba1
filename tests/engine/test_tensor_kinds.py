"""Every kind of tensor in every public function: it gives the same as a plain tensor, or raises an error that names it.

A table of kinds and calls. Each test replaces one tensor of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from public_calls import BASE, LOSSES, Call
from table import Batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

CALLS = LOSSES + BASE
ARGUMENTS = [pytest.param(call, name, id=f"{call}-{name}") for call in CALLS for name in call.sample()]

every_call = pytest.mark.parametrize("call", CALLS, ids=repr)
every_argument = pytest.mark.parametrize(("call", "argument"), ARGUMENTS)


# Kinds that are served


class Tag(Tensor):
    """A subclass that adds nothing."""


class Logged(Tensor):
    """A subclass with its own `__torch_function__`, like torchvision's images."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Asynchronous(torch.autograd.Function):
    """The result of a collective that is not waited for, as tensor parallelism passes it to the next module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


SERVED: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda x: x.as_subclass(Tag),
    "torch_function": lambda x: x.as_subclass(Logged),
    "buffer": nn.Buffer,
    "asynchronous": Asynchronous.apply,
}


def replaced(batch: Batch, argument: str, kind: Callable[[Tensor], Tensor]) -> Batch:
    return {**batch, argument: kind(batch[argument])}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.few(3)
@pytest.mark.sampled
@pytest.mark.parametrize("kind", SERVED)
@every_argument
def test_served_as_a_plain_tensor(call: Call, argument: str, kind: str) -> None:
    leaves = call.leaves()
    outputs = call.outputs(replaced(leaves, argument, SERVED[kind]))
    assert all(type(output) is Tensor for output in outputs)
    own = {name: x for name, x in leaves.items() if kind != "buffer" or name != argument}  # a buffer is a new tensor
    found, expected = call.results(outputs, own), call.evaluate(leaves)
    assert equal(found, {name: expected[name] for name in found})


@pytest.mark.few(3)
@every_call
def test_an_asynchronous_upstream_gradient_is_waited_for(call: Call) -> None:
    tensors = call.sample()
    assert equal(call.evaluate(tensors, upstream=AsyncCollectiveTensor), call.evaluate(tensors))


# Kinds that are refused


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed(x: Tensor, placement: Any) -> Any:
    return distribute_tensor(x.detach(), init_device_mesh("cpu", (1,)), [placement])


class Pair(Tensor):
    """A wrapper of two tensors, without its own memory."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        made = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)
        made.first, made.second = first, second
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def part(name: str) -> Any:
            return tree_map(lambda x: getattr(x, name) if isinstance(x, Pair) else x, (args, kwargs or {}))

        firsts, seconds = (func(*a, **k) for a, k in map(part, ("first", "second")))
        return Pair(firsts, seconds) if isinstance(firsts, Tensor) else firsts


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([row.contiguous() for row in x.detach()], layout=layout)


FULL = r"a DTensor, distributed over ranks: pass {}\.full_tensor\(\), or {}\.to_local\(\)"

# A kind, its minimum number of dimensions, and its error message, with {} for the argument.
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "dtensor": (lambda x: distributed(x, Replicate()), 0, FULL),
    "dtensor-sharded": (lambda x: distributed(x, Shard(0)), 1, FULL),
    "fake": (
        lambda x: FakeTensorMode().from_tensor(x.detach()),
        0,
        "a FakeTensor, which has no values: pass real tensors, or trace the call with torch.compile",
    ),
    "wrapper": (
        lambda x: Pair(x.detach(), x.detach()),
        0,
        r"a Pair, a subclass of torch.Tensor with a __torch_dispatch__ .* pass the plain torch.Tensor that {} stands",
    ),
    "sparse": (lambda x: x.detach().to_sparse(), 1, r"of layout torch.sparse_coo: pass {}\.to_dense\(\)"),
    "complex": (
        lambda x: x.detach().to(torch.complex64),
        0,
        "complex64 on cpu, whose values are not real numbers: pass its real and imaginary parts as two real tensors",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.quint8),
        0,
        r"quint8 on cpu, whose values are not real numbers: pass {}\.dequantize\(\)",
    ),
    "nested": (
        lambda x: nested(x, torch.strided),
        2,
        r"tensor without a shape, .* a nested tensor: pass torch.nested.to_padded_tensor\({}, ",
    ),
    "nested-jagged": (lambda x: nested(x, torch.jagged), 2, r"a NestedTensor, a nested tensor: pass .*\({}, "),
}

expects_quantized = pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
expects_nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")


@pytest.mark.few(6)
@pytest.mark.sampled
@expects_nested
@expects_quantized
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@every_argument
def test_refused_by_name(call: Call, argument: str, kind: str, grad: bool) -> None:
    make, ndim, message = REFUSED[kind]
    batch = call.leaves()
    if batch[argument].ndim < ndim:
        pytest.skip(f"{kind} has {ndim} dimensions or more")
    if call in LOSSES and make in (REFUSED["dtensor"][0], REFUSED["dtensor-sharded"][0]):
        check_dtensor(call, batch, argument, kind, grad)
        return
    expected = f"^{argument} must be a plain dense torch.Tensor, got .*{message.replace('{}', argument)}"
    with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=expected):
        call.function(**replaced(batch, argument, make))


def check_dtensor(call: Call, batch: dict[str, Tensor], argument: str, kind: str, grad: bool) -> None:
    """A loss serves a replicated DTensor. It serves or refuses a sharded one (test_vocab_shard.py)."""
    given = replaced(batch, argument, REFUSED[kind][0])
    with torch.set_grad_enabled(grad):
        expected = call.outputs(batch)
        try:
            ours = call.outputs(given)
        except (TypeError, ValueError) as refused:
            assert kind == "dtensor-sharded" and str(refused).startswith(argument), refused
            return
    for x, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, exact)


@pytest.mark.few(3)
@every_call
def test_the_meta_device(call: Call) -> None:
    """Base kernels return shapes, like torch's own functions; a loss must know which tokens count."""
    tensors = {name: x.to("meta") for name, x in call.sample().items()}
    if call in LOSSES:
        with pytest.raises(ValueError, match=r"^input and weight are on the meta device and have no values: pass real"):
            call.function(**tensors)
        return
    for output, real in zip(call.outputs(tensors), call.outputs(call.sample()), strict=True):
        assert output.is_meta and output.shape == real.shape


@pytest.mark.few(3)
@every_call
def test_upstream_gradients_of_other_kinds_are_refused(call: Call) -> None:
    with pytest.raises(TypeError, match=r"an upstream gradient must be a plain dense torch.Tensor, got .* a Pair, "):
        call.evaluate(call.sample(), upstream=lambda g: Pair(g, g))


# Transforms

# torch compiles a script when it first computes a forward-mode derivative.
expects_script = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.few(2)
@pytest.mark.sampled
@expects_script
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@every_call
def test_transforms_of_torch_func_are_refused(call: Call, transform: str, grad: bool) -> None:
    batch, name = call.sample(), next(iter(call.differentiable))

    def loss(x: Tensor) -> Tensor:
        return call.outputs({**batch, name: x})[0].sum()

    advice = "is under a transform of torch.func .* differentiate with backward"
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match=advice):
        TRANSFORMS[transform](loss, batch[name])


@pytest.mark.few(2)
@expects_script
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@every_call
def test_forward_mode_is_refused(call: Call, grad: bool) -> None:
    batch, name = call.sample(), next(iter(call.differentiable))
    plain = call.outputs(batch)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        assert all(map(torch.equal, call.outputs(batch), plain))  # nothing here has a tangent
        batch[name] = forward_ad.make_dual(batch[name], torch.ones_like(batch[name]))
        with pytest.raises(NotImplementedError, match=f"^{name} has a tangent of torch.autograd.forward_ad"):
            call.function(**batch)
