"""Distillation where it has gone wrong before: vocabularies, disjoint distributions, temperatures, top-k."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from table import SMALL, evaluate, moved, relative_error, rows_like, students
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearTVDLoss,
    LogitOptions,
    linear_token_stats,
    reference,
)
from liger_chunked.kernels import divergence_grad_, divergence_stats, tail_grad_, tail_stats

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


def by_kernels(loss: LigerFusedLinearDistillationBase, z: Tensor, t: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The divergence of each row, and its gradient."""
    made = LogitOptions(**options)
    z = z.clone()
    stats = divergence_stats(z, t, None, loss.closed_form(), made, made)
    return stats.divergence, divergence_grad_(
        z, t, None, stats, torch.ones_like(stats.divergence), None, loss.closed_form(), made, made
    )


def by_autograd(loss: LigerFusedLinearDistillationBase, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the loss's own `divergence`."""
    z = z.clone().requires_grad_()
    divergence = loss.divergence(z, t)
    return divergence.detach(), torch.autograd.grad(divergence.sum(), z)[0]


# HARD_CASES 10: another hidden size, a padded vocabulary


@pytest.mark.parametrize("padding", [0, 1, 128])
@by_loss
def test_padding_of_the_teacher_vocabulary_is_left_out(loss, padding):
    batch = students(SMALL, seed=0, padding=padding)
    del batch["target"]
    cut = {name: x[: SMALL.vocab] if name in ("teacher_weight", "teacher_bias") else x for name, x in batch.items()}
    assert SMALL.hidden != SMALL.ref_hidden
    if padding:
        batch["teacher_bias"][SMALL.vocab :] += 50  # all of the teacher's mass, if it counted
    ours = evaluate(lambda b: loss(**b)[0], batch)
    exact = evaluate(lambda b: loss(**b)[0], cut)
    for name in exact:
        assert torch.equal(ours[name], exact[name]), name


def test_padded_teacher_of_real_sizes():
    """152064 against 151936, a token at a time."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.5 * torch.randn(151936, 4, generator=generator)
    teacher_weight = 0.5 * torch.randn(152064, 6, generator=generator)
    input, teacher_input = torch.randn(3, 4, generator=generator), torch.randn(3, 6, generator=generator)
    loss, _ = LOSSES["jsd"](weight, input, teacher_weight, teacher_input)
    exact = LOSSES["jsd"].divergence(input @ weight.T, teacher_input @ teacher_weight[:151936].T).mean()
    assert loss == pytest.approx(exact.item(), rel=1e-5)


# HARD_CASES 15: the ends of beta, disjoint distributions, a student that is its teacher


@pytest.mark.triton
@pytest.mark.parametrize("loss", [*LOSSES.values(), LigerFusedLinearCosineSimilarityLoss()], ids=[*LOSSES, "cosine"])
@pytest.mark.parametrize("cols", [7, 127, 1000, 5000])
def test_kernels_match_autograd(loss, cols, device):
    generator = torch.Generator().manual_seed(cols)
    z, t = 3 * torch.randn(2, 32, cols, generator=generator).to(device)
    ours = by_kernels(loss, z, t)
    exact = by_autograd(loss, z.double(), t.double())
    eager = by_autograd(loss, z, t)
    for value, expected, naive in zip(ours, exact, eager, strict=True):
        # Every row counts the same: pooled as they are, the one row with the largest numbers would decide alone.
        rows = expected.view(32, -1).norm(dim=1)
        error, naive_error = (
            float(((x.double() - expected).view(32, -1).norm(dim=1) / (rows + rows.median())).square().mean().sqrt())
            for x in (value, naive)
        )
        # As many roundings as in eager code, in another order; where that is exact by luck, a unit in the last place.
        assert error <= max(2 * naive_error, 2**-23)


@pytest.mark.triton
@pytest.mark.parametrize("offset", [1e4, -1e4])
@by_loss
def test_offset_logits(loss, offset, device):
    generator = torch.Generator().manual_seed(0)
    # Multiples of 1/64, which the offset leaves exact.
    z, t = ((64 * torch.randn(2, 3, 300, generator=generator)).round() / 64).to(device)
    value, gradient = by_kernels(loss, z, t)
    shifted, shifted_gradient = by_kernels(loss, z + offset, t - offset)
    assert torch.allclose(shifted, value, rtol=1e-6, atol=0)
    assert torch.allclose(shifted_gradient, gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.triton
@by_loss
def test_student_equal_to_teacher(loss, device):
    z = 5 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(device)
    value, gradient = by_kernels(loss, z, z.clone())
    assert float(value.abs().max()) <= 2**-22
    assert float(gradient.abs().max()) <= 2**-22  # of a sum of probabilities that is 1 but for rounding


@pytest.mark.triton
@pytest.mark.parametrize("gap", [200.0, 1e4, 1e30])
@by_loss
def test_disjoint_student_and_teacher(loss, gap, device):
    """Where one is certain of what the other excludes; the plain divergences are as large as the gap, and finite."""
    z = torch.tensor([[gap, 0.0, 0.0], [0.0, gap, 0.0]], device=device)
    t = torch.tensor([[0.0, gap, 0.0], [0.0, gap, 0.0]], device=device)
    value, gradient = by_kernels(loss, z, t)
    exact, exact_gradient = by_autograd(loss, z.double(), t.double())
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    assert torch.allclose(value.double(), exact, rtol=1e-5, atol=1e-7)
    assert torch.allclose(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.triton
@pytest.mark.parametrize("loss", [LOSSES[name] for name in LOSSES if name not in ("kl", "kl-reverse")], ids=repr)
def test_excluded_columns(loss, device):
    """Columns of -inf, in either or both, have no probability, and no part in a bounded divergence's numbers."""
    z, t = torch.randn(2, 2, 40, generator=torch.Generator().manual_seed(0)).to(device)
    z[:, :4], t[:, 2:6] = -math.inf, -math.inf
    value, gradient = by_kernels(loss, z, t)
    exact, exact_gradient = by_autograd(loss, z.double().clamp(min=-1e3), t.double().clamp(min=-1e3))
    assert torch.allclose(value.double(), exact, rtol=1e-5, atol=1e-7)
    assert torch.allclose(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-7)


def _one_hot(column: int) -> Tensor:
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    x[:, column] = 300.0
    return x


_NORMAL = torch.randn(2, 2, 3000, generator=torch.Generator().manual_seed(1))
ROWS_OF_16_BITS = {
    "independent": tuple(_NORMAL),
    "peaked": tuple(12 * _NORMAL),
    "near": (3 * _NORMAL[0], 3.03 * _NORMAL[0]),
    "certain": (_one_hot(3), _one_hot(7)),
    "large": tuple(1e4 + 100 * _NORMAL),
    "holes": tuple(_NORMAL.masked_fill(_NORMAL.abs() < 0.3, -math.inf)),
}


MIXTURES = {
    "jsd-0.05": LigerFusedLinearJSDLoss(beta=0.05),
    "jsd": LigerFusedLinearJSDLoss(),
    "jsd-0.95": LigerFusedLinearJSDLoss(beta=0.95),
    "kl-skew": LigerFusedLinearKLDivLoss(skew=0.3),
    "kl-skew-reverse": LigerFusedLinearKLDivLoss(skew=0.1, reverse=True),
}


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "temperature"), [("bfloat16", 1.0), ("bfloat16", 0.6), ("float16", 3.0)])
@pytest.mark.parametrize("loss", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("rows", ROWS_OF_16_BITS.values(), ids=ROWS_OF_16_BITS)
def test_mixtures_of_16_bit_logits(rows, loss, dtype, temperature, device):
    """Their second sweep has a way of its own to the mixture."""
    z, t = (x.to(device, getattr(torch, dtype)) for x in rows)
    value, gradient = by_kernels(loss, z, t, temperature=temperature)
    exact_z, exact_t = (x.double().clamp(min=-1e5) / temperature for x in (z, t))
    exact, exact_gradient = by_autograd(loss, exact_z, exact_t)
    # The hardware's logarithm is off by 2**-22 of itself, and cancels the gap between log p and log q.
    gap = (exact_z.log_softmax(1) - exact_t.log_softmax(1)).abs().max() / math.log(2)
    bound = 2**-22 * min(120.0, float(gap)) + 1e-6
    assert torch.allclose(value.double(), exact, rtol=0, atol=bound)
    # Rounded to 8 bits, and by Triton's interpreter truncated to them.
    assert torch.allclose(gradient.double(), exact_gradient / temperature, rtol=2**-7, atol=bound)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@by_loss
def test_nan_makes_the_divergence_of_its_row_nan(loss, dtype, device):
    for side in range(2):
        rows = _NORMAL.to(device, dtype, copy=True)
        rows[side, 0, 5] = math.nan
        value, gradient = by_kernels(loss, *rows)
        assert value.isnan().tolist() == [True, False]
        assert not gradient[1].isnan().any()


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_jsd_of_equal_rows_is_zero(dtype, device):
    z = 5 * _NORMAL[0].to(device, dtype)
    value, gradient = by_kernels(LigerFusedLinearJSDLoss(), z, z.clone())
    assert value.tolist() == [0.0, 0.0] and not gradient.any()


@pytest.mark.triton
@pytest.mark.parametrize("beta", [1e-6, 1e-3, 1 - 1e-3, 1 - 1e-6])
def test_jsd_near_its_ends_keeps_its_precision(beta, device):
    """It is of the order of beta (1 - beta), and log(p / m) or log(q / m) of the same order in most places."""
    batch = moved(students(SMALL, seed=0), torch.float32, device)
    loss = LigerFusedLinearJSDLoss(beta=beta, **SOFT)
    near = evaluate(lambda b: loss(**b)[0], batch)
    exact = evaluate(lambda b: loss(**b)[0], moved(batch, torch.float64))
    for name in exact:
        assert relative_error(near[name], exact[name]) < 1e-5, name


def test_jsd_at_a_half_is_symmetric_and_bounded():
    z, t = 50 * torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(0))
    there, _ = by_kernels(LOSSES["jsd"], z, t)
    back, _ = by_kernels(LOSSES["jsd"], t, z)
    assert torch.allclose(there, back, rtol=1e-6)
    assert (there >= 0).all() and (there <= math.log(2) * (1 + 1e-6)).all()


