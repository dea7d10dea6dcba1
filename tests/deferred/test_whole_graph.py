"""Models with a head that defers, compiled as one graph: values and gradients are those of eager code."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from liger_chunked import DeferredLogits, apply_liger_kernel, attach_head, defer_logits
from liger_chunked.deferred import traced

pytestmark = [
    pytest.mark.ordinary_memory,  # the compiler allocates memory that must not be filled with NaN
    pytest.mark.filterwarnings("ignore"),
]

V, H, B, T = 11, 4, 2, 3
IDS = torch.tensor([[3, 0, 7], [10, 2, 5]])
TARGET = torch.tensor([[3, -100, 7], [10, 2, 5]])


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Compiled:
    """A backend that keeps the graphs of forwards, from which unused operations are gone."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=lambda g, _: make_boxed_func(g.forward))

    def _keep(self, graph: Any, _: Any) -> Any:
        self.nodes += graph.graph.nodes
        return make_boxed_func(graph.forward)

    @property
    def n_fused(self) -> int:
        return sum(node.target is torch.ops.liger_chunked.fused.default for node in self.nodes)

    @property
    def n_logits(self) -> int:
        """The number of products whose result is logits."""
        products = [node for node in self.nodes if "mm" in str(node.target)]
        return sum(node.meta["val"].shape[-1] == V and node.meta["val"].numel() > V * H for node in products)


def made_head() -> tuple[nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(H, V, dtype=torch.float64)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return head, torch.randn(B, T, H, generator=generator, dtype=torch.float64).requires_grad_()


def step(run: Callable[[Tensor], Tensor], head: nn.Linear, x: Tensor) -> list[Tensor]:
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out.sum(), [x, *head.parameters()], allow_unused=True)]


def compare(use: Callable[[Any], Tensor], fullgraph: bool = True) -> Compiled:
    """Compare a use of logits, compiled with a head that defers, with eager code of an ordinary head."""
    head, x = made_head()
    exact = step(lambda x: use(head((2 * x).tanh())), head, x)
    compiled = Compiled()
    with defer_logits(head):
        run = torch.compile(lambda x: use(head((2 * x).tanh())), fullgraph=fullgraph, backend=compiled.backend)
        ours = step(run, head, x)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    return compiled


def selective(z: Tensor) -> Tensor:
    return z.gather(-1, IDS[..., None]).squeeze(-1) - torch.logsumexp(z, dim=-1)


