"""Draft losses: values, gradients and metrics against whole logits in float64."""

from __future__ import annotations

from typing import Any

import eager
import pytest
import torch
import torch.nn.functional as F
from spies import flop_counter, memory_beside
from table import (
    Batch,
    Sizes,
    assert_rounds_as_eager_code,
    assert_same,
    drafts,
    evaluate,
    leaves_of,
    moved,
    relative_error,
)
from torch import Tensor

from liger_chunked import AdaptedWeight, DraftMetrics, LigerFusedLinearDraftLoss, LogitOptions
from liger_chunked.engine import checks

SIZES = Sizes(sequences=2, length=9, hidden=5, vocab=37, ref_hidden=8)
B, T, H, V, H_TEACHER = SIZES.sequences, SIZES.length, SIZES.hidden, SIZES.vocab, SIZES.ref_hidden
IDS = torch.tensor([30, 3, 0, 9, 36, 11, 17, 2, 25, 21, 5])
BOUND = 1e-9  # float64: a few thousand additions round to less
KINDS = ("kl", "reverse_kl", "jsd", "tvd", "log_acceptance")
TRANSFORM: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.7, "temperature": 0.6}
OF_TEACHER: dict[str, Any] = {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3}


def batch(steps: int, v_draft: int = len(IDS), seed: int = 0) -> Batch:
    """Return states of `steps` steps and of the teacher, and both heads: the draft's has `v_draft` tokens."""
    given = drafts(SIZES, seed, steps)
    del given["mask"]
    return given | {name: given[name][:v_draft] for name in ("weight", "bias")}


