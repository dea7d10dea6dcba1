"""Runs one program with stock logits and with deferred ones, and compares all that comes out.

A program is a function of a `World`: a small model with its input and targets. It returns tensors or other values. The
harness gives every returned tensor a random upstream gradient, unless the program ran `backward` itself, and compares

- the returned values, their dtypes, shapes and `requires_grad`, and what the program noted with `world.note`
- the gradients of all parameters and inputs, including which of them have none
- the class of the error, if there is one

    check(Case(lambda w: F.cross_entropy(w.z().flatten(0, 1), w.y.flatten()), fused=True))
    check(case, defer=stock)    # stock against stock: shows that the case itself is right

Both runs begin with the same seed. In float64 the results agree to 12 digits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from liger_chunked import defer_logits
from liger_chunked.deferred import DeferredLogits

B, T, H, V = 3, 5, 6, 23
BOUND = 1e-12  # float64

Defer = Callable[[nn.Module], Any]


def deferred(head: nn.Module) -> Any:
    """Defer in chunks of four rows, so that a fused loss never holds a tensor as large as the logits."""
    return defer_logits(head, logits_budget=4 * V * 8)


def stock(head: nn.Module) -> Any:
    """Leave the head alone: its logits are ordinary tensors."""
    return contextlib.nullcontext()


def plain(x: Any) -> Tensor:
    """Return a copy of the values of `x` as an ordinary tensor without a graph, whatever class `x` has."""
    x = x.detach()
    if type(x) in (Tensor, nn.Parameter):
        return x.clone()
    return torch.tensor(x.tolist(), dtype=x.dtype).reshape(x.shape)


def is_tensor(x: Any) -> bool:
    """Return whether `x` has values to compare. Deferred logits count, also where they are no `torch.Tensor`."""
    return isinstance(x, Tensor | DeferredLogits)


def loss_of(w: Any, z: Any) -> Tensor:
    """The cross entropy of logits with the world's targets."""
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), w.y.reshape(-1))


def logps(w: Any, z: Any) -> Tensor:
    """The log-probabilities of the world's ids, as trainers compute them."""
    return z.log_softmax(-1).gather(-1, w.ids.unsqueeze(-1)).squeeze(-1)


