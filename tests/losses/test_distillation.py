"""Distillation corner cases: vocabularies, masks, temperatures, top-k, user-defined divergences."""

from __future__ import annotations

import math

import eager
import pytest
import torch
import torch.nn.functional as F
from spies import noted
from table import SMALL, assert_same, evaluate, moved, relative_error, rows_like, students
from test_extension import SymmetricKL

from liger_chunked import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearTVDLoss,
    LogitOptions,
)
from liger_chunked.engine import cutting
from liger_chunked.engine.sink import Sink
from liger_chunked.engine.source import LogitsSource

SOFT = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
LOSSES = {
    "kl": LigerFusedLinearKLDivLoss(**SOFT),
    "kl-reverse": LigerFusedLinearKLDivLoss(reverse=True, **SOFT),
    "kl-skew": LigerFusedLinearKLDivLoss(skew=0.1, **SOFT),
    "kl-skew-reverse": LigerFusedLinearKLDivLoss(skew=0.1, reverse=True, **SOFT),
    "jsd": LigerFusedLinearJSDLoss(**SOFT),
    "jsd-1e-6": LigerFusedLinearJSDLoss(beta=1e-6, **SOFT),
    "jsd-almost-1": LigerFusedLinearJSDLoss(beta=1 - 1e-6, **SOFT),
    "tvd": LigerFusedLinearTVDLoss(**SOFT),
}
by_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


# HARD_CASES 10: another hidden size, a padded vocabulary


@pytest.mark.few(4)
@pytest.mark.parametrize("padding", [0, 1, 128])
@by_loss
def test_padding_of_the_teacher_vocabulary_is_left_out(loss, padding):
    batch = students(SMALL, seed=0, padding=padding)
    del batch["target"]
    cut = {name: x[: SMALL.vocab] if name in ("teacher_weight", "teacher_bias") else x for name, x in batch.items()}
    assert SMALL.hidden != SMALL.ref_hidden
    if padding:
        batch["teacher_bias"][SMALL.vocab :] += 50  # would get all of the teacher's probability
    ours = evaluate(lambda b: loss(**b)[0], batch)
    exact = evaluate(lambda b: loss(**b)[0], cut)
    for name in exact:
        assert torch.equal(ours[name], exact[name]), name


def test_padded_teacher_of_real_sizes():
    """Vocabularies of 152064 and 151936, one token per chunk."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.5 * torch.randn(151936, 4, generator=generator)
    teacher_weight = 0.5 * torch.randn(152064, 6, generator=generator)
    input, teacher_input = torch.randn(3, 4, generator=generator), torch.randn(3, 6, generator=generator)
    loss, _ = LOSSES["jsd"](weight, input, teacher_weight, teacher_input)
    exact = LOSSES["jsd"].divergence(input @ weight.T, teacher_input @ teacher_weight[:151936].T).mean()
    assert loss == pytest.approx(exact.item(), rel=1e-5)


# Conventions


def test_the_temperature_leaves_the_hard_loss_alone():
    batch = students(SMALL, seed=0)
    _, plain = LigerFusedLinearKLDivLoss()(**batch)
    loss, warm = LigerFusedLinearKLDivLoss(temperature=3.0)(**batch)
    assert warm.hard_loss == pytest.approx(plain.hard_loss.item(), rel=1e-12)
    assert warm.soft_loss < plain.soft_loss  # has no factor of temperature squared
    assert loss == pytest.approx(float(0.5 * warm.hard_loss + 0.5 * warm.soft_loss), rel=1e-12)
    assert not warm.hard_loss.requires_grad and not warm.soft_loss.requires_grad


def test_without_a_target_all_tokens_count_and_nothing_is_hard():
    batch = students(SMALL, seed=0)
    valid = batch["target"] != -100
    del batch["target"]
    loss, metrics = LigerFusedLinearJSDLoss()(**batch)
    oracle, _ = eager.distillation(**batch)
    assert metrics.hard_loss == 0
    assert loss == pytest.approx(oracle.item(), rel=1e-12) == pytest.approx(0.5 * metrics.soft_loss.item(), rel=1e-12)
    masked = evaluate(lambda b: LigerFusedLinearJSDLoss()(**b, mask=valid)[0], batch)
    exact = evaluate(lambda b: eager.distillation(**b, mask=valid)[0], batch)
    assert_same(masked, exact)


def test_flat_tokens_and_a_teacher_of_another_dtype():
    batch = moved(students(SMALL, seed=0), torch.float32)
    flat = {n: x.flatten(0, 1) if n in ("input", "teacher_input", "target") else x for n, x in batch.items()}
    loss = LigerFusedLinearJSDLoss()
    assert torch.equal(loss(**batch)[0], loss(**flat)[0])
    mixed = {n: x.bfloat16() if n.startswith("teacher_") else x for n, x in batch.items()}
    exact = {n: x.double() for n, x in mixed.items() if n != "target"} | {"target": mixed["target"]}
    # The teacher's logits are rounded to bfloat16.
    assert loss(**mixed)[0] == pytest.approx(eager.distillation(**exact)[0].item(), rel=1e-2)


# A teacher's top-k


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["kl", "kl-reverse", "jsd", "tvd"])
def test_top_k_of_the_whole_vocabulary_is_the_divergence(name):
    batch = students(SMALL, seed=0)
    teacher = (batch["teacher_input"] @ batch["teacher_weight"].T + batch["teacher_bias"]).log_softmax(-1)
    logps, ids = teacher.topk(SMALL.vocab, dim=-1)
    student = {n: x for n, x in batch.items() if not n.startswith("teacher_")}
    full = evaluate(lambda b: LOSSES[name](**b)[0], batch)
    top = evaluate(lambda b: LOSSES[name](**b, teacher_logps=logps, teacher_ids=ids)[0], student)
    assert_same(top, full, 1e-9)


@pytest.mark.few(2)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("row", rows_like("top-k"), ids=repr)
def test_gradients_of_a_top_k(row, target, device):
    """Without a target, the gradient of the tail is a column of a matrix."""
    batch = moved(row.sample(SMALL, seed=1), torch.float32, device)
    if not target:
        del batch["target"]
    ours, exact = evaluate(row.ours, batch), evaluate(row.oracle, moved(batch, torch.float64))
    assert_same(ours, exact, 2e-6)


def test_certain_student_of_a_top_k_is_finite():
    """The tail's probability is far below the rounding of 1."""
    weight = torch.eye(6, requires_grad=True)
    input = torch.tensor([[60.0, 0, 0, 0, 0, 0]])
    logps, ids = torch.tensor([[-0.1, -3.0]]), torch.tensor([[0, 1]])
    loss, _ = LOSSES["kl"](weight, input, teacher_logps=logps, teacher_ids=ids)
    loss.backward()
    left = 1 - math.exp(-0.1) - math.exp(-3.0)
    exact = -0.1 * math.exp(-0.1) + math.exp(-3.0) * (-3 + 60) + left * (math.log(left) + 60 - math.log(4))
    assert loss.item() == pytest.approx(exact, rel=1e-5)
    assert torch.isfinite(weight.grad).all()


