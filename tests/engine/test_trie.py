"""Packing a padded batch as the trie of its tokens, against a trie of Python dicts; and the gather that undoes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")

from liger_chunked.shared_prefix import trie
from liger_chunked.shared_prefix.trie import PackedTrie, gather_rows, pack_trie

Sequences = list[list[int]]


def padded(sequences: Sequences, side: str = "right", extra: int = 0, token: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids and mask. `token` fills the padding, and may be a token of a sequence."""
    width = max(1, extra + max(map(len, sequences)))
    ids = torch.full((len(sequences), width), token)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        place = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        ids[i, place] = torch.tensor(sequence, dtype=torch.long)
        mask[i, place] = 1
    return ids, mask


Node = dict[int, Any]


def depth_first(sequences: Sequences) -> list[tuple[int, int, int]]:
    """Return token, depth and end of every node of a trie of dicts, depth first."""
    root: Node = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    found: list[tuple[int, int, int]] = []

    def visit(children: Node, depth: int) -> None:
        for token, below in sorted(children.items()):
            place = len(found)
            found.append((token, depth, -1))
            visit(below, depth + 1)
            found[place] = (token, depth, len(found))

    visit(root, 0)
    return found


def n_prefixes(sequences: Sequences) -> int:
    return len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})


def seen_by(packed: PackedTrie, node: int) -> list[int]:
    """Return the nodes that a node sees."""
    length = packed.input_ids.shape[1]
    row, place = divmod(node, length)
    k = torch.arange(length)
    return ((k <= place) & (place < packed.end[row])).nonzero().flatten().add(row * length).tolist()


def check(packed: PackedTrie, sequences: Sequences, ids: Tensor, mask: Tensor, cut: bool = False) -> None:
    """Check all that a model needs: each token sees exactly its own prefix, at the right depths."""
    n_rows, length = packed.input_ids.shape
    assert packed.tokens == sum(map(len, sequences))
    assert n_prefixes(sequences) <= packed.nodes <= packed.tokens if cut else packed.nodes == n_prefixes(sequences)
    assert torch.equal(packed.node >= 0, mask.bool())
    q, k = torch.arange(length)[:, None], torch.arange(length)
    sees = (k <= q) & (q < packed.end[:, None, :])
    flat_ids, depth = packed.input_ids.flatten(), packed.position_ids.flatten()
    for b, sequence in enumerate(sequences):
        nodes = packed.node[b][mask[b].bool()]
        assert flat_ids[nodes].tolist() == sequence
        assert depth[nodes].tolist() == list(range(len(sequence)))
        for t, node in enumerate(nodes.tolist()):
            assert seen_by(packed, node) == nodes[: t + 1].tolist()
    filler = torch.ones(n_rows * length, dtype=torch.bool)
    filler[packed.node[packed.node >= 0]] = False
    assert int((~filler).sum()) == packed.nodes
    assert torch.equal(sees.flatten(0, 1)[filler].sum(1), torch.ones(int(filler.sum()), dtype=torch.long))


@st.composite
def forests(draw: st.DrawFn) -> Sequences:
    """Sequences that branch: each starts with a prefix of an earlier one, or is a copy of one, or empty."""
    tokens = st.integers(0, draw(st.integers(0, 4)))
    sequences: Sequences = []
    for _ in range(draw(st.integers(1, 7))):
        start: list[int] = []
        if sequences and draw(st.booleans()):
            start = draw(st.sampled_from(sequences))
            start = start[: draw(st.integers(0, len(start)))]
        sequences.append(start + draw(st.lists(tokens, max_size=6)))
    return sequences


