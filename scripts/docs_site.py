"""Hooks of mkdocs: the repository's address, links to papers, and dark figures.

Every `docs/*.svg` gets a dark version when the site is built, and pages show the one that fits the theme. On GitHub
they show the light one.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r"!\[([^]]*)\]\(([^)#\s]+)\.svg\)")
BOTH = r'<figure class="drawn" markdown="span">![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)</figure>'
ARXIV = re.compile(r"(?<![\w./[])(\d{4}\.\d{5})\b")  # a paper's number


def _module(path: Path) -> ModuleType:
    """Import a file of the repository, which mkdocs does not have on its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_config(config: Any) -> Any:
    """Link to the repository. With `repo_url`, each reader's browser would ask GitHub for its stars."""
    address = _module(ROOT / "scripts" / "release.py").repository(ROOT)
    config.nav.append({"Source": address})
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address, "name": "Source"}]
    return config


def on_files(files: Files, config: Any) -> Files:
    dark = _module(ROOT / "benchmarks" / "drawing" / "style.py").dark
    for file in list(files):
        if file.src_uri.endswith(".svg") and not file.src_uri.endswith("-dark.svg"):
            uri = file.src_uri.removesuffix(".svg") + "-dark.svg"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=dark(file.content_string)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, **others: Any) -> str:
    uri = page.file.src_uri
    page.meta["hide"] = config.extra["hide"].get(uri, [])
    page.meta["search"] = {"boost": config.extra["boost"].get(uri, 1)}
    code = re.split(r"(^ *```.*?^ *```|`[^`\n]+`)", markdown, flags=re.MULTILINE | re.DOTALL)
    code[::2] = [ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", FIGURE.sub(BOTH, text)) for text in code[::2]]
    return "".join(code)
