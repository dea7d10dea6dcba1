from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.kernels.operands import Values

# The second name is deprecated since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_tensor(x: Tensor, group: Any) -> Tensor:
    """Return (ranks, *x.shape), in rank order; shapes must be equal."""
    gathered = x.new_empty(dist.get_world_size(group), *x.shape)
    if x.numel():
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=group)
    return gathered


def gather(values: Values, group: Any) -> list[Values]:
    """Gather the ranks' NamedTuples of equally shaped tensors by one collective."""
    fields = {name: f for name, f in values._asdict().items() if f is not None}
    floats = next(f.dtype for f in fields.values() if f.is_floating_point())
    ids = torch.int32 if floats.itemsize == 4 else torch.int64  # sent as they are: a gather does not change bits
    packed = torch.stack([f if f.dtype == floats else f.to(ids).view(floats) for f in fields.values()])
    parts = []
    for rows in gather_tensor(packed, group).unbind():
        found = zip(fields.items(), rows.unbind(), strict=True)
        parts.append(values._replace(**{k: x if f.dtype == floats else x.view(ids).to(f.dtype) for (k, f), x in found}))
    return parts


def sum_disjoint_(x: Tensor, group: Any) -> Tensor:
    """Send values, in place, to all ranks from the one where they are not zero."""
    if x.numel():
        dist.all_reduce(x, group=group)
    return x


T = TypeVar("T")


class OncePerGroup:
    """Results of collective checks.

        sizes = checks.result(group, ("sizes", name), lambda: gather_sizes(group))

    A check is a collective, so all ranks must run it in the same call: its key holds only what changes on all ranks at
    once. A key is looked up beside the process group itself, which is held weakly and not by its name. So a group is
    freed as soon as it is destroyed, its results go with it, and a later group is checked anew even if it has the name
    of an earlier one.
    """

    def __init__(self) -> None:
        self._of_groups: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()

    def result(self, group: dist.ProcessGroup | None, key: Hashable, check: Callable[[], T]) -> T:
        """Return what `check` returned for this group and key, and run it if it did not yet. None: the default group.

        A check that raises runs again in the next call.
        """
        group = dist.group.WORLD if group is None else group
        results = self._of_groups.get(group)
        if results is None:
            results = self._of_groups[group] = {}
        if key not in results:
            results[key] = check()
        return cast(T, results[key])

    def has(self, group: dist.ProcessGroup | None, key: Hashable) -> bool:
        """Return whether the group has a result for this key. None: the default group."""
        return key in self._of_groups.get(dist.group.WORLD if group is None else group, {})

    def forget(self, group: dist.ProcessGroup | None, key: Hashable) -> None:
        """Check again in the next call, because another rank has to."""
        self._of_groups.get(dist.group.WORLD if group is None else group, {}).pop(key, None)

    def clear(self) -> None:
        self._of_groups.clear()
