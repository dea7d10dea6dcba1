"""Show that two checkouts of the library compute the same bits.

    git archive COMMIT liger_chunked | tar x -C .base && git rev-parse COMMIT > .base/COMMIT
    python -m benchmarks.same_bits .base                    # this checkout against the one in .base, on the CPU
    python -m benchmarks.same_bits .base --device cuda      # on a GPU, with large steps in bfloat16
    TRITON_INTERPRET=1 python -m benchmarks.same_bits .base --only ", 5 tokens, float32"   # Triton kernels on the CPU

A case is a row of `tests/table.py` or `tests/base_ops.py` in one dtype and one setting: budget, sizes, frozen parts,
options of the logits. Each checkout runs every case in its own processes and hashes its tensors: loss, metrics,
outputs, gradients. A case that differs runs again, which gives the differences and shows whether the bits are
repeatable.

All processes take the table, the batches and the eager code that makes batches from this checkout. A row reaches the
other checkout through the public API only. A name that one checkout lacks fails the rows that use it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import pkgutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
TABLES = ("table", "base_ops")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Keywords that an older commit called otherwise.
OLD_KEYWORDS = {"LigerFusedLinearCPOLoss": {"cpo_alpha": "alpha", "alphapo_alpha": "alpha_param"}}

Case = Callable[[], dict[str, Any]]  # returns tensors, numbers or None by name
Result = dict[str, str] | str  # hashes by name, or the exception of a case that failed


# Cases


@dataclass(frozen=True)
class Setting:
    """How a row of the table runs.

    - `tokens`: tokens in the logits budget, or None for the automatic budget; negative values count from all tokens
    - `sizes`: replaced fields of the table's `SMALL`
    - `batch`: `"no bias"`, `"no targets"` or `"other ignore_index"` changes the batch
    """

    tokens: float | None = 5
    sizes: Mapping[str, Any] | None = None
    trainable: tuple[str, ...] = ("weight", "input", "bias")
    options: Mapping[str, Any] | None = None
    batch: str = ""
    upstream: float = 1.0


# A vocabulary above one slice, and sequences of several blocks of rows.
_SLICES, _LONGER = {"vocab": 2503}, {"sequences": 8, "length": 32, "hidden": 64, "vocab": 499, "ref_hidden": 48}
SETTINGS = {
    "automatic budget": Setting(None),
    "all tokens but one": Setting(-1),
    "15 tokens": Setting(15),
    "5 tokens": Setting(),
    "a third of a token": Setting(1 / 3),
    "frozen head": Setting(trainable=("input",)),
    "frozen head, automatic budget": Setting(None, trainable=("input",)),
    "frozen input": Setting(trainable=("weight", "bias")),
    "frozen input, automatic budget": Setting(None, trainable=("weight", "bias")),
    "frozen weight and input": Setting(trainable=("bias",)),
    "no gradients": Setting(trainable=()),
    "no bias": Setting(15, batch="no bias"),
    "softcap": Setting(15, options={"softcap": 3.0}),
    "logit_scale": Setting(15, options={"logit_scale": 1.7}),
    "temperature": Setting(15, options={"temperature": 0.6}),
    "no ignored tokens": Setting(15, {"ignored": False}),
    "no targets": Setting(15, batch="no targets"),
    "other ignore_index": Setting(15, options={"ignore_index": -1}, batch="other ignore_index"),
    "upstream gradient -0.7": Setting(15, upstream=-0.7),
    "slices of the vocabulary": Setting(5, _SLICES),
    "slices and rows": Setting(2, _SLICES),
    "longer": Setting(None, _LONGER),
    "longer, 61 tokens": Setting(61, _LONGER),
}

# On a GPU. 8192 or more of 16384 tokens have a target: a budget of 5120 tokens gives two chunks, each large enough for
# the fused epilogue of Hopper.
_LARGE = {"sequences": 16, "length": 1024, "hidden": 1024, "vocab": 34000, "ref_hidden": 1024}
# Logits of one chunk fit the automatic budget, but two chunks by the fused epilogue replace it.
_WIDE = {**_LARGE, "sequences": 8, "vocab": 151936, "ignored": False}
LARGE_SETTINGS = {
    "large": Setting(None, _LARGE, batch="no bias"),
    "large, 5120 tokens": Setting(5120, _LARGE, batch="no bias"),
    "large, 1024 tokens": Setting(1024, _LARGE, batch="no bias"),
    "large, 5120 tokens, frozen head": Setting(5120, _LARGE, ("input",), batch="no bias"),
    "large, 5120 tokens, frozen input": Setting(5120, _LARGE, ("weight",), batch="no bias"),
    "large, 5120 tokens, no gradients": Setting(5120, _LARGE, (), batch="no bias"),
    "large, 5120 tokens, logit_scale": Setting(5120, _LARGE, options={"logit_scale": 1.7}, batch="no bias"),
}
WIDE_SETTINGS = {"wide": Setting(None, _WIDE, batch="no bias")}
LARGE_ROWS = (
    *("ce", "ce-smoothing", "ce-dft", "ce-none", "dpo-sigmoid", "dpo-rpo", "orpo", "cpo-no-nll", "simpo"),
    *("kto-no-reference", "bco", "grpo-on-policy", "kl", "jsd", "tvd", "stats-logps", "stats-all"),
)
WIDE_ROWS = ("ce", "dpo-no-reference", "grpo-on-policy", "stats-logps")

# Metrics and other outputs of a case.
_recorded: dict[str, Any] = {}


def _record_metrics(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Record the metrics of a loss: a forward hook of all modules."""
    if isinstance(output, tuple) and hasattr(output[-1], "_asdict"):
        _recorded.update({f"metrics.{name}": value for name, value in output[-1]._asdict().items()})


