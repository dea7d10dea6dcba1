"""Every loss inside hooks, checkpoints, second derivatives, copies and threads: the result is right, or the error says
why.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import table
import torch
import torch.nn.functional as F
from sampling import on_paths
from spies import Memory
from table import ROWS, SMALL, Batch, Row, Sizes, evaluate, leaves_of, moved, rows, tokens
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import liger_chunked as lc
from liger_chunked.engine import sink, source
from liger_chunked.engine.kept import _KeptRule
from liger_chunked.engine.stats import _StatisticsRule
from liger_chunked.engine.step import Step

by_path = pytest.mark.parametrize("row", on_paths())
by_path_of_products = pytest.mark.parametrize("row", on_paths(row for row in ROWS if row.products))
some_rows = pytest.mark.parametrize(
    "row",
    rows("ce", "ce-none", "dpo-sigmoid", "grpo-kl", "kto", "jsd", "squared-error", "kl-top-k", "stats-all"),
    ids=repr,
)
SEVERAL_CHUNKS = 8 * 9 * SMALL.vocab  # a budget of nine tokens in float64
CHANGED = "modified by an inplace operation"
REFUSED = "second derivatives .* are not supported"


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def assert_close(grads: Iterable[Tensor], leaves: Batch, expected: dict[str, Tensor], of: str = "") -> None:
    """Compare gradients by the leaves with the expected ones by name."""
    # float64: elements that cancel to near 0 keep the absolute error of their sums.
    for name, gradient in zip(leaves, grads, strict=True):
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14, msg=f"{of} {name}")


def twice(value: Tensor, leaves: Batch) -> Iterator[tuple[Tensor, ...]]:
    """Yield the gradients of two backward passes."""
    for _ in range(2):
        yield torch.autograd.grad(value, list(leaves.values()), retain_graph=True)


# Hooks on saved tensors


class Hooks:
    """Hooks that return copies and count calls; `inside` is true while a step runs."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0
        self.inside = False

    def pack(self, x: Tensor) -> Tensor:
        assert not self.inside, "an inner graph reaches the hook"
        self.packed.append(x.detach())
        return x.detach().clone()

    def unpack(self, x: Tensor) -> Tensor:
        assert not self.inside, "an inner graph reaches the hook"
        self.unpacked += 1
        return x

    def __call__(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    hooks = Hooks()

    def marked(run: Callable[..., Any]) -> Callable[..., Any]:
        def marking(*args: Any, **kwargs: Any) -> Any:
            hooks.inside = True
            try:
                return run(*args, **kwargs)
            finally:
                hooks.inside = False

        return marking

    monkeypatch.setattr(Step, "run", marked(Step.run))
    for rule in (_StatisticsRule, _KeptRule):
        monkeypatch.setattr(rule, "forward", marked(rule.forward))
    return hooks


@pytest.mark.few(1)
@by_path
def test_hooks(row: Row, hooks: Hooks) -> None:
    batch = row.sample(SMALL, seed=0)
    leaves = leaves_of(batch)
    call = partial(row.ours, logits_budget=SEVERAL_CHUNKS)
    expected = evaluate(call, batch)
    with hooks():
        loss = call({**batch, **leaves})
    grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    assert_equal({"loss": loss.detach(), **dict(zip(leaves, grads, strict=True))}, expected)
    assert hooks.packed
    if row.fused:
        # The first backward unpacks nothing, so an offloader does not load the head.
        assert hooks.unpacked == 0
    # The second backward does not read the caller's tensors either: the statistics read the hooks' copies.
    for x in (*batch.values(), *(leaf.detach() for leaf in leaves.values())):
        x.zero_()
    again = torch.autograd.grad(loss, list(leaves.values()))
    assert bool(hooks.unpacked) != row.fused
    assert_close(again, leaves, expected)


@pytest.mark.few(2)
@some_rows
@pytest.mark.parametrize(
    "context",
    [save_on_cpu, lambda: disable_saved_tensors_hooks("no hooks here")],
    ids=["save_on_cpu", "disabled"],
)
def test_contexts_of_torch(row: Row, context: Callable[[], AbstractContextManager]) -> None:
    batch = row.sample(SMALL, seed=0)
    expected = evaluate(partial(row.ours, logits_budget=SEVERAL_CHUNKS), batch)
    with context():
        assert_equal(evaluate(partial(row.ours, logits_budget=SEVERAL_CHUNKS), batch), expected)


@pytest.mark.few(1)
@pytest.mark.sampled
@pytest.mark.ordinary_memory
@by_path
@pytest.mark.parametrize("around", [nullcontext, lambda: Hooks()()], ids=["no-hooks", "hooks"])
def test_a_step_leaves_nothing_to_the_garbage_collector(row: Row, around: Callable[[], AbstractContextManager]) -> None:
    batch = row.sample(SMALL, seed=0)
    leaves = leaves_of(batch)
    memory, alive = Memory(), []
    gc.disable()
    try:
        with memory:
            for _ in range(2):
                with around():
                    loss = row.ours({**batch, **leaves})
                # The second backward runs the step again.
                for retain in (True, False):
                    torch.autograd.grad(loss, list(leaves.values()), retain_graph=retain)
                del loss
                alive.append(memory.alive)
    finally:
        gc.enable()
    assert alive[0] == alive[1]


# Interruptions


class Interrupted:
    """Raises an error in one of the matrix products of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products, self.fatal, self.error = 0, -1, KeyboardInterrupt
        monkeypatch.setattr(source.LogitsSource, "project", self.watched(source.LogitsSource.project))
        monkeypatch.setattr(sink, "accumulate", self.watched(sink.accumulate))

    def watched(self, product: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            result = product(*args, **kwargs)
            if self.products == self.fatal:
                raise self.error
            self.products += 1
            return result

        return watching

    def run(self, call: Callable[[], Any], fatal: int, error: type[BaseException]) -> None:
        self.products, self.fatal, self.error = 0, fatal, error
        try:
            with pytest.raises(error):
                call()
        finally:
            self.fatal = -1


@pytest.mark.few(1)
@pytest.mark.ordinary_memory
@pytest.mark.sampled
@by_path_of_products
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("tokens_in_budget", [9, 5], ids=["chunks", "slices"])
def test_a_step_after_an_interrupted_one(
    row: Row, error: type[BaseException], tokens_in_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails in its first, middle or last product. It leaves no tensor and no gradient behind."""
    sizes = SMALL if tokens_in_budget == 9 else SMALL._replace(vocab=2503)
    batch = row.sample(sizes, seed=0)
    call = partial(row.ours, logits_budget=8 * sizes.vocab * tokens_in_budget)
    interrupted = Interrupted(monkeypatch)
    expected = evaluate(call, batch)
    products = interrupted.products
    assert products > 3
    leaves, memory = leaves_of(batch), Memory()
    memory.expect(*batch.values(), *leaves.values())
    with memory:
        evaluate(call, batch)
    constants = memory.alive
    for fatal in (0, products // 2, products - 1):
        with memory:
            interrupted.run(lambda: call({**batch, **leaves}).backward(), fatal, error)
        gc.collect()
        assert memory.alive == constants
        assert all(leaf.grad is None for leaf in leaves.values())
        assert torch.is_grad_enabled()
        assert_equal(evaluate(call, batch), expected)


# Checkpoints


def surrounded(
    row: Row, batch: Batch, surround: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Return the loss and gradients of a body followed by the loss, and how often the body ran."""
    runs = 0

    def loss(batch: Batch) -> Tensor:
        def region(x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return row.ours({**batch, "input": torch.sin(x)}, logits_budget=SEVERAL_CHUNKS)

        return surround(region, batch["input"])

    return evaluate(loss, batch), runs


@pytest.mark.few(2)
@pytest.mark.sampled
@by_path
@pytest.mark.parametrize("kind", ["early-stop", "to-the-end", "reentrant"])
def test_checkpoint(row: Row, kind: str) -> None:
    """The body runs once forward and is recomputed once, regardless of the loss's number of chunks."""
    batch = row.sample(SMALL, seed=0)
    expected, _ = surrounded(row, batch, lambda region, x: region(x))
    with set_checkpoint_early_stop(kind == "early-stop"):
        ours, runs = surrounded(row, batch, partial(checkpoint, use_reentrant=kind == "reentrant"))
    assert runs == 2
    assert_equal(ours, expected)


@pytest.mark.few(3)
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("outputs", [("logps",), ("logps", "entropy")], ids="+".join)
@pytest.mark.parametrize("checkpointed", [True, False], ids=["checkpoint", "no-backward"])
def test_statistics_keep_no_logits(checkpointed: bool, outputs: tuple[str, ...]) -> None:
    batch = moved(tokens(Sizes(8, 8, 16, 1009, ignored=False), seed=0), torch.float32)
    leaves = leaves_of(batch) if checkpointed else batch
    n_logits = batch["target"].numel() * 1009 * 4

    def region(input: Tensor) -> Tensor:
        values = lc.linear_token_stats(leaves["weight"], input, batch["target"], leaves["bias"], outputs=outputs)
        return sum(getattr(values, name) for name in outputs)

    memory = Memory()
    memory.expect(*batch.values(), *leaves.values())
    with memory:
        value = checkpoint(region, leaves["input"], use_reentrant=False) if checkpointed else region(leaves["input"])
        assert memory.peak >= n_logits
        assert memory.alive == value.untyped_storage().nbytes()


# Refilled tensors


@pytest.fixture
def made_once(monkeypatch: pytest.MonkeyPatch) -> Batch:
    """Creates class weights and token weights once rather than per call, so that a test can change them."""
    made: Batch = {}
    for name in ("_class_weights", "_token_weights"):
        make = getattr(table, name)
        monkeypatch.setattr(table, name, lambda batch, name=name, make=make: made.setdefault(name, make(batch)))
    return made


def refill(x: Tensor) -> None:
    """Write other values; token ids become out of range."""
    with torch.no_grad():
        if x.is_floating_point():
            x.mul_(-0.7).add_(0.3)
        elif x.dtype == torch.bool:
            x.logical_not_()
        else:
            x.add_(10**6)


@pytest.mark.few(1)
@by_path
@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "full"])
def test_refilled_tensors(row: Row, ignored: bool, made_once: Batch) -> None:
    """Gradients from the forward stay correct; reading a changed tensor in the backward raises, as in torch.

    Without ignored tokens, the step reads the caller's tensor rather than a selection of it.
    """
    original = row.sample(SMALL._replace(ignored=ignored), seed=0)
    expected = evaluate(row.ours, original)
    raised = set()
    for name in (*original, *made_once):
        made_once.clear()
        batch = {key: x.clone() for key, x in original.items()}
        leaves = leaves_of(batch)
        loss = row.ours({**batch, **leaves})
        refill({**batch, **leaves, **made_once}[name])
        try:
            for grads in twice(loss, leaves):
                assert_close(grads, leaves, expected, of=name)
        except RuntimeError as error:
            assert CHANGED in str(error)
            assert not row.fused, f"{name}: the backward of a fused loss reads nothing"
            raised.add(name)
    read = {"weight", "input"} | (set() if ignored or row.kept else {"target"})
    assert row.fused or read <= raised


# Ways for a loss to hold a tensor, to multiply a number by it, and to hold another one instead.
HELD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "attribute": (lambda scale: scale, torch.mul),
    "nested": (lambda scale: {"scales": [(1, scale)]}, lambda held, x: held["scales"][0][1] * x),
    "closure": (lambda scale: lambda x: scale * x, lambda held, x: held(x)),
}


