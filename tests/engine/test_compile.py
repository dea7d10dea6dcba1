"""Losses that compiled code calls: operators of its graph, whose results are those of eager code."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import table
import torch
from fresh_process import FreshProcesses
from table import ROWS, SMALL, Batch, evaluate, moved, pairs, tokens
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import liger_chunked as lc
from liger_chunked import whole_graph
from liger_chunked.calls import entry_point
from liger_chunked.losses.base import FusedLoss, SequenceLoss, StatsLoss

pytestmark = [
    pytest.mark.ordinary_memory,  # the compiler allocates memory that must not be filled with NaN
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),  # raised on import
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),  # by Dynamo
]


def whole(function: Callable, backend: str = "aot_eager", **options) -> Callable:
    """Compile a function of one that is called, as models call losses, without breaks of its graph."""
    return torch.compile(lambda *args, **kwargs: function(*args, **kwargs), backend=backend, fullgraph=True, **options)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def flat(returned: object) -> list[object]:
    """Return tensors and absent fields, in order."""
    return [x for part in returned for x in flat(part)] if isinstance(returned, tuple) else [returned]


def checked(eager: Callable, seen: list) -> Callable:
    """Compile `eager`, and check its results and which of them require gradients. Appends losses to `seen`."""
    compiled = whole(eager)

    def run(*args, **kwargs):
        if torch.compiler.is_compiling() or seen[-1:] == [None]:  # a loss calls another one
            return eager(*args, **kwargs)
        seen.append(None)
        try:
            return compared(*args, **kwargs)
        finally:
            seen[-1] = args

    def compared(*args, **kwargs):
        returned, expected = compiled(*args, **kwargs), eager(*args, **kwargs)
        assert type(returned) is type(expected)
        for ours, exact in zip(flat(returned), flat(expected), strict=True):
            assert (ours is None) == (exact is None)
            if ours is not None and exact is not None:
                torch.testing.assert_close(ours.detach(), exact.detach(), rtol=1e-12, atol=0)
                assert ours.requires_grad == exact.requires_grad
        return returned

    return run


# The computation inside a loss is eager. A compiled caller sees only its class and its arguments.
CALLS = {(row.id.split("-")[0], row.fused, *row.sample(SMALL, 0)): row for row in reversed(ROWS)}


@pytest.mark.few(1)
@pytest.mark.parametrize("row", CALLS.values(), ids=repr)
def test_as_eager(row, device, monkeypatch):
    batch = moved(row.sample(SMALL, seed=0), device=device)
    exact = evaluate(row.ours, batch, upstream=0.7)
    seen: list = []
    bases = [
        loss
        for base in (FusedLoss, StatsLoss, SequenceLoss)
        for loss in base.__subclasses__()
        if "forward" in vars(loss)
    ]
    for loss in bases:
        monkeypatch.setattr(loss, "forward", checked(loss.forward, seen))
    monkeypatch.setattr(table, "linear_token_stats", checked(lc.linear_token_stats, seen))
    ours = evaluate(row.ours, batch, upstream=0.7)
    assert seen
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-15, msg=name)


# Recompilations


class Tiny(nn.Module):
    """A small model that ends in a loss: embedding, MLP, and the embedding as the head."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.loss = loss

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.mlp(self.embedding(tokens[:, :-1]))
        returned = self.loss(self.embedding.weight, hidden, tokens[:, 1:])
        return (returned[0] if isinstance(returned, tuple) else returned).mean()


class Entropy(nn.Module):
    """A user-defined loss that calls `linear_token_stats`."""

    def forward(self, weight: Tensor, input: Tensor, target: Tensor) -> Tensor:
        stats = lc.linear_token_stats(weight, input, target, outputs=("entropy", "logps", "argmax"), temperature=0.7)
        return stats.logps.square() - stats.entropy * (stats.argmax != target)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], batch: Tensor) -> list[Tensor]:
    value = call(batch)
    return [value.detach(), *torch.autograd.grad(value, list(model.parameters()))]


LOSSES = {
    "ce": lc.LigerFusedLinearCrossEntropyLoss,
    "ce-none-smoothing": partial(lc.LigerFusedLinearCrossEntropyLoss, reduction="none", label_smoothing=0.1),
    "dpo": partial(lc.LigerFusedLinearDPOLoss, use_ref_model=False),
    "stats": Entropy,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [pytest.param(x, id=k, marks=() if k in ("ce", "stats") else pytest.mark.exhaustive) for k, x in LOSSES.items()],
)
def test_new_lengths_do_not_recompile(loss):
    torch.manual_seed(0)
    model, counter = Tiny(loss()), CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(model, backend=counter), []
    for shape in ((2, 5), (2, 9), (4, 12), (6, 7), (8, 3), (10, 4)):
        batch = torch.randint(31, shape)
        for ours, exact in zip(gradients(model, compiled, batch), gradients(model, model, batch), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-7)
        graphs.append(counter.frame_count)
    assert graphs[2] == graphs[-1] <= 3 * graphs[0]


