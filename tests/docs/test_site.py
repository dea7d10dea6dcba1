"""What the site makes of pages and docstrings, and the dark versions of figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.drawing.style import dark

ROOT = Path(__file__).parents[2]


@pytest.mark.few(4)
@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_every_figure_has_a_dark_version(path):
    if path.name.endswith("-dark.svg"):
        assert path.read_text() == dark(path.with_name(path.name.replace("-dark", "")).read_text())
    else:
        text = dark(path.read_text())
        assert "#ffffff" not in text and "text {fill: #" in text


def test_the_reference_has_every_trainer():
    pytest.importorskip("trl")
    from liger_chunked.integrations import trl

    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert [
        name for name in trl.__all__ if name.startswith("Liger") and f"::: {trl.__name__}.{name}\n" not in page
    ] == []
