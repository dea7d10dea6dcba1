"""`fused_lm_head`, the head in TRL's signature, beside the formula in float64."""

from __future__ import annotations

import pytest
import torch

from liger_chunked import fused_lm_head

NAMES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OPTIONS = {"temperature": 0.7, "final_logit_softcapping": 5.0, "logit_scale": 0.5}
LABELS = torch.tensor([3, 0, -100, 10, 2, 5])


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (11, 4), (11,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def exact(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    z = 5.0 * torch.tanh(0.5 * (hidden @ weight.T + bias) / 5.0) / 0.7
    logp = z.log_softmax(-1)
    fields = {
        "log_probs": logp.gather(-1, LABELS.clamp(min=0)[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == LABELS,
    }
    return {name: torch.where(LABELS != -100, x, torch.zeros_like(x)) for name, x in fields.items()}


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients(compiled):
    own, oracle = inputs(), inputs()
    call = torch.compile(fused_lm_head, backend="aot_eager", fullgraph=True) if compiled else fused_lm_head
    hidden, weight, bias = own
    ours, expected = call(hidden, weight, bias, LABELS, **OPTIONS, outputs=NAMES[1:]), exact(*oracle)
    assert sorted(ours) == sorted(NAMES)
    for name in NAMES:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-12, atol=1e-12)
    assert [ours[name].requires_grad for name in NAMES] == [True, True, False, False, False]
    for fields in (ours, expected):
        (fields["log_probs"] - 0.3 * fields["entropy"]).sum().backward()
    for a, b in zip(own, oracle, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_a_head_in_another_dtype_is_cast():
    hidden, *_ = inputs(torch.bfloat16)
    _, weight, bias = inputs(torch.float32)
    fields = fused_lm_head(hidden, weight, bias, LABELS)
    same = fused_lm_head(hidden, weight.bfloat16(), bias.bfloat16(), LABELS)
    assert torch.equal(fields["log_probs"], same["log_probs"])
    fields["log_probs"].sum().backward()
    assert (weight.grad.dtype, bias.grad.dtype) == (torch.float32, torch.float32)


def test_an_unknown_field_raises():
    hidden, weight, bias = inputs()
    with pytest.raises(ValueError, match=r"outputs must be among .*'log_probs'.*got \['logps'\]"):
        fused_lm_head(hidden, weight, bias, LABELS, outputs=("logps",))
