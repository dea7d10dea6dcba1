"""Sums over the vocabulary of products of two tensors of logits: entropy, cross entropy and KL divergence by hand.

    (p * logp).sum(-1)                          -entropy
    (p * z).sum(-1)                             logsumexp(z) - entropy
    (p * logq).sum(-1)                          -(KL(p || q) + entropy)
    (p * (logp - logq)).sum(-1)                 KL(p || q)
    F.kl_div(logq, p, reduction=...)            the same

`_Joined` is the product, lazy as its factors are. A sum computes it by a pass. Its gradient, a `Split`, has a term for
each factor: what the sum's derivative through that factor is. The factors' gradients are then as independent as those
of real tensors.
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
from liger_chunked.deferred.gradient import Key, LazyGradient, Term
from liger_chunked.deferred.lazy import Lazy, Op, aten, contiguous, number_of
from liger_chunked.deferred.logits import RULES, SCALES, Cell, DeferredLogits, Node, seen
from liger_chunked.deferred.plan import LOGITS, LOGPS, PROBS, Plan, add_views, continues, plan_of_node
from liger_chunked.deferred.rules import reduction, result_dtype, statistics
from liger_chunked.losses import LigerFusedLinearKLDivLoss
from liger_chunked.private import with_autograd
from liger_chunked.types import LogitOptions

MULTIPLY, SUBTRACT = torch.mul, torch.sub


class Split:
    """The gradient of a product: terms for each factor, none where the factor's own formula makes it zero."""

    def __init__(
        self, sides: tuple[list[Any], list[Any]], keys: list[Key], passed: tuple[Key, ...] = (), factor: Any = 1
    ) -> None:
        self.sides, self.keys, self.passed, self.factor = sides, keys, passed, factor

    def after(self, key: Key) -> Split | None:
        if self.passed.count(key) < self.keys.count(key):
            return Split(self.sides, self.keys, (*self.passed, key), self.factor)
        return None

    def times(self, factor: Any) -> Split:
        return Split(self.sides, self.keys, self.passed, self.factor * factor)

    def side(self, i: int) -> list[Any] | None:
        """Return the terms of a factor; None if the gradient has not passed what the sum's pass contains."""
        if len(self.passed) != len(self.keys):
            return None
        return [term.times(self.factor) for term in self.sides[i]]


