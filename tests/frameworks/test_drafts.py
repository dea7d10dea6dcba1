"""Adapters of drafts' trainers beside these trainers' own losses, on whole logits.

Where a package is not installed, its formula stands in, and the interface alone was read: speculators 0.9.0,
`speculators/losses`, `models/eagle3/metrics.py`, `models/dflash/metrics.py` and `models/dspark/model_definitions.py`;
SpecForge 0.2.0, `specforge/core/loss.py` and `algorithms/eagle3/model.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import relative_error
from torch import Tensor

from liger_chunked import AdaptedWeight
from liger_chunked.integrations.frameworks.specforge import Eagle3Loss
from liger_chunked.integrations.frameworks.speculators import dflash_loss, eagle3_loss, in_slots

T, H, H_VERIFIER, V, V_DRAFT, STEPS = 12, 5, 7, 31, 11, 3
BOUND = 1e-6  # their losses are float32


def module_of(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a module of a package without the `__init__` of its parents, which need more packages. None: not there."""
    package, *parents, _ = name.split(".")
    if package not in sys.modules:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            return None
        stubbed(monkeypatch, package, Path(next(iter(found.submodule_search_locations))))
    for parent in parents:
        path = Path(sys.modules[package].__path__[0]) / parent
        package = f"{package}.{parent}"
        stubbed(monkeypatch, package, path)
    return importlib.import_module(name)


def stubbed(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    if name not in sys.modules:
        stub = ModuleType(name)
        stub.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, name, stub)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    value.backward()
    found = [x.grad for x in leaves if x.grad is not None]
    assert len(found) == len(leaves)
    for x in leaves:
        x.grad = None
    return [value.detach(), *found]


def assert_equal(ours: list[Tensor], theirs: list[Tensor], bound: float = BOUND) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert relative_error(x, y) < bound


def kl(z: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def tv(z: Tensor, t: Tensor) -> Tensor:
    return 1 - torch.minimum(z.softmax(-1), t.softmax(-1)).sum(-1)


def formula(loss_fn: str) -> Any:
    """Return speculators' divergence of logits (..., V_draft)."""

    def rkl(z: Tensor, t: Tensor) -> Tensor:
        return kl(t, z)

    def jsd(z: Tensor, t: Tensor) -> Tensor:
        p, q = t.softmax(-1), z.softmax(-1)
        m = (p + q) / 2
        return 0.5 * ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1))

    def nla(z: Tensor, t: Tensor) -> Tensor:
        return -(1 - tv(z, t)).log()

    return {"kl_div": kl, "rkl": rkl, "jsd": jsd, "tv": tv, "nla": nla}[loss_fn]