FUSED: dict[str, tuple[int, Callable[[Any], Tensor]]] = {
    "cross entropy": (1, lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten())),
    "keywords": (
        1,
        lambda z: F.cross_entropy(
            input=z.view(-1, V), target=IDS.view(-1), reduction="sum", ignore_index=3, label_smoothing=0.1
        ),
    ),
    "class weights": (1, lambda z: F.cross_entropy(z.view(-1, V), TARGET.view(-1), torch.arange(1.0, V + 1).double())),
    "transposed": (1, lambda z: F.cross_entropy(z.transpose(1, 2), TARGET, reduction="none")),
    "shifted": (1, lambda z: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), TARGET[..., 1:].reshape(-1))),
    "rows": (1, lambda z: F.cross_entropy(z[:, torch.tensor([2, 0])].reshape(-1, V), TARGET[:, [2, 0]].reshape(-1))),
    "scale": (1, lambda z: F.cross_entropy((2 * z / 3).view(-1, V), TARGET.view(-1))),
    "softcap": (1, lambda z: F.cross_entropy((torch.tanh(z / 5) * 5).view(-1, V), TARGET.view(-1))),
    "nll": (1, lambda z: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, V), TARGET.view(-1))),
    "log-probabilities": (1, lambda z: z.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1).square()),
    "selective_log_softmax": (1, lambda z: selective(z / 0.7)),
    "accuracy": (2, lambda z: F.cross_entropy(z.view(-1, V), TARGET.view(-1)) + (z.argmax(-1) == TARGET).sum()),
    "entropy": (1, lambda z: -(z.log_softmax(-1) * z.softmax(-1)).sum(-1)),
    "a divergence": (
        1,
        lambda z: F.kl_div(z.log_softmax(-1), (2 * z).log_softmax(-1), reduction="sum", log_target=True),
    ),
    "mean": (1, lambda z: z.mean(-1)),
    "sequences by a list": (1, lambda z: z[[1, 0]].logsumexp(-1)),
    "its own probabilities": (1, lambda z: (z.detach().softmax(-1) * z.log_softmax(-1)).sum(-1)),
    "a sum of heads": (1, lambda z: F.cross_entropy((z + z.detach() * 3).view(-1, V), TARGET.view(-1))),
    "detached": (
        2,
        lambda z: F.cross_entropy(z.detach().view(-1, V), TARGET.view(-1)) * F.cross_entropy(z.mT, TARGET.long()),
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    n_fused, use = FUSED[name]
    compiled = compare(use)
    assert (compiled.n_fused, compiled.n_logits) == (n_fused, 0)


def written(z: Any) -> Tensor:
    z[:, 0] = 0.0
    return z.sin()


def viewed_before(z: Any) -> Tensor:
    shifted, _ = z[:, :-1], z.exp()
    z.mul_(2)
    return shifted.sin()


def changed_before(z: Any) -> Tensor:
    shifted = z[:, :-1]
    z[:, 1] = 0.0
    return F.cross_entropy(shifted.reshape(-1, V), TARGET[:, :-1].reshape(-1))


def written_without_grad(z: Any) -> Tensor:
    z = z / 0.7
    with torch.no_grad():
        z[..., 0] = -9.0
    return F.cross_entropy(z.view(-1, V), TARGET.view(-1))


def hooked(z: Any) -> Tensor:
    z.register_hook(lambda g: 3 * g)
    return F.cross_entropy(z.view(-1, V), TARGET.view(-1))


def transposed_in_place(z: Any) -> Tensor:
    z.transpose_(0, 1)
    return z.logsumexp(-1)


REAL: dict[str, Callable[[Any], Tensor]] = {
    "a write without grad": written_without_grad,
    "a hook": hooked,
    "transposed in place": transposed_in_place,
    "in place by position": lambda z: (F.leaky_relu(z, 0.1, True), F.cross_entropy(z.view(-1, V), TARGET.view(-1)))[1],
    "topk": lambda z: z.topk(3).values,
    "operators": lambda z: (1 - z) * z**2 / (1 + z.exp()),
    "methods written in Python": lambda z: torch.cat(z.split(1)) * len(z),
    "a list": lambda z: torch.cat([z[:, :1], z], 1),
    "iteration": lambda z: torch.stack([row.logsumexp(-1) for row in z]),
    "a loss built inside": lambda z: nn.CrossEntropyLoss(reduction="sum")(z.view(-1, V), TARGET.view(-1)),
    "views in place": lambda z: (z[:, :-1].div_(2), z.sin())[1],
    "a view from before": viewed_before,
    "a loss after a change": changed_before,
    "columns": lambda z: F.cross_entropy(z[..., :7].reshape(-1, 7), TARGET.clamp(max=6).view(-1)),
    "a column": lambda z: z[:, :, 3],
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), torch.full((B * T, V), 1 / V, dtype=torch.float64)),
    "a trained scale": lambda z: F.cross_entropy((z * z.sum()).view(-1, V), TARGET.view(-1)),
    "assignment": written,
    "in place": lambda z: F.cross_entropy(z.div_(0.7).view(-1, V), TARGET.view(-1)),
    "a copy from before": lambda z: (z * 2, z.mul_(3))[0],
    "one use and a loss": lambda z: z.exp().sum() + F.cross_entropy(z.view(-1, V), TARGET.view(-1)),
}


@pytest.mark.parametrize("name", REAL)
def test_other_uses_get_real_logits(name):
    compare(REAL[name])


