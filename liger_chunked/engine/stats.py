from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.calls import entry_point
from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.candidates import check_candidates
from liger_chunked.engine.checks import (
    check_projection,
    check_target,
    check_temperature,
    check_temperature_values,
    compute_dtype,
)
from liger_chunked.engine.epilogue import StatisticsPass
from liger_chunked.engine.gradients import NOTHING_NEEDED, HeadGradients, Needs
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.hooks import hooks_active, outside_selective_checkpoints
from liger_chunked.engine.kept import (
    check_kept,
    kept_token_stats,
    place,
)
from liger_chunked.engine.plan import Plan, flattened
from liger_chunked.engine.precision import gemms
from liger_chunked.engine.rows import Rows, hide_ignored, select_rows
from liger_chunked.engine.saved import savable, save, saved
from liger_chunked.kept_ids import KeptIds
from liger_chunked.kernels.backend import first_derivative, graph_is_retained
from liger_chunked.kernels.kept import Entries
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
    plan: Plan, head: HeadTensors, input: Tensor, u: Tensor | None, needs: Needs = NOTHING_NEEDED
) -> tuple[StatsPass, TokenStats]:
    head_pass = choose.pass_of_statistics(plan, head.for_products(plan.dtype), True in needs and not hooks_active())
    with gemms(input.device, plan.dtype):
        stats = head_pass.statistics(plan.tokens(0, *flattened(input, u)))
    return head_pass, plan.rows.stats_to_dense({name: getattr(stats, name) for name in _returned(plan)})


