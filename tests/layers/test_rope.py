"""Test rotary embedding: layouts, transformers' models, and rotation in place."""

from __future__ import annotations

import pytest
import torch
from base_ops import (
    dynamo_warns,
    eager_rope,
    our_rope,
    rotation,
    run,
    transformers_object,
    upstream,
)
from torch import Tensor

import liger_chunked as lc


@pytest.mark.triton
@pytest.mark.parametrize("by_token", [False, True])
def test_rope_keeps_the_layout(by_token: bool, device: str) -> None:
    def heads(n: int, by_token: bool) -> Tensor:
        shape = (2, 5, n, 8) if by_token else (2, n, 5, 8)
        x = torch.randn(shape, device=device)
        return x.transpose(1, 2) if by_token else x

    inputs = [heads(n, by_token).requires_grad_() for n in (4, 2)]
    outputs = our_rope(*inputs)
    # Attention may return gradients in another layout.
    gradients = torch.autograd.grad(outputs, inputs, [heads(n, not by_token) for n in (4, 2)])
    for x, y, gradient in zip(inputs, outputs, gradients, strict=True):
        assert x.stride() == y.stride() == gradient.stride()


@pytest.mark.triton
def test_rope_of_few_columns_of_a_wide_head(device: str) -> None:
    """The columns that pass limit the size of a tile, because they take most of the registers."""
    heads = torch.randn(1, 2, 3, 1024, device=device)
    ours, eager = (op(heads, heads, share=2 / 1024)[0] for op in (our_rope, eager_rope))
    torch.testing.assert_close(ours, eager)


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize(("model", "share"), [("llama", 1.0), ("phi3", 0.75), ("glm4", 0.5), ("olmo2", 1.0)])
def test_rotary_embedding_of_transformers(model: str, share: float, device: str) -> None:
    theirs = transformers_object(f"{model}.apply_rotary_pos_emb")
    # The layout of attention: views of projections, with heads after tokens in memory.
    q, k = (torch.randn(2, 5, heads, 32, device=device).transpose(1, 2) for heads in (6, 2))
    cos, sin = (x.expand(2, -1, -1) for x in rotation(5, int(32 * share), q))
    ours = lc.liger_rotary_pos_emb(q, k, cos, sin, interleaved=model == "glm4")
    for value, same, x in zip(ours, theirs(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(value, same)
        assert value.stride() == x.stride()


def test_rotary_embedding_by_position_ids() -> None:
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    cos, sin = (x[0] for x in rotation(9, 16, q))
    ids = torch.tensor([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]])
    by_ids = lc.liger_rotary_pos_emb(q, k, cos, sin, ids)
    gathered = lc.liger_rotary_pos_emb(q, k, cos[ids], sin[ids])
    assert all(torch.equal(a, b) for a, b in zip(by_ids, gathered, strict=True))


def test_rotary_embedding_keeps_the_dtype_under_float32_angles() -> None:
    q, k = torch.randn(1, 2, 5, 16).bfloat16(), torch.randn(1, 2, 5, 16).bfloat16()
    cos, sin = rotation(5, 16, q.float())
    value, _ = lc.liger_rotary_pos_emb(q, k, cos, sin)
    same, _ = transformers_object("olmo2.apply_rotary_pos_emb")(q, k, cos, sin)
    assert value.dtype == torch.bfloat16
    assert torch.equal(value, same)


def projections(x: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return four query heads and two key heads of size 8: views, as in attention, or not."""
    if kind == "packed":
        qkv = x @ weight
        q, k = qkv[..., :32], qkv[..., 32:]
    elif kind == "split":
        q, k = (x @ weight).split([32, 16], dim=-1)
    else:
        q, k = x @ weight[:, :32], x @ weight[:, 32:]
    q, k = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k))
    return (q.clone(), k.clone()) if kind == "no view" else (q, k)


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize(("share", "interleaved"), [(1.0, False), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("kind", ["no view", "of one each", "packed"])
def test_rotary_embedding_in_place(kind: str, share: float, interleaved: bool, device: str) -> None:
    x, weight = torch.randn(2, 5, 6, device=device), torch.randn(6, 48, device=device, requires_grad=True)
    cos, sin = rotation(5, int(8 * share), x)
    found = []
    for inplace in (False, True):
        q, k = projections(x, weight, kind)
        versions = q._version, k._version
        rotated = lc.liger_rotary_pos_emb(q, k, cos, sin, interleaved=interleaved, inplace=inplace)
        for before, after, version in zip((q, k), rotated, versions, strict=True):
            assert (after.data_ptr() == before.data_ptr()) == inplace == (before._version > version)
            assert not inplace or torch.equal(before, after)
        upstreams = upstream(rotated)
        copies = [g.clone() for g in upstreams]
        found.append([*rotated, *torch.autograd.grad(rotated, weight, upstreams)])
        assert all(torch.equal(g, copy) for g, copy in zip(upstreams, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.triton
def test_rotary_embedding_in_place_without_gradient(device: str) -> None:
    x, weight = torch.randn(2, 5, 6, device=device), torch.randn(6, 48, device=device, requires_grad=True)
    with torch.no_grad():
        q, k = projections(x, weight, "split")
        expected = our_rope(q, k)
        rotated = lc.liger_rotary_pos_emb(q, k, *rotation(5, 8, x), inplace=True)
    for y, before, same in zip(rotated, (q, k), expected, strict=True):
        assert torch.equal(y, same) and torch.equal(before, same) and not y.requires_grad


def test_rotary_embedding_in_place_refuses_before_it_writes() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    angles = rotation(3, 8, q)
    parameter = torch.randn(1, 2, 3, 8, requires_grad=True)
    split = projections(torch.randn(1, 3, 6, requires_grad=True), torch.randn(6, 48), "split")
    for kind, message, given in (
        (ValueError, "q is a leaf that requires a gradient", (parameter, k)),
        (ValueError, "k is a leaf that requires a gradient, or a view", (q, parameter[:, :1])),
        (ValueError, "q must have memory of its own for each element", (q[:, :1].expand(1, 4, 3, 8), k)),
        (ValueError, "k must have memory of its own for each element", (q, torch.randn(1, 1, 8, 3).mT)),
        (RuntimeError, "function that returns multiple views", split),
    ):
        copies = [x.detach().clone() for x in given]
        with pytest.raises(kind, match=message):
            lc.liger_rotary_pos_emb(*given, *angles, inplace=True)
        assert all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))


@pytest.mark.few(1)
@dynamo_warns
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("kind", ["no view", "of one each", "packed"])
def test_compile_rotary_embedding_in_place(kind: str, with_gradient: bool, device: str) -> None:
    torch.compiler.reset()
    x, weight = torch.randn(2, 5, 6, device=device), torch.randn(6, 48, device=device, requires_grad=with_gradient)
    cos, sin = rotation(5, 8, x)

    def attention(weight: Tensor) -> tuple[Tensor, ...]:
        q, k = projections(x, weight, kind)
        rotated = lc.liger_rotary_pos_emb(q, k, cos, sin, inplace=True)
        return *rotated, q * 1, k * 1  # q and k now hold the results

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    found = run(compiled, [weight]) if with_gradient else compiled(weight)
    expected = run(attention, [weight]) if with_gradient else attention(weight)
    for value, same in zip(found, expected, strict=True):
        torch.testing.assert_close(value, same)
