"""Deferred logits in several processes: three steps of training equal stock ones, in float64, for each layout.

A row of `LAYOUTS` wraps a toy decoder. A row of `IDIOMS` makes a loss of its logits. Each pair runs with the loss
outside the model's forward and inside it, with stock logits and with deferred ones. The losses, all parameters after
each step, and what the idiom noted are compared.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fresh_process import FreshProcesses
from ranks import Gathering, join
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from liger_chunked import DeferredLogits, defer_logits, whole_graph
from liger_chunked.deferred import traced

V, H, B, T, STEPS = 22, 8, 2, 6, 3
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Returns logits; with targets and a loss, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V)

    def forward(self, ids: Tensor, y: Tensor | None = None, loss: Any = None) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        z = self.head(self.norm(x))
        return z if loss is None else loss(z, y)


# Losses


def shifted(z: Tensor, y: Tensor, note: Any) -> Tensor:
    return F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def of_all_rows(z: Tensor, y: Tensor, note: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def of_logps(z: Tensor, y: Tensor, note: Any) -> Tensor:
    logps = z[:, :-1].log_softmax(-1).gather(-1, y[:, 1:, None]).squeeze(-1)
    return -(logps * torch.linspace(0.5, 1.5, T - 1, dtype=logps.dtype, device=logps.device)).sum() / B


def with_metrics(z: Tensor, y: Tensor, note: Any) -> Tensor:
    loss = shifted(z, y, note)
    note(z.argmax(-1))
    note((z[:, :-1].argmax(-1) == y[:, 1:]).double().mean())
    return loss


def of_real(z: Tensor, y: Tensor, note: Any) -> Tensor:
    """Not a loss that is fused: gradients of real logits."""
    return shifted(z, y, note) + 1e-2 * (z.sigmoid() ** 2).mean()


def of_one_rank(z: Tensor, y: Tensor, note: Any) -> Tensor:
    loss = shifted(z, y, note)
    if dist.get_rank() == 0:
        note(z.argmax(-1))
        note(z.max())
    return loss


IDIOMS: dict[str, Callable[..., Tensor]] = {
    "all-rows": of_all_rows,
    "shifted": shifted,
    "logps": of_logps,
    "metrics": with_metrics,
    "real": of_real,
    "one-rank": of_one_rank,
}


# Layouts


@dataclass(frozen=True)
class Layout:
    """How a model is distributed.

    - `wrap(model)`: returns the distributed model
    - `fused`: no real logits exist where the loss is fused
    - `same_batch`: ranks share a batch, as in tensor parallelism
    - `bound`: of errors relative to the largest value, or to 1. Chunks, and the ranks' reductions, sum in another
      order: by at most 1.8e-15 in float64, of two calls of the model. Two digits more are for another BLAS
    - `idioms`: those that stock code can run
    - `later`: the head defers only once the model is wrapped
    - `slow`: runs with `--slow` only
    """

    wrap: Callable[[Any], Any]
    fused: bool = True
    same_batch: bool = False
    bound: float = 1e-13
    idioms: tuple[str, ...] = tuple(IDIOMS)
    micro_batches: int = 1
    calls: int = 1  # of the model before the backward
    later: bool = False
    slow: bool = False


def compiled(model: Any) -> Any:
    return torch.compile(DistributedDataParallel(model), backend="eager")


def fsdp2(
    model: Any, layers: bool = False, apart: Any = (), frozen: bool = False, tied: bool = False, **options: Any
) -> Any:
    if tied:
        model.head.weight = model.embedding.weight
    if frozen:
        for part in (model.embedding, model.layers, model.norm):
            part.requires_grad_(False)
    for layer in model.layers if layers else ():
        fully_shard(layer, **options)
    if apart:
        parts = [getattr(model, name) for name in apart]
        fully_shard(parts[0] if len(parts) == 1 else parts, **options)
    return fully_shard(model, **options)


def fsdp1(model: Any, kinds: set[Any] = frozenset(), **options: Any) -> Any:  # type: ignore[assignment]
    policy = ModuleWrapPolicy(kinds) if kinds else None
    device = next(model.parameters()).device
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **options)


def tensor_parallel(model: Any, sequence: bool = False, local: bool = False, **head: Any) -> Any:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    plan: dict[str, Any] = {"head": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), **head)}
    if sequence:
        # Each rank runs the layers on its part of the tokens.
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel(use_local_output=local)
    return parallelize_module(model, mesh, plan)


P = functools.partial
FREED = {"reshard_after_forward": True}
HALF = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)
# The logits are real DTensors. torch cuts no rows of these for its parallel loss.
SPLIT: dict[str, Any] = {"same_batch": True, "fused": False, "idioms": ("all-rows",)}
LAYOUTS: dict[str, Layout] = {
    "ddp": Layout(DistributedDataParallel),
    "ddp-unused": Layout(P(DistributedDataParallel, find_unused_parameters=True)),
    "ddp-static": Layout(P(DistributedDataParallel, static_graph=True)),
    "ddp-compiled": Layout(compiled, idioms=("shifted", "logps"), slow=True),
    "ddp-views": Layout(P(DistributedDataParallel, gradient_as_bucket_view=True)),
    "ddp-no-sync": Layout(DistributedDataParallel, micro_batches=2),
    "ddp-views-no-sync": Layout(P(DistributedDataParallel, gradient_as_bucket_view=True), micro_batches=2),
    "fsdp2-root": Layout(fsdp2),
    "fsdp2-layers": Layout(P(fsdp2, layers=True)),
    "fsdp2-tied": Layout(P(fsdp2, layers=True, tied=True), micro_batches=2),
    "fsdp2-apart-later": Layout(P(fsdp2, layers=True, apart=("head",)), later=True),
    "fsdp2-apart": Layout(P(fsdp2, layers=True, apart=("head",))),
    "fsdp2-with-norm": Layout(P(fsdp2, layers=True, apart=("norm", "head"))),
    "fsdp2-freed": Layout(P(fsdp2, layers=True, **FREED)),
    "fsdp2-apart-freed": Layout(P(fsdp2, apart=("head",), **FREED)),
    "fsdp2-frozen": Layout(P(fsdp2, layers=True, frozen=True)),
    "fsdp2-frozen-apart": Layout(P(fsdp2, apart=("head",), frozen=True)),
    "fsdp2-output-dtype": Layout(P(fsdp2, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32)), bound=1e-6),
    "fsdp2-mixed": Layout(P(fsdp2, apart=("head",), mp_policy=HALF), bound=1e-5),
    "fsdp2-no-sync": Layout(P(fsdp2, layers=True, apart=("head",)), micro_batches=2),
    "fsdp2-twice": Layout(P(fsdp2, layers=True), calls=2),
    "fsdp2-apart-twice": Layout(P(fsdp2, layers=True, apart=("head",)), calls=2),
    "fsdp1-root": Layout(P(fsdp1, use_orig_params=True)),
    "fsdp1-root-flat": Layout(P(fsdp1, use_orig_params=False)),
    "fsdp1-layers": Layout(P(fsdp1, kinds={Layer}, use_orig_params=True)),
    "fsdp1-apart": Layout(P(fsdp1, kinds={Layer, nn.Linear}, use_orig_params=True)),
    "fsdp1-apart-flat": Layout(P(fsdp1, kinds={Layer, nn.Linear}, use_orig_params=False)),
    "fsdp1-apart-no-sync": Layout(P(fsdp1, kinds={nn.Linear}, use_orig_params=True), micro_batches=2),
    "fsdp1-twice": Layout(P(fsdp1, kinds={Layer}, use_orig_params=True), calls=2),
    "fsdp1-apart-twice": Layout(P(fsdp1, kinds={nn.Linear}, use_orig_params=True), calls=2),
    "tp": Layout(P(tensor_parallel, output_layouts=Replicate()), same_batch=True, idioms=tuple(IDIOMS)[:-1]),
    "tp-sequence": Layout(
        P(tensor_parallel, sequence=True, output_layouts=Replicate()), same_batch=True, idioms=tuple(IDIOMS)[:-1]
    ),
    "tp-local-sequence": Layout(
        P(tensor_parallel, sequence=True, local=True, output_layouts=Replicate()),
        same_batch=True,
        idioms=tuple(IDIOMS)[:-1],
    ),
    "tp-split": Layout(P(tensor_parallel, output_layouts=Shard(2), use_local_output=False), **SPLIT),
    "tp-split-sequence": Layout(
        P(tensor_parallel, sequence=True, output_layouts=Shard(2), use_local_output=False), **SPLIT
    ),
}


class Gathers(TorchDispatchMode):
    """Counts the collectives that gather parameters."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in function.name().replace("_", "")
        return function(*args, **(kwargs or {}))


