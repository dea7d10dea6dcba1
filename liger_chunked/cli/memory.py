from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import liger_chunked as library
from liger_chunked.cli import tables
from liger_chunked.cli.losses import LOSSES, PAIRS
from liger_chunked.types import MemoryEstimate, budget_bytes

_MOST = 1 << 19  # tokens, where the search for a batch ends


def parse_shape(text: str, of_pairs: bool = False) -> tuple[int, ...]:
    """
    >>> parse_shape("8x2048"), parse_shape("16384"), parse_shape("4x2x8192", of_pairs=True)
    ((8, 2048), (16384,), (8, 8192))
    """
    sizes = text.split("x")
    if not 1 <= len(sizes) <= 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--shape must be like 8x2048, 16384 or, for losses of pairs, 4x2x2048, got {text!r}")
    shape = tuple(map(int, sizes))
    if len(shape) < 3:
        return shape
    if not of_pairs or shape[1] != 2:
        raise ValueError(f"--shape with three sizes is pairs x 2 x length, for {', '.join(PAIRS)}, got {text!r}")
    return 2 * shape[0], shape[2]


def parse_valid(text: str) -> int | list[int]:
    """
    >>> parse_valid("700"), parse_valid("512,300")
    (700, [512, 300])
    """
    counts = text.split(",")
    if not all(count.isdecimal() for count in counts):
        raise ValueError(f"--valid must be like 700 or 512,300, got {text!r}")
    return int(text) if len(counts) == 1 else [int(count) for count in counts]


def parse_bytes(option: str, text: str) -> int:
    n = budget_bytes(text)
    assert n is not None
    if n < 1 << 20:
        raise ValueError(f"{option} must be at least 1MiB, got {n} bytes: add a unit, as in 20GiB")
    return n


def config_of(model: str) -> dict[str, Any]:
    """Return the config of a text model, or of the text model inside another."""
    found = _config(model)
    return found.get("text_config") or found


def model_sizes(model: str | None, vocab_size: int | None, hidden_size: int | None) -> dict[str, int]:
    found = {} if model is None else config_of(model)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size or found.get("vocab_size"),
        "hidden_size": hidden_size
        or next((found[n] for n in ("hidden_size", "n_embd", "d_model") if n in found), None),
    }
    for name, size in sizes.items():
        if not isinstance(size, int):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is missing: pass it, or --model with a config that has {name}")
    return sizes


def _config(model: str) -> dict[str, Any]:
    path = _file(model)
    return _config_class(model)().to_dict() if path is None else json.loads(path.read_text())


def _file(model: str) -> Path | None:
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


def source_of_sizes(model: str | None) -> str | None:
    """Return a warning if the sizes are those of no model in particular."""
    if model is None or _file(model) is not None:
        return None
    return (
        f"{model} names no sizes: these are the defaults of {_config_class(model).__name__}"
        f"{_sizes_in_words(model)}. Pass the config.json of a checkpoint, or --vocab-size and --hidden-size."
    )


def _sizes_in_words(model: str) -> str:
    config = _config_class(model)().get_text_config()
    names = {"vocab_size": "vocabulary", "hidden_size": "hidden size", "num_hidden_layers": "layers"}
    sizes = [f"{word} {getattr(config, name)}" for name, word in names.items() if hasattr(config, name)]
    return f", {', '.join(sizes)}" if sizes else ""


def _config_class(model: str) -> Any:
    if find_spec("transformers") is None:
        raise ValueError(f"--model {model}: no such file, and a class needs pip install 'liger_chunked[transformers]'")
    config_class = getattr(getattr(import_module("transformers"), model, None), "config_class", None)
    if config_class is None:
        raise ValueError(f"--model must be a config.json, its folder, or a class of transformers, got {model!r}")
    return config_class


@dataclass(frozen=True)
class Case:
    loss: str
    shape: tuple[int, ...]
    settings: dict[str, Any]

    @property
    def together(self) -> int:
        """How many sequences, or tokens, a batch grows by."""
        return 2 if self.loss in PAIRS else 1

    def estimate(self) -> MemoryEstimate:
        return library.estimate_memory(LOSSES[self.loss](), shape=self.shape, **self.settings)


def show(case: Case, free: int | None) -> None:
    found = case.estimate()
    parts = asdict(found)
    sizes = f"vocabulary {case.settings['vocab_size']}, hidden size {case.settings['hidden_size']}"
    title = f"{case.loss}, {' x '.join(map(str, case.shape))} tokens, {sizes}: MiB above the inputs"
    notes = [_assumed(case), "This is the loss alone: no weights, no optimizer, no other layers."]
    tables.show(title, ["", "peak", *parts], [["fused", *map(_mib, (found.peak, *parts.values()))]], notes)
    if free is None:
        return
    unit = "tokens" if len(case.shape) == 1 else f"sequences of {case.shape[1]}"
    n = largest(case, free)
    is_last = (n + case.together) * prod(case.shape[1:]) > _MOST
    notes = [f"or more: the search ends at a batch of {_MOST} tokens."] if is_last else []
    fits = f"{n} or more" if is_last else f"{n}"
    tables.show(f"What fits in {_in_words(free)}", ["", unit], [["fused", fits]], notes)
    print(f"{'fits' if found.peak <= free else 'does not fit'}: {_in_words(found.peak)} of {_in_words(free)}")


def _assumed(case: Case) -> str:
    """Return what the estimate assumes, from the settings and their defaults."""
    settings = case.settings
    dtype, autocast = (str(settings.get(name)).removeprefix("torch.") for name in ("dtype", "autocast"))
    gradients = [name for name in ("head", "input") if settings.get(f"trainable_{name}", True)]
    valid, budget = settings.get("valid"), settings.get("logits_budget")
    return (
        f"Assumed: weight and hidden states in {dtype}"
        + ("" if autocast == "None" else f", {autocast} autocast")
        + f", gradients of {' and '.join(gradients) or 'nothing'}, "
        + ("a target at each token" if valid is None else f"{valid if isinstance(valid, int) else sum(valid)} targets")
        + f", logits_budget {'automatic' if budget is None else budget}."
    )


def _mib(n: int) -> str:
    return f"{n / 2**20:.0f}"


def largest(case: Case, free: int) -> int:
    """Return the most sequences, or tokens, whose step takes at most `free` bytes. Pairs are two sequences."""
    if case.settings.get("valid") is not None:
        raise ValueError("--free is for batches whose tokens all have a target: leave out --valid")

    def peak(n: int) -> int:
        return replace(case, shape=(n * case.together, *case.shape[1:])).estimate().peak

    most = _MOST // (case.together * prod(case.shape[1:]))
    return case.together * bisect_right(range(1, most + 1), free, key=peak)


def _in_words(n: int) -> str:
    """
    >>> _in_words(20 << 30), _in_words(30 << 20), _in_words(1000)
    ('20.0 GiB', '30.0 MiB', '1000 bytes')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n} bytes"
