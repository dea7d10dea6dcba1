"""Test cases that such code often gets wrong: odd inputs, corner cases of autograd, mixed precision."""

from __future__ import annotations

import math
from functools import partial

import eager
import pytest
import torch
import torch.nn.functional as F
from sampling import exhaustive, on_paths
from spies import Products
from table import (
    PARAMETERS,
    PATHS,
    ROWS,
    SMALL,
    Sizes,
    assert_same,
    evaluate,
    moved,
    n_valid,
    pairs,
    relative_error,
    rollouts,
    rows,
    students,
    tokens,
)
from torch import Tensor

import liger_chunked as lc
from liger_chunked.engine import choose

by_row = pytest.mark.parametrize("row", ROWS, ids=repr)
by_path = pytest.mark.parametrize("row", on_paths())
EXACT = 1e-12
SEVERAL_CHUNKS = 8 * 9 * SMALL.vocab  # a budget of nine tokens in float64
FLOAT16_ULP = torch.finfo(torch.float16).eps


# Frozen parts


@pytest.mark.few(2)
@pytest.mark.sampled(2)
@by_path
@pytest.mark.parametrize(
    "trainable",
    [("weight", "input"), ("weight", "bias"), ("input", "bias"), ("weight",), ("input",), ("bias",)],
    ids="+".join,
)
def test_frozen_parts(row, trainable, device):
    batch = moved(row.sample(SMALL, seed=2), device=device)
    if "bias" not in batch:
        batch["bias"] = batch["weight"][:, 0].clone()
    exact = evaluate(row.oracle, batch, trainable)
    assert_same(evaluate(partial(row.ours, logits_budget=SEVERAL_CHUNKS), batch, trainable), exact)
    for name in {"weight", "input", "bias"} - set(trainable):
        assert batch[name].grad is None


# Ignored tokens


@pytest.mark.few(3)
@pytest.mark.sampled
@by_row
@pytest.mark.parametrize("budget", [None, 8 * SMALL.vocab], ids=["auto", "1-token"])
def test_all_ignored_is_a_connected_zero(row, budget, device):
    batch = moved(row.sample(SMALL, seed=0), device=device)
    batch["target"].fill_(-100)
    result = evaluate(partial(row.ours, logits_budget=budget), batch)
    for name, value in result.items():
        assert (value == 0).all(), name


def test_a_sum_of_many_log_probabilities_is_not_rounded_on_the_way():
    """Sum one token of 2^24 nats and small ones, which a float32 sum would lose."""
    n = 4096
    weight, input = torch.tensor([[0.0], [1.0]]), torch.full((n, 1), -0.25)
    input[0] = -(2.0**24)
    loss = lc.LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, input, torch.ones(n, dtype=torch.int64))
    exact = F.cross_entropy((input @ weight.T).double(), torch.ones(n, dtype=torch.int64), reduction="sum")
    assert relative_error(loss, exact) < torch.finfo(torch.float32).eps


@pytest.mark.few(5, "cpu-cpo-alphapo-negative-hinge", "cpu-stats-kept")
@by_row
def test_empty_batch_is_a_connected_zero(row, device):
    batch = {
        name: x if name.endswith(("weight", "bias")) else x[:0]
        for name, x in moved(row.sample(SMALL, seed=0), device=device).items()
    }
    result = evaluate(row.ours, batch)
    for name, value in result.items():
        assert (value == 0).all(), name


@pytest.mark.few(4, "cpu-one-sequence-gmpo")
@pytest.mark.sampled
@by_row
@pytest.mark.parametrize("ignored", [[1], [1, 4], [0, 1, 2]], ids=["one-sequence", "one-pair", "all-chosen"])
def test_ignored_sequences(row, ignored, device):
    batch = moved(row.sample(SMALL, seed=4), device=device)
    batch["target"][ignored] = -100
    assert_same(evaluate(partial(row.ours, logits_budget=SEVERAL_CHUNKS), batch), evaluate(row.oracle, batch))


