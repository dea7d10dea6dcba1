"""Scores are those of the model's own logits, of any kind of model, and cost one product and no logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from eager.token_stats import token_stats
from model_zoo import BY_ID
from peft import LoraConfig, get_peft_model
from spies import Memory, flop_counter

import liger_chunked
import liger_chunked as lc
from liger_chunked import apply_liger_kernel, defer_logits, next_tokens, perplexity, score, teacher_top_k
from liger_chunked.types import OUTPUTS, Head

# A plain head, a softcap, a scale, a bias and layer norms, experts, tied weights, an encoder and a decoder.
FAMILIES = ["llama", "gemma2", "cohere", "granite", "phi", "qwen3_moe", "gpt2"]


def batch_of(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.get_text_config().vocab_size - 10, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def stock_values(model: Any, batch: dict[str, Tensor], temperature: float = 1.0) -> dict[str, Tensor]:
    """Return every statistic of the model's real logits, as if the logits were hidden states of an identity head."""
    with torch.no_grad():
        z = model(**batch, use_cache=False).logits
    identity = torch.eye(z.shape[-1], dtype=z.dtype)
    return token_stats(identity, z, next_tokens(batch), outputs=OUTPUTS, temperature=temperature)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in BY_ID])
def test_every_output_is_that_of_the_stock_models_logits(family: str) -> None:
    model = BY_ID[family].build().double().eval()
    model.set_experts_implementation("eager")  # others have no float64
    batch = batch_of(model)
    expected = stock_values(model, batch, temperature=0.7)
    for patched in (False, True):
        if patched:
            apply_liger_kernel(model, rms_norm=False, layer_norm=False)
        found = score(model, batch, OUTPUTS, temperature=0.7)
        for name in OUTPUTS:
            torch.testing.assert_close(getattr(found, name), expected[name], rtol=1e-9, atol=1e-9, msg=name)
    assert not found.logps.requires_grad


def test_a_16_bit_model_errs_as_its_stock_code_does() -> None:
    model = BY_ID["llama"].build().eval()
    batch = batch_of(model)
    outputs = ("logps", "lse", "entropy")
    exact = stock_values(model.double(), batch)
    model.bfloat16()
    stock, ours = stock_values(model, batch), score(model, batch, outputs)
    for name in outputs:
        error = (getattr(ours, name) - exact[name]).norm()
        assert error <= 1.1 * (stock[name] - exact[name]).norm(), name


def test_an_encoder_and_decoder_predicts_its_labels() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).double().eval()
    batch = {"input_ids": torch.randint(1, 64, (2, 6)), "labels": torch.randint(1, 64, (2, 4))}
    batch["labels"][1, 2:] = -100
    with torch.no_grad():
        expected = -F.cross_entropy(model(**batch).logits.transpose(1, 2), batch["labels"], reduction="none")
    torch.testing.assert_close(score(model, batch).logps, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="needs labels"):
        score(model, {"input_ids": batch["input_ids"]})


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(32, 8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.embedding(ids))) / 2


def test_a_model_of_ones_own_is_scored_without_dropout_and_keeps_its_mode() -> None:
    torch.manual_seed(0)
    model, ids, target = Own().double().train(), torch.randint(32, (2, 5)), torch.randint(32, (2, 5))
    model.embedding.eval()
    target[0, 1] = -100
    with pytest.raises(ValueError, match=r"call liger_chunked.defer_logits\(model.lm_head\)"):
        score(model, (ids, target))
    with defer_logits(model.head):
        got = score(model, (ids, target)).logps
        assert [module.training for module in model.modules()] == [True, False, True, True]
    expected = -F.cross_entropy(model.eval()(ids).transpose(1, 2), target, reduction="none", ignore_index=-100)
    torch.testing.assert_close(got, expected.detach())


