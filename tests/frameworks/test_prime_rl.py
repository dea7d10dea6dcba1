"""prime-rl's heads: values and gradients against logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import relative_error
from torch import Tensor, nn

from liger_chunked.integrations.frameworks import prime_rl

B, T, H, V = 3, 10, 8, 23
BOUND = 1e-9  # float64: a few thousand additions round to less


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
        head.weight = nn.Parameter(torch.randn(V, H, dtype=torch.float64))
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
