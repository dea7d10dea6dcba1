from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.arguments import COMPAT
from liger_chunked.device import is_capturing, is_on_gpu
from liger_chunked.engine.collectives import OncePerGroup, gather_tensor
from liger_chunked.kernels import survey_top_k
from liger_chunked.kernels.backend import has_wide_tiles
from liger_chunked.kernels.operands import check_class_ids, described, named, other_leaves
from liger_chunked.private import assert_async
from liger_chunked.shapes import shapes_only
from liger_chunked.types import AdaptedWeight, LossHead, RankFacts, VocabShard

# What ranks have checked together: the parts of a vocabulary, and that their targets are equal.
CHECKED = OncePerGroup()


def host_may_sync(x: Tensor) -> bool:
    """Whether the host may wait for values of `x`: not in the capture of a CUDA graph, and not on the meta device."""
    return not (x.is_meta or shapes_only() or (is_on_gpu(x) and is_capturing()))


def refuse_capture(x: Tensor, what: str) -> None:
    """Raise ValueError in the capture of a CUDA graph of the device of `x`: `what` makes the host wait for it."""
    if not (x.is_meta or shapes_only() or host_may_sync(x)):
        raise ValueError(
            f"{what} cannot be captured in a CUDA graph, because the host waits for the device: leave it out, or run "
            "the step eagerly"
        )


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


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return autocast's dtype on a type of device, or None if it is off."""
    if not _has_autocast(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def compute_dtype(head: LossHead, input: Tensor, prefix: str = "", input_name: str = "input") -> torch.dtype:
    """Return the products' dtype: autocast's, or the shared one."""
    dtype, autocast = input.dtype, autocast_dtype(input.device.type)
    if autocast is None and head.weight.dtype == dtype and (head.bias is None or head.bias.dtype == dtype):
        return dtype
    tensors = [x for x in (input, head.weight, head.bias) if x is not None]
    dtypes = {x.dtype for x in tensors}
    # Autocast does not cast float64.
    if autocast is not None and torch.float64 not in dtypes:
        return autocast
    if len(dtypes) > 1:
        names = (f"{prefix}{name}" for name in (input_name, "weight", "bias"))
        given = (str(x.dtype).removeprefix("torch.") for x in tensors)
        listed = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, given, strict=False))
        raise TypeError(
            f"{prefix}{input_name}, {prefix}weight and {prefix}bias must share a dtype outside autocast: {listed}; "
            f"cast them, as by {prefix}{input_name}.to({prefix}weight.dtype), or call the loss under torch.autocast"
        )
    return dtype


def check_graph(name: str, value: Tensor, ends: list[Tensor], owner: Any = None) -> None:
    """Raise ValueError if `value` depends on trainable leaves beyond `ends`: they would get no gradient."""
    for leaf in other_leaves(value, ends):
        raise ValueError(
            f"{name} depends on another tensor that requires a gradient, {named(leaf, owner)}, and computes gradients "
            "only for weight, input and bias: freeze or detach that tensor, or compute a loss of your own from "
            "linear_token_stats, whose statistics are differentiable"
        )


def check_values(name: str, values: Any, shape: torch.Size, of: str) -> None:
    if not isinstance(values, Tensor) or values.shape != shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        hint = ""
        if isinstance(values, Tensor) and values.ndim == 1:
            hint = f": it may get a part of the batch, which a tensor with a value for each of all {of} does not fit"
            hint += '. With scope = "batch" it gets all pairs' if name == "preference_loss" and of == "pairs" else ""
        raise ValueError(f"{name} must return one value for each of {shape[0]} {of}, got {got}{hint}")


# By the prefix of the arguments' names.
_ORDERS = {
    "": "(weight, input, target)",
    "teacher_": "(teacher_weight, teacher_input)",
    "ref_": "(ref_input, ref_weight)",
}


def swapped(prefix: str = "") -> str:
    """Return the hint of an error that a head's weight and hidden states look swapped."""
    return f": {prefix}weight and {prefix}input look swapped, the order is {_ORDERS[prefix]}. {COMPAT}"


