"""Sums over the vocabulary of products of two tensors of logits: entropy, cross entropy and KL divergence by hand.

    (p * logp).sum(-1)                          -entropy
    (p * z).sum(-1)                             logsumexp(z) - entropy
    (p * logq).sum(-1)                          -(KL(p || q) + entropy)
    (p * (logp - logq)).sum(-1)                 KL(p || q)
    F.kl_div(logq, p, reduction=...)            the same

`_Joined` is the product or difference, without values. A sum over the vocabulary computes it by a pass. The gradient of
that sum has one `Term` for each factor, whose `path` leads to the factor: the term is the derivative of the sum through
that factor alone. So a factor may be detached, scaled or hooked by itself, as with real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.calls import once
from liger_chunked.deferred.fused import HeadRows, Pass, link, wants_grad
from liger_chunked.deferred.gradient import LazyGradient, Term
from liger_chunked.deferred.lazy import Lazy
from liger_chunked.deferred.logits import RULES, DeferredLogits
from liger_chunked.deferred.plan import DIFFERENCE, LOGITS, LOGPS, PROBS, PRODUCT, Plan, joined
from liger_chunked.deferred.rules import reduction, result_dtype, statistics
from liger_chunked.losses import LigerFusedLinearKLDivLoss
from liger_chunked.private import with_autograd
from liger_chunked.types import LogitOptions

Path = tuple[tuple[int, Plan], ...]  # of `Term`


class _Joined(torch.autograd.Function):
    """`function(a, b)` of two stand-ins, without values."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor, Tensor], Tensor], kind: str, a: Any, b: Any) -> Any:
        ctx.function, ctx.factors = function, [(x._cell.node, x._geometry, x.dtype, x.device) for x in (a, b)]
        plans = a._plan, b._plan
        plan = None if plans[0] is None or plans[1] is None else joined(function, kind, *plans, a.shape)
        return a._joined(function, b, plan)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *(_through(ctx, g, i) if ctx.needs_input_grad[2 + i] else None for i in range(2))


def _through(ctx: Any, g: Any, i: int) -> Tensor:
    """Return the gradient of factor i."""
    of_values = functools.partial(_of_values, ctx.function, ctx.factors, i)
    terms = [term.through(i) for term in g.terms] if isinstance(g, LazyGradient) else [None]
    if torch.is_grad_enabled() or any(found is None for found in terms):
        return of_values(g._value() if isinstance(g, Lazy) else g)
    _, (size, *_), dtype, device = ctx.factors[i]
    return LazyGradient.linear(of_values, [g], size, dtype, device, [term for found in terms for term in found or []])


def _of_values(function: Any, factors: Any, i: int, g: Tensor) -> Tensor:
    """Return the gradient of factor i, made of real values."""

    def run() -> Tensor:
        reals = [node.view(geometry).detach() for node, geometry, *_ in factors]
        out = function(*(x.requires_grad_(j == i) for j, x in enumerate(reals)))
        return torch.autograd.grad(out, reals[i], g.to(out.dtype))[0]

    return with_autograd(run)


# What the sum of a product is


class Sum(NamedTuple):
    """What the sum of a product over the vocabulary is, up to the factor `sign`.

    - `kind`: "entropy" of p, "logits" (the sum of p z), "kl" (of p and q) or "cross" (the cross entropy of p and q)
    - `to_p`, `to_q`: the paths to p, and to q or z
    - `p`, `q`: the plans of p, and of q or z, with the rows of the product
    """

    kind: str
    sign: float
    to_p: Path
    to_q: Path
    p: Plan
    q: Plan


