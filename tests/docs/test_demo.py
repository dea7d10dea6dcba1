"""`examples/align.py` at a tiny size: its measurements are right, and errors in data files name line and field."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

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
    summary = align.main([*TINY, "--out", str(tmp_path)])
    assert set(summary.curve_differences) == {"sft_loss", "dpo_loss", "margin"}
    assert max(summary.curve_differences.values()) < 1e-4
    assert summary.n_held_out == 40
    assert 0 <= summary.preference_accuracy <= 1
    for phase in ("SFT", "DPO"):
        fused, eager = (summary.largest_tensor[run][phase] for run in ("fused", "eager"))
        assert 2 * fused < eager
    assert summary.figure.read_bytes().startswith(b"\x89PNG")
    assert "mean reward margin" in capsys.readouterr().out.splitlines()[-1]


def test_held_out_topics_are_not_trained_on(align: ModuleType) -> None:
    data = align.english_preferences(seed=0)
    train = {text for pair in data.train for text in (pair.prompt, pair.chosen)}
    held_out = {text for pair in data.held_out for text in (pair.prompt, pair.chosen)}
    assert not train & held_out
    assert len(held_out) > 200


def test_a_preference_file_then_its_saved_model(align: ModuleType, preference_file: Path, tmp_path: Path) -> None:
    common = [*TINY, "--data", str(preference_file), "--out", str(tmp_path / "out"), "--skip-eager"]
    summary = align.main([*common, "--save", str(tmp_path / "model")])
    assert summary.n_held_out == 3, "the pairs of one prompt stay together"
    assert summary.curve_differences == {}
    again = align.main([*common, "--model", str(tmp_path / "model"), "--max-length", "12"])
    assert again.n_held_out == 3


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
