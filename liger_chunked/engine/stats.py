from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.calls import entry_point
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.batch import Layout, at_temperature, lay_out
from liger_chunked.engine.candidates import Candidates, check_candidates
from liger_chunked.engine.checks import check_projection, check_target, check_temperature, compute_dtype
from liger_chunked.engine.compile_ahead import compile_ahead
from liger_chunked.engine.epilogue import StatisticsPass, readable
from liger_chunked.engine.filtered import SamplingFilter
from liger_chunked.engine.gradients import HeadGradients, Needs
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.engine.hooks import hooks_active
from liger_chunked.engine.known import token_count
from liger_chunked.engine.plan import Plan
from liger_chunked.engine.precision import gemms
from liger_chunked.kernels.backend import first_derivative, graph_is_retained, has_wide_tiles
from liger_chunked.types import (
    DIFFERENTIABLE,
    OUTPUTS,
    AdaptedWeight,
    HeadTensors,
    LogitOptions,
    LossHead,
    TokenStats,
    VocabShard,
    Weight,
    accumulation_dtype,
    shown,
)


def _tokens(plan: Plan, input: Tensor, u: Tensor | None) -> Tokens:
    rows = plan.chunks[0].rows
    x = plan.input_rows(input.reshape(-1, input.shape[-1]), rows)
    if u is not None:
        u = plan.input_rows(u.reshape(-1, u.shape[-1]), rows)
    return Tokens(x, plan.layout.target, rows, plan.tiles[0], u, plan.layout.temperature)


StatsPass = HeadPass | StatisticsPass
_NOTHING_NEEDED = Needs(False, False)


def _make_pass(plan: Plan, given: HeadTensors, keeps: bool = False) -> StatsPass:
    head = given.to(plan.dtype)
    if plan.by_epilogue:
        return StatisticsPass(readable(head), plan.options, plan.outputs, plan.largest_tile, keeps)
    return plan.make_head_pass(head, None)


def _statistics(
    plan: Plan, given: HeadTensors, input: Tensor, u: Tensor | None, needs: Needs = _NOTHING_NEEDED
) -> tuple[StatsPass, TokenStats]:
    compile_ahead(_dry_run, plan, input, given, u, needs)
    head_pass = _make_pass(plan, given, True in needs and not hooks_active())
    with gemms(input.device, plan.dtype):
        stats = head_pass.statistics(_tokens(plan, input, u))
    dense = plan.layout.scatter_stats({name: getattr(stats, name) for name in plan.outputs})
    if head_pass.candidates is None:
        return head_pass, dense
    assert isinstance(head_pass, HeadPass) and head_pass.normalisers is not None
    maximum, sum_exp, *_ = head_pass.normalisers
    of_ids = head_pass.candidates.logps(maximum, sum_exp, plan.options, plan.layout.temperature)
    if plan.layout.slots is not None:
        places = of_ids.new_zeros(plan.layout.mask.numel(), of_ids.shape[1])
        of_ids = places.index_copy_(0, plan.layout.slots, of_ids)
    return head_pass, dense._replace(candidate_logps=of_ids)


