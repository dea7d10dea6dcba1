"""What the last step ran: facts that the engine records, by the loss or the head that asked for the step.

    with asked_by(record):          # an entry point of a loss, or the losses of a head's deferred logits
        plan = noted(plan, head)    # the engine: each record of the enclosing blocks gets the facts of this plan
    print(explain(model))

A step records integers that its plan has anyway. It keeps no tensor alive, and waits for no device.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_chunked.kernels.backend import TRITON_ERROR, use_triton
from liger_chunked.private import without_modes
from liger_chunked.types import LogitOptions, shown

_LOGGER = logging.getLogger("liger_chunked")

APPLIED = "_liger_applied"  # attribute of a patched model: its `Applied`
RECORD = "_liger_record"  # attribute of a loss, of a head that defers and of the layers in it that multiply


class Ran(NamedTuple):
    """A step, as the engine planned it.

    Attributes:
        n_tokens: that have a target.
        n_chunks, n_tiles: pieces in which the loss and the logits were computed; 0 if no logits were.
        largest_tile: the most logits in memory at once.
        options: of the logits, with the budget that was asked for.
        dtype, device: of the matrix products.
        path: what computed the logits: a name of the engine's `Path`, or "kept ids".
        prompts: tokens that the model computed, and tokens of the batch, if prompts were shared. None: they were not.
        kept: tokens that had kept ids, and the number of these ids. None: the whole vocabulary.
    """

    n_tokens: int
    n_chunks: int
    n_tiles: int
    largest_tile: int
    options: LogitOptions
    dtype: torch.dtype
    device: torch.device
    path: str
    prompts: tuple[int, int] | None = None
    kept: tuple[int, int] | None = None

    @property
    def by_kernels(self) -> bool:
        return use_triton(torch.empty(0, dtype=self.dtype, device=self.device))

    @property
    def why_no_kernels(self) -> str | None:
        """Why PyTorch computed it; None: kernels did."""
        if self.by_kernels:
            return None
        if self.dtype == torch.float64:
            return "no kernel computes float64"
        fails = TRITON_ERROR is not None and self.device.type != "cpu"
        return f"`import triton` fails with {TRITON_ERROR}" if fails else f"no kernel runs on {self.device.type}"

    @property
    def code(self) -> str:
        """Whether kernels or PyTorch computed it, and why."""
        if (why := self.why_no_kernels) is not None:
            return f"PyTorch on {self.device.type}, because {why}"
        epilogue = ", logits reduced in the epilogue of their product" if self.path == "epilogue" else ""
        return f"Triton kernels on {self.device.type}{epilogue}"

    def __str__(self) -> str:
        budget, size = self.options.logits_budget, self.largest_tile * self.dtype.itemsize
        parts = [f"{self.n_tokens} tokens with a target"]
        if self.n_chunks:
            tiles = (
                f"{_count(self.n_chunks, 'chunk')}, {_count(self.n_tiles, 'tile')} of at most {_size(size)} of logits"
            )
            parts += [tiles, f"logits_budget {'automatic' if budget is None else _size(int(budget))}"]
        if self.kept is not None:
            tokens, ids = self.kept
            parts.append(f"{ids / max(1, tokens):.1f} kept ids a token, at {tokens} tokens")
        if self.prompts is not None:
            parts.append(f"shared prompts: the model computed {self.prompts[0]} tokens in place of {self.prompts[1]}")
        return "; ".join([*parts, self.code])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _size(n: int) -> str:
    unit, name = max((u, name) for u, name in ((1, "bytes"), (2**10, "KiB"), (2**20, "MiB")) if u <= max(1, n))
    return f"{n / unit:.1f}".removesuffix(".0") + f" {name}"


_numbers = itertools.count()


class Record:
    """The last steps that one loss or one head asked for. A copy of its owner has a record of its own.

    - `trained`: the last step with gradients; `untrained`: the last one without, such as an evaluation or a reference
    - `owner`: a weak reference to the loss, or to the model around the head, for the line in the log
    - `why_not_shared`: why the last batch's prompts were computed once for each sequence
    - `real_logits`: what the last call of the head computed its logits for, and where
    - `said`: whether the line is in the log
    - `number`: its key in `RECORDS`; `place`: the same in a tensor, which a compiled graph takes as an input
    """

    __slots__ = (
        "__weakref__", "number", "owner", "place", "real_logits", "said", "trained", "untrained", "why_not_shared",
    )  # fmt: skip

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.trained: Ran | None = None
        self.untrained: Ran | None = None
        self.owner = None if owner is None else weakref.ref(owner)
        self.why_not_shared: str | None = None
        self.real_logits: str | None = None
        self.said = False
        self.number = next(_numbers)
        with without_modes():
            self.place = torch.full((), self.number, device="cpu")
        RECORDS[self.number] = self

    def __reduce__(self) -> Any:
        return Record, ()

    def say(self) -> None:
        """Write the line of a run into the log, once."""
        self.said = True
        owner = None if self.owner is None else self.owner()
        if owner is not None and _LOGGER.isEnabledFor(logging.INFO):
            _LOGGER.info("%s", explain(owner)._in_one_line())


RECORDS: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
# By head. A head keeps its record when it no longer defers, as after `train` of a patched trainer.
_RECORDS: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
# By MLP: tokens of its last call in tiles, and tokens of a tile.
_TILED: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()


def record_of(head: nn.Module) -> Record:
    """Return the record of a head, and make it in the first call."""
    record = _RECORDS.get(head)
    if record is None:  # not setdefault: it would number a record for each call
        for part in head.modules():  # the layer that was the head before it got an adapter
            _RECORDS.pop(part, None)
        record = _RECORDS[head] = Record()
    return record


class _Asking(NamedTuple):
    """Who asks for a step now: records from the outermost block to the innermost. None: nothing is recorded."""

    records: tuple[Record, ...] | None = ()
    prompts: tuple[int, int] | None = None


_asking: ContextVar[_Asking] = ContextVar("_asking", default=_Asking())  # noqa: B039 - it is immutable


class asked_by:
    """Let records get the facts of the steps inside the block. A class, because every step enters one or two."""

    __slots__ = ("records", "token")

    def __init__(self, *records: Record | None) -> None:
        self.records = tuple([record for record in records if record is not None])

    def __enter__(self) -> None:
        outer, prompts = _asking.get()
        self.token = _asking.set(_Asking(None if outer is None else outer + self.records, prompts))

    def __exit__(self, *_: Any) -> None:
        _asking.reset(self.token)
        # Here, because a step may note several plans. Only the outermost record has the layers and the prompts too.
        for record in self.records[:1]:
            if not record.said and record.trained is not None and _asking.get().records == ():
                record.say()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let no step inside the block be recorded: the library runs it for itself."""
    token = _asking.set(_Asking(None))
    try:
        yield
    finally:
        _asking.reset(token)