@pytest.mark.few(2)
@pytest.mark.sampled(2)
@by_path
@pytest.mark.parametrize("ignore_index", [-1, 0, SMALL.vocab - 1, 10**6])
def test_other_ignore_index(row, ignore_index):
    batch = row.sample(SMALL, seed=0)
    target = batch["target"]
    kept = torch.where((target == ignore_index) & (target >= 0), 1, target)
    batch["target"] = torch.where(target == -100, ignore_index, kept)
    ours = evaluate(partial(row.ours, ignore_index=ignore_index, logits_budget=SEVERAL_CHUNKS), batch)
    assert_same(ours, evaluate(partial(row.oracle, ignore_index=ignore_index), batch))


@pytest.mark.few(3)
@by_path
def test_padding_is_free_to_be_anything(row):
    """Hidden states of ignored tokens are not read."""
    batch = row.sample(SMALL, seed=0)
    expected = evaluate(row.ours, batch)
    for name in ("input", "ref_input"):
        if name in batch:
            batch[name] = torch.where((batch["target"] == -100)[..., None], math.nan, batch[name])
    for name, value in evaluate(row.ours, batch).items():
        assert torch.equal(value, expected[name]), name


# Autograd


@pytest.mark.parametrize("budget", [None, SEVERAL_CHUNKS], ids=["one-chunk", "several"])
def test_in_place_on_losses_per_token(budget):
    batch = tokens(SMALL, seed=0)
    factors = torch.linspace(-2, 2, batch["target"].numel(), dtype=torch.float64).view(batch["target"].shape)

    def in_place(losses: Tensor) -> Tensor:
        losses *= factors
        losses[0] = 0
        return losses.sum()

    def ours(batch):
        return in_place(lc.LigerFusedLinearCrossEntropyLoss(reduction="none", logits_budget=budget)(**batch))

    def statistics(batch):
        return -in_place(lc.linear_token_stats(**batch, logits_budget=budget).logps)

    exact = evaluate(lambda batch: in_place(eager.cross_entropy(**batch, reduction="none")), batch)
    assert_same(evaluate(ours, batch), exact)
    assert_same(evaluate(statistics, batch), exact)


@pytest.mark.few(3, "one-chunk-ce-token_weights-everything")
@by_path
@pytest.mark.parametrize("budget", [None, SEVERAL_CHUNKS], ids=["one-chunk", "several"])
def test_second_backward_with_another_upstream(row, budget):
    batch = row.sample(SMALL, seed=0)
    leaves = {name: batch[name].clone().requires_grad_() for name in PARAMETERS if name in batch}
    loss = row.ours({**batch, **leaves}, logits_budget=budget)
    exact = evaluate(row.oracle, batch)
    for upstream in (2.0, -0.5, 0.0, 1e-3, 1.0):
        grads = torch.autograd.grad(loss, list(leaves.values()), torch.full_like(loss, upstream), retain_graph=True)
        assert_same(dict(zip(leaves, grads, strict=True)), {name: upstream * exact[name] for name in leaves})


@pytest.mark.few(2)
@by_path
def test_inputs_are_left_alone(row):
    batch = row.sample(SMALL, seed=0)
    before = {name: x.clone() for name, x in batch.items()}
    leaves = {name: x.detach().requires_grad_() for name, x in batch.items() if name in PARAMETERS}  # the same memory
    row.ours({**batch, **leaves}, logits_budget=SEVERAL_CHUNKS).backward()
    for name, x in batch.items():
        assert torch.equal(x, before[name]), name


# Odd inputs and uses, alike for the loss and for the oracle


def _strided(x: Tensor) -> Tensor:
    """Return the same values as every second element of a wider tensor."""
    others = ~x if x.dtype == torch.bool else x + 1
    return torch.stack([x, others], dim=-1)[..., 0]