@settings(max_examples=100, deadline=None)
@given(
    forests(),
    st.sampled_from(["left", "right"]),
    st.integers(0, 3),
    st.integers(0, 4),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([None, 1, 6, 20]),
)
def test_any_forest(
    sequences: Sequences, side: str, extra: int, token: int, multiple: int, row_tokens: int | None
) -> None:
    ids, mask = padded(sequences, side, extra, token)
    packed = pack_trie(ids, mask, row_tokens=row_tokens, multiple=multiple)
    check(packed, sequences, ids, mask)
    n_rows, length = packed.input_ids.shape
    assert length % multiple == 0
    if row_tokens is None:
        expected = depth_first(sequences)
        fields = (packed.input_ids[0], packed.position_ids[0], packed.end[0])
        assert [tuple(int(x[i]) for x in fields) for i in range(packed.nodes)] == expected
        assert n_rows == 1 and length == max(1, -(-packed.nodes // multiple)) * multiple
    else:
        trees = [depth_first([s for s in sequences if s[:1] == [first]]) for first in {s[0] for s in sequences if s}]
        longest = max([row_tokens, *map(len, trees)])
        assert length <= -(-longest // multiple) * multiple


@settings(max_examples=100, deadline=None)
@given(forests(), st.sampled_from(["left", "right"]), st.booleans(), st.sampled_from([1, 6, 12]))
def test_any_forest_of_small_trees(sequences: Sequences, side: str, with_trailing: bool, tokens: int) -> None:
    ids, mask = padded(sequences, side, extra=2)
    packed = pack_trie(ids, mask, row_tokens=tokens, tree_tokens=tokens, multiple=1, with_trailing=with_trailing)
    if not with_trailing:
        check(packed, sequences, ids, mask, cut=True)
    assert packed.input_ids.shape[1] <= max(tokens, ids.shape[1])


def test_padding_on_both_sides_and_between() -> None:
    """GRPO pads prompts on the left and completions on the right; a conversation may have holes."""
    ids = torch.tensor([[9, 1, 2, 3, 9], [1, 2, 9, 4, 9], [9, 1, 9, 2, 5]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 1, 0], [0, 1, 0, 1, 1]])
    check(pack_trie(ids, mask), [[1, 2, 3], [1, 2, 4], [1, 2, 5]], ids, mask)


@settings(max_examples=50, deadline=None)
@given(forests(), st.sampled_from(["left", "right"]), st.integers(0, 3), st.sampled_from([None, 6]))
def test_trailing_padding(sequences: Sequences, side: str, extra: int, row_tokens: int | None) -> None:
    """Padding after a sequence sees the sequence, no other token sees padding, and the rest is unchanged."""
    ids, mask = padded(sequences, side, extra, token=3)
    packed = pack_trie(ids, mask, multiple=4, row_tokens=row_tokens, with_trailing=True)
    width = ids.shape[1]
    behind = [width if side == "left" and sequence else len(sequence) for sequence in sequences]
    n_trailing = sum(width - n for n in behind)
    assert packed.trailing == max(width - n for n in behind)
    assert packed.tokens == sum(map(len, sequences)) + n_trailing and packed.nodes == n_prefixes(sequences) + n_trailing
    length = packed.input_ids.shape[1]
    flat_ids, depth = packed.input_ids.flatten(), packed.position_ids.flatten()
    for b, sequence in enumerate(sequences):
        nodes = packed.node[b][mask[b].bool()].tolist()
        for column in range(behind[b], width):
            node = int(packed.node[b, column])
            assert seen_by(packed, node) == (nodes or [node])
            assert flat_ids[node] == 3 and depth[node] == len(sequence) + column - behind[b]
        for t, node in enumerate(nodes):
            assert seen_by(packed, node) == nodes[: t + 1] and flat_ids[node] == sequence[t]
    assert length % 4 == 0


def test_all_padding() -> None:
    packed = pack_trie(torch.ones(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long), multiple=8)
    assert packed.nodes == packed.tokens == 0 and packed.input_ids.shape == (1, 8)
    assert (packed.node == -1).all()


_WAITS = ("tolist", "item", "nonzero", "__bool__", "__int__", "masked_select", "unique")


def test_the_host_waits_once() -> None:
    """One tensor goes to the host, and one comes back."""
    copies = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            if name in _WAITS or name in ("cpu", "to", "copy_"):
                copies.append((name, args[0].dtype))
            return function(*args, **(kwargs or {}))

    ids = torch.randint(3, (8, 20))
    with Watch():
        pack_trie(ids, torch.ones_like(ids, dtype=torch.bool), row_tokens=30)
    assert copies == [("copy_", torch.uint8), ("to", torch.int32)]


IDS = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((IDS[0],), "input_ids must have shape"),
        ((IDS, torch.ones(2, 1, 3, 3)), r"attention_mask must have shape \(2, 3\)"),
        # No vocabulary has such tokens, but they must not become others.
        ((IDS + 2**32 * (IDS.cumsum(1) == 1),), "input_ids must be of 32 bits"),
    ],
)
def test_refusals(given: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_trie(*given)


# The gather.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gather_and_its_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    index = torch.randint(-1, 5, (6, 7))
    rows = torch.randn(8, 3, dtype=dtype, requires_grad=True)
    result = gather_rows(rows, index)
    wide = rows.detach().double().requires_grad_()
    expected = torch.where(index[..., None] < 0, 0.0, wide[index.clamp(min=0)])
    assert torch.equal(result.double(), expected)
    upstream = torch.randn_like(result)
    upstream[index < 0] = torch.nan if dtype == torch.float64 else 1.0  # must not reach a row
    (got,) = torch.autograd.grad(result, rows, upstream, retain_graph=True)
    (want,) = torch.autograd.grad(expected, wide, upstream.double().masked_fill((index < 0)[..., None], 0))
    exact = want if dtype == torch.float64 else want.float().to(dtype).double()
    torch.testing.assert_close(got.double(), exact, rtol={torch.bfloat16: 4e-3}.get(dtype, 1e-6), atol=1e-6)
    monkeypatch.setattr(trie, "_CHUNK", 6)  # two rows at a time
    assert torch.equal(torch.autograd.grad(result, rows, upstream)[0], got)


def test_many_small_gradients_are_not_lost_in_bfloat16() -> None:
    rows = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(1025, dtype=torch.long)
    upstream = torch.full((1025, 1), 2.0**-9, dtype=torch.bfloat16)
    upstream[0] = 1.0
    gather_rows(rows, index).backward(upstream)
    assert rows.grad is not None and rows.grad.item() == 3.0  # 1 + 2 ** -9 is 1 in bfloat16
