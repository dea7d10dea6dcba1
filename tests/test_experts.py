"""Rows of experts: the kernels against sums over tokens in float64, patched experts against transformers' own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from base_ops import DTYPES, error, floor
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations import moe

from liger_chunked import apply_liger_kernel, revert_liger_kernel
from liger_chunked.integrations.transformers import experts
from liger_chunked.kernels.experts import Routing, add_bias_, combine_rows, gather_tokens, route

CASES = [(7, 2, 4, 24), (5, 1, 3, 8), (9, 3, 5, 516), (1, 6, 6, 16)]  # tokens, experts each, experts, columns


def chosen(n: int, top_k: int, n_experts: int, device: str, absent: bool = False) -> Tensor:
    """Return experts of each token, distinct; the last one has no token, or is no expert."""
    scores = torch.rand(n, n_experts, generator=torch.Generator().manual_seed(n))
    if n_experts > top_k:
        scores[:, -1] = -1.0
        if absent:
            scores[::2, -1] = 1.0
    index = scores.topk(top_k).indices
    return index.masked_fill(index == n_experts - 1, n_experts).to(device) if absent else index.to(device)


def eager(x: Tensor, bias: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Return sum over k of `weight[n, k] sin(x[n] + bias[expert])`, expert by expert."""
    out = torch.zeros_like(x)
    for token, k in itertools.product(range(index.shape[0]), range(index.shape[1])):
        expert = int(index[token, k])
        if expert < bias.shape[0]:
            out[token] = out[token] + weight[token, k] * torch.sin(x[token] + bias[expert])
    return out


def ours(x: Tensor, bias: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    routing = route(index, bias.shape[0])
    rows = torch.sin(add_bias_(gather_tokens(x, routing), bias, routing))
    return combine_rows(_without_tail(rows, routing), weight, routing)


def _without_tail(rows: Tensor, routing: Routing) -> Tensor:
    """Grouped products leave rows of no expert as they find them."""
    tail = torch.arange(len(rows), device=rows.device) >= routing.ends[-1]
    return torch.where(tail[:, None], torch.nan, rows)


def gradients(function: Any, leaves: list[Tensor], index: Tensor, upstream: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves, index)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def sample(case: tuple[int, int, int, int], dtype: torch.dtype, device: str, absent: bool = False) -> Any:
    n, top_k, n_experts, columns = case
    generator = torch.Generator().manual_seed(0)
    shapes = (n, columns), (n_experts, columns), (n, top_k), (n, columns)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return tensors[:3], chosen(n, top_k, n_experts, device, absent), tensors[3]


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case: tuple[int, int, int, int], absent: bool) -> None:
    leaves, index, upstream = sample(case, torch.float64, "cpu", absent)
    found, expected = (gradients(f, leaves, index, upstream) for f in (ours, eager))
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: tuple[int, int, int, int], absent: bool, dtype: torch.dtype, device: str) -> None:
    leaves, index, upstream = sample(case, dtype, device, absent)
    found, peers = (gradients(f, leaves, index, upstream) for f in (ours, eager))
    exact = gradients(eager, [x.double() for x in leaves], index, upstream)
    for value, peer, truth in zip(found, peers, exact, strict=True):
        assert value.dtype == dtype
        assert error(value, truth) <= 1.1 * max(error(peer, truth), 3 * floor(dtype))  # three roundings


@pytest.mark.triton
def test_a_retained_graph_keeps_its_rows(device: str) -> None:
    (x, bias, weight), index, upstream = sample(CASES[0], torch.float32, device)
    routing = route(index, bias.shape[0])
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = combine_rows(gather_tokens(x, routing) * 1.0, weight, routing, inplace=True)
    first = torch.autograd.grad(out, (x, weight), upstream, retain_graph=True)
    for again in torch.autograd.grad(out, (x, weight), upstream), first:
        torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.triton
def test_rows_that_another_operation_saved(device: str) -> None:
    """Overwritten rows raise; they do not give a wrong gradient."""
    (x, bias, weight), index, upstream = sample(CASES[0], torch.float32, device)
    routing = route(index, bias.shape[0])
    rows = gather_tokens(x.requires_grad_(), routing).exp()  # saves its result
    out = combine_rows(rows, weight, routing, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(upstream)


_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "num_experts_per_tok": 2, "num_local_experts": 4,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **{name: x for name, x in _SIZES.items() if name != "num_local_experts"}, "num_key_value_heads": 4,
    "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**_SIZES, head_dim=8)),  # biases, transposed, interleaved
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**_DEEPSEEK)),
}


def step(model: Any, device: str = "cpu") -> dict[str, Tensor]:
    model.zero_grad()
    ids = torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(0)).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes that our forward served."""
    names, forward = [], experts.grouped_forward

    def noted(module: Any, *args: Any) -> Tensor:
        if not isinstance(module, experts._Sample):
            names.append(type(module).__name__)
        return forward(module, *args)

    monkeypatch.setattr(experts, "grouped_forward", noted)
    return names


@pytest.mark.triton
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, served: list[str], device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    for parameter in model.parameters():  # biases start as zeros
        torch.nn.init.normal_(parameter, std=0.1)
    stock = step(model, device)
    apply_liger_kernel(model)
    found = step(model, device)
    assert len(served) == (1 if name == "deepseek_v3" else 2)
    assert found.keys() == stock.keys()
    for key, gradient in stock.items():
        assert error(found[key], gradient) <= 2e-5, key
    served.clear()
    revert_liger_kernel(model)
    step(model, device)
    assert not served


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
def test_other_implementations_stay(way: str, served: list[str]) -> None:
    model = MODELS["mixtral"]()
    apply_liger_kernel(model)
    model.set_experts_implementation(way)
    stock = copy.deepcopy(model)
    revert_liger_kernel(stock)
    found, expected = step(model), step(stock)
    assert not served
    assert all(error(found[key], expected[key]) <= 2e-5 for key in expected)


def test_experts_of_an_unknown_version(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads an attribute that we do not know, or computes something else, runs as it is."""
    stock = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def scaled(self: Any, *args: Tensor) -> Tensor:
        return 2.0 * stock(self, *args)

    def with_option(self: Any, *args: Tensor) -> Tensor:
        return stock(self, *args) * (1.0 if self.is_scaled_by_norm else 2.0)

    model = MODELS["mixtral"]()
    apply_liger_kernel(model)
    for other in (scaled, with_option):
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", other)
        for module in model.modules():
            module.is_scaled_by_norm = False
        loss = step(model)["loss"]
        assert not served
        plain = copy.deepcopy(model)
        revert_liger_kernel(plain)
        torch.testing.assert_close(loss, step(plain)["loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=5)), ids=str)
def test_every_layout_of_transformers(flags: tuple[bool, ...]) -> None:
    """Gate, bias, transposed weights, norm, expert parallelism."""
    assert experts._same_as(moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"], *flags)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu(served: list[str]) -> None:
    torch.manual_seed(0)
    for name, make in MODELS.items():
        model = make().to("cuda", torch.bfloat16)
        exact = copy.deepcopy(model).double()
        exact.set_experts_implementation("eager")
        truth, stock = step(exact, "cuda"), step(model, "cuda")
        apply_liger_kernel(model)
        found = step(model, "cuda")
        assert served
        experts_of = [key for key in truth if ".experts." in key]
        assert experts_of
        for key in experts_of:
            assert error(found[key], truth[key]) <= 1.1 * max(error(stock[key], truth[key]), floor(torch.bfloat16)), (
                name
            )
