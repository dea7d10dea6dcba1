"""Hooks of mkdocs: the repository's address, and dark figures.

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

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r"!\[([^]]*)\]\(([^)#\s]+)\.svg\)")


def _module(path: Path) -> ModuleType:
    """Import a file of the repository, which mkdocs does not have on its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_config(config: Any) -> Any:
    config.repo_url = _module(ROOT / "scripts" / "release.py").repository(ROOT)
    config.repo_name = config.site_name
    return config


def on_files(files: Files, config: Any) -> Files:
    dark = _module(ROOT / "benchmarks" / "drawing" / "style.py").dark
    for file in list(files):
        if file.src_uri.endswith(".svg") and not file.src_uri.endswith("-dark.svg"):
            uri = file.src_uri.removesuffix(".svg") + "-dark.svg"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=dark(file.content_string)))
    return files


def on_page_markdown(markdown: str, **others: Any) -> str:
    return FIGURE.sub(
        r'<figure class="drawn" markdown="span">![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)</figure>', markdown
    )