def test_divergence_of_the_wrong_shape():
    class Summed(LigerFusedLinearDistillationBase):
        def divergence(self, student_logits, teacher_logits):
            return F.mse_loss(student_logits, teacher_logits)

    with pytest.raises(ValueError, match=r"divergence must return one value for each of \d+ tokens, got \(\)"):
        Summed()(**students(SMALL, seed=0))


# Bad input


V, H, H_T = SMALL.vocab, SMALL.hidden, SMALL.ref_hidden
B, T = SMALL.sequences, SMALL.length


def call(_drop=(), **changes):
    batch = {name: x for name, x in students(SMALL, seed=0).items() if name not in _drop}
    return LigerFusedLinearJSDLoss()(**batch | changes)


def call_top_k(_loss=None, **changes):
    return (_loss or LigerFusedLinearJSDLoss())(**students(SMALL, seed=0, top_k=3) | changes)


def f64(*shape, fill=0.0, device=None):
    return torch.full(shape, fill, dtype=torch.float64, device=device)


STATES = ("teacher_weight", "teacher_input", "teacher_bias")
IDS = torch.arange(3).expand(B, T, 3)
JSD, KL, TVD, Options = LigerFusedLinearJSDLoss, LigerFusedLinearKLDivLoss, LigerFusedLinearTVDLoss, LogitOptions
NOT_BOTH = "teacher is given twice: as teacher_weight, teacher_input, teacher_bias and as teacher_logps, teacher_ids"
NO_LOGITS = "LigerFusedLinearCosineSimilarityLoss needs the teacher's logits"
BELONGS = "belongs to the loss, not to teacher_options"
# (call, exception, pattern of the message)
BAD_INPUT = {
    "no-teacher": (lambda: call(STATES), ValueError, "LigerFusedLinearJSDLoss needs a teacher.*got none"),
    "both-teachers": (lambda: call(teacher_logps=f64(B, T, 3), teacher_ids=IDS), ValueError, NOT_BOTH),
    "teacher-dtypes": (lambda: call(teacher_weight=torch.zeros(V, H_T)), TypeError, "teacher_weight.*share a dtype"),
    "mask-dtype": (lambda: call(mask=f64(B, T)), TypeError, "mask must be a bool tensor, got torch.float64"),
    "logps-positive": (lambda: call_top_k(teacher_ids=IDS, teacher_logps=f64(B, T, 3, fill=0.1)), ValueError,
        "positive number or NaN"),
    "ids-too-high": (lambda: call_top_k(teacher_ids=IDS + V), ValueError, rf"teacher_ids holds {V + 2}.*0 to {V - 1}"),
    "ids-twice": (lambda: call_top_k(teacher_ids=IDS * 0), ValueError, "teacher_ids holds a token twice"),
    "top-k-transform": (lambda: call_top_k(JSD(teacher_options=Options(softcap=3.0))), ValueError,
        "teacher_options are for teacher_input, got teacher_logps"),
    "teacher-budget": (lambda: TVD(teacher_options=Options(logits_budget=1)), ValueError, f"logits_budget {BELONGS}"),
    "scope": (lambda: _WithScope(), ValueError, "_WithScope.scope is not read, got 'batch'"),
}  # fmt: skip