def test_export_is_refused():
    class Exported(nn.Module):
        def forward(self, weight: Tensor, input: Tensor, target: Tensor) -> Tensor:
            return lc.LigerFusedLinearCrossEntropyLoss()(weight, input, target)

    batch = tokens(SMALL, seed=0)
    given = (batch["weight"], batch["input"], batch["target"])
    with pytest.raises(RuntimeError, match=r"torch\.export cannot trace a fused loss"):
        torch.export.export(Exported(), given, strict=False)


def test_a_graph_cannot_build_a_loss():
    batch = tokens(SMALL, seed=0)

    def call() -> Tensor:
        return lc.LigerFusedLinearCrossEntropyLoss()(**batch)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="build a loss once, before compiled code calls it"):
        torch.compile(call, backend="eager", fullgraph=True)()
    assert torch.equal(torch.compile(call, backend="eager")(), call())


def test_no_graph_holds_kept_ids():
    batch = tokens(SMALL, seed=0)
    kept = lc.KeptIds.from_lists([[int(y)] if y >= 0 else [] for y in batch["target"].flatten()])
    call = torch.compile(lambda: lc.linear_token_stats(**batch, kept=kept), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an argument that no graph holds"):
        call()


def equal(eager: Callable[[Batch], object], batch: Batch, backend: str = "aot_eager") -> None:
    """Check a compiled function of a batch: its results, which of them require gradients, and the gradients."""

    def evaluated(call: Callable[[Batch], object]) -> list[object]:
        leaves = {name: batch[name].detach().clone().requires_grad_() for name in ("weight", "input", "bias")}
        results = [x for x in flat(call(batch | leaves)) if isinstance(x, Tensor)]
        total = sum(x.double().sum() for x in results if x.requires_grad)
        gradients = torch.autograd.grad(total, list(leaves.values())) if isinstance(total, Tensor) else ()
        return [*((x.detach(), x.requires_grad) for x in results), *((g, None) for g in gradients)]

    for (ours, requires_grad), (exact, expected) in zip(
        evaluated(whole(eager, backend)), evaluated(eager), strict=True
    ):
        assert torch.equal(ours, exact) and ours.dtype == exact.dtype
        assert requires_grad == expected


@pytest.mark.parametrize("name", ["ref_weight", "teacher_weight"])
def test_a_trainable_head_of_another_model(name):
    loss, sample = {
        "ref_weight": (lc.LigerFusedLinearDPOLoss(), pairs),
        "teacher_weight": (lc.LigerFusedLinearKLDivLoss(), table.students),
    }[name]
    batch = sample(SMALL, seed=0)
    head = batch.pop(name).requires_grad_()
    equal(lambda batch: loss(**batch, **{name: head}), batch)
    with pytest.raises(Exception, match=f"treats {name} as a constant, but it requires a gradient"):
        whole(lambda batch: loss(**batch, **{name: 2 * head}))(batch)


def test_a_changing_setting_compiles_anew():
    """A number of items is none: it becomes dynamic."""
    batch = tokens(SMALL, seed=0)

    def smoothed(batch: Batch, loss: nn.Module, num_items: int) -> Tensor:
        target = batch["target"].where(batch["target"] >= 0, loss.options.ignore_index)
        return loss(**batch | {"target": target, "num_items": num_items})

    compiled = whole(smoothed)
    settings = ((0.1, -100, 37), (0.2, -100, 37), (0.3, -1, 37), (0.4, -2, 41), (0.1, -3, 43), (0.1, -3, 47))
    for smoothing, ignore_index, num_items in settings:
        loss = lc.LigerFusedLinearCrossEntropyLoss(label_smoothing=smoothing, ignore_index=ignore_index)
        assert torch.equal(compiled(batch, loss, num_items), smoothed(batch, loss, num_items))


class Branching(lc.LigerFusedLinearPreferenceBase):
    """A loss that reads values, holds tensors that are no arguments, and counts its calls."""

    scope = "batch"

    def __init__(self) -> None:
        super().__init__(compute_nll_loss=False)
        self.slope = nn.Parameter(torch.tensor(1.5, dtype=torch.float64), requires_grad=False)
        self.linear = nn.Linear(1, 1, bias=False).double().requires_grad_(False)
        self.plain = torch.tensor(0.5, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.calls = 0

    def preference_loss(self, pairs: lc.Pairs) -> Tensor:
        self.count += 1
        self.calls += 1
        margin = self.linear((pairs.logps[:, 0] - pairs.logps[:, 1])[:, None])[:, 0]
        if bool(margin.median() > 0):  # not traceable
            margin = 2 * margin
        return torch.relu(1 - self.slope * margin) * self.plain


def test_a_formula_may_branch_on_values_and_hold_tensors():
    loss, batch = Branching(), pairs(SMALL, seed=0)
    equal(lambda batch: loss(**batch), batch)
    assert loss.count.item() == loss.calls == 2  # each evaluation once, and no trace


@pytest.mark.parametrize("trainable", [("weight",), ()])
def test_a_gradient_that_a_graph_cannot_pass_on_is_refused(trainable):
    """Autograd does not see the leaves of a formula, because they are no arguments of the operator."""
    factor, batch = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), pairs(SMALL, seed=0)
    for name in trainable:
        batch[name].requires_grad_()
    loss = lc.LigerFusedLinearDPOLoss(loss_type=lambda pairs: factor * (pairs.logps[:, 1] - pairs.logps[:, 0]))
    compiled = whole(lambda batch: loss(**batch)[0])
    with pytest.raises(ValueError, match="depends on a tensor that requires a gradient"):
        compiled(batch)
    with torch.no_grad():
        assert torch.equal(compiled(batch), loss(**batch)[0])


def test_a_parameter_breaks_the_graph_of_its_loss_alone():
    loss, batch = Branching(), pairs(SMALL, seed=0)
    loss.slope.requires_grad_()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a loss with parameters"):
        whole(loss)(**batch)
    torch.compiler.reset()
    compiled = torch.compile(lambda batch: loss(**batch)[0], backend="aot_eager")
    gradients = [torch.autograd.grad(call(batch), loss.slope)[0] for call in (compiled, lambda batch: loss(**batch)[0])]
    assert torch.equal(*gradients)
    loss.slope.requires_grad_(False)
    equal(lambda batch: loss(**batch), batch)  # inside a graph again
    equal(lambda batch: LOSS_BUILT_BEFORE(**batch), batch)
    assert torch.equal(torch.compile(LOSS_BUILT_BEFORE, backend="aot_eager")(**batch)[0], LOSS_BUILT_BEFORE(**batch)[0])


LOSS_BUILT_BEFORE = lc.LigerFusedLinearDPOLoss(beta=0.3)


def test_a_loss_in_the_place_of_a_deleted_one():
    batch, holder = tokens(SMALL, seed=0), {}
    compiled = whole(lambda batch: holder["loss"](**batch))
    for i in range(5):
        holder.clear()
        gc.collect()
        holder["loss"] = lc.LigerFusedLinearCrossEntropyLoss(label_smoothing=i / 10, reduction=("mean", "none")[i % 2])
        assert torch.equal(compiled(batch), holder["loss"](**batch))


def test_a_loss_that_no_longer_exists():
    batch, losses = tokens(SMALL, seed=0), [lc.LigerFusedLinearCrossEntropyLoss(reduction="none")]
    batch["weight"].requires_grad_()
    value = whole(lambda loss, batch: loss(**batch))(losses[0], batch).sum()
    losses.clear()
    torch.compiler.reset()
    gc.collect()
    with pytest.raises(RuntimeError, match="the loss of this compiled graph no longer exists"):
        value.backward()


# State that a graph does not contain


@pytest.mark.few(1)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_loss_of_its_own(copied):
    batch = tokens(SMALL, seed=0)
    loss = lc.LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(SMALL.vocab))
    other = copied(loss)
    other.ce_weight = torch.linspace(0, 1, SMALL.vocab)
    assert torch.equal(whole(loss)(**batch), loss(**batch))
    assert torch.equal(whole(other)(**batch), other(**batch))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype):
    batch, loss = moved(tokens(SMALL, seed=0), torch.float32), lc.LigerFusedLinearCrossEntropyLoss()

    def ours(call: Callable[..., Tensor], batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype):
            return call(**batch)

    exact = evaluate(partial(ours, loss), batch)
    compiled = evaluate(partial(ours, whole(loss)), batch)
    full = evaluate(lambda batch: loss(**batch), batch)
    for name, value in exact.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-6, atol=1e-8)
        assert not torch.equal(value, full[name])


