"""Convert DTensor arguments, as from `parallelize_module`, to this rank's plain tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from liger_chunked.types import AdaptedWeight, VocabShard, described

_BIASES = {"weight": "bias", "ref_weight": "ref_bias", "teacher_weight": "teacher_bias"}
_INPUTS = ("input", "hidden", "ref_input", "teacher_input", "kl_input", "ref_kl_input")


def any_dtensor(values: Iterable[Any]) -> bool:
    """Whether a value is or adapts a DTensor, without importing their module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(_matrix(x), module.DTensor) for x in values)


def _matrix(x: Any) -> Any:
    return x.weight if isinstance(x, AdaptedWeight) else x


def sharded_on_rows(x: Any) -> bool:
    """Whether a loss takes this DTensor as it is: replicated, or sharded on dim 0 of one mesh dimension."""
    from torch.distributed.tensor import Replicate, Shard

    split = [placement for placement in x.placements if not isinstance(placement, Replicate)]
    return not split or (len(split) == 1 and type(split[0]) is Shard and split[0].dim == 0)


def distributed_like(weight: Any, x: Tensor) -> Any:
    """Cut a plain tensor, the same on all ranks, as the DTensor `weight`. Its gradient is whole again."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    x = x if torch.is_grad_enabled() else x.detach()  # torch warns otherwise
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=weight.placements)


def localized(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace DTensors by plain tensors. Gradients come back as DTensors of the same placement.

    docs/distributed.md says how tensors may be sharded. A weight sharded on dim 0 becomes a `VocabShard`.
    """
    weight: Any = _matrix(arguments.get("weight"))
    given = arguments.get("vocab_shard")
    shard = _shard_of(weight) if any_dtensor([weight]) else None
    if shard is not None and given is not None:
        raise TypeError(f"weight is a DTensor sharded over the vocabulary, got vocab_shard too: leave out {given}")
    dim = None if shard is None else _sharded_dim("weight", weight)
    # An adapter's `down` reads whole hidden states, so its gradient is whole.
    adapted = {name for name in _BIASES if isinstance(arguments.get(name), AdaptedWeight)}
    grad_is_share = "weight" not in adapted
    by_chunk = dim is not None and not adapted and _all_sequence_sharded(arguments, dim)
    scatters = False
    local = dict(arguments)
    for name, x in arguments.items():
        if name in _BIASES or name in _BIASES.values():
            if x is not None and (shard is not None or any_dtensor([x])):
                local[name] = _own_rows(name, x, weight, dim, arguments.get("sequence_group"))
        elif not any_dtensor([x]):
            continue
        elif name in _INPUTS and by_chunk:
            local[name] = x.to_local(grad_placements=x.placements)
        elif name in _INPUTS:
            local[name], sharded = _replicated(name, x, dim, grad_is_share)
            scatters |= sharded and name in ("input", "hidden")
        else:
            local[name] = x.full_tensor()
    if shard is not None:
        input_grad: Any = "all_reduce"
        if scatters and grad_is_share:
            input_grad = "partial"
        if by_chunk:
            input_grad = "reduce_scatter"
        local["vocab_shard"] = VocabShard(*shard, input_grad=input_grad)
    return local


def _own_rows(name: str, x: Any, weight: Any, dim: int | None, sequence_group: Any) -> Any:
    """Return this rank's rows. Ranks that split sequences have shares of their gradient."""
    if isinstance(x, AdaptedWeight):
        own = _own_rows(name, x.weight, weight, dim, sequence_group)
        return AdaptedWeight(own, _own_rows(f"{name}.up", x.up, weight, dim, sequence_group), x.down)
    if not isinstance(x, Tensor):
        return x  # the loss refuses it
    if dim is not None and x.ndim and x.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{name} must have the {weight.shape[0]} rows of weight, for the same ids on each rank, got {_placed(x)}"
        )
    if not any_dtensor([x]):
        if dim is None:
            return x
        x = distributed_like(weight, x)
    if _sharded_dim(name, x) != dim:
        raise TypeError(f"{name} must be distributed like weight {_placed(weight)}, got {_placed(x)}")
    distributed: Any = x
    return distributed.to_local(grad_placements=_grad_placements(x, sequence_group))


def _grad_placements(x: Any, sequence_group: Any) -> list[Any]:
    from torch.distributed.tensor import Partial

    placements = list(x.placements)
    if sequence_group is not None:
        ranks = torch.distributed.get_process_group_ranks(sequence_group)
        for dim in range(x.device_mesh.ndim):
            if torch.distributed.get_process_group_ranks(x.device_mesh.get_group(dim)) == ranks:
                placements[dim] = Partial()
    return placements


def _placed(x: Any) -> str:
    placements = getattr(x, "placements", None)
    return f"{described(x)}, not distributed" if placements is None else f"{tuple(x.shape)} {tuple(placements)}"


def _sharded_dim(name: str, x: Any) -> int | None:
    """Return the mesh dimension that shards the rows; None for a replicated tensor."""
    from torch.distributed.tensor import Replicate

    if not sharded_on_rows(x):
        raise TypeError(
            f"{name} must be replicated, or sharded on dim 0 over one mesh dimension, got {_placed(x)}. If FSDP shards "
            "it too, call the loss inside the forward of the module that owns it"
        )
    return next((i for i, placement in enumerate(x.placements) if not isinstance(placement, Replicate)), None)


def _shard_of(weight: Any) -> tuple[Any, int, int] | None:
    dim = _sharded_dim("weight", weight)
    if dim is None:
        return None
    group = weight.device_mesh.get_group(dim)
    vocab_size = weight.shape[0]
    rows = -(-vocab_size // torch.distributed.get_world_size(group))  # as torch.chunk cuts
    return group, min(vocab_size, rows * torch.distributed.get_rank(group)), vocab_size


def _all_sequence_sharded(arguments: dict[str, Any], dim: int) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    def is_part(x: Any) -> bool:
        if not any_dtensor([x]) or x.shape[-2] % x.device_mesh.size(dim):
            return False
        places = [type(p) is Shard and p.dim % x.ndim == x.ndim - 2 for p in x.placements]
        return places[dim] and all(i == dim or isinstance(p, Replicate) for i, p in enumerate(x.placements))

    return all(is_part(arguments[name]) for name in _INPUTS if arguments.get(name) is not None)


def _replicated(name: str, x: Any, dim: int | None, grad_is_share: bool) -> tuple[Tensor, bool]:
    """Return plain hidden states, and whether they were sharded. `grad_is_share`: their gradient is a rank's share."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    split = [i for i, placement in enumerate(x.placements) if not isinstance(placement, Replicate)]
    if not split:
        return x.to_local(grad_placements=x.placements), False
    placement = x.placements[split[0]]
    if split != [dim] or type(placement) is not Shard or placement.dim % x.ndim == x.ndim - 1:
        raise TypeError(
            f"{name} must be replicated, or sharded on the batch or the sequence over the mesh dimension that shards "
            f"weight, got {_placed(x)}: pass to_local() where each rank has a batch of its own"
        )
    whole = x.redistribute(placements=[Replicate()] * len(x.placements))
    shares = [Partial() if grad_is_share and i == dim else Replicate() for i in range(len(x.placements))]
    return whole.to_local(grad_placements=shares), True
