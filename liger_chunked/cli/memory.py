from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_chunked as library
from liger_chunked.cli import tables
from liger_chunked.cli.losses import DISTILLATION, LOSSES, PAIRS, REFERENCED
from liger_chunked.memory import count_bytes, most_that_fits
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


def parse_capability(text: str) -> tuple[int, int]:
    """
    >>> parse_capability("9.0")
    (9, 0)
    """
    if not re.fullmatch(r"\d+\.\d+", text):
        raise ValueError(f"--capability must be like 9.0, got {text!r}")
    major, minor = text.split(".")
    return int(major), int(minor)


def parse_tiles(text: str | None) -> bool | int | str | None:
    """
    >>> parse_tiles("auto"), parse_tiles("true"), parse_tiles("8192"), parse_tiles(None)
    ('auto', True, 8192, None)
    """
    if text is None or text == "auto":
        return text
    if text == "true":
        return True
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--tiled-mlp must be auto, true or a number of tokens, got {text!r}")
    return int(text)


def parse_bytes(text: str) -> int:
    n = budget_bytes(text)
    assert n is not None
    return n


def model_sizes(model: str | None, vocab_size: int | None, hidden_size: int | None) -> dict[str, int]:
    found = {} if model is None else _config(model)
    found = found.get("text_config") or found
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


def full_config(model: str | None) -> Any:
    """Return the config of transformers that a step is estimated for."""
    if model is None:
        raise ValueError("--step needs --model: a config.json, its folder, or a class of transformers")
    path = _file(model)
    if path is None:
        return _config_class(model)()
    values = json.loads(path.read_text())
    if "model_type" not in values:
        raise ValueError(f"--model {model}: the config has no model_type")
    return import_module("transformers").AutoConfig.for_model(**values)


def _config_class(model: str) -> Any:
    if find_spec("transformers") is None:
        raise ValueError(f"--model {model}: no such file, and a class needs pip install 'liger_chunked[transformers]'")
    config_class = getattr(getattr(import_module("transformers"), model, None), "config_class", None)
    if config_class is None:
        raise ValueError(f"--model must be a config.json, its folder, or a class of transformers, got {model!r}")
    return config_class