def test_backward_twice():
    batch = pairs(SMALL, seed=0)
    leaves = [batch[name].requires_grad_() for name in ("weight", "input", "bias")]
    loss, _ = whole(lc.LigerFusedLinearDPOLoss())(**batch)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0))
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice, rtol=1e-12, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_within_a_checkpoint(backend, reduction):
    """A checkpoint lets a backward read its saved tensors once."""
    loss, batch = lc.LigerFusedLinearCrossEntropyLoss(reduction=reduction), tokens(SMALL, seed=0)
    exact = evaluate(lambda batch: loss(**batch).sum(), batch)
    compiled = torch.compile(lambda batch: loss(**batch).sum(), backend=backend)

    def region(batch: Batch) -> Tensor:
        return checkpoint(lambda x: compiled({**batch, "input": x}), batch["input"], use_reentrant=False)

    ours = evaluate(region, batch)
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-15, msg=name)


# Names of calls, by which a graph finds its loss

NAMES = """
import torch

import liger_chunked as lc
from liger_chunked import whole_graph

def loss(cls, **settings):
    return cls(**settings), (torch.zeros(5, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))

ce, data = loss(lc.LigerFusedLinearCrossEntropyLoss, label_smoothing=0.1)
dpo, _ = loss(lc.LigerFusedLinearDPOLoss, use_ref_model=False)
grpo, _ = loss(lc.LigerFusedLinearGRPOLoss, beta=0.0)
on_policy, _ = loss(lc.LigerFusedLinearOnPolicyDistillationLoss, epsilon_low=0.2)
weight, input, target = data
teacher = {"teacher_logps": torch.zeros(2, 3), "target": target}
for call in (
    lambda: ce(*data),
    lambda: dpo(*data),
    lambda: grpo(*data, torch.ones(2)),
    lambda: on_policy(weight, input, **teacher),
):
    torch.compile(call, backend="eager", fullgraph=True)()
print(*whole_graph._calls, sep="\\n")
"""