def hint_for(x: Any, name: str, ids: bool = False) -> str:
    if isinstance(x, Tensor):
        if ids:
            return ": no gradient goes to token ids, pass them as .long()" if x.is_floating_point() else ""
        if name == "bias" and x.dtype == torch.bool:
            return f": preference_labels come before bias. {COMPAT}"
        return ": these look like token ids, pass hidden states" if name.endswith("input") and x.ndim <= 2 else ""
    if isinstance(getattr(x, "weight", None), Tensor):
        if hasattr(x, "lora_A") and name.endswith("weight"):
            return ": pass an AdaptedWeight of its base weight and adapter, or use attach_head, which makes one"
        bias = f", and {name.replace('weight', 'bias')}=its bias" if getattr(x, "bias", None) is not None else ""
        return f": pass its weight{bias}" if name.endswith("weight") else ""
    if ids:
        found = [key for key in ("labels", "input_ids") if isinstance(x, Mapping) and key in x]
        return f": pass its {found[0]!r}, shifted by one position" if found else ""
    if name.endswith("weight"):
        return ""
    if getattr(x, "last_hidden_state", None) is not None:
        return ": pass its last_hidden_state"
    if hasattr(x, "logits") or (isinstance(x, Mapping) and "input_ids" in x):
        return ": pass the hidden states of the model's body, model.model(input_ids).last_hidden_state"
    if isinstance(x, (tuple, list)) and x and isinstance(x[0], Tensor):
        return ": pass one tensor of hidden states, those of the last layer"
    return ""


def _check_adapted(weight: AdaptedWeight, name: str) -> None:
    matrix, up = weight.weight, weight.up
    if not isinstance(up, Tensor) or not up.is_floating_point():
        raise TypeError(f"{name}.up must be a floating-point tensor, got {described(up)}")
    if not callable(weight.down):
        raise TypeError(
            f"{name}.down must be a function of hidden states (..., H) that returns (..., r), got "
            f"{described(weight.down)}"
        )
    if up.ndim != 2 or not up.shape[1] or up.shape[0] != matrix.shape[0]:
        raise ValueError(
            f"{name}.up must be (V, r), one row per row of {name}.weight {described(matrix)}, got {described(up)}"
        )
    if up.device != matrix.device:
        raise ValueError(f"{name}.up is on {up.device}, {name}.weight on {matrix.device}: expected one device")


def check_projection(head: LossHead, input: Tensor, prefix: str = "", input_name: str = "input") -> LossHead:
    """Return the head after checks of its tensors and of hidden states, with `rank_facts` if its vocabulary is split.

    Ranks compare their parts of a vocabulary in the first call for a group and these parts, which waits for the device.
    On a CPU they also tell each other in every call whether their parts are new, or refused: all raise, and none waits
    for a rank that raised. On a GPU the host would wait for that in each step.

    Args:
        prefix, input_name: of the arguments' names, as "ref_", for messages.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not fit, or ranks do not cover the vocabulary.
    """
    try:
        _check_tensors(head, input, prefix, input_name)
    except (TypeError, ValueError):
        if _tells_ranks(head.shard, input):
            assert head.shard is not None
            gather_tensor(torch.tensor([_REFUSED]), head.shard.group)
        raise
    if head.shard is None:
        return head
    weight = head.weight.weight if isinstance(head.weight, AdaptedWeight) else head.weight
    return head._replace(rank_facts=_checked_shard(head.shard, weight.shape[0], input))


# What a rank tells the others of its part of a vocabulary.
_KNOWN, _NEW, _REFUSED = 0, 1, 2


def _tells_ranks(shard: Any, input: Any) -> bool:
    """Whether ranks tell each other of a call without waiting for a device."""
    ready = isinstance(shard, VocabShard) and dist.is_available() and dist.is_initialized()
    return ready and isinstance(input, Tensor) and input.device.type == "cpu"


