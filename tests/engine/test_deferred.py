"""Logits that a head defers: each use has the value, dtype and gradients of the real ones, and losses build none."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spies import Flops, memory_beside
from table import relative_error
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import defer_logits, liger_cross_entropy
from liger_chunked.deferred import Deferral, DeferredLogits, logits, set_deferral
from liger_chunked.what_ran import record_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning")

B, T, H, V = 3, 5, 8, 37
BOUND = 1e-12  # float64


class Case:
    """A head, its input, and a target with ignored tokens."""

    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(H, V, bias=bias, dtype=dtype)
        with torch.no_grad():
            for p in self.head.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        self.x = torch.randn(B, T, H, generator=generator).to(dtype).requires_grad_()
        self.target = torch.randint(V, (B, T), generator=generator)
        self.target[0, :2] = self.target[2, 3] = -100
        self.ids = torch.randint(V, (B, T), generator=generator)

    def step(self, use: Callable[[Any], Tensor]) -> tuple[list[Tensor], Any]:
        """Return value and gradients of `use(logits)`, and the logits."""
        z = self.head(self.x)
        value = use(z)
        leaves = [self.x, *self.head.parameters()]
        return [value.detach(), *torch.autograd.grad(value.double().sin().sum(), leaves)], z


def selective_log_softmax(z: Any, index: Tensor) -> Tensor:
    """As trainers compute log-probabilities in float32."""
    chosen = torch.gather(z, -1, index[..., None]).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


CASE = Case()
Y, IDS = CASE.target, CASE.ids
OFFSET = torch.linspace(0, 1, V, dtype=torch.float64)


def of_tokens(z: Any) -> Tensor:
    return F.cross_entropy(z.view(-1, V), Y.view(-1))


# Uses that `deferred/test_idioms.py` and the random programs of `deferred/programs.py` do not have.
FUSED: dict[str, Callable[[Any], Tensor]] = {
    "bias": lambda z: F.cross_entropy((z + OFFSET).flatten(0, 1), Y.flatten()),
    "bias (1, V)": lambda z: F.cross_entropy((z + OFFSET[None]).flatten(0, 1), Y.flatten()),
    "classes second of four": lambda z: F.cross_entropy(z.unsqueeze(1).permute(0, 3, 1, 2), Y[:, None]),
    "swapped rows": lambda z: F.cross_entropy(z.transpose(0, 1).reshape(-1, V), Y.T.reshape(-1)),
    "logsumexp": lambda z: torch.logsumexp(z[:, 1:], dim=-1, keepdim=True),
    "argmax of a negative scale": lambda z: torch.argmax(-2 * z, dim=-1) + torch.logsumexp(z, 2),
    "argmax of rows by a mask": lambda z: z.mean(-1)[IDS > 3] * torch.argmax(z.detach()[IDS > 3], -1, True)[:, 0],
    "mean": lambda z: z[Y != -100].mean(-1).sum() + torch.mean(z),
    "mean of a softcap": lambda z: (torch.tanh(z / 3.0) * 3.0).mean(),
    "mean of a slice": lambda z: (z[:, :-1] / 0.7).mean(-1),
    "mean, function": lambda z: torch.mean(z.view(-1, V), dim=1, keepdim=True),
    "sums": lambda z: z.sum(-1) + z.sum(dim=2) + torch.sum(z[1:, :2]),
    "nansum": lambda z: z[:, 1:].nansum() + z.nansum(-1).cos(),
    "index_select": lambda z: z.index_select(0, IDS[0, :2] % B).logsumexp(-1),
    "index_select, function": lambda z: torch.index_select(z, 1, IDS[0] % T).mean(-1),
    "smoothing of log_softmax": lambda z: -F.log_softmax(z, -1).mean(),
    "scale in place of a base": lambda z: F.cross_entropy((z[:, 1:], z.mul_(2))[0].flatten(0, 1), Y[:, 1:].flatten()),
}

# What resembles a statistic of the vocabulary, and is another.
REAL: dict[str, Callable[[Any], Tensor]] = {
    "classes in the second dimension": lambda z: F.cross_entropy(z, IDS.new_zeros(B, V)),
    "k at once": lambda z: z.log_softmax(-1).gather(-1, torch.stack([IDS, IDS], -1)),
    "fewer rows of an index": lambda z: z.gather(-1, IDS[:, :2, None]),
    "mean of rows": lambda z: z.mean(1).sum(0) + z.sum((0, 1)) + z.sum(0).mean(0),
    "mean of fewer classes": lambda z: z.transpose(1, 2).mean(-1).sum(-1),
    "mean of all": lambda z: z.mean() + z.mean(0).mean((0, 1)),
    "sums in another dtype": lambda z: z.sum(dtype=torch.float64) + z.mean(-1, dtype=torch.float64),
    "out": lambda z: torch.mean(z) + torch.logsumexp(z.detach(), -1, out=torch.empty(0, dtype=torch.float64)).mean(),
    "argmax of all": lambda z: z.sum(-1) + z.argmax(),
    "columns by a tensor": lambda z: z[:, :, IDS[0]],
    "index_select of ids": lambda z: torch.index_select(z, -1, IDS[0]),
    "two tanh": lambda z: F.cross_entropy(z.tanh().tanh().flatten(0, 1), Y.flatten()),
    "a factor for each class": lambda z: z * torch.ones(V, dtype=torch.float64),
    "a loss of this library": lambda z: liger_cross_entropy(z.view(-1, V) * 1, Y.view(-1)),
}


@pytest.mark.few(15, "bias (1, V)")
@pytest.mark.parametrize("name", [*FUSED, *REAL])
def test_as_real_logits(name: str) -> None:
    """Every use of a stand-in has the value and the gradients of real logits, and builds them only where it must."""
    use, case = {**FUSED, **REAL}[name], Case()
    exact, real = case.step(use)
    handle = defer_logits(case.head)
    found, stand_in = case.step(use)
    handle.remove()
    assert isinstance(real, Tensor) and isinstance(stand_in, DeferredLogits)
    assert stand_in.is_computed == (name in REAL)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert relative_error(ours, theirs) < BOUND
    assert type(case.head) is nn.Linear and not set(vars(case.head)) - set(vars(nn.Linear(1, 1)))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# `deferred/test_checkpoints.py` has the losses in each dtype.
OF_DTYPE: dict[str, Callable[[Any], Tensor]] = {
    "log_softmax in float32": lambda z: F.log_softmax(z, -1, dtype=torch.float32).gather(-1, IDS[..., None]),
    "gather": lambda z: z.gather(-1, IDS[..., None]),
    "mean of all": lambda z: z.mean(),
    "sum": lambda z: z.sum(-1),
    "sum in float32": lambda z: z.sum(-1, keepdim=True, dtype=torch.float32),
    "nansum": lambda z: z.nansum(),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).rpartition(".")[2])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OF_DTYPE)
def test_dtypes(name: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """A result has the dtype that real logits would give, also under autocast, and a loss outside of it."""
    if autocast is not None and dtype != torch.float32:
        pytest.skip("autocast is for float32 weights")
    case, use = Case(dtype=dtype), OF_DTYPE[name]
    mode: Any = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)

    def run() -> list[Tensor]:
        with mode:
            z = case.head(case.x)
            inside = use(z)
        outside = use(z)
        return [inside, outside, z.detach().float().sum(), z]

    exact = run()
    defer_logits(case.head)
    found = run()
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(exact[3].dtype, 1e-5)
    for ours, theirs in zip(found[:2], exact[:2], strict=True):
        assert relative_error(ours.detach().double(), theirs.detach().double()) < tolerance


def test_what_a_tensor_knows() -> None:
    case = Case()
    real = case.head(case.x)
    defer_logits(case.head)
    z: Any = case.head(case.x)
    for name in ("dim", "size", "stride", "numel", "nelement", "is_floating_point", "get_device", "__len__"):
        assert getattr(z, name)() == getattr(real, name)()
    assert (z.device, z.is_cpu, z.layout, z.itemsize, z.is_leaf) == (real.device, True, torch.strided, 8, False)
    assert "(3, 5, 37), torch.float64, cpu, not computed" in f"{z}" and not z.is_computed
    case.head.requires_grad_(False)
    assert not case.head(case.x.detach()).requires_grad and case.head(case.x).requires_grad


def test_who_asked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logits._LOGGED.clear()
    case = Case()
    defer_logits(case.head)
    with caplog.at_level(logging.WARNING, "liger_chunked"):
        for _ in range(3):
            case.head(case.x).softmax(-1).argmax(-1)
        F.cross_entropy(case.head(case.x).view(-1, V), Y.view(-1))
    (message,) = caplog.messages
    assert "argmax at " in message and "test_deferred.py:" in message and "(0 MiB)" in message
    caplog.clear()
    torch.relu(case.head(case.x))
    assert "relu at " in caplog.text


def test_work_and_memory() -> None:
    n, h, v = 256, 32, 1009
    head, x = nn.Linear(h, v, dtype=torch.bfloat16), torch.randn(4, n // 4, h).bfloat16().requires_grad_()
    target = torch.randint(v, (4, n // 4))
    defer_logits(head, logits_budget=2 * v * 20)
    with memory_beside(x, target, *head.parameters()) as memory:
        F.cross_entropy(head(x).view(-1, v), target.view(-1)).backward()
    assert memory.largest <= 4 * v * h  # the float32 accumulator of the weight's gradient
    set_deferral(head, None)
    defer_logits(head)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(head(x).view(-1, v), target.view(-1)).backward()
    assert counter.get_total_flops() == 3 * 2 * n * h * v


def test_removal() -> None:
    case = Case()
    handle = defer_logits(case.head)
    z = case.head(case.x)
    handle.remove()
    handle.remove()
    assert type(case.head(case.x)) is Tensor
    torch.testing.assert_close(of_tokens(z), of_tokens(z.tensor()))
    with defer_logits(case.head):
        assert isinstance(case.head(case.x), DeferredLogits)
    assert type(case.head(case.x)) is Tensor


def pruned(head: nn.Linear) -> None:
    prune.l1_unstructured(head, "weight", amount=0.3)


def tied(head: nn.Linear) -> None:
    head.embedding = nn.Embedding(V, H, dtype=torch.float64)
    head.weight = head.embedding.weight


def budget_of(head: nn.Module) -> int | str | None:
    """Return the budget with which a head defers in training; "real" if it returns real logits."""
    z = head(torch.randn(2, H, dtype=torch.float64))
    return z._cell.node.sources[0].settings.logits_budget if isinstance(z, DeferredLogits) else "real"


def test_a_nested_deferral_ends_alone() -> None:
    head = nn.Linear(H, V, dtype=torch.float64)
    with defer_logits(head, logits_budget=1000):
        with defer_logits(head, logits_budget=2000), defer_logits(head):
            assert budget_of(head) is None
        assert budget_of(head) == 1000
    assert budget_of(head) == "real" and type(head) is nn.Linear


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_deferrals_end_in_any_order(order: tuple[int, ...]) -> None:
    """The last one that is left counts."""
    head = nn.Linear(H, V, dtype=torch.float64)
    handles = {i: defer_logits(head, logits_budget=1000 * (i + 1)) for i in range(3)}
    for i in order:
        removed = handles.pop(i)
        for _ in range(2):
            removed.remove()
            assert budget_of(head) == (1000 * (max(handles) + 1) if handles else "real")
    assert type(head) is nn.Linear
    with defer_logits(head):
        assert budget_of(head) is None
    assert budget_of(head) == "real"


def test_a_deferral_over_that_of_a_patched_model() -> None:
    """What set another deferral, such as a patched model, has it back, and ends those of handles before it."""
    head = nn.Linear(H, V, dtype=torch.float64)
    model = nn.Sequential(head)
    before = defer_logits(head, logits_budget=1000)
    set_deferral(head, Deferral(2000), model)
    with defer_logits(head, logits_budget=3000):
        assert budget_of(head) == 3000
    assert budget_of(head) == 2000
    assert record_of(head).owner() is model
    before.remove()
    assert budget_of(head) == 2000
    after = defer_logits(head, logits_budget=3000)
    set_deferral(head, None)
    after.remove()
    assert budget_of(head) == "real"


PARAMETRIZED: dict[str, Callable[[nn.Linear], Any]] = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "pruned": pruned,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "tied": tied,
    "frozen": lambda head: head.requires_grad_(False),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("first", [True, False], ids=["parametrized first", "deferred first"])
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized(name: str, first: bool) -> None:
    case = Case()
    torch.manual_seed(0)
    twin = copy.deepcopy(case.head)
    if not first:
        defer_logits(case.head)
    for head in (case.head, twin):
        torch.manual_seed(0)
        PARAMETRIZED[name](head)
    if first:
        defer_logits(case.head)
    results = []
    for head in (case.head, twin):
        x = case.x.detach().requires_grad_()
        z = head(x)
        loss = F.cross_entropy(z.view(-1, V), Y.view(-1))
        leaves = [x, *(p for p in head.parameters() if p.requires_grad)]
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        assert isinstance(z, DeferredLogits) == (head is case.head)
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < BOUND


def test_operations_without_grad() -> None:
    """As with tensors, an operation under no_grad cuts the gradient: its result gives the logits none."""
    case = Case()
    for make in (lambda z: z.view(-1, V), lambda z: z[:, 1:], lambda z: z * 2, lambda z: z.log_softmax(-1)):
        for use in (lambda z: z.sum(), lambda z: F.cross_entropy(z.reshape(-1, V), IDS.new_zeros(z.numel() // V))):
            for defers in (False, True):
                with defer_logits(case.head) if defers else contextlib.nullcontext():
                    z = case.head(case.x)
                    with torch.no_grad():
                        made = make(z)
                    value = use(made) + 0 * case.x.sum()
                    assert not torch.autograd.grad(value, case.x)[0].any()


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("computed", [True, False])
def test_a_loss_in_place_of_logits_has_a_gradient_if_both_have(called: bool, computed: bool) -> None:
    """As with tensors: neither logits made under `no_grad`, nor a loss computed under it, train the head."""
    case = Case()
    with defer_logits(case.head):
        with torch.set_grad_enabled(called):
            z = case.head(case.x)
        with torch.set_grad_enabled(computed):
            loss = z.run(lambda head, hidden: F.linear(hidden, head.weight, head.bias).sum())
    assert loss.requires_grad == (called and computed)


def test_a_loss_in_place_of_repeated_logits_names_what_repeated_them() -> None:
    """Their gradient is a sum over the repetitions, which needs values: it is not left out."""
    case = Case()
    with defer_logits(case.head):
        z = case.head(case.x)[:1].expand(3, -1, -1)
        loss = z.run(lambda head, hidden: F.linear(hidden, head.weight, head.bias).sum())
    with pytest.raises(RuntimeError, match=r"`expand` repeated the logits"):
        loss.backward()


def test_rounding_is_not_left_out() -> None:
    """A cast to fewer bits, or to float64, is the caller's: the loss is that of the cast logits."""
    case = Case(dtype=torch.float32)
    for cast in (torch.bfloat16, torch.float16, torch.float64):
        exact = of_tokens(case.head(case.x).to(cast))
        with defer_logits(case.head):
            z = case.head(case.x)
            assert torch.equal(of_tokens(z.to(cast)), exact) and z.is_computed