def lora(rank: int) -> Any:
    """Return PEFT's config of adapters on all linear layers but the head."""
    if find_spec("peft") is None:
        raise ValueError("--lora-rank with --step needs peft: pip install peft")
    return import_module("peft").LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Case:
    loss: str
    shape: tuple[int, ...]
    settings: dict[str, Any]

    @property
    def together(self) -> int:
        """How many sequences, or tokens, a batch grows by."""
        return 2 if self.loss in PAIRS else 1

    def fused(self) -> MemoryEstimate:
        return library.estimate_memory(LOSSES[self.loss](), shape=self.shape, **self.settings)

    def eager(self) -> MemoryEstimate:
        """Return the memory of full logits: the product in the head's dtype, the loss in float32."""
        get = self.settings.get
        valid = get("valid")
        counts = [prod(self.shape)] if valid is None else [valid] if isinstance(valid, int) else valid
        n, vocab_size, dtype = sum(counts), self.settings["vocab_size"], get("autocast") or get("dtype")

        def given(*shape: int, trainable: bool = False, dtype: Any = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(trainable)

        def head(hidden_size: int, trains_head: bool = False, trains_input: bool = False) -> list[Tensor]:
            bias = [given(vocab_size, trainable=trains_head)] if get("bias") else []
            weight = given(vocab_size, hidden_size, trainable=trains_head)
            return [given(n, hidden_size, trainable=trains_input), weight, *bias]

        own = head(self.settings["hidden_size"], get("trainable_head", True), get("trainable_input", True))
        ref, teacher = (size and head(size) for size in (get("ref_hidden_size"), get("teacher_hidden_size")))
        rank: Any = get("lora_rank")
        top_k = get("teacher_top_k") or 0
        shapes = ((rank, own[1].shape[1]), (vocab_size, rank))
        adapter = rank and [given(*shape, trainable=True, dtype=torch.float32) for shape in shapes]
        target = given(n, dtype=torch.int64)

        def logits(given: list[Tensor]) -> Tensor:
            return F.linear(*given).float()

        def student() -> Tensor:
            return logits(own) + F.linear(F.linear(own[0].float(), adapter[0]), adapter[1]) if adapter else logits(own)

        def distilled() -> Tensor:
            z = student()
            if not teacher:
                return z.log_softmax(-1).gather(-1, given(n, top_k, dtype=torch.int64)).sum(-1)
            with torch.no_grad():
                of_teacher = logits(teacher)
            loss: Any = LOSSES[self.loss]()
            return loss.divergence(z, of_teacher) + _logps(z, target)

        def step() -> None:
            if ref:
                with torch.no_grad():
                    _logps(logits(ref), target)
            value = distilled() if self.loss in DISTILLATION else _logps(student(), target)
            if value.requires_grad:
                value.sum().backward()

        return count_bytes(step)


def _logps(z: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(z, target, reduction="none")


def show(case: Case, free: int | None) -> None:
    estimates = {"fused": case.fused, "eager": case.eager}
    rows = []
    for name, estimate in estimates.items():
        found = estimate()
        parts = asdict(found).values() if name == "fused" else [None] * 5
        rows.append([name, _mib(found.peak), *("" if n is None else _mib(n) for n in parts)])
    sizes = f"vocabulary {case.settings['vocab_size']}, hidden size {case.settings['hidden_size']}"
    title = f"{case.loss}, {' x '.join(map(str, case.shape))} tokens, {sizes}: MiB above the inputs"
    names = ["logits", "weight_grad", "input_grad", "hidden", "other"]
    notes = ["This is the loss alone, with its gradients. --step, with --model, adds weights, optimizer and layers."]
    tables.show(title, ["", "peak", *names], rows, notes)
    if free is None:
        return
    unit = "tokens" if len(case.shape) == 1 else f"sequences of {case.shape[1]}"
    rows, notes = [], []
    for name, of in (("fused", Case.fused), ("eager", Case.eager)):
        n = largest(case, free, of)
        is_last = (n + case.together) * prod(case.shape[1:]) > _MOST
        rows.append([name, f"{n} or more" if is_last else f"{n}"])
        if is_last:
            notes = [f"or more: the search ends at a batch of {_MOST} tokens."]
    tables.show(f"What fits in {_in_words(free)}", ["", unit], rows, notes)


def _mib(n: int) -> str:
    return f"{n / 2**20:.0f}"


def largest(case: Case, free: int, estimate: Callable[[Case], MemoryEstimate]) -> int:
    """Return the most sequences, or tokens, whose step takes at most `free` bytes. Pairs are two sequences."""
    if case.settings.get("valid") is not None:
        raise ValueError("--free is for batches whose tokens all have a target: leave out --valid")

    def fits(n: int) -> bool:
        return estimate(replace(case, shape=(n * case.together, *case.shape[1:]))).peak <= free

    return case.together * most_that_fits(fits, _MOST // (case.together * prod(case.shape[1:])))


@dataclass(frozen=True)
class Step:
    """A whole step of a model; `settings` are arguments of `estimate_step`."""

    config: Any
    loss: str
    shape: tuple[int, ...]
    settings: dict[str, Any]

    @property
    def batch(self) -> tuple[int, int]:
        if len(self.shape) != 2:
            raise ValueError("--shape must have sequences and a length with --step, as 1x131072")
        return self.shape[0], self.shape[1]


def show_step(step: Step, free: int | None) -> None:
    if step.loss in DISTILLATION:
        raise ValueError(
            f"--step has no estimate for a loss with a teacher, got {step.loss}: without it, --teacher-hidden-size or "
            "--teacher-top-k gives the memory of the loss alone"
        )
    integration = import_module("liger_chunked.integrations.transformers")
    n_sequences, length = step.batch
    loss = LOSSES[step.loss]()
    rows, longest = [], []
    names: list[str] = []
    for tiles in dict.fromkeys((None, step.settings["tiled_mlp"])):
        for checkpoints in dict.fromkeys(("device", step.settings["checkpoints"])):
            settings = {**step.settings, "tiled_mlp": tiles, "checkpoints": checkpoints, "loss": loss}
            label = f"{'whole MLPs' if tiles is None else 'tiled MLPs'}, checkpoints on the {checkpoints}"
            found = integration.estimate_step(step.config, shape=step.batch, **settings)
            names = list(asdict(found))
            rows.append([label, *(f"{n / 2**30:.2f}" for n in (found.peak, *asdict(found).values()))])
            if free is not None:
                n = integration.longest_sequence(step.config, free=free, n_sequences=n_sequences, **settings)
                longest.append([label, f"{n}"])
    text = step.config.get_text_config()
    kind = f"{text.model_type}, vocabulary {text.vocab_size}, hidden size {text.hidden_size}"
    title = f"{step.loss}, {n_sequences} x {length} tokens, {kind}: GiB at the peak"
    tables.show(title, ["", "peak", *names], rows, _not_counted(step))
    if free is not None:
        tables.show(f"What fits in {_in_words(free)}, a batch of {n_sequences}", ["", "tokens each"], longest)


def _not_counted(step: Step) -> list[str]:
    if step.loss in REFERENCED and step.settings["adapter"] is None and not step.settings["reference"]:
        return ["A reference model is not counted: pass --reference, unless its log-probabilities are computed before."]
    return []


def _in_words(n: int) -> str:
    """
    >>> _in_words(20 << 30), _in_words(30 << 20), _in_words(1000)
    ('20.0 GiB', '30.0 MiB', '1000 bytes')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n} bytes"
