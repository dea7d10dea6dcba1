from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.calls import entry_point
from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.batch import Layout, lay_out
from liger_chunked.engine.candidates import Candidates, check_candidates
from liger_chunked.engine.checks import check_projection, check_target, check_temperature, compute_dtype
from liger_chunked.engine.choose import Plan, flattened
from liger_chunked.engine.compile_ahead import compile_ahead
from liger_chunked.engine.epilogue import StatisticsPass
from liger_chunked.engine.estimated import estimated
from liger_chunked.engine.filtered import SamplingFilter
from liger_chunked.engine.gradients import NOTHING_NEEDED, HeadGradients, Needs
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.hooks import hooks_active
from liger_chunked.engine.known import token_count
from liger_chunked.engine.precision import gemms
from liger_chunked.kernels.backend import first_derivative, graph_is_retained, has_wide_tiles
from liger_chunked.private import is_view
from liger_chunked.types import (
    DIFFERENTIABLE,
    OUTPUTS,
    HeadTensors,
    LogitOptions,
    LossHead,
    TokenStats,
    VocabShard,
    Weight,
    accumulation_dtype,
    shown,
)

StatsPass = HeadPass | StatisticsPass


def _statistics(
    plan: Plan, given: HeadTensors, input: Tensor, u: Tensor | None, needs: Needs = NOTHING_NEEDED
) -> tuple[StatsPass, TokenStats]:
    compile_ahead(_dry_run, plan, input, given, u, needs)
    head_pass = choose.pass_of_statistics(plan, given.to(plan.dtype), True in needs and not hooks_active())
    with gemms(input.device, plan.dtype):
        stats = head_pass.statistics(plan.tokens(0, *flattened(input, u)))
    return head_pass, plan.layout.scatter_stats({name: getattr(stats, name) for name in _returned(plan)})


def _run_backward(
    head_pass: StatsPass,
    plan: Plan,
    given: HeadTensors,
    input: Tensor,
    u: Tensor | None,
    needs: Needs,
    gradients: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    flat, flat_u = flattened(input, u)
    grads = head_pass.grads = HeadGradients(plan, flat, given, needs, flat_u)
    if plan.layout.n_valid:
        with gemms(input.device, plan.dtype):
            head_pass.backward(plan.tokens(0, flat, flat_u), gradients)
    head_pass.release()
    return grads.finish()


def _dry_run(plan: Plan, input: Tensor, given: HeadTensors, u: Tensor | None, needs: Needs) -> None:
    """Run forward and backward, as if a loss used log-probabilities alone."""
    head_pass, stats = _statistics(plan, given, input, u, needs)
    if True in needs:
        head_pass.restore(head_pass.keep())
        names = ("logps",) if "logps" in plan.outputs else DIFFERENTIABLE
        gradients = {name: g for name in names if (g := getattr(stats, name)) is not None}
        _run_backward(head_pass, plan, given, input, u, needs, gradients)


def _holding(plan: Plan, tensors: Sequence[Any] = (None,) * 6) -> Plan:
    target, rows, slots, temperature, class_weight, candidates = tensors
    no_mask: Any = None
    layout = replace(plan.layout, target=target, rows=rows, slots=slots, temperature=temperature, mask=no_mask)
    return replace(plan, layout=layout, class_weight=class_weight, candidates=candidates)


def _returned(plan: Plan) -> tuple[str, ...]:
    return plan.outputs if plan.candidates is None else (*plan.outputs, "candidate_logps")


class _LinearTokenStats(torch.autograd.Function):
    """`apply(input, weight, bias, u, up, plan)`: the plan's fields of `TokenStats`.

    With hooks, `ctx` keeps neither the plan's tensors nor the pass.
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
        layout = plan.layout
        # Saved to detect changes by the caller, in the order of `_holding`.
        of_plan = layout.target, layout.rows, layout.slots, layout.temperature, plan.class_weight, plan.candidates
        copied = any(x is not None and x.is_inference() for x in of_plan)
        # Autograd cannot save inference tensors.
        savable = [x.clone() if x is not None and x.is_inference() else x for x in of_plan]
        ctx.save_for_backward(input, weight, bias, u, up, *kept, *savable)
        hooked = hooks_active()
        ctx.head_pass = None if hooked else head_pass
        ctx.plan = _holding(plan) if hooked or copied else plan
        differentiable = (*DIFFERENTIABLE, "candidate_logps")
        # Copies of views, on which autograd refuses `logps *= mask`, and of what the backward reads.
        saved = {id(x) for x in kept}
        returned = {name: getattr(dense, name) for name in _returned(plan)}
        for name, x in returned.items():
            if is_view(x) or id(x) in saved:
                returned[name] = x.clone()
        ctx.mark_non_differentiable(*[x for name, x in returned.items() if name not in differentiable])
        return tuple(returned.values())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            ctx.head_pass = None
            return (None,) * 6
        input, weight, bias, u, up, *rest = ctx.saved_tensors
        plan = _holding(ctx.plan, rest[ctx.n_kept :]) if ctx.plan.layout.mask is None else ctx.plan
        layout, given = plan.layout, HeadTensors(weight, bias, up, plan.shard)
        head_pass, ctx.head_pass = ctx.head_pass or choose.pass_of_statistics(plan, given.to(plan.dtype)), None
        if not graph_is_retained():
            ctx.plan = None  # else its tensors live as long as the results
        if isinstance(head_pass, HeadPass) and plan.candidates is not None:
            head_pass.candidates = Candidates(plan.candidates)
        head_pass.restore(rest[: ctx.n_kept])

        def compact(name: str, g: Tensor) -> Tensor:
            g = g if name == "candidate_logps" else g.reshape(-1)
            g = g if layout.slots is None else g[layout.slots]
            return g.to(accumulation_dtype(plan.dtype)).contiguous()

        gradients = {name: compact(name, g) for name, g in zip(_returned(plan), upstream, strict=True) if g is not None}
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
    dtype = compute_dtype(head, input)
    tensors, u = apply_down(head, input, dtype)
    given = (input, tensors.weight, tensors.bias, u, tensors.up)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    estimate = estimated.get()
    plan = choose.for_statistics(
        head,
        layout.local(),
        dtype,
        outputs=outputs,
        options=options,
        class_weight=class_weight,
        filter=filter,
        candidates=candidates,
        needs_grad=needs_grad,
        wide_tiles=has_wide_tiles(input.device) if estimate is None else estimate.wide_tiles,
        batch_invariant=batch_invariant,
    )
    if not needs_grad:
        return _statistics(plan, tensors, input, u)[1]
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
        layout = layout.at_temperature(per_token, n_valid)
    filter = SamplingFilter.of(top_k, top_p, options, outputs, vocab_shard is not None)
    ids = None if candidates is None else check_candidates(candidates, target, head.vocab_size, n_valid)
    stats = token_stats(
        head, input, layout, outputs, options, filter=filter, candidates=ids, batch_invariant=deterministic is not None
    )
    if target.ndim > 1:
        stats = TokenStats(*(None if x is None else x.view(*target.shape, *x.shape[1:]) for x in stats))
    return stats
