"""Patched layers under torch.compile: one graph for each kind of layer, and the saved tensors of eager code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from model_zoo import BY_ID, Tiny
from test_models import assert_same_step, labelled, step
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import liger_chunked as lc
from liger_chunked.integrations.transformers import apply_liger_kernel

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore")]

LAYERS = 12


def deep(name: str) -> Tiny:
    """Return a model with more layers than Dynamo's recompile limit."""
    tiny = BY_ID[name]
    assert torch._dynamo.config.recompile_limit < LAYERS
    return dataclasses.replace(tiny, config={**tiny.config, "num_hidden_layers": LAYERS})


@pytest.fixture(autouse=True)
def cuda_before_checkpoints():
    """Initialize CUDA. A checkpoint rejects a region that does, and compilers initialize it if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.init()


@pytest.fixture
def graphs():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_regional_compilation(name, checkpointed, graphs):
    """With `layer.compile()` on every layer there is one graph, and the step equals that of the stock model."""
    tiny = deep(name)
    # With a cache, which checkpoints switch off, stock's layers too are one graph each.
    model, arguments = tiny.build(), labelled(tiny, use_cache=False)
    stock = step(model, arguments)
    apply_liger_kernel(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_same_step(step(model, arguments), stock)
    assert graphs.frame_count == 1


@pytest.mark.slow
def test_two_models_share_their_graph(graphs):
    """The graphs of a model's forward are reused for a second model of the class, with that model's parameters."""
    tiny = dataclasses.replace(BY_ID["llama"], config={**BY_ID["llama"].config, "num_hidden_layers": 1})
    arguments, counts = labelled(tiny), []
    for seed in (0, 1):
        model = tiny.build(seed)
        stock = step(model, arguments)
        apply_liger_kernel(model)
        model.compile(backend=graphs)
        assert_same_step(step(model, arguments), stock)
        counts.append(graphs.frame_count)
    assert counts == [1, 1]


def rows() -> tuple[Tensor, ...]:
    return tuple(torch.randn(4, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2))


def rotation() -> tuple[Tensor, ...]:
    q, k = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 1, 4, 8, requires_grad=True)
    return q, k, torch.randn(1, 4, 8), torch.randn(1, 4, 8)


WEIGHT, BIAS = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "rms_norm": (lambda x, _: lc.liger_rms_norm(x, WEIGHT), rows),
    "rms_norm, frozen": (lambda x, _: lc.liger_rms_norm(x, WEIGHT.detach()), rows),
    "rms_norm, gemma": (lambda x, _: lc.liger_rms_norm(x, WEIGHT, offset=1.0, casting="gemma"), rows),
    "rms_norm of a sum": (lambda x, r: lc.liger_rms_norm(x, WEIGHT, residual=r), rows),
    "layer_norm": (lambda x, _: lc.liger_layer_norm(x, WEIGHT, BIAS), rows),
    "swiglu": (lc.liger_swiglu, rows),
    "swiglu in place": (lambda gate, up: lc.liger_swiglu(gate * 1, up * 1, inplace=True), rows),
    "packed geglu": (lambda x, _: lc.liger_geglu(x), rows),
    "rope": (lc.liger_rotary_pos_emb, rotation),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KERNELS)
def test_saved_tensors_are_those_of_eager_code(name):
    """They agree in number, shape, dtype and order."""
    kernel, make = KERNELS[name]
    inputs = make()
    torch.compiler.reset()
    found = []
    for run in (kernel, torch.compile(kernel, backend="aot_eager")):
        saved: list[tuple[torch.Size, torch.dtype]] = []

        def pack(x: Tensor, saved: list[Any] = saved) -> Tensor:
            saved.append((x.shape, x.dtype))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(*inputs)
        found.append(saved)
    assert found[0] and found[0] == found[1]
