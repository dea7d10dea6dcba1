"""What the ranks of a process group found out together, once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

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