@pytest.mark.parametrize("bias", [False, True])
def test_heads_and_tensors(bias: bool) -> None:
    linear = nn.Linear(8, 32, bias=bias).double()
    hidden, target = torch.randn(2, 5, 8, dtype=torch.float64), torch.randint(32, (2, 5))
    target[1, 0] = -100
    expected = token_stats(linear.weight, hidden, target, linear.bias, outputs=OUTPUTS, softcap=3.0)
    tensors = (linear.weight, hidden, linear.bias) if bias else (linear.weight, hidden)
    adapted = lc.AdaptedWeight(linear.weight, torch.zeros(32, 2, dtype=torch.float64), lambda x: x[..., :2])
    for found in (
        score(Head(linear.weight, linear.bias), (hidden, target), OUTPUTS, softcap=3.0),
        score(tensors, target, OUTPUTS, softcap=3.0),
        score((adapted, *tensors[1:]), target, OUTPUTS, softcap=3.0),
    ):
        for name in OUTPUTS:
            torch.testing.assert_close(getattr(found, name), expected[name].detach(), rtol=1e-10, atol=1e-10, msg=name)
    torch.testing.assert_close(
        score(linear, (hidden, target)).logps, token_stats(linear.weight, hidden, target, linear.bias)["logps"].detach()
    )


def test_options_of_linear_token_stats_pass_through() -> None:
    weight, hidden, target = torch.randn(11, 4), torch.randn(3, 4), torch.tensor([7, 5, -100])
    kept = lc.KeptIds.from_lists([[7, 3], [5], []])
    expected = liger_chunked.linear_token_stats(weight, hidden, target, kept=kept).logps
    assert torch.equal(score((weight, hidden), target, ("logps",), kept=kept).logps, expected)
    candidates = torch.tensor([[1, 2]] * 3)
    assert score((weight, hidden), target, candidates=candidates).candidate_logps.shape == (3, 2)
    model = BY_ID["gemma2"].build()
    with pytest.raises(TypeError, match="softcap come from the model's forward"):
        score(model, batch_of(model), softcap=2.0)


def test_packed_sequences_have_the_values_of_each_alone() -> None:
    model = BY_ID["llama"].build().double().eval()
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(10, 100, (n,), generator=generator) for n in (4, 6, 1)]
    packed = {
        "input_ids": torch.cat(parts)[None],
        "position_ids": torch.cat([torch.arange(len(x)) for x in parts])[None],
    }
    found = score(model, packed)
    expected = torch.cat([score(model, {"input_ids": x[None]}).logps[0] for x in parts])
    torch.testing.assert_close(found.logps[0], expected, rtol=1e-9, atol=1e-9)
    assert (next_tokens(packed)[0] == -100).nonzero().flatten().tolist() == [3, 9, 10]


def test_shared_prompts_have_the_values_of_each_sequence() -> None:
    model = BY_ID["llama"].build().double().eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 100, (4, 12), generator=generator)
    ids[:, :8] = ids[0, :8]
    labels = ids.clone()
    labels[:, :8] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    score(model, batch, share_prefix=True)  # tries once, on a small copy, whether the model can
    with flop_counter() as alone:
        expected = score(model, batch)
    with flop_counter() as shared:
        found = score(model, batch, share_prefix=True)
    torch.testing.assert_close(found.logps, expected.logps, rtol=1e-9, atol=1e-9)
    assert shared.get_total_flops() < 0.7 * alone.get_total_flops()
    with pytest.raises(ValueError, match="share_prefix takes batches of input_ids"):
        score(model, {**batch, "position_ids": ids}, share_prefix=True)