def _run_backward(
    head_pass: StatsPass,
    plan: Plan,
    head: HeadTensors,
    input: Tensor,
    u: Tensor | None,
    needs: Needs,
    gradients: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    flat, flat_u = flattened(input, u)
    grads = head_pass.grads = HeadGradients(plan, flat, head, needs, flat_u)
    if plan.rows.n_valid:
        with gemms(input.device, plan.dtype):
            head_pass.backward(plan.tokens(0, flat, flat_u), gradients)
    head_pass.release()
    return grads.finish()


def _returned(plan: Plan) -> tuple[str, ...]:
    return plan.outputs if "candidates" not in plan.rows.side else (*plan.outputs, "candidate_logps")


class _LinearTokenStats(torch.autograd.Function):
    """`apply(input, weight, bias, u, up, plan)`: the plan's fields of `TokenStats`.

    All tensors that the backward reads are saved by autograd, which notices if the caller changes them, shows them to
    hooks, and frees them with the graph. `ctx` keeps the plan without its tensors. Without hooks it keeps the pass too,
    for the last tile's logits.
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
        with outside_selective_checkpoints():
            head_pass, dense = _statistics(plan, HeadTensors(weight, bias, up, plan.shard), input, u, needs)
        of_pass = head_pass.pop_tensors()
        inputs = {"input": input, "weight": weight, "bias": bias, "u": u, "up": up}
        save(ctx, inputs=inputs, head_pass=of_pass, plan=savable(plan.tensors()))
        # The pass holds the last tile of logits, which hooks on saved tensors, as of a checkpoint, do not see. Under
        # hooks the backward projects it again.
        ctx.head_pass = None if hooks_active() else head_pass
        ctx.plan = plan.without_tensors()
        # Copies of views, on which autograd refuses `logps *= mask`, and of what the backward reads.
        read_later = {id(x) for x in of_pass.values()}
        returned = {name: getattr(dense, name) for name in _returned(plan)}
        for name, x in returned.items():
            if is_view(x) or id(x) in read_later:
                returned[name] = x.clone()
        # A gradient of candidates reaches the backward, which refuses it: otherwise it would be lost without a word.
        differentiable = (*DIFFERENTIABLE, "candidate_logps")
        ctx.mark_non_differentiable(*[x for name, x in returned.items() if name not in differentiable])
        return tuple(returned.values())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            ctx.head_pass = None
            return (None,) * 6
        tensors = saved(ctx)
        inputs, plan = tensors["inputs"], ctx.plan.with_tensors(tensors["plan"])
        input, weight, bias, u, up = inputs.values()
        assert input is not None and weight is not None
        rows, head = plan.rows, HeadTensors(weight, bias, up, plan.shard)
        head_pass, ctx.head_pass = ctx.head_pass, None  # the last tile serves one backward
        if head_pass is None:
            head_pass = choose.pass_of_statistics(plan, head.for_products(plan.dtype))
        head_pass.restore(tensors["head_pass"])
        if not graph_is_retained():
            ctx.plan = None  # else the results hold what is left of it, such as the order of scattered rows

        def compact(g: Tensor) -> Tensor:
            g = g.reshape(-1)
            g = g if rows.dense_index is None else g[rows.dense_index]
            return g.to(accumulation_dtype(plan.dtype)).contiguous()

        named = {name: g for name, g in zip(_returned(plan), upstream, strict=True) if g is not None}
        if "candidate_logps" in named:
            raise RuntimeError(
                "candidate_logps have no gradient: .detach() them, or, for a student's loss over a teacher's top k, "
                "pass teacher_ids and teacher_logps to a distillation loss"
            )
        gradients = {name: compact(g) for name, g in named.items()}
        grads = _run_backward(head_pass, plan, head, input, u, Needs(*ctx.needs_input_grad[:5]), gradients)
        pairs = zip(grads, inputs.values(), strict=True)
        return *(None if g is None or x is None else g.view(x.shape).to(x.dtype) for g, x in pairs), None


def token_stats(
    head: LossHead,
    input: Tensor,
    rows: Rows,
    outputs: tuple[str, ...],
    options: LogitOptions,
    class_weight: Tensor | None = None,
    batch_invariant: bool = False,
    kept: Entries | None = None,
) -> TokenStats:
    """Return `linear_token_stats` of checked inputs, dense; `class_weight` weighs `mean_logits`.

    Args:
        kept: the ids that statistics are of, by products of whole rows, see `choose.for_kept`. None: all ids.
    """
    dtype = compute_dtype(head, input)
    tensors, u = apply_down(head, input, dtype)
    given = (input, tensors.weight, tensors.bias, u, tensors.up)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if kept is not None:
        plan = choose.for_kept(head, rows, dtype, kept, outputs, options)
    else:
        plan = choose.for_statistics(
            head,
            rows,
            dtype,
            outputs=outputs,
            options=options,
            class_weight=class_weight,
            needs_grad=needs_grad,
            batch_invariant=batch_invariant,
        )
    if not needs_grad:
        stats = _statistics(plan, tensors, input, u)[1]
    else:
        values = _LinearTokenStats.apply(*given, plan)
        stats = TokenStats(**dict(zip(_returned(plan), values, strict=True)))
    return hide_ignored(stats, None if rows.counted is None else rows.mask)


def stats_of_kept(
    head: LossHead,
    input: Tensor,
    target: Tensor,
    kept: KeptIds,
    outputs: tuple[str, ...],
    options: LogitOptions,
    temperature: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    by_products: bool | None = None,
) -> TokenStats:
    """Return `linear_token_stats(kept=)` of checked inputs, (N,) each, differentiable.

    Tokens with kept ids and tokens with the whole vocabulary are computed apart, so that a batch costs their sum. Long
    lists take products of whole rows (`choose.kept_ids_take_products`), and short ones read a few rows for each token.

    Args:
        target: (N,) or (B, T) int64.
        temperature: float32 like `target`, instead of that of `options`, which is then 1.
        by_products: whether kept ids take products of whole rows. None: chosen by their number.
    """
    flat, dtype = target.reshape(-1), compute_dtype(head, input)
    placed = place(kept, flat, options.ignore_index, head.vocab_size)
    flat_temperature = None if temperature is None else temperature.reshape(-1).contiguous()

    def of_part(ignored: Tensor, **given: Any) -> TokenStats:
        """Return statistics of the tokens that are left, by products."""
        part = flat.masked_fill(ignored, options.ignore_index).view(target.shape)
        rows = select_rows(part, "token", options.ignore_index, head.vocab_size)
        if flat_temperature is not None:
            rows = rows.with_side("temperature", flat_temperature)
        if "kept" in given:
            rows = rows.with_side("position", torch.arange(flat.shape[0], device=flat.device))
        return token_stats(head, input, rows, outputs, options, **given)

    n_ids = placed.entries.ids.shape[0]
    if by_products is None:
        by_products = not batch_invariant and choose.kept_ids_take_products(n_ids, placed.n_kept, head, dtype)
    if by_products:
        found = of_part(~placed.has_entries, kept=placed.entries)
    else:
        found = kept_token_stats(head, input, placed, outputs, options, flat_temperature, dtype)
    if not placed.n_whole:
        return found
    others = of_part(placed.has_entries, batch_invariant=batch_invariant)
    pairs, is_kept = zip(found, others, strict=True), placed.has_entries
    return TokenStats(*(None if a is None or b is None else a.where(is_kept, b.reshape(-1)) for a, b in pairs))


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
    kept: KeptIds | None = None,
    ignore_index: int = -100,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
    deterministic: Literal["batch"] | None = None,
    vocab_shard: VocabShard | None = None,
) -> TokenStats:
    """Return differentiable statistics of tokens' logits, without all logits in memory.

        z = transform(input @ weight.T + bias)
        logps = z.log_softmax(-1).gather(-1, target[..., None])[..., 0]

    The transform is `softcap * tanh(logit_scale * z / softcap) / temperature`, or without a softcap
    `logit_scale * z / temperature`. Takes three matrix products, or at most four if logits exceed `logits_budget`: the
    backward recomputes them. Tokens without a gradient take no part in a large backward.

    Args:
        weight: (V, H), the head's matrix, such as `lm_head.weight`, or an `AdaptedWeight`.
        input: (B, T, H) or (N, H), hidden states in the dtype of `weight`, or in any under autocast.
        target: (B, T) or (N,), integer ids of the tokens that `input` predicts (shift labels, see `shifted`), or
            `ignore_index`.
        bias: (V,) or None.
        outputs: names of the statistics to compute, one or more, in nats. Those up to `mean_logits` are differentiable.

            - "logps": `z_y - lse`, the log-probability of the target; the default
            - "lse": `logsumexp(z)`
            - "entropy": `-sum(p * log(p))`, with `p = softmax(z)`
            - "mean_logits": `sum(z) / V`
            - "argmax": the first id of the largest logit, int64
            - "is_top1": whether that is the target, bool
            - "log_sum_sq_probs": `log(sum(p ** 2))`
        softcap: positive, Gemma's `final_logit_softcapping`. None: no softcap.
        logit_scale: finite factor, Cohere's `logit_scale`, Granite's `1 / logits_scaling`; 1.0 by default.
        temperature: positive divisor, 1.0 by default: a number, or float32 (B, T) or (N,), one a token, not read at
            ignored tokens.
        candidates: (B, T, K) or (N, K), distinct integer ids for each target; the result's `candidate_logps` are their
            log-probabilities, whose gradient is refused, such as a teacher's at the student's most likely ids. None:
                none.
        kept: the ids that a sampler kept of each position, see `KeptIds`: statistics of the softmax over these, after
            the temperature. Only their rows of the head are read, unless lists are long ("Kept ids" in
            `docs/tuning.md`): then three products are taken, within `logits_budget`. Not with "mean_logits",
            "log_sum_sq_probs", `candidates`, `input_grad="reduce_scatter"` of `vocab_shard`, or in the capture of a
            CUDA graph. None: all ids.
        ignore_index: the target, -100 by default, of tokens that are skipped.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: automatic.
        logits_dtype: torch.float32 keeps the float32 sums of 16-bit products; logits and their rounded gradient then
            take 6 bytes instead of 2. None: the sums are rounded to the products' dtype.
        deterministic: "batch" gives a token's values, not gradients, the same bits in any batch, place and budget.
            On a GPU it needs Hopper, bfloat16 or float16, a contiguous weight with H a multiple of 8, and no adapter
            ("The same bits in any batch" in `docs/numerics.md`). It excludes `vocab_shard`. None: results are
            repeatable, but may depend on the batch.
        vocab_shard: this rank's rows of `weight` and `bias`, if ranks split the vocabulary (`docs/distributed.md`).
            None: this rank has the whole vocabulary.

    Returns:
        `TokenStats`: a tensor shaped like `target` for each of `outputs`, `candidate_logps` (B, T, K) or (N, K) with
        `candidates`. The others are None, and raise AttributeError if read by name. Floats are float32, or float64 for
        float64 inputs. Ignored tokens have 0, argmax -1, and no gradient.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

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
    if deterministic is not None and vocab_shard is not None:
        raise ValueError(f'deterministic="batch" does not take vocab_shard, got {shown(vocab_shard)}')
    head = check_projection(LossHead(weight, bias, vocab_shard), input)
    check_target(target, input, head=head)
    if per_token is not None:
        check_temperature(per_token, target)
    if kept is not None:
        of_all = None if per_token is not None else options.temperature
        check_kept(kept, head, outputs, of_all)
        if candidates is not None:
            raise ValueError("kept says which ids count, got candidates as well")
        if per_token is not None:
            ignored, drawn_at = target == ignore_index, kept.temperature
            check_temperature_values(per_token.masked_fill(ignored, drawn_at or 1.0), drawn_at)
        stats = stats_of_kept(
            head, input, target.long(), kept, outputs, options, per_token,
            batch_invariant=deterministic is not None,
        )  # fmt: skip
        return TokenStats(*(None if x is None else x.view(target.shape) for x in stats))
    rows = select_rows(target.long(), "token", ignore_index, head.vocab_size)
    if per_token is not None:
        rows = rows.with_side("temperature", per_token.reshape(-1))
        check_temperature_values(rows.side["temperature"])
    if candidates is not None:
        rows = rows.with_side("candidates", check_candidates(candidates, target, head.vocab_size))
    batch_invariant = deterministic is not None
    stats = token_stats(head, input, rows, outputs, options, batch_invariant=batch_invariant)
    if target.ndim == 1:
        return TokenStats(*stats)
    return TokenStats(*(None if x is None else x.view(*target.shape, *x.shape[1:]) for x in stats))
