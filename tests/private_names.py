"""The private names of torch, Triton, transformers, TRL, accelerate and PEFT that the package touches.

`PRIVATE` says what each is for, and what happens without it. `found` reads the package's source for names that should
be listed, and `hide` imports the package without some of them. `python tests/private_names.py` prints the table of
docs/reliability.md.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import defaultdict
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1] / "liger_chunked"
FOREIGN = {"torch", "triton", "transformers", "trl", "accelerate", "peft"}
# What Triton documents. All else of it is private.
OF_TRITON = ("triton.__version__", "triton.jit", "triton.language", "triton.next_power_of_2", "triton.cdiv")
# Documented, in spite of their names.
OF_PYTHON = {"_asdict", "_replace", "_make", "_fields", "_getframe"}


class Private(NamedTuple):
    """Private names that belong together.

    - `names`: the last parts of their paths
    - `owner`: what has them
    - `use`: what the package does with them
    - `without`: what happens if one is missing
    - `scenarios`: functions of `private_scenarios.py` that run what uses them
    """

    names: str
    owner: str
    use: str
    without: str
    scenarios: str


PRIVATE = (
    # torch: its C module and its compiler
    Private(
        "_C _autograd _functorch",
        "torch",
        "modules of the functions below",
        "their fallbacks",
        "losses",
    ),
    Private(
        "_top_saved_tensors_default_hooks",
        "torch._C._autograd",
        "see whether a checkpoint saves tensors",
        "`disable_saved_tensors_hooks`, which raises if so; a checkpoint runs an MLP before a norm again",
        "losses in_tiles",
    ),
    Private(
        "_current_graph_task_id",
        "torch._C",
        "tell backward passes apart where a norm follows a tiled MLP",
        "a checkpoint runs such an MLP again",
        "in_tiles",
    ),
    Private(
        "_get_current_graph_task_keep_graph",
        "torch._C._autograd",
        "overwrite saved tensors in a last backward",
        "a backward overwrites nothing",
        "base_kernels",
    ),
    Private(
        "is_legacy_batchedtensor",
        "torch._C._functorch",
        "say that a kernel has no batched backward",
        "autograd says it",
        "transforms",
    ),
    Private(
        "_are_functorch_transforms_active",
        "torch._C",
        "say that no loss runs under `torch.func`",
        "autograd says it",
        "transforms",
    ),
    Private(
        "_current_level",
        "torch.autograd.forward_ad",
        "say that no loss has a forward-mode derivative",
        "autograd says it",
        "transforms",
    ),
    Private(
        "_dynamo eval_frame get_eval_frame_callback",
        "torch._C",
        "keep a loss out of graphs when Dynamo traces it on its own",
        "a loss runs as a disabled function once Dynamo is imported, which costs microseconds",
        "compiled",
    ),
    Private(
        "decorators skip_code",
        "torch._dynamo",
        "keep the frame of an entry point out of graphs",
        "Dynamo traces the frame, and breaks the graph inside",
        "compiled",
    ),
    Private(
        "_dynamo_marked_constant",
        "functions",
        "let Dynamo call a function while it traces",
        "another break of the graph",
        "compiled",
    ),
    Private(
        "_torchdynamo_disable _torchdynamo_disable_msg",
        "functions",
        "break graphs at a loss, and say why",
        "a break inside, with torch's reason",
        "compiled",
    ),
    Private(
        "maybe_mark_dynamic",
        "torch._dynamo",
        "compile FlexAttention once for all lengths",
        "the second length compiles again",
        "any_sizes",
    ),
    Private(
        "_config",
        "torch.fx.experimental",
        "the same, for sizes that are equal in the first call",
        "sizes that differ later compile again",
        "any_sizes",
    ),
    # torch: tensors
    Private(
        "_version",
        "torch.Tensor",
        "notice changes of what was saved, or of a head before its loss",
        "saved tensors are copied; no head defers",
        "deferred changed_inputs in_tiles",
    ),
    Private(
        "_is_view",
        "torch.Tensor",
        "return no views, and overwrite none",
        "results are copied; the experts' output is not overwritten",
        "losses",
    ),
    Private(
        "_base",
        "torch.Tensor",
        "refuse to rotate a view of a leaf in place",
        "autograd refuses",
        "base_kernels",
    ),
    Private(
        "_assert_async",
        "torch",
        "check on the device that ranks have equal targets",
        "the host waits, and checks it",
        "numbers_of_the_host",
    ),
    Private(
        "_foreach_add_",
        "torch",
        "write numbers to the device without a copy",
        "a launch for each number",
        "numbers_of_the_host",
    ),
    Private(
        "_python_dispatch _disable_current_modes _get_current_dispatch_mode_stack _push_mode _pop_mode",
        "torch.utils",
        "suspend selective checkpoints in a step",
        "they say that what they keep was changed",
        "selective",
    ),
    Private(
        "_functional_collectives",
        "torch.distributed",
        "wait for the result of a collective",
        "a TypeError asks for a plain tensor",
        "tensor_kinds",
    ),
    Private(
        "_subclasses fake_tensor",
        "torch",
        "say that a FakeTensor has no values",
        "a TypeError asks for a plain tensor",
        "tensor_kinds",
    ),
    Private(
        "_make_wrapper_subclass DisableTorchFunctionSubclass",
        "torch.Tensor, torch._C",
        "make logits without values, and work on them",
        "no head defers",
        "deferred",
    ),
    Private(
        "_schema",
        "operations of torch.ops.aten",
        "see whether an operation changes logits in place",
        "no head defers",
        "deferred",
    ),
    Private(
        "_to_copy _unsafe_view _reshape_alias _log_softmax _softmax _log_softmax_backward_data _softmax_backward_data",
        "torch.ops.aten",
        "follow logits and their gradients",
        "the operation gets real logits, or the real gradient",
        "deferred",
    ),
    Private(
        "_ForceDispatchKeyGuard _dispatch_tls_local_include_set _dispatch_tls_local_exclude_set DispatchKey",
        "torch._C",
        "compute a real gradient below autograd",
        "it is computed in a thread",
        "deferred",
    ),
    # torch: modules
    Private(
        "_modules _parameters _buffers",
        "nn.Module",
        "list a head's own tensors fast; copy modules for the comparison of layers",
        "public lists, slower; layers stay stock",
        "deferred patched replicated",
    ),
    Private(
        "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks",
        "nn.Module, torch.Tensor",
        "see what reads activations; run a hook of a loss's parameter once",
        "MLPs overwrite nothing, and run their activation module; such a hook runs twice",
        "patched in_tiles",
    ),
    Private(
        "_global_forward_hooks",
        "torch.nn.modules.module",
        "the same, for hooks of all modules",
        "MLPs overwrite nothing",
        "patched",
    ),
    Private(
        "_composable_state _module_state_mapping",
        "torch.distributed",
        "find the module of FSDP2 whose group holds a deferring head's weight",
        "heads return logits where processes train together",
        "deferred_in_ranks",
    ),
    Private(
        "_HYBRID_SHARD_ZERO2 _handle _sharding_strategy",
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "keep the weight of a deferring head from the forward of its unit of FSDP1 to its backward",
        "such a head returns logits",
        "deferred_in_ranks",
    ),
    Private(
        "_distribute_module_applied",
        "nn.Module",
        "leave layers to `parallelize_module`",
        "the layer is patched, and its kernel refuses DTensors",
        "parallel",
    ),
    # Triton
    Private(
        "tools tensor_descriptor TensorDescriptor",
        "triton",
        "read tiles by the tensor memory accelerator",
        "no fused epilogue",
        "interpreted",
    ),
    Private(
        "knobs runtime driver",
        "triton",
        "launch compiled kernels with less work on the host",
        "Triton launches",
        "launches",
    ),
    Private(
        "launch_enter_hook launch_exit_hook calls debug add_stages_inspection_hook",
        "triton.knobs.runtime",
        "leave launches that someone watches to Triton",
        "Triton launches all",
        "launches",
    ),
    Private(
        "active get_current_stream",
        "triton.runtime.driver",
        "the stream of our launches",
        "Triton launches",
        "launches",
    ),
    # accelerate and PEFT
    Private(
        "_old_forward",
        "accelerate: modules",
        "patch what accelerate's forward calls",
        "stock code runs there",
        "offloaded",
    ),
    Private(
        "_original_forward _is_accelerate_prepared",
        "accelerate: models",
        "take off the autocast of an earlier trainer",
        "it stays",
        "second_trainer",
    ),
    Private(
        "_cast_input_dtype",
        "PEFT: LoRA layers",
        "cast an adapter's input as PEFT does",
        "`Tensor.to`",
        "adapted",
    ),
    # transformers
    Private(
        "_loss_function",
        "transformers: models",
        "set a model's loss, and take it back",
        "transformers' own, on deferred logits",
        "patched",
    ),
    Private(
        "_attn_implementation",
        "transformers: configs",
        "read a model's attention; build small copies",
        "no prompt is shared; copies have the default",
        "shared_prompts",
    ),
    Private(
        "_experts_implementation",
        "transformers: configs",
        "read how a model computes its experts",
        "experts stay stock",
        "experts",
    ),
    Private(
        "_grouped_linear _apply_gate _is_expert_parallel",
        "transformers.integrations.moe",
        "compute experts with our gathers and sums",
        "experts stay stock",
        "experts",
    ),
    Private(
        "_is_stateful",
        "transformers: models",
        "share no prompt of a recurrent model",
        "a small copy of the model shows it",
        "shared_prompts",
    ),
    Private(
        "_get_logits_processor",
        "transformers: models",
        "record what `generate` keeps, after its own filters",
        "a RuntimeError of `record_kept_ids`",
        "recorded",
    ),
    # TRL
    Private(
        "_metrics",
        "TRL: trainers",
        "log metrics of our losses",
        "they are not logged",
        "dpo_trainer",
    ),
    Private(
        "_total_train_tokens",
        "TRL: trainers",
        "log the number of tokens",
        "it is not logged",
        "dpo_trainer",
    ),
    Private(
        "_compute_loss",
        "TRL: trainers",
        "replace a trainer's loss",
        "a RuntimeError with `loss=`",
        "dpo_trainer",
    ),
    Private(
        "_generate_and_score_completions _get_per_token_logps_and_entropies",
        "TRL: GRPOTrainer, RLOOTrainer",
        "train on kept ids; leave out sequences of zero advantage",
        "a RuntimeError with `kept_ids=True`; nothing is left out",
        "grpo_trainer",
    ),
    Private(
        "_set_signature_columns_if_needed _signature_columns",
        "transformers: Trainer",
        "keep a data set's column of weights of examples",
        "an error, if the data set has that column",
        "dpo_trainer",
    ),
    Private(
        "_compute_mtp_acceptance_counts",
        "Megatron-Core since 0.19",
        "count the tokens that multi-token prediction accepts",
        "nothing is counted, as in earlier releases",
        "multi_token",
    ),
    Private(
        "_compute_kl_logps",
        "TRL: KTOTrainer",
        "score mismatched completions",
        "a RuntimeError with such a `loss=`",
        "kto_trainer",
    ),
    Private(
        "_forward",
        "TRL: OnlineDPOTrainer",
        "replace a forward that builds logits",
        "a RuntimeError",
        "online_trainer",
    ),
    Private(
        "_get_model_forward_kwargs _teacher_processor _build_teacher_vlm_inputs _raw_images _raw_prompts",
        "TRL: GOLDTrainer",
        "pass on images",
        "TRL's own loss",
        "gold_trainer",
    ),
    Private(
        "_align_by_byte_offsets _get_start_and_size_answers",
        "TRL: ULDLoss",
        "align the tokens of two tokenizers",
        "TRL's own loss",
        "gold_trainer",
    ),
)
# The names in the source


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and not name.endswith("__")


def _after_private(path: str) -> list[str]:
    """Return the first private part of a dotted path of a foreign module, and all parts after it."""
    parts = path.split(".")
    if parts[0] == "triton":
        documented = path == "triton" or any(f"{path}.".startswith(f"{known}.") for known in OF_TRITON)
        return [] if documented else parts[1:]
    first = next((i for i, part in enumerate(parts) if _is_private(part)), len(parts))
    return parts[first:] if parts[0] in FOREIGN else []


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def own_names() -> set[str]:
    """Return all names that the package defines: functions, classes, variables, arguments, attributes of `self`."""
    names = set()
    for node in (node for tree in _trees().values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.expr) -> bool:
    of_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return of_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


@functools.cache
def _attributes_of(cls: type) -> frozenset[str]:
    """Return the private attributes of a class and of its instances."""
    try:
        assigned = re.findall(r"\bself\.(_[A-Za-z]\w*)", inspect.getsource(cls))
    except (OSError, TypeError):  # of C
        assigned = []
    return frozenset(name for name in (*vars(cls), *assigned) if _is_private(name))


def shared_names() -> set[str]:
    """Return private attributes of foreign objects that the package meets. It may have such names too."""
    import torch
    from torch import nn

    kinds = [torch.Tensor, nn.Module, nn.Parameter, torch.autograd.Function, nn.parallel.DistributedDataParallel]
    classes = [cls for kind in kinds for cls in kind.__mro__ if cls is not object]
    return IMITATED.union(vars(nn.Module()), *map(_attributes_of, classes))


def inherited_names() -> dict[str, set[str]]:
    """Return, for each of the package's classes of trainers, the private attributes of TRL's that it may replace."""
    from liger_chunked.integrations import trl

    names = defaultdict(set)
    for trainer in (getattr(trl, name) for name in trl.__all__ if name.startswith("Liger")):
        of_package = [cls for cls in trainer.__mro__ if cls.__module__.startswith("liger_chunked")]
        for cls in of_package:
            names[cls.__name__].update(*map(_attributes_of, set(trainer.__mro__) - {object, *of_package}))
    return names


class _Reader(ast.NodeVisitor):
    """Collects the foreign private names of a file, with their lines."""

    def __init__(self, tree: ast.Module, shared: set[str], inherited: dict[str, set[str]]) -> None:
        self.shared, self.inherited = shared, inherited
        self.lines: dict[str, int] = {}
        self.modules: dict[str, str] = {}  # names of this file that are foreign modules or members of them
        self.classes: list[str] = []
        self.visit(tree)

    def add(self, names: list[str], node: ast.AST) -> None:
        for name in names:
            self.lines.setdefault(name, node.lineno)  # type: ignore[attr-defined]

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":  # nothing of it runs
            node.body = []
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(_after_private(alias.name), node)
            root = alias.name.partition(".")[0]
            self.modules[alias.asname or root] = alias.name if alias.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            self.add(_after_private(path), node)
            self.modules[alias.asname or alias.name] = path

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.append(node.name)
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self.classes and node.name in self.inherited.get(self.classes[-1], ()):
            self.add([node.name], node)
        self.generic_visit(node)

    def path_of(self, node: ast.expr) -> str | None:
        """Return the dotted path of a member of a foreign module."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self.path_of(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path_of(node)
        if path is not None and path.partition(".")[0] in FOREIGN:
            self.add(_after_private(path), node)
        elif _is_private(node.attr):
            if _is_self(node.value):
                own = any(node.attr not in self.inherited.get(name, ()) for name in self.classes)
                own = own and node.attr in own_names()
            else:
                own = node.attr in own_names() and node.attr not in self.shared
            if not own:
                self.add([node.attr], node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        by_name = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
        if by_name and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            path = self.path_of(node.args[0])
            if path is not None and path.partition(".")[0] in FOREIGN:
                self.add(_after_private(f"{path}.{node.args[1].value}"), node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or not re.fullmatch(r"[\w.]+", node.value):
            return
        if node.value.partition(".")[0] in FOREIGN:
            self.add(_after_private(node.value), node)
        elif _is_private(node.value) and self.is_foreign(node.value):
            self.add([node.value], node)

    def is_foreign(self, name: str) -> bool:
        inherited = any(name in self.inherited.get(cls, ()) for cls in self.classes)
        return inherited or name in self.shared - OWN or name not in own_names()


# Constants and attributes that are the package's own, though it defines no such name: suffixes of arguments of kernels,
# of parts of a config, and attributes that are set without `self`.
OWN = {
    "_ptr",
    "_desc",
    "_stride",
    "_text",
    "_fixed",
    "_cls",
    "_current",
    "_has_warned",
    "_ctx",
    "_layer",
    "_follows",
    "_after",
}
# Methods of foreign objects that an object of ours imitates.
IMITATED = {"_apply_gate"}


def found() -> dict[str, list[str]]:
    """Return the foreign private names in the source of the package, and where each is first in a file."""
    shared, inherited = shared_names(), inherited_names()
    names = defaultdict(list)
    for path, tree in _trees().items():
        for name, line in _Reader(tree, shared, inherited).lines.items():
            if name not in OWN | OF_PYTHON and not name.startswith("_liger_"):
                names[name].append(f"{path.relative_to(PACKAGE)}:{line}")
    return dict(names)


# The package without some of them

_SUFFIX = "_that_is_missing"


class Hidden(MetaPathFinder):
    """Imports the package as if foreign libraries lacked some names.

    The libraries keep them, because they use them too. Instead, the package asks for other names that nothing has: they
    are replaced in its source, in the files given for each name, before Python compiles it.

        hidden = Hidden({"_version": ["private.py"]})
        sys.meta_path.insert(0, hidden)
        import liger_chunked
        assert hidden.replaced == {"_version"}
    """

    def __init__(self, names: dict[str, list[str]]) -> None:
        self.names = names
        self.replaced: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return spec
        file = Path(spec.origin)
        # Words such as "active" have other meanings elsewhere. Files may import other names from each other.
        names = (
            [
                name
                for name, files in self.names.items()
                if str(file.relative_to(PACKAGE)) in files or (not name.islower() and name in file.read_text())
            ]
            if file.suffix == ".py"
            else []
        )
        if names:
            spec.loader = _Renaming(fullname, spec.origin, names)
            self.replaced.update(names)
        return spec


class _Renaming(SourceFileLoader):
    def __init__(self, fullname: str, path: str, names: list[str]) -> None:
        super().__init__(fullname, path)
        self.pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)")

    def get_code(self, fullname: str) -> Any:
        source = self.pattern.sub(rf"\1{_SUFFIX}", self.get_source(fullname) or "")
        return compile(source, self.path, "exec", dont_inherit=True)


# The table of docs/reliability.md


def table() -> str:
    lines = ["| name | of | for | without it |", "|---|---|---|---|"]
    lines += [f"| `{x.names.replace(' ', '`, `')}` | {x.owner} | {x.use} | {x.without} |" for x in PRIVATE]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
