"""Linear layers that `parallelize_module` splits: `parallel_linear` computes what torch's DTensors do, on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks, same_on_all_ranks

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from model_zoo import BY_ID
from test_models_tensor_parallel import FIRST_DTENSORS, TAKES_SIZES, WORLD, by_module, by_plan, start
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked.deferred.swap import set_patch
from liger_chunked.integrations.transformers import apply_liger_kernel, parallel, revert_liger_kernel

pytestmark = [
    pytest.mark.ordinary_memory,
    pytest.mark.skipif(FIRST_DTENSORS, reason="stock models fail too"),
]


@contextmanager
def counted() -> Iterator[list[Any]]:
    """Count the calls of `parallel_linear`."""
    calls: list[Any] = []
    stock = parallel.parallel_linear

    def counting(*args: Any) -> Any:
        calls.append(args)
        return stock(*args)

    parallel.parallel_linear = counting
    try:
        yield calls
    finally:
        parallel.parallel_linear = stock


def step(model: Any, sample: dict[str, Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the loss and the gradients of this rank, and how the gradients are placed."""
    loss = model(**sample).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return [loss.detach(), *own], [getattr(g, "placements", None) for g in gradients]


def whole_models(build: Callable[[str, torch.dtype], Any]) -> None:
    """A step equals stock's in float64, also frozen and checkpointed; in bfloat16 it is as near to float64."""
    only = {"rms_norm": False, "swiglu": False, "rope": False, "fused_linear_cross_entropy": False}
    changes: list[Callable[[Any], Any]] = [
        lambda model: None,
        lambda model: model.gradient_checkpointing_enable(),
        lambda model: model.model.layers[0].requires_grad_(False),
        lambda model: model.model.layers[1].self_attn.requires_grad_(False),
    ]
    for family in ("llama", "qwen2"):  # the second has biases
        given = BY_ID[family].sample()
        sample = {**given.arguments, "labels": given.labels}
        exact: list[Tensor] = []
        for dtype, change in [*((torch.float64, change) for change in changes), (torch.bfloat16, changes[0])]:
            stock, ours = (build(family, dtype) for _ in range(2))
            applied = apply_liger_kernel(ours, **only)
            linear = [x for x in ours.model.layers.modules() if isinstance(x, nn.Linear)]
            served = [x for x in linear if x.weight.placements[0].dim == 0 or x.bias is None]
            assert applied.replaced == {"parallel_linear": {"Linear": len(served)}}
            for model in (stock, ours):
                change(model)
            with counted() as calls:
                found, placed = step(ours, sample)
            assert len(calls) == len(served) * (2 if ours.is_gradient_checkpointing else 1)
            by_torch, placed_by_torch = step(stock, sample)
            assert placed == placed_by_torch
            if dtype == torch.float64:
                exact = exact or by_torch
                for expected, x in zip(by_torch, found, strict=True):
                    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-9)
            else:
                assert distance(found, exact) <= 1.1 * distance(by_torch, exact)


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum((x - e).norm().item() ** 2 for x, e in zip(found, exact, strict=True)) ** 0.5


def all_patches(mesh: DeviceMesh) -> None:
    """The default patches it, a plan with other layouts is left to torch, and undoing leaves torch's layers."""
    given = BY_ID["llama"].sample()
    sample = {**given.arguments, "labels": given.labels}
    for plan, served in (("gathered-logits", True), ("sequence", False)):
        model = by_module(mesh, plan, "llama", torch.float32)
        applied = apply_liger_kernel(model)
        assert "parallel_linear" in applied.replaced
        linear = model.model.layers[0].self_attn.o_proj
        assert (type(linear) is not nn.Linear) == served
        revert_liger_kernel(model)
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    model = by_module(mesh, "gathered-logits", "llama", torch.float32)
    apply_liger_kernel(model, parallel_linear=False)
    with counted() as calls:
        step(model, sample)
    assert not calls