class _Scaled(lc.LigerFusedLinearPreferenceBase):
    """A user's loss that holds a tensor."""

    def __init__(self, kind: str, scale: Tensor) -> None:
        super().__init__()
        hold, self.times = HELD[kind]
        self.held = hold(scale)

    def preference_loss(self, pairs: lc.Pairs) -> Tensor:
        chosen, rejected = pairs.logps.unbind(-1)
        return -(F.logsigmoid(self.times(self.held, chosen - rejected)))


def _refill(loss: _Scaled, scale: Tensor) -> None:
    scale.fill_(2.0)


def _replace(loss: _Scaled, scale: Tensor) -> None:
    if isinstance(loss.held, dict):
        loss.held["scales"][0] = (1, 2 * scale)
    else:
        loss.held = 2 * scale


@pytest.mark.parametrize("change", [_refill, _replace])
@pytest.mark.parametrize("kind", HELD)
def test_what_a_loss_holds_changes_after_the_forward(kind: str, change: Callable[[_Scaled, Tensor], None]) -> None:
    """Two backward passes use what the forward had, as in eager code with numbers."""
    batch = table.pairs(SMALL, seed=0, ref=None)
    expected = evaluate(lambda batch: _Scaled(kind, torch.tensor(0.5, dtype=torch.float64))(**batch)[0], batch)
    leaves, scale = leaves_of(batch), torch.tensor(0.5, dtype=torch.float64)
    loss = _Scaled(kind, scale)
    value, _ = loss(**{**batch, **leaves})
    change(loss, scale)
    for grads in twice(value, leaves):
        assert_close(grads, leaves, expected)


