from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import liger_chunked as library
from liger_chunked.cli import tables

# Endings of files -> the loader of `datasets`, and its settings.
_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
    ".md": ("text", {"sample_by": "document"}),
}


def load_model(source: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a model on a device, and its tokenizer, of a name, a folder or a `.gguf` file."""
    if find_spec("transformers") is None:
        raise ValueError("score needs transformers: pip install 'liger_chunked[transformers]'")
    transformers: Any = import_module("transformers")
    path, settings = Path(source), {}
    if path.suffix == ".gguf":
        source, settings = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **settings)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **settings)
    except OSError as error:
        raise ValueError(f"MODEL must be a name, a folder or a .gguf file: {error}") from None
    return model.to(device), tokenizer


def load_data(source: str, split: str) -> Any:
    """Return a data set of a file, of a folder that `save_to_disk` or the hub wrote, or of a name."""
    if find_spec("datasets") is None:
        raise ValueError("score needs datasets: pip install datasets")
    datasets: Any = import_module("datasets")
    path = Path(source)
    if path.suffix in _FILES and not path.exists():
        raise ValueError(f"DATA must be a file, a folder or a name of a data set: there is no file {source}")
    if path.is_file():
        if path.suffix not in _FILES:
            raise ValueError(f"DATA must end in one of {', '.join(_FILES)}, got {path.name}")
        loader, settings = _FILES[path.suffix]
        return datasets.load_dataset(loader, data_files=str(path), split="train", **settings)
    try:
        if (path / "state.json").exists():
            return datasets.load_from_disk(source)
        return datasets.load_dataset(source, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"DATA must be a file, a folder or a name of a data set: {error}") from None


def windows(data: Any, column: str, tokenizer: Any, max_length: int) -> list[Tensor]:
    """Return the documents as token ids (T,), cut to windows of at most `max_length`, the longest first."""
    if column not in data.column_names:
        raise ValueError(f"--column must be one of {', '.join(data.column_names)}, got {column!r}")
    found = []
    for value in data[column]:
        if not isinstance(value, str):  # messages
            value = tokenizer.apply_chat_template(value, tokenize=False)
        ids = torch.tensor(tokenizer(value)["input_ids"], dtype=torch.int64)
        found += [part for part in ids.split(max_length) if len(part) > 1]
    if not found:
        raise ValueError(f"column {column!r} has no document of two tokens or more")
    return sorted(found, key=len, reverse=True)  # the largest batch first: it fits, or none does


def batches(found: list[Tensor], batch_size: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(found), batch_size):
        part = found[start : start + batch_size]
        ids, mask = (torch.nn.utils.rnn.pad_sequence(x, True) for x in (part, [torch.ones_like(x) for x in part]))
        yield {"input_ids": ids, "attention_mask": mask}


def show(model: Any, found: list[Tensor], batch_size: int, title: str, logits_budget: str | None) -> None:
    from rich.progress import track

    n = -(-len(found) // batch_size)
    parts = track(batches(found, batch_size), title, total=n, console=tables.console(), transient=True)
    result = library.perplexity(model, parts, logits_budget=logits_budget)
    numbers = {
        "perplexity": f"{result.perplexity:.4g}",
        "nats a token": f"{result.nll:.4f}",
        "most likely": f"{result.accuracy:.1%}",
        "tokens": f"{result.tokens}",
        "windows": f"{len(found)}",
    }
    notes = ["most likely: the share of tokens to which the model gives the highest probability."]
    tables.show(title, list(numbers), [list(numbers.values())], notes)
