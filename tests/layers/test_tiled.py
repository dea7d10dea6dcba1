"""Token-wise blocks in tiles: values, gradients, products and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from spies import Memory, flop_counter
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from liger_chunked import LigerSwiGLUMLP
from liger_chunked.layers.tiled import (
    after_tiles,
    follows_tiles,
    intermediate_size,
    tile_tokens,
    tiled,
    trainable,
)

H, I = 16, 40  # noqa: E741
CONFIG = SimpleNamespace(hidden_size=H, intermediate_size=I, hidden_act="silu", mlp_bias=True)


def mlp(dtype: torch.dtype = torch.float64, seed: int = 0) -> LigerSwiGLUMLP:
    torch.manual_seed(seed)
    return LigerSwiGLUMLP(CONFIG).to(dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the output, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_(x.requires_grad)
    module.zero_grad()
    y = call(x)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def formula(module: Any, x: Tensor) -> Tensor:
    """The MLP in plain PyTorch."""
    gate = x @ module.gate_proj.weight.t() + module.gate_proj.bias
    up = x @ module.up_proj.weight.t() + module.up_proj.bias
    return (gate * torch.sigmoid(gate) * up) @ module.down_proj.weight.t() + module.down_proj.bias


def assert_same(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-30)


def assert_tiles_are_same(module: nn.Module, x: Tensor, tokens: int = 8, function: Any = None) -> None:
    function = function or module
    found = gradients(lambda x: tiled(function, module, x, tokens), module, x)
    assert_same(found, gradients(function, module, x))


class Packed(nn.Module):
    """Gate and up are halves of one parameter, and down has a weight norm: every weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(H, 2 * I)
        self.down = nn.utils.parametrizations.weight_norm(nn.Linear(I, H))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.gate_up.weight, self.gate_up.bias
        return self.down(F.silu(F.linear(x, weight[:I], bias[:I])) * F.linear(x, weight[I:], bias[I:]))


@pytest.mark.parametrize("tokens", [7, 1000])
def test_computed_weights(tokens):
    torch.manual_seed(0)
    assert_tiles_are_same(Packed().double(), rows(3, 17, H), tokens)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(48, H), (3, 17, H), (2, 2, 9, H)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16, 48, 1000])
def test_equals_the_formula(shape, tokens):
    module, x = mlp(), rows(*shape)
    found = gradients(lambda x: tiled(module, module, x, tokens), module, x)
    assert_same(found, gradients(partial(formula, module), module, x))
    with torch.no_grad():
        assert torch.equal(tiled(module, module, x, tokens), found[0])


def test_16_bit_gradients_are_as_exact_as_without_tiles():
    module, x = mlp(torch.bfloat16), rows(2048, H, dtype=torch.bfloat16)
    exact_module = copy.deepcopy(module).double()
    exact = gradients(partial(formula, exact_module), exact_module, x.detach().double().requires_grad_())
    whole = gradients(partial(formula, module), module, x)
    for found, eager, reference in zip(
        gradients(lambda x: tiled(module, module, x, 32), module, x), whole, exact, strict=True
    ):
        # A sum of 64 rounded tiles would be three times as far away.
        assert (found.double() - reference).norm() <= 1.1 * (eager.double() - reference).norm()


class Residual(nn.Module):
    """The end of a layer: what follows the MLP saves nothing, or, with a norm after it, the MLP's output.

    `after`: the norm is before the MLP, after it, or after it and a part of its tiles.
    """

    def __init__(self, tokens: int | None, after: Literal["no", "yes", "in tiles"]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), LigerSwiGLUMLP(CONFIG)
        self.tokens, self.after = tokens, after

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x) if self.after == "no" else x
        h = self.mlp(h) if self.tokens is None else tiled(self.mlp, self.mlp, h, self.tokens)
        if self.after == "no":
            return x + h
        in_tiles = self.after == "in tiles" and follows_tiles(h)
        return x + (after_tiles(self.norm, self.norm, h) if in_tiles else self.norm(h))


# Products of tokens x H x I, of 9 for forward and backward.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("reentrant", "after", "whole", "in_tiles"),
    [
        (None, "no", 9, 11),
        (None, "yes", 9, 11),
        (None, "in tiles", 9, 11),
        (False, "no", 11, 11),  # a checkpoint and tiles together recompute once
        (False, "yes", 12, 14),
        (False, "in tiles", 12, 12),
        (True, "no", 12, 14),
        (True, "yes", 12, 14),
        (True, "in tiles", 12, 14),
    ],
)
def test_products(reentrant, after, whole, in_tiles):
    for tokens, expected in ((None, whole), (16, in_tiles)):
        layer, x = Residual(tokens, after), rows(64, H, dtype=torch.float32)
        with flop_counter() as counter:
            y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            y.sum().backward()
        assert counter.get_total_flops() == expected * 2 * 64 * H * I


def checkpointed_gradients(function: Any, module: nn.Module, x: Tensor) -> Any:
    return gradients(lambda x: checkpoint(function, x, use_reentrant=False), module, x)