def _transposed(x: Tensor) -> Tensor:
    """Return the same values with the first two dimensions swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _laid_out(layout, batch):
    return {name: layout(x) if x.ndim > 1 else _strided(x) for name, x in batch.items()}


def _last_turn(target):
    return torch.full_like(target, -100).index_fill(1, torch.tensor([SMALL.length - 1]), 3)


def _in_one_dimension(batch):
    of_tokens = [name for name in batch if name.endswith(("input", "target", "teacher_logps", "_ids"))]
    return batch | {name: batch[name].flatten(0, 1) for name in of_tokens}


def _same_pairs(batch):
    """Chosen equal to rejected: its gradients cancel, also those of ties."""
    of_pairs = [name for name in ("input", "target", "ref_input", "ref_logps") if name in batch]
    return batch | {name: torch.cat(2 * [batch[name][: SMALL.sequences // 2]]) for name in of_pairs}


def _embedded(batch):
    """Tied embeddings: the hidden states depend on the head's weight, too."""
    return batch | {"input": batch["input"] + F.embedding(batch["target"].clamp(min=0), batch["weight"])}


def _same_tokens(batch):
    """Every token is the same: ties everywhere, and sorts without a defined order."""
    same = {name: batch[name][:1, :1].expand_as(batch[name]) for name in ("input", "ref_input") if name in batch}
    return batch | same | {"target": torch.full_like(batch["target"], 3)}


def _view_of_a_wider_tensor(batch):
    return batch | {"input": torch.cat([batch["input"], batch["input"]], dim=1)[:, : SMALL.length]}


def _in_place(loss):
    loss *= 0.25
    return loss


# Each returns a value of the loss of a batch.
USES = {
    "in place on the loss": lambda loss, batch: _in_place(loss(batch)),
    "last turn": lambda loss, batch: loss(batch | {"target": _last_turn(batch["target"])}),
    "int32": lambda loss, batch: loss(batch | {"target": batch["target"].int()}),
    "one dimension": lambda loss, batch: loss(_in_one_dimension(batch)),
    "strided": lambda loss, batch: loss(_laid_out(_strided, batch)),
    "transposed": lambda loss, batch: loss(_laid_out(_transposed, batch)),
    "stride zero": lambda loss, batch: loss(batch | {"input": batch["input"][:, :1].expand(-1, SMALL.length, -1)}),
    "view": lambda loss, batch: loss(_view_of_a_wider_tensor(batch)),
    "tied": lambda loss, batch: loss(_embedded(batch)) + batch["weight"].square().mean(),
    "same pairs": lambda loss, batch: loss(_same_pairs(batch)),
    "same tokens": lambda loss, batch: loss(_same_tokens(batch)),
}


def _has(row, use):
    if use == "one dimension":
        return row.scope == "token"
    if use == "same pairs":
        return row.scope == "pair"
    return use != "same tokens" or row.id != "kl_cov"  # it depends on the order