def cost(kind: str, p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Return the divergence of rows over the teacher's tokens; `q` is 0 at those that the draft lacks."""
    log_p, log_q = p.log(), q.clamp(min=1e-300 if q.dtype == torch.float64 else 1e-38).log()
    if kind == "kl":
        return torch.where(q > 0, p * (log_p - log_q), 0.0).sum(-1)
    if kind == "reverse_kl":
        return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
    if kind == "jsd":
        log_m = (beta * p + (1 - beta) * q).log()
        of_draft = torch.where(q > 0, q * (log_q - log_m), 0.0)
        return (beta * p * (log_p - log_m) + (1 - beta) * of_draft).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    return 1 - accepted if kind == "tvd" else -accepted.log()


def oracle(
    given: dict[str, Any],
    kind: str = "kl",
    ids: Tensor | None = IDS,
    renormalize: bool = False,
    skip_outside: bool = False,
    decay: float = 1.0,
    beta: float = 0.5,
    options: dict[str, Any] | None = None,
    of_teacher: dict[str, Any] | None = None,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    items: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics, step by step, from whole logits. `mask` and `weight` are (K, B, T)."""
    options = options or {}
    of_teacher = options if of_teacher is None else of_teacher
    first, ids = ids is None, torch.arange(given["weight"].shape[0]) if ids is None else ids
    t = eager.logits(*(given[f"teacher_{name}"] for name in ("weight", "input", "bias")), **of_teacher).detach()
    t = t[..., : len(ids)] if first else t
    steps = given["input"].shape[0]
    chains, greedy, losses = [], [], []
    found: dict[str, list[Tensor]] = {"step_losses": [], "acceptance": [], "top1_agreement": []}
    for k in range(steps):
        z = eager.logits(given["weight"], given["input"][k], given["bias"], **options)[:, : T - k]
        of_step = t[:, k:]
        q = torch.zeros_like(of_step, dtype=z.dtype).index_copy(-1, ids, z.softmax(-1))
        p = of_step.softmax(-1)
        target = p
        if renormalize:
            target = torch.full_like(p, 1e-300).index_copy(-1, ids, of_step[..., ids].softmax(-1))
        counts = torch.ones(B, T - k, dtype=z.dtype) if mask is None else mask[k, :, : T - k].to(z.dtype)
        factor = counts if weight is None else counts * weight[k, :, : T - k].to(z.dtype)
        values = cost(kind, target, q, beta)
        if skip_outside:
            values = values * (of_step.argmax(-1)[..., None] == ids).any(-1)
        n = counts.sum().clamp(min=1) if items is None else items
        losses.append(decay**k * (values * factor).sum() / n)
        accepted, agrees = torch.minimum(p, q).sum(-1), (ids[z.argmax(-1)] == of_step.argmax(-1)).to(z.dtype)
        found["step_losses"].append((values * factor).sum() / n)
        n = counts.sum().clamp(min=1)
        found["acceptance"].append((accepted * counts).sum() / n)
        found["top1_agreement"].append((agrees * counts).sum() / n)
        chains.append(F.pad(accepted * counts, (0, k)))
        greedy.append(F.pad(agrees * counts, (0, k)))
    n = (torch.ones(B, T) if mask is None else mask[0]).sum().clamp(min=1)
    metrics = {name: torch.stack(x).detach() for name, x in found.items()}
    metrics["acceptance_length"] = 1 + torch.stack(chains).detach().cumprod(0).sum() / n
    metrics["greedy_acceptance_length"] = 1 + torch.stack(greedy).cumprod(0).sum() / n
    return torch.stack(losses).sum(), metrics


def with_gradients(loss: Any, given: Batch) -> Batch:
    """Return the loss, its gradients by the draft's tensors, and the metrics."""
    leaves = leaves_of(given)
    value, metrics = loss(given | leaves)
    (3.0 * value).backward()
    metrics = metrics if isinstance(metrics, dict) else metrics._asdict()
    return {"loss": value.detach(), **{name: x.grad for name, x in leaves.items()}, **metrics}


def assert_right(
    loss: LigerFusedLinearDraftLoss, given: dict[str, Tensor], arguments: Any = None, **exact: Any
) -> None:
    found = with_gradients(lambda given: loss(**given, **(arguments or {})), given)
    expected = with_gradients(lambda given: oracle(given, **exact), given)
    assert_same(found, expected, BOUND)


@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", ["subset", "renormalised", "all", "first"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("transform", [False, True], ids=["plain", "transformed"])
@pytest.mark.parametrize("budget", [None, 4000], ids=["one-chunk", "chunks"])
def test_equals_whole_logits(kind: str, tokens: str, steps: int, transform: bool, budget: int | None) -> None:
    ids = IDS if tokens in ("subset", "renormalised") else None
    options, of_teacher = (TRANSFORM, OF_TEACHER) if transform else ({}, {})
    renormalize = tokens == "renormalised"
    loss = LigerFusedLinearDraftLoss(
        draft_ids=ids,
        divergence=kind,
        renormalize=renormalize,
        step_decay=0.8,
        logits_budget=budget,
        teacher_options=LogitOptions(**of_teacher) if transform else None,
        **options,
    )
    given = batch(steps, V if tokens == "all" else len(IDS))
    exact = {"ids": ids, "renormalize": renormalize, "decay": 0.8, "options": options, "of_teacher": of_teacher}
    assert_right(loss, given, kind=kind, **exact)


@pytest.mark.parametrize("budget", [None, 4000], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("steps", [1, 3])
def test_rows_that_count_and_their_weights(steps: int, budget: int | None) -> None:
    given, generator = batch(steps), torch.Generator().manual_seed(1)
    mask = torch.rand(steps, B, T, generator=generator) < 0.6
    weight = torch.rand(steps, B, T, generator=generator)
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, logits_budget=budget)
    arguments: dict[str, Any] = {"mask": mask, "position_weight": weight}
    assert_right(loss, given, arguments, mask=mask, weight=weight)
    for items in (7, torch.tensor(7)):
        assert_right(loss, given, arguments | {"num_items": items}, mask=mask, weight=weight, items=7)
    # Of the teacher's positions: those that a step drafts.
    mask, weight = (F.pad(x[0], (0, steps)) for x in (mask, weight))
    by_row = [torch.stack([x[:, k : k + T] for k in range(steps)]) for x in (mask, weight)]
    arguments = {"mask": mask[:, :T], "position_weight": weight[:, :T]}
    assert_right(loss, given, arguments, mask=by_row[0], weight=by_row[1])


def test_no_row_counts() -> None:
    given = batch(3)
    leaves = leaves_of(given)
    loss, metrics = LigerFusedLinearDraftLoss(draft_ids=IDS)(**given | leaves, mask=torch.zeros(B, T, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and metrics.acceptance_length == 1
    assert all(x.grad is not None and not x.grad.any() for x in leaves.values())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_token_the_draft_lacks(kind: str) -> None:
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, divergence=kind, renormalize=True, skip_outside=True)
    assert_right(loss, batch(2), kind=kind, renormalize=True, skip_outside=True)


@pytest.mark.parametrize("budget", [None, 4000], ids=["one-chunk", "chunks"])
def test_rows_of_the_teacher_by_index(budget: int | None) -> None:
    """Blocks at anchors, as of DFlash: slots of several blocks may share a row, and others have none."""
    given, generator = batch(4), torch.Generator().manual_seed(2)
    anchors = torch.randint(B * T, (6,), generator=generator)
    index = anchors + torch.arange(4)[:, None]
    index[index >= B * T] = -1
    given["input"] = given["input"].flatten(1, 2)[:, :6]
    flat = given["teacher_input"].flatten(0, 1)

    def exact(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        p = eager.logits(given["teacher_weight"], flat[index.clamp(min=0)], given["teacher_bias"]).softmax(-1)
        z = eager.logits(given["weight"], given["input"], given["bias"])
        values = cost("kl", p[..., IDS], z.softmax(-1), 0.5) * (index >= 0)
        return (values.sum(1) / (index >= 0).sum(1)).sum(), {}

    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, logits_budget=budget)
    found = with_gradients(lambda given: loss(**given, teacher_rows=index), given)
    expected = with_gradients(exact, given)
    assert_same({name: found[name] for name in expected}, expected, BOUND)


def test_bias_of_the_previous_token() -> None:
    """A low-rank bias W1[previous] W2, as of DSpark: both factors have gradients."""
    given, generator = batch(2), torch.Generator().manual_seed(3)
    previous = torch.randint(V, (2, B, T), generator=generator)
    w1 = torch.randn(V, 3, generator=generator, dtype=torch.float64)
    w2 = torch.randn(len(IDS), 3, generator=generator, dtype=torch.float64)
    found, expected = [], []
    for fused, gradients in ((True, found), (False, expected)):
        leaves = [x.clone().requires_grad_() for x in (given["weight"], given["input"], w1, w2)]
        weight, hidden, table, up = leaves
        if fused:
            head = AdaptedWeight(weight, up=up, down=lambda _, table=table: table[previous])
            loss = LigerFusedLinearDraftLoss(draft_ids=IDS)(**given | {"weight": head, "input": hidden})[0]
        else:  # one product over both
            joint = {"weight": torch.cat([weight, up], 1), "input": torch.cat([hidden, table[previous]], -1)}
            loss = oracle(given | joint)[0]
        loss.backward()
        gradients += [loss.detach(), *(x.grad for x in leaves)]
    for x, e in zip(found, expected, strict=True):
        assert relative_error(x, e) < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_rounding(kind: str) -> None:
    """Errors over 20 batches are at most 1.1 times those of eager code."""
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, divergence=kind, logits_budget=4000)

    def results(seed: int) -> tuple[Batch, Batch, Batch]:
        given = moved(batch(2, seed=seed), torch.bfloat16)
        exact = evaluate(lambda given: oracle(given, kind)[0], moved(given, torch.float64))
        eager_code = evaluate(lambda given: oracle(given, kind)[0], given)
        return evaluate(lambda given: loss(**given)[0], given), eager_code, exact

    assert_rounds_as_eager_code(map(results, range(20)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_models_that_hardly_agree(dtype: torch.dtype) -> None:
    """Of a mass of 1e-9, 1 minus the distance would be noise."""
    generator = torch.Generator().manual_seed(4)
    # Logits are multiples of 0.75, which no dtype rounds.
    weight, input = 6 * torch.eye(8), torch.randint(-4, 5, (1, 5, 8), generator=generator) / 8
    teacher_input = input[0] + torch.tensor([-1, 1]).repeat(4) / 8  # nowhere equal
    input[..., 0] = teacher_input[:, 1] = 4.0
    given = {"weight": weight, "input": input, "teacher_weight": weight, "teacher_input": teacher_input}
    given = {name: x.to(dtype) for name, x in given.items()}
    leaves = [given[name].clone().requires_grad_() for name in ("weight", "input")]
    loss, metrics = LigerFusedLinearDraftLoss(divergence="log_acceptance")(*leaves, *list(given.values())[2:])
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    p = (given["teacher_input"].double() @ given["teacher_weight"].double().T).softmax(-1)
    accepted = torch.minimum(p, (exact[1] @ exact[0].T).softmax(-1)).sum(-1)
    assert accepted.max() < 1e-8
    (-accepted.log().mean()).backward()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(metrics.acceptance, accepted.detach().mean(1)) < bound
    for x, e in zip(leaves, exact, strict=True):
        assert x.grad is not None and e.grad is not None
        assert relative_error(x.grad, e.grad) < bound


@pytest.mark.ordinary_memory
@pytest.mark.parametrize(("steps", "v_draft"), [(1, 1009), (4, 250)])
def test_memory(steps: int, v_draft: int) -> None:
    """Both models' logits stay within the budget, and no tensor holds all of either's."""
    n, h, v, budget = 256, 32, 1009, 1 << 18
    weight, hidden = torch.randn(v_draft, h).bfloat16().requires_grad_(), torch.randn(steps, n, h).bfloat16()
    hidden.requires_grad_()
    teacher = torch.randn(v, h).bfloat16(), torch.randn(n, h).bfloat16()
    ids = torch.arange(v_draft) * (v // v_draft)
    loss = LigerFusedLinearDraftLoss(draft_ids=ids, logits_budget=budget)
    with memory_beside(weight, hidden, *teacher, ids) as memory:
        loss(weight, hidden, *teacher)[0].backward()
    accumulators = 4 * (v_draft * h + steps * n * h) + 2 * (v_draft * h + steps * n * h)
    assert memory.peak <= budget + accumulators + (1 << 17)  # and rows of hidden states, and numbers per token
    assert memory.largest <= budget < 2 * n * v


@pytest.mark.parametrize("budget", [None, 12000])
@pytest.mark.parametrize("steps", [1, 3])
def test_matrix_products(steps: int, budget: int | None) -> None:
    """Three products of the draft, and one of the teacher for all steps, in any number of chunks."""
    given, mask = batch(steps), torch.arange(T).expand(B, T) > 2
    leaves = leaves_of(given)
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, logits_budget=budget)
    with flop_counter() as counter:
        loss(**given | leaves, mask=mask)[0].backward()
    rows, positions = B * sum(min(T - k, T - 3) for k in range(steps)), B * (T - 3)
    assert counter.get_total_flops() == 2 * (rows * 3 * H * len(IDS) + positions * H_TEACHER * V)


def test_a_teacher_row_that_exceeds_the_budget_is_projected_again() -> None:
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, logits_budget=1)
    assert_right(loss, batch(3))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"divergence": "cosine"}, "divergence must be one of .* got 'cosine'"),
        ({"divergence": "jsd", "beta": 1.0}, "beta must be between 0 and 1, got 1.0"),
        ({"renormalize": True}, "renormalize=True needs draft_ids"),
        ({"step_decay": 0.0}, "step_decay must be positive, got 0.0"),
        ({"logits_dtype": torch.float32}, "logits_dtype=torch.float32 is not read"),
        ({"draft_ids": torch.ones(5, dtype=torch.bool)}, "draft_ids must be a tensor of token ids .* t2d.nonzero"),
        ({"draft_ids": torch.tensor([3, 3])}, "draft_ids holds an id twice"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        LigerFusedLinearDraftLoss(**settings)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"teacher_input": torch.zeros(B, T - 1, H_TEACHER)}, r"teacher_input must be \(2, 9, 'H_teacher'\)"),
        ({"teacher_weight": torch.zeros(36, H_TEACHER), "teacher_bias": None}, "draft_ids holds 36"),
        ({"weight": torch.zeros(4, H), "bias": None}, "draft_ids must have an id for each of the 4 rows"),
        ({"mask": torch.ones(T, dtype=torch.bool)}, r"mask must be \(2, 2, 9\), .* or \(2, 9\)"),
        ({"teacher_rows": torch.full((2, B, T), B * T)}, "teacher_rows holds 18, expected a row of teacher_input"),
        ({"teacher_rows": torch.zeros(B, T, dtype=torch.int64)}, r"teacher_rows must be \(2, 2, 9\)"),
    ],
)
def test_input_that_does_not_fit(changes: dict[str, Any], match: str) -> None:
    given = {name: x.float() for name, x in batch(2).items()}
    with pytest.raises((TypeError, ValueError), match=match):
        LigerFusedLinearDraftLoss(draft_ids=IDS)(**given | changes)


