"""How many tokens count, known to the host: it reads what the device counted, or the caller says so.

A caller's counts, `n_valid`, spare the host the wait for the device, which asserts them instead.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch import Tensor

from liger_chunked.kernels.backend import on_host
from liger_chunked.kernels.survey import Survey, assert_counts
from liger_chunked.private import assert_async
from liger_chunked.types import VocabShard, described

# Of all tokens, or of each sequence; None: read from the device.
Counts = int | tuple[int, ...] | None


def host_may_sync(x: Tensor, n_valid: Any) -> bool:
    """Whether the host may read values of `x`: it need not wait for them, or the caller has given no counts."""
    return n_valid is None or on_host(x)


def assert_later(condition: Tensor, message: str) -> None:
    """Assert a condition () on its device without waiting. A failure ends the process's use of the device."""
    assert_async(condition, message)


def check_ids(name: str, low: int, high: int, vocab_size: int, ignore_index: int | None = None) -> None:
    """Raise ValueError if an id is no index into the vocabulary. `ignore_index` marks tokens to skip, if ids may."""
    if 0 <= low and high < vocab_size:
        return
    ignored = hint = ""
    if ignore_index is not None:
        ignored = f"ignore_index ({ignore_index}) or "
        if high < vocab_size:  # the usual mistake: padding with another mark
            hint = f". If {low} marks tokens to skip, set ignore_index={low}"
    raise ValueError(
        f"{name} holds {low if low < 0 else high}, expected {ignored}an index into the vocabulary of weight, "
        f"0 to {vocab_size - 1}{hint}"
    )


def read_counts(surveyed: Survey, ignore_index: int, vocab_size: int, name: str, n_valid: Counts) -> list[int]:
    """Wait for the counts of a target's tokens, one for each row of the survey, and check its ids and `n_valid`.

    Args:
        name: of the target, for messages.

    Raises:
        ValueError: an id is outside the vocabulary, or `n_valid` is wrong.
    """
    counts, lows, highs = surveyed.read()
    host_counts = list(map(sum, counts))  # of a row's blocks
    low, high = min(map(min, lows), default=0), max(map(max, highs), default=0)
    if low < 0 or high >= vocab_size:
        check_ids(name, low, high, vocab_size, ignore_index)
    if n_valid is not None:
        _check_n_valid(n_valid, host_counts, name, ignore_index)
    return host_counts


def trusted_counts(surveyed: Survey, n_valid: Counts, vocab_size: int, name: str) -> list[int]:
    """Return the caller's counts. The device asserts them, and that ids are in the vocabulary, when it comes by."""
    assert n_valid is not None
    assert_counts(
        surveyed.summary,
        n_valid,
        vocab_size,
        f"{name} must be ignore_index or an index into the vocabulary, 0 to {vocab_size - 1}, and n_valid must "
        f"count the tokens of {name} that are not ignore_index",
    )
    return [n_valid] if isinstance(n_valid, int) else list(n_valid)


def _check_n_valid(n_valid: int | tuple[int, ...], counts: list[int], name: str, ignore_index: int) -> None:
    of = f"the number of tokens of {name} that are not ignore_index ({ignore_index})"
    if isinstance(n_valid, int):
        if n_valid != sum(counts):
            raise ValueError(f"n_valid must be {sum(counts)}, {of}, got {n_valid}")
        return
    for i, (given, count) in enumerate(zip(n_valid, counts, strict=True)):
        if given != count:
            raise ValueError(f"n_valid[{i}] must be {count}, {of} in sequence {i}, got {given}")


def token_count(n_valid: Any, total: int, sequence_group: Any = None, shard: VocabShard | None = None) -> int:
    """Return a checked count of the tokens, of `total`, that have a target."""
    _refuse_waits("n_valid", sequence_group, shard)
    if not _is_count(n_valid):
        raise TypeError(f"n_valid must be an int, the number of tokens that have a target, got {described(n_valid)}")
    if not 0 <= n_valid <= total:
        raise ValueError(f"n_valid must be 0 to {total}, the positions of input, got {n_valid}")
    return int(n_valid)


def sequence_counts(
    n_valid: Any,
    target: Tensor,
    sequence_group: Any = None,
    shard: VocabShard | None = None,
    name: str = "n_valid",
) -> tuple[int, ...]:
    """Return checked counts of tokens that have a target, one per sequence of `target`, padded."""
    _refuse_waits(name, sequence_group, shard)
    counts, (n, longest) = as_counts(n_valid, name), target.shape
    if len(counts) != n or not all(0 <= count <= longest for count in counts):
        raise ValueError(
            f"{name} must have {n} counts, one for each sequence, of 0 to {longest} tokens, got {str(n_valid)[:80]}"
        )
    return counts


def as_counts(n_valid: Any, name: str = "n_valid") -> tuple[int, ...]:
    if not isinstance(n_valid, (list, tuple)) or not all(map(_is_count, n_valid)):
        raise TypeError(
            f"{name} must be a list or tuple of ints, for each sequence the number of tokens that have a target, got "
            f"{described(n_valid)}"
        )
    return tuple(map(int, n_valid))


def _is_count(x: Any) -> bool:
    # Most are plain: asking an abstract class for each of hundreds of sequences takes longer than a launch.
    return type(x) is int or (isinstance(x, Integral) and not isinstance(x, bool))


def _refuse_waits(name: str, sequence_group: Any, shard: VocabShard | None) -> None:
    if sequence_group is not None:
        raise ValueError(f"{name} and sequence_group are given: ranks that split sequences wait for each other's sizes")
    if shard is not None and shard.input_grad == "reduce_scatter":
        raise ValueError(
            f"{name} and input_grad='reduce_scatter' of vocab_shard are given: ranks that split hidden states wait for "
            "each rank's tokens"
        )
