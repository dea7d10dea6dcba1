"""`examples/align.py` at a tiny size: its measurements are right, and errors in data files name line and field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--sft-steps", "2", "--dpo-steps", "2", "--batch-size", "16", "--vocab-size", "1024"]


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module that can import the modules next to it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import align

    return align


@pytest.mark.slow
def test_english(
    align: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = align.english_preferences(seed=0)
    few = data._replace(held_out=data.held_out[:40])  # otherwise evaluation would take most of the time
    monkeypatch.setattr(align, "english_preferences", lambda seed: few)
    summary = align.main([*TINY, "--toy", "--out", str(tmp_path)])
    assert set(summary.curve_differences) == {"sft_loss", "dpo_loss", "margin"}
    assert max(summary.curve_differences.values()) < 1e-4
    assert summary.n_held_out == 40
    assert 0 <= summary.preference_accuracy <= 1
    for phase in ("SFT", "DPO"):
        fused, eager = (summary.largest_tensor[run][phase] for run in ("fused", "eager"))
        assert 2 * fused < eager
    assert summary.figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert "mean reward margin" in printed[-4]
    assert "Wilson" in printed[-3]


def test_held_out_topics_are_not_trained_on(align: ModuleType) -> None:
    data = align.english_preferences(seed=0)
    train = {text for pair in data.train for text in (pair.prompt, pair.chosen)}
    held_out = {text for pair in data.held_out for text in (pair.prompt, pair.chosen)}
    assert not train & held_out
    assert len(held_out) > 200


@pytest.mark.slow
def test_questions_to_a_pretrained_model(
    align: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer learns, the eager run stops early at the same losses, and a program verifies the answers.

    The fused run computes common prompts once, the eager run does not.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = align.train_tokenizer(["What is the last word: river, table?"], 512)
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "before")
    before = align.small_llama(4096)  # the head is larger than the layers, as in real models
    before.save_pretrained(tmp_path / "before")
    monkeypatch.setattr(align, "PRETRAINED", replace(align.PRETRAINED, n_train=20, n_held_out=10, logits_budget=2**18))
    arguments = ["--sft-steps", "3", "--dpo-steps", "3", "--batch-size", "4", "--trained-layers", "1"]
    where = ["--model", str(tmp_path / "before"), "--save", str(tmp_path / "after"), "--out", str(tmp_path)]
    shared = mock.Mock(wraps=align.shared_prefix_hidden_states)
    monkeypatch.setattr(align, "shared_prefix_hidden_states", shared)
    summary = align.main([*arguments, *where, "--device", "cpu"])
    assert shared.call_count == 3 + 2 * 3 + 2 * 3, "SFT, DPO with its reference, and two evaluations of ten pairs"
    assert set(summary.curve_differences) == {"sft_loss", "dpo_loss", "margin"}
    assert max(summary.curve_differences.values()) < 1e-5
    assert {when: share.n for when, share in summary.right_answers.items()} == {
        "before": 10,
        "after SFT": 10,
        "after DPO": 10,
    }
    for phase in ("SFT", "DPO"):
        fused, eager = (summary.largest_tensor[run][phase] for run in ("fused", "eager"))
        assert 2 * fused < eager
    assert "What is the last word:" in capsys.readouterr().out.splitlines()[-8]
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    changed = {name for name, weight in before.state_dict().items() if not torch.equal(weight, after[name])}
    assert changed and all(name.startswith("model.layers.1.") for name in changed)


def test_custom_losses_match_full_logits(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import custom_loss

    assert max(custom_loss.main()) < 1e-6
