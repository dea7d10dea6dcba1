"""The files that a release is made of agree, and `scripts/release.py` says where they do not."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("CHANGELOG.md", "CITATION.cff", "pyproject.toml", "liger_chunked/__init__.py")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_steps_of_a_release(release, tree):
    """An unreleased tree lacks a date in two files, and nothing else."""
    version = release.version(tree)
    unreleased = release.problems(tree, f"v{version}")
    assert [re.sub(r" '.*", "", problem) for problem in unreleased] == ["CHANGELOG.md has no section"]
    edit(tree / "CHANGELOG.md", "## Unreleased", f"## Unreleased\n\n## {version} (2027-01-02)")
    assert release.problems(tree, f"v{version}") == ["CITATION.cff does not have date-released '2027-01-02'"]
    with (tree / "CITATION.cff").open("a") as citation:
        citation.write("date-released: 2027-01-02\n")
    assert release.problems(tree, f"v{version}", release.repository(tree)) == []
    assert release.notes(tree, version)[1].startswith("The first release.")


def test_readme_for_pypi_has_no_relative_link(release):
    text = release.absolute_links((ROOT / "README.md").read_text(), "https://github.com/o/r", "v1")
    assert "https://github.com/o/r/raw/v1/docs/headline.svg" in text
    links = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text)
    assert links and all(re.match(r"https?://|#", a or b) for a, b in links)