def test_next_tokens_of_a_batch() -> None:
    ids = torch.tensor([[9, 4, 5, 6], [3, 7, 9, 9]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    ignored = -100
    alone, masked = next_tokens({"input_ids": ids}), next_tokens({"input_ids": ids, "attention_mask": mask})
    assert alone.tolist() == [[4, 5, 6, ignored], [7, 9, 9, ignored]]
    assert masked.tolist() == [[ignored, 5, 6, ignored], [7, ignored, ignored, ignored]]
    labels = ids.masked_fill(ids == 5, ignored)
    assert next_tokens({"input_ids": ids, "labels": labels}).tolist()[0] == [4, ignored, 6, ignored]
    assert torch.equal(next_tokens({"labels": ids, "shift_labels": labels}), labels)
    with pytest.raises(ValueError, match="needs labels, shift_labels or input_ids"):
        next_tokens({"pixel_values": ids})


def test_an_adapter_is_scored() -> None:
    torch.manual_seed(0)
    model = (
        get_peft_model(BY_ID["llama"].build(), LoraConfig(target_modules=["q_proj", "lm_head"], r=2)).double().eval()
    )
    for name, x in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(x, std=0.2)
    batch = batch_of(model)
    torch.testing.assert_close(score(model, batch).logps, stock_values(model, batch)["logps"], rtol=1e-9, atol=1e-9)
    top = teacher_top_k(model, batch, 3)
    expected = model(**batch).logits.log_softmax(-1).topk(3).values.detach()
    counts = next_tokens(batch) != -100
    torch.testing.assert_close(top.logps[counts], expected[counts], rtol=1e-9, atol=1e-9)


def test_perplexity_is_over_tokens_and_not_over_batches() -> None:
    model = BY_ID["llama"].build().double()
    batch = batch_of(model)
    parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    target = next_tokens(batch)
    z = model.eval()(**batch).logits.detach()
    counts = target != -100
    nll = F.cross_entropy(z[counts], target[counts]).item()
    found = perplexity(model, parts)
    assert found.tokens == int(counts.sum())
    assert found.nll == pytest.approx(nll, rel=1e-9) and found.perplexity == pytest.approx(math.exp(nll), rel=1e-9)
    assert found.accuracy == pytest.approx((z.argmax(-1) == target)[counts].double().mean().item())
    with pytest.raises(ValueError, match="no batch of loader has a token"):
        perplexity(model, [])


@pytest.mark.parametrize("budget", [None, 5 * 32 * 8], ids=["", "five-rows"])
@pytest.mark.parametrize("vocab_size", [None, 20])
def test_the_teachers_top_k_is_that_of_its_logits(budget: int | None, vocab_size: int | None) -> None:
    linear = nn.Linear(8, 32).double()
    hidden, target = torch.randn(2, 7, 8, dtype=torch.float64), torch.randint(20, (2, 7))
    target[0, 3] = -100
    top = teacher_top_k(linear, (hidden, target), 4, temperature=2.0, vocab_size=vocab_size, logits_budget=budget)
    values, ids = (linear(hidden)[..., :vocab_size] / 2.0).log_softmax(-1).topk(4)
    counts = target != -100
    assert torch.equal(top.ids[counts], ids[counts]) and top.temperature == 2.0
    torch.testing.assert_close(top.logps[counts], values[counts].detach())
    assert (top.logps[0, 3] == -math.inf).all()
    for k in (0, 33):
        with pytest.raises(ValueError, match="k must be 1 to 32"):
            teacher_top_k(linear, (hidden, target), k)
    with pytest.raises(ValueError, match="vocab_size must be 1 to 32"):
        teacher_top_k(linear, (hidden, target), 4, vocab_size=33)


@pytest.mark.parametrize("run", ["score", "top_k"])
def test_costs_one_product_and_no_logits(run: str) -> None:
    """The head's product with the predicted tokens, here 5/8 of all, and no tensor as large as their logits."""
    tokens, hidden_size, vocab = 512, 16, 4096
    linear = nn.Linear(hidden_size, vocab, bias=False)
    hidden, target = torch.randn(tokens, hidden_size), torch.randint(vocab, (tokens,))
    target[5 * tokens // 8 :] = -100
    budget = 1 << 20
    with flop_counter() as flops, Memory() as memory:
        memory.expect(linear.weight, hidden, target)
        if run == "score":
            score(linear, (hidden, target), logits_budget=budget)
        else:
            teacher_top_k(linear, (hidden, target), 8, logits_budget=budget)
    assert flops.get_total_flops() == 2 * (5 * tokens // 8) * hidden_size * vocab
    assert memory.largest <= budget < tokens * vocab * 4 / 7


def test_what_cannot_be_scored_is_refused() -> None:
    hidden, target = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(TypeError, match="model must be a module or a Head"):
        score(hidden, target)
    with pytest.raises(TypeError, match="batch must be a mapping"):
        score(nn.Linear(4, 11), hidden)
    model = BY_ID["llama"].build()
    model.lm_head.register_forward_hook(lambda module, args, out: out.sort(-1).values)
    with pytest.raises(ValueError, match="returned real logits"):
        score(model, batch_of(model))
