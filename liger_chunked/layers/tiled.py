"""Token-wise blocks of a model, such as MLPs, run tile by tile over the tokens.

The backward recomputes a tile and adds its part of the weights' gradients, so the activations in memory are those of
one tile. Figures for `down(act(gate(x)) * up(x))` with N tokens, in products of N·H·I:

    untiled, in a checkpointed layer     forward 3, recompute 2, backward 6
    tiled, in a checkpointed layer       forward 3, recompute 2, backward 6
    tiled, without a checkpoint          forward 3, recompute 2, backward 6

A tile costs no product more than a checkpoint alone, for two reasons:

1. **A checkpoint around the block stops before it.** torch's non-reentrant checkpoints recompute until they have every
   tensor that their forward saved. `_Input` saves the block's input before the block runs, and `_Tiles` saves nothing,
   so a layer that ends with the block and a residual sum is not recomputed any further. The tiles' own recomputation
   takes the place of the checkpoint's.
2. **The last product is not recomputed.** No gradient reads the block's output, so a tile's backward replaces the
   product that returned it with an empty tensor of its shape.

A norm after the block, as in OLMo 2 or Gemma 2, would save the block's output, so that a checkpoint would run the block
again, and then the tiles once more. `after_tiles` makes the norm a part of the tiles instead. Its backward reads the
block's output, so the last product is recomputed:

    untiled, in a checkpointed layer     forward 3, recompute 3, backward 6
    tiled, in a checkpointed layer       forward 3, recompute 3, backward 6

A reentrant checkpoint, and any checkpoint where another operation saves the block's output, runs the block again, as it
does without tiles. There the tiles recompute two products more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_chunked.device import ACCELERATOR
from liger_chunked.dtensor import any_dtensor
from liger_chunked.engine.sink import accumulate
from liger_chunked.engine.surroundings import in_checkpoint, isolated
from liger_chunked.kernels.backend import first_derivative
from liger_chunked.kernels.operands import all_plain
from liger_chunked.private import HAS_VERSIONS, graph_task_id, own_tensors, version_of
from liger_chunked.types import accumulation_dtype, described, shown
from liger_chunked.what_ran import note_tiles

Tokens: TypeAlias = bool | int | Literal["auto"]
"""Tokens of a tile. True: chosen by the sizes of the block. "auto": so, where it saves memory. False: one tile."""

Function: TypeAlias = Callable[[Tensor], Tensor]
Result: TypeAlias = tuple[Tensor | None, list[Tensor | None]]  # dx, and the gradients of a block's tensors

_LEAST_TOKENS = 4096  # of a chosen tile: as in the head, products of fewer rows do not fill a GPU
_ALIGNED = 128  # tokens, a multiple of the tiles of matrix products


def check_tokens(name: str, tokens: object) -> None:
    """Raise an error unless `tokens` is a `Tokens`."""
    if isinstance(tokens, bool) or tokens == "auto":
        return
    if not isinstance(tokens, int):
        raise TypeError(f'{name} must be True, False, None, "auto" or the tokens of a tile, got {shown(tokens)}')
    if tokens < 1:
        raise ValueError(f"{name} must be a positive number of tokens, got {tokens}")


def tile_tokens(module: nn.Module, x: Tensor, tokens: Tokens) -> int | None:
    """Return how many tokens each tile of `x` (..., H) gets; None if `module` runs on all of them at once."""
    n, hidden_size = x.shape[:-1].numel(), x.shape[-1]
    if tokens is False:
        return None
    if tokens is True or tokens == "auto":
        if n <= _least_tokens(hidden_size):
            return None
        most = chosen_tokens(module, x)
    else:
        most = tokens
    if n <= most or (tokens == "auto" and not _saves_memory(module, x, n, most)):
        return None
    n_tiles = -(-n // most)
    equal = -(-n // n_tiles)  # a short last tile would run at a part of the GPU
    return min(most, -(-equal // _ALIGNED) * _ALIGNED)


def _least_tokens(hidden_size: int) -> int:
    """Return the fewest tokens of a chosen tile.

    2·H tokens have 6·H·I elements of activations. In bfloat16 these are as many bytes as the weights' float32 sums,
    3·H·I elements: smaller tiles hardly save memory.
    """
    return max(_LEAST_TOKENS, 2 * hidden_size)


def chosen_tokens(module: nn.Module, x: Tensor) -> int:
    """Return the most tokens of a tile of `module`, a gated MLP, on `x` (..., H) of N tokens.

    Every tile reads and writes the weights' float32 sums, so few large tiles are faster. The largest tiles that cost no
    memory have activations and sums of 3·N·H elements, because the backward of the same layer's attention takes more
    than that beside the MLP's other tensors. In tensors of N·H elements, for queries of H columns:

        attention   dy, the gradients of its output and its queries, a float32 sum of these (2), and dk and dv, or
                    gradients of all heads' keys and values (2)                                                       7
        MLP         dy, the norm's input and output, dx, and a tile                                            4 + tile
    """
    least = _least_tokens(x.shape[-1])
    a_tensor, sums = _bytes_of_tile(module, x)
    if not a_tensor:  # a module without the sizes of its projections
        return least
    return max(least, (3 * x.numel() * x.element_size() - sums) // (_tensors_in_tile(module) * a_tensor))


def _tensors_in_tile(module: nn.Module) -> int:
    """Return how many tensors of I columns a tile has at once.

    Gate, up, and their product or its gradient: `_Product` frees the one before it makes the other. An adapter of a
    projection has a result and a gradient of its own.
    """
    return 3 if len(_projection_sizes(module)) <= 3 else 5


def _bytes_of_tile(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return bytes of I elements, a token's gate, and of the weights' sums."""
    a_tensor = intermediate_size(module, x.shape[-1]) * x.element_size()
    # Weights that are float32 themselves need no sums beside their gradients.
    sums = sum(w.numel() * accumulation_dtype(w.dtype).itemsize for w in trainable(module) if w.dtype.itemsize < 4)
    return a_tensor, sums