@contextmanager
def sharing(computed: int, tokens: int) -> Iterator[None]:
    """Note for the steps inside the block that their model computed `computed` tokens for a batch of `tokens`."""
    token = _asking.set(_asking.get()._replace(prompts=(computed, tokens)))
    try:
        yield
    finally:
        _asking.reset(token)


def _note(ran: Ran | None, records: tuple[Record, ...]) -> None:
    for record in records:
        if torch.is_grad_enabled():
            record.trained = ran
        else:
            record.untrained = ran


def noted(plan: Any, head: Any) -> Any:
    """Return a plan, after the records that ask for it got its facts."""
    records, prompts = _asking.get()
    if records:
        ran = Ran(
            plan.rows.n_valid, len(plan.chunks), sum(map(len, plan.tiles)), plan.largest_tile, plan.options, plan.dtype,
            head.weight.device, plan.path.value, prompts,
        )  # fmt: skip
        _note(ran, records)
    return plan


def note_kept(n_tokens: int, n_ids: int, planned: bool, head: Any, options: LogitOptions, dtype: torch.dtype) -> None:
    """Note that `n_tokens` had `n_ids` kept ids. `planned`: whether a plan of the same call was noted."""
    records, prompts = _asking.get()
    for record in records or ():
        last = record.trained if torch.is_grad_enabled() else record.untrained
        if last is None or not planned:
            last = Ran(n_tokens, 0, 0, 0, options, dtype, head.weight.device, "kept ids", prompts)
        _note(last._replace(kept=(n_tokens, n_ids)), (record,))


def note_real_logits(record: Record | None, what_for: str) -> None:
    """Note that the last call of a head computed its logits: its step, with gradients or without, is not fused."""
    if record is not None and _asking.get().records is not None:
        record.real_logits = what_for
        _note(None, (record,))


def note_tiles(mlp: nn.Module, n_tokens: int, tile: int) -> None:
    if _asking.get().records is not None:
        _TILED[mlp] = n_tokens, tile