class _Joined(torch.autograd.Function):
    """`function(a, b)` of two stand-ins, without values."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Any:
        ctx.function = function
        ctx.factors = [(x._cell.node, x._views, x._geometry[0], x.dtype, x.device) for x in (a, b)]
        dtype = torch.promote_types(a.dtype, b.dtype)
        size = a._geometry[0]
        node = Node(None, a._cell.node, a._views, Op(function), b, size[a._class_dim])
        return DeferredLogits._make(Cell(node), (), (size, contiguous(size), 0), dtype, a._class_dim, a.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        need = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or not isinstance(g, LazyGradient):
            return None, *_of_values(ctx.function, ctx.factors, g, need)
        grads: list[Any] = []
        for i, (_, _, size, dtype, device) in enumerate(ctx.factors):
            terms: list[Any] = [t.side(i) if isinstance(t, Split) else None for t in g.terms]
            if not need[i]:
                grads.append(None)
            elif any(found is None for found in terms):
                grads.append(_of_values(ctx.function, ctx.factors, g.value(), [j == i for j in range(2)])[i])
            else:
                dense = functools.partial(_of_terms, ctx.function, ctx.factors, g.dense, i)
                extra = (
                    None
                    if g.extra is None
                    else _of_values(ctx.function, ctx.factors, g.extra, [j == i for j in range(2)])[i]
                )
                flat = [term for found in terms for term in found or []]
                grads.append(LazyGradient.make(size, dtype, device, flat, dense, extra))
        return None, *grads


def _of_terms(function: Any, factors: Any, dense: Callable[[], Tensor], i: int) -> Tensor:
    found = _of_values(function, factors, dense(), [j == i for j in range(2)])[i]
    assert found is not None
    return found


def _of_values(function: Any, factors: Any, g: Any, need: Any) -> list[Tensor | None]:
    """Return the gradients of the factors, made of real values."""

    def run() -> list[Tensor | None]:
        reals = [
            seen(node.value(), views).detach().requires_grad_(n)
            for (node, views, *_), n in zip(factors, need, strict=True)
        ]
        out = function(*reals)
        wanted = [x for x, n in zip(reals, need, strict=True) if n]
        upstream = (g.value() if isinstance(g, Lazy) else g).to(out.dtype)
        found = iter(torch.autograd.grad(out, wanted, upstream)) if wanted else iter(())
        return [next(found) if n else None for n in need]

    return with_autograd(run)


# What a product is of


class Factor(NamedTuple):
    """A factor: logits, log-probabilities or probabilities, or the difference of two log-probabilities."""

    plan: Plan
    minus: Plan | None = None


def _factor(node: Node, views: Any, n_ids: int) -> Factor | None:
    if node.op is not None and node.op.func is SUBTRACT:
        assert node.base is not None and node.other is not None
        first, second = _factor(node.base, node.views, node.n_ids), _factor(*node.other, node.n_ids)
        if first is None or second is None or first.minus is not None or second.minus is not None:
            return None
        plans = first.plan, second.plan
        fits = all(plan.kind == LOGPS and plan.sign == 1 and add_views(plan, views, n_ids) for plan in plans)
        return Factor(*plans) if fits else None
    plan = plan_of_node(node)
    return None if plan is None or not add_views(plan, views, n_ids) else Factor(plan)


class Sum(NamedTuple):
    """The sum over the vocabulary of a product, times `sign`.

    - `kind`: "entropy" of `p`, "logits" (p z), or of `p` and `q` "kl" or "cross"
    - `through_p`, `through_q`: the path to each in the tree of factors: which factor, and which of its difference
    """

    kind: str
    p: Plan
    q: Plan | None
    sign: float
    q_side: tuple[int, ...]
    p_side: tuple[int, ...]
    z_side: tuple[int, ...] | None = None
    z: Plan | None = None


def _alike(a: Plan, b: Plan) -> bool:
    same = a.signature == b.signature and len(a.rows) == len(b.rows) and continues(a.rows, b.rows)
    return same


def _sum_of(node: Node) -> Sum | None:
    """Return what the sum of a product is; None if no pass computes it."""
    assert node.op is not None and node.base is not None and node.other is not None
    first, second = _factor(node.base, node.views, node.n_ids), _factor(*node.other, node.n_ids)
    if first is None or second is None:
        return None
    if isinstance(node.op.func, functools.partial):  # F.kl_div(logq, p)
        q, p = first.plan, second.plan
        kinds = (LOGPS if node.op.func.keywords.get("log_target") else PROBS, LOGPS)
        fits = first.minus is None and second.minus is None and (p.kind, q.kind) == kinds and p.sign == q.sign == 1
        return Sum("kl", p, q, 1.0, (0,), (1,)) if fits else None
    if node.op.func is not MULTIPLY:
        return None
    at = 0 if first.plan.kind == PROBS and first.minus is None else 1
    p, other = (first.plan, second) if at == 0 else (second.plan, first)
    if p.kind != PROBS or (second if at else first).minus is not None:
        return None
    if other.minus is not None:
        a, b = other.plan, other.minus
        if _alike(p, a):
            return Sum("kl", p, b, p.sign, (1 - at, 1), (at,))
        return Sum("kl", p, a, -p.sign, (1 - at, 0), (at,)) if _alike(p, b) else None
    q, sign = other.plan, p.sign * other.plan.sign
    if _alike(p, q):
        if q.kind == LOGPS:
            return Sum("entropy", p, None, -sign, (), (at,))
        return Sum("logits", p, None, sign, (), (at,), (1 - at,), q) if q.kind == LOGITS else None
    return Sum("cross", p, q, -sign, (1 - at,), (at,)) if q.kind == LOGPS else None


def _found(z: Any) -> tuple[Sum, list[Op], float, list[Key], DeferredLogits] | None:
    """Return the sum of a product, with views, and numbers that scale it, behind it."""
    if type(z) is not DeferredLogits or z.is_computed or z._class_dim is None or z.ndim < 2:
        return None
    rows: list[Op] = list(z._views)
    sign, node = 1.0, z._cell.node
    keys: list[Key] = []
    while node.other is None:
        if node.op is None or node.base is None:
            return None
        func = node.op.func
        if func in SCALES:
            number = number_of(node.op.args[0])
            assert number is not None
            sign *= number if SCALES[func] == "mul" else 1 / number
            keys.append((SCALES[func], number))
        elif func is aten.neg.default:
            sign, keys = -sign, [*keys, ("mul", -1.0)]
        elif func is not aten.clone.default and not (func is aten._to_copy.default and z.dtype.itemsize >= 4):
            return None
        rows = [*node.views, *rows]
        node = node.base
    found = _sum_of(node) if node.op is not None and node.op.func is not aten.add.Tensor else None
    if found is None:
        return None
    for plan in (found.p, found.q):
        if plan is not None:
            if not add_views(plan, tuple(rows), z.shape[z._class_dim]):
                return None
            plan.shape, plan.class_dim = z.shape, z._class_dim
    if found.q is not None and (found.q.row_shape != found.p.row_shape or found.q.n_ids != found.p.n_ids):
        return None
    return found, rows, sign, keys, z


class Through(NamedTuple):
    """What of a sum's gradient goes through one factor: that of `result`, by one side of a pass.

    `path`: to the factor, 0 or 1 in the product, and then in a difference.
    """

    path: tuple[int, ...]
    run: Pass
    side: int
    plan: Plan
    result: Tensor


def _terms(found: list[Through], g: Tensor, keys: list[Key]) -> list[Any]:
    """Return the gradient of a product, whose factors may be differences."""
    here = [Term(x.run, x.side, x.plan, x.result, g) for x in found if not x.path]
    if len(here) == len(found):
        return here
    sides = [_terms([x._replace(path=x.path[1:]) for x in found if x.path[:1] == (i,)], g, []) for i in range(2)]
    return [*here, Split((sides[0], sides[1]), keys)]


def sum_of_product(z: Any, dim: Any, keepdim: bool, mean: bool, dtype: Any = None) -> Any:
    """Compute the sum or mean over the vocabulary, or over everything, of a product; NotImplemented if no pass does."""
    found = _found(z)
    if found is None or dtype is not None:
        return NotImplemented
    total, _, sign, keys, _ = found
    whole = dim is None and not keepdim
    if not whole and (not isinstance(dim, int) or dim % z.ndim != z._class_dim):
        return NotImplemented
    if total.p.row_shape.numel() == 0:
        return NotImplemented
    n_rows, n_ids = total.p.row_shape.numel(), z.shape[z._class_dim]
    scale = total.sign * sign / ((n_ids if mean else 1) * (n_rows if mean and whole else 1))
    reduce = torch.mean if mean else torch.sum
    stock = functools.partial(_reduced, reduce, None if whole else z._class_dim)
    runs: list[Through] = []
    with torch.set_grad_enabled(wants_grad(z)):
        value = _value(z, total, scale, whole, runs)
    result = link(value, z, lambda g: _terms(runs, g, keys), stock)
    result = result.to(z.device, result_dtype(reduce, z))
    return result.unsqueeze(z._class_dim) if keepdim else result


def _reduced(reduce: Any, dim: int | None, x: Tensor) -> Tensor:
    return reduce(x) if dim is None else reduce(x, dim)


def _value(z: DeferredLogits, total: Sum, scale: float, whole: bool, runs: list[Through]) -> Tensor:
    p, q = total.p, total.q

    def placed(x: Tensor) -> Tensor:
        return x.sum() * scale if whole else p.place(x) * scale

    if q is None:
        names = ("entropy",) if total.kind == "entropy" else ("entropy", "lse")
        run, stats = statistics(z, p, None, *names)
        assert stats.entropy is not None
        entropy = placed(stats.entropy) if total.kind == "entropy" else -placed(stats.entropy)
        if run is not None:
            runs.append(Through(total.p_side, run, 0, p, entropy))
        if total.kind == "entropy":
            return entropy
        assert stats.lse is not None and total.z_side is not None and total.z is not None
        lse = placed(stats.lse)
        if run is not None:
            runs.append(Through(total.z_side, run, 0, total.z, lse))
        return lse + entropy
    run, kl = _kl(z, p, q, whole)
    value = kl * scale if whole else p.place(kl) * scale
    if total.kind == "cross":
        grads = _needs(p) and torch.is_grad_enabled()
        with torch.set_grad_enabled(grads):
            of_p, stats = statistics(z, p, None, "entropy") if grads else (None, _entropy_alone(z, p))
            assert stats.entropy is not None
            entropy = placed(stats.entropy)
        if of_p is not None and grads:
            runs.append(Through(total.p_side, of_p, 0, p, entropy))
        value = value + entropy.detach()
    runs.append(Through(total.q_side, run, 0, q, value))
    if _needs(p):
        runs.append(Through(total.p_side, run, 1, p, value))
    return value


def _needs(plan: Plan) -> bool:
    return any(any(source.needs) for source, _ in plan.sources)


def _entropy_alone(z: DeferredLogits, p: Plan) -> Any:
    with torch.no_grad():
        return statistics(z, p, None, "entropy")[1]


def _kl(z: DeferredLogits, p: Plan, q: Plan, whole: bool) -> tuple[Pass, Tensor]:
    """Return KL(p || q), of all rows or (`whole`) their sum, and its pass: sides q and p."""
    through_p = _needs(p)
    n_rows = p.row_shape.numel() if whole else 1
    reduction = "mean" if whole else "none"

    def loss(reverse: bool, student: Plan, teacher: Plan) -> Any:
        of_teacher = LogitOptions(softcap=teacher.options.softcap, logit_scale=teacher.options.logit_scale)
        settings = {**vars(student.options), "ignore_index": -(2**31), "logits_dtype": None}
        settings = {
            "weight_hard_loss": 0.0,
            "weight_soft_loss": 1.0,
            "reduction": reduction,
            "reverse": reverse,
            "teacher_options": of_teacher,
            **settings,
        }
        return once(LigerFusedLinearKLDivLoss, **settings)

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
            value = value + (same - same.detach())
        return value * n_rows if whole else value

    run = Pass([q, p], compute, wants_grad(z), keeps_gradient=whole)
    return run, run.results


# Rules


def _multiplied(func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    return _joined(MULTIPLY, input, other, kwargs, {PROBS})


def _subtracted(func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    return _joined(SUBTRACT, input, other, kwargs, {LOGPS})


def _joined(function: Any, a: Any, b: Any, kwargs: Any, kinds: set[str]) -> Any:
    both = type(a) is DeferredLogits and type(b) is DeferredLogits and not kwargs
    if not both or a.shape != b.shape or a._class_dim != b._class_dim or a._class_dim is None or a.device != b.device:
        return NotImplemented
    if a.is_computed or b.is_computed:
        return NotImplemented
    if not any((plan := plan_of_node(x._cell.node)) is not None and plan.kind in kinds for x in (a, b)):
        return NotImplemented
    return _Joined.apply(function, a, b)


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
    product = _joined(functools.partial(F.kl_div, reduction="none", log_target=log_target), input, target, {}, {LOGPS})
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
