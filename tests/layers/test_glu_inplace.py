"""Test gradients of gated linear units that overwrite their inputs: where this happens, and where it must not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import liger_chunked as lc

KINDS = {"swiglu": lc.liger_swiglu, "geglu": lc.liger_geglu}
by_kind = pytest.mark.parametrize("glu", KINDS.values(), ids=KINDS)


class Projections:
    """Compute gate and up as products, and record whether their gradients reuse their memory."""

    def __init__(self, device: str, packed: bool = False) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(5, 16, device=device, requires_grad=True)
        width = 48 if packed else 24
        self.weights = [torch.randn(16, width, device=device, requires_grad=True) for _ in range(1 if packed else 2)]
        self.outputs: list[Tensor] = []
        self.reused: list[bool] = []

    def __call__(self) -> list[Tensor]:
        self.outputs = [self.x @ weight for weight in self.weights]
        for y in self.outputs:
            if y.requires_grad:  # false in the forward of a reentrant checkpoint
                y.register_hook(self._look)
        return self.outputs

    def _look(self, gradient: Tensor) -> None:
        self.reused.append(gradient.data_ptr() in [y.data_ptr() for y in self.outputs])

    def gradients(self, loss: Tensor, **kwargs) -> tuple[Tensor, ...]:
        self.reused.clear()
        return torch.autograd.grad(loss, [self.x, *self.weights], **kwargs)


@pytest.mark.few(1)
@pytest.mark.triton
@by_kind
@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
def test_the_same_gradients(glu, packed, device):
    h = Projections(device, packed)
    expected = h.gradients(glu(*h()).square().sum())
    assert not any(h.reused)
    ours = h.gradients(glu(*h(), inplace=True).square().sum())
    assert len(h.reused) == len(h.weights) and all(h.reused)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.triton
@by_kind
def test_a_retained_graph_keeps_its_tensors(glu, device):
    h = Projections(device)
    loss = glu(*h(), inplace=True).square().sum()
    before = [y.detach().clone() for y in h.outputs]
    first = h.gradients(loss, retain_graph=True)
    assert not any(h.reused) and all(map(torch.equal, h.outputs, before))
    second = h.gradients(loss)
    assert all(h.reused)
    assert all(map(torch.equal, first, second))


def test_whoever_has_saved_an_input_is_told(device):
    h = Projections(device)
    gate, up = h()
    h.gradients(gate.exp().sum() + lc.liger_swiglu(gate, up, inplace=True).sum())  # exp saves its result only
    gate, up = h()
    square = gate.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.gradients(square + lc.liger_swiglu(gate, up, inplace=True).sum())


@pytest.mark.triton
def test_an_upstream_gradient_that_lies_there(device):
    h = Projections(device)
    expected = h.gradients(lc.liger_swiglu(*h()), grad_outputs=h.outputs[0].detach().clone())
    ours = h.gradients(lc.liger_swiglu(*h(), inplace=True), grad_outputs=h.outputs[0].detach())
    assert all(map(torch.equal, ours, expected))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["leaf", "expanded", "one-tensor", "one-memory", "overlapping", "frozen-up"])
def test_places_that_are_not_free(kind, device):
    h = Projections(device)
    gate, up = h()
    if kind == "leaf":
        gate = gate.detach().requires_grad_()
    elif kind == "expanded":
        gate = gate[:1].expand_as(up)
    elif kind == "one-tensor":
        gate = up
    elif kind == "one-memory":
        gate, up = up.view_as(up), up.view_as(up)
    elif kind == "overlapping":
        gate, up = up[:-1], up[1:]
    else:
        up = up.detach()
    before = gate.detach().clone(), up.detach().clone()
    lc.liger_swiglu(gate, up, inplace=True).square().sum().backward()
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device):
    h = Projections(device)

    def run(x: Tensor, inplace: bool) -> Tensor:
        h.x = x
        return lc.liger_swiglu(*h(), inplace=inplace).square()

    results = []
    for inplace in (False, True):
        x = torch.linspace(-1, 1, 80, device=device).view(5, 16).requires_grad_()
        for weight in h.weights:
            weight.grad = None
        h.reused.clear()
        checkpoint(run, x, inplace, use_reentrant=reentrant).sum().backward()
        assert h.reused == [inplace] * 2
        results.append([x.grad, *(weight.grad for weight in h.weights)])
    assert all(map(torch.equal, *results))


@pytest.mark.few(4)
@pytest.mark.parametrize("hooked", ["projection", "inside", "everywhere"])
@pytest.mark.parametrize("name", ["LigerSwiGLUMLP", "LigerGEGLUMLP"])
def test_a_hook_that_keeps_a_projection(name, hooked, device):
    """A projection that a hook keeps stays unchanged."""
    torch.manual_seed(0)
    act = "silu" if name == "LigerSwiGLUMLP" else "gelu_pytorch_tanh"
    mlp = getattr(lc, name)(SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act=act)).to(device)
    projection = mlp.gate_proj
    if hooked == "inside":
        mlp.gate_proj = torch.nn.Sequential(projection)
    x = torch.randn(5, 16, device=device)
    kept = []
    register = projection.register_forward_hook
    if hooked == "everywhere":
        register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda module, args, output: kept.append(output) if module is projection else None)
    try:
        mlp(x).square().sum().backward()
    finally:
        handle.remove()
    assert torch.equal(kept[0], torch.nn.functional.linear(x, projection.weight))
    assert mlp._inplace
