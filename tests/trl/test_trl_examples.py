"""The TRL examples run unchanged, on the CPU, with their tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)


@pytest.mark.few(3, "trl_orpo.py", "trl_simpo.py")
@pytest.mark.parametrize("script", sorted(p.name for p in EXAMPLES.glob("trl_*.py") if p.name != "trl_common.py"))
def test_example(script, monkeypatch, capsys):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script, "--steps", "2"])
    trainer = runpy.run_path(str(EXAMPLES / script), run_name="__main__").get("trainer")
    captured = capsys.readouterr()
    assert "'train_loss'" in captured.out and "2/2" in captured.err
    if trainer is not None:
        assert trainer.state.global_step == 2


def test_they_are_short():
    for path in EXAMPLES.glob("trl_*.py"):
        if path.name != "trl_common.py":
            assert len(path.read_text().splitlines()) <= 40, path
