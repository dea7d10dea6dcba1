"""Random programs on logits: none may have another value, gradient or error than on stock logits."""

from __future__ import annotations

import programs
import pytest
from against_stock import slightly_wrong, stock

COUNT, PARTS = 300, 3


@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part: int) -> None:
    """Errors match in kind. At most 2% may be refused."""
    n = COUNT // PARTS
    report = programs.examine(n, start=part * n)
    assert not report.wrong, "\n".join(report.texts())
    assert report.counts["refused"] <= 0.02 * n, report.refused


def test_programs_on_stock() -> None:
    """The programs themselves are right, and most of them compare values."""
    report = programs.examine(COUNT, defer=stock)
    assert not report.wrong and not report.refused
    assert report.counts["equal"] > 0.8 * COUNT


def test_a_wrong_gradient_is_found() -> None:
    report = programs.examine(30, defer=slightly_wrong)
    assert len(report.wrong) > 15
    assert all("gradient" in reason or "note" in reason or "hook" in reason for *_, reason in report.wrong)


def test_a_program_is_the_same_each_time() -> None:
    first, second = (programs.written(3, 5)[:2] for _ in range(2))
    assert first == second