def own(x: Tensor) -> Tensor:
    """Return a copy of this rank's part."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def trained(layout: Layout, idiom: str, inside: bool, defers: bool, device: str) -> list[Any]:
    """Return the losses and notes of three steps, and this rank's parts of all parameters after each."""
    torch.manual_seed(0)
    model = Decoder().double().to(device)
    head, known = model.head, []
    if defers and not layout.later:
        defer_logits(head, logits_budget=4 * 8 * V)
    run = layout.wrap(model)
    if defers and layout.later:
        defer_logits(head, logits_budget=4 * 8 * V)
    # Not "foreach", a GPU's default: it refuses plain tensors beside the DTensors of tensor parallelism.
    optimizer = torch.optim.SGD(run.parameters(), lr=0.5, foreach=False)
    rank = 0 if layout.same_batch else dist.get_rank()
    generator = torch.Generator().manual_seed(1 + rank)

    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        if defers:
            assert isinstance(z, DeferredLogits) == layout.fused, type(z)
        return IDIOMS[idiom](z, y, lambda x: known.append(own(x)))

    for _ in range(STEPS):
        for i in range(layout.micro_batches):
            ids = torch.randint(V, (B, T), generator=generator).to(device)
            # FSDP2's way first.
            last = i == layout.micro_batches - 1
            if hasattr(run, "set_requires_gradient_sync"):
                run.set_requires_gradient_sync(last)
            local = contextlib.nullcontext() if last or not hasattr(run, "no_sync") else run.no_sync()
            split = isinstance(layout.wrap, functools.partial) and "use_local_output" in layout.wrap.keywords
            with local, loss_parallel() if split else contextlib.nullcontext():
                batch = [ids.roll(n, 0) + n for n in range(layout.calls)]
                batch = [x % V for x in batch]
                if inside:
                    losses = [run(x, x, loss_of) for x in batch]
                else:
                    losses = [loss_of(z, x) for z, x in zip([run(x) for x in batch], batch, strict=True)]
                loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
                loss.backward()
            known.append(own(loss))
        optimizer.step()
        optimizer.zero_grad()
        known += [own(p) for p in run.parameters() if p.numel()]  # FSDP 1 leaves a rank without some
    assert not defers or hasattr(type(head), "_liger_defers")
    return known


