"""Log-probabilities of more ids than the target, such as a teacher's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join
from table import relative_error
from test_row_temperature import BUDGETS, H, V, batch, evaluate, ours
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import AdaptedWeight, VocabShard, linear_token_stats


def candidates() -> dict[str, Any]:
    """`test_row_temperature.py` compares their log-probabilities and what lies beside them with the formula."""
    return {name: x for name, x in batch().items() if name != "temperature"}


def test_a_gradient_of_candidates_is_refused() -> None:
    given = candidates()
    stats = linear_token_stats(given.pop("weight").requires_grad_(), **given)
    assert stats.logps is not None and stats.candidate_logps is not None
    with pytest.raises(RuntimeError, match=r"candidate_logps have no gradient: .* teacher_ids"):
        (stats.logps.sum() + stats.candidate_logps.sum()).backward()


def test_contracts() -> None:
    """No product more, and candidates of an adapter."""
    given = candidates()
    counts = []
    for chosen in (given, {k: x for k, x in given.items() if k != "candidates"}):
        leaves = {k: x.clone().requires_grad_() if x.is_floating_point() else x for k, x in chosen.items()}
        with FlopCounterMode(display=False) as counter:
            stats = linear_token_stats(**leaves)
            assert stats.logps is not None
            stats.logps.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]

    down, up = torch.randn(2, H, dtype=torch.float64), torch.randn(V, 2, dtype=torch.float64)
    adapted = AdaptedWeight(given["weight"], up, lambda x: x @ down.T)
    found = linear_token_stats(**given | {"weight": adapted}).candidate_logps
    torch.testing.assert_close(
        found, linear_token_stats(**given | {"weight": given["weight"] + up @ down}).candidate_logps
    )


def test_a_candidate_that_a_bias_excludes() -> None:
    given = candidates()
    ids, target = given["candidates"], given["target"]
    given["bias"][next(i for i in range(V) if i in ids and i not in target)] = -torch.inf
    found = linear_token_stats(**given).candidate_logps
    log_p = (given["input"] @ given["weight"].T + given["bias"]).log_softmax(-1)
    exact = log_p.gather(-1, ids).masked_fill((target == -100)[..., None], 0)
    assert exact.min() == -torch.inf
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda ids: ids.double(), TypeError, "candidates must be a tensor of token ids"),
        (lambda ids: ids[:, 1:], ValueError, r"candidates must be \(4, 10, 'K'\)"),
        (
            lambda ids: ids + V,
            ValueError,
            r"candidates holds \d+, expected an index into the vocabulary of weight, 0 to",
        ),
        (lambda ids: ids[..., [0, 1, 0]], ValueError, "candidates holds an id twice"),
    ],
)
def test_refusals(change: Any, error: type[Exception], message: str) -> None:
    given = candidates()
    with pytest.raises(error, match=message):
        linear_token_stats(**given | {"candidates": change(given["candidates"])})


def on_a_split_vocabulary(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    given = batch()
    expected = evaluate(ours, given)
    for split in (20, V):  # the second rank may have no rows
        rows = [slice(0, split), slice(split, V)][rank]
        own = given | {"weight": given["weight"][rows], "bias": given["bias"][rows]}
        of_rank = expected | {name: expected[name][rows] for name in ("dweight", "dbias")}
        for budget in BUDGETS.values():
            found = evaluate(ours, own, vocab_shard=VocabShard(None, rows.start, V), logits_budget=budget)
            for name, exact in of_rank.items():
                assert found[name].shape == exact.shape
                assert not exact.numel() or relative_error(found[name], exact) < 1e-9, name
    dist.destroy_process_group()
