"""Long sequences on a CUDA device: errors of tiled MLPs in bfloat16, and checkpoints on the host."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from liger_chunked import apply_liger_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ordinary_memory,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1 << 17,
    "pad_token_id": 0,
}
CLASSES = {"llama": "LlamaConfig", "phi3": "Phi3Config", "olmo2": "Olmo2Config"}  # olmo2: a norm after the MLP


@pytest.fixture(autouse=True)
def free_memory():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def config_of(family: str) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    return getattr(module, CLASSES[family])(**SIZES)


def build(family: str, tiles: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    model.to(dtype)
    apply_liger_kernel(model, tiled_mlp=tiles)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step(model: Any, n: int, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step on `n` tokens."""
    ids = torch.randint(1, 32000, (1, n), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    with context():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {"loss": loss.detach(), **gradients}


def trl_offloading(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    offloading = pytest.importorskip("trl.models.activation_offloading")
    return lambda: offloading.get_act_offloading_ctx_manager(model=model)


@pytest.fixture
def deterministic():
    """Attention without atomic sums, which add in another order in each run."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def strictly_deterministic(monkeypatch):
    """FlashAttention, whose backward adds in one order under torch's switch."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses matrix products
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("strictly_deterministic")
@pytest.mark.parametrize("family", CLASSES)
def test_two_runs_give_the_same_bits(family):
    once, again = (step(build(family, 1024), 4096) for _ in range(2))
    assert not [name for name, x in once.items() if not torch.equal(x, again[name])]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", CLASSES)
def test_errors_are_those_of_whole_mlps(family):
    exact = step(build(family, None, torch.float64), 2048)
    whole = step(build(family, None), 2048)
    in_tiles, again = (step(build(family, 512), 2048) for _ in range(2))
    assert all(torch.equal(again[name], x) for name, x in in_tiles.items())
    for name, x in exact.items():
        errors = [((found[name] - x).norm() / x.norm()).item() for found in (in_tiles, whole)]
        assert errors[0] <= 1.05 * errors[1] + 1e-6, (name, errors)


@pytest.mark.usefixtures("deterministic")
def test_checkpoints_on_the_host_change_no_bit():
    model = build("llama", 512)
    expected = step(model, 2048)
    for context in (trl_offloading(model), lambda: save_on_cpu(pin_memory=True)):
        assert all(torch.equal(x, expected[name]) for name, x in step(model, 2048, context).items())
