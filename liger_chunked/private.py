"""Private functions of torch and Triton that the package calls, each with what takes its place where it is missing.

Attributes of foreign objects, such as a module's hooks, are read where they are needed. `tests/private_names.md` lists
both kinds, and `tests/frameworks/test_private_names.py` runs the package without each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from liger_chunked.versions import release

# Not ImportError alone: a broken Triton raises its own error, and kernels/backend.py says so where it is needed.
try:
    import triton
    import triton.knobs
    import triton.runtime

    _triton: Any = triton
    _triton_settings: Any = triton.knobs.runtime
    _triton_driver: Any = triton.runtime.driver
except Exception:
    _triton = _triton_settings = _triton_driver = None

Function = TypeVar("Function", bound=Callable[..., Any])


def find(path: str) -> Any:
    """Return what a path such as "torch._C._autograd" names, or None where a part of it is missing.

    Most are looked up once, on import. "torch._dynamo" is not: looking it up imports the compiler, which takes seconds.
    """
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
    return found


# Autograd

# The fallback is the public `disable_saved_tensors_hooks`, which raises if there are hooks.
top_saved_tensors_hooks: Callable[[bool], Any] | None = find("torch._C._autograd._top_saved_tensors_default_hooks")

# The number of the backward pass that runs. Without it, what follows a tiled block stays out of its tiles.
graph_task_id: Callable[[], int] | None = find("torch._C._current_graph_task_id")

# The fallback takes every graph for retained, so no backward overwrites what it saved.
graph_is_retained: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph") or (lambda: True)

# The fallbacks see nothing. Autograd refuses such tensors itself, with an error of its own.
is_batched: Callable[[Tensor], bool] = find("torch._C._functorch.is_legacy_batchedtensor") or (lambda _: False)
transforms_are_active: Callable[[], bool] = find("torch._C._are_functorch_transforms_active") or (lambda: False)

# Whether tensors count the operations that change them in place.
HAS_VERSIONS = hasattr(Tensor, "_version")


def version_of(x: Tensor) -> int:
    """Return the number of in-place operations on `x`; 0 for tensors of inference mode, which count none."""
    return x._version if HAS_VERSIONS and not x.is_inference() else 0


# The fallback takes every tensor for a view, so it is copied, and not overwritten.
is_view: Callable[[Tensor], bool] = getattr(Tensor, "_is_view", None) or (lambda _: True)


def base_of(x: Tensor) -> Tensor:
    """Return the tensor that `x` is a view of, or `x`. The fallback returns `x`: autograd protects leaves too."""
    base = getattr(x, "_base", None)
    return x if base is None else base


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks of leaves away inside the block, for a gradient that reaches them once more, and then with hooks.

    Autograd reads the dict that the leaf holds. The fallback hides nothing: such a hook runs in the forward too.
    """
    hidden = [(hooks, dict(hooks)) for x in leaves if (hooks := getattr(x, "_backward_hooks", None))]
    for hooks, _ in hidden:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hidden:
            hooks.update(kept)


# Tensor subclasses

# Whether there can be tensors without values. If not, no head defers its logits.
HAS_STAND_INS = (
    HAS_VERSIONS
    and hasattr(Tensor, "_make_wrapper_subclass")
    and find("torch._C.DisableTorchFunctionSubclass") is not None
    and hasattr(torch.ops.aten.add.Tensor, "_schema")
)
without_torch_function: Callable[[], AbstractContextManager[Any]] = (
    find("torch._C.DisableTorchFunctionSubclass") or nullcontext
)


class _Aten:
    """`torch.ops.aten`, with operations that nothing calls in place of those that this torch lacks."""

    def __getattr__(self, name: str) -> Any:
        operation = getattr(torch.ops.aten, name, None)
        vars(self)[name] = _Missing() if operation is None else operation
        return vars(self)[name]


class _Missing:
    def __getattr__(self, name: str) -> Any:
        vars(self)[name] = object()
        return vars(self)[name]


aten: Any = _Aten()

_ForceKeys = find("torch._C._ForceDispatchKeyGuard")
_included_keys = find("torch._C._dispatch_tls_local_include_set")
_excluded_keys = find("torch._C._dispatch_tls_local_exclude_set")
_Key = find("torch._C.DispatchKey")
_AUTOGRAD_KEYS = ("AutogradFunctionality", "ADInplaceOrView", "AutogradOther", "AutogradNestedTensor")


def with_autograd(function: Callable[[], Any]) -> Any:
    """Call a function with autograd, from an operation of a tensor subclass, below which there is none.

    A backward in it stays in this thread: under a dispatch mode, such as that of a compiled graph's first run, torch's
    threads for devices fail an assertion ("tls_on_entry.has_value()").

    The fallback calls it in a thread, which starts with autograd.
    """
    if None in (_ForceKeys, _included_keys, _excluded_keys, _Key):
        return _in_a_thread(function)
    included, excluded = _included_keys(), _excluded_keys()
    for name in _AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(_Key, name))
    with _ForceKeys(included, excluded), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        return function()


def _in_a_thread(function: Callable[[], Any]) -> Any:
    def run() -> Any:
        with torch.enable_grad():
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