class Watch(TorchDispatchMode):
    """Count FLOPs, and record the largest tensor with memory, in elements, and the peak of memory, in bytes.

    It lets tensor subclasses handle their operations, and sees the operations on plain tensors that they run. What was
    there before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.largest = self.alive = self.peak = 0
        self.known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def freed(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    def made(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.largest = max(self.largest, storage.nbytes() // x.element_size())
        if storage not in self.known:
            self.known[storage] = None
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self.freed, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if type(x) is Tensor and not x.is_meta:
                self.made(x)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class Model(nn.Module):
    """A body and a head. `seen` holds the results of the head, outside of the module: copies do not copy them."""

    def __init__(self, width: int, vocab: int, bias: bool, dtype: torch.dtype, seen: list[Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh())
        self.head = nn.Linear(width, vocab, bias=bias, dtype=dtype)
        self.remember = seen.append

    def forward(self, x: Tensor) -> Any:
        z = self.head(self.body(x))
        self.remember(z)
        return z


@dataclass
class World:
    """What a program works with.

    - `model`, `teacher`: of one vocabulary and two widths, both with a head that defers
    - `x`, `x_teacher`: inputs (B, T, H) and (B, T, H + 1), leaves
    - `y`: targets (B, T) of which three are ignored; `ids`: token ids (B, T), none of them ignored
    - `mask`: (B, T) of bool; `adv`: a number for each token
    """

    defer: Defer = deferred
    dtype: torch.dtype = torch.float64
    head_dtype: torch.dtype | None = None  # None: as `dtype`
    rounded: tuple[torch.dtype, torch.dtype] | None = None  # dtypes whose values body and head have; None: their own
    sizes: tuple[int, int, int, int] = (B, T, H, V)
    bias: bool = True
    seed: int = 0
    notes: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        batch, length, width, vocab = self.sizes
        self.handles: list[Any] = []
        self.model = self._model("model", width)
        self.x = self.leaf("x", batch, length, width)
        self.ids = torch.randint(vocab, (batch, length), generator=self.generator)
        self.y = self.ids.clone()
        self.y[0, :2] = self.y[2, 3] = -100
        self.mask = self.y != -100
        self.adv = self.constant(batch, length)

    @functools.cached_property
    def teacher(self) -> Model:
        return self._model("teacher", self.sizes[2] + 1)

    @functools.cached_property
    def x_teacher(self) -> Tensor:
        batch, length, width, _ = self.sizes
        return self.leaf("x_teacher", batch, length, width + 1)

    def _model(self, name: str, width: int) -> Model:
        model = Model(width, self.sizes[3], self.bias, self.dtype, self.seen)
        model.head.to(self.head_dtype or self.dtype)
        for module, dtype in zip((model.body, model.head), self.rounded or (None, None), strict=True):
            for p in module.parameters():
                numbers = torch.randn(p.shape, generator=self.generator, dtype=torch.float64)
                # Products of wide layers have the size of their inputs.
                numbers = numbers / max(1.0, width / H) ** 0.5
                p.data.copy_(numbers.to(dtype or torch.float64))
        self.leaves |= {f"{name}.{k}": p for k, p in model.named_parameters()}
        self.handles.append(self.defer(model.head))
        return model

    @property
    def head(self) -> Any:
        return self.model.head

    def constant(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(self.rounded[0] if self.rounded else self.dtype).to(self.dtype)

    def leaf(self, name: str, *shape: int) -> Tensor:
        """Make a random tensor whose gradient is compared."""
        self.leaves[name] = self.constant(*shape).requires_grad_()
        return self.leaves[name]

    def hidden(self) -> Tensor:
        return self.model.body(self.x)

    def z(self) -> Any:
        """The logits (B, T, V) of a new call of the model."""
        return self.model(self.x)

    def rows(self) -> Any:
        """The logits (B T, V) of a new call of the model."""
        return self.z().view(-1, V)

    def z_teacher(self) -> Any:
        return self.teacher(self.x_teacher)

    def note(self, *values: Any) -> None:
        """Keep copies of values as they are now, to be compared in this order."""
        self.notes += [plain(x) if is_tensor(x) else x for x in values]


@dataclass
class Case:
    """A program, and what is expected of it.

    - `fused`: no real logits may exist, neither by `is_computed` nor as a tensor of their size
    - `raises`: stock raises this, and deferred logits must too, as below
    - `may_raise`: stock may raise. Then deferred logits must raise an error of the same class. Where stock says that
      what its backward reads was changed in place, they may also have the values and gradients without that change
    - `uncounted`: the program writes to memory without torch's version counter (`.data`, NumPy): stock's backward reads
      what was written. Deferred logits may instead have the gradients of what the forward read
    - `refusable`: deferred logits may raise a RuntimeError where stock has a value
    - `bound`: the largest relative error
    """

    program: Callable[[World], Any]
    fused: bool = False
    raises: type[BaseException] | None = None
    may_raise: bool = False
    refusable: bool = False
    uncounted: bool = False
    bound: float = BOUND


def fused(program: Callable[[World], Any], **options: Any) -> Case:
    return Case(program, fused=True, **options)


def raises(error: type[BaseException], program: Callable[[World], Any], **options: Any) -> Case:
    return Case(program, raises=error, **options)


def refusable(program: Callable[[World], Any], **options: Any) -> Case:
    return Case(program, refusable=True, **options)


@dataclass
class Outcome:
    values: list[Any]
    gradients: dict[str, Tensor | None]
    error: BaseException | None
    is_deferred: bool  # the head returned deferred logits
    is_computed: bool  # real logits exist
    watch: Watch


def leaves_of(result: Any) -> list[Any]:
    """Return tensors and values in containers and dataclasses."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, dict):
        return [y for key in result for y in leaves_of(result[key])]
    if isinstance(result, list | tuple):
        return [y for x in result for y in leaves_of(x)]
    return [result]


