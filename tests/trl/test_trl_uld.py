"""GOLD across tokenizers against TRL: its loss on logits, and whole runs of its trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spies import Results
from torch import Tensor

pytest.importorskip("trl")

import tiny
from table import relative_error
from test_trl_trainers import assert_same, build, run
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput
from trl.experimental.gold import gold_trainer as gold

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl import across_tokenizers
from liger_chunked.types import Head, LogitOptions

B, H, V, V_TEACHER = 3, 6, 31, 19
BOUND = 1e-9  # float64: a few thousand additions round to less
# Of transformers about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
if not hasattr(gold.ULDLoss, "_align_by_byte_offsets"):
    pytest.skip("this TRL aligns tokens in another way", allow_module_level=True)


def config(**changes: Any) -> SimpleNamespace:
    defaults = {
        "uld_crossentropy_weight": 0.0,
        "uld_distillation_weight": 1.0,
        "uld_student_temperature": 1.0,
        "uld_teacher_temperature": 1.0,
        "uld_skip_student_eos": True,
        "uld_skip_teacher_eos": True,
        "use_extended_uld": True,
        "uld_token_merge_strategy": "observed",
    }
    return SimpleNamespace(**defaults | changes)


def spans(generator: torch.Generator, n_bytes: int, most: int) -> list[tuple[int, int]]:
    """Cut a text into tokens of up to `most` bytes."""
    cuts, end = [], 0
    while end < n_bytes:
        start, end = end, min(n_bytes, end + int(torch.randint(1, most + 1, (1,), generator=generator)))
        cuts.append((start, end))
    return cuts


def tokenized(generator: torch.Generator, vocab: int, prompts: list[int], most: int) -> across_tokenizers.Side:
    """Sequences of a prompt, a text of 12 bytes, and its end, in tokens of one model."""
    rows = [(n, [*spans(generator, 12, most), (12, 12)]) for n in prompts]
    length = max(n + len(tokens) for n, tokens in rows) + 1
    ids = torch.randint(vocab, (len(rows), length), generator=generator)
    labels, offsets = torch.full_like(ids, -100), torch.zeros(*ids.shape, 2, dtype=torch.long)
    for i, (n, tokens) in enumerate(rows):
        answer = slice(n, n + len(tokens))
        labels[i, answer], offsets[i, answer] = ids[i, answer], torch.tensor(tokens)
    return across_tokenizers.Side(labels, ids, offsets)


class Case:
    def __init__(self, prompts: tuple[list[int], list[int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.student = tokenized(generator, V, prompts[0], 4)
        self.teacher = tokenized(generator, V_TEACHER, prompts[1], 3)
        tensors = [(V, self.student.ids), (V_TEACHER, self.teacher.ids)]
        self.weights = [torch.randn(v, H, generator=generator, dtype=torch.float64) for v, _ in tensors]
        self.states = [torch.randn(*ids.shape, H, generator=generator, dtype=torch.float64) for _, ids in tensors]

    def theirs(self, uld: Any) -> list[Tensor]:
        weight, hidden = self.weights[0].clone().requires_grad_(), self.states[0].clone().requires_grad_()
        logits = hidden @ weight.T, self.states[1] @ self.weights[1].T
        sides = self.student, self.teacher
        labels, ids, offsets = ([getattr(side, name) for side in sides] for name in ("labels", "ids", "offsets"))
        loss = uld(*logits, *labels, *ids, *offsets)
        return [loss.detach().reshape(()), *torch.autograd.grad(loss.sum(), (weight, hidden))]

    def ours(self, uld: Any, budget: int | None) -> list[Tensor]:
        weight, hidden = self.weights[0].clone().requires_grad_(), self.states[0].clone().requires_grad_()
        inputs = [
            HeadInput(x, LogitOptions(), BaseModelOutput(), labels=side.labels)
            for x, side in zip((hidden, self.states[1]), (self.student, self.teacher), strict=True)
        ]
        fresh = [across_tokenizers.Side(x.labels, x.ids, x.offsets) for x in (self.student, self.teacher)]
        aligned = across_tokenizers.align(uld, *fresh)
        sides = [(Head(w), x) for w, x in zip((weight, self.weights[1]), inputs, strict=True)]
        loss = across_tokenizers.distance(uld, aligned, *sides, budget)
        return [loss.detach(), *torch.autograd.grad(loss, (weight, hidden))]


PROMPTS = {"prompts": ([2, 4, 3], [3, 1, 2]), "no-prompt": ([0, 2, 3], [2, 0, 1])}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("extended", [True, False], ids=["bytes", "positions"])
@pytest.mark.parametrize("strategy", ["observed", "bayesian"])
@pytest.mark.parametrize("budget", [None, 9000])
def test_equals_trl(prompts: Any, extended: bool, strategy: str, budget: int | None) -> None:
    settings = {"use_extended_uld": extended, "uld_token_merge_strategy": strategy}
    for changes in (
        {},
        {"uld_student_temperature": 0.7, "uld_teacher_temperature": 1.6, "uld_distillation_weight": 0.4},
        {"uld_skip_student_eos": False, "uld_skip_teacher_eos": False, "uld_crossentropy_weight": 0.3},
    ):
        uld, case = gold.ULDLoss(config(**settings, **changes)), Case(prompts)
        assert across_tokenizers.is_served(uld)
        for x, e in zip(case.ours(uld, budget), case.theirs(uld), strict=True):
            assert relative_error(x, e) < BOUND


def test_without_an_answer() -> None:
    """A sequence of which no token counts is 0 in the mean; a batch of these is 0 and connected."""
    uld, case = gold.ULDLoss(config()), Case(PROMPTS["prompts"])
    case.student.labels[1] = -100
    for x, e in zip(case.ours(uld, None), case.theirs(uld), strict=True):
        assert relative_error(x, e) < BOUND
    case.student.labels[:] = -100
    assert not any(x.any() for x in case.ours(uld, None)[:1])


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and some pairs of letters in one token."""
    vocabulary = {token: i for i, token in enumerate(tiny.SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(a, b) for a in "abcdefgh" for b in "ijklmnop"]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(token, special=True) for token in tiny.SPECIAL])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), tiny.SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=tiny.CHAT, **names)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    other_tokenizer().save_pretrained(folder / "teacher")
    return {"use_uld_loss": True, "teacher_tokenizer_name_or_path": str(folder / "teacher"), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"uld_token_merge_strategy": "bayesian"}, marks=pytest.mark.exhaustive),
        pytest.param({"uld_crossentropy_weight": 0.5, "use_extended_uld": False}, marks=pytest.mark.exhaustive),
        pytest.param({"lmbda": 1.0}, marks=pytest.mark.exhaustive),
        pytest.param({"uld_use_hybrid_loss": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_logs_what_trl_logs(tmp_path: Path, changes: dict[str, Any]) -> None:
    logs = []
    for ours in (True, False):
        teacher = tiny.model("softcap", seed=1, vocab_size=330)
        student = tiny.model(vocab_size=260)  # samples ids of the tokenizer alone
        given = settings(tmp_path, **changes)
        logs.append(run(tmp_path, "GOLD", ours, given, True, model=student, teacher_model=teacher))
    assert_same(*logs)


class Logits(Results):
    """Record the shapes of all tensors (B, T, V) that are computed."""

    def __init__(self, *vocabularies: int) -> None:
        super().__init__()
        self.vocabularies, self.shapes = vocabularies, set[tuple[int, ...]]()

    def see(self, x: Tensor) -> None:
        if x.ndim == 3 and x.shape[-1] in self.vocabularies:
            self.shapes.add(tuple(x.shape))


def test_builds_no_logits(tmp_path: Path) -> None:
    """No tensor of the shape of logits is computed, of the student or the teacher, unless TRL's code runs."""
    for hybrid in (False, True):
        given = settings(tmp_path, uld_use_hybrid_loss=hybrid, max_steps=1)
        trainer = build(tmp_path, "GOLD", True, given, teacher_model=tiny.model("wide", seed=1, vocab_size=330))
        with Logits(300, 330) as logits:
            trainer.train()
        assert {shape[-1] for shape in logits.shapes} == ({300, 330} if hybrid else set())
