"""`linear_token_stats`: statistics of tokens, whose gradients are computed in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from liger_chunked.calls import entry_point
from liger_chunked.engine import choose
from liger_chunked.engine.candidates import check_candidates
from liger_chunked.engine.checks import (
    check_projection,
    check_target,
    check_temperature,
    check_temperature_values,
    compute_dtype,
)
from liger_chunked.engine.kept import (
    check_kept,
    kept_token_stats,
    place,
)
from liger_chunked.engine.plan import Plan, flattened
from liger_chunked.engine.rows import Rows, hide_ignored, select_rows
from liger_chunked.engine.saved import Unsaved
from liger_chunked.engine.sink import Needs, Sink
from liger_chunked.engine.step import Operands, differentiable, empty_stats, operands_of
from liger_chunked.engine.surroundings import gemms
from liger_chunked.kept_ids import KeptIds
from liger_chunked.kernels.kept import Entries
from liger_chunked.shapes import shapes_only
from liger_chunked.types import (
    OUTPUTS,
    LogitOptions,
    LossHead,
    TokenStats,
    VocabShard,
    Weight,
    accumulation_dtype,
    shown,
)
from liger_chunked.what_ran import note_kept


@dataclass(frozen=True, eq=False)
class _StatisticsRule:
    """The statistics of a plan of one chunk, dense, and their gradients."""

    plan: Plan

    @property
    def names(self) -> tuple[str, ...]:
        outputs = self.plan.outputs
        return (*outputs, "candidate_logps") if "candidates" in self.plan.rows.side else outputs

    def forward(self, operands: Operands, needs: Needs, may_hold: bool) -> tuple[Sequence[Tensor], Any]:
        plan, holds = self.plan, may_hold and True in needs
        head, flat = operands.head(plan), flattened(operands.input, operands.u)
        source = choose.source_of_statistics(plan, head.for_products(plan.dtype), holds)
        with gemms(operands.input.device, plan.dtype):
            stats, memo = source.statistics(plan.tokens(0, *flat))
        dense = plan.rows.stats_to_dense({name: getattr(stats, name) for name in self.names})
        # The source holds the last tile of logits, for one backward.
        return [getattr(dense, name) for name in self.names], _Memo(memo, Unsaved(source if holds else None))

    def backward(
        self, operands: Operands, memo: _Memo, upstream: dict[str, Tensor], needs: Needs
    ) -> tuple[Tensor | None, ...]:
        if "candidate_logps" in upstream:
            raise RuntimeError(
                "candidate_logps have no gradient: .detach() them, or, for a student's loss over a teacher's top k, "
                "pass teacher_ids and teacher_logps to a distillation loss"
            )
        plan, rows = self.plan, self.plan.rows
        head, (flat, flat_u) = operands.head(plan), flattened(operands.input, operands.u)
        source = memo.held.take() or choose.source_of_statistics(plan, head.for_products(plan.dtype))
        sink = source.sink = Sink(plan, flat, head, needs, flat_u)
        if rows.n_valid:
            dtype = accumulation_dtype(plan.dtype)
            gradients = {name: rows.to_compact(g.reshape(-1)).to(dtype).contiguous() for name, g in upstream.items()}
            with gemms(flat.device, plan.dtype):
                source.backward(plan.tokens(0, flat, flat_u), memo.of_source, gradients)
        source.release()
        return sink.finish()


class _Memo(NamedTuple):
    of_source: Any
    held: Unsaved


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
    operands = operands_of(head, input, dtype)
    if kept is not None:
        plan = choose.for_kept(head, rows, dtype, kept, outputs, options)
    else:
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
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
    if shapes_only():
        return rows.stats_to_dense(empty_stats(plan, input.device)._asdict())
    stats = TokenStats(**differentiable(_StatisticsRule(plan), operands))
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
    note_kept(placed.n_kept, n_ids, by_products, head, options, dtype)
    if not placed.n_whole:
        return found
    others = of_part(placed.has_entries, batch_invariant=batch_invariant)
    note_kept(placed.n_kept, n_ids, True, head, options, dtype)
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
            the temperature. Only their rows of the head are read, unless lists are long ("Rows and ids" in
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
        given = ", ".join(map(shown, outputs)) + "," * (len(outputs) == 1)
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
