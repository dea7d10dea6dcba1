"""ChunkedLMHead, and prime-rl's heads: values and gradients against logits in float64."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_process import FreshProcesses
from ranks import join
from table import relative_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import ChunkedLMHead
from liger_chunked.integrations.frameworks import prime_rl

B, T, H, V = 3, 10, 8, 23
WORLD = 2
BOUND = 1e-9  # float64: a few thousand additions round to less


def linear(bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(H, V, bias=bias, dtype=dtype)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, labels, and temperatures: three values, and others at ignored tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (B, T), generator=generator)
    temperature = torch.tensor([0.6, 1.0, 1.7])[torch.randint(3, (B, T), generator=generator)]
    labels[0, :4] = labels[2, 7:] = -100
    temperature[labels == -100] = torch.rand(7) + 2
    return hidden, labels, temperature


def oracle(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: Any,
    softcap: float | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    z = scale * (hidden @ weight.T + (0 if bias is None else bias))
    z = z if softcap is None else softcap * (z / softcap).tanh()
    log_p = (z / torch.as_tensor(temperature, dtype=z.dtype)[..., None]).log_softmax(-1)
    counts = labels != -100
    logps = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return [x.where(counts, 0.0) for x in (logps, -(log_p.exp() * log_p).sum(-1))]


def with_gradients(values: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    weights = [torch.cos(torch.arange(x.numel(), dtype=x.dtype) + i).view(x.shape) for i, x in enumerate(values)]
    loss = sum((x * w).sum() for x, w in zip(values, weights, strict=True))
    return [*(x.detach() for x in values), *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", ["1", "0.7", "one value", "per token"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("softcap", "scale", "budget"), [(None, 1.0, None), (3.0, 1.7, 8 * V * 4)], ids=["plain", "transformed-chunks"]
)
def test_equals_logits(temperature: str, bias: bool, softcap: float | None, scale: float, budget: int | None) -> None:
    hidden, labels, per_token = tokens()
    value = {"1": 1.0, "0.7": 0.7, "one value": torch.tensor(0.7), "per token": per_token}[temperature]
    head = ChunkedLMHead.from_linear(linear(bias), softcap=softcap, logit_scale=scale, logits_budget=budget)
    leaves = [hidden.requires_grad_(), *head.parameters()]
    stats = head(hidden, labels, value)
    assert list(stats) == ["logps", "entropy"]
    found = with_gradients(list(stats.values()), leaves)
    exact = with_gradients(oracle(hidden, head.weight, head.bias, labels, value, softcap, scale), leaves)
    for x, e in zip(found, exact, strict=True):
        assert x.shape == e.shape and relative_error(x, e) < BOUND


def test_without_labels_it_is_the_linear() -> None:
    hidden, labels, _ = tokens()
    stock = linear()
    head = ChunkedLMHead.from_linear(stock, softcap=3.0, logit_scale=2.0)
    leaves = [hidden.requires_grad_(), *head.parameters()]
    found, exact = (with_gradients([module(hidden)], leaves) for module in (head, stock))
    assert all(torch.equal(x, e) for x, e in zip(found, exact, strict=True))
    flat = head(hidden.view(-1, H), labels.view(-1))
    assert torch.equal(flat["logps"].view(B, T), head(hidden, labels)["logps"])


def test_temperatures_add_no_matrix_product() -> None:
    hidden, labels, temperature = tokens()
    head, counts = ChunkedLMHead.from_linear(linear()), []
    for value in (1.0, temperature):
        with FlopCounterMode(display=False) as counter:
            head(hidden.requires_grad_(), labels, value)["logps"].sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * int((labels != -100).sum()) * H * V


def test_shares_the_parameters() -> None:
    stock = linear().eval()
    stock.weight.requires_grad_(False)
    head = ChunkedLMHead.from_linear(stock, logits_budget="1KiB")
    assert head.weight is stock.weight and head.bias is stock.bias and not head.training
    assert isinstance(head, nn.Linear) and list(head.state_dict()) == list(stock.state_dict()) == ["weight", "bias"]
    assert "logits_budget=1024" in repr(head) and ChunkedLMHead.from_linear(head).weight is stock.weight

    hidden, labels, _ = tokens()
    saved = io.BytesIO()
    torch.save(head, saved)
    saved.seek(0)
    copies = [copy.deepcopy(head), pickle.loads(pickle.dumps(head)), torch.load(saved, weights_only=False)]
    loaded = ChunkedLMHead(H, V, dtype=torch.float64, logits_budget="1KiB")
    loaded.load_state_dict(stock.state_dict())
    for other in (*copies, loaded):
        assert other.weight is not head.weight and other.options == head.options
        assert torch.equal(other(hidden, labels)["logps"], head(hidden, labels)["logps"])


class Quantized(nn.Linear):
    pass


def test_refuses_odd_heads() -> None:
    parametrized, hooked, wrapped = linear(), linear(), linear()
    nn.utils.parametrizations.weight_norm(parametrized)
    hooked.register_forward_hook(lambda *_: None)
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    integer = linear()
    integer.weight = nn.Parameter(torch.zeros(V, H, dtype=torch.int8), requires_grad=False)
    refused: list[tuple[Any, type[Exception], str]] = [
        (nn.Embedding(V, H), TypeError, "linear must be an nn.Linear, got a torch.nn.modules.sparse.Embedding"),
        (Quantized(H, V), TypeError, "must be an nn.Linear, got a .*Quantized: dequantize a quantized head, merge"),
        (parametrized, TypeError, "got a .*ParametrizedLinear"),
        (wrapped, TypeError, "with a forward of its own"),
        (integer, TypeError, r"weight must be a plain floating-point tensor, got \(23, 8\) int8 on cpu: dequantize"),
        (hooked, ValueError, "must have no hooks, which the new head would lose, got _forward_hooks"),
    ]
    for module, error, message in refused:
        with pytest.raises(error, match=message):
            ChunkedLMHead.from_linear(module)
    with pytest.raises(ValueError, match="softcap must be a positive number"):
        ChunkedLMHead(H, V, softcap=-1.0)


def test_refuses_temperatures() -> None:
    hidden, labels, temperature = tokens()
    head = ChunkedLMHead.from_linear(linear())
    refused: list[tuple[Any, type[Exception], str]] = [
        (temperature[0], ValueError, r"\(3, 10\) on cpu, one value for each target, got \(10,\) float32"),
        (temperature.long(), TypeError, "temperature must be a number or a float32 tensor"),
        (temperature - 0.6, ValueError, "temperature must be positive and finite at each token that counts, got 0"),
        ("1", TypeError, "temperature must be a number"),
    ]
    for value, error, message in refused:
        with pytest.raises(error, match=message):
            head(hidden, labels, value)
    ignored = head(hidden.requires_grad_(), torch.full_like(labels, -100), temperature)
    (ignored["logps"] + ignored["entropy"]).sum().backward()
    assert not head.weight.grad.any() and not ignored["logps"].any()  # type: ignore[union-attr]


# prime-rl 0.8.0 of 2026-08-21, src/prime_rl/trainer/models/layers/lm_head.py and lm_head_gemma.py. train.py passes
# float32 temperatures of each token, 1 at padding (batch.py), and labels of any value there.
def test_prime_rl() -> None:
    hidden, labels, temperature = tokens()
    labels = labels.clamp(min=0)
    temperature = temperature.clamp(max=1.7)
    for head, softcap in (
        (prime_rl.FusedOutputLinear(in_features=H, out_features=V, chunk_size=4), None),
        (prime_rl.GemmaFusedOutputLinear(in_features=H, out_features=V, chunk_size=4, softcap=3.0), 3.0),
    ):
        head.weight = linear(bias=False).weight
        leaves = [hidden.requires_grad_(), head.weight]
        stats = head(hidden, labels, temperature=temperature)
        assert list(stats) == ["logprobs", "entropy"]
        found = with_gradients(list(stats.values()), leaves)
        exact = with_gradients(oracle(hidden, head.weight, None, labels, temperature, softcap), leaves)
        assert all(relative_error(x, e) < BOUND for x, e in zip(found, exact, strict=True))
        for given in ({"labels": labels}, {"temperature": temperature}):
            with pytest.raises(ValueError, match=r"(labels|temperature) must be given"):
                head(hidden, **given)
        # What the sampler kept, padded with -1. Without the label among it, or without any, all ids count.
        mask = torch.full((*labels.shape, 4), -1, dtype=torch.int32)
        mask[..., 0], mask[:, ::2, 1] = labels, ((labels + 1) % V)[:, ::2]
        mask[0, 0], mask[0, 1, 0] = -1, (labels[0, 1] + 1) % V
        z = hidden @ head.weight.T
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature[..., None]
        keeps = (torch.arange(V) == mask[..., None].long()).any(-2)
        keeps |= ~keeps.gather(-1, labels[..., None])
        log_p = z.masked_fill(~keeps, -torch.inf).log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(~keeps, 0.0)).sum(-1)
        exact = with_gradients([log_p.gather(-1, labels[..., None])[..., 0], entropy], leaves)
        stats = head(hidden, labels, temperature, sampling_mask=mask)
        found = with_gradients(list(stats.values()), leaves)
        assert all(relative_error(x, e) < BOUND for x, e in zip(found, exact, strict=True))
    half = prime_rl.FusedOutputLinear(H, V, None).bfloat16()
    assert half(hidden.bfloat16(), labels, temperature)["logprobs"].dtype == torch.float32


class Model(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.lm_head = nn.Linear(H, V, bias=False, dtype=torch.float64)
        self.lm_head.weight = nn.Parameter(weight.clone())

    def forward(self, hidden: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
        stats = self.lm_head(self.norm(hidden), labels, temperature)
        return (stats["logps"] - 0.1 * stats["entropy"]).sum()


def on_two_ranks(rank: int, folder: str) -> None:
    join(rank, WORLD, folder)
    mesh = init_device_mesh("cpu", (WORLD,))
    (hidden, labels, temperature), stock = tokens(), linear()

    # Tensor parallelism: the rows are split.
    head = ChunkedLMHead.from_linear(stock)
    head.weight, head.bias = (nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)])) for x in head.parameters())
    whole = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()
    leaves = [hidden.requires_grad_(), *stock.parameters()]
    exact = with_gradients(oracle(hidden, *stock.parameters(), labels, temperature), leaves)  # type: ignore[misc]
    head = ChunkedLMHead.from_linear(head)
    found = with_gradients(list(head(whole, labels, temperature).values()), [whole, *head.parameters()])
    for x, e in zip(found, exact, strict=True):
        assert relative_error(x.full_tensor() if isinstance(x, DTensor) else x, e) < BOUND

    # FSDP: each rank has other sequences, and another number of temperatures.
    single = Model(stock.weight)
    stats = oracle(single.norm(hidden.detach()), single.lm_head.weight, None, labels, temperature)
    expected = (stats[0] - 0.1 * stats[1]).sum()
    expected.backward()
    own = slice(0, 2) if rank == 0 else slice(2, 3)
    for own_group in (True, False):
        model = Model(stock.weight)
        model.lm_head = ChunkedLMHead.from_linear(model.lm_head)
        if own_group:
            fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):  # the second step finds FSDP's hooks as the first left them
            model.zero_grad()
            loss = model(hidden[own].detach(), labels[own], temperature[own])
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert relative_error(total, expected.detach()) < BOUND
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and q.grad is not None
            assert relative_error(WORLD * p.grad.full_tensor(), q.grad) < BOUND  # FSDP divides by the ranks
    with pytest.raises(TypeError, match=r"must be an nn.Linear, got a .*FSDPLinear"):
        ChunkedLMHead.from_linear(fully_shard(linear(), mesh=mesh))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_on_two_ranks(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    fresh_process.spawn(on_two_ranks, WORLD, str(tmp_path))