def _saves_memory(module: nn.Module, x: Tensor, n: int, tokens: int) -> bool:
    """Whether the activations of all tokens take more than twice what a tile's and the float32 sums take."""
    a_tensor, sums = _bytes_of_tile(module, x)
    in_tile = _tensors_in_tile(module)
    whole = in_tile + 1  # autograd's linear layers hold the product and its gradient
    return n * whole * a_tensor > 2 * (tokens * in_tile * a_tensor + sums)


def intermediate_size(module: nn.Module, hidden_size: int) -> int:
    """Return I of a gated MLP, whose three projections have 3·H·I weights; also if they are quantized or adapted."""
    return sum(i * o for i, o in _projection_sizes(module)) // (3 * hidden_size)


def _projection_sizes(module: nn.Module) -> list[tuple[int, int]]:
    sizes = [(getattr(m, "in_features", None), getattr(m, "out_features", None)) for m in _leaves(module)]
    return [(i, o) for i, o in sizes if isinstance(i, int) and isinstance(o, int)]


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    yield from (m for m in module.modules() if next(m.children(), None) is None)


def trainable(module: nn.Module) -> list[Tensor]:
    """Return the tensors of a block that require a gradient, each once.

    Parameters, and plain attributes: FSDP 1 and DataParallel put views in place of the parameters.
    """
    found: dict[int, Tensor] = {}
    for part in module.modules():
        attributes = (x for x in vars(part).values() if isinstance(x, Tensor))
        found |= {id(x): x for x in (*own_tensors(part).values(), *attributes) if x.requires_grad}
    return list(found.values())


