"""`liger_chunked.testing`: right losses pass, and each mistake is found and named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from table import SMALL, pairs, students

import liger_chunked as lc
from liger_chunked.testing import check_loss

CLASS_WEIGHT = torch.rand(13, generator=torch.Generator().manual_seed(0)) + 0.5


class Logits(lc.LigerFusedLinearDistillationBase):
    """A user's distillation loss."""

    def divergence(self, student_logits, teacher_logits):
        return (student_logits - teacher_logits).square().mean(-1)


class Entropic(lc.LigerFusedLinearPreferenceBase):
    """A user's preference loss, which reads another statistic."""

    token_outputs = ("entropy",)

    def preference_loss(self, pairs):
        chosen, rejected = (pairs.logps / pairs.lengths).unbind(-1)
        return -F.logsigmoid(chosen - rejected) + pairs.token_stats.entropy.sum((1, 2))


RIGHT = {
    "ce": lc.LigerFusedLinearCrossEntropyLoss(),
    "ce-all": lc.LigerFusedLinearCrossEntropyLoss(
        label_smoothing=0.1, lse_square_scale=0.01, ce_weight=CLASS_WEIGHT, entropy_weight=0.1, softcap=5.0
    ),
    "ce-none": lc.LigerFusedLinearCrossEntropyLoss(reduction="none", return_token_accuracy=True),
    "dpo-aot": lc.LigerFusedLinearDPOLoss(loss_type="aot"),
    "dpo-all": lc.LigerFusedLinearDPOLoss(
        beta=0.3, ld_alpha=0.5, use_weighting=True, f_divergence_type="forward_kl", compute_nll_loss=True, temperature=2
    ),
    "orpo": lc.LigerFusedLinearORPOLoss(ignore_index=-1),
    "simpo": lc.LigerFusedLinearSimPOLoss(logit_scale=0.5),
    "kto": lc.LigerFusedLinearKTOLoss(),
    "bco": lc.LigerFusedLinearBCOLoss(),
    "grpo": lc.LigerFusedLinearGRPOLoss(beta=0.1, importance_level="sequence"),
    "grpo-top": lc.LigerFusedLinearGRPOLoss(entropy_coef=0.1, top_entropy_quantile=0.5),
    "jsd": lc.LigerFusedLinearJSDLoss(beta=0.3, temperature=2.0),
    "cosine": lc.LigerFusedLinearCosineSimilarityLoss(),
    "own-divergence": Logits(),
    "own-pairs": Entropic(),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_loss_passes(case):
    loss = RIGHT[case]
    before = {name: value for name, value in vars(loss).items() if not name.startswith("_")}
    report = check_loss(loss)
    assert report.error < 1e-8 and report.tokens > 10 and len(report.budgets) == 2
    assert before == {name: value for name, value in vars(loss).items() if not name.startswith("_")}


def test_a_batch_of_the_users_own():
    batch = {name: x.float() if x.is_floating_point() else x for name, x in pairs(SMALL, seed=1).items()}
    report = check_loss(lc.LigerFusedLinearDPOLoss(), batch)
    assert report.loss == pytest.approx(lc.LigerFusedLinearDPOLoss()(**batch)[0].item(), rel=1e-5)
    teacher = students(SMALL, seed=1)
    teacher.pop("target")  # every token counts if there is no target
    assert check_loss(lc.LigerFusedLinearJSDLoss(), teacher).tokens == SMALL.sequences * SMALL.length
    with pytest.raises(ValueError, match="needs a batch with teacher_weight and teacher_input"):
        check_loss(lc.LigerFusedLinearJSDLoss(), students(SMALL, seed=1, top_k=3) | {"teacher_weight": None})


# Mistakes


class Pair(lc.LigerFusedLinearPreferenceBase):
    """A correct loss. The classes below are wrong versions of it."""

    def preference_loss(self, pairs):
        return -F.logsigmoid(self.margins(pairs))

    def margins(self, pairs):
        return pairs.logps[:, 0] - pairs.logps[:, 1]


class Centred(Pair):
    def preference_loss(self, pairs):
        margins = self.margins(pairs)
        return (margins - margins.mean()).square()


class Sorted(Pair):
    def preference_loss(self, pairs):
        return -F.logsigmoid(pairs.logps[:, 0].sort().values - pairs.logps[:, 1].sort().values)


class CentredCompletions(lc.LigerFusedLinearPolicyBase):
    def policy_loss(self, rollouts):
        return (rollouts.logps - rollouts.logps.mean(0)).square()


class CentredRows(lc.LigerFusedLinearDistillationBase):
    def divergence(self, student_logits, teacher_logits):
        return (student_logits - teacher_logits - student_logits.mean(0)).square().sum(-1)


class Padded(Pair):
    def preference_loss(self, pairs):
        return self.margins(pairs) / pairs.mask.shape[-1]


class Undeclared(Pair):
    def preference_loss(self, pairs):
        return self.margins(pairs) + pairs.token_stats.entropy.sum((1, 2))


class Writes(Pair):
    def preference_loss(self, pairs):
        pairs.logps.mul_(0.5)
        return self.margins(pairs)


class Detached(Pair):
    def preference_loss(self, pairs):
        return self.margins(pairs).detach()


class Stateful(Pair):
    calls = 0

    def preference_loss(self, pairs):
        self.calls += 1
        return self.margins(pairs) * self.calls


class OwnForward(lc.LigerFusedLinearKLDivLoss):
    def divergence(self, student_logits, teacher_logits):
        return 2 * super().divergence(student_logits, teacher_logits)


WRONG = {
    Centred: r"another loss where a small logits_budget cuts .*: a loss of .* instead of .* set scope = \"batch\"",
    Sorted: r"compares pairs with one another: set scope = \"batch\" on the class",
    CentredCompletions: "must treat sequences independently: read batch_size and batch_tokens",
    CentredRows: "divergence must treat tokens independently",
    Padded: "Padded depends on padding: a loss of .* Sum over mask, and divide by lengths",
    Undeclared: r"reads an undeclared statistic: .*entropy.*token_outputs = \('entropy',\)",
    Writes: "Writes.preference_loss writes to its inputs",
    Detached: "Detached.preference_loss returns a tensor without a gradient: it is detached",
    Stateful: "Stateful gives two results for the same call",
    OwnForward: "OwnForward differs from autograd over full logits: a loss of",
}


@pytest.mark.few(13)
@pytest.mark.parametrize("loss", WRONG, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mistake_is_found_and_named(loss, seed):
    with pytest.raises(AssertionError, match=WRONG[loss]):
        check_loss(loss(), seed=seed)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "loss", [lc.LigerFusedLinearDPOLoss, torch.nn.Linear(2, 2), None], ids=["class", "module", "none"]
)
def test_what_is_no_loss(loss):
    with pytest.raises(TypeError, match="loss must be an instance of LigerFusedLinearPreferenceBase"):
        check_loss(loss)


def test_the_report_says_ok_in_words():
    report = check_loss(Entropic())
    words = repr(report)
    assert words == str(report) == f"{report}"
    assert words.startswith(f"ok: a loss of {report.loss:.6g} over {report.tokens} tokens")
    assert f"in pieces of at most {report.budgets[0]} and {report.budgets[1]} bytes of logits" in words
    assert report.budgets[0] > report.budgets[1] and "not checked" in words