def test_in_a_whole_graph() -> None:
    """The rows that count and those that share a teacher's row are unknown while a graph is traced."""
    given, mask = batch(3), torch.arange(B * T).view(B, T) % 3 != 1
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS)

    def run(call: Any) -> tuple[list[Tensor], list[Tensor]]:
        leaves = leaves_of(given)
        value, metrics = call(**{**given, **leaves}, mask=mask)
        assert type(metrics) is DraftMetrics
        return [value, *metrics], list(torch.autograd.grad(value, [*leaves.values()]))

    compiled = torch.compile(lambda **named: loss(**named), fullgraph=True, backend="aot_eager")
    for found, expected in zip(run(compiled), run(loss), strict=True):
        torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)


def test_a_mask_in_the_capture_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not count are computed with the others, and in no metric."""
    given, mask = batch(1), torch.arange(B * T).view(B, T) % 3 != 1
    loss = LigerFusedLinearDraftLoss(draft_ids=IDS, divergence="tvd")
    expected = loss(**given, mask=mask)
    monkeypatch.setattr(checks, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(checks, "is_capturing", lambda: True)
    found = loss(**given, mask=mask)
    torch.testing.assert_close([found[0], *found[1]], [expected[0], *expected[1]], rtol=BOUND, atol=BOUND)