# Conventions


def test_the_temperature_leaves_the_hard_loss_alone():
    batch = students(SMALL, seed=0)
    _, plain = LigerFusedLinearKLDivLoss()(**batch)
    loss, warm = LigerFusedLinearKLDivLoss(temperature=3.0)(**batch)
    assert warm.hard_loss == pytest.approx(plain.hard_loss.item(), rel=1e-12)
    assert warm.soft_loss < plain.soft_loss  # not multiplied by the square of the temperature
    assert loss == pytest.approx(float(0.5 * warm.hard_loss + 0.5 * warm.soft_loss), rel=1e-12)
    assert not warm.hard_loss.requires_grad and not warm.soft_loss.requires_grad


def test_without_a_target_all_tokens_count_and_nothing_is_hard():
    batch = students(SMALL, seed=0)
    valid = batch["target"] != -100
    del batch["target"]
    loss, metrics = LigerFusedLinearJSDLoss()(**batch)
    oracle, _ = reference.distillation(**batch)
    assert metrics.hard_loss == 0
    assert loss == pytest.approx(oracle.item(), rel=1e-12) == pytest.approx(0.5 * metrics.soft_loss.item(), rel=1e-12)
    masked = evaluate(lambda b: LigerFusedLinearJSDLoss()(**b, mask=valid)[0], batch)
    exact = evaluate(lambda b: reference.distillation(**b, mask=valid)[0], batch)
    for name in exact:
        assert relative_error(masked[name], exact[name]) < 1e-12, name


