"""The ids that a sampler kept of each token's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_chunked.types import check_number, described

_INTEGERS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True, eq=False)
class KeptIds:
    """The ids that a sampler kept, for each position of a target: its distribution was a softmax over these alone.

    With `kept=`, `linear_token_stats` and the policy losses take log-probabilities and entropies under this softmax,
    after the temperature. They read only these rows of the head, and form no logits of the others, unless the lists are
    so long that three products of whole rows take less time: about one id of 180 of the vocabulary, or more.

    Args:
        ids: (M,) integers, those of all positions in the order of the flattened target, distinct within a position.
        offsets: (positions + 1,) integers from 0 to M: `ids[offsets[i] : offsets[i + 1]]` are those of position i. An
            empty slice stands for the whole vocabulary; at an ignored position it costs nothing.
        temperature: by which the sampler divided its logits, positive. A call at another temperature raises. None: not
            known, and nothing is compared.

    The fields are copies, so that nothing changes a `KeptIds` when a caller fills its buffers with the next ids. Calls
    keep the order of the ids that they sorted for the first one, and sort again where a torch operation changed a field
    in place. A write to a field that torch does not count has no effect on later calls: through `.data`, NumPy or
    DLPack, or to a tensor that was made in inference mode. A call on another stream waits for the sort; it is yours to
    wait for `ids` and `offsets` themselves.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape or device, or the temperature is not positive.

    >>> kept = KeptIds.from_lists([[], [7, 3], [5]])        # a prompt's token, and two sampled ones
    >>> kept.ids, kept.offsets
    (tensor([7, 3, 5]), tensor([0, 0, 2, 3]))
    """

    ids: Tensor
    offsets: Tensor
    temperature: float | None = None

    def __post_init__(self) -> None:
        for name, x in (("ids", self.ids), ("offsets", self.offsets)):
            if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
                raise TypeError(f"KeptIds.{name} must be a tensor of integers, got {described(x)}")
            if x.ndim != 1:
                raise ValueError(f"KeptIds.{name} must have one dimension, got {described(x)}")
        if not self.offsets.numel():
            raise ValueError(
                "KeptIds.offsets must be (positions + 1,), from 0 to the number of ids, got an empty tensor"
            )
        if self.ids.device != self.offsets.device:
            raise ValueError(
                f"KeptIds.ids is on {self.ids.device}, offsets on {self.offsets.device}: expected one device"
            )
        check_number("KeptIds.temperature", self.temperature, optional=True)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"KeptIds.temperature must be positive and finite, or None, got {self.temperature}")
        # Copies: torch does not count writes to memory that a caller shares with NumPy, DLPack or another process.
        for name in ("ids", "offsets"):
            object.__setattr__(self, name, getattr(self, name).clone())

    @property
    def positions(self) -> int:
        """How many positions there are."""
        return self.offsets.shape[0] - 1

    def to(self, device: torch.device | str) -> KeptIds:
        """Return the ids on a device."""
        return KeptIds(self.ids.to(device), self.offsets.to(device), self.temperature)

    def take(self, positions: Tensor) -> KeptIds:
        """Return the ids of chosen positions, such as those of one rank, or of sequences in another order.

        Waits for the device.

        Args:
            positions: (P,) integers from 0 to `self.positions - 1`, in any order, or -1 for an empty slice.

        Returns:
            The ids of P positions.

        Raises:
            TypeError, ValueError: `positions` is no such tensor.

        >>> kept = KeptIds.from_lists([[1], [2, 3], [4]]).take(torch.tensor([2, -1, 1]))
        >>> kept.ids, kept.offsets
        (tensor([4, 2, 3]), tensor([0, 1, 1, 3]))
        """
        if not isinstance(positions, Tensor) or positions.dtype not in _INTEGERS:
            raise TypeError(f"positions must be a tensor of integers, got {described(positions)}")
        if positions.ndim != 1 or positions.device != self.offsets.device:
            raise ValueError(f"positions must be (P,) on {self.offsets.device}, got {described(positions)}")
        index = positions.long()
        if index.numel():
            low, high = torch.stack(index.aminmax()).tolist()
            if low < -1 or high >= self.positions:
                raise ValueError(f"positions must be -1, or 0 to {self.positions - 1}, got {low} to {high}")
        offsets = torch.cat([self.offsets.long(), self.offsets[-1:].long()])
        index = index.where(index >= 0, self.positions)  # the empty slice that was added
        first, lengths = offsets[index], offsets[index + 1] - offsets[index]
        chosen = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        n = int(chosen[-1])
        places = torch.arange(n, device=index.device)
        places = places + torch.repeat_interleave(first - chosen[:-1], lengths, output_size=n)
        return KeptIds(self.ids[places], chosen, self.temperature)

    @classmethod
    def cat(cls, parts: Sequence[KeptIds]) -> KeptIds:
        """Return the ids of the positions of all parts, in order.

        Args:
            parts: one or more, on one device. The temperature is known if all parts with ids share it.

        >>> KeptIds.cat([KeptIds.from_lists([[7]]), KeptIds.from_lists([[], [3, 5]])]).offsets
        tensor([0, 1, 1, 3])
        """
        if not parts:
            raise ValueError("parts must be one or more KeptIds, got none")
        lengths = torch.cat([part.offsets.long().diff() for part in parts])
        ids = torch.cat([part.ids for part in parts])
        temperatures = {part.temperature for part in parts if part.ids.numel()}
        temperature = temperatures.pop() if len(temperatures) == 1 else None
        return cls(ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), temperature)

    @classmethod
    def from_lists(
        cls,
        lists: Iterable[Sequence[int] | None],
        device: torch.device | str | None = None,
        *,
        temperature: float | None = None,
    ) -> KeptIds:
        """Return the ids of lists, one for each position of the flattened target.

        Args:
            lists: the ids of each position; None or an empty list for the whole vocabulary.
            device: where the tensors go; None: torch's default device.
            temperature: the sampler's, as of the constructor.
        """
        rows = [[] if ids is None else list(ids) for ids in lists]
        lengths = torch.tensor([0, *map(len, rows)])
        flat = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
        kept = cls(flat, lengths.cumsum(0), temperature)
        return kept if device is None else kept.to(device)

    @classmethod
    def from_completions(
        cls,
        completions: Sequence[Sequence[Sequence[int]] | KeptIds | None],
        target: Tensor,
        first: int = 0,
        *,
        ignore_index: int = -100,
        temperature: float | None = None,
    ) -> KeptIds:
        """Return what inference engines kept of each completion's tokens, at the positions of a loss's target.

        Engines return the ids of each sampled token (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1):

        - vLLM 0.28, started with `enable_return_sampling_mask`: `output.sampling_mask.token_ids` of each
          `CompletionOutput`, or `choice["sampling_mask"]` over HTTP.
        - SGLang, asked with `return_sampling_mask`: `output["meta_info"]["output_token_sampling_mask"]`.
        - ids and offsets, as slime and miles keep a response's: `KeptIds(ids, offsets)`.

        Waits for the device.

        Args:
            completions: B of these, each of its tokens in order. None, or an empty list of a token: the whole
                vocabulary.
            target: (B, T), integer ids, or `ignore_index`, at positions that no loss reads.
            first: the column of `target` with the first token of completions: 0 if it holds completions alone, P - 1
                if it holds prompts of P columns too and is shifted, as by `shifted`. Targets before it have the whole
                vocabulary.
            ignore_index: the target of positions that get no ids, and cost nothing.
            temperature: the sampler's, as of the constructor. None: that of the `KeptIds` among `completions`.

        Returns:
            The ids of B * T positions, on the device of `target`.

        Raises:
            TypeError, ValueError: `target` has another number of sequences, or a target beyond a completion's tokens.

        >>> target = torch.tensor([[-100, 7, 5], [-100, 4, -100]])
        >>> kept = KeptIds.from_completions([[[7, 3], [5]], [[4, 9]]], target, first=1)
        >>> kept.ids, kept.offsets
        (tensor([7, 3, 5, 4, 9]), tensor([0, 0, 2, 3, 3, 5, 5]))
        """
        check_completions(target, len(completions))
        unknown = cls.from_lists([None] * target.shape[1])
        parts = [unknown if x is None else x if isinstance(x, KeptIds) else cls.from_lists(x) for x in completions]
        if not parts:
            return cls(target.new_zeros(0), target.new_zeros(1), temperature)
        lengths = torch.tensor([part.positions for part in parts])
        tokens = cls.cat([part.to(target.device) for part in parts])
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        if temperature is not None:
            tokens = cls(tokens.ids, tokens.offsets, temperature)
        return at_target(tokens, target, first, starts, 1, lengths, ignore_index)

    @classmethod
    def from_mask(cls, mask: Tensor, *, temperature: float | None = None) -> KeptIds:
        """Return the ids where a mask is True. Waits for the device.

        Args:
            mask: (..., V) bool, the positions in the order of the target. A row of True alone becomes an empty slice,
                the whole vocabulary; a row of False alone is refused.
            temperature: the sampler's, as of the constructor.

        Raises:
            TypeError: the mask is not bool.
            ValueError: a position keeps nothing.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.ndim:
            raise TypeError(f"mask must be bool (..., V), got {described(mask)}")
        flat = mask.reshape(-1, mask.shape[-1])
        counts = flat.sum(1)
        if bool((counts == 0).any()):
            raise ValueError(
                f"mask keeps no id at position {int((counts == 0).nonzero()[0])}, expected at least one: make the row "
                "True where nothing was filtered, as at a prompt"
            )
        is_whole = counts == flat.shape[1]
        ids = (flat & ~is_whole[:, None]).nonzero()[:, 1]
        counts = counts.masked_fill(is_whole, 0)
        return cls(ids, torch.cat([counts.new_zeros(1), counts.cumsum(0)]), temperature)

    @classmethod
    def from_top_p(
        cls,
        logits: Tensor,
        top_p: float | None = None,
        *,
        top_k: int | None = None,
        min_p: float | None = None,
        temperature: float | Tensor = 1.0,
    ) -> KeptIds:
        """Return what a sampler keeps of materialized logits: first `top_k`, then `top_p`, then `min_p`.

        The order is that of transformers' `generate`; vLLM takes `min_p` first. Waits for the device.

        Args:
            logits: (..., V), the positions in the order of the target, before a temperature divides them.
            top_p: keep the fewest of the largest probabilities that sum to it, in (0, 1]; None: all.
            top_k: keep the largest logits, and ties with the smallest of them; None: all.
            min_p: keep probabilities of at least `min_p` times the largest, in [0, 1]; None: all.
            temperature: divides the logits before; a number, or (...) one of each position. The result knows a number.

        Raises:
            TypeError, ValueError: an option has the wrong type, or is out of range.

        >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]]).log()
        >>> kept = KeptIds.from_top_p(logits, 0.8)
        >>> kept.ids, kept.offsets
        (tensor([0, 1, 0]), tensor([0, 2, 3]))
        """
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.ndim:
            raise TypeError(f"logits must be floating-point (..., V), got {described(logits)}")
        _check_sampling(top_k, top_p, min_p)
        z = logits.detach().reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        of_rows = temperature.reshape(-1, 1).to(z.dtype) if isinstance(temperature, Tensor) else temperature
        z = z / of_rows
        if top_k is not None and top_k < z.shape[1]:
            z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -math.inf)
        if top_p is not None and top_p < 1:
            largest, order = z.sort(descending=True, stable=True)
            # The sum of each probability and of all after it. From the smallest, because in floating point a sum from
            # the largest reaches 1 too early.
            mass = largest.softmax(-1).flip(-1).cumsum(-1).flip(-1)
            dropped = mass <= 1 - top_p
            dropped[:, 0].fill_(False)  # the largest stays, also where `1 - top_p` rounds to 1
            z = z.masked_fill(dropped.gather(1, order.argsort(1)), -math.inf)
        if min_p is not None:
            # Of probabilities, as samplers compute it: of logits, ids at the bound would round otherwise.
            p = z.softmax(-1)
            z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -math.inf)
        return cls.from_mask(z > -math.inf, temperature=None if isinstance(temperature, Tensor) else temperature)