@dataclass(frozen=True)
class Explanation:
    """What the last step of a model or a loss ran; `print` shows it.

    - `name`: its class
    - `trained`: by the name of each head and loss in it ("" for a loss itself), its last step with gradients
    - `untrained`: the same, its last step without gradients, such as an evaluation or a reference
    - `tiled`: tokens of the last call of an MLP in tiles, and tokens of a tile; None if none ran in tiles
    - `layers`: the `Applied` of `apply_liger_kernel`, whose `left` has the layers left alone; None without a patch
    - `notes`: what kept a step from being fused or shared, and where
    """

    name: str
    trained: dict[str, Ran]
    untrained: dict[str, Ran]
    tiled: tuple[int, int] | None
    layers: Any
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"  {_of(name)}with gradients: {ran}" for name, ran in self.trained.items()]
        lines += [f"  {_of(name)}without gradients: {ran}" for name, ran in self.untrained.items()]
        lines = lines or ["  no fused loss ran" if self.notes or self.tiled is not None else "  nothing ran yet"]
        if self.tiled is not None:
            n, tile = self.tiled
            lines.append(f"  MLPs: {n} tokens in {_count(-(-n // tile), 'tile')} of at most {tile}")
        lines += [f"  {note}" for note in self.notes]
        if self.layers is not None:
            reasons = [step.why_no_kernels for step in (*self.trained.values(), *self.untrained.values())]
            if reasons and None not in reasons:
                but = f" but {', '.join(sorted(self.layers.everywhere))}" if self.layers.everywhere else ""
                where = "" if self.tiled is None else " outside tiles"
                lines.append(f"  patched layers{but}{where}: stock code, because {reasons[0]}")
            lines.append(str(self.layers))
        return "\n".join([f"What ran in {self.name}:", *lines])

    def _in_one_line(self) -> str:
        """Return the same for the log: a semicolon follows each line but a heading, which has its colon."""
        *lines, last = (line.strip() for line in str(self).splitlines())
        return "".join(f"{line} " if line.endswith(":") else f"{line}; " for line in lines) + last


def _of(name: str) -> str:
    return f"{name!r}, " if name else ""


def explain(model: nn.Module) -> Explanation:
    """Say what the last step of a model, or of a loss, ran.

    It reads what the step recorded and runs nothing. At level INFO, the logger "liger_chunked" gets the same in one
    line, after the first step of a run.

    Args:
        model: a model that is patched or whose head defers, maybe wrapped (PEFT, DDP), such as `trainer.model`, or a
            loss module.

    Returns:
        An `Explanation`. `print` shows it: the chunks and the budget of logits, kernels or PyTorch and why, kept ids,
        shared prompts, tiles of MLPs, and the layers that are patched or left alone.

    Raises:
        TypeError: `model` is no module.

    >>> import torch
    >>> from liger_chunked import LigerFusedLinearCrossEntropyLoss
    >>> loss = LigerFusedLinearCrossEntropyLoss()
    >>> print(explain(loss))
    What ran in LigerFusedLinearCrossEntropyLoss:
      nothing ran yet
    >>> value = loss(torch.randn(11, 4, requires_grad=True), torch.randn(6, 4), torch.randint(11, (6,)))
    >>> explain(loss).trained[""].n_chunks
    1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, such as a patched model or a loss, got {shown(model)}")
    trained: dict[str, Ran] = {}
    untrained: dict[str, Ran] = {}
    layers, tiled, notes, seen, records = None, None, [], [], False
    for name, module in model.named_modules():
        state = vars(module)
        layers, tiled = layers or state.get(APPLIED), _TILED.get(module, tiled)
        records = records or RECORD in state
        record: Record | None = state.get(RECORD) or _RECORDS.get(module)
        if record is None or record in seen:  # the layers inside a head have its record
            continue
        seen.append(record)
        if record.trained is not None:
            trained[name] = record.trained
        if record.untrained is not None:
            untrained[name] = record.untrained
        if record.real_logits is not None:
            notes.append(f"{_of(name)}logits were computed for {record.real_logits}")
        if record.why_not_shared is not None:
            notes.append(f"prompts were computed once for each sequence: {record.why_not_shared}")
    if not (records or trained or untrained):
        patched = "not patched" if layers is None else "patched without a fused loss"
        notes.append(f"{patched}: no head in it defers its logits; see explain(loss) too")
    return Explanation(type(model).__name__, trained, untrained, tiled, layers, tuple(notes))