def layers(mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> list[tuple[Any, Any, Tensor]]:
    """Return, for columns and for rows, two equal linear layers, the second patched, and an input of this rank."""
    made = []
    for style, width in ((ColwiseParallel, 6), (RowwiseParallel, 6 // WORLD)):
        torch.manual_seed(0)
        # torch adds a bias of rows to each rank's part of the sum, so such a layer stays with torch.
        stock = parallelize_module(nn.Linear(6, 8, style is ColwiseParallel, dtype=dtype), mesh, style())
        ours = copy.deepcopy(stock)
        set_patch(ours, parallel.ParallelPatch())
        torch.manual_seed(1 + (dist.get_rank() if style is RowwiseParallel else 0))
        made.append((stock, ours, torch.randn(2, 3, width, dtype=dtype)))
    return made


def left_to_torch(mesh: DeviceMesh) -> None:
    """Hooks, forwards, autocast and modes: each is served by torch's own call, and sees what it sees there."""
    seen: list[Any] = []

    def see(*args: Any) -> None:
        seen.append([type(x) for x in args])

    def own_forward(linear: Any, x: Any) -> Any:
        seen.append(type(x))
        return nn.functional.linear(x, linear.weight, linear.bias)

    changes = {
        "hook": lambda linear: linear.register_forward_hook(see),
        "pre-hook": lambda linear: linear.register_forward_pre_hook(see),
        "backward hook": lambda linear: linear.register_full_backward_hook(see),
        "global hook": lambda linear: register_module_forward_hook(see),
        "forward": lambda linear: setattr(linear, "forward", lambda x: own_forward(linear, x)),
    }
    for name, change in changes.items():
        for stock, ours, x in layers(mesh):
            results, observed = [], []
            for linear in (stock, ours):
                seen.clear()
                handle = change(linear)
                with counted() as calls:
                    y = linear(x.clone().requires_grad_())
                    y.sum().backward()
                assert not calls, name
                results.append(y)
                observed.append([*seen])
                if handle is not None:
                    handle.remove()
            assert observed[0] and [*map(str, observed[0])] == [*map(str, observed[1])], name
            assert torch.equal(*results), name
    for stock, ours, x in layers(mesh, torch.float32):
        for context in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
            with context, counted() as calls:
                expected, found = stock(x), ours(x)
            assert not calls and found.dtype == expected.dtype and torch.equal(expected, found)
        with counted() as calls:
            compiled = torch.compile(lambda x: ours(x), backend="eager", fullgraph=True)  # noqa: B023
            assert torch.equal(stock(x), compiled(x)) and not calls
        with pytest.raises(RuntimeError):
            ours(x[..., :-1])
        with pytest.raises(RuntimeError, match="dtype"):
            ours(x.double())


def single_layers(mesh: DeviceMesh) -> None:
    """A frozen input or weight, one dimension, copies, no gradient; second derivatives raise."""
    for stock, ours, x in layers(mesh):
        one_dimension = [] if ours.bias is None else [x[0, 0]]  # stock rows without a bias fail
        for given in (x, x[0], *one_dimension, x.transpose(0, 1)):
            for needs_x, needs_w in ((True, True), (False, True), (True, False), (False, False)):
                found = []
                for linear in (stock, copy.deepcopy(ours)):
                    linear.requires_grad_(needs_w)
                    linear.zero_grad()
                    x_ = given.clone().requires_grad_(needs_x)
                    with counted() as calls:
                        y = linear(x_)
                    assert len(calls) == (linear is not stock)
                    assert y.requires_grad == (needs_x or needs_w)
                    if y.requires_grad:
                        (y * torch.arange(y.shape[-1]).sin()).sum().backward()
                    grads = [p.grad for p in linear.parameters()]
                    found.append([y, x_.grad, *(g if g is None else g.to_local() for g in grads)])
                    stock.requires_grad_(True)
                for expected, result in zip(*found, strict=True):
                    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        assert same_on_all_ranks(ours(x)) == (ours.weight.placements[0].dim == 1)
        x_ = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(ours(x_).square().sum(), x_, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            dx.sum().backward()


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is nn.functional.linear else result


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def replaced_code(mesh: DeviceMesh) -> None:
    """What a user has replaced or compiled runs, in the forward and in the backward."""
    linear, forward, call = nn.functional.linear, nn.Linear.forward, nn.Module.__call__
    contexts: dict[str, Callable[[], Any]] = {
        "F.linear": lambda: replaced(nn.functional, "linear", lambda *args: 2 * linear(*args)),
        "nn.Linear.forward": lambda: replaced(nn.Linear, "forward", lambda self, x: 2 * forward(self, x)),
        "nn.Module.__call__": lambda: replaced(nn.Module, "__call__", lambda self, x: 2 * call(self, x)),
        "a function mode": Doubled,
    }
    for name, context in contexts.items():
        for stock, ours, x in layers(mesh):
            found = []
            for layer in (stock, ours):
                x_ = x.clone().requires_grad_()
                with context(), counted() as calls:
                    y = layer(x_)
                y.square().sum().backward()
                assert not calls, name
                found.append((y, x_.grad))
            for expected, result in zip(*found, strict=True):
                assert torch.equal(expected, result), name
    for _, ours, x in layers(mesh):
        ours.compile(backend="eager")
        with counted() as calls:
            ours(x)
        assert not calls
    for stock, ours, x in layers(mesh):
        (before,) = stock._forward_pre_hooks.values()
        for layer in (stock, ours):
            layer._forward_pre_hooks.clear()
            layer.register_forward_pre_hook(lambda module, args: before(module, (2 * args[0],)))  # noqa: B023
        with counted() as calls:
            assert torch.equal(stock(x), ours(x)) and not calls


def ranks_that_differ(mesh: DeviceMesh) -> None:
    """A hook on one rank alone changes no result, and no number of collectives, under a checkpoint too."""
    for stock, ours, x in layers(mesh):
        handle = ours.register_forward_hook(lambda *args: None) if dist.get_rank() == 0 else None
        for call in (lambda layer, x: layer(x), lambda layer, x: checkpoint(layer, x, use_reentrant=False)):
            found = []
            for layer in (stock, ours):
                x_ = x.clone().requires_grad_()
                y = call(layer, x_)
                y.square().sum().backward()
                dist.all_reduce(torch.ones(()))
                found.append((y, x_.grad))
            for expected, result in zip(*found, strict=True):
                # float64; a rank without the hook sums its products in another order than torch's DTensors.
                torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        if handle is not None:
            handle.remove()


def what_is_saved(mesh: DeviceMesh) -> None:
    """A frozen layer keeps no input, a checkpoint sums once, and a rank without columns takes part."""
    for _, ours, x in layers(mesh):
        ours.requires_grad_(False)
        x_ = x.clone().requires_grad_() * 1
        y = ours(x_)
        x_.mul_(2)
        y.sum().backward()
        x_ = x.clone().requires_grad_()
        sums = []
        stock = dist.all_reduce
        with replaced(dist, "all_reduce", lambda *args, **kwargs: sums.append(1) or stock(*args, **kwargs)):  # noqa: B023
            checkpoint(ours, x_, use_reentrant=False).sum().backward()
        assert len(sums) == 1
    torch.manual_seed(0)
    stock = parallelize_module(nn.Linear(6, 1, dtype=torch.float64), mesh, ColwiseParallel())
    ours = copy.deepcopy(stock)
    set_patch(ours, parallel.ParallelPatch())
    found = []
    for layer in (stock, ours):
        x = torch.ones(2, 3, 6, dtype=torch.float64, requires_grad=True)
        with counted() as calls:
            layer(x).sum().backward()
        assert len(calls) == (layer is ours)
        found.append((x.grad, layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor()))
    for expected, result in zip(*found, strict=True):
        torch.testing.assert_close(result, expected)


@on_ranks(WORLD)
def test_parallel_linear(rank: int, tmp_path: Path) -> None:
    start(rank)
    mesh = init_device_mesh("cpu", (WORLD,))
    single_layers(mesh)
    left_to_torch(mesh)
    replaced_code(mesh)
    ranks_that_differ(mesh)
    what_is_saved(mesh)
    all_patches(mesh)
    whole_models(lambda family, dtype: by_module(mesh, "gathered-logits", family, dtype))
    if TAKES_SIZES:
        whole_models(lambda family, dtype: by_plan(tmp_path, family, dtype))