def test_calls_have_the_same_names_in_another_process(fresh_process: FreshProcesses):
    """A compiled graph contains the names, so the compiler's cache on disk serves no graph whose names differ."""
    first, second = (fresh_process.run(NAMES).split() for _ in range(2))
    assert first == second and len(first) == 4


@pytest.mark.parametrize(
    "settings",
    [{"kl_coef": 0.5}, {"epsilon_low": 0.2}, {"epsilon_high": 0.2}, {"prefix_weight": 0.5}, {"surrogate": "truncate"}],
    ids=lambda settings: next(iter(settings)),
)
def test_names_of_calls_tell_settings_apart(settings):
    """Those of a policy loss inside a loss too: they say which metrics there are."""
    losses = [lc.LigerFusedLinearOnPolicyDistillationLoss(**x) for x in ({}, {}, settings)]
    described = [whole_graph._settings_of(loss) for loss in losses]
    assert described[0] == described[1] != described[2]


def test_calls_go_with_their_loss():
    before, batch = set(whole_graph._calls), tokens(SMALL, seed=0)
    for i in range(5):
        whole(lc.LigerFusedLinearCrossEntropyLoss(label_smoothing=i / 10))(**batch)
    torch.compiler.reset()
    gc.collect()
    assert set(whole_graph._calls) == before


def made_by_a_factory(factor: float) -> type:
    """Return a class of the same name for each call."""

    class Scaled(nn.Module):
        @entry_point
        def forward(self, weight: Tensor, input: Tensor) -> Tensor:
            return factor * (input @ weight.mT).sum()

    return Scaled


@pytest.mark.parametrize("fullgraph", [True, False])
def test_classes_of_one_name_are_told_apart(fullgraph):
    batch = tokens(SMALL, seed=0)
    given = batch["weight"], batch["input"]
    # A parameter that a module may train breaks the graph.
    losses = [made_by_a_factory(factor)() for factor in (1.0, -3.0)]
    for loss in losses:
        whole_graph.number(loss)
        if not fullgraph:
            loss.parameter = nn.Parameter(torch.zeros(()))
    for loss in losses:
        compiled = torch.compile(lambda *x, loss=loss: loss(*x), backend="aot_eager", fullgraph=fullgraph)
        torch.testing.assert_close(compiled(*given), loss(*given))
    assert torch.equal(losses[1](*given), -3 * losses[0](*given))