def _check_sampling(top_k: Any, top_p: Any, min_p: Any) -> None:
    """Check a sampler's options, each a number or None."""
    check_number("top_k", top_k, whole=True, optional=True)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        check_number(name, share, optional=True)
    if isinstance(top_k, bool):
        raise TypeError(f"top_k must be an int or None, got {top_k}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, or None, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], or None, got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], or None, got {min_p}")


def check_completions(target: Tensor, n: int) -> None:
    """Raise TypeError or ValueError unless a target is (n, T), of integers."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise TypeError(f"target must be a tensor of integers, got {described(target)}")
    if target.ndim != 2 or target.shape[0] != n:
        raise ValueError(f"target must be (B, T) of the {n} sequences that were sampled, got {described(target)}")


def at_target(
    tokens: KeptIds, target: Tensor, first: int, starts: Tensor, stride: int, lengths: Tensor, ignore_index: int
) -> KeptIds:
    """Return the ids of sampled tokens at the positions of a target.

    Args:
        tokens: of all sampled tokens; those of sequence b at `starts[b]` and each `stride` places after.
        target: (B, T), with the first sampled token in column `first`.
        lengths: (B,), the number of sampled tokens.

    Raises:
        ValueError: there is a target after the last sampled token.
    """
    starts, lengths = (x.to(target.device)[:, None] for x in (starts, lengths))
    step = torch.arange(target.shape[1], device=target.device) - first
    has_target = target != ignore_index
    beyond = (has_target & (step >= lengths)).any(1)
    if bool(beyond.any()):
        row = int(beyond.nonzero()[0])
        raise ValueError(
            f"sequence {row} has the ids of {int(lengths[row])} tokens, from column first={first} on, but target "
            f"{described(target)} has a token beyond them"
        )
    positions = torch.where(has_target & (step >= 0), starts + stride * step, -1)
    return tokens.take(positions.reshape(-1))