def test_what_makes_no_part_of_the_tiles():
    module, x = mlp(), rows(48, H)
    assert not follows_tiles(tiled(module, module, x, 16))  # no checkpoint: the norm had better save its input

    def changed(y: Tensor) -> Tensor:
        return y.mul_(2)

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(lambda g: g)
        return y

    def kept(y: Tensor) -> Tensor:
        y.retain_grad()
        return y

    seen = []
    for change in (lambda y: y, changed, hooked, kept, lambda y: y[:], lambda y: y.detach(), lambda y: y + 1):

        def layer(x: Tensor, change: Any = change) -> Tensor:
            y = change(tiled(module, module, x, 16))
            seen.append(follows_tiles(y))
            return y

        checkpoint(layer, x, use_reentrant=False)
    assert seen == [True, *6 * [False]]


@pytest.mark.parametrize("frozen", ["norm", "mlp"])
def test_other_uses_of_the_tiles_output(frozen):
    torch.manual_seed(0)
    module, norms, x = mlp(), [nn.LayerNorm(H).double() for _ in range(2)], rows(48, H)
    module_and_norms = nn.ModuleList([module, *norms])
    (norms[0] if frozen == "norm" else module).requires_grad_(False)

    def layer(x: Tensor, tokens: int | None = 16) -> Tensor:
        y = module(x) if tokens is None else tiled(module, module, x, tokens)
        parts = [after_tiles(norm, norm, y) if follows_tiles(y) else norm(y) for norm in norms]
        return parts[0] + 2 * parts[1].sin() + 3 * y.cos()

    found = checkpointed_gradients(layer, module_and_norms, x)
    assert_same(found, gradients(lambda x: layer(x, None), module_and_norms, x))


def test_frozen_weights_cost_no_weight_gradient():
    layer, x = Residual(16, "no").requires_grad_(False), rows(64, H, dtype=torch.float32)
    with flop_counter() as counter:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert counter.get_total_flops() == 8 * 2 * 64 * H * I


@pytest.mark.few(1)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_memory_is_that_of_one_tile(checkpointed):
    n, tokens, peaks = 4096, 64, []
    for tile in (None, tokens):
        layer, x = Residual(tile, "no").to(torch.bfloat16), rows(n, H, dtype=torch.bfloat16)
        call = partial(checkpoint, layer, use_reentrant=False) if checkpointed else layer
        memory = Memory()
        memory.expect(x, *layer.parameters())
        with memory:
            call(x).sum().backward()
        peaks.append(memory.peak)
        largest = memory.largest
    whole, in_tiles = peaks
    assert largest <= 4 * n * H  # the float32 copy of a norm on the CPU
    # Gate, up, product and gradient of all tokens are gone.
    assert whole - in_tiles >= 3 * 2 * n * I
    assert in_tiles <= 16 * 2 * n * H