# Tensors that were made in inference mode


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("ce", "target"),
        ("dpo-sigmoid", "ref_input"),
        ("dpo-sigmoid", "target"),
        ("grpo-kl", "advantages"),
        ("jsd", "teacher_input"),
        ("jsd", "teacher_weight"),
        ("kl-top-k", "teacher_logps"),
        ("stats-all", "target"),
    ],
)
def test_tensors_of_inference_mode(id: str, name: str) -> None:
    """Autograd cannot save them, and a teacher's hidden states are often such."""
    (row,) = rows(id)
    batch = row.sample(SMALL._replace(ignored=False), seed=0)
    expected = evaluate(row.ours, batch)
    with torch.inference_mode():
        batch[name] = batch[name].clone()
    leaves = leaves_of(batch)
    loss = row.ours({**batch, **leaves})
    for grads in twice(loss, leaves):
        assert_close(grads, leaves, expected)


def test_metrics_are_no_tensors_of_the_caller() -> None:
    """A trainer keeps its running delta, and may average metrics over ranks in place."""
    batch = table.examples(SMALL, seed=0)
    delta = torch.tensor(0.3, dtype=torch.float64)
    _, metrics = lc.LigerFusedLinearBCOLoss()(**batch, delta=delta)
    metrics.reference_point.mul_(9.0)
    assert delta == 0.3