# Operations


def _assert_on_host(condition: Tensor, message: str) -> None:
    """Assert as `torch._assert_async` does, but wait for the device."""
    if not condition.item():
        raise RuntimeError(message)


assert_async: Callable[[Tensor, str], Any] = find("torch._assert_async") or _assert_on_host


def _add_one_by_one(tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """Add as `torch._foreach_add_` does, in a launch for each number."""
    for x, number in zip(tensors, numbers, strict=True):
        x.add_(number)


foreach_add_: Callable[[Any, Sequence[int]], Any] = find("torch._foreach_add_") or _add_one_by_one


# Modules

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Whether a module shows its parts, also those that are None.
HAS_PARTS = vars(nn.Module()).keys() >= {"_modules", "_parameters", "_buffers"}
_GLOBAL_HOOKS: Any = find("torch.nn.modules.module._global_forward_hooks")

# Whether the package sees all hooks of a module, and global forward hooks. If it does not, it leaves out nothing that a
# hook would notice: no head defers its logits, and no layer works in place.
SHOWS_HOOKS = vars(nn.Module()).keys() >= {*HOOKS} and _GLOBAL_HOOKS is not None


def hooks_of(module: nn.Module, slot: str) -> list[Any]:
    """Return the hooks of a module in a slot, such as "_forward_hooks"; none if modules have no such slot."""
    return list(vars(module).get(slot, {}).values())


# The fallback takes every process for one with hooks of all modules.
has_global_hooks: Callable[[], Any] = find("torch.nn.modules.module._has_any_global_hook") or (lambda: True)


def global_forward_hooks() -> list[Any]:
    """Return the forward hooks of all modules."""
    return [] if _GLOBAL_HOOKS is None else list(_GLOBAL_HOOKS.values())


def has_children(module: nn.Module) -> bool:
    """Return whether a module has submodules."""
    if HAS_PARTS:
        return len(module._modules) > 0
    return next(module.children(), None) is not None


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module without those of its submodules, by name."""
    if HAS_PARTS:  # ten times as fast: heads ask at each call
        named = {**module._parameters, **module._buffers}
        return {name: x for name, x in named.items() if x is not None}
    every: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return dict([*module.named_parameters(**every), *module.named_buffers(**every)])


def composable_states() -> Any:
    """Return the modules to which `fully_shard` was applied, maybe with those of other such functions, as a mapping.

    None: this torch keeps no such mapping. Heads then return real logits where processes train together.
    """
    return getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None)


def keep_in_unit(unit: Any) -> bool:
    """Let a unit of FSDP1 keep its weights from its forward to its backward, as `SHARD_GRAD_OP` does.

    False: this torch does not let it, and the weights may be freed between.
    """
    handle: Any = getattr(unit, "_handle", None)
    strategy = getattr(handle, "_sharding_strategy", None)
    keeps = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "_HYBRID_SHARD_ZERO2"}
    name = getattr(strategy, "name", None)
    if name in keeps:
        kept = getattr(type(strategy), keeps[name], None)
        if kept is None:
            return False
        handle._sharding_strategy = kept
    return name in keeps or name in (*keeps.values(), "NO_SHARD")


# Dynamo


def _imported_dynamo() -> Any:
    return sys.modules.get("torch._dynamo")


# Returns the callback by which Dynamo traces this thread, or None. The fallback takes every thread for traced, once
# Dynamo is imported: a loss then runs as a disabled function, which costs microseconds.
tracing_callback: Callable[[], Any] = find("torch._C._dynamo.eval_frame.get_eval_frame_callback") or _imported_dynamo


def skip_frame(function: Callable[..., Any]) -> None:
    """Make Dynamo run the frame of `function` uncompiled, but compile what it calls. Functions that call it inline it.

    Called while Dynamo traces, so it is loaded. The fallback does nothing: Dynamo traces the frame too, and breaks the
    graph inside.
    """
    skip_code = find("torch._dynamo.decorators.skip_code")
    if skip_code is not None:
        skip_code(function.__code__)


def runs_while_tracing(function: Function) -> Function:
    """Let Dynamo call a function while it traces, and take the result for a constant of the graph.

    As `torch.compiler.assume_constant_result`, which imports the compiler. Without the attribute, Dynamo traces into
    the function, and breaks the graph inside.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def breaks_graph(function: Function, reason: str) -> Function:
    """Make Dynamo break its graph at a function, and give `reason` for it.

    As `torch.compiler.disable`, which imports the compiler. Without the attributes, the graph breaks inside of the
    function, with a reason of torch's.
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = reason
    return function


# Whether what a graph inside another one made, such as that of a checkpoint, may be read outside of it.
_LETS_VALUES_OUT = release(torch.__version__) >= (2, 13)


def at_end_of_trace(function: Callable[[torch.fx.GraphModule], None]) -> bool:
    """Call a function with the graph that Dynamo traces now, when it is complete. Dynamo runs this as it traces.

    Returns whether it will, and whether the graph may read what this part of it makes: an older torch loses what a
    graph inside made. The fallback returns False: a head in the graph computes its logits.
    """
    current = find("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")
    output = None if current is None else getattr(current(), "output", None)
    functions = getattr(output, "register_finalizer_fns", None)
    if functions is None or not (_LETS_VALUES_OUT or len(getattr(output, "tracers", ())) == 1):
        return False
    if function not in functions:
        functions.append(function)
    return True


def python_number(x: Any) -> Any:
    """Return a number of a compiled function as a constant of the graph. Dynamo traces this.

    Where a number changes from call to call, Dynamo makes a symbol of it. This takes it back, so that another number
    compiles another graph. The fallback leaves the symbol: the graph breaks.
    """
    guard = find("torch.fx.experimental.symbolic_shapes.guard_scalar")
    return x if guard is None else guard(x)


def any_sizes(*tensors: tuple[Tensor, Sequence[int]]) -> AbstractContextManager[Any]:
    """Compile what the block calls once for all sizes of these dimensions, even if some are equal in this call.

    The fallback does nothing: Dynamo finds out with the second call, and compiles again.
    """
    mark = find("torch._dynamo.maybe_mark_dynamic")
    if mark is not None:
        for x, dims in tensors:
            mark(x, list(dims))
    try:
        from torch.fx.experimental import _config
    except ImportError:
        return nullcontext()
    config: Any = _config
    try:
        return config.patch(use_duck_shape=False)
    except AttributeError:
        return nullcontext()


# Dispatch

_dispatch: Any = find("torch.utils._python_dispatch")
without_modes: Callable[[], AbstractContextManager[Any]] = getattr(_dispatch, "_disable_current_modes", nullcontext)


# How many function modes are active. The fallback sees one.
function_modes: Callable[[], int] = find("torch._C._len_torch_function_stack") or (lambda: 1)


def sees_no_dispatch_mode() -> bool:
    """Whether there is no active dispatch mode, for certain."""
    modes = getattr(_dispatch, "_get_current_dispatch_mode_stack", None)
    return modes is not None and not modes()


def without_modes_of(module: str) -> AbstractContextManager[Any]:
    """Suspend the caller's dispatch modes whose class a module defines; all others see what runs inside.

    The fallback suspends none.
    """
    modes: list[Any] = getattr(_dispatch, "_get_current_dispatch_mode_stack", list)()
    if not any(type(mode).__module__ == module for mode in modes):
        return nullcontext()
    return _only([mode for mode in modes if type(mode).__module__ != module])


@contextmanager
def _only(others: list[Any]) -> Iterator[None]:
    with without_modes():
        for mode in others:
            _dispatch._push_mode(mode)
        try:
            yield
        finally:
            for _ in others:
                _dispatch._pop_mode()


# Triton


def _runs_as_we_know(version: str) -> bool:
    """Whether this Triton runs a compiled kernel as `launch_again` does, which was read in the source of each release.

    Triton 3.4 and older ones come with a torch that the package does not support.
    """
    return (3, 5) <= release(version) < (3, 10)


KNOWS_TRITON = _triton_settings is not None and _runs_as_we_know(_triton.__version__)


def someone_watches_launches() -> bool:
    """Whether a hook or a setting of Triton wants to see or change launches. Without the names: it does."""
    try:
        return bool(
            _triton_settings.launch_enter_hook.calls
            or _triton_settings.launch_exit_hook.calls
            or _triton_settings.debug
            or getattr(_triton_settings, "add_stages_inspection_hook", None)  # since Triton 3.6
        )
    except AttributeError:  # a plain function in place of Triton's chain of hooks
        return True


def launch_again(compiled: Any) -> Callable[[tuple[int, int, int], int, Sequence[Any]], None] | None:
    """Return a function that launches a compiled kernel without Triton's search for it, if `KNOWS_TRITON`.

    It takes the grid, the index of the current device, and all parameters of the kernel in order: addresses for
    tensors, and constants too. None: Triton compiled nothing, because a hook of its own forbade it, or lacks a name.
    """
    try:
        run, stream_of = compiled.run, _triton_driver.active.get_current_stream
    except AttributeError:
        return None

    def launch(grid: tuple[int, int, int], device: int, arguments: Sequence[Any]) -> None:
        # None for what hooks are told, and for both hooks. `compiled` stays alive: without it, its code is unloaded.
        run(*grid, stream_of(device), compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    return launch


# Trees of arguments. `torch.utils._pytree` is private, and knows more kinds than torch's functions take.


def tree_leaves(tree: Any) -> Iterator[Any]:
    """Yield what lists, tuples and dicts hold."""
    if isinstance(tree, (list, tuple)):
        for x in tree:
            yield from tree_leaves(x)
    elif isinstance(tree, dict):
        yield from tree_leaves(list(tree.values()))
    else:
        yield tree


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function(x)` in place of each leaf x of a kind."""
    if not any(isinstance(x, kind) for x in tree_leaves(tree)):
        return tree
    if isinstance(tree, dict):
        return type(tree)({name: tree_map_only(kind, function, x) for name, x in tree.items()})
    if isinstance(tree, (list, tuple)):
        parts = [tree_map_only(kind, function, x) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)
