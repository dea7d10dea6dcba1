"""The recipes of `docs/memory.md` are what `estimate_step` gives: each length fits, and the next one does not."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from liger_chunked import estimate_step
from liger_chunked.types import budget_bytes
from scripts import recipes

STEP = 1024  # of `longest_sequence`
IN_SUITE = recipes.Recipe("24 GB", "Llama-3-8B", "LoRA")


def test_the_page_has_every_row():
    found = recipes.cells_of(recipes.PAGE.read_text())
    assert list(found) == recipes.RECIPES
    assert all(len(cells) == len(recipes.PEAKS) + len(recipes.LONGEST) for cells in found.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r == IN_SUITE else pytest.mark.exhaustive) for r in recipes.RECIPES],
    ids=lambda recipe: "-".join([recipe.card, recipe.model, recipe.training]),
)
def test_a_row(recipe):
    peaks, longest = recipe.peaks(), recipes.cells_of(recipes.PAGE.read_text())[recipe]
    assert longest[: len(peaks)] == peaks
    free = budget_bytes(recipe.free)
    assert free is not None
    for column, cell in zip(recipes.LONGEST.values(), longest[len(peaks) :], strict=True):
        n = int(cell.replace(",", ""))
        settings = recipe.settings(column)
        assert n and estimate_step(**settings, shape=(1, n)).peak <= free
        assert free < estimate_step(**settings, shape=(1, n + STEP)).peak