def _check_tensors(head: LossHead, input: Tensor, prefix: str, input_name: str) -> None:
    weight, bias, own = head.weight, head.bias, "weight"
    if isinstance(weight, AdaptedWeight):
        weight, own = weight.weight, "weight.weight"
    for name, x in ((own, weight), (input_name, input), ("bias", bias)):
        if x is None and name == "bias":
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            hint = hint_for(x, f"{prefix}{name}")
            raise TypeError(f"{prefix}{name} must be a floating-point tensor, got {described(x)}{hint}")
    if weight.ndim != 2 or (weight.shape[0] == 0 and head.shard is None):
        hint = swapped(prefix) if weight.ndim == 3 and input.ndim == 2 else ""
        raise ValueError(f"{prefix}{own} must be (V, H), as lm_head.weight is, got {described(weight)}{hint}")
    if isinstance(head.weight, AdaptedWeight):
        _check_adapted(head.weight, f"{prefix}weight")
    if input.ndim not in (2, 3):
        raise ValueError(f"{prefix}{input_name} must be (N, H) or (B, T, H), got {described(input)}")
    if input.shape[-1] != weight.shape[1]:
        transposed = f": {prefix}{own} looks transposed, pass lm_head.weight as it is"
        raise ValueError(
            f"{prefix}{input_name} and {prefix}{own} must agree on the hidden size: {prefix}{input_name} is "
            f"{described(input)}, {prefix}{own} (V, H) is {described(weight)}"
            f"{transposed if input.shape[-1] == weight.shape[0] else ''}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{prefix}bias must be ({weight.shape[0]},), one per row of weight, got {described(bias)}")
    for name, x in ((own, weight), ("bias", bias)):
        if x is not None and x.device != input.device:
            raise ValueError(
                f"{prefix}{name} is on {x.device}, {prefix}{input_name} on {input.device}: expected one device"
            )
    if not prefix:
        refuse_meta(input, input_name)
    if weight.dtype != input.dtype or (bias is not None and bias.dtype != input.dtype):
        compute_dtype(head, input, prefix, input_name)


def refuse_meta(input: Tensor, input_name: str) -> None:
    """Raise ValueError for hidden states without values. `scripts/compile_matrix.py` replaces this: nothing runs."""
    if input.is_meta:
        raise ValueError(
            f"{input_name} and weight are on the meta device and have no values: pass real tensors; estimate_memory "
            "predicts a step's memory without tensors"
        )


