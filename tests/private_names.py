"""The private names of torch, Triton, transformers, TRL, accelerate and PEFT that the package touches.

The table of tests/private_names.md lists them. `found` reads the package's source for names that should be listed, and
`Hidden` imports the package without some of them.
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
from typing import Any

PACKAGE = Path(__file__).parents[1] / "liger_chunked"
PAGE = Path(__file__).parent / "private_names.md"
FOREIGN = {"torch", "triton", "transformers", "trl", "accelerate", "peft"}
# What Triton documents. All else of it is private.
OF_TRITON = ("triton.__version__", "triton.jit", "triton.language", "triton.next_power_of_2", "triton.cdiv")
# Documented, in spite of their names.
OF_PYTHON = {"_asdict", "_replace", "_make", "_fields", "_getframe"}


# The table says, for names that belong together, what has them, what the package does with them, and what happens if
# one is missing.
ROW = re.compile(r"^\| (`_?\w+`(?:, `_?\w+`)*) \|(?: [^|]+ \|){3}$", re.MULTILINE)
PRIVATE = [re.findall(r"\w+", row) for row in ROW.findall(PAGE.read_text())]
# Of tests that pass, or functions of `private_scenarios.py`, which also take an error that says why: the last names of
# the rows without which each runs.
SCENARIOS = {
    "engine/test_surroundings.py::test_checkpoint": "_functorch _top_saved_tensors_default_hooks",
    "engine/test_surroundings.py::test_refilled_tensors": "_version",
    "engine/test_hard_cases.py::test_in_place_on_losses_per_token": "_is_view",
    "models/test_models_tiled.py::test_training_step": (
        "_top_saved_tensors_default_hooks _current_graph_task_id _version _backward_pre_hooks"
    ),
    "models/test_models.py::test_training_step[cpu-qwen3_moe]": "_experts_implementation _is_expert_parallel",
    "trl/test_trl_peft.py::test_a_frozen_head_has_no_gradient": "_cast_input_dtype",
    "base_kernels": "_get_current_graph_task_keep_graph _base",
    "transforms": "is_legacy_batchedtensor _are_functorch_transforms_active _current_level",
    "compiled": "get_eval_frame_callback skip_code _dynamo_marked_constant",
    "any_sizes": "maybe_mark_dynamic _config",
    "deferred": (
        "_version _torchdynamo_disable_msg _current_level DisableTorchFunctionSubclass _schema _softmax_backward_data "
        "DispatchKey _are_functorch_transforms_active _buffers"
    ),
    "numbers_of_the_host": "_assert_async _foreach_add_",
    "selective": "_pop_mode",
    "tensor_kinds": "_functional_collectives fake_tensor",
    "patched": "current_tx _buffers _backward_pre_hooks _global_forward_hooks _loss_function",
    "replicated": "_buffers",
    "deferred_in_ranks": "_module_state_mapping _sharding_strategy",
    "parallel": "_distribute_module_applied _prepare_output_fn _len_torch_function_stack",
    "interpreted": "TensorDescriptor",
    "launches": "driver add_stages_inspection_hook get_current_stream",
    "offloaded": "_old_forward",
    "second_trainer": "_is_accelerate_prepared",
    "shared_prompts": "_attn_implementation _is_stateful",
    "recorded": "_get_logits_processor",
    "dpo_trainer": "_metrics _compute_loss _signature_columns",
    "grpo_trainer": "_get_per_token_logps_and_entropies _compute_loss",
    "distillation_trainer": "_forward_redirection _compute_loss",
    "multi_token": "_compute_mtp_acceptance_counts",
    "kto_trainer": "_compute_kl_logps",
    "stock_trainer": "_BaseTrainer _prepare_inputs",
}


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

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        path = None if node.value is None else self.path_of(node.value)
        if isinstance(node.target, ast.Name) and path is not None and path.startswith("triton"):
            self.modules[node.target.id] = path
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
# of parts of a config, attributes that are set without `self`, and names of generated code.
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
    "_tile_tokens",
    "_tiled",
    "_number",
    "_compiling",
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