def _sum_of(product: Plan) -> Sum | None:
    """Return what the sum of a product is; None if no pass computes it."""

    def made(kind: str, sign: float, to_p: Path, to_q: Path) -> Sum | None:
        p, q = _end(product, to_p), _end(product, to_q)
        return Sum(kind, sign * product.sign, to_p, to_q, p, q) if p.n_ids == q.n_ids else None

    first, second = product.parts
    if isinstance(product.function, functools.partial):  # F.kl_div(logq, p)
        kinds = LOGPS, LOGPS if product.function.keywords["log_target"] else PROBS
        fits = (first.kind, second.kind) == kinds and first.sign == second.sign == 1
        return made("kl", 1.0, ((1, second),), ((0, first),)) if fits else None
    at = 0 if first.kind == PROBS else 1
    p, other = product.parts[at], product.parts[1 - at]
    if p.kind != PROBS:
        return None
    to_p: Path = ((at, p),)
    if other.kind == DIFFERENCE:
        if any(part.kind != LOGPS or part.sign != 1 for part in other.parts):
            return None
        to_both: list[Path] = [((1 - at, other), (j, part)) for j, part in enumerate(other.parts)]
        alike = [_alike(_end(product, to_p), _end(product, path)) for path in to_both]
        if not any(alike):
            return None
        return made("kl", p.sign, to_p, to_both[1]) if alike[0] else made("kl", -p.sign, to_p, to_both[0])
    to_other: Path = ((1 - at, other),)
    sign = p.sign * other.sign
    if _alike(p, other) and other.kind in (LOGPS, LOGITS):
        return made(*(("entropy", -sign) if other.kind == LOGPS else ("logits", sign)), to_p, to_other)
    return made("cross", -sign, to_p, to_other) if other.kind == LOGPS else None


def _end(product: Plan, path: Path) -> Plan:
    """Return the plan that a path leads to, with the rows of the product."""
    rows = (*(row for _, plan in reversed(path) for row in plan.rows), *product.rows)
    return path[-1][1]._replace(rows=rows, shape=product.shape, class_dim=product.class_dim)


def _alike(a: Plan, b: Plan) -> bool:
    return a.signature == b.signature and a.rows == b.rows


def sum_of_product(z: Any, dim: Any, keepdim: bool, mean: bool, dtype: Any = None) -> Any:
    """Compute the sum or mean over the vocabulary, or over everything, of a product; NotImplemented if no pass does."""
    product = z._plan if type(z) is DeferredLogits and dtype is None else None
    total = _sum_of(product) if product is not None and product.kind == PRODUCT else None
    whole = dim is None and not keepdim
    if product is None or total is None or product.row_shape.numel() == 0:
        return NotImplemented
    if not whole and (not isinstance(dim, int) or dim % z.ndim != product.class_dim):
        return NotImplemented
    scale = total.sign / ((product.n_ids if mean else 1) * (product.row_shape.numel() if mean and whole else 1))
    reduce = torch.mean if mean else torch.sum
    stock = functools.partial(_reduced, reduce, None if whole else product.class_dim)
    terms: list[Term] = []  # without their upstream gradient
    with torch.set_grad_enabled(wants_grad(z)):
        value = _value(z, product, total, scale, whole, terms)
    result = link(value, z, lambda g: [term._replace(upstream=g) for term in terms], stock)
    result = result.to(z.device, result_dtype(reduce, z))
    return result.unsqueeze(product.class_dim) if keepdim else result


def _reduced(reduce: Any, dim: int | None, x: Tensor) -> Tensor:
    return reduce(x) if dim is None else reduce(x, dim)


def _value(z: DeferredLogits, product: Plan, total: Sum, scale: float, whole: bool, terms: list[Term]) -> Tensor:
    """Return a sum of a product, and append the terms of its gradient."""
    kind, _, to_p, to_q, p, q = total

    def placed(x: Tensor) -> Tensor:
        return x.sum() * scale if whole else x.reshape(product.row_shape) * scale

    def note(run: Pass | None, side: int, path: Path, result: Tensor) -> None:
        if run is not None:
            terms.append(Term(run, side, product, result, result, path=path))

    if kind in ("entropy", "logits"):
        run, stats = statistics(z, p, None, *(("entropy",) if kind == "entropy" else ("entropy", "lse")))
        entropy: Any = stats.entropy
        entropy = placed(entropy) if kind == "entropy" else -placed(entropy)
        note(run, 0, to_p, entropy)
        if kind == "entropy":
            return entropy
        lse: Any = stats.lse
        lse = placed(lse)
        note(run, 0, to_q, lse)
        return lse + entropy
    run, kl = _kl(z, p, q, whole)
    value = kl * scale if whole else placed(kl)
    if kind == "cross":
        with torch.set_grad_enabled(_needs(p) and torch.is_grad_enabled()):
            of_p, stats = statistics(z, p, None, "entropy")
            entropy = stats.entropy
            entropy = placed(entropy)
            if torch.is_grad_enabled():
                note(of_p, 0, to_p, entropy)
        value = value + entropy.detach()
    note(run, 0, to_q, value)
    if _needs(p):
        note(run, 1, to_p, value)
    return value


