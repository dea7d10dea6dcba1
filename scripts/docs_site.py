"""Hooks of mkdocs: the repository's address, links to papers, and dark figures.

Every `docs/*.svg` gets a dark version when the site is built, and pages show the one that fits the theme. On GitHub
they show the light one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs_markdown import page_markdown  # noqa: E402  mkdocs has this folder on its path
from release import repository  # noqa: E402

from benchmarks.drawing.style import dark  # noqa: E402


def on_config(config: Any) -> Any:
    """Link to the repository. With `repo_url`, each reader's browser would ask GitHub for its stars."""
    address = repository(ROOT)
    config.nav.append({"Source": address})
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address, "name": "Source"}]
    return config


def on_files(files: Files, config: Any) -> Files:
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
    return page_markdown(markdown)