def compare(name: str, layout: Layout, idiom: str, inside: bool, device: str) -> None:
    # Of parameters. A tensor-parallel head gathers statistics and hidden states, where stock gathers logits.
    counts_gathers = name.startswith("fsdp") and idiom in ("shifted", "all-rows")
    with Gathers() if counts_gathers else contextlib.nullcontext() as of_stock:
        stock = trained(layout, idiom, inside, False, device)
    with Gathers() if counts_gathers else contextlib.nullcontext() as ours:
        found = trained(layout, idiom, inside, True, device)
    if ours is not None and of_stock is not None:
        assert ours.count <= of_stock.count, (name, idiom, ours.count)
    assert len(stock) == len(found)
    for i, (a, b) in enumerate(zip(stock, found, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, (name, idiom, inside, i, a.dtype, b.dtype)
        error = (a - b).abs().max() / a.abs().max().clamp(min=1)
        assert error <= layout.bound, (name, idiom, inside, i, error)


@pytest.mark.parametrize("idiom", [name for name in IDIOMS if name != "one-rank"])
def test_a_weight_without_data(idiom: str) -> None:
    """ZeRO-3 takes the data of the head's weight away after its forward, and brings it back in its backward."""

    def steps(defers: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, known = Decoder().double(), []
        noted: list[Tensor] = []
        if defers:
            defer_logits(model.head, logits_budget=4 * 8 * V)
        data = {p: p.data for p in model.head.parameters()}

        def gather() -> None:
            for p, x in data.items():
                p.data = x

        def release(module: nn.Module, args: Any, z: Tensor) -> Tensor:
            for p in data:
                p.data = torch.empty(0, dtype=p.dtype)
            return Gathering.apply(z, gather)

        model.head.register_forward_pre_hook(lambda module, args: gather())
        model.head.register_forward_hook(release)
        for i in range(STEPS):
            ids = (torch.arange(B * T).view(B, T) * (i + 3)) % V
            z = model(ids)
            loss = IDIOMS[idiom](z, ids, lambda x: noted.append(x.detach().clone()))
            loss.backward()
            known += [loss.detach(), z.argmax(-1)]  # this rank still has the data
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.5 * p.grad
                    p.grad = None
            known += [p.detach().clone() for p in model.parameters()]
        return known + noted

    # Chunks of rows sum dW in another order: by 2.8e-16 of the largest value, up to 21. Another BLAS sums otherwise.
    for a, b in zip(steps(False), steps(True), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-14, atol=1e-14)


def read_late(rank: int, folder: str, apart: str) -> None:
    """After the backward, FSDP has freed the weights. Reading logits says so at once, on one rank alone too."""
    join(rank, 2, folder)
    ids = torch.arange(B * T).view(B, T) % V
    for wrap in (fsdp2, fsdp1):
        torch.manual_seed(0)
        model = Decoder()
        defer_logits(model.head)
        if apart == "True":
            options: dict[str, Any] = {"apart": ("head",)} if wrap is fsdp2 else {"kinds": {nn.Linear}}
        else:
            options = {}
        run = wrap(model, **options)
        for _ in range(2):
            z = run(ids)
            loss = F.cross_entropy(z.flatten(0, 1), ids.flatten())
            early = z.argmax(-1)
            loss.backward()
            assert torch.equal(z.argmax(-1), early)  # known since then
            z = run(ids)
            F.cross_entropy(z.flatten(0, 1), ids.flatten()).backward()
            if rank == 0:
                for read in (lambda z: z.argmax(-1), torch.max):
                    with pytest.raises(RuntimeError, match=r"freed the weights of the head .* before the backward"):
                        read(z)
            run.zero_grad()
    dist.destroy_process_group()


@pytest.mark.parametrize("apart", [False, True])
def test_reading_after_the_backward(tmp_path: Path, fresh_process: FreshProcesses, apart: bool) -> None:
    fresh_process.spawn(read_late, 2, str(tmp_path), str(apart))


class WithLoss(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        return shifted(super().forward(ids), ids, None)


def steps_of_fsdp2(defers: bool) -> list[Tensor]:
    """Return losses, and this rank's parts of the parameters, of a model that is compiled if its head defers."""
    torch.manual_seed(0)
    model, known = WithLoss().double(), []
    if defers:
        defer_logits(model.head, logits_budget=4 * 8 * V)
    run = fsdp2(model)
    if defers:
        run.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(run.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        ids = torch.randint(V, (B, T), generator=generator)
        loss = run(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        known += [loss.detach(), *map(own, run.parameters())]
    return known


def compiled_worker(rank: int, world: str, folder: str) -> None:
    join(rank, world, folder)
    stock, n_fused, run = steps_of_fsdp2(False), 0, traced._run

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_fused
        n_fused += 1
        return run(*args, **kwargs)

    whole_graph.FUNCTIONS["deferred"] = noted
    # float64, whose sums over chunks have another order than stock's
    torch.testing.assert_close(steps_of_fsdp2(True), stock, rtol=1e-12, atol=1e-12)
    whole_graph.FUNCTIONS["deferred"] = run
    assert n_fused >= STEPS
    dist.destroy_process_group()


def test_a_compiled_loss_inside_fsdp2(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    """Its operator has the tensors of the head, and no module of FSDP's around it."""
    fresh_process.spawn(compiled_worker, 2, "2", str(tmp_path))


def worker(rank: int, world: str, folder: str, layouts: str, device: str, every: str) -> None:
    join(rank, world, folder, device)
    warnings.simplefilter("ignore")
    for i, name in enumerate(layouts.split()):
        layout = LAYOUTS[name]
        if layout.slow and every != "True":
            continue
        cases = [(idiom, inside) for idiom in layout.idioms for inside in (False, True)]
        # Otherwise two cases, one of them inside. Neighbouring layouts have other idioms.
        for idiom, inside in cases if every == "True" else [cases[(5 * i + k) % len(cases)] for k in (0, 7)]:
            compare(name, layout, idiom, inside, device)
    dist.destroy_process_group()


GROUPS = {kind: [name for name in LAYOUTS if name.startswith(kind)] for kind in ("ddp", "fsdp2", "fsdp1", "tp")}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_training_equals_stock(
    tmp_path: Path, fresh_process: FreshProcesses, kind: str, world: int, every: bool
) -> None:
    fresh_process.spawn(worker, world, str(world), str(tmp_path), " ".join(GROUPS[kind]), "cpu", str(every))


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("kind", GROUPS)
def test_training_on_two_gpus(tmp_path: Path, fresh_process: FreshProcesses, kind: str) -> None:
    fresh_process.spawn(worker, 2, "2", str(tmp_path), " ".join(GROUPS[kind]), "cuda", "True")


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("idiom", ["shifted", "logps", "real"])
def test_data_parallel(idiom: str, inside: bool) -> None:
    """Replicas on two devices. Outside of the forward, `DataParallel` gathers logits, which are real then."""

    def trained_by_replicas(defers: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Decoder().double()
        if defers:
            defer_logits(model.head, logits_budget=4 * 8 * V)
        run = nn.DataParallel(model.cuda())
        optimizer = torch.optim.SGD(run.parameters(), lr=0.5)
        known = []
        for _ in range(STEPS):
            ids = torch.randint(V, (2 * B, T), device="cuda")

            def loss_of(z: Tensor, y: Tensor) -> Tensor:
                return IDIOMS[idiom](z, y, lambda x: None)[None]

            loss = (run(ids, ids, loss_of) if inside else loss_of(run(ids), ids)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            known += [loss.detach(), *(p.detach().clone() for p in model.parameters())]
        return known

    # Chunks of rows sum dW in another order, in kernels that cuBLAS chooses by the number of rows. DataParallel then
    # adds the gradients of the replicas.
    for a, b in zip(*map(trained_by_replicas, (False, True)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-11)
