"""`examples/align.py` at a tiny size: its measurements are right, and errors in data files name line and field."""

from __future__ import annotations

import json
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


@pytest.fixture
def preference_file(tmp_path: Path) -> Path:
    """Write three pairs for each of four prompts, all different."""
    lines = [
        {"prompt": f"Count to {n}:", "chosen": f" {n} apples and {i} pears", "rejected": f" pears {i} and {n} {n}"}
        for n in range(4)
        for i in range(3)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


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
def test_a_preference_file_then_its_saved_model(align: ModuleType, preference_file: Path, tmp_path: Path) -> None:
    common = [*TINY, "--data", str(preference_file), "--out", str(tmp_path / "out"), "--skip-eager"]
    summary = align.main([*common, "--toy", "--save", str(tmp_path / "model")])
    assert summary.n_held_out == 3, "the pairs of one prompt stay together"
    assert summary.curve_differences == {}
    again = align.main([*common, "--model", str(tmp_path / "model"), "--device", "cpu", "--max-length", "12"])
    assert again.n_held_out == 3


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


def test_long_texts_keep_the_end_of_the_prompt(align: ModuleType) -> None:
    pair = align.Preference("a b c d e f g h", " x y", " z", kind="all")
    tokenizer = align.train_tokenizer(["a b c d e f g h x y z"], vocab_size=400)
    batch = align.Encoder(tokenizer, max_length=6, device=torch.device("cpu")).pairs([pair])
    chosen, rejected = (tokenizer.decode(row[mask.bool()]) for row, mask in zip(*batch[:2], strict=True))
    assert (chosen, rejected) == (" f g h x y</s>", " e f g h z</s>")
    for ids, target in zip(batch.input_ids, batch.target, strict=True):
        predicted = target != align.IGNORE_INDEX
        assert torch.equal(target[predicted], ids[1:][predicted[:-1]])
    assert (batch.target != align.IGNORE_INDEX).sum(-1).tolist() == [3, 2]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "chosen": "b"}', "line 13: field 'rejected' is missing"),
        ('{"prompt": "a", "chosen": 7, "rejected": "c"}', "line 13: field 'chosen' must be a string, got int"),
        ('{"prompt": "a", "chosen": "b", "rejected": " "}', "line 13: field 'rejected' is empty"),
        ('["a", "b", "c"]', "line 13: expected an object"),
        ('{"prompt": "a"', "line 13: not JSON"),
    ],
)
def test_malformed_line(align: ModuleType, preference_file: Path, line: str, message: str) -> None:
    preference_file.write_text(preference_file.read_text().rstrip() + f"\n{line}\n")
    with pytest.raises(SystemExit, match=message):
        align.main(["--data", str(preference_file)])


def test_custom_losses_match_full_logits(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import custom_loss

    assert max(custom_loss.main()) < 1e-6
