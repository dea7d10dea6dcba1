"""Functions of torch that are fused on deferred logits.

A rule gets the function and its arguments, of which the first one are logits. It returns the result as a function of
the logits in the autograd graph, or `NotImplemented`: then torch's function runs, and gets real logits where it reads
them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.calls import once
from liger_chunked.deferred import request
from liger_chunked.deferred.fused import HeadRows, Pass, fuse, wants_grad
from liger_chunked.deferred.lazy import PLAIN
from liger_chunked.deferred.logits import RULES, DeferredLogits
from liger_chunked.deferred.plan import DIFFERENCE, LOGITS, LOGPS, PROBS, PRODUCT, Plan
from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.private import version_of
from liger_chunked.types import LogitOptions, TokenStats

# No target is ignored: `gather` refuses negative ids.
_NO_TARGET = -(2**31)
# Kept, because a user may put a wrapper under these names in `F`.
_CROSS_ENTROPY, _NLL_LOSS = F.cross_entropy, F.nll_loss


def is_index(x: Any, shape: Any, device: torch.device) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.int64 and tuple(x.shape) == tuple(shape) and x.device == device


# Cross entropy


def _cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute `F.cross_entropy`, or `F.nll_loss` of log-probabilities."""
    if type(input) is not DeferredLogits or size_average is not None or reduce is not None:
        return NotImplemented
    kind = LOGITS if func is _CROSS_ENTROPY else LOGPS
    sources = input._cell.node.sources
    if sources[0].withheld and isinstance(target, Tensor) and not target.is_floating_point():
        sources[0].gave_zero = True
        dtype = result_dtype(func, input)
        return torch.zeros(target.shape if reduction == "none" else (), dtype=dtype, device=input.device)
    plan = input._plan
    fits = plan is not None and plan.kind == kind and plan.sign == 1 and plan.class_dim == 1
    fits = fits and (weight is None or weight.dtype == result_dtype(func, input))  # else torch says what is wrong
    if not fits or reduction not in ("mean", "sum", "none") or (weight is not None and weight.requires_grad):
        return NotImplemented
    assert plan is not None
    if not is_index(target, plan.row_shape, input.device):
        return NotImplemented
    accuracy = request.accuracy()
    settings = {
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "return_token_accuracy": accuracy is not None,
        **vars(plan.options),
        "ignore_index": ignore_index,
    }
    loss_fn: Any = once(LigerFusedLinearCrossEntropyLoss, **settings)

    def compute(head: HeadRows) -> Any:
        ids = target.to(head.weight.device).reshape(head.rows.shape[:-1])
        # Not the module's call: global hooks of modules are for those of the caller.
        result = loss_fn.forward(head.weight, head.rows, ids, head.bias, ce_weight=weight)
        if accuracy is None:
            return result
        result, metrics = result
        accuracy.append(metrics.token_accuracy)
        return result

    captured = [target] if weight is None else [target, weight]
    run = Pass([plan], compute, wants_grad(input), keeps_gradient=reduction != "none", captured=captured)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    if func is _CROSS_ENTROPY:
        options["label_smoothing"] = label_smoothing

    def stock(z: Tensor) -> Tensor:
        run.check_captured()
        return func(z, target, **options)

    result = fuse(run, run.results, input, plan, stock)
    result = result.reshape(target.shape) if reduction == "none" else result
    return result.to(input.device, result_dtype(func, input))


def result_dtype(func: Any, z: DeferredLogits) -> torch.dtype:
    """Return the dtype of a function of z, which autocast may widen."""
    device = z.device.type
    if not torch.is_autocast_enabled(device):
        return z.dtype
    return _asked_dtype(func, z.dtype, device, torch.get_autocast_dtype(device))


@functools.lru_cache(maxsize=128)
def _asked_dtype(func: Any, dtype: torch.dtype, device: str, autocast: torch.dtype) -> torch.dtype:
    with torch.no_grad():
        logits = torch.zeros(1, 2, dtype=dtype, device=device)
        takes_target = func in (_CROSS_ENTROPY, _NLL_LOSS)
        return (
            func(logits, torch.zeros(1, dtype=torch.long, device=device)).dtype
            if takes_target
            else func(logits, -1).dtype
        )


# Statistics of rows


class _Known(NamedTuple):
    """Statistics of rows that a pass computed, for later readers of these rows or of a selection of them.

    - `rows`: of the pass's plan
    - `gathered_by`: the index of the caller's `gather`, or None; `index_version`: its version counter, None if it
      counts no changes
    - `values`: the statistics, by name, detached; `versions`: their version counters, which show in-place changes
    - `run`: a weak reference to the pass; None if it has no gradient
    """

    rows: tuple[Any, ...]
    gathered_by: Tensor | None
    index_version: int | None
    values: dict[str, Tensor]
    versions: dict[str, int]
    run: Any

    def serves(self, plan: Plan, index: Tensor | None, names: tuple[str, ...]) -> bool:
        if plan.rows[: len(self.rows)] != self.rows:
            return False
        if index is not None and not self._has_gathered_by(index, plan):
            return False
        return all(name in self.values and version_of(self.values[name]) == self.versions[name] for name in names)

    def _has_gathered_by(self, index: Tensor, plan: Plan) -> bool:
        # An index belongs to all rows in their order, not to a selection of them.
        known = index is self.gathered_by and self.index_version is not None and plan.rows == self.rows
        return known and version_of(index) == self.index_version