def saved_copies() -> Any:
    """Let backward read copies of what the forward saved: its gradients are right whatever changes in place later."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)


def is_version_error(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and "needed for gradient computation has been modified" in str(error)


def run(
    program: Callable[[World], Any], defer: Defer, watched: bool = False, copies: bool = False, **options: Any
) -> Outcome:
    """Run a program, and then backward from all tensors that it returned."""
    torch.manual_seed(0)
    world = World(defer, **options)
    values: list[Any] = []
    error, watch, computed = None, Watch(), False
    with watch if watched else saved_copies() if copies else contextlib.nullcontext():
        try:
            results = leaves_of(program(world))
            computed = any(getattr(z, "is_computed", True) for z in world.seen)
            backward_of_all(results, world.generator)
            computed |= any(getattr(z, "is_computed", True) for z in world.seen)
        except Exception as e:
            error = e
    if error is None:
        for x in results:
            values += [plain(x), x.dtype, x.requires_grad] if is_tensor(x) else [x]
    gradients = {name: None if leaf.grad is None else plain(leaf.grad) for name, leaf in world.leaves.items()}
    is_deferred = any(isinstance(z, DeferredLogits) for z in world.seen)
    return Outcome(values + world.notes, gradients, error, is_deferred, computed, watch)


def backward_of_all(results: list[Any], generator: torch.Generator) -> None:
    """Give each result that has a graph a random gradient."""
    total: Any = 0
    for x in results:
        if is_tensor(x) and x.requires_grad:
            upstream = torch.randn(tuple(x.shape), generator=generator, dtype=torch.float64)
            total = total + (x * upstream.to(x.dtype)).sum().double()
    if isinstance(total, Tensor):
        total.backward()


def same_value(ours: Any, theirs: Any, bound: float) -> str | None:
    """Return what differs, or None."""
    if type(ours) is not type(theirs):
        return f"{type(ours).__name__} for {type(theirs).__name__}"
    if isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=bound, abs_tol=bound):
        return None
    if not isinstance(theirs, Tensor):
        return None if ours == theirs or (ours != ours and theirs != theirs) else f"{ours!r} for {theirs!r}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{tuple(ours.shape)}, {ours.dtype} for {tuple(theirs.shape)}, {theirs.dtype}"
    if not theirs.is_floating_point():
        return None if torch.equal(ours, theirs) else f"{ours} for {theirs}"
    a, b = ours.double(), theirs.double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
        return "other infinities or not-a-numbers"
    a, b = a[finite], b[finite]
    error, norm = float((a - b).norm()), float(b.norm())
    return None if error <= bound * norm + 1e-15 else f"a relative error of {error / (norm or 1.0):.1e}"


def differences(found: Outcome, exact: Outcome, bound: float) -> list[str]:
    """Return what differs in values and gradients."""
    texts = []
    if len(found.values) != len(exact.values):
        texts.append(f"{len(found.values)} values for {len(exact.values)}")
    for i, (ours, theirs) in enumerate(zip(found.values, exact.values, strict=False)):
        if (text := same_value(ours, theirs, bound)) is not None:
            texts.append(f"value {i}: {text}")
    for name, theirs in exact.gradients.items():
        if (text := same_value(found.gradients[name], theirs, bound)) is not None:
            texts.append(f"gradient of {name}: {text}")
    return texts


def check(case: Case, defer: Defer = deferred, **options: Any) -> None:
    """Assert that deferred logits do what stock logits do, and that the program needs no real ones if it must not."""
    exact = run(case.program, stock, **options)
    expected = case.raises or (type(exact.error) if case.may_raise and exact.error is not None else None)
    if expected is None:
        if exact.error is not None:
            raise exact.error
        assert exact.values or any(g is not None for g in exact.gradients.values()), "the program compares nothing"
    else:
        assert isinstance(exact.error, expected), f"stock raises {exact.error!r}"
    found = run(case.program, defer, watched=case.fused, **options)
    if expected is not None and found.error is None and is_version_error(exact.error):
        exact = run(case.program, stock, copies=True, **options)
    elif expected is not None:
        assert isinstance(found.error, expected), f"{found.error!r} for {exact.error!r}"
        return
    if found.error is not None:
        if case.refusable and isinstance(found.error, RuntimeError) and str(found.error):
            return
        raise found.error
    different = differences(found, exact, case.bound)
    if different and case.uncounted:
        different = differences(found, run(case.program, stock, copies=True, **options), case.bound)
    assert not different, "; ".join(different)
    if case.fused and defer is not stock:
        assert found.is_deferred, "the head did not defer"
        assert not found.is_computed, "real logits exist"
        assert found.watch.largest < B * T * V, f"a tensor of {found.watch.largest} elements"


def slightly_wrong(head: nn.Module) -> Any:
    """Give the head's logits a gradient that is wrong in the seventh digit: the harness must see it."""
    return head.register_forward_hook(lambda module, args, z: z + 1e-6 * (z - z.detach()))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while, as a user's monkeypatch."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