def _run_backward(
    head_pass: StatsPass,
    plan: Plan,
    given: HeadTensors,
    input: Tensor,
    u: Tensor | None,
    needs: Needs,
    gradients: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    flat, flat_u = input.reshape(-1, input.shape[-1]), None if u is None else u.reshape(-1, u.shape[-1])
    grads = head_pass.grads = HeadGradients(
        plan.layout, flat, given, plan.dtype, needs, plan.n_contributions, flat_u, scattered=plan.scattered
    )
    if plan.layout.n_valid:
        with gemms(input.device, plan.dtype):
            head_pass.backward(_tokens(plan, input, u), gradients)
    head_pass.release()
    return grads.finish()


def _dry_run(plan: Plan, input: Tensor, given: HeadTensors, u: Tensor | None, needs: Needs) -> None:
    """Run forward and backward, as if a loss used log-probabilities alone."""
    head_pass, stats = _statistics(plan, given, input, u, needs)
    if True in needs:
        head_pass.restore(head_pass.keep(), plan.layout.temperature)
        names = ("logps",) if "logps" in plan.outputs else DIFFERENTIABLE
        gradients = {name: g for name in names if (g := getattr(stats, name)) is not None}
        _run_backward(head_pass, plan, given, input, u, needs, gradients)


def _tensors_of(plan: Plan) -> tuple[Tensor | None, ...]:
    """Return tensors for autograd to save, so that it detects changes by the caller."""
    layout = plan.layout
    return layout.target, layout.rows, layout.slots, layout.temperature, plan.class_weight, plan.candidates


def _holding(
    plan: Plan,
    target: Any = None,
    rows: Any = None,
    slots: Any = None,
    temperature: Tensor | None = None,
    class_weight: Tensor | None = None,
    candidates: Tensor | None = None,
) -> Plan:
    of_layout = {"target": target, "rows": rows, "slots": slots, "temperature": temperature}
    layout = replace(plan.layout, **of_layout, mask=None)  # type: ignore[arg-type]
    return replace(plan, layout=layout, class_weight=class_weight, candidates=candidates)


def _returned(plan: Plan) -> tuple[str, ...]:
    return plan.outputs if plan.candidates is None else (*plan.outputs, "candidate_logps")


def _savable(x: Tensor | None) -> Tensor | None:
    """Return a tensor that autograd can save: a copy of inference tensors."""
    return x.clone() if x is not None and x.is_inference() else x


class _LinearTokenStats(torch.autograd.Function):
    """`apply(input, weight, bias, u, up, plan)`: the plan's fields of `TokenStats`.

    `ctx` keeps the plan and the pass with the last tile's logits, but with active hooks not their tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        up: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        needs = Needs(*ctx.needs_input_grad[:5])
        head_pass, dense = _statistics(plan, HeadTensors(weight, bias, up, plan.shard), input, u, needs)
        kept = head_pass.keep()
        ctx.n_kept = len(kept)
        of_plan = _tensors_of(plan)
        savable = [_savable(x) for x in of_plan]
        ctx.save_for_backward(input, weight, bias, u, up, *kept, *savable)
        ctx.returned = _returned(plan)
        hooked = hooks_active()
        ctx.head_pass = None if hooked else head_pass
        copied = any(map(operator.is_not, savable, of_plan))
        ctx.plan = _holding(plan) if hooked or copied else plan
        differentiable = (*DIFFERENTIABLE, "candidate_logps")
        # Copies of views, on which autograd refuses `logps *= mask`, and of what the backward reads.
        saved = {id(x) for x in kept}
        returned = {name: getattr(dense, name) for name in ctx.returned}
        for name, x in returned.items():
            if x._is_view() or id(x) in saved:
                returned[name] = x.clone()
        ctx.mark_non_differentiable(*[x for name, x in returned.items() if name not in differentiable])
        return tuple(returned.values())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 6
        input, weight, bias, u, up, *rest = ctx.saved_tensors
        plan = _holding(ctx.plan, *rest[ctx.n_kept :]) if ctx.plan.layout.mask is None else ctx.plan
        layout, given = plan.layout, HeadTensors(weight, bias, up, plan.shard)
        head_pass, ctx.head_pass = ctx.head_pass or _make_pass(plan, given), None
        if not graph_is_retained():
            ctx.plan = None  # else its tensors live as long as the results
        if isinstance(head_pass, HeadPass) and plan.candidates is not None:
            head_pass.candidates = Candidates(plan.candidates)
        head_pass.restore(rest[: ctx.n_kept], layout.temperature)

        def compact(name: str, g: Tensor) -> Tensor:
            g = g if name == "candidate_logps" else g.reshape(-1)
            g = g if layout.slots is None else g[layout.slots]
            return g.to(accumulation_dtype(plan.dtype)).contiguous()

        gradients = {name: compact(name, g) for name, g in zip(ctx.returned, upstream, strict=True) if g is not None}
        grads = _run_backward(head_pass, plan, given, input, u, Needs(*ctx.needs_input_grad[:5]), gradients)
        found = zip(grads, (input, weight, bias, u, up), strict=True)
        return *(None if g is None else g.view(x.shape).to(x.dtype) for g, x in found), None


def token_stats(
    head: LossHead,
    input: Tensor,
    layout: Layout,
    outputs: tuple[str, ...],
    options: LogitOptions,
    class_weight: Tensor | None = None,
    filter: SamplingFilter | None = None,
    candidates: Tensor | None = None,
    batch_invariant: bool = False,
) -> TokenStats:
    """Return `linear_token_stats` of checked inputs, dense; `class_weight` weighs `mean_logits`."""
    plan = Plan.of_statistics(
        head,
        layout.local(),
        compute_dtype(head, input),
        outputs=outputs,
        options=options,
        class_weight=class_weight,
        filter=filter,
        candidates=candidates,
        needs_grad=needs_grad(head, input),
        wide_tiles=has_wide_tiles(input.device),
        batch_invariant=batch_invariant,
    )
    return run_statistics(plan, head, input)


def needs_grad(head: LossHead, input: Tensor) -> bool:
    weight = head.weight
    of_weight = (weight.weight, weight.up) if isinstance(weight, AdaptedWeight) else (weight,)
    given = (input, head.bias, *of_weight)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def run_statistics(plan: Plan, head: LossHead, input: Tensor) -> TokenStats:
    weight, up, u = apply_down(head.weight, input, plan.dtype)
    given = (input, weight, head.bias, u, up)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)):
        return _statistics(plan, HeadTensors(weight, head.bias, up, head.shard), input, u)[1]
    values = _LinearTokenStats.apply(*given, plan)
    return TokenStats(**dict(zip(_returned(plan), values, strict=True)))


@entry_point
def linear_token_stats(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: tuple[str, ...] = ("logps",),
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    candidates: Tensor | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    ignore_index: int = -100,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
    n_valid: int | None = None,
    deterministic: Literal["batch"] | None = None,
    vocab_shard: VocabShard | None = None,
) -> TokenStats:
    """Return differentiable statistics of tokens' logits, without all logits in memory.

        z = transform(input @ weight.T + bias)
        logps = z.log_softmax(-1).gather(-1, target[..., None])[..., 0]

    Takes three matrix products, or at most four if logits exceed `logits_budget`: the backward recomputes them. Other
    options: see `LogitOptions`.

    Args:
        weight: (V, H), `lm_head.weight`, or an `AdaptedWeight`.
        input: (B, T, H) or (N, H) hidden states.
        target: (B, T) or (N,) token ids that `input` predicts (shift labels, see `shifted`).
        bias: (V,) or None.
        outputs: the `TokenStats` fields to compute.
        temperature: a number, or a float32 tensor like `target`, not read at ignored tokens.
        candidates: (..., K) distinct ids for each target, for `candidate_logps`.
        top_k, top_p: after the temperature, as a sampler does, keep the `top_k` largest logits, of these the fewest
            whose probabilities sum to `top_p`, and ties with the smallest kept. The others are -inf, as is a dropped
            target's `logps`. Sorts the logits without `top_k`.
        deterministic: "batch" gives a token's values, not gradients, the same bits in any batch, place and budget.
            On a GPU it needs the fused epilogue: Hopper, bfloat16, and none of bias, softcap, candidates or
            temperatures of tokens. Results are repeatable without it too.
        n_valid, vocab_shard: as in `LigerFusedLinearCrossEntropyLoss.forward`.

    Returns:
        TokenStats like `target`. Ignored tokens have 0, argmax -1, and no gradient.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices, a target or an option are invalid.

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> stats = linear_token_stats(weight, input, target, outputs=("logps", "entropy"))
    >>> stats.logps.shape, stats.logps[1, 2].item()
    (torch.Size([2, 3]), 0.0)
    """
    per_token = temperature if isinstance(temperature, Tensor) else None
    options = LogitOptions(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        logits_budget=logits_budget,
        logits_dtype=logits_dtype,
    )
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown or not outputs or len(set(outputs)) < len(outputs):
        given = ", ".join(map(shown, outputs))
        raise ValueError(f"outputs must name distinct fields of TokenStats {OUTPUTS}, got ({given})")
    if deterministic not in (None, "batch"):
        raise ValueError(f'deterministic must be "batch" or None, got {shown(deterministic)}')
    if deterministic is not None:
        for name, x in (("vocab_shard", vocab_shard), ("top_k", top_k), ("top_p", top_p)):
            if x is not None:
                raise ValueError(f'deterministic="batch" does not take {name}, got {shown(x)}')
    head = LossHead(weight, bias, vocab_shard)
    check_projection(head, input)
    check_target(target, input, head=head)
    if per_token is not None:
        check_temperature(per_token, target)
    if n_valid is not None:
        n_valid = token_count(n_valid, target.numel(), shard=vocab_shard)
    layout = lay_out(target.long(), "token", ignore_index, head.vocab_size, n_valid=n_valid)
    if per_token is not None:
        layout = at_temperature(layout, per_token, n_valid)
    filter = SamplingFilter.of(top_k, top_p, options, outputs, vocab_shard is not None)
    ids = None if candidates is None else check_candidates(candidates, target, head.vocab_size, n_valid)
    batch_invariant = deterministic is not None
    stats = token_stats(
        head, input, layout, outputs, options, filter=filter, candidates=ids, batch_invariant=batch_invariant
    )
    if target.ndim > 1:
        shaped = [None if x is None else x.view(target.shape) for x in stats[: len(OUTPUTS)]]
        stats = TokenStats(*shaped)._replace(candidate_logps=stats.candidate_logps)
    if candidates is not None and stats.candidate_logps is not None:
        stats = stats._replace(candidate_logps=stats.candidate_logps.view(candidates.shape))
    return stats
