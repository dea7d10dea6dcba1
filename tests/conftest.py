"""Settings of all tests: the device, deterministic operations, and NaN in uninitialized memory.

python -m pytest -n 2                                    the quick tests, on the CPU
python -m pytest --slow tests/losses                     all tests of a folder
TRITON_INTERPRET=1 python -m pytest --slow -m triton     the Triton kernels, in Triton's interpreter
python -m pytest --slow -m gpu                           the tests of a CUDA device

Marks say what runs only with an option:

- `slow` tests, and most cases of tests marked `few`, need `--slow`. A test that the command line names runs anyway.
- `exhaustive` tests, and most parameter combinations of tests marked `sampled` (see `mark_exhaustive`;
  `interpreted=True` does so only in the interpreter), need `--exhaustive`, which includes `--slow`.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Deterministic mode requires this setting before cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The shapes are small, and the workers of pytest-xdist share the cores. In ranks, accelerate would start a thread for
# each core, and on busy ones threads wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import interpreted
import pytest
import torch
from fresh_process import FreshProcesses

from liger_chunked.engine import choose, cutting
from liger_chunked.kernels import backend

# Python takes any folder for a package: where TRL is not installed, `import trl` would find tests/trl.
for name in ("kernels", "trl"):
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is None:
        sys.modules[name] = None  # `import` then raises ImportError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and all cases of those marked few")
    parser.addoption("--exhaustive", action="store_true", help="run all tests: those marked exhaustive or slow too")
    if importlib.util.find_spec("pytest_timeout") is None:  # on a machine with a GPU, say, without the extra `dev`
        parser.addini("timeout", "seconds of a test: needs pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if backend.INTERPRETED:
        interpreted.mend()
        # tl.where computes both sides, and NumPy warns about the side that is not used.
        config.addinivalue_line("filterwarnings", "ignore:.* encountered in .*:RuntimeWarning")
    # Hypothesis warns where the garbage collector sees no reference to its generator of random numbers. On Python 3.14
    # it sees none here, because the dictionary that holds the generator is among the frozen objects.
    config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random` was passed an object")
    config.addinivalue_line("markers", "slow: runs with --slow only")
    config.addinivalue_line(
        "markers", "few(n, *ids): n cases run without --slow: those with these ids, the others at equal distances"
    )
    config.addinivalue_line("markers", "triton: reaches the Triton kernels wherever they run")
    config.addinivalue_line("markers", "ordinary_memory: runs outside deterministic mode")
    config.addinivalue_line("markers", "stock_layers: patched layers leave a CPU to stock code, as for users")
    config.addinivalue_line("markers", "exhaustive: runs with --exhaustive only")
    config.addinivalue_line(
        "markers", "sampled(n=1, *, interpreted=True): runs n combinations per value without --exhaustive"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m triton`, import no test file without such a test: most of them import transformers."""
    of_triton = config.getoption("markexpr").startswith("triton") and collection_path.suffix == ".py"
    return True if of_triton and "pytest.mark.triton" not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hide the objects of imports and collection from the garbage collector, which takes a second to walk over them.

    pytest runs it several times at the end. What is garbage by now stays: finding it would take the same second.
    """
    gc.disable()
    result = yield
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules say that their objects leak
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the devices. Make no tests that are deselected at once: three of four, and they take ten seconds.

    A device that is missing gets no tests either: `few` would choose them in place of others.
    """
    if "device" in metafunc.fixturenames:
        devices: list[Any] = ["cpu"]
        if torch.cuda.is_available() and "not gpu" not in metafunc.config.getoption("markexpr"):
            devices.append(pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("device", devices)
    if not metafunc.config.getoption("--exhaustive"):
        marks = metafunc.definition.own_markers
        marks[:] = [without_exhaustive(mark) if mark.name == "parametrize" else mark for mark in marks]


def without_exhaustive(mark: pytest.Mark) -> pytest.Mark:
    """Return a mark `parametrize` without the values that are marked `exhaustive`.

    If all are, one stays, which deselects the test: pytest would report one without values as skipped.
    """
    names, values, *others = mark.args
    values = [*values]
    kept = [value for value in values if not any(m.name == "exhaustive" for m in getattr(value, "marks", ()))]
    ids = mark.kwargs.get("ids")
    if len(kept) == len(values) or isinstance(ids, list | tuple):
        return mark
    return pytest.mark.parametrize(names, kept or values[:1], *others, **mark.kwargs).mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests, unless the command line has `--exhaustive`. Samples are drawn from the others.

    Tests marked `gpu` are skipped where there is no CUDA device.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # The longest tests begin first: a worker that gets one last works alone for half a minute.
    items.sort(key=lambda item: "test_compile_targets" not in item.nodeid)
    if config.getoption("--exhaustive"):
        return
    deselected = [item for item in items if item.get_closest_marker("exhaustive")]
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    sampled: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if isinstance(item, pytest.Function) and marker and (backend.INTERPRETED or not marker.kwargs):
            sampled[item.nodeid.split("[")[0]].append(item)
    for product in sampled.values():
        mark_exhaustive(product)
    deselected += [item for item in items if item.get_closest_marker("exhaustive")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    if not config.getoption("--slow"):  # last: `few` counts the cases of a sample
        named = [argument.partition("::") for argument in config.args if "::" in argument]
        quick = quick_tests(items)
        quick |= {x for x in items for file, _, test in named if is_named(x, Path(file), test)}
        config.hook.pytest_deselected(items=[item for item in items if item not in quick])
        items[:] = [item for item in items if item in quick]


def is_named(item: pytest.Item, file: Path, test: str) -> bool:
    return item.path == file.resolve() and item.nodeid.partition("::")[2].startswith(test)


def quick_tests(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that run without `--slow`."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    return {test for tests in cases.values() for test in few(tests)}


def few(tests: list[Any]) -> list[pytest.Item]:
    """Return the cases of one function that its mark `few` chooses, or all."""
    mark = tests[0].get_closest_marker("few")
    if mark is None:
        return tests
    n, *ids = mark.args
    missing = {*ids} - {test.callspec.id for test in tests}
    # A test that the command line names may come without its other cases. The interpreter has fewer of some.
    if missing and not backend.INTERPRETED and not any("::" in argument for argument in tests[0].config.args):
        raise pytest.UsageError(f"{tests[0].nodeid}: `few` names cases that do not exist: {sorted(missing)}")
    chosen = [test for test in tests if test.callspec.id in ids]
    others = [test for test in tests if test.callspec.id not in ids]
    n = min(n - len(chosen), len(others))
    # Neighbouring cases mostly differ in the last parameter alone, and distant ones in more.
    return chosen + [others[i * len(others) // n] for i in range(n)]


def mark_exhaustive(product: list[pytest.Function]) -> None:
    """Mark all but a diagonal of a product of parameters.

    Each value of the longest parameter keeps `n` combinations of the others. If `n` is 0.5, every second value keeps
    one. Neighbouring values keep different combinations, so every combination stays with some value. Arguments that are
    parametrized together count as one parameter. Devices do not count. Cases that the mark `few` names stay too: a row
    that is added to a table moves the diagonal away from them.
    """
    together = [mark.args[0] for mark in product[0].iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else [*names] for names in together]
    groups += [[name] for name in product[0].callspec.params if not any(name in group for group in groups)]
    columns = [
        numbered([tuple(id(item.callspec.params[name]) for name in group) for item in product])
        for group in groups
        if group != ["device"]
    ]
    axis = max(columns, key=max)
    others = numbered([tuple(column[i] for column in columns if column is not axis) for i in range(len(product))])
    period = 1 + min(max(axis), max(others))
    few_mark = product[0].get_closest_marker("few")
    named = few_mark.args[1:] if few_mark else ()
    for item, value, combination in zip(product, axis, others, strict=True):
        n = next(iter(item.get_closest_marker("sampled").args), 1)
        if (combination - value) % (period / min(n, 1)) >= n and item.callspec.id not in named:
            item.add_marker("exhaustive")


def numbered(values: list[tuple[int, ...]]) -> list[int]:
    """Return the index of each value among the distinct values, in order of first occurrence."""
    order = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return [order[value] for value in values]


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Free what a file leaves behind. Hide imports and caches from the garbage collector."""
    yield
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch imports here
            torch.compiler.reset()  # its caches hold models
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Hide what a test imported from the garbage collector: each training run of accelerate collects all garbage."""
    global modules_seen
    if len(sys.modules) > modules_seen + 20:
        modules_seen = len(sys.modules)
        gc.collect()
        gc.freeze()


modules_seen = 0


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill the result of `torch.empty` with NaN, and reject nondeterministic operations."""
    if request.node.get_closest_marker("ordinary_memory"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def expects_triton(device: str) -> bool:
    """Return whether this process uses the Triton kernels for float32 tensors on `device`."""
    return device == "cuda" or backend.INTERPRETED


@pytest.fixture(autouse=True)
def layers_on_a_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let patched layers run our code on a CPU, as on a GPU, in place of stock's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("patched_class", "experts"):
            module = sys.modules.get(f"liger_chunked.integrations.transformers.{name}")
            if module is not None and not request.node.get_closest_marker("stock_layers"):
                patch.setattr(module, "use_triton", lambda x: True)
        yield


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[FreshProcesses]:
    processes = FreshProcesses()
    yield processes
    processes.close()


@pytest.fixture
def cut_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set constants of `engine.cutting`, such as `cut_with(ROUND=4)`. Cuts made with others are forgotten."""

    def forget() -> None:
        for cached in (cutting.chunks_of_tokens, cutting.tiles, cutting.whole_rows, choose._remembered_layout):
            cached.cache_clear()

    def cut(**constants: int) -> None:
        for name, value in constants.items():
            monkeypatch.setattr(cutting, name, value)
        forget()

    yield cut
    forget()


@pytest.fixture
def path(device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield "triton" or "torch": the kernels that the test must run. Fails if it ran the others, or none."""
    ran: set[str] = set()

    def watched(module_name: str, name: str, path: str) -> None:
        module = importlib.import_module(f"liger_chunked.kernels.{module_name}")
        function = getattr(module, name)

        def watch(*args, **kwargs):
            ran.add(path)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watch)

    watched("logits_stats", "_logits_stats_triton", "triton")
    watched("logits_grad", "_logits_grad_triton_", "triton")
    watched("divergence_sums", "_sums_triton", "triton")
    watched("divergence_grad", "_divergence_grad_triton_", "triton")
    watched("divergence_sums", "_sums_torch", "torch")
    watched("divergence_grad", "_divergence_grad_torch_", "torch")
    watched("logits_stats", "_logits_stats_torch", "torch")
    watched("logits_grad", "_logits_grad_torch_", "torch")
    watched("kept", "_stats_kernel", "triton")
    watched("kept", "_stats_torch", "torch")
    expected = "triton" if expects_triton(device) else "torch"
    yield expected
    row = request.node.callspec.params.get("row")
    assert ran == ({expected} if row is None or row.kernels else set())


@pytest.fixture
def by_epilogue(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make supported steps use the fused epilogue, on a device that has one or in the interpreter."""
    if device == "cpu" and not backend.INTERPRETED:
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")
    if device == "cuda" and not backend.has_wide_tiles(torch.device("cuda")):
        pytest.skip("no tensor memory accelerator")
    monkeypatch.setattr(choose, "has_wide_tiles", lambda device: True)