def _needs(plan: Plan) -> bool:
    return any(any(source.needs) for source, _ in plan.sources)


def _kl(z: DeferredLogits, p: Plan, q: Plan, whole: bool) -> tuple[Pass, Tensor]:
    """Return KL(p || q), of all rows or (`whole`) their sum, and its pass: sides q and p."""
    through_p = _needs(p)
    n_rows = p.row_shape.numel() if whole else 1

    def loss(reverse: bool, student: Plan, teacher: Plan) -> Any:
        settings = {**vars(student.options), "ignore_index": -(2**31), "logits_dtype": None}
        of_teacher = LogitOptions(softcap=teacher.options.softcap, logit_scale=teacher.options.logit_scale)
        settings |= {"teacher_options": of_teacher, "reverse": reverse, "reduction": "mean" if whole else "none"}
        return once(LigerFusedLinearKLDivLoss, weight_hard_loss=0.0, weight_soft_loss=1.0, **settings)

    forward, backward = loss(False, q, p), loss(True, p, q)

    def detached(head: HeadRows) -> Any:
        weight = head.weight if not isinstance(head.weight, Tensor) else head.weight.detach()
        return weight, head.rows.detach(), None if head.bias is None else head.bias.detach()

    def compute(of_q: HeadRows, of_p: HeadRows) -> Tensor:
        weight, rows, bias = detached(of_p)
        value, _ = forward.forward(of_q.weight, of_q.rows, weight, rows, None, of_q.bias, bias)
        if through_p and torch.is_grad_enabled():
            weight, rows, bias = detached(of_q)
            same, _ = backward.forward(of_p.weight, of_p.rows, weight, rows, None, of_p.bias, bias)
            # The same value, for its gradient alone. An infinite divergence has none, and must stay infinite.
            value = value + torch.where(same.isfinite(), same - same.detach(), 0.0)
        return value * n_rows if whole else value

    run = Pass([q, p], compute, wants_grad(z), keeps_gradient=whole)
    return run, run.results


# Rules


def _multiplied(func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    return _joined(torch.mul, PRODUCT, input, other, kwargs, PROBS)


def _subtracted(func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    return _joined(torch.sub, DIFFERENCE, input, other, kwargs, LOGPS)


def _joined(function: Any, kind: str, a: Any, b: Any, kwargs: Any, has: str) -> Any:
    """Return a difference or a product of which one part is of the kind `has`."""
    if kwargs or type(a) is not DeferredLogits or type(b) is not DeferredLogits or a.is_computed or b.is_computed:
        return NotImplemented
    if a.shape != b.shape or a._class_dim is None or a._class_dim != b._class_dim or a.device != b.device:
        return NotImplemented
    if all(x._plan is None or x._plan.kind != has for x in (a, b)):
        return NotImplemented
    return _Joined.apply(function, kind, a, b)


def _kl_div(
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    if size_average is not None or reduce is not None or reduction not in ("none", "sum", "mean", "batchmean"):
        return NotImplemented
    device = input.device.type if isinstance(input, Tensor) else "cpu"
    if torch.is_autocast_enabled(device):
        return NotImplemented
    divergence = functools.partial(F.kl_div, reduction="none", log_target=log_target)
    product = _joined(divergence, PRODUCT, input, target, {}, LOGPS)
    if product is NotImplemented:
        return NotImplemented
    if reduction == "none":
        return product
    result = sum_of_product(product, None, False, reduction == "mean")
    if result is NotImplemented:
        return func(input, target, reduction=reduction, log_target=log_target)
    return result / input.shape[0] if reduction == "batchmean" else result


def _reduced_product(name: str) -> Callable[..., Any]:
    """Return the rule of a sum or mean, of products or, by the rule that it replaces, of logits."""
    otherwise = reduction(name)

    def rule(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        one = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        result = sum_of_product(input, one, keepdim, name == "mean", kwargs.get("dtype"))
        return otherwise(func, input, dim, keepdim, **kwargs) if result is NotImplemented else result

    return rule


for _name in ("sum", "mean"):
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = _reduced_product(_name)
RULES[F.kl_div] = _kl_div
for _name in ("mul", "multiply"):
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = _multiplied
for _name in ("sub", "subtract"):
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = _subtracted
RULES[Tensor.__mul__] = _multiplied
RULES[Tensor.__sub__] = _subtracted
