"""Test blocks of teacher logits within a chunk of the student."""

from __future__ import annotations

import pytest
from spies import noted
from table import SMALL, evaluate, relative_error, students
from test_distillation import LOSSES, SOFT
from test_extension import SymmetricKL

from liger_chunked.engine import cutting
from liger_chunked.engine.sink import Sink
from liger_chunked.engine.source import LogitsSource


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