@pytest.mark.parametrize(
    ("row", "use"),
    [exhaustive([row, use], f"{row}-{use}", row.id not in PATHS) for row in ROWS for use in USES if _has(row, use)],
)
def test_uses(row, use):
    for ignored in (True, False) if use in ("strided", "transposed") else (True,):
        batch = row.sample(SMALL._replace(ignored=ignored), seed=0)
        ours = evaluate(lambda batch: USES[use](partial(row.ours, logits_budget=SEVERAL_CHUNKS), batch), batch)
        exact = evaluate(lambda batch: USES[use](row.oracle, batch), batch)
        for name in exact:
            # Where chosen and rejected cancel, there is no norm to compare with.
            torch.testing.assert_close(ours[name], exact[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("row", on_paths(row for row in ROWS if row.scope != "token"))
def test_side_of_the_padding(row):
    """Sequences moved to the right end of their rows, as a tokenizer with left padding has them."""
    batch = row.sample(SMALL, seed=0)
    last = ((batch["target"] != -100) * torch.arange(1, SMALL.length + 1)).amax(1)
    moves = (torch.arange(SMALL.length) - (SMALL.length - last)[:, None]) % SMALL.length

    def to_the_right(name, x):
        of_tokens = x.ndim > 1 and x.shape[:2] == batch["target"].shape and not name.endswith("weight")
        return torch.stack([x[i, moves[i]] for i in range(len(x))]) if of_tokens else x

    left = {name: to_the_right(name, x) for name, x in batch.items()}
    assert (left["target"][:, -1] != -100).all() and (left["target"] == -100).any()
    exact = evaluate(row.ours, batch)
    exact["input"] = to_the_right("input", exact["input"])
    assert_same(evaluate(row.ours, left), exact)


def test_vocabulary_of_a_model():
    """On a CPU, in one slice and in several."""
    vocab = 151665
    batch = tokens(Sizes(sequences=1, length=3, hidden=4, vocab=vocab, ignored=False), seed=0)
    batch["target"][0, 0] = vocab - 1
    exact = evaluate(lambda batch: eager.cross_entropy(**batch), batch)
    for budget in (None, 8 * 2 * vocab, 8 * 65536):
        loss = lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget)
        assert_same(evaluate(lambda batch, loss=loss: loss(**batch), batch), exact)


# Numbers


@pytest.mark.few(1)
@by_path
@pytest.mark.parametrize("offset", [1e4, -1e4], ids=str)
def test_offset_logits(row, offset, device):
    """A constant added to every logit changes lse and the mean, but no probability."""
    batch = moved(row.sample(SMALL, seed=0), device=device)
    batch["bias"] = torch.full_like(batch["weight"][:, 0], offset)
    exact = evaluate(row.oracle, batch)
    for name, value in evaluate(partial(row.ours, logits_budget=SEVERAL_CHUNKS), batch).items():
        # 1e4 times an eps of 2e-16, and its square in the z-loss.
        assert relative_error(value, exact[name]) < 1e-9 or torch.allclose(value, exact[name], atol=1e-9), name


@pytest.mark.few(2)
@pytest.mark.parametrize("budget", [None, 8 * 7 * SMALL.vocab, 8 * 7 * 4], ids=["auto", "chunks", "slices"])
@pytest.mark.parametrize("columns", [slice(0, 9), slice(14, 23), slice(5, 6)], ids=["first", "last", "one"])
@pytest.mark.parametrize("loss", ["ce-sum", "dpo-no-reference", "stats-entropy"])
def test_columns_of_minus_infinity(loss, columns, budget):
    """A mask in the bias excludes tokens; mean_logits is then -inf, without a gradient."""
    (row,) = rows(loss)
    batch = row.sample(SMALL, seed=0)
    batch["bias"][columns] = -math.inf
    batch["target"] = torch.where(batch["target"] == -100, -100, 11)
    ours = evaluate(partial(row.ours, logits_budget=budget), batch, ("weight", "input"))
    assert_same(ours, evaluate(row.oracle, batch, ("weight", "input")))


@pytest.mark.few(1)
@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999, 1 - 1e-5], ids=str)
def test_gradient_near_certainty_in_bfloat16(probability, device):
    """p - 1 is small, and must not be the difference of two rounded numbers."""
    v, h = 257, 16
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(v, h, generator=generator)
    target = torch.arange(64) % v
    # Move the input towards the target's row to reach this probability.
    input = 4 * weight[target] / weight[target].norm(dim=1, keepdim=True)
    for _ in range(40):
        p = (input @ weight.T).softmax(-1).gather(1, target[:, None])
        input = input * torch.where(p < probability, 1.1, 0.97)
    batch = moved({"weight": weight, "input": input, "target": target}, torch.bfloat16, device)

    def ours(batch):
        return lc.LigerFusedLinearCrossEntropyLoss()(**batch)

    exact = evaluate(lambda batch: eager.cross_entropy(**batch), moved(batch, torch.float64))
    naive = evaluate(lambda batch: eager.cross_entropy(**batch), batch)
    for name, value in evaluate(ours, batch).items():
        bound = max(1.1 * relative_error(naive[name], exact[name]), torch.finfo(value.dtype).eps)
        assert relative_error(value, exact[name]) <= bound, name