def test_mask_and_target_both_leave_tokens_out():
    batch = students(SMALL, seed=0)
    batch["mask"] = torch.rand(batch["target"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    ours = evaluate(lambda b: LigerFusedLinearJSDLoss()(**b)[0], batch)
    exact = evaluate(lambda b: reference.distillation(**b)[0], batch)
    for name in exact:
        assert relative_error(ours[name], exact[name]) < 1e-12, name


def test_the_teacher_gets_no_gradient():
    batch = students(SMALL, seed=0)
    for name in ("weight", "teacher_weight", "teacher_input", "teacher_bias"):
        batch[name].requires_grad_()
    LigerFusedLinearJSDLoss()(**batch)[0].backward()
    assert batch["weight"].grad is not None
    assert all(batch[name].grad is None for name in ("teacher_weight", "teacher_input", "teacher_bias"))


def test_flat_tokens_and_a_teacher_of_another_dtype():
    batch = moved(students(SMALL, seed=0), torch.float32)
    flat = {n: x.flatten(0, 1) if n in ("input", "teacher_input", "target") else x for n, x in batch.items()}
    loss = LigerFusedLinearJSDLoss()
    assert torch.equal(loss(**batch)[0], loss(**flat)[0])
    mixed = {n: x.bfloat16() if n.startswith("teacher_") else x for n, x in batch.items()}
    exact = {n: x.double() for n, x in mixed.items() if n != "target"} | {"target": mixed["target"]}
    # The teacher's logits are rounded to bfloat16.
    assert loss(**mixed)[0] == pytest.approx(reference.distillation(**exact)[0].item(), rel=1e-2)


@by_loss
def test_closed_form_is_the_divergence(loss):
    """Of every loss, the formula that a top-k uses and the kernel that hidden states use."""
    batch = students(SMALL, seed=0)
    by_autograd = type("ByAutograd", (type(loss),), {"closed_form": lambda self: None})
    other = by_autograd.__new__(by_autograd)
    other.__dict__.update(loss.__dict__)
    ours, same = evaluate(lambda b: loss(**b)[0], batch), evaluate(lambda b: other(**b)[0], batch)
    for name in ours:
        assert relative_error(ours[name], same[name]) < 1e-9, name


# A teacher's top-k


@pytest.mark.parametrize("name", ["kl", "kl-reverse", "jsd", "tvd"])
def test_top_k_of_the_whole_vocabulary_is_the_divergence(name):
    batch = students(SMALL, seed=0)
    teacher = (batch["teacher_input"] @ batch["teacher_weight"].T + batch["teacher_bias"]).log_softmax(-1)
    logps, ids = teacher.topk(SMALL.vocab, dim=-1)
    student = {n: x for n, x in batch.items() if not n.startswith("teacher_")}
    full = evaluate(lambda b: LOSSES[name](**b)[0], batch)
    top = evaluate(lambda b: LOSSES[name](**b, teacher_logps=logps, teacher_ids=ids)[0], student)
    for key in full:
        assert relative_error(top[key], full[key]) < 1e-9, key


@pytest.mark.triton
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_that_rise_after_their_first_block(loss, temperature, device):
    """Either row, or both, far beyond the reach of the maximum of its first block."""
    z, t = 2 * torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    z[0, 4500:] += 100
    t[1, 4600:] += 100
    z[2, 3000:4000] += 40
    t[2, 3500:4500] += 40
    ours = by_kernels(loss, z, t, temperature=temperature)
    exact = by_autograd(loss, z.double() / temperature, t.double() / temperature)
    for value, expected in zip(ours, (exact[0], exact[1] / temperature), strict=True):
        assert relative_error(value, expected) < 1e-5


@pytest.mark.triton
@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("row", rows_like("top-k"), ids=repr)
def test_gradients_of_a_top_k(row, target, device):
    """Without a target that of the tail is a column of a matrix."""
    batch = moved(row.sample(SMALL, seed=1), torch.float32, device)
    if not target:
        del batch["target"]
    ours, exact = evaluate(row.ours, batch), evaluate(row.oracle, moved(batch, torch.float64))
    for name in exact:
        assert relative_error(ours[name], exact[name]) < 2e-6, name


@pytest.mark.triton
def test_tail_keeps_its_precision(device):
    """A student that is certain of the top-k: what is left is found by a sum of its own, and not as 1 - sum(p)."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, :3] += 40
    holes = logits.clone()
    holes[:, :3] = -math.inf
    for options in (LogitOptions(), LogitOptions(temperature=2.0), LogitOptions(softcap=3.0, logit_scale=-1.0)):
        z = options.logit_scale * logits[:, 3:].double()
        z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
        exact = (z / options.temperature).logsumexp(1)
        stats = tail_stats(holes, options, hard=True)
        assert torch.allclose(stats.centre / options.temperature + stats.log_sum, exact.float(), rtol=1e-6)
        gradient = tail_grad_(holes.clone(), stats, torch.ones_like(stats.centre), None, options)
        assert (gradient[:, :3] == 0).all()
        total = torch.autograd.functional.vjp(
            lambda x, o=options: ((o.logit_scale * x if o.softcap is None else o.softcap * torch.tanh(
                o.logit_scale * x / o.softcap)) / o.temperature).logsumexp(1).sum(),
            logits[:, 3:].double(),
        )[1]  # fmt: skip
        assert torch.allclose(gradient[:, 3:].double(), total, rtol=1e-5, atol=1e-9)


def test_certain_student_of_a_top_k_is_finite():
    """The tail's probability is far below the last bit of 1."""
    weight = torch.eye(6, requires_grad=True)
    input = torch.tensor([[60.0, 0, 0, 0, 0, 0]])
    logps, ids = torch.tensor([[-0.1, -3.0]]), torch.tensor([[0, 1]])
    loss, _ = LOSSES["kl"](weight, input, teacher_logps=logps, teacher_ids=ids)
    loss.backward()
    left = 1 - math.exp(-0.1) - math.exp(-3.0)
    exact = -0.1 * math.exp(-0.1) + math.exp(-3.0) * (-3 + 60) + left * (math.log(left) + 60 - math.log(4))
    assert loss.item() == pytest.approx(exact, rel=1e-5)
    assert torch.isfinite(weight.grad).all()


def test_top_k_needs_no_teacher_logits():
    batch = students(SMALL, seed=0, top_k=3)
    with pytest.raises(ValueError, match="LigerFusedLinearCosineSimilarityLoss needs the teacher's logits"):
        LigerFusedLinearCosineSimilarityLoss()(**batch)


# A divergence of one's own


class SymmetricKL(LigerFusedLinearDistillationBase):
    of_distributions = True

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("budget", [None, 1, 8 * 9 * SMALL.vocab])
def test_divergence_of_ones_own(budget):
    batch = students(SMALL, seed=0)
    kl, reverse = (LigerFusedLinearKLDivLoss(reverse=r, weight_hard_loss=0.25) for r in (False, True))
    ours = evaluate(lambda b: SymmetricKL(logits_budget=budget)(**b)[0], batch)
    exact = evaluate(lambda b: kl(**b)[0] + reverse(**b)[0], batch)
    for name in exact:
        assert relative_error(ours[name], exact[name]) < 1e-12, name


def test_a_divergence_of_fewer_bits_leaves_the_hard_loss_its_own():
    """Its gradient, of 1e-8 a token, is none in float16."""

    class Halved(SymmetricKL):
        def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
            return super().divergence(student_logits, teacher_logits).half()

    batch, settings = students(SMALL, seed=0), {"weight_soft_loss": 0.0, "weight_hard_loss": 1.0}
    ours, exact = (
        evaluate(lambda b, loss=loss: loss(**settings)(**b, num_items=1e8)[0], batch) for loss in (Halved, SymmetricKL)
    )
    for name in exact:
        assert exact[name].any() and torch.equal(ours[name], exact[name]), name


def test_divergence_of_ones_own_over_bins():
    batch = students(SMALL, seed=0)
    logps, ids = torch.randn(6, 7, 23, dtype=torch.float64).log_softmax(-1).topk(4)
    student = {n: x for n, x in batch.items() if not n.startswith("teacher_")}
    both = evaluate(lambda b: SymmetricKL(weight_hard_loss=0.0)(**b, teacher_logps=logps, teacher_ids=ids)[0], student)
    assert all(torch.isfinite(x).all() for x in both.values())


def test_divergence_of_the_wrong_shape():
    class Summed(LigerFusedLinearDistillationBase):
        def divergence(self, student_logits, teacher_logits):
            return F.mse_loss(student_logits, teacher_logits)

    with pytest.raises(ValueError, match=r"divergence must return one value for each of \d+ tokens, got \(\)"):
        Summed()(**students(SMALL, seed=0))


def test_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        LigerFusedLinearDistillationBase()


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
BAD_INPUT = {
    "no-teacher": (lambda: call(STATES), ValueError, "LigerFusedLinearJSDLoss needs a teacher.*got none"),
    "half-a-teacher": (lambda: call(STATES[:1]), ValueError, "needs a teacher.*got only teacher_input, teacher_bias"),
    "only-logps": (lambda: call_top_k(teacher_ids=None), ValueError, "needs a teacher.*got only teacher_logps"),
    "both-teachers": (
        lambda: call(teacher_logps=f64(B, T, 3), teacher_ids=IDS),
        ValueError,
        "teacher is given twice: as teacher_weight, teacher_input, teacher_bias and as teacher_logps, teacher_ids",
    ),
    "smaller-vocabulary": (
        lambda: call(STATES[2:], teacher_weight=f64(V - 1, H_T)),
        ValueError,
        rf"teacher_weight must have at least the {V} rows of weight \({V}, {H}\), got \({V - 1}, {H_T}\)",
    ),
    "teacher-hidden-size": (
        lambda: call(teacher_weight=f64(V, H_T + 1)),
        ValueError,
        "teacher_input and teacher_weight must agree on the hidden size",
    ),
    "teacher-bias": (lambda: call(teacher_bias=f64(V + 1)), ValueError, rf"teacher_bias must be \({V},\)"),
    "teacher-tokens": (
        lambda: call(teacher_input=f64(B, T + 1, H_T)),
        ValueError,
        rf"teacher_input must be \({B}, {T}, 'H_teacher'\).*got \({B}, {T + 1}, {H_T}\)",
    ),
    "teacher-dtypes": (lambda: call(teacher_weight=torch.zeros(V, H_T)), TypeError, "teacher_weight.*share a dtype"),
    "mask-dtype": (lambda: call(mask=f64(B, T)), TypeError, "mask must be a bool tensor, got torch.float64"),
    "mask-shape": (lambda: call(mask=torch.ones(B, dtype=torch.bool)), ValueError, rf"mask must be \({B}, {T}\)"),
    "logps-shape": (
        lambda: call_top_k(teacher_logps=f64(B, T + 1, 3)),
        ValueError,
        rf"teacher_logps must be \(B, T, k\) or \(N, k\).*got \({B}, {T + 1}, 3\)",
    ),
    "logps-integer": (
        lambda: call_top_k(teacher_logps=IDS),
        TypeError,
        "teacher_logps must be a floating-point tensor",
    ),
    "logps-positive": (
        lambda: call_top_k(teacher_ids=IDS, teacher_logps=f64(B, T, 3, fill=0.1)),
        ValueError,
        "positive number or NaN",
    ),
    "logps-nan": (lambda: call_top_k(teacher_logps=f64(B, T, 3, fill=math.nan)), ValueError, "positive number or NaN"),
    "logps-nowhere": (lambda: call_top_k(teacher_logps=f64(B, T, 3, fill=-math.inf)), ValueError, "-inf alone"),
    "ids-float": (lambda: call_top_k(teacher_ids=f64(B, T, 3)), TypeError, "teacher_ids must be a tensor of token ids"),
    "ids-shape": (
        lambda: call_top_k(teacher_ids=IDS[..., :2]),
        ValueError,
        rf"teacher_ids must be \({B}, {T}, 3\), as teacher_logps is, got \({B}, {T}, 2\)",
    ),
    "ids-too-high": (lambda: call_top_k(teacher_ids=IDS + V), ValueError, rf"teacher_ids holds {V + 2}.*0 to {V - 1}"),
    "ids-too-low": (lambda: call_top_k(teacher_ids=IDS - 5), ValueError, rf"teacher_ids holds -5.*0 to {V - 1}"),
    "ids-twice": (lambda: call_top_k(teacher_ids=IDS * 0), ValueError, "teacher_ids holds a token twice"),
    "top-k-transform": (
        lambda: call_top_k(LigerFusedLinearJSDLoss(teacher_options=LogitOptions(softcap=3.0))),
        ValueError,
        "teacher_options are for teacher_input, got teacher_logps",
    ),
    "temperature": (
        lambda: LigerFusedLinearJSDLoss(temperature=0.0),
        ValueError,
        "temperature must be positive, got 0",
    ),
    "hard-weight": (lambda: LigerFusedLinearJSDLoss(weight_hard_loss=-0.5), ValueError, "weight_hard_loss.*got -0.5"),
    "soft-weight": (
        lambda: LigerFusedLinearJSDLoss(weight_soft_loss=math.nan),
        ValueError,
        "weight_soft_loss.*got nan",
    ),
    "beta": (lambda: LigerFusedLinearJSDLoss(beta=1.5), ValueError, r"beta must be in \[0, 1\], got 1.5"),
    "skew": (lambda: LigerFusedLinearKLDivLoss(skew=1.0), ValueError, r"skew must be in \[0, 1\), got 1.0"),
    "teacher-budget": (
        lambda: LigerFusedLinearTVDLoss(teacher_options=LogitOptions(logits_budget=1)),
        ValueError,
        "logits_budget belongs to the loss, not to teacher_options",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    call, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_loss
def test_top_k_of_a_certain_teacher(loss, dtype, device):
    """Its k add up to 1 in float32: what they leave is little, and not nothing, which is infinitely far from a tail."""
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
    assert value < 25  # nats a token; one bin of 1e-7 is 16 away at most


def test_argmax_of_no_tokens_is_an_index(device):
    target = torch.full((3,), -100, device=device)
    head, input = torch.randn(7, 4, device=device), torch.randn(3, 4, device=device)
    assert linear_token_stats(head, input, target, outputs=("argmax",)).argmax.dtype == torch.int64
