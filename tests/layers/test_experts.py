"""Rows of experts: the kernels against sums over tokens in float64, patched experts against transformers' own."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from base_ops import DTYPES, error, floor
from sampling import slow_interpreted
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
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from liger_chunked import apply_liger_kernel, register_layer, revert_liger_kernel
from liger_chunked.integrations.transformers import experts, layers
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.layers.experts import Routing, add_bias_, combine_rows, gather_tokens, route

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")

# Tokens, experts each, experts, columns.
CASES = [
    (7, 2, 4, 24),
    (5, 1, 3, 8),
    (9, 3, 5, 1028),  # two blocks of columns
    (1, 6, 6, 16),
    (3, 20, 24, 300),  # three blocks of experts
    (2, 40, 41, 40),
    (70, 1, 2, 8),  # two blocks of an expert's rows
]


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


def ours(x: Tensor, bias: Tensor, weight: Tensor, index: Tensor, inplace: bool = False) -> Tensor:
    routing = route(index, bias.shape[0])
    rows = torch.sin(add_bias_(gather_tokens(x, routing), bias, routing))
    return combine_rows(_without_tail(rows, routing), weight, routing, inplace=inplace)


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


@pytest.mark.few(2)
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case: tuple[int, int, int, int], absent: bool) -> None:
    leaves, index, upstream = sample(case, torch.float64, "cpu", absent)
    found, expected = (gradients(f, leaves, index, upstream) for f in (ours, eager))
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)  # float64 sums in another order


@pytest.mark.few(2)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: tuple[int, int, int, int], absent: bool, dtype: torch.dtype, device: str) -> None:
    leaves, index, upstream = sample(case, dtype, device, absent)
    found = gradients(ours, leaves, index, upstream)
    for x, y in zip(gradients(partial(ours, inplace=True), leaves, index, upstream), found, strict=True):
        assert torch.equal(x, y)
    peers = gradients(eager, leaves, index, upstream)
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
    out = combine_rows(rows, weight.requires_grad_(), routing, inplace=True)
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


def assert_same_step(found: dict[str, Tensor], stock: dict[str, Tensor]) -> None:
    assert found.keys() == stock.keys()
    for key, x in stock.items():
        assert error(found[key], x) <= 2e-5, key


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """No experts were compared by an earlier test."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    experts._is_known.cache_clear()


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


@pytest.mark.few(1)
@slow_interpreted
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
    assert_same_step(found, stock)
    served.clear()
    revert_liger_kernel(model)
    step(model, device)
    assert not served


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["eager", "batched_mm"])
def test_other_implementations_stay(way: str, served: list[str]) -> None:
    model = MODELS["mixtral"]()
    apply_liger_kernel(model)
    model.set_experts_implementation(way)
    stock = copy.deepcopy(model)
    revert_liger_kernel(stock)
    try:
        expected = step(stock)
    except RuntimeError as refusal:  # transformers 5.8: its `batched_mm` overwrites the ids that its gradient needs
        if "modified by an inplace operation" not in str(refusal):
            raise
        pytest.skip("stock does not train")
    found = step(model)
    assert not served
    assert_same_step(found, expected)


def test_experts_of_an_unknown_version(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads an attribute that we do not know, or computes something else, runs as it is."""
    stock = moe.grouped_mm_experts_forward

    def scaled(self: Any, *args: Tensor) -> Tensor:
        return 2.0 * stock(self, *args)

    def with_option(self: Any, *args: Tensor) -> Tensor:
        return stock(self, *args) * (1.0 if self.is_scaled_by_norm else 2.0)

    model = MODELS["mixtral"]()
    apply_liger_kernel(model)
    for other, is_new_version in ((scaled, False), (scaled, True), (with_option, True)):
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", other)
        if is_new_version:
            monkeypatch.setattr(experts, "_STOCK", other)
        for module in model.modules():
            module.is_scaled_by_norm = False
        loss = step(model)["loss"]
        assert not served
        plain = copy.deepcopy(model)
        revert_liger_kernel(plain)
        # The gate's kernel, still in use, rounds in another order than torch.
        torch.testing.assert_close(loss, step(plain)["loss"], rtol=1e-5, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", [torch.inference_mode, lambda: torch.device("meta"), torch.no_grad])
def test_the_first_call_may_be_anywhere(served: list[str], where: Any) -> None:
    model = MODELS["mixtral"]()
    apply_liger_kernel(model)
    with where():
        model(input_ids=torch.ones(1, 3, dtype=torch.long, device="cpu"))
    served.clear()
    step(model)
    assert len(served) == 2


@pytest.mark.parametrize("later", [False, True])
def test_a_forward_that_is_set_on_the_class(later: bool, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock = MODELS["mixtral"](), MixtralExperts.forward

    def halve() -> None:
        monkeypatch.setattr(MixtralExperts, "forward", lambda self, *args: 0.5 * stock(self, *args))

    if not later:
        halve()
    apply_liger_kernel(model)
    halve()
    found = step(model)
    revert_liger_kernel(model)
    expected = step(model)
    assert not served
    assert_same_step(found, expected)


class Looped(torch.nn.Module):
    """Experts that transformers does not run, with the gate of MiniMax-M3."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.limit = 1.7, 7.0
        self.gate_up_proj = torch.nn.Parameter(torch.randn(2, 96, 32) / 6)
        self.down_proj = torch.nn.Parameter(torch.randn(2, 32, 48) / 6)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1.0) * (gate * torch.sigmoid(gate * self.alpha))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        terms = [
            self._apply_gate(x @ up.t()) @ down.t() for up, down in zip(self.gate_up_proj, self.down_proj, strict=True)
        ]
        return sum(y * (weights * (index == i)).sum(-1, keepdim=True) for i, y in enumerate(terms))  # type: ignore