def statistics(z: DeferredLogits, plan: Plan, index: Tensor | None, *names: str) -> tuple[Pass | None, TokenStats]:
    """Return a pass and its statistics of the rows of logits. An earlier pass of these rows is used again.

    It may be None if z has no gradient: nothing keeps a pass without one.

    Args:
        index: of a `gather` of one id for each row, whose log-probability is among the statistics. None: of none.
    """
    grad = wants_grad(z)
    known: list[_Known] = plan.sources[0][0].passes.setdefault(plan.signature, [])
    for entry in known:
        run: Any = None if entry.run is None else entry.run()
        if entry.serves(plan, index, names) and (run is not None or not grad):
            given: Any = run
            values = {name: getattr(given.results, name) if grad else entry.values[name] for name in names}
            # Copies: readers may change them.
            values = {name: plan.select(x.reshape(-1, 1), len(entry.rows)) for name, x in values.items()}
            return run, TokenStats(**{name: x.flatten().clone() for name, x in values.items()})
    outputs = tuple(dict.fromkeys((*names, *(("lse",) if grad or index is not None else ()))))
    options, target = plan.options, None if index is None else index.select(plan.class_dim, 0)

    def compute(head: HeadRows) -> TokenStats:
        shape = head.rows.shape[:-1]
        ids = (
            head.rows.new_zeros(shape, dtype=torch.long)
            if target is None
            else target.to(head.weight.device).reshape(shape)
        )
        return linear_token_stats(
            head.weight,
            head.rows,
            ids,
            head.bias,
            outputs=outputs,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            ignore_index=_NO_TARGET,
            logits_budget=options.logits_budget,
        )

    run = Pass([plan], compute, grad)
    stats: TokenStats = run.results
    values = {name: x.detach() for name in outputs if (x := getattr(stats, name)) is not None}
    versions = {name: version_of(x) for name, x in values.items()}
    version = None if index is None or index.is_inference() else version_of(index)
    known.append(_Known(plan.rows, index, version, values, versions, weakref.ref(run) if grad else None))
    return run, stats


def _of_stats(
    z: DeferredLogits,
    plan: Plan,
    index: Tensor | None,
    names: tuple[str, ...],
    read: Callable[..., Tensor],
    stock: Callable[..., Tensor],
) -> Tensor:
    """Return `read(statistics)`, with a value for each row, as a function of z. `stock(z)` is the same of real z."""
    grad = wants_grad(z)
    run, stats = statistics(z, plan, index, *names)
    with torch.set_grad_enabled(grad):
        result = read(stats).reshape(plan.row_shape)
    if run is None or not grad:
        return result.to(z.device)
    return fuse(run, result, z, plan, stock).clone().to(z.device)