# Precision


@pytest.mark.few(2)
@by_path
def test_autocast(row, device, monkeypatch):
    """GEMMs run in the autocast dtype; the result equals that of inputs cast by hand, with float32 gradients."""
    # Disable the fused epilogue: only the step with a float32 dW might use it, and would then not round its logits.
    monkeypatch.setattr(choose, "has_wide_tiles", lambda device: False)
    batch = moved(row.sample(Sizes(6, 16, 32, 257, 16), seed=0), torch.float32, device)
    leaves = {name: batch[name].clone().requires_grad_() for name in PARAMETERS if name in batch}
    # One chunk: on a CPU, several are accumulated with float32 products of upcast operands.
    with torch.autocast(device, torch.bfloat16), Products() as products:
        loss = row.ours({**batch, **leaves})
    grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    # The backward outside of autocast does the same.
    again = torch.autograd.grad(loss, list(leaves.values()))
    assert all(map(torch.equal, again, grads))
    if not row.products:  # nothing is rounded
        assert_same({"loss": loss.detach()}, {"loss": row.ours({**batch, **leaves}).detach()})
        return
    if row.kept and device == "cpu":  # its logits are float32 sums too
        assert set(products.dtypes) == {torch.float32}
    else:
        assert torch.bfloat16 in products.dtypes
    if row.fused or device == "cuda":
        in_forward = 1 if row.kept else 2  # of statistics, the gradients' products come later
        assert products.dtypes[:in_forward] == [torch.bfloat16] * in_forward
    cast = {name: x for name, x in moved(batch, torch.bfloat16).items() if not name.endswith("_logps")}
    by_hand = evaluate(row.ours, batch | cast)
    assert torch.equal(loss.detach(), by_hand["loss"])
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        # The gradients by hand were rounded to bfloat16 at the end.
        assert relative_error(grad, by_hand[name].double()) < torch.finfo(torch.bfloat16).eps, name


@pytest.mark.few(2)
@by_path
def test_autocast_leaves_float64_alone(row):
    batch = row.sample(SMALL, seed=0)
    exact = evaluate(row.oracle, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(evaluate(row.ours, batch), exact)


@pytest.mark.few(1)
@pytest.mark.sampled(0.5)  # a CPU takes a second for products in float16
@by_path
@pytest.mark.parametrize("scale", [1.0, 2.0**14], ids=["unscaled", "scaled"])
def test_float16_with_a_loss_scale(row, scale, device):
    """Per-token gradients below 6e-8 would underflow; those of the scaled loss must not overflow either."""
    batch = moved(row.sample(Sizes(8, 32, 64, 499, 48, ignored=False), seed=0), torch.float16, device)
    exact = evaluate(row.oracle, moved(batch, torch.float64))
    eager = evaluate(row.oracle, batch, upstream=scale)
    for name, value in evaluate(row.ours, batch, upstream=scale).items():
        expected = exact[name] if name == "loss" else scale * exact[name]
        if expected.abs().max() > torch.finfo(torch.float16).max and value.dtype == torch.float16:
            continue  # a trainer skips the step and lowers its scale
        bound = max(FLOAT16_ULP, 1.1 * relative_error(eager[name], expected))  # a NaN from eager code is no bound
        assert relative_error(value, expected) <= bound, name


@pytest.mark.slow
def test_100_steps_in_slices_of_bfloat16():
    """Rounding errors that add up over steps and slices would move the weights further than eager code does."""
    vocab, hidden, n = 2503, 16, 24
    generator = torch.Generator().manual_seed(0)
    start = [0.5 * torch.randn(vocab, hidden, generator=generator) for _ in range(2)]
    ids = [torch.randint(vocab, (n,), generator=generator) for _ in range(4)]

    def trained(loss, dtype):
        embedding, head = ((x.double() if dtype == torch.float64 else x.clone()).requires_grad_() for x in start)
        optimizer = torch.optim.SGD([embedding, head], lr=0.5)
        for i in range(100):
            x = ids[i % len(ids)]
            value = loss(head.to(dtype), embedding[x].to(dtype), (x + 1) % vocab)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return {"loss": value.detach(), "embedding": embedding.detach(), "head": head.detach()}

    ours = trained(lc.LigerFusedLinearCrossEntropyLoss(logits_budget=2 * 10 * vocab), torch.bfloat16)
    exact, naive = (trained(eager.cross_entropy, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert exact["loss"] < 0.7 * math.log(vocab)
    for name in exact:
        bound = max(1.1 * relative_error(naive[name], exact[name]), torch.finfo(torch.bfloat16).eps / n**0.5)
        assert relative_error(ours[name], exact[name]) <= bound, name


# Pairs


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compute_nll_loss": True},
        {"average_log_prob": True},
        {"temperature": 0.5, "softcap": 4.0},
        {"loss_type": "aot", "logits_budget": 8 * 30},
    ],
    ids=str,
)
def test_dpo_metrics(settings, device):
    batch = moved(pairs(SMALL, seed=0), device=device)
    _, ours = lc.LigerFusedLinearDPOLoss(**settings)(**batch)
    _, exact = eager.dpo(**batch, **{name: x for name, x in settings.items() if name != "logits_budget"})
    assert set(ours._fields) == set(exact) - {"reward_accuracies", "reward_margins"}
    for name, expected in exact.items():
        value = getattr(ours, name)
        assert not value.requires_grad
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-14, msg=name)