def test_registered_experts_keep_their_forward() -> None:
    register_layer(Looped, layers.EXPERTS_CLAMPED)
    model = MODELS["mixtral"]()
    for layer in model.model.layers:
        layer.mlp.experts = Looped()
    stock = step(model)
    assert apply_liger_kernel(model).replaced["swiglu"] == {"Looped": 2}
    found = step(model)
    assert_same_step(found, stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_hidden_states_stay_wide(dtype: torch.dtype) -> None:
    """Under autocast, experts in 16 bits get float32."""
    module = MODELS["mixtral"]().model.layers[0].mlp.experts.to(dtype)
    x, index = torch.randn(7, 32), chosen(7, 2, 4, "cpu")
    weights = torch.rand(7, 2) * 1e3
    found, stock = experts.grouped_forward(module, x, index, weights), module(x, index, weights)
    assert found.dtype == torch.float32
    # float32 sums in another order; the experts' dtype would add errors of 1e-3.
    torch.testing.assert_close(found, stock, rtol=1e-5, atol=1e-5)


def test_memory_without_a_gradient_of_the_weights() -> None:
    (x, bias, weight), index, _ = sample(CASES[2], torch.float32, "cpu")
    routing, saved = route(index, bias.shape[0]), []
    rows = gather_tokens(x.requires_grad_(), routing)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        combine_rows(rows, weight, routing)
    assert saved == [weight.shape]


@pytest.mark.few(2)
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
def test_frozen_inputs(needs: tuple[bool, ...]) -> None:
    leaves, index, upstream = sample(CASES[2], torch.float32, "cpu")
    leaves = [x.requires_grad_(need) for x, need in zip(leaves, needs, strict=True)]
    outs = [function(*leaves, index) for function in (ours, eager)]
    torch.testing.assert_close(*outs)
    own = [x for x in leaves if x.requires_grad]
    if own:
        found, expected = (torch.autograd.grad(out, own, upstream) for out in outs)
        torch.testing.assert_close(found, expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=5)), ids=str)
def test_every_layout_of_transformers(flags: tuple[bool, ...]) -> None:
    """Gate, bias, transposed weights, norm, expert parallelism. Not the last two at once; old versions know no norm."""
    *_, has_norm, is_parallel = flags
    if is_parallel and not has_norm and "_is_expert_parallel" not in inspect.getsource(experts._STOCK):
        pytest.skip("stock 5.5 has no flag of expert parallelism, and leaves rows of no expert as they were in memory")
    has_norms = "has_post_expert_norm" in inspect.signature(moe.use_experts_implementation).parameters
    assert experts._is_known(*flags) == (not has_norm or (has_norms and not is_parallel))


@pytest.mark.few(1)
@slow_interpreted
@pytest.mark.triton
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name: str, served: list[str], device: str) -> None:
    """The experts' own errors, not those of the layers around them, are bounded by eager's."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # The error of few routing weights scatters from draw to draw, by a third of the bound for 32 tokens.
    n = 32 if INTERPRETED else 512
    module = model.to(torch.bfloat16).model.layers[-1].mlp.experts
    leaves = [torch.randn(n, 32, dtype=torch.bfloat16), torch.rand(n, 2, dtype=torch.bfloat16)]
    index, upstream = chosen(n, 2, 4, "cpu"), torch.randn(n, 32, dtype=torch.bfloat16)

    def results(module: Any) -> list[Tensor]:
        wide = next(module.parameters()).dtype
        x, weight = (leaf.to(device, wide).requires_grad_() for leaf in leaves)
        out = module(x, index.to(device), weight)
        return [out.detach(), *torch.autograd.grad(out, [x, weight, *module.parameters()], upstream.to(out))]

    module.config._experts_implementation = "eager"
    exact, eager = results(copy.deepcopy(module).to(device).double()), results(module.to(device))
    module.config._experts_implementation = "grouped_mm"
    apply_liger_kernel(model)
    found = results(module)
    assert served
    names = ["output", "input", "weight", *dict(module.named_parameters())]
    factor = 1.1 * (2 if INTERPRETED else 1)  # the interpreter truncates to bfloat16
    for key, ours, theirs, truth in zip(names, found, eager, exact, strict=True):
        assert error(ours, truth) <= factor * max(error(theirs, truth), floor(torch.bfloat16)), key