def test_weights_that_change_before_the_logits_exist() -> None:
    """The error says which tensor changed. `deferred/test_in_place.py` has every change and every reader."""
    case = Case()
    defer_logits(case.head)
    for changed, name in ((case.head.weight, "the weights of the head .* changed after the model"), (case.x, "hidden")):
        z = case.head(case.x)
        with torch.no_grad():
            changed.add_(1.0)
        with pytest.raises(RuntimeError, match=name):
            of_tokens(z)


@pytest.mark.parametrize(
    ("head", "options", "error", "message"),
    [
        ("lm_head", {}, TypeError, "linear must be a module"),
        (nn.Embedding(3, 4), {}, ValueError, r"lm_head is computed by torch\.nn\.modules\.sparse\.Embedding"),
        (nn.Linear(3, 4), {"logits_budget": [1]}, TypeError, "logits_budget must be"),
    ],
)
def test_refusals(head: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        defer_logits(head, **options)


def gpu_step(use: Callable[[Any], Tensor], dtype: torch.dtype, autocast: bool, defers: bool) -> list[Tensor]:
    """Return loss and gradients of 1,500 tokens, and the peak of memory above the inputs, gradients included."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(32003, 256, generator=generator, device="cuda") / 16
    x = torch.randn(3, 500, 256, generator=generator, device="cuda")
    head = nn.Linear(256, 32003, bias=False, device="cuda", dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    x = x.to(dtype).requires_grad_()
    with defer_logits(head) if defers else contextlib.nullcontext():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = use(head(x))
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert x.grad is not None and head.weight.grad is not None
    return [loss.detach(), x.grad, head.weight.grad, torch.tensor(peak)]


GPU_TARGET = torch.randint(32003, (3, 500), generator=torch.Generator().manual_seed(1))
ON_GPU: dict[str, Callable[[Any], Tensor]] = {
    "cross entropy": lambda z: F.cross_entropy(z.view(-1, 32003), GPU_TARGET.cuda().view(-1)),
    "float": lambda z: F.cross_entropy(z.float()[:, :-1].reshape(-1, 32003), GPU_TARGET.cuda()[:, 1:].reshape(-1)),
    "softcap": lambda z: F.cross_entropy(((z / 5).tanh() * 5).flatten(0, 1).float(), GPU_TARGET.cuda().view(-1)),
    "log_softmax": lambda z: -z.float().log_softmax(-1).gather(-1, GPU_TARGET.cuda()[..., None]).mean(),
    "selective": lambda z: -selective_log_softmax(z.float(), GPU_TARGET.cuda()).mean(),
}


@pytest.mark.gpu
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_on_a_gpu(name: str, autocast: bool) -> None:
    use, dtype = ON_GPU[name], torch.float32 if autocast else torch.bfloat16
    exact = gpu_step(use, torch.float64, False, False)
    eager = gpu_step(use, dtype, autocast, False)
    ours = gpu_step(use, dtype, autocast, True)
    for mine, theirs, right in zip(ours[:3], eager[:3], exact[:3], strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert relative_error(mine.double(), right) <= 1.1 * relative_error(theirs.double(), right) + 1e-6
    assert ours[3] < 0.5 * eager[3]


# What must not differ from tensors although it happens between the call and the use


def test_statistics_are_computed_once() -> None:
    """Metrics of rows, also detached and under `no_grad`, come from the pass that gave the log-probabilities."""
    case = Case()
    real = case.head(case.x).detach()
    defer_logits(case.head)
    z = case.head(case.x)
    with FlopCounterMode(display=False) as counter:
        log_probs = z.log_softmax(-1).gather(-1, IDS[..., None])
        one_pass = counter.get_total_flops()
        later, some = z.detach()[:, 1:], IDS[:, 1:] > 3
        torch.testing.assert_close(later.logsumexp(-1), real[:, 1:].logsumexp(-1))
        torch.testing.assert_close(later[some].logsumexp(-1), real[:, 1:][some].logsumexp(-1))
        turned = z.detach().transpose(0, 1)[::2, :2]
        torch.testing.assert_close(turned.logsumexp(-1), real.transpose(0, 1)[::2, :2].logsumexp(-1))
        assert not later.logsumexp(-1).requires_grad
        with torch.no_grad():
            lse = z.double().logsumexp(-1)
        assert lse.equal(z.logsumexp(-1)) and not lse.requires_grad
        assert one_pass == counter.get_total_flops() > 0 and not z.is_computed
        torch.testing.assert_close((z / 2).logsumexp(-1), (real / 2).logsumexp(-1))  # not that of z
        assert counter.get_total_flops() > one_pass
    torch.testing.assert_close(log_probs, real.log_softmax(-1).gather(-1, IDS[..., None]))
    z.mean(-1).sum().backward()
    torch.testing.assert_close(case.head.weight.grad, case.x.detach().sum((0, 1)).expand(V, H) / V)


def test_a_second_gather_by_an_index_takes_no_product() -> None:
    def use(z: Any) -> Tensor:
        return z.log_softmax(-1).gather(-1, index) + 2 * z.gather(-1, index) + z.softmax(-1).gather(-1, index).sin()

    case, index = Case(), IDS[..., None]
    exact, _ = case.step(use)
    defer_logits(case.head)
    with Flops() as counter:
        case.step(lambda z: z.gather(-1, index))
        once = counter.total
        found, z = case.step(use)
    assert counter.total == 2 * once > 0 and not z.is_computed
    for ours, theirs in zip(found, exact, strict=True):
        assert relative_error(ours, theirs) < BOUND


@pytest.mark.parametrize("grad", [True, False])
def test_a_gather_of_something_else_is_computed(grad: bool) -> None:
    """The index was changed in place, also where tensors count no changes, or the rows have another order."""
    case, alive = Case(), []
    real = case.head(case.x).detach()
    defer_logits(case.head)
    with torch.set_grad_enabled(grad):
        z = case.head(case.x)
        with torch.inference_mode():
            uncounted = IDS[..., None].clone()
        for index in (IDS[..., None].clone(), uncounted):
            for _ in range(2):
                turned = torch.tensor([1, 2, 0])
                alive += [z.gather(-1, index), z[turned].gather(-1, index)]
                torch.testing.assert_close(alive[-2].detach(), real.gather(-1, index))
                torch.testing.assert_close(alive[-1].detach(), real[turned].gather(-1, index))
                with torch.inference_mode():
                    index.copy_((index + 1) % V)
        assert not z.is_computed


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_statistic_that_its_reader_changes_in_place(mode: Any) -> None:
    """As a metric does that subtracts a mean from its values: other readers have the value of the logits."""
    for statistic in (lambda z: z.logsumexp(-1), lambda z: z.mean(-1), lambda z: z.argmax(-1)):
        case = Case()
        exact = statistic(case.head(case.x).detach())
        defer_logits(case.head)
        z = case.head(case.x)
        loss = z.logsumexp(-1).square().mean()
        with mode():
            earlier = statistic(z)
            for rows in (z, z[:], z.detach()):
                later = statistic(rows)
                torch.testing.assert_close(later.detach(), exact)
                with torch.no_grad():
                    later.zero_()
        torch.testing.assert_close(earlier.detach(), exact)
        torch.testing.assert_close(statistic(z).detach(), exact)
        loss.backward()


def test_rounded_logits_decide_their_own_argmax() -> None:
    """A scale rounds real logits once more, which can make the largest two equal: then the first one is returned."""
    case = Case()
    head, x = case.head.bfloat16(), case.x.detach().bfloat16()
    defer_logits(head)
    for z in (head(x), head(x).float()):
        assert z.argmax(-1).equal(F.linear(x, head.weight, head.bias).argmax(-1)) and not z.is_computed
    z = head(x) / 0.7
    assert z.argmax(-1).equal((F.linear(x, head.weight, head.bias) / 0.7).argmax(-1)) and z.is_computed


def test_a_mean_that_needs_no_product() -> None:
    """A metric without a gradient multiplies by the mean of the weight, unless a softcap bends the logits."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 40).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = linear(x).detach()
    handle = defer_logits(linear)
    z = (linear(x) * 0.5).detach()
    with FlopCounterMode(display=False) as flops:
        found = z.mean(-1), z[:2, :-1].mean(), z.sum(-1), z.nansum()
    assert flops.get_total_flops() == 0 and not z.is_computed
    half = 0.5 * expected
    for value, real in zip(found, (half.mean(-1), half[:2, :-1].mean(), half.sum(-1), half.sum()), strict=True):
        torch.testing.assert_close(value, real)
    capped = (30 * torch.tanh(linear(x) / 30)).detach()
    torch.testing.assert_close(capped.mean(-1), (30 * torch.tanh(expected / 30)).mean(-1))
    assert not capped.is_computed
    handle.remove()