# Second derivatives


def again(loss: Tensor, first: Tensor, by: list[Tensor]) -> list[Tensor | None]:
    """Return the derivative of the sum of squares of a gradient."""
    (gradient,) = torch.autograd.grad(loss, [first], create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), by, allow_unused=True))


@pytest.mark.few(1)
@pytest.mark.sampled
@by_path
@pytest.mark.parametrize("decay", [0.0, 0.3], ids=["alone", "with-weight-decay"])
def test_second_derivatives(row: Row, decay: float) -> None:
    batch = row.sample(SMALL, seed=0)
    leaves = leaves_of(batch)
    expected = evaluate(row.ours, batch)

    def made() -> Tensor:
        loss = row.ours({**batch, **leaves})
        return loss + decay * sum(leaf.square().sum() for leaf in leaves.values())

    grads = torch.autograd.grad(made(), list(leaves.values()), create_graph=True)
    for (name, leaf), gradient in zip(leaves.items(), grads, strict=True):
        exact = expected[name] + 2 * decay * leaf
        torch.testing.assert_close(gradient.detach(), exact.detach(), rtol=1e-10, atol=1e-12, msg=name)
    for first in leaves.values():
        for by in leaves.values():
            with pytest.raises(RuntimeError, match=REFUSED):
                again(made(), first, [by])