@pytest.mark.parametrize("what", ["hidden states", "logits"])
def test_changes_in_place_that_a_loss_would_not_see_raise(what):
    head, x = made_head()
    exact = F.cross_entropy(head(2 * x.sin()).view(-1, V), TARGET.view(-1))
    defer_logits(head)

    def run(x: Tensor, early: bool) -> Tensor:
        hidden = x.sin()
        if early:
            hidden.view(-1).mul_(2)
        z = head(hidden)
        if not early:
            for row in hidden if what == "hidden states" else z:
                row.mul_(2)
        else:
            z.sin().mul_(2)
        return F.cross_entropy(z.view(-1, V), TARGET.view(-1))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, True), exact)
    # Torch 2.11 cannot trace the change of rows over which a loop iterates.
    with pytest.raises(RuntimeError, match=r"changed in place|Dynamo failed to run FX node"):
        compiled(x, False)


def test_what_no_operator_can_see_raises():
    head, x = made_head()
    defer_logits(head)

    def through_a_view(x: Tensor) -> Tensor:
        z = 2 * head(x.sin())
        z.diagonal().fill_(0.0)
        return F.cross_entropy(z.view(-1, V), TARGET.view(-1))

    def hooked_late(x: Tensor) -> Tensor:
        z = head(x.sin())
        loss = F.cross_entropy(z.view(-1, V), TARGET.view(-1))
        z.register_hook(lambda g: 3 * g)
        return loss

    def in_a_checkpoint(x: Tensor, depth: int, of_logits: bool) -> Tensor:
        hidden = x.sin()
        z = head(hidden)

        def write(y: Tensor, depth: int) -> Tensor:
            if depth:
                return checkpoint(write, y, depth - 1, use_reentrant=False)
            y[..., :2].mul_(3.0)
            return y.sum()

        written = write(z if of_logits else hidden, depth)
        return F.cross_entropy(z.view(-1, V), TARGET.view(-1)) + 0 * written

    changed = "changed in place before a loss"
    checkpoints = [functools.partial(in_a_checkpoint, depth=n, of_logits=z) for n in (1, 2) for z in (True, False)]
    for run, message in (
        (through_a_view, changed), *((run, changed) for run in checkpoints), (hooked_late, "call it before the loss"),
    ):  # fmt: skip
        torch._dynamo.reset()
        with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported), match=message):
            torch.compile(run, fullgraph=True, backend="aot_eager")(x)


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a head in a checkpoint": lambda head, x: checkpoint(lambda x: head(x.sin()), x, use_reentrant=False).float(),
    "steps in a branch": lambda head, x: torch.cond(x.sum() > 0, lambda z: 2 * z, lambda z: z / 3, (head(x.sin()),)),
}


@pytest.mark.parametrize("made", INSIDE)
def test_a_loss_of_logits_from_a_graph_inside(made):
    head, x = made_head()

    def run(x: Tensor) -> Tensor:
        return F.cross_entropy(INSIDE[made](head, x).view(-1, V), TARGET.view(-1))

    exact = run(x)
    (dx,) = torch.autograd.grad(exact, x)
    defer_logits(head)
    loss = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], dx)


def test_a_list_of_logits_that_leave():
    head, x = made_head()
    exact = head(x).tolist()
    defer_logits(head)
    assert torch.compile(lambda x: head(x).tolist(), backend="eager")(x) == exact == torch.Tensor.tolist(head(x))


def test_logits_that_leave_a_checkpoint_share_memory():
    head, x = made_head()
    defer_logits(head)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        z = checkpoint(lambda x: head(x.sin()), x, use_reentrant=False)
        return z, z.contiguous()

    z, same = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    exact = 2 * z.detach()
    same.mul_(2)
    torch.testing.assert_close(z, exact)