class _WithScope(LigerFusedLinearTVDLoss):
    def __init__(self):
        super().__init__()
        self.scope = "batch"


@pytest.mark.few(9, "mask-dtype")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    call, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_loss
def test_top_k_of_a_certain_teacher(loss, dtype, device):
    """The k probabilities sum to 1 in float32. The remainder is tiny but not 0, which would make the loss infinite."""
    generator = torch.Generator().manual_seed(0)
    vocab, n, k = 2000, 6, 64
    weight = (torch.randn(vocab, 32, generator=generator) / 32**0.5).to(device).requires_grad_()
    input = torch.randn(n, 32, generator=generator).to(device).requires_grad_()
    teacher = torch.randn(n, vocab, generator=generator)
    teacher[2, 5] = 30.0
    logps, ids = teacher.log_softmax(-1).topk(k)
    logps, ids = logps.to(dtype).to(device), ids.to(device)
    value, _ = loss(weight, input, teacher_logps=logps, teacher_ids=ids)
    value.backward()
    assert value.isfinite() and weight.grad.isfinite().all() and input.grad.isfinite().all()
    assert value < 25  # nats per token; one bin of 1e-7 adds at most 16


# Blocks of teacher logits within a chunk of the student


def test_blocks_of_a_chunk(monkeypatch, cut_with):
    """Each gradient takes one product, for any number of teacher blocks."""
    batch = students(SMALL, seed=0)
    losses = {**LOSSES, "one's own": SymmetricKL(**SOFT)}
    whole = {name: evaluate(lambda b, loss=loss: loss(**b)[0], batch) for name, loss in losses.items()}
    cut_with(FEWEST_TEACHER_TOKENS=4, TEACHER_TOKENS=4, TEACHER_VOCAB=4)
    projected = noted(monkeypatch, LogitsSource, "project", lambda source, x, *_: x.shape[0])
    added = noted(monkeypatch, Sink, "add", lambda sink, tile, dz: dz.shape[0])
    for name, loss in losses.items():
        projected.clear()
        added.clear()
        value = evaluate(lambda b, loss=loss: loss(**b)[0], batch)
        n_valid = max(projected)
        assert n_valid > 8 and added == [n_valid], name
        assert sorted(projected)[:-1] == sorted([4] * (n_valid // 4) + [n_valid % 4] * (n_valid % 4 > 0)), name
        for key, expected in whole[name].items():
            assert relative_error(value[key], expected) < 1e-12, f"{name}: {key}"


@pytest.mark.few(4)
@pytest.mark.parametrize("vocab", [1024, 151936])
@pytest.mark.parametrize("budget", [1, 10**8, 10**9, 5 * 10**9, None])
@pytest.mark.parametrize("beside", [0, 2, 34])  # nothing, a teacher's logits, a user-defined divergence
def test_chunk_and_block_are_within_the_budget(beside, budget, vocab):
    n = 8192 * 151936 // vocab
    tokens, block = cutting.chunk_and_tile(cutting.Budget(budget, vocab, 1536, 2), n, 2 + beside, wants_weight=True)
    assert 1 <= block <= tokens
    held = vocab * (2 * tokens + beside * block)
    if budget is not None:
        assert block == tokens == 1 or held <= budget
        assert tokens == 1 or beside == 0 or held > budget - vocab * (2 + beside)
    else:
        assert held <= 1.5 * cutting.ONE_CHUNK
        assert tokens >= n or beside == 34
    if beside == 2:
        assert block == tokens or block * vocab >= 512 * 128000, "of a small vocabulary as many logits"


def test_a_frozen_head_holds_no_more_for_fewer_chunks():
    """A frozen head has no weight gradient to accumulate, so larger chunks gain nothing."""
    for n in (5000, 8192, 16384):
        frozen = cutting.chunk_and_tile(cutting.Budget(None, 151936, 1536, 2), n, 4, wants_weight=False)
        assert frozen == (4096, 4096)