@torch.compiler.disable(reason="tiles run outside of compiled graphs")  # type: ignore[untyped-decorator]
def tiled(function: Function, module: nn.Module, x: Tensor, tokens: int) -> Tensor:
    """Return `function(x)`, computed for `tokens` tokens at a time.

    `function` must be token-wise: row n of its result depends on row n of `x` alone. The backward runs it again for
    each tile, under the autocast and random numbers of its forward. Gradients of weights are summed in float32. Each
    parameter gets its gradient once, so hooks of DDP, FSDP and ZeRO run as without tiles. Hooks of modules inside, and
    hooks on the gradients of weights that `F.linear` does not read, run for each tile. `torch.compile` breaks its
    graph here.

    Args:
        function: calls `module`, or a part of it, on a tile (1, ..., tokens, H) and returns (1, ..., tokens, K).
        module: owns all parameters that `function` uses. Gradients of others are lost.
        x: (..., H), floating-point.
        tokens: of a tile, positive; the last tile may have fewer.

    Returns:
        (..., K), differentiable once by `x` and by the parameters of `module`.

    Raises:
        TypeError: `x` or a trainable parameter is a DTensor, ZeRO-3 has not gathered the parameters, or `function`
            returns no tensor.
        ValueError: `function` returns another number of tokens.
    """
    tensors = trainable(module)
    if any_dtensor((x, *tensors)):
        sharded = next(t for t in (x, *tensors) if any_dtensor((t,)))
        raise TypeError(
            f"tiles need whole tensors, got {described(sharded)}: let FSDP wrap {type(module).__name__} or its layer, "
            "not its projections, and do not tile a block that tensor parallelism splits"
        )
    if any(t.numel() == 0 and hasattr(t, "ds_id") for t in tensors):
        raise TypeError(
            f"ZeRO-3 must gather the weights of {type(module).__name__} together, once for all tiles: call "
            f"deepspeed.utils.set_z3_leaf_modules(model, [{type(module).__name__}]) before deepspeed.initialize, or "
            f"pass Accelerate's DeepSpeedPlugin transformer_moe_cls_names={type(module).__name__!r}"
        )
    note_tiles(module, x.shape[:-1].numel(), tokens)
    block = _Block(function, module, tokens, x)
    if not (torch.is_grad_enabled() and (x.requires_grad or tensors)):
        return block.forward(x)
    saved: list[Any] = []
    token = _Input.apply(x, torch.empty(0, requires_grad=True), saved)
    y: Tensor = _Tiles.apply(block, saved, token, x, *tensors)
    block.version = version_of(y)
    return y


def follows_tiles(x: Tensor) -> bool:
    """Whether `after_tiles` may take `x`: the output of tiles, as they returned it, in a non-reentrant checkpoint."""
    if torch.compiler.is_compiling() or not HAS_VERSIONS or graph_task_id is None:
        return False
    block = getattr(x.grad_fn, "block", None)
    if not isinstance(block, _Block) or version_of(x) != block.version:
        return False
    # Hooks on the output, such as those of FSDP and ZeRO, run when its gradient arrives: let it arrive.
    is_hooked = getattr(x, "_backward_hooks", True) or x.retains_grad
    return not is_hooked and in_checkpoint()


def after_tiles(function: Function, module: nn.Module, y: Tensor) -> Tensor:
    """Return `function(y)` of an output of tiles; the tiles' backward recomputes `y`, which nothing saves.

    Args:
        function: token-wise, calls `module` on a tile (1, ..., tokens, K) or on all tokens.
        module: owns all parameters that `function` uses, such as a norm.
        y: (..., K), for which `follows_tiles` is true. It may have other uses too.
    """
    return _After.apply(y.grad_fn, function, module, y, *trainable(module))


