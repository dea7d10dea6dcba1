"""Tests of `trl_backend.patch`: they pass on the patched TRL 1.16.0, on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, Gemma2Config, LlamaConfig
from trl.trainer.utils import add_fused_lm_head, set_fused_lm_head_backend

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS = [
    LlamaConfig(**SIZES),
    Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=5.0),
    Cohere2Config(**SIZES, logit_scale=0.25),
]
OUTPUTS = ("log_probs", "entropy", "is_top1")


def eager(
    hidden_states,
    weight,
    bias,
    labels,
    *,
    temperature,
    final_logit_softcapping,
    logit_scale,
    outputs,
):
    logits = torch.nn.functional.linear(hidden_states, weight, bias).float() * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    log_probs = (logits / temperature).log_softmax(-1)
    fields = {
        "log_probs": log_probs.gather(-1, labels[:, None])[:, 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "is_top1": log_probs.argmax(-1) == labels,
    }
    return {name: fields[name] for name in outputs}


def run(config, backend=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS, backend=backend)
    input_ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = input_ids.masked_fill(torch.arange(9) < 3, -100)
    output = model(input_ids, labels=labels, fused_lm_head=True)
    (output.loss - 0.1 * output.entropy.sum()).backward()
    return output, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_backend_gives_what_the_kernels_give(config):
    expected, expected_grads = run(config)
    output, grads = run(config, eager)
    for name in ("loss", "label_mask", *OUTPUTS):
        torch.testing.assert_close(output[name], expected[name])
    assert output.log_sum_sq_probs is None and output.mean_logits is None
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_backend_sees_labelled_positions_only():
    seen = []

    def backend(hidden_states, *args, **kwargs):
        seen.append((hidden_states.shape, kwargs["outputs"]))
        return eager(hidden_states, *args, **kwargs)

    run(CONFIGS[0], backend)
    assert seen == [((2 * 6, 32), OUTPUTS)]


def test_all_masked_batch_is_differentiable():
    model = AutoModelForCausalLM.from_config(CONFIGS[0])
    add_fused_lm_head(model, backend=eager)
    input_ids = torch.arange(8)[None]
    loss = model(input_ids, labels=torch.full_like(input_ids, -100), fused_lm_head=True).loss
    loss.backward()
    assert loss == 0 and model.lm_head.weight.grad is not None


def test_default_backend():
    calls = []

    def backend(*args, **kwargs):
        calls.append(kwargs)
        return eager(*args, **kwargs)

    set_fused_lm_head_backend(backend)
    try:
        run(CONFIGS[0])
    finally:
        set_fused_lm_head_backend(None)
    run(CONFIGS[0])
    assert len(calls) == 1
