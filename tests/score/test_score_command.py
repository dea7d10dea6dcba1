"""`liger-chunked score` prints the perplexity and accuracy of a model in a folder on documents in a file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

import tiny
from datasets import Dataset

from liger_chunked import cli

LENGTH = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def expected(texts: list[str]) -> tuple[float, float, int]:
    """Return NLL, accuracy and count of tokens, window by window."""
    stock, tokenizer = tiny.model().eval(), tiny.tokenizer()
    nll, right, n = 0.0, 0, 0
    for text in texts:
        for ids in torch.tensor(tokenizer(text)["input_ids"]).split(LENGTH):
            if len(ids) > 1:
                z = stock(ids[None]).logits[0, :-1].detach()
                nll += F.cross_entropy(z, ids[1:], reduction="sum").item()
                right += int((z.argmax(-1) == ids[1:]).sum())
                n += len(ids) - 1
    return nll / n, right / n, n


@pytest.mark.parametrize("kind", ["jsonl", "txt", "folder", "messages"])
def test_perplexity_of_documents(kind: str, model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [row["prompt"] + 3 * row["chosen"] for row in tiny.rows(5)]
    options = ["--max-length", str(LENGTH), "--batch-size", "3"]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"words": text}) + "\n" for text in texts))
        options += ["--column", "words", "--limit", "4"]
        texts = texts[:4]
    elif kind == "txt":
        texts = ["\n\n".join(texts)]
        path.write_text(texts[0])
    elif kind == "folder":
        Dataset.from_dict({"text": texts}).save_to_disk(path)
    else:
        messages = [[{"role": "user", "content": text}] for text in texts]
        Dataset.from_dict({"text": messages}).save_to_disk(path)
        texts = [f"u:{text}</s>" for text in texts]
    assert cli.main(["score", str(model), str(path), *options]) == 0
    printed = capsys.readouterr().out
    cells = re.split(r"[│┃]", next(line for line in printed.splitlines() if line.startswith("│")))[1:-1]
    perplexity, nll, accuracy, tokens, _ = (cell.strip() for cell in cells)
    mean, right, n = expected(texts)
    assert int(tokens) == n and float(nll) == pytest.approx(mean, abs=1e-4)
    assert float(perplexity) == pytest.approx(math.exp(mean), rel=1e-3)
    assert float(accuracy.rstrip("%")) == pytest.approx(100 * right, abs=0.06)


def test_what_is_not_there_is_named(model: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a b c"}\n')
    for arguments, message in (
        ([tmp_path / "none", data], "MODEL must be a name, a folder or a .gguf file"),
        ([model, tmp_path / "none"], "DATA must be a file, a folder or a name"),
        ([model, model / "config.txt"], "DATA must be a file, a folder or a name"),
        ([model, data, "--column", "words"], "--column must be one of text, got 'words'"),
        ([model, Path(__file__)], "DATA must end in one of .json"),
    ):
        assert cli.main(["score", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