def test_an_out_argument_gets_the_result():
    head, x = made_head()
    exact = head(x).logsumexp(-1)
    defer_logits(head)
    out = torch.zeros(B, T, dtype=torch.float64)

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        return torch.logsumexp(head(x), -1, out=out)

    torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, exact.detach())


def test_what_is_detached_requires_no_gradient():
    head, x = made_head()
    defer_logits(head)
    run = torch.compile(lambda x: head(x).detach().logsumexp(-1), fullgraph=True, backend="aot_eager")
    assert not run(x).requires_grad


def test_second_derivatives_are_refused():
    head, x = made_head()
    defer_logits(head)
    loss = torch.compile(lambda x: F.cross_entropy(head(x).view(-1, V), TARGET.view(-1)), backend="eager")(x)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_scales_and_heads_that_change_share_a_graph():
    """A temperature that changes from step to step is an input, and so is the head's record for `explain`."""
    head, x = made_head()
    heads = [copy.deepcopy(head) for _ in range(4)]

    def loss(head: nn.Linear, x: Tensor, temperature: float) -> Tensor:
        return F.cross_entropy((head(x) / temperature).view(-1, V), TARGET.view(-1))

    exact = [loss(head, x, 0.5 + i / 4) for i in range(4)]
    for one in heads:
        defer_logits(one)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for i, one in enumerate(heads):
        torch.testing.assert_close(compiled(one, x, 0.5 + i / 4), exact[i], rtol=1e-12, atol=0)
    assert counters["stats"]["unique_graphs"] <= 2


CHOSEN = TARGET.clamp(min=0)[..., None]


def old_and_new(z: Tensor) -> Tensor:
    with torch.no_grad():
        z.gather(-1, CHOSEN)
    return (z.logsumexp(-1) - z.gather(-1, CHOSEN)[..., 0]).mean()


def old_alone(z: Tensor) -> Tensor:
    with torch.no_grad():
        old = z.log_softmax(-1)
    return z.tanh().sum() - old.gather(-1, CHOSEN).mean()


@pytest.mark.parametrize("loss", [old_and_new, old_alone])
def test_logits_under_another_grad_mode(loss):
    gradients = []
    for defers in (False, True):
        head, x = made_head()
        if defers:
            defer_logits(head)
        torch.compile(lambda x, head=head: loss(head(x)), fullgraph=True, backend="aot_eager")(x).backward()
        gradients.append((head.weight.grad, x.grad))
    torch.testing.assert_close(gradients[1], gradients[0])


def by_out(h: Tensor) -> None:
    torch.mul(torch.ones_like(h), 2.0, out=h)