class _Input(torch.autograd.Function):
    """Save the block's input before the block runs, for `_Tiles`; its result only connects the two.

    The anchor requires a gradient, so the input is saved also if it needs none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, saved: list[Any]) -> Tensor:
        saved.append(ctx)
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        return None, None, None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: _Block, saved: list[Any], token: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.block, ctx.input = block, saved[0]
        ctx.set_materialize_grads(False)
        return block.forward(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_dx, *needs = ctx.needs_input_grad[3:]
        block, current = ctx.block, ctx.block.current_pass(ctx.input)
        block.passes.clear()
        if dy is not None:
            current.results.append(block.backward(current.x, dy, needs_dx))
        dx, gradients = _total(current.results, len(needs))
        if len(gradients) != len(needs):
            name = type(block.module).__name__
            raise RuntimeError(
                f"{name} had {len(needs)} trainable tensors in the forward and has {len(gradients)} in the backward: "
                "do not freeze or add parameters in between"
            )
        return None, None, None, dx, *gradients


def _total(results: list[Result], n: int) -> Result:
    """Return the sums of gradients: one result, unless the output of the tiles has several uses."""
    if not results:
        return None, [None] * n
    (dx, gradients), *others = results
    for other_dx, other_gradients in others:
        dx = _sum(dx, other_dx)
        gradients = [_sum(a, b) for a, b in zip(gradients, other_gradients, strict=True)]
    return dx, gradients


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


class _After(torch.autograd.Function):
    """What follows tiles. Its backward runs theirs too, and leaves their gradients in the block's `_Pass`."""

    @staticmethod
    def forward(ctx: Any, tiles: Any, function: Function, module: nn.Module, y: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tiles, ctx.function, ctx.module = tiles, function, module
        return function(y)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        block: _Block = ctx.tiles.block
        current = block.current_pass(ctx.tiles.input)
        dx, gradients = block.backward(current.x, dz, ctx.tiles.needs_input_grad[3], (ctx.function, ctx.module))
        n = len(gradients) - (len(ctx.needs_input_grad) - 4)
        current.results.append((dx, gradients[:n]))
        # No gradient of y: the tiles' node runs next, and finds what it returns.
        return None, None, None, None, *gradients[n:]


@dataclass
class _Pass:
    """A backward pass: the block's input, which checkpoints give once, and results of what follows the tiles."""

    x: Tensor
    results: list[Result] = field(default_factory=list)


class _Block:
    """A call of `tiled`: the forward and the backward of its tiles.

    y = block.forward(x)
    dx, gradients = block.backward(x, dy, needs_dx)     # gradients of trainable(module), in this order

    - `version`: of its output, as the tiles returned it
    - `passes`: the backward pass that has begun, by its number; a pass that never reaches the tiles stays
    """

    def __init__(self, function: Function, module: nn.Module, tokens: int, x: Tensor) -> None:
        self.function, self.module, self.tokens = function, module, tokens
        self.version = 0
        self.passes: dict[int, _Pass] = {}
        self._last_products: list[int | None] = []  # by tile
        device = x.device.type
        self._autocast: tuple[str, torch.dtype] | None = None
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._autocast = device, torch.get_autocast_dtype(device)
        self._random: tuple[Tensor, Any, Any] | None = None

    def current_pass(self, input: Any) -> _Pass:
        """Return the backward pass that runs; `input` is the node that saved the block's input."""
        number = 0 if graph_task_id is None else graph_task_id()
        if number not in self.passes:
            self.passes = {number: _Pass(*input.saved_tensors)}
        return self.passes[number]

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tiles (1, ..., tokens, H) of x (..., H): `function` may expect as many dimensions."""
        rows = x.reshape(*(1,) * (x.ndim - 2), -1, x.shape[-1])
        return rows.split(self.tokens, dim=-2)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Enter the forward's autocast, without its cache: older torch keeps weights cast in `no_grad` there."""
        if self._autocast is None:
            yield
        else:
            device, dtype = self._autocast
            with torch.autocast(device, dtype, cache_enabled=False):
                yield

    def _dtype(self) -> torch.dtype | None:
        return None if self._autocast is None else self._autocast[1]

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_rng_state(), *get_device_states(x)
        y: Tensor | None = None
        start = 0
        self._last_products = []
        with torch.no_grad(), self._surroundings():
            products = _Products(self._dtype(), None)
            for tile in self._tiles(x.detach()):
                products.start_tile(None)
                with products:
                    result = self.function(tile)
                if not isinstance(result, Tensor) or result.shape[:-1] != tile.shape[:-1]:
                    got = tuple(result.shape) if isinstance(result, Tensor) else shown(result)
                    error = ValueError if isinstance(result, Tensor) else TypeError
                    expected = f"({', '.join(map(str, tile.shape[:-1]))}, K)"
                    raise error(f"a token-wise function must return {expected} for {tuple(tile.shape)}, got {got}")
                self._last_products.append(products.index_of(result))
                if y is None:  # not a view, so that a layer may change it in place
                    y = result.new_empty((*x.shape[:-1], result.shape[-1]))
                n = tile.shape[-2]
                y.view(-1, y.shape[-1])[start : start + n] = result.reshape(n, -1)
                start += n
        assert y is not None
        # Most blocks draw no numbers, and need no state.
        after = torch.get_rng_state(), *get_device_states(x)
        same = all(map(torch.equal, (before[0], *before[2]), (after[0], *after[2])))
        self._random = None if same else before
        return y

    @contextmanager
    def _replayed(self, device: torch.device) -> Iterator[None]:
        """Draw the forward's random numbers again; the tiles run in the same order."""
        if self._random is None:
            yield
            return
        of_cpu, devices, states = self._random
        kind = ACCELERATOR if device.type == "cpu" else device.type
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(of_cpu)
            set_device_states(devices, states, device_type=kind)
            yield

    def backward(
        self, x: Tensor, dy: Tensor, needs_dx: bool, after: tuple[Function, nn.Module] | None = None
    ) -> Result:
        """Return dx and the gradients; with `after`, dy is that of its output, and its gradients come last."""
        tensors = trainable(self.module)
        function, last_products = self.function, self._last_products
        if after is not None:
            function = _chained(function, after[0])
            last_products = [None] * len(last_products)  # `after` reads the block's output
            tensors += trainable(after[1])
        sums = _Sums(tensors)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
        into = (None,) * len(last_products) if dx is None else self._tiles(dx)
        tiles = zip(self._tiles(x.detach()), self._tiles(dy), last_products, into, strict=True)
        # isolated: a tile's tensors are no concern of hooks that offload or checkpoint.
        with torch.enable_grad(), isolated(), self._surroundings(), self._replayed(x.device):
            products = _Products(self._dtype(), sums)
            for tile, upstream, last_product, dx_tile in tiles:
                products.start_tile(last_product)
                leaf = tile.detach().requires_grad_()
                with products:
                    y = function(leaf.view_as(leaf))  # torch's FLOP counter cannot watch a leaf here
                d_leaf, *gradients = torch.autograd.grad(y, (leaf, *tensors), upstream, allow_unused=True)
                del y
                for tensor, gradient in zip(tensors, gradients, strict=True):
                    if gradient is not None:
                        sums.add(tensor, gradient)
                if dx_tile is not None:
                    dx_tile.copy_(d_leaf) if d_leaf is not None else dx_tile.zero_()
        return dx, sums.finish()


def _chained(first: Function, second: Function) -> Function:
    return lambda x: second(first(x))


class _Sums:
    """Gradients of a block's tensors, summed over its tiles.

    In float32 (float64 for float64): a 16-bit sum would lose a part of each tile. The alternative, to keep the factors
    of all tiles and run one product a weight at the end, would keep the activations that tiles exist to avoid.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._sums: dict[int, Tensor] = {}
        self._ids = set(map(id, tensors))

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        total = self._sums.get(id(tensor))
        if total is None:
            self._sums[id(tensor)] = gradient.to(accumulation_dtype(tensor.dtype), copy=True)
        else:
            total.add_(gradient)

    def add_product(self, weight: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add `dyᵀ x` of dy (tokens, O) and x (tokens, I) to the sum of weight (O, I), in one product without copy."""
        total = self._sums.get(id(weight))
        first = total is None
        if total is None:
            dtype = accumulation_dtype(weight.dtype)
            total = torch.empty(dy.shape[-1], x.shape[-1], dtype=dtype, device=x.device)
            self._sums[id(weight)] = total
        accumulate(total, dy.t(), x, first=first)

    def finish(self) -> list[Tensor | None]:
        """Return the gradients in the tensors' dtypes. Each sum is freed before the next one is rounded."""
        totals = [self._sums.pop(id(tensor), None) for tensor in self._tensors]
        gradients: list[Tensor | None] = []
        totals.reverse()
        for tensor in self._tensors:
            total = totals.pop()
            gradients.append(None if total is None else total.to(tensor.dtype))
        return gradients


class _Products(TorchFunctionMode):
    """Runs a tile's `F.linear` as our own products, which add the weight's gradient to `sums`.

    Autograd would return each tile's gradient rounded to the weight's dtype, in memory of its own. Without `sums`, in
    the forward, it finds the product that returns the block's output (`index_of`); the backward leaves that one out.
    Other operations, also on the same weights, run as they are.
    """

    def __init__(self, autocast: torch.dtype | None, sums: _Sums | None) -> None:
        super().__init__()
        self._autocast, self._sums = autocast, sums
        # Weights under autocast, for all tiles. A computed weight dies with its tile, and another one may get its id.
        self._cast: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._count, self._left_out = 0, -1
        self._last: tuple[Tensor, int] | None = None

    def start_tile(self, left_out: int | None) -> None:
        self._count, self._left_out = 0, -1 if left_out is None else left_out
        self._last = None

    def index_of(self, output: Tensor) -> int | None:
        """Return the index of the product that returned this tensor, None if it was changed or another one did."""
        last, self._last = self._last, None
        if last is None or last[0] is not output or last[1] != version_of(output):
            return None
        return self._count - 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        index = self._count
        self._count += 1
        sums = self._sums
        if not all_plain((input, weight, bias)) or not self._differentiates(input, weight, bias):
            return F.linear(input, weight, bias)
        x, w, b = (None if t is None else self._as_operand(t, t is not input) for t in (input, weight, bias))
        if sums is None:
            y = F.linear(x, w, b)  # type: ignore[arg-type]
            self._last = y, version_of(y)
            return y
        own = tuple(t if t is not None and t in sums else None for t in (weight, bias))
        return _Product.apply(x, w, b, own, sums, index == self._left_out)

    def _differentiates(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether a product of our own reaches what autograd would, as in the forward, which has no graph.

        A computed weight, such as a slice, a weight norm, or a sum with an adapter, has a graph of its own.
        """
        sums = self._sums
        if sums is None:
            return True
        return input.requires_grad and all(x in sums for x in (weight, bias) if x is not None and x.requires_grad)

    def _as_operand(self, x: Tensor, is_weight: bool) -> Tensor:
        """Return x as autocast does. Weights are detached: autograd would call their hooks once a tile."""
        dtype = self._autocast
        if dtype is None or not x.is_floating_point() or x.dtype in (dtype, torch.float64):
            return x.detach() if is_weight else x
        if not is_weight:
            return x.to(dtype)
        original, cast = self._cast.get(id(x), (None, None))
        if original is None or cast is None or original() is not x:
            cast = x.detach().to(dtype)
            self._cast[id(x)] = weakref.ref(x), cast
        return cast


class _Product(torch.autograd.Function):
    """`F.linear`, whose backward adds the gradients of weight and bias to sums, and returns that of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own: tuple[Tensor | None, Tensor | None],
        sums: _Sums,
        left_out: bool,
    ) -> Tensor:
        ctx.weight, ctx.own, ctx.sums = weight, own, sums
        # Not `save_for_backward`, which holds x until the backward returns: freed before, it makes room for dx.
        ctx.input = None if own[0] is None else (x, version_of(x))
        if left_out:  # nothing reads it
            return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias = ctx.own
        rows = dy.reshape(-1, dy.shape[-1])
        if weight is not None:
            x, version = ctx.input
            if version_of(x) != version:
                raise RuntimeError(
                    f"the input of a linear layer in a tile, {described(x)}, was changed in place after the layer read "
                    "it, and its weight's gradient needs it: change a copy"
                )
            ctx.sums.add_product(weight, rows, x.reshape(-1, x.shape[-1]))
            ctx.input = x = None
        if bias is not None:
            ctx.sums.add(bias, rows.sum(0, dtype=accumulation_dtype(bias.dtype)))
        return dy @ ctx.weight, None, None, None, None, None