@pytest.mark.parametrize("loss_fn", ["kl_div", "rkl", "jsd", "tv", "nla"])
def test_eagle3_of_speculators(loss_fn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, verifier_head = randn(V_DRAFT, H).requires_grad_(), randn(V_DRAFT, H_VERIFIER, seed=1)
    hidden = randn(STEPS, 1, T, H, seed=2).requires_grad_()
    verifier_hidden, mask = randn(1, T, H_VERIFIER, seed=3), torch.arange(T)[None] > 2

    def stock() -> Tensor:
        metrics = module_of(monkeypatch, "speculators.models.eagle3.metrics")
        targets, total = verifier_hidden @ verifier_head.T, torch.zeros(())
        for k in range(STEPS):
            z = hidden[k] @ head.T
            if metrics is not None:
                losses = importlib.import_module("speculators.losses")
                config = losses.resolve_loss_config(loss_fn, "eager")
                value, _ = metrics.compute_metrics(z, targets, mask, mask.clone(), k, 0.7, config)
            else:  # interface only
                counts = mask[:, k:].float()
                values = formula(loss_fn)(z[:, : T - k], targets[:, k:])
                value = 0.7**k * (values * counts).sum() / counts.sum()
            total = total + value
        return total

    loss, metrics = eagle3_loss(list(hidden), head, verifier_hidden, verifier_head, mask, 0.7, loss_fn)
    # Its divisor is 1e-5 larger than the number of tokens.
    bound = BOUND + 1e-5 / int(mask[:, STEPS - 1 :].sum())
    assert_equal(gradients(loss, [head, hidden]), gradients(stock(), [head, hidden]), bound)
    assert metrics.step_losses.shape == (STEPS,)


@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_dflash_of_speculators(from_anchor: bool, markov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, size = 4, 4
    head, verifier_head = randn(V_DRAFT, H).requires_grad_(), randn(V_DRAFT, H_VERIFIER, seed=1)
    hidden = randn(1, blocks * size, H, seed=2).requires_grad_()
    verifier_hidden = randn(1, T, H_VERIFIER, seed=3)
    w1, w2 = randn(V, 3, seed=4).requires_grad_(), randn(V_DRAFT, 3, seed=5).requires_grad_()
    anchors = torch.tensor([1, 2, 5, 8])  # the first two blocks overlap
    indices = (anchors[:, None] + torch.arange(size)).view(-1)
    previous = (3 * indices) % V
    target_indices = indices if from_anchor else indices - 1
    mask = (torch.arange(blocks * size)[None] % 5 != 4).float()
    if not from_anchor:
        mask[:, ::size] = 0

    def stock() -> Tensor:
        metrics = module_of(monkeypatch, "speculators.models.dflash.metrics")
        z, t = hidden @ head.T, (verifier_hidden @ verifier_head.T)[:, target_indices]
        if markov:
            z = z + w1[previous] @ w2.T
        if metrics is not None:
            losses = importlib.import_module("speculators.losses")
            config = losses.resolve_loss_config("tv", "eager")
            loss, found = metrics.compute_metrics(z, t, mask, size, 3.0, config, sample_from_anchor=from_anchor)
            accuracy.append(found["full_acc_sum"] / found["full_acc_total"])
            return loss
        slot = torch.arange(blocks * size) % size  # interface only
        decay = torch.exp(-slot / 3.0) if from_anchor else torch.exp(-(slot - 1) / 3.0)
        accuracy.append((z.argmax(-1) == t.argmax(-1))[mask > 0].float().mean())
        return (tv(z, t) * mask * decay).sum() / (mask.sum() + 1e-5)

    accuracy: list[Tensor] = []
    leaves = [head, hidden, w1, w2] if markov else [head, hidden]
    weight: Any = head
    if markov:
        slots = in_slots(previous, size, 0 if from_anchor else 1)
        weight = AdaptedWeight(head, up=w2, down=lambda _: w1[slots])
    given = verifier_hidden, verifier_head, target_indices, mask, size, 3.0, from_anchor, "tv"
    loss, metrics = dflash_loss(hidden, weight, *given)
    assert_equal(gradients(loss, leaves), gradients(stock(), leaves))
    rows = in_slots(mask[0], size, 0 if from_anchor else 1).sum(1)
    assert relative_error((metrics.top1_agreement * rows).sum() / rows.sum(), accuracy[0]) < BOUND


@pytest.mark.parametrize("loss_fn", ["ce", "lk_hybrid"])
def test_losses_of_speculators_that_are_not_served(loss_fn: str) -> None:
    with pytest.raises(ValueError, match=f"loss_fn must be one of .* got '{loss_fn}'"):
        eagle3_loss([randn(1, T, H)], randn(V_DRAFT, H), randn(1, T, 4), randn(V_DRAFT, 4), loss_fn=loss_fn)


def test_eagle3_of_specforge(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = 2
    head, target_head = randn(V_DRAFT, H).requires_grad_(), randn(V, H_VERIFIER, seed=1)
    hidden = randn(STEPS, batch, T, H, seed=2).requires_grad_()
    target_hidden = randn(batch, T, H_VERIFIER, seed=3)
    loss_mask = (torch.arange(T).expand(batch, T) > 2).float()[..., None]
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[3 * torch.arange(V_DRAFT)] = True

    core = module_of(monkeypatch, "specforge.core.loss")
    teacher = module_of(monkeypatch, "specforge.core.compact_teacher")
    if teacher is not None:
        target_p, _, ids, position_mask = teacher.compute_target_from_hidden(target_hidden, target_head, t2d, loss_mask)
    else:  # interface only
        t = target_hidden @ target_head.T
        target_p, ids = t[..., t2d].softmax(-1), t.argmax(-1)
        position_mask = t2d[ids][..., None] * loss_mask
    losses, entropies, accuracies = [], [], []
    for k in range(STEPS):
        z = hidden[k] @ head.T
        p = F.pad(target_p, (0, 0, 0, k), value=1 / V_DRAFT)[:, k:]
        mask, counts, of_step = (F.pad(x, (0, 0, 0, k))[:, k:] for x in (position_mask, loss_mask, ids[..., None]))
        if core is not None:
            with torch.compiler.set_stance("force_eager"):
                losses.append(0.8**k * core._compute_loss(z, p, mask))
        else:
            losses.append(-(0.8**k) * (mask * p * z.log_softmax(-1)).sum(-1).mean())
        # Its cross entropy has the entropy of `target_p` too, which is no part of the divergence.
        entropies.append(-(0.8**k) * (mask * p * p.log()).sum(-1).mean())
        right = (t2d.nonzero()[:, 0][z.argmax(-1)] == of_step[..., 0]) * counts[..., 0]
        accuracies.append(right.sum() / counts.sum())
    theirs = gradients(sum(losses, torch.zeros(())), [head, hidden])
    theirs[0] = theirs[0] - sum(entropies)
    loss, metrics = Eagle3Loss(t2d)(list(hidden), head, target_hidden, target_head, loss_mask)
    assert_equal(gradients(loss, [head, hidden]), theirs)
    assert relative_error(metrics.top1_agreement, torch.stack(accuracies)) < BOUND


def test_a_table_that_does_not_fit_specforge() -> None:
    with pytest.raises(ValueError, match=r"t2d must be \(V,\) bool, got \(3,\) torch.int64"):
        Eagle3Loss(torch.arange(3))