def _gathered(func: Any, input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    """Compute `gather` of one id for each row, of logits, log-probabilities or probabilities."""
    plan = _plan_on(input, dim)
    if plan is None or sparse_grad:
        return NotImplemented
    shape = list(plan.shape)
    shape[plan.class_dim] = 1
    if not is_index(index, shape, input.device):
        return NotImplemented
    dtype = input.dtype
    sign = plan.sign

    def read(stats: TokenStats) -> Tensor:
        assert stats.logps is not None and stats.lse is not None
        x = stats.logps + stats.lse if plan.kind == LOGITS else stats.logps
        x = x.exp() if plan.kind == PROBS else x
        return x * sign if sign != 1 else x.clone() if plan.kind == PROBS else x

    kept = index
    # `lse`: the usual next step after a gather of logits is the difference to `logsumexp`, which the same pass gives.
    result = _of_stats(
        input, plan, index, ("logps", "lse"), read, lambda z: z.gather(plan.class_dim, kept).select(plan.class_dim, 0)
    )
    return result.to(dtype).unsqueeze(plan.class_dim)


def _take_along_dim(func: Any, input: Any, indices: Any, dim: Any = None) -> Any:
    return NotImplemented if dim is None else _gathered(func, input, dim, indices)


def _plan_on(z: Any, dim: Any) -> Plan | None:
    """Return the plan of logits whose vocabulary is dimension `dim`."""
    if (
        type(z) is not DeferredLogits
        or not isinstance(dim, int)
        or isinstance(dim, bool)
        or not -z.ndim <= dim < z.ndim
    ):
        return None
    plan = z._plan
    if plan is None or plan.kind in (DIFFERENCE, PRODUCT) or plan.class_dim != dim % z.ndim:
        return None
    return plan if plan.row_shape.numel() > 0 else None


def _logsumexp(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    plan = _plan_on(input, dim)
    if plan is None or plan.kind != LOGITS or kwargs:
        return NotImplemented
    result = _of_stats(input, plan, None, ("lse",), lambda stats: stats.lse, lambda z: z.logsumexp(plan.class_dim))
    result = result.to(result_dtype(torch.logsumexp, input))
    return result.unsqueeze(plan.class_dim) if keepdim else result


def _mean_without_product(z: DeferredLogits, plan: Plan) -> Tensor | None:
    """Return the mean of logits over the vocabulary, by the mean of the weight; None for one that needs all logits.

    A metric, without a gradient: a product with one row of a weight in place of all of them.
    """
    if wants_grad(z) or plan.kind != LOGITS or plan.transform.outer is not None or len(plan.sources) > 1:
        return None

    def compute(head: HeadRows) -> Tensor | None:
        if type(head.weight) not in PLAIN:
            return None
        dtype = torch.promote_types(head.rows.dtype, torch.float32)
        mean = (head.rows.to(dtype) * head.weight.mean(0, dtype=dtype)).sum(-1)
        return mean if head.bias is None else mean + head.bias.mean(dtype=dtype)

    mean = Pass([plan], compute, False).results
    scale = plan.options.logit_scale
    return None if mean is None else (mean * scale).reshape(plan.row_shape).to(z.device)


def reduction(name: str) -> Callable[..., Any]:
    """Return the rule of a mean or sum over the vocabulary, or over everything: metrics that trainers log."""

    def rule(
        func: Any,
        input: Any,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        if type(input) is not DeferredLogits or kwargs:
            return NotImplemented
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        whole = dim is None and not keepdim
        plan = input._plan if whole else _plan_on(input, dim)
        takes = dtype is None or (dtype == torch.float32 and input.dtype != torch.float64)
        if plan is None or not takes or plan.row_shape.numel() == 0 or plan.kind not in (LOGITS, LOGPS):
            return NotImplemented
        size = input.shape[plan.class_dim]
        factor = plan.sign * (size if name != "mean" else 1)
        names = ("mean_logits",) if plan.kind == LOGITS else ("mean_logits", "lse")

        def read(stats: TokenStats) -> Tensor:
            assert stats.mean_logits is not None
            lse: Any = stats.lse
            x = stats.mean_logits if plan.kind == LOGITS else stats.mean_logits - lse
            return x * factor if factor != 1 else x

        reduce = torch.mean if name == "mean" else torch.sum
        result = _mean_without_product(input, plan)
        if result is None:
            result = _of_stats(input, plan, None, names, read, lambda z: reduce(z, plan.class_dim))
        elif factor != 1:
            result = result * factor
        if name == "nansum" and not bool(result.isfinite().all()):
            return NotImplemented
        if whole:
            result = reduce(result)
        result = result.to(result_dtype(reduce, input) if dtype is None else dtype)
        return result.unsqueeze(plan.class_dim) if keepdim else result

    return rule


def _argmax(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    plan = _plan_on(input, dim)
    if plan is None:
        return NotImplemented
    # Real logits round after each scale, which can make the largest two equal.
    scaled = plan.transform.outer is not None or plan.transform.inner != 1
    if plan.kind != LOGITS or plan.sign != 1 or (scaled and input.dtype not in (torch.float32, torch.float64)):
        return NotImplemented
    with torch.no_grad():
        _, stats = statistics(input, plan, None, "argmax")
    result = stats.argmax.reshape(plan.row_shape).to(input.device)  # type: ignore[union-attr]
    return result.unsqueeze(plan.class_dim) if keepdim else result


def _split(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Split a trainer's logits by slices: the backward of a split makes real zeros for the parts that no loss reads.

    Elsewhere parts are views of a split, which autograd does not let a user change in place.
    """
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if type(input) is not DeferredLogits or not isinstance(dim, int):
        return NotImplemented
    if not input._cell.node.sources[0].settings.of_trainer:
        return NotImplemented
    lengths = [x.shape[dim] for x in func(torch.empty(input.shape, device="meta"), *args, **kwargs)]
    starts = itertools.accumulate([0, *lengths[:-1]])
    return tuple(input.narrow(dim, start, n) for start, n in zip(starts, lengths, strict=True))


def logit_options(z: DeferredLogits, ignore_index: int) -> LogitOptions:
    """Return the transform of logits, as a loss takes it; ValueError if no loss can express them."""
    plan = z._plan
    if plan is None or plan.kind != LOGITS:
        raise ValueError(f"expected rows of logits which a loss can express and which are not computed yet, got {z!r}")
    return plan.transform.options(ignore_index=ignore_index)


for _name, _rule in {
    "gather": _gathered,
    "take_along_dim": _take_along_dim,
    "logsumexp": _logsumexp,
    "argmax": _argmax,
    "mean": reduction("mean"),
    "sum": reduction("sum"),
    "nansum": reduction("nansum"),
    "chunk": _split,
    "split": _split,
    "tensor_split": _split,
}.items():
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = _rule
RULES[_CROSS_ENTROPY] = RULES[_NLL_LOSS] = _cross_entropy