# Cross entropy


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_metrics(reduction, device):
    batch = moved(tokens(SMALL, seed=0), device=device)
    module = lc.LigerFusedLinearCrossEntropyLoss(
        reduction=reduction,
        lse_square_scale=0.1,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
        logits_budget=SEVERAL_CHUNKS,
    )
    loss, metrics = module(**batch)
    exact = eager.cross_entropy(**batch, reduction=reduction, lse_square_scale=0.1)
    plain = eager.cross_entropy(**batch, reduction=reduction)
    stats = eager.token_stats(**batch, outputs=("argmax", "is_top1"))
    torch.testing.assert_close(loss, exact, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(metrics.z_loss, exact - plain, rtol=1e-9, atol=EXACT)
    assert torch.equal(metrics.predicted_tokens, stats["argmax"])
    assert metrics.token_accuracy.item() == pytest.approx(stats["is_top1"].sum().item() / n_valid(batch))


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [int, torch.tensor, None], ids=["int", "tensor", "none"])
@pytest.mark.parametrize(
    ("loss", "sample"),
    [
        (lc.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, lse_square_scale=0.01), tokens),
        (lc.LigerFusedLinearJSDLoss(), students),
        (lc.LigerFusedLinearGRPOLoss(reduction="dapo"), rollouts),
    ],
    ids=["ce", "jsd", "dapo"],
)
def test_micro_batches_add_up_to_the_batch(loss, sample, count):
    """Loss and gradients. Without `num_items`, the mean of a micro-batch times its share of the tokens."""
    batch = sample(SMALL, seed=0)
    batch["target"][1:3] = -100  # a micro-batch without tokens

    def whole(batch, **items):
        returned = loss(**batch, **items)
        return returned[0] if isinstance(returned, tuple) else returned

    def accumulated(batch):
        total, n = 0.0, n_valid(batch)
        for part in (slice(0, 1), slice(1, 3), slice(3, 6)):
            micro = {name: x if name.endswith(("weight", "bias")) else x[part] for name, x in batch.items()}
            total += whole(micro) * n_valid(micro) / n if count is None else whole(micro, num_items=count(n))
        return total

    assert_same(evaluate(accumulated, batch), evaluate(whole, batch))