@pytest.mark.few(4)
@some_rows
def test_batched_backward(row: Row) -> None:
    batch = row.sample(SMALL, seed=0)
    leaves = leaves_of(batch)
    loss = row.ours({**batch, **leaves})
    with pytest.raises(NotImplementedError, match="without is_grads_batched"):
        torch.autograd.grad(loss, list(leaves.values()), torch.ones(3, dtype=loss.dtype), is_grads_batched=True)


# Copies


# A loss of each kind, and its batches.
LOSSES: dict[str, tuple[Any, Callable[[Sizes, int], Batch]]] = {
    "ce": (lc.LigerFusedLinearCrossEntropyLoss(ce_weight=torch.linspace(0.2, 2, SMALL.vocab)), tokens),
    "dpo": (lc.LigerFusedLinearDPOLoss(logits_budget=SEVERAL_CHUNKS), table.pairs),
    "grpo": (lc.LigerFusedLinearGRPOLoss(entropy_coef=0.1, logits_budget=SEVERAL_CHUNKS), table.rollouts),
    "jsd": (lc.LigerFusedLinearJSDLoss(), table.students),
}
every_loss = pytest.mark.parametrize(("loss", "sample"), LOSSES.values(), ids=LOSSES)


def value_of(loss: Any, batch: Batch) -> Tensor:
    returned = loss(**batch)
    return returned[0] if isinstance(returned, tuple) else returned


# Threads


@pytest.mark.few(1)
@every_loss
def test_threads(loss: Any, sample: Callable[[Sizes, int], Batch]) -> None:
    """One loss in several threads at once, with different batches; one of them runs under hooks."""
    batches = [sample(SMALL, seed) for seed in range(3)]
    expected = [evaluate(partial(value_of, loss), batch) for batch in batches]
    start = threading.Barrier(len(batches))
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            start.wait()
            with Hooks()() if i == 0 else nullcontext():
                results[i] = [evaluate(partial(value_of, loss), batches[i]) for _ in range(2)]
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, exact in enumerate(expected):
        assert isinstance(results[i], list), results[i]
        for ours in results[i]:
            assert_equal(ours, exact)


@pytest.mark.few(3)
@some_rows
def test_backward_in_another_thread(row: Row) -> None:
    batch = row.sample(SMALL, seed=0)
    leaves = leaves_of(batch)
    loss = row.ours({**batch, **leaves})
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    ours = {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    assert_equal(ours, evaluate(row.ours, batch))


IMPORTS = """
import sys
import torch
from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
assert not {"torch._dynamo", "transformers", "trl"} & sys.modules.keys()
from liger_chunked.testing import Sizes, evaluate, random_batch

# Since torch 2.15, the first backward of a process imports torch.nested: milliseconds, and eager code pays them too.
torch.autograd.grad((x := torch.ones((), requires_grad=True)) * 1, x)
assert "sympy" not in sys.modules
sizes = Sizes(4, 8, 16, 64, 16)
for loss in (LigerFusedLinearDPOLoss(), LigerFusedLinearGRPOLoss()):
    batch = random_batch(loss, 0, sizes)
    before = set(sys.modules)
    evaluate(loss, batch)
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert imported <= {"liger_chunked"}, imported
"""


def test_a_step_imports_nothing(fresh_process: Any) -> None:
    """Autograd imports sympy for a given upstream gradient: seconds, if its bytecode is not cached."""
    fresh_process.run(IMPORTS)
