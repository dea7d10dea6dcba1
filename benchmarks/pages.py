"""Tables and numbers that pages of docs/ state outside `figures.py`, read from the kept runs.

A page has a table between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, NAME a key of `TABLES`. Numbers inside a
sentence have no marks: `SENTENCES` has the sentence with a field for each number, and the page is searched for it.
`figures.py --pages` writes both, and a test says that it would change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import evidence_report, long_tables, scaling
from benchmarks.harness import BASELINE, OURS, OURS_SHARED, STOCK
from benchmarks.headline import LAYERS, alone_table, whole_run
from benchmarks.report import Run, kernels_markdown, name_and_shape, newest_file, spaced

Row = dict[str, Any]
LABELS = {
    "transformers": "transformers",
    "trl": "TRL",
    "liger-kernel": "Liger-Kernel",
    "cut-cross-entropy": "CCE",
    "quack-kernels": "QuACK",
}


def named(run: Run, *packages: str) -> str:
    """Return card, dtype, versions, date and file of a run; `packages` are those to name beside torch and Triton."""
    versions = run.environment["versions"]
    others = [f"{LABELS[name]} {versions[name]}" for name in packages if name in versions]
    files = ", ".join(f"`{path.name}`" for path in sorted(run.files))
    return f"One {', '.join([run.title, *others])} ({files})."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def cell(row: Row | None, write: Callable[[Row], str]) -> str:
    """Return a row as text; "–" or "out of memory" if it was not measured, nothing if there is none."""
    if row is None:
        return ""
    if row["failure"]:
        return "out of memory" if row["failure"] == "out of memory" else "–"
    return write(row)


def by_columns(
    what: str, run: Run, label: Callable[[str], str], columns: dict[str, str], write: Callable[[Row], str]
) -> str:
    """Return a table of `what`: a row for each task, and a column for each contender that was measured anywhere."""
    measured = {name for task in run.cells for name in run.measured(task)}
    columns = {name: title for name, title in columns.items() if name in measured}
    rows = ([label(task), *(cell(rows.get(name), write) for name in columns)] for task, rows in run.cells.items())
    return table([what, *columns.values()], rows)


def times_and_memory(run: Run, label: Callable[[str], str], columns: dict[str, str]) -> str:
    times = by_columns("time over the floor", run, label, columns, lambda row: f"{row['times_floor']:.2f}")
    return f"{times}\n\n{by_columns('MiB', run, label, columns, lambda row: format(row['mib'], '.0f'))}"


def variants(folder: Path) -> str:
    return kernels_markdown(whole_run(folder, "base_kernels_variants"))


def token_stats(folder: Path) -> str:
    run = whole_run(folder, "token_stats")
    columns = {
        f"{OURS}, 256MiB": "256 MiB",
        f"{OURS}, 512MiB": "512 MiB",
        f"{OURS}, 1GiB": "1 GiB",
        f"{OURS}, 256MiB, float32 logits": "256 MiB, float32 logits",
        "trl": "TRL",
        "liger-kernel, CuTe": "Liger-Kernel, CuTe",
        "cut-cross-entropy, exact": "CCE, exact",
    }

    def label(task: str) -> str:
        what, shape = name_and_shape(task)
        short = {
            "log-probabilities and entropies": "… and entropies",
            "log-probabilities, forward": "… log-probabilities, forward",
        }
        return short.get(what, f"{what}, {shape}")

    peers = named(run, "trl", "liger-kernel", "cut-cross-entropy")
    return f"{times_and_memory(run, label, columns)}\n\n{peers}"


def lora_head(folder: Path) -> str:
    run = whole_run(folder, "lora_head")
    columns = {
        BASELINE: "eager",
        "torch.compile": "torch.compile",
        f"{OURS}, automatic": "automatic budget",
        f"{OURS}, 1 GiB": "1 GiB",
        f"{OURS}, 256 MiB": "256 MiB",
    }

    def label(task: str) -> str:
        what, shape = name_and_shape(task.partition(", rank")[0])
        return f"{what}, {shape}"

    return f"{times_and_memory(run, label, columns)}\n\n{named(run)}"


_STEP_NAMES = {"llama-3.2-1b": "Llama-3.2-1B", "qwen2.5-0.5b": "Qwen2.5-0.5B"}


def budgets(folder: Path) -> str:
    """Time and memory of a cross entropy by budget."""
    run = whole_run(folder, "cross_entropy")
    of = run.measured("cross entropy 32768x896x151936")
    found = {
        "automatic": of[OURS],
        "a budget of 1792 tokens of logits, 545 MB": of[f"{OURS}, 1792-token chunks"],
        "`linear_token_stats`, 256 MiB": of[f"{OURS}.linear_token_stats, 256 MiB"],
        "eager": of[BASELINE],
    }
    rows = [[name, f"{row['times_floor']:.2f}", f"{row['mib']:.0f} MiB"] for name, row in found.items()]
    return f"{table(['', 'time over the floor', 'peak above the inputs'], rows)}\n\n{named(run)}"


def _over(rows: dict[str, Row], ours: str, other: str) -> str:
    if other not in rows or rows[other]["failure"] or rows[ours]["failure"]:
        return cell(rows.get(other), lambda row: "")
    return f"{rows[ours]['tokens_per_s'] / rows[other]['tokens_per_s']:.2f}"


def _step_label(task: str) -> str:
    """
    >>> _step_label("GRPO llama-3.2-1b prompt 2048 8 a prompt 8x2560")
    'GRPO, Llama-3.2-1B, prompt 2048, 8 a prompt, 8 × 2560'
    """
    kind, model, rest = task.split(" ", 2)
    rest = re.sub(r"^(prompt \d+) (\d+ a prompt) ", r"\1, \2, ", rest)
    return f"{kind}, {_STEP_NAMES.get(model, model)}, {spaced(rest)}"


def shared_steps(folder: Path) -> str:
    run = whole_run(folder, "trainers_shared")
    rows = []
    for task, found in run.cells.items():
        facts = run.tasks[task]
        prompt, group = (int(re.findall(r"\d+", str(facts[key]))[0]) for key in ("prompt", "group"))
        tokens = group * facts["length"] / (prompt + group * (facts["length"] - prompt))
        label = re.sub(r", prompt.*", "", _step_label(task))
        rows.append(
            [
                f"{label}, {prompt} × {facts['length'] - prompt} × {group}",
                f"{tokens:.2f}",
                _over(found, OURS_SHARED, STOCK),
                _over(found, OURS_SHARED, OURS),
            ]
        )
    header = ["", "tokens, padded over shared", "speed over stock TRL", "speed over ours without sharing"]
    return f"{table(header, rows)}\n\n{named(run, 'transformers', 'trl', 'liger-kernel')}"


def alone(folder: Path) -> str:
    return alone_table(folder)


def several_gpus(folder: Path) -> str:
    return scaling.training(folder)


def long_contexts(folder: Path) -> str:
    return long_tables.tables(folder)


def evidence(folder: Path) -> str:
    return evidence_report.markdown(list(evidence_report.kept(folder).values()))


def kinds(folder: Path) -> str:
    from benchmarks import convergence_kinds  # which needs transformers

    path = newest_file(folder, convergence_kinds.STEM)
    assert path is not None, folder
    return convergence_kinds.markdown(convergence_kinds.load(path))


TABLES: dict[str, Callable[[Path], str]] = {
    make.__name__: make
    for make in (
        variants,
        token_stats,
        lora_head,
        budgets,
        shared_steps,
        alone,
        several_gpus,
        long_contexts,
        evidence,
        kinds,
    )
}


@dataclass(frozen=True)
class Sentence:
    """Words of a page with numbers in them.

    - `page`: relative to the repository
    - `text`: with a field for each value, as `str.format` takes it; any white space matches any other
    - `values`: reads them from a folder of results
    """

    page: str
    text: str
    values: Callable[[Path], dict[str, Any]]

    def written(self, page: str, folder: Path) -> str:
        """Return the page with the numbers of today.

        Raises:
            ValueError: the page does not have the sentence exactly once.
        """
        values = self.values(folder)
        fields = re.split(r"(\{\w+(?::[^}]*)?\})", self.text)
        pattern = "".join(_pattern(part, values) for part in fields)
        found = list(re.finditer(pattern, page))
        if len(found) != 1:
            raise ValueError(f"{self.page} has {len(found)} times, not once: {self.text}")
        # Only the numbers change: the page keeps its line ends.
        match, text, at = found[0], "", found[0].start()
        numbers = [part for part in fields if part.startswith("{")]
        for index, field in enumerate(numbers, 1):
            text += page[at : match.start(index)] + field.format(**values)
            at = match.end(index)
        return page[: match.start()] + text + page[at:]


def _pattern(part: str, values: dict[str, Any]) -> str:
    if not part.startswith("{"):
        return r"\s+".join(re.escape(word) for word in re.split(r"\s+", part))
    name = re.findall(r"\w+", part)[0]
    return r"(.+?)" if isinstance(values[name], str) else r"(-?[\d.,]+(?:e-?\d+)?)"


def _peaks(folder: Path) -> dict[str, Any]:
    run = whole_run(folder, "cross_entropy")
    rows = run.measured("cross entropy 8192x4096x128256")
    return {
        "eager": rows[BASELINE]["mib"],
        "card": run.environment["device"],
        "date": run.environment["date"],
        "file": run.again.get("cross entropy 8192x4096x128256", run).path.name,
    }


def _adapter(folder: Path) -> dict[str, Any]:
    cells = whole_run(folder, "lora_head").cells
    sft, dpo = (next(rows for task, rows in cells.items() if task.startswith(kind)) for kind in ("SFT", "DPO"))
    automatic, small = f"{OURS}, automatic", f"{OURS}, 256 MiB"
    return {
        "time": sft[small]["ms"] / sft[automatic]["ms"],
        "memory": sft[small]["mib"] / sft[automatic]["mib"],
        "pair": dpo[small]["ms"] / dpo[automatic]["ms"],
    }


def _adapter_errors(folder: Path) -> dict[str, Any]:
    run = whole_run(folder, "lora_head")
    rows = next(rows for task, rows in run.cells.items() if task.startswith("SFT"))
    names = {"eager": BASELINE, "automatic": f"{OURS}, automatic", "gib": f"{OURS}, 1 GiB", "small": f"{OURS}, 256 MiB"}
    found: dict[str, Any] = {key: rows[name]["errors"]["down"] for key, name in names.items()}
    return found | {"card": run.environment["device"], "file": run.path.name}


def _float32_logits(folder: Path) -> dict[str, Any]:
    run = whole_run(folder, "token_stats")
    found: dict[str, Any] = {"card": run.environment["device"], "file": run.path.name}
    for key, task in (("logps", "log-probabilities"), ("both", "log-probabilities and entropies")):
        rows = run.measured(f"{task} 8192x4096x128256")
        found[f"{key}_with"] = rows[f"{OURS}, 256MiB, float32 logits"]["ms"]
        found[f"{key}_without"] = rows[f"{OURS}, 256MiB"]["ms"]
    return found


def _forwards(folder: Path) -> dict[str, Any]:
    run = whole_run(folder, "token_stats")
    times = [run.measured(task)[f"{OURS}, 256MiB"]["times_floor"] for task in run.cells if "forward" in task]
    return {"least": min(times), "most": max(times), "card": run.environment["device"], "file": run.path.name}


def _small_norms(folder: Path) -> dict[str, Any]:
    run = whole_run(folder, "base_kernels")
    found: dict[str, Any] = {"card": run.environment["device"]}
    for key, task in (("rms", "RMSNorm"), ("layer", "LayerNorm")):
        name = f"{task} 4096x2048, launches included"
        rows = run.measured(name)
        found |= {f"{key}_ours": rows[OURS]["ms"] * 1e3, f"{key}_eager": rows[BASELINE]["ms"] * 1e3}
        found |= {f"{key}_liger": rows["liger-kernel"]["ms"] * 1e3, "file": run.again.get(name, run).path.name}
        if "F.rms_norm" in rows:
            found["rms_torch"] = rows["F.rms_norm"]["ms"] * 1e3
    return found


def _first_losses(folder: Path) -> dict[str, Any]:
    rows = whole_run(folder, "trainers").measured("DPO llama-3.2-1b 8x2048")
    return {"stock": rows[STOCK]["loss"], "layers": rows[LAYERS]["loss"], "ours": rows[OURS]["loss"]}


def _rollouts(folder: Path) -> dict[str, Any]:
    alone = whole_run(folder, "trainers").measured("GRPO llama-3.2-1b 8x2048")
    shared = whole_run(folder, "trainers_shared").measured("GRPO llama-3.2-1b prompt 2048 8 a prompt 8x2560")
    found: dict[str, Any] = {}
    for name, rows, ours in (("alone", alone, OURS), ("shared", shared, OURS_SHARED)):
        found |= {name: rows[STOCK]["ms"] / rows[ours]["ms"], f"{name}_layers": rows[STOCK]["ms"] / rows[LAYERS]["ms"]}
    return found


def _compared_with_layers(folder: Path) -> dict[str, Any]:
    run = whole_run(folder, "trainers")
    cells = (run.measured(f"{name} llama-3.2-1b 8x2048") for name in ("SFT", "DPO", "KTO", "GRPO"))
    speeds = [rows[LAYERS]["ms"] / rows[OURS]["ms"] for rows in cells]
    return {"least": min(speeds), "most": max(speeds)}


SENTENCES = (
    *(
        Sentence(
            page,
            "an SFT, DPO, KTO or GRPO step of Llama-3.2-1B has {least:.2f} to {most:.2f} of the speed",
            _compared_with_layers,
        )
        for page in ("README.md", "docs/index.md")
    ),
    Sentence(
        "docs/trainers.md",
        "what each contains: {alone:.2f} times TRL's speed where no prompt is shared (8 × 2048, "
        "[benchmarks](benchmarks.md#steps-of-trls-trainers)); {shared:.1f} times where eight answers share a prompt of "
        "2048",
        _rollouts,
    ),
    Sentence(
        "docs/trainers.md",
        "TRL on Liger-Kernel's layers, which shares and skips nothing, is at {alone_layers:.2f}, {shared_layers:.2f} "
        "and",
        _rollouts,
    ),
    Sentence(
        "docs/guides/grpo.md",
        "On Llama-3.2-1B a step is {alone:.2f} times as fast as TRL's where no prompt is shared, {shared:.1f} times "
        "where eight answers share a prompt of 2048 tokens",
        _rollouts,
    ),
    Sentence(
        "docs/benchmarks.md",
        "RMSNorm of 4096 × 2048, forward and backward, took {rms_ours:.0f} µs; eager code {rms_eager:.0f}, "
        "Liger-Kernel {rms_liger:.0f}, `F.rms_norm` {rms_torch:.0f} ({card}, `{file}`). LayerNorm took "
        "{layer_ours:.0f} µs, `F.layer_norm` {layer_eager:.0f}, Liger-Kernel {layer_liger:.0f}.",
        _small_norms,
    ),
    Sentence(
        "docs/benchmarks.md",
        "DPO on Llama-3.2-1B starts at {stock:.3f} in stock, at {layers:.3f} with Liger-Kernel's layers, and at "
        "{ours:.3f} here.",
        _first_losses,
    ),
    Sentence(
        "docs/how-it-works.md",
        "Eager code holds {eager:.0f} MiB for the same step. (Both peaks: {card}, {date}, "
        "`benchmarks/results/{file}`.)",
        _peaks,
    ),
    Sentence(
        "docs/memory.md",
        "An SFT step with LoRA on the head took [{time:.2f} times the time and {memory:.2f} of the memory]",
        _adapter,
    ),
    Sentence(
        "docs/memory.md", "A pair that is larger than the budget costs more, {pair:.2f} times the time.", _adapter
    ),
    Sentence(
        "docs/numerics.md",
        "The gradient of `lora_A` was off by {eager:.1e} in PEFT, {automatic:.1e} with the automatic budget, "
        "{gib:.1e} with 1 GiB, and {small:.1e} with 256 MiB.",
        _adapter_errors,
    ),
    Sentence("docs/numerics.md", "within the bound (one {card}, `{file}`).", _adapter_errors),
    Sentence(
        "docs/numerics.md",
        "with 256 MiB took {logps_with:.1f} ms with it and {logps_without:.1f} ms without, with entropies "
        "{both_with:.1f} and {both_without:.1f} ms (one {card}, `{file}`).",
        _float32_logits,
    ),
    Sentence(
        "docs/numerics.md",
        "the forward took {least:.2f} to {most:.2f} times the product on one {card} (`{file}`).",
        _forwards,
    ),
)


def filled(page: str, folder: Path) -> str:
    """Return the page with the tables between its marks written anew."""

    def write(match: re.Match[str]) -> str:
        make = TABLES.get(match[2])
        return match[0] if make is None else f"{match[1]}\n{make(folder)}\n{match[3]}"

    return re.sub(r"(<!-- (\w+): begin -->)\n.*?(<!-- \2: end -->)", write, page, flags=re.DOTALL)


def written(root: Path, folder: Path) -> dict[Path, str]:
    """Return every page of README and docs that has a table or a sentence, as the results of `folder` make it."""
    pages = {path: path.read_text() for path in (root / "README.md", *sorted((root / "docs").rglob("*.md")))}
    pages = {path: text for path, text in ((path, filled(text, folder)) for path, text in pages.items())}
    for sentence in SENTENCES:
        path = root / sentence.page
        pages[path] = sentence.written(pages[path], folder)
    return pages
