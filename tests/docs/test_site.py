"""What the site makes of pages and docstrings, and the dark versions of figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.drawing.style import dark

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def markdown() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_markdown", ROOT / "scripts" / "docs_markdown.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.few(4)
@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_every_figure_has_a_dark_version(path):
    if path.name.endswith("-dark.svg"):
        assert path.read_text() == dark(path.with_name(path.name.replace("-dark", "")).read_text())
    else:
        text = dark(path.read_text())
        assert "#ffffff" not in text and "text {fill: #" in text


def test_a_colour_without_a_dark_version():
    with pytest.raises(ValueError, match=r"no dark version of .*#123456"):
        dark('<svg><style></style><path style="fill: #123456"/></svg>')


def test_figures_and_papers_of_pages(markdown):
    page = "![A](a.svg) and 2305.18290, [DPO](https://arxiv.org/abs/2305.18290)\n\n```\n![A](a.svg) 2305.18290\n```\n"
    found = markdown.page_markdown(page)
    assert "![A](a.svg#only-light)![A](a-dark.svg#only-dark)" in found
    assert found.count("[2305.18290](https://arxiv.org/abs/2305.18290)") == 1
    assert found.endswith("\n\n```\n![A](a.svg) 2305.18290\n```\n")


def test_docstrings(markdown):
    doc = (
        "DPO (Rafailov 2023, https://arxiv.org/abs/2305.18290), see `docs/numerics.md`.\n\n"
        "Args:\n    beta: not 0.12345.\n\n>>> 1 + 1\n2\n\nMore."
    )
    assert markdown.docstring_markdown(doc) == (
        "DPO (Rafailov 2023, [arXiv 2305.18290](https://arxiv.org/abs/2305.18290)), see [numerics](../numerics.md).\n\n"
        "Args:\n    beta: not 0.12345.\n\nMore."
    )


def test_arguments_of_all_calls(markdown):
    doc = "Args:\n    kl: a number.\n    cu_seqlens: (n,), for\n        packed sequences.\n    delta: a number.\n"
    assert markdown.docstring_markdown(doc, of_all_calls=False) == "Args:\n    kl: a number.\n    delta: a number.\n"


def test_the_reference_has_every_trainer():
    pytest.importorskip("trl")
    from liger_chunked.integrations import trl

    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert [
        name for name in trl.__all__ if name.startswith("Liger") and f"::: {trl.__name__}.{name}\n" not in page
    ] == []