WRITES = {
    "out=": by_out,
    "foreach": lambda h: torch._foreach_mul_([torch.ones_like(h), h], 2.0),
    "an operator": lambda h: torch.ops.aten.copy_.default(h, torch.ones_like(h)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("leaves", [False, True])
def test_hidden_states_changed_without_grad_raise(leaves, write):
    """As in eager code: the weight's gradient would be of the changed hidden states."""
    if leaves and write == "foreach":
        pytest.skip("torch.compile itself does not raise for a head of torch's own")
    head, x = made_head()
    defer_logits(head)

    def run(x: Tensor) -> Tensor:
        hidden = x.detach().clone()
        z = head(hidden)
        with torch.no_grad():
            WRITES[write](hidden)
        return z if leaves else F.cross_entropy(z.view(-1, V), TARGET.view(-1))

    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        torch.compile(run, backend="aot_eager")(x).sum().backward()


@pytest.mark.parametrize("bag", [False, True])
def test_an_embedding_that_renormalizes_the_weight_raises(bag):
    """A tied embedding with a `max_norm` writes its weight, which the loss would read changed."""
    head, x = made_head()
    defer_logits(head)
    embed = functools.partial(F.embedding_bag if bag else F.embedding, max_norm=0.1)

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        z = head(x)
        written = embed(IDS, head.weight).sum()
        return F.cross_entropy(z.view(-1, V), TARGET.view(-1)) + written

    with pytest.raises(RuntimeError, match="changed in place"):
        torch.compile(run, backend="aot_eager")(x)


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("head_too", [False, True])
def test_autocast_around_the_head_or_the_loss_alone(head_too, loss):
    """Each step runs under the autocast that it had, and the loss is fused."""

    def step(head: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=head_too):
            z = head(x).view(-1, V)
        with torch.autocast("cpu", torch.bfloat16, enabled=loss):
            return F.cross_entropy(z.float(), TARGET.view(-1))

    found = []
    for defers in (False, True):
        head, x = made_head()
        head, x, compiled = head.float(), x.detach().float().requires_grad_(), Compiled()
        if defers:
            defer_logits(head)
        value = torch.compile(step, fullgraph=True, backend=compiled.backend)(head, x)
        value.backward()
        assert (compiled.n_fused, compiled.n_logits) == ((1, 0) if defers else (0, 1))
        found.append((value, x.grad, head.weight.grad))
    # Under autocast both round logits and gradients to bfloat16, at different places; otherwise float32 sums differ.
    torch.testing.assert_close(found[1], found[0], rtol=2e-2 if head_too else 1e-5, atol=2e-3 if head_too else 1e-6)


# Logits that leave the graph


def test_logits_that_leave_are_stand_ins():
    """A loss outside is fused, views and copies share their memory, and a read has the values and gradients."""
    head, x = made_head()
    exact = step(lambda x: F.cross_entropy(head(x.sin()).view(-1, V), TARGET.view(-1)), head, x)
    real = head(x.sin()).detach()
    compiled = Compiled()
    defer_logits(head)

    @torch.compile(fullgraph=True, backend=compiled.backend)
    def model(x: Tensor) -> dict[str, Any]:
        z = head(x.sin())
        return {"logits": z, "shifted": z[:, 1:], "scaled": z / 2}

    z = model(x)["logits"]
    assert type(z) is DeferredLogits
    assert not z.is_computed
    loss = F.cross_entropy(z.view(-1, V), TARGET.view(-1))
    for a, b in zip([loss.detach(), *torch.autograd.grad(loss, [x, *head.parameters()])], exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert not z.is_computed
    assert compiled.n_logits == 0
    out = model(x)
    with torch.no_grad():
        out["shifted"].mul_(3)
    torch.testing.assert_close(out["logits"][:, 1:].detach().clone(), 3 * real[:, 1:])
    torch.testing.assert_close(out["scaled"].detach().clone(), real / 2)
    torch.testing.assert_close(model(x)["logits"].exp().detach(), real.exp())


def test_logits_that_the_graph_computed_leave_as_real_ones():
    head, x = made_head()
    exact = head(x)
    defer_logits(head)
    z, _ = torch.compile(lambda x: (z := head(x), z.topk(2).values), fullgraph=True, backend="aot_eager")(x)
    assert type(z) is Tensor
    torch.testing.assert_close(z, exact)
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(exact.sum(), x)[0])


def test_logits_that_the_graph_changed_leave_as_real_ones():
    head, x = made_head()
    exact = head(x).detach()
    defer_logits(head)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Tensor) -> Any:
        z = head(x)
        first, copied = z[:, 0], z * 2
        z[:, 0] = 1.0
        z.add_(0.0)  # a method, as well
        return first, copied, z

    first, copied, z = (y.detach() for y in model(x))
    assert torch.equal(first, torch.ones_like(first))
    torch.testing.assert_close(copied, exact * 2)
    torch.testing.assert_close(z[:, 1:], exact[:, 1:])
    assert torch.equal(z[:, 0], first)


def test_logits_are_real_where_no_function_sees_the_whole_graph(monkeypatch):
    monkeypatch.setattr(traced, "at_end_of_trace", lambda function: False)
    head, x = made_head()
    exact = head(x)
    defer_logits(head)
    z = torch.compile(lambda x: head(x), fullgraph=True, backend="aot_eager")(x)
    assert type(z) is Tensor
    torch.testing.assert_close(z, exact)
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(exact.sum(), x)[0])


