"""The supported models of `docs/models.md` against fresh rows, for the transformers that the page names.

`PYTHONPATH=tests python tests/models/test_supported_models.py` writes this part of the page.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from sampling import sampled
from tiny_models import CAUSAL, IMAGE_TEXT, batch, small_model
from transformers import PreTrainedModel

from liger_chunked.deferred import Deferral, DeferredLogits, set_deferral
from liger_chunked.deferred.defer import refusal_of
from liger_chunked.deferred.request import requested
from liger_chunked.integrations.transformers.detect import head_of
from liger_chunked.integrations.transformers.found import found_in
from liger_chunked.integrations.transformers.overrides import LAYER_SWITCHES

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- supported: begin -->", "<!-- supported: end -->"
PAGE = PATH.read_text().partition(BEGIN)[2].partition(END)[0]
VERSION = re.search(r"classes of transformers ([\d.]+):", PAGE)[1]

pytestmark = pytest.mark.ordinary_memory
of_the_page = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the page is that of transformers {VERSION}"
)


class Row(NamedTuple):
    name: str
    head: str  # "fused", "logits", "not run" or "not built"
    layers: tuple[str, ...]  # switches of `apply_liger_kernel`
    reason: str

    def __str__(self) -> str:
        head = ": ".join(filter(None, (self.head, self.reason))).replace("|", "\\|")
        return f"| `{self.name}` | {', '.join(self.layers)} | {head} |"


def rows_of_the_page() -> dict[str, str]:
    """Return the row of each class: of its own, or of the table whose rows have several fused classes."""
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `(\w+)` \|.*", PAGE, re.MULTILINE)}
    for layers, names in re.findall(r"^\| ([\w, ]*) \| (`.*`) \|$", PAGE, re.MULTILINE):
        for name in re.findall(r"\w+", names):
            rows[name] = str(Row(name, "fused", tuple(filter(None, layers.split(", "))), ""))
    return {name: rows[name] for name in sorted(rows)}


ROWS = rows_of_the_page()


def row_of(name: str) -> Row:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _row_of(name)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _row_of(name: str) -> Row:
    try:
        model = small_model(name)
    except Exception as error:
        return Row(name, "not built", (), sentence(f"{type(error).__name__}: {error}"))
    found = found_in(model)
    layers = tuple(switch for switch in (*LAYER_SWITCHES, "rope") if switch in found.switches)
    try:
        with torch.no_grad():
            reason = why_logits(model, batch(name))
    except Exception as error:
        return Row(name, "not run", layers, sentence(f"{type(error).__name__}: {error}"))
    return Row(name, "fused", layers, "") if reason is None else Row(name, "logits", layers, sentence(reason))


def why_logits(model: PreTrainedModel, inputs: dict[str, Any]) -> str | None:
    """Run a step with labels, and return what asked for logits; None if nothing did."""
    head = head_of(model)
    if head is None:
        return "it has no lm_head"
    if (reason := refusal_of(head)) is not None:
        return reason
    set_deferral(head, Deferral())
    try:
        sources: list[Any] = []
        with requested(sources=sources):
            outputs = model(**inputs)
    finally:
        set_deferral(head, None)
    asked_by = next((source.asked_by for source in sources if source.asked_by is not None), None)
    if asked_by is not None:
        return f"{asked_by} takes real logits"
    if outputs.loss is None:
        return "its forward returns no loss"
    return None if isinstance(outputs.logits, DeferredLogits) else "its forward takes real logits"


def sentence(text: str) -> str:
    text = re.sub(r"\S+/site-packages/", "", " ".join(text.split()))  # no path of this machine
    return re.split(r"\.? *\. ", text)[0].rstrip(".")


def page(rows: Sequence[Row]) -> str:
    fused, failed = (sum(row.head == head for row in rows) for head in ("fused", "not built"))
    summary = (
        f"{len(rows)} classes of transformers {transformers.__version__}: {fused} fused heads, {failed} not built."
    )
    by_layers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        if row.head == "fused":
            by_layers[row.layers].append(f"`{row.name}`")
    largest = sorted(by_layers.items(), key=lambda item: -len(item[1]))
    lines = [f"| {', '.join(layers)} | {', '.join(names)} |" for layers, names in largest]
    tables = ["| layers | classes with a fused head |", "|---|---|", *lines, ""]
    tables += ["| class | layers | head |", "|---|---|---|", *(str(row) for row in rows if row.head != "fused")]
    return "\n".join([INTRODUCTION, summary, "", *tables])


INTRODUCTION = """## Supported models

What `apply_liger_kernel` does with the causal and image-text-to-text classes of transformers, found by one training
step of a small copy of each class with random weights. The layers are the switches that match at least one layer of
the class. A head is *fused* if the step computed its loss without logits. Otherwise it is listed with the code that
needed *logits*: such a model trains with real logits, the same loss and gradients, and the memory of stock. *Not
built*, *not run*: transformers cannot build the small copy here, or cannot run it.
"""


def without_rounding(row: str) -> str:
    return re.sub(r"\d+\.\d+(e[+-]\d+)?", "number", row)


@pytest.mark.few(1)
@of_the_page
@pytest.mark.parametrize("name", sampled(ROWS, parts=64))
def test_row_of_the_page(name):
    if "requires the timm library" in ROWS[name]:
        pytest.skip("depends on what is installed")
    assert without_rounding(str(row_of(name))) == without_rounding(ROWS[name])


@of_the_page
def test_page_is_complete():
    assert list(ROWS) == sorted(CAUSAL + IMAGE_TEXT)
    heads = [re.split(r" \| |:| \|", row.split(" | ", 2)[2])[0] for row in ROWS.values()]
    counts = f"{len(ROWS)} classes of transformers {VERSION}: {heads.count('fused')} fused heads"
    assert f"{counts}, {heads.count('not built')} not built." in PAGE
    assert f"[{heads.count('fused')} of the {len(ROWS)} causal" in (ROOT / "README.md").read_text()
    assert PAGE.strip().startswith(INTRODUCTION), "the introduction is another"


if __name__ == "__main__":
    head, _, rest = PATH.read_text().partition(BEGIN)
    text = page([row_of(name) for name in CAUSAL + IMAGE_TEXT])
    PATH.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