def _own_rows(table: ModuleType) -> list[Any]:
    """Return rows for results that the table's rows do not have: metrics of the cross entropy, all statistics."""
    flags = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)

    def cross_entropy(batch: dict[str, Tensor], **options: Any) -> Tensor:
        return table.LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-2, **flags, **options)(**batch)[0]

    def statistics(batch: dict[str, Tensor], **options: Any) -> Tensor:
        outputs = ("logps", "lse", "entropy", "mean_logits", "argmax", "is_top1", "log_sum_sq_probs")
        stats = table.linear_token_stats(**batch, outputs=outputs, **options)
        _recorded.update({name: getattr(stats, name) for name in outputs})
        return stats.logps.square().sum() + stats.entropy.mean()

    some = table.rows("ce-sum")[0]
    return [replace(some, id="ce-metrics", ours=cross_entropy), replace(some, id="stats-each", ours=statistics)]


@functools.lru_cache(maxsize=1)  # for the settings of a large batch
def _sample(table: ModuleType, row: Any, sizes: Any, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return a batch that is made on the CPU and then moved."""
    if row.id == "grpo-on-policy" and sizes.vocab >= _LARGE["vocab"]:
        # The table's batch needs full logits in float64.
        batch = table.pairs(sizes, 0, ref=None)
        generator = torch.Generator().manual_seed(1)
        batch["advantages"] = torch.randn(sizes.sequences, generator=generator, dtype=torch.float64)
    else:
        batch = row.sample(sizes, 0)
    return table.moved(batch, dtype, device)


def _changed(batch: dict[str, Tensor], change: str) -> dict[str, Tensor]:
    """Return the batch after the change that `Setting.batch` names."""
    target = batch["target"]
    if change == "no bias":
        return {name: x for name, x in batch.items() if not name.endswith("bias")}
    if change == "no targets":
        return {**batch, "target": torch.full_like(target, -100)}
    if change == "other ignore_index":
        return {**batch, "target": target.masked_fill(target == -100, -1)}
    return batch


def _run_row(table: ModuleType, row: Any, setting: Setting, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the loss, the gradients and the metrics of a row."""
    sizes = table.SMALL._replace(**setting.sizes or {})
    batch = _changed(_sample(table, row, sizes, dtype, device), setting.batch)
    options = dict(setting.options or {})
    if setting.tokens is not None:
        tokens = setting.tokens if setting.tokens > 0 else max(1, table.n_valid(batch) + setting.tokens)
        options["logits_budget"] = max(1, int(tokens * sizes.vocab)) * dtype.itemsize
    loss = functools.partial(row.ours, **options)
    _recorded.clear()
    if any(name in batch for name in setting.trainable):
        result = table.evaluate(loss, batch, setting.trainable, setting.upstream)
    else:
        result = {"loss": loss(batch)}
    return result | _recorded


def _run_op(ops: ModuleType, op: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the outputs of a base kernel, then its gradients."""
    tensors = ops.run(op.ours, op.sample(shape, dtype, device))
    return {f"result {i}": x for i, x in enumerate(tensors)}


def cases(tables: Mapping[str, ModuleType], device: str) -> dict[str, Case]:
    """Return all cases by name."""
    found: dict[str, Case] = {}

    def add(row: Any, dtypes: Sequence[torch.dtype], settings: Mapping[str, Setting]) -> None:
        for name, setting in settings.items():
            for dtype in dtypes:
                run = functools.partial(_run_row, tables["table"], row, setting, dtype, device)
                found[f"{row.id}, {name}, {_named(dtype)}"] = run

    if table := tables.get("table"):
        for row in [*table.ROWS, *_own_rows(table)]:
            add(row, DTYPES, SETTINGS)
        if device == "cuda":
            for row in table.rows(*LARGE_ROWS):
                add(row, (torch.bfloat16,), LARGE_SETTINGS)
            for row in table.rows(*WIDE_ROWS):
                add(row, (torch.bfloat16,), WIDE_SETTINGS)
    if ops := tables.get("base_ops"):
        for op in ops.OPS:
            for shape in op.shapes:
                for dtype in DTYPES:
                    name = f"{op.id}, {'x'.join(map(str, shape))}, {_named(dtype)}"
                    found[name] = functools.partial(_run_op, ops, op, shape, dtype, device)
    return found


def row_of(case: str) -> str:
    """Return the row's id from the name of a case."""
    return case.split(",")[0]


# A process of a checkout


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(x: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes.

    >>> digest(torch.tensor(0.0)) == digest(torch.tensor(-0.0))
    False
    """
    x = x.detach().cpu().contiguous()
    hashed = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    hashed.update(x.view(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def run_case(run: Case) -> tuple[Result, dict[str, Tensor]]:
    """Return the result of a case, and its tensors."""
    try:
        values = {name: x for name, x in run().items() if x is not None}
        tensors = {name: torch.as_tensor(x).detach().cpu() for name, x in values.items()}
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}", {}
    return {name: digest(x) for name, x in tensors.items()}, tensors


def _names_in(table: str) -> Iterator[str]:
    """Return the public names of the library that a table uses."""
    for node in ast.walk(ast.parse((ROOT / "tests" / f"{table}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "liger_chunked":
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lc":
            yield node.attr


def _absent(name: str) -> type:
    """Return a stand-in for a name that the library lacks, which raises when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ImportError(f"liger_chunked has no {name}")

    return type(name, (), {"__new__": refuse})


def _with_old_keywords(loss: type, keywords: Mapping[str, str]) -> Callable[..., Any]:
    """Return the loss, or a function that passes new keywords by their old names if the loss knows only these."""
    known = inspect.signature(loss.__init__).parameters
    old = {new: old for new, old in keywords.items() if new not in known and old in known}
    return (lambda **settings: loss(**{old.get(k, k): v for k, v in settings.items()})) if old else loss


def load_tables() -> tuple[dict[str, ModuleType], dict[str, Case]]:
    """Import this checkout's tables with the other's library; a table that cannot be imported becomes a failed case."""
    import liger_chunked

    for name in {name for table in TABLES for name in _names_in(table)}:
        if not hasattr(liger_chunked, name):
            setattr(liger_chunked, name, _absent(name))
    for name, keywords in OLD_KEYWORDS.items():
        setattr(liger_chunked, name, _with_old_keywords(getattr(liger_chunked, name), keywords))
    tables: dict[str, ModuleType] = {}
    failures: dict[str, Case] = {}
    for table in TABLES:
        try:
            tables[table] = importlib.import_module(table)
        except Exception as failure:
            failures[f"import of {table}"] = functools.partial(_raise, failure)
    return tables, failures


def _raise(failure: Exception) -> dict[str, Any]:
    raise failure


def worker(device: str) -> None:
    """Answer the requests of the parent process, one JSON object per line."""
    sys.path[0] = str(ROOT / "tests")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import liger_chunked

    modules = {module.name for module in pkgutil.iter_modules(liger_chunked.__path__) if module.name[0] != "_"}
    public = modules | set(liger_chunked.__all__)
    facts = {
        "imported": liger_chunked.__file__,
        "public": sorted(public),
        "has": sorted(public | set(dir(liger_chunked))),
    }
    tables, failures = load_tables()
    known = cases(tables, device) | failures
    torch.nn.modules.module.register_module_forward_hook(_record_metrics)
    for line in sys.stdin:
        request = json.loads(line)
        if "part" in request:
            rows = dict.fromkeys(map(row_of, known))
            mine = list(rows)[request["part"] :: request["parts"]]
            wanted = {name: run for name, run in known.items() if request["only"] in name and row_of(name) in mine}
            answer = {**facts, "results": {name: run_case(run)[0] for name, run in wanted.items()}}
        else:
            result, tensors = run_case(known[request["case"]])
            torch.save(tensors, request["save"])
            answer = {"result": result}
        print(json.dumps(answer), flush=True)


# The comparison


def compare(before: Mapping[str, Result], after: Mapping[str, Result]) -> dict[str, Any]:
    """Compare the results of two checkouts, case by case.

    Returns:
        Counts of cases and tensors, and these lists:

        - `differing`: cases with the names of the tensors whose bits differ, or that only one checkout returned
        - `failing`: cases that failed in one checkout, or with another exception; None where a case did not fail
        - `failing_alike`: cases that failed in both with the same exception
        - `only_before`, `only_after`: cases of one checkout only
    """
    differing, failing, alike = {}, {}, {}
    n_tensors = n_equal = n_equal_cases = 0
    for case in (case for case in after if case in before):
        one, other = before[case], after[case]
        if isinstance(one, str) or isinstance(other, str):
            if one == other:
                alike[case] = one
            else:
                failing[case] = {
                    "before": one if isinstance(one, str) else None,
                    "after": other if isinstance(other, str) else None,
                }
            continue
        names = {**one, **other}
        unequal = [name for name in names if one.get(name) != other.get(name)]
        n_tensors += len(names)
        n_equal += len(names) - len(unequal)
        n_equal_cases += not unequal
        if unequal:
            differing[case] = unequal
    return {
        "cases": len({**before, **after}),
        "equal_cases": n_equal_cases,
        "tensors": n_tensors,
        "equal_tensors": n_equal,
        "differing": differing,
        "failing": failing,
        "failing_alike": alike,
        "only_before": [case for case in before if case not in after],
        "only_after": [case for case in after if case not in before],
    }


def difference(before: Tensor | None, after: Tensor | None) -> dict[str, Any]:
    """Return the largest absolute difference, and this over the largest magnitude of `after`.

    A difference of 0 with other bits is one of signed zeros or NaNs.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
    {'largest_absolute': 1.0, 'largest_relative': 0.2}
    """
    if before is None or after is None:
        return {"missing": "before" if before is None else "after"}
    if before.shape != after.shape or before.dtype != after.dtype:
        return {name: f"{_named(x.dtype)} {tuple(x.shape)}" for name, x in (("before", before), ("after", after))}
    a, b = before.double(), after.double()
    same = (a == b) | (a.isnan() & b.isnan())
    absolute = float((a - b).masked_fill(same, 0).abs().max()) if a.numel() else 0.0
    magnitude = float(b.abs().nan_to_num(0).max()) if b.numel() else 0.0
    return {"largest_absolute": absolute, "largest_relative": absolute / magnitude if magnitude else math.inf}


class Both:
    """The processes of two checkouts."""

    def __init__(self, opened: Sequence[Any]) -> None:
        """The first half of `opened` are processes of the first checkout."""
        n = len(opened) // 2
        self.sides = opened[:n], opened[n:]
        self._pool = ThreadPoolExecutor(len(opened))

    def run(self, only: str) -> list[dict[str, Any]]:
        """Return the answer of each checkout to all cases whose name contains `only`."""
        parts = len(self.sides[0])
        pending = [
            [self._pool.submit(process.ask, part=part, parts=parts, only=only) for part, process in enumerate(side)]
            for side in self.sides
        ]
        sides = []
        for side in pending:
            answers = [answer.result() for answer in side]
            results = {name: result for answer in answers for name, result in answer["results"].items()}
            sides.append({**answers[0], "results": results})
        return sides

    def details(self, case: str, names: Sequence[str], results: Sequence[Mapping[str, Result]]) -> dict[str, Any]:
        """Run a case again, and return the differences of its tensors."""
        with tempfile.TemporaryDirectory() as folder:
            files = [f"{folder}/{side}.pt" for side in ("before", "after")]
            asked = [
                self._pool.submit(side[0].ask, case=case, save=file)
                for side, file in zip(self.sides, files, strict=True)
            ]
            again = [answer.result()["result"] for answer in asked]
            before, after = (torch.load(file) for file in files)
        return {
            "case": case,
            "repeatable": again == [result[case] for result in results],
            "tensors": {name: difference(before.get(name), after.get(name)) for name in names},
        }


def report(found: Mapping[str, Any]) -> list[str]:
    """Return the comparison as lines, one for all differing cases of a row."""
    lines = [
        f"{found['equal_cases']} of {found['cases']} cases and {found['equal_tensors']} of {found['tensors']} tensors "
        "have equal bits"
    ]
    differing = defaultdict(list)
    for entry in found["differing"]:
        differing[row_of(entry["case"])].append(entry)
    for row, entries in differing.items():
        tensors = [pair for entry in entries for pair in entry["tensors"].items()]
        largest = [max(d.get(key, 0.0) for _, d in tensors) for key in ("largest_absolute", "largest_relative")]
        unrepeatable = sum(not entry["repeatable"] for entry in entries)
        lines.append(
            f"  differs: {row}, {len(entries)} cases, {unrepeatable} not repeatable: largest difference "
            f"{largest[0]:.1e}, relative {largest[1]:.1e}, of {', '.join(dict.fromkeys(name for name, _ in tensors))}"
        )
    sides = [(case, side, text) for case, sides in found["failing"].items() for side, text in sides.items() if text]
    sides += [(case, "both", text) for case, text in found["failing_alike"].items()]
    for (row, side, text), n in Counter((row_of(case), side, text) for case, side, text in sides).items():
        lines.append(f"  fails, {side}: {row}, {n} cases: {text}")
    for side in ("before", "after"):
        only = Counter(map(row_of, found[f"only_{side}"]))
        lines += [f"  only {side}: {row}, {n} cases" for row, n in only.items()]
        lines += [f"  public name only {side}: {name}" for name in found["public_names"][f"only_{side}"]]
    return lines


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("other", type=Path, nargs="?", help="folder of the other checkout, which is `before`")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--only", default="", help="only cases whose name contains this")
    parse.add_argument("--processes", type=int, help="of each checkout; default: 1, or 4 on a GPU")
    parse.add_argument("--out", type=Path, help="JSON file; default: a new one in benchmarks/results")
    parse.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parse.parse_args()
    if args.worker:
        worker(args.device)
        return
    if args.other is None:
        parse.error("name the folder of the other checkout")
    from benchmarks.before_after import checkouts, commit_of
    from benchmarks.harness import RESULTS, environment, new_file

    begin = time.perf_counter()
    facts = environment(args.device)
    facts |= {"before": commit_of(args.other), "after": facts["commit"]}
    facts |= {"interpreted": os.environ.get("TRITON_INTERPRET") == "1", "only": args.only}
    n = args.processes or (4 if args.device == "cuda" else 1)
    paths = [args.other] * n + [ROOT] * n
    with checkouts(*paths, script=Path(__file__), arguments=("--device", args.device)) as opened:
        both = Both(opened)
        before, after = both.run(args.only)
        for checkout, answer in ((opened[0], before), (opened[-1], after)):
            assert Path(answer["imported"]).is_relative_to(checkout.path), answer["imported"]
        results = before["results"], after["results"]
        found = compare(*results)
        found["differing"] = [both.details(case, names, results) for case, names in found["differing"].items()]
    found["public_names"] = {
        "only_before": sorted(set(before["public"]) - set(after["has"])),
        "only_after": sorted(set(after["public"]) - set(before["has"])),
    }
    print("\n".join(report(found)))
    facts["seconds"] = round(time.perf_counter() - begin, 1)
    path = args.out or new_file(RESULTS, "same_bits", facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"family": "same_bits", "environment": facts, **found}, indent=1) + "\n")
    print(f"wrote {path} after {facts['seconds']} s")


if __name__ == "__main__":
    main()