def _checked_shard(shard: VocabShard, n_rows: int, input: Tensor) -> RankFacts:
    """Return what the ranks of a split vocabulary found. `n_rows` are this rank's rows of the weight, with padding."""
    if not isinstance(shard, VocabShard):
        raise TypeError(f"vocab_shard must be a VocabShard, got {described(shard)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("vocab_shard needs torch.distributed: call init_process_group first")
    # The key ignores padding: if it changed on one rank, that rank would call the collective alone.
    columns, scattered = shard.columns(n_rows), shard.input_grad == "reduce_scatter"
    key = "vocab_shard", min(shard.start, shard.vocab_size), columns, shard.vocab_size, scattered
    if _tells_ranks(shard, input):
        mine = _KNOWN if CHECKED.has(shard.group, key) else _NEW
        states = gather_tensor(torch.tensor([mine]), shard.group).flatten().tolist()
        if _REFUSED in states:
            raise ValueError(
                f"rank {states.index(_REFUSED)} of vocab_shard refused its weight, bias or input: its error says why"
            )
        if _NEW in states:
            CHECKED.forget(shard.group, key)
    return CHECKED.result(
        shard.group, key, lambda: _check_ranks(shard, columns, input[..., :0] if scattered else input)
    )


def _check_ranks(shard: VocabShard, columns: int, input: Tensor) -> RankFacts:
    """Check that the ranks' columns cover the vocabulary, and that hidden states are equal."""
    group, start, vocab_size = shard.group, min(shard.start, shard.vocab_size), shard.vocab_size
    some = input.detach().reshape(-1)[:: max(1, input.numel() // 64)].tolist()
    mine = (start, columns, vocab_size, tuple(input.shape), some, has_wide_tiles(input.device))
    parts = [mine] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    sizes = {part[2] for part in parts}
    if len(sizes) > 1:
        raise ValueError(f"vocab_shard.vocab_size must be the same on all ranks, got {sorted(sizes)}")
    starts_and_rows = [part[:2] for part in parts]
    covered = 0
    for rank, (first, n) in enumerate(starts_and_rows):
        if first < vocab_size and first != covered:
            raise ValueError(
                f"vocab_shard.start of rank {rank} is {first}, expected {covered}: the shards must follow each other "
                f"in rank order, and each rank's (start, rows of weight without padding) are {starts_and_rows}"
            )
        covered = max(covered, min(first + n, vocab_size))
    if covered < vocab_size:
        raise ValueError(
            f"the shards cover {covered} rows of a vocabulary of {vocab_size}: each rank's (start, rows of weight "
            f"without padding) are {starts_and_rows}"
        )
    for rank, (*_, shape, values, _) in enumerate(parts):
        if shape != parts[0][3] or not torch.allclose(
            torch.tensor(values), torch.tensor(parts[0][4]), rtol=0.05, atol=0.05, equal_nan=True
        ):
            differ = (
                f"with shapes {parts[0][3]} and {shape}" if shape != parts[0][3] else f"in values, of shape {shape}"
            )
            raise ValueError(
                f"input must be the same on all ranks of a split vocabulary, but ranks 0 and {rank} differ {differ}. "
                f"A weight that FSDP shards is not split over the tokens' ranks: call the "
                "loss inside the forward of the module that owns it, where the weight is whole"
            )
    return RankFacts(max(n for _, n in starts_and_rows), all(part[5] for part in parts))


def check_target(
    target: Tensor, input: Tensor, name: str = "target", input_name: str = "input", *, head: LossHead | None = None
) -> None:
    """Raise TypeError or ValueError unless a target fits hidden states, and is the same on all ranks of a shard.

    Ranks of a split vocabulary compare two numbers in each call. On a CPU all raise, also for what one rank refuses; on
    a GPU the device asserts it, and the host does not wait.
    """
    shard = None if head is None else head.shard
    try:
        _check_target_tensor(target, input, name, input_name, head)
    except (TypeError, ValueError):
        if shard is not None and _tells_ranks(shard, input):
            gather_tensor(torch.tensor([-1, 0]), shard.group)
        raise
    if shard is not None:
        _check_same_targets(shard.group, target, name)


def _check_target_tensor(target: Tensor, input: Tensor, name: str, input_name: str, head: LossHead | None) -> None:
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        check_class_ids(target, name, hint=lambda: hint_for(target, name, ids=True))
    expected = tuple(input.shape[:-1]) if head is None or head.shard is None else head.token_shape(input)
    if target.shape != expected:
        hint = ""
        if head is not None and target.shape == head.weight.shape[:-1]:
            hint = swapped()
        elif target.ndim == input.ndim - 1 == 2 and abs(target.shape[1] - input.shape[1]) == 1:
            hint = f". If one of the two is shifted already, shift both: {input_name}, {name} = shifted(hidden, labels)"
        raise ValueError(
            f"{name} must be {expected}, one token id for each row of {input_name} {described(input)}"
            f"{'' if expected == input.shape[:-1] else ' on each rank'}, got {described(target)}{hint}"
        )
    if target.device != input.device:
        raise ValueError(f"{name} is on {target.device}, {input_name} on {input.device}: expected one device")


def check_temperature(temperature: Tensor, target: Tensor) -> None:
    """Check the dtype and shape of temperatures of tokens; `check_temperature_values` checks the values."""
    if temperature.dtype != torch.float32:
        raise TypeError(f"temperature must be a number or a float32 tensor, got {described(temperature)}")
    if temperature.shape != target.shape or temperature.device != target.device:
        raise ValueError(
            f"temperature must be a number, or {tuple(target.shape)} on {target.device}, one value for each target, "
            f"got {described(temperature)}"
        )


def check_temperature_values(temperature: Tensor, drawn_at: float | None = None) -> None:
    """Check the temperatures (n_valid,) of tokens that count, if the host may wait for them.

    Args:
        drawn_at: the temperature of a sampler, which they must be. None: they may be any.
    """
    if not temperature.numel() or not host_may_sync(temperature):
        return
    low, high = torch.stack(temperature.aminmax()).tolist()
    if not 0 < low <= high < math.inf:  # NaN too
        raise ValueError(f"temperature must be positive and finite at each token that counts, got {low:g} to {high:g}")
    if drawn_at is not None:
        check_same_temperature(drawn_at, low, high)


# Relative: temperatures of tokens are float32.
_SAME_TEMPERATURE = 1e-6


def check_same_temperature(drawn_at: float, low: float, high: float) -> None:
    """Raise ValueError unless the temperatures of a call, `low` to `high`, are those at which kept ids were drawn."""
    if all(math.isclose(x, drawn_at, rel_tol=_SAME_TEMPERATURE) for x in (low, high)):
        return
    got = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    raise ValueError(
        f"kept was drawn at temperature {drawn_at:g}, but this call divides its logits by {got}: the softmax over the "
        f"kept ids would not be the sampler's. Pass temperature={drawn_at:g}, or kept ids of this temperature"
    )


def _check_same_targets(group: dist.ProcessGroup | None, target: Tensor, name: str) -> None:
    ids = target.reshape(-1).long()
    checksum = (ids * torch.arange(1, 2 * ids.numel() + 1, 2, device=ids.device)).sum()
    expected = f"{name} must be whole and the same on all ranks of vocab_shard"
    if target.device.type != "cpu":
        # Launches alone, about 0.1 ms of the host, while the device is busy with what came before.
        checksums = gather_tensor(checksum, group)
        assert_async((checksums == checksums[0]).all(), expected)
        return
    numbers = gather_tensor(torch.stack([torch.tensor(ids.numel()), checksum]), group)
    if not bool((numbers == numbers[0]).all()):
        counts = numbers[:, 0].tolist()
        if -1 in counts:
            raise ValueError(f"{expected}, but rank {counts.index(-1)} refused its own: its error says why")
        got = "other ids" if len(set(counts)) == 1 else f"{counts} ids"
        raise ValueError(f"{expected}, but ranks {_different(numbers)} have {got}")


def _different(numbers: Tensor) -> list[int]:
    """Return the first rank, and those whose numbers differ from its."""
    return [0, *(numbers != numbers[0]).any(1).nonzero().view(-1).tolist()]


def shifted(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return `hidden[:, :-1]` and `labels[:, 1:]`: hidden states, and the token that each predicts.

    The losses expect that `input[t]` predicts `target[t]`, but a tokenizer's `labels` are one position off. Unshifted,
    the model learns to copy its input, with a very small loss.

    Args:
        hidden: (B, T, H), the last hidden states, floating-point.
        labels: (B, T), integer token ids, not shifted, with -100 or another `ignore_index` at tokens to skip.

    Returns:
        (input, target) of a loss: views (B, T - 1, H) and (B, T - 1), in the dtypes of `hidden` and `labels`.

    Raises:
        TypeError: `hidden` is no floating-point tensor, or `labels` holds no integers.
        ValueError: `hidden` is not (B, T, H), or `labels` is not (B, T) on its device, for example shifted already.

    >>> hidden, labels = torch.randn(2, 5, 4), torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, -100]])
    >>> input, target = shifted(hidden, labels)
    >>> input.shape, target.tolist()
    (torch.Size([2, 4, 4]), [[2, 3, 4, 5], [7, 8, 9, -100]])
    """
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        raise TypeError(f"hidden must be a floating-point tensor, got {described(hidden)}")
    if hidden.ndim != 3:
        raise ValueError(f"hidden must be (B, T, H), one sequence per row, got {described(hidden)}")
    if isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] == hidden.shape[1] - 1:
        raise ValueError(
            f"labels must be {tuple(hidden.shape[:2])}, a token id for each position of hidden {described(hidden)}, "
            f"got {described(labels)}: labels that are shifted already go with hidden[:, :-1], without shifted"
        )
    check_target(labels, hidden, "labels", "hidden")
    return hidden[:, :-1], labels[:, 1:]


def check_top_k(logps: Tensor, ids: Tensor, vocab_size: int) -> None:
    """Check a teacher's top-k (N, k), -inf where missing, if the host may wait for it."""
    if not host_may_sync(ids):
        return
    not_low, high, twice, positive, empty = survey_top_k(logps, ids).tolist()
    check_ids("teacher_ids", ~not_low, high, vocab_size)
    if twice:
        raise ValueError("teacher_ids holds a token twice for one row of input, expected distinct tokens")
    if positive:
        raise ValueError("teacher_logps holds a positive number or NaN, expected log-probabilities in nats")
    if empty:
        raise ValueError("teacher_logps holds only -inf for a row of input that counts, expected at least one token")