def test_an_older_torch_breaks_the_graph(monkeypatch):
    """Its steps are right, and fused outside of the graph."""
    monkeypatch.setattr(traced, "IS_SERVED", False)
    compiled = compare(FUSED["cross entropy"][1], fullgraph=False)
    assert (compiled.n_fused, compiled.n_logits) == (0, 0)
    assert counters["graph_break"]


def test_modes_of_the_call():
    """Gradients and autocast are those of the head's call, also outside of the graph."""
    head, x = made_head()
    head, x = head.float(), x.detach().float()
    defer_logits(head)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Tensor) -> Any:
        with torch.no_grad():
            z = head(x)
        with torch.autocast("cpu", torch.bfloat16):
            return z, head(x)

    constant, rounded = model(x)
    assert not constant.requires_grad
    assert (rounded.dtype, rounded.requires_grad) == (torch.bfloat16, True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, head.weight, head.bias)
    assert torch.equal(rounded.detach().clone(), expected)


# Steps


class Decoder(nn.Module):
    """A tiny language model in the style of nanoGPT, which returns its logits with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mlp, self.lm_head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.mlp(self.embedding(ids)).tanh())
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_compiles_once_for_each_kind_of_length(backend, device):
    torch.manual_seed(0)
    model = Decoder().to(device, torch.float64)
    stock = copy.deepcopy(model)
    defer_logits(model.lm_head)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, stock)]
    for i, length in enumerate((5, 7, 9, 12, 7, 5)):
        ids = torch.randint(V, (2, length + 1), device=device)
        # The second length makes the sizes dynamic.
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            logits, loss = compiled(ids[:, :-1], ids[:, 1:].contiguous())
        _, exact = stock(ids[:, :-1], ids[:, 1:].contiguous())
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0)
        assert type(logits) is DeferredLogits
        assert not logits.is_computed
        for optimizer, value in zip(optimizers, (loss, exact), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        for a, b in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    model.eval()
    with torch.no_grad():
        logits, loss = compiled(ids[:, :-1], ids[:, 1:].contiguous())
    assert type(logits) is Tensor
    torch.testing.assert_close(loss, stock(ids[:, :-1], ids[:, 1:].contiguous())[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_shifted_loss_compiles_once_for_each_kind_of_length(reduction):
    """Its sizes are symbols of the compiler, those of logits and of the target different ones."""
    head, x = made_head()
    stock = copy.deepcopy(head)
    defer_logits(head)

    def loss(head: nn.Linear, x: Tensor, target: Tensor) -> Tensor:
        z = head(x)[:, : x.shape[1] - 1].reshape(-1, V)
        return F.cross_entropy(z, target[:, 1:].reshape(-1), reduction=reduction).square().sum()

    compiled = torch.compile(lambda x, target: loss(head, x, target), fullgraph=True, backend="aot_eager")
    for n in (6, 4, 5):
        x, target = torch.randn(B, n, H, dtype=torch.float64, requires_grad=True), torch.randint(V, (B, n))
        ours, exact = compiled(x, target), loss(stock, x, target)
        torch.testing.assert_close(ours, exact)
        torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(exact, x))
    assert counters["stats"]["unique_graphs"] == 2


def deferring(model: Any) -> None:
    defer_logits(model.lm_head)


@pytest.mark.parametrize("patch", [deferring, apply_liger_kernel])
def test_a_step_of_transformers_is_one_graph(patch, device):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device, torch.float64).train()
    ids = torch.randint(V, (2, 6), device=device)

    def loss_of(ids: Tensor) -> Tensor:
        out = model(input_ids=ids, labels=ids, use_cache=False)
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.5 * out.loss

    def exact_loss(ids: Tensor) -> Tensor:  # the model's own is computed in float32
        logits = model(input_ids=ids, use_cache=False).logits
        return 1.5 * F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def measured(function: Callable[[Tensor], Tensor], ids: Tensor) -> list[Tensor]:
        loss = function(ids)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    exact = {n: measured(exact_loss, ids[:, :n]) for n in (6, 4, 5)}
    patch(model)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for n in (6, 4, 5, 6):
        loss, *gradients = measured(compiled, ids[:, :n])
        torch.testing.assert_close(loss, exact[n][0], rtol=1e-7, atol=0)
        for a, b in zip(gradients, exact[n][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_export_has_real_logits():
    """A program would name a call of this process, so the head exports an ordinary product."""
    head, x = made_head()
    exact = F.cross_entropy(head(x).view(-1, V), TARGET.view(-1))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x).view(-1, V), TARGET.view(-1))

    defer_logits(head)
    for strict in (False, True):
        program = torch.export.export(Loss(), (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), exact)


def patched_llama() -> tuple[Any, Tensor]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).train()
    apply_liger_kernel(model)
    return model, torch.randint(V, (2, 6))


def breaks() -> int:
    return sum(counters["graph_break"].values())


def test_a_patched_model_does_not_break_the_graph():
    """Its own code calls the head and the loss, and its output is a stand-in."""
    model, ids = patched_llama()
    arguments: dict[str, Any] = {"num_items_in_batch": torch.tensor(7)}
    compiled = torch.compile(model, backend="aot_eager")
    for n in (6, 4, 5):
        exact, ours = (f(input_ids=ids[:, :n], labels=ids[:, :n], **arguments) for f in (model, compiled))
        torch.testing.assert_close(ours.loss, exact.loss)
        assert type(ours.logits) is DeferredLogits
        assert not ours.logits.is_computed
    assert (breaks(), counters["stats"]["unique_graphs"]) == (0, 2)


def test_keywords_of_a_patched_model_break_the_graph_once():
    """Before the model, whose whole forward is one graph with the loss and its accuracy."""
    model, ids = patched_llama()
    compiled = torch.compile(model, backend="aot_eager")
    for keywords in ({"skip_logits": True, "return_token_accuracy": True}, {"return_token_accuracy": True}):
        for n in (6, 4, 5):
            exact, ours = (f(input_ids=ids[:, :n], labels=ids[:, :n], **keywords) for f in (model, compiled))
            torch.testing.assert_close(ours.loss, exact.loss)
            torch.testing.assert_close(ours.token_accuracy, exact.token_accuracy)
            assert not ours.token_accuracy.requires_grad
            assert (ours.logits is None) == ("skip_logits" in keywords)
    assert breaks() == 1
    out = compiled(input_ids=ids, labels=ids, skip_logits=False)
    assert type(out.logits) is Tensor


def test_head_fn_of_a_compiled_model():
    """The model's own cross entropy is withheld in the graph, and the gradient of `head_fn` goes through it."""
    model, ids = patched_llama()
    attach_head(model)
    compiled = torch.compile(model, backend="aot_eager")

    def loss(head: Any, input: Any) -> Tensor:
        logits = F.linear(input.hidden_states, head.weight)
        return F.cross_entropy(logits.flatten(0, 1), input.target.flatten()) + 3 * input.added_loss

    for n in (6, 4, 5):
        results = []
        for f in (model, compiled):
            value = f(input_ids=ids[:, :n], labels=ids[:, :n], head_fn=loss)
            results.append([value.detach(), *torch.autograd.grad(value, list(model.parameters()))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert breaks() == 1


def test_a_head_with_an_adapter_is_fused():
    peft = pytest.importorskip("peft")
    model, ids = patched_llama()
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    compiled = Compiled()
    results = []
    for f in (model, torch.compile(model, backend=compiled.backend, fullgraph=True)):
        loss = f(input_ids=ids, labels=ids).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, trained)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert (compiled.n_fused, compiled.n_logits) == (1, 0)