class Odd(nn.Module):
    """Token-wise, with weights outside of `F.linear`, a tied one, one without gradient, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, I), nn.Linear(H, I, bias=False)
        self.c = nn.Linear(I, H).requires_grad_(False)
        self.b.weight = self.a.weight
        self.scale, self.matrix = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(H, H))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.a(x) * self.b(x.sin()).cos()) * self.scale
        return y @ self.matrix + F.linear(self.scale * self.scale, self.matrix)


def test_any_token_wise_module():
    module, x = Odd().double(), rows(2, 25, H)
    assert_tiles_are_same(module, x)


def test_inputs_without_gradient():
    module, x = mlp(), rows(40, H).detach()
    assert_tiles_are_same(module, x)
    module.requires_grad_(False)
    assert not tiled(module, module, x, 8).requires_grad
    assert_tiles_are_same(module, rows(40, H))


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [lambda y, s: y.mul_(s), lambda y, s: y * s, lambda y, s: y.tanh_()])
def test_an_output_that_is_changed_is_recomputed(change):
    """Only a product that returns the output itself is left out."""
    module = mlp()
    module.s = nn.Parameter(torch.linspace(1, 2, H, dtype=torch.float64))

    def changed(x: Tensor) -> Tensor:
        return change(module.down_proj(module.gate_proj(x).sin()), module.s)

    assert_tiles_are_same(module, rows(30, H), function=changed)


def test_dropout_draws_the_same_numbers_again():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(H, 4, bias=False), nn.Linear(4, H, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5) + self.up(self.down(F.dropout(x, 0.3)))

    module, x = Adapted().double(), rows(50, H)
    torch.manual_seed(3)
    found = gradients(lambda x: tiled(module, module, x, 8), module, x)
    after = torch.rand(())
    torch.manual_seed(3)
    expected = gradients(lambda x: torch.cat([module(tile) for tile in x.split(8)]), module, x)
    assert_same(found, expected)
    assert torch.equal(after, torch.rand(()))  # the backward leaves no trace in the generator


def test_autocast():
    module, x = mlp(torch.float32), rows(64, H, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(module, module, x)
        found = gradients(lambda x: tiled(module, module, x, 8), module, x)
        assert torch.equal(found[0], expected[0]) and found[0].dtype == torch.bfloat16
        assert_same(found, expected, 2e-2)
    exact_module = copy.deepcopy(module).double()
    exact = gradients(exact_module, exact_module, x.detach().double().requires_grad_())
    for ours, whole, reference in zip(found, expected, exact, strict=True):
        assert (ours - reference).norm() <= 1.1 * (whole - reference).norm()
    # Outside of it the backward computes what its forward did.
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled(module, module, x, 8)
    module.zero_grad()
    y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view_as(y).to(y.dtype))
    assert torch.equal(x.grad, found[1])


def test_autocast_keeps_no_weights_without_a_graph():
    """Its cache would, of a weight that another operation than `F.linear` reads in the forward."""
    module, x = Odd(), rows(64, H, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        tiled(module, module, x, 8)
        (x @ module.matrix).sum().backward()
    assert module.matrix.grad is not None


def test_a_graph_that_is_retained_has_a_second_backward():
    module, x = mlp(), rows(40, H)
    y = tiled(module, module, x, 8).sum()
    first, second = (torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_second_derivatives_raise():
    module, x = mlp(), rows(40, H)
    (dx,) = torch.autograd.grad(tiled(module, module, x, 8).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dx.sum().backward()


def test_saved_tensor_hooks_get_the_input_alone():
    packed = []
    module, x = mlp(), rows(40, H)
    expected = gradients(module, module, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        y = tiled(module, module, x, 8)
    assert packed == [x.shape]
    del y
    with save_on_cpu():
        assert_same(gradients(lambda x: tiled(module, module, x, 8), module, x), expected)


def test_compiled_callers_break_their_graph():
    module, x = mlp(torch.float32), rows(40, H, dtype=torch.float32)
    compiled = torch.compile(lambda x: tiled(module, module, x.sin(), 8).cos(), backend="aot_eager")
    expected = gradients(lambda x: module(x.sin()).cos(), module, x)
    assert_same(gradients(compiled, module, x), expected, 1e-5)


def test_parameters_may_not_change_before_the_backward():
    module, x = mlp(), rows(40, H)
    y = tiled(module, module, x, 8)
    module.gate_proj.requires_grad_(False)
    with pytest.raises(RuntimeError, match="had 6 trainable tensors in the forward and has 4 in the backward"):
        y.sum().backward()


def llama(hidden_size: int, intermediate_size: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    config = SimpleNamespace(hidden_size=hidden_size, intermediate_size=intermediate_size, hidden_act="silu")
    with torch.device("meta"):
        return LigerSwiGLUMLP(config).to(dtype)


def states(n: int, hidden_size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(n, hidden_size, dtype=dtype, device="meta")


def test_chosen_tiles():
    module = llama(4096, 14336)
    assert intermediate_size(module, 4096) == 14336 and len(trainable(module)) == 3
    assert tile_tokens(module, states(16384, 4096), True) == 8192
    assert tile_tokens(module, states(8192, 4096), True) is None
    assert tile_tokens(module, states(9000, 4096), True) == 4608  # two equal tiles, in multiples of 128
    assert tile_tokens(module, states(131072, 4096), 1000) == 1000
    assert tile_tokens(module, states(131072, 4096), False) is None
    assert tile_tokens(nn.Identity(), states(1 << 20, 2048), True) == 4096  # of unknown sizes
    assert tile_tokens(nn.Identity(), states(1 << 20, 2048), "auto") is None


@pytest.mark.gpu
@pytest.mark.ordinary_memory
def test_a_tile_holds_three_tensors_of_intermediate_columns():
    """Gate, up, and their product or its gradient; beside sums, and all tokens' output, upstream gradient and dx."""
    hidden_size, intermediate_size, n, tokens = 512, 8192, 32768, 4096
    module = llama(hidden_size, intermediate_size).to_empty(device="cuda")
    x = torch.zeros(n, hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(2):  # the first allocates cuBLAS's workspace
        x.grad = None
        module.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tiled(module, module, x, tokens).backward(torch.empty_like(x))
        peak = torch.cuda.max_memory_allocated() - before
    others = 3 * n * hidden_size * 2 + 3 * hidden_size * intermediate_size * 4
    assert peak - others < 3.4 * tokens * intermediate_size * 2


def test_an_input_changed_in_place_is_refused():
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            doubled = 2 * x
            y = self.linear(doubled)
            doubled.add_(1.0)
            return y + doubled

    module = Changes()
    with pytest.raises(RuntimeError, match=r"was changed in place after the layer read it"):
        tiled(module, module, rows(40, H).float(), 8).sum().backward()


def test_auto_tiles_where_more_than_half_of_the_memory_goes():
    module = llama(4096, 14336)
    # Tiles of 8192 tokens have 3 tensors of the 4 that whole MLPs have, and sums of 12 bytes a weight take as much: as
    # 12288 tokens of whole ones, twice.
    assert tile_tokens(module, states(24576, 4096), "auto") is None
    assert tile_tokens(module, states(24577, 4096), "auto") is not None
    assert tile_tokens(module.requires_grad_(False), states(12289, 4096), "auto") is not None  # no sums
    # float32 gradients are their own sums.
    wide = llama(4096, 14336, torch.float32)
    assert tile_tokens(wide, states(12289, 4096, torch.float32), "auto") is not None
