"""Check that the files of a release agree with its tag, or print what the release workflow needs from them.

python scripts/release.py v0.1.0                     checks; GITHUB_REPOSITORY, if set, must be the project's URL
python scripts/release.py v0.1.0 --notes             prints the section of CHANGELOG.md
python scripts/release.py v0.1.0 --readme            prints README.md with absolute links, for PyPI
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version(root: Path) -> str:
    return _one(r'^__version__ = "(.+)"$', root / "liger_chunked" / "__init__.py")


def repository(root: Path) -> str:
    """Return the project's URL. It is written in pyproject.toml; the site and CITATION.cff have the same."""
    return _one(r'^Repository = "(.+)"$', root / "pyproject.toml")


def notes(root: Path, version: str) -> tuple[str, str]:
    """Return the date of a release and its section of the changelog, or two empty strings if it has none."""
    sections = re.split(r"^## (.+)\n", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        found = re.fullmatch(re.escape(version) + r" \((\d{4}-\d\d-\d\d)\)", title)
        if found:
            return found[1], text.strip()
    return "", ""


def problems(root: Path, tag: str, published_from: str | None = None) -> list[str]:
    """Return what keeps a tag from being released.

    Args:
        root: the checkout.
        tag: "v" and the version.
        published_from: the URL of the repository that publishes.
    """
    citation, expected = root / "CITATION.cff", version(root)
    date, text = notes(root, expected)
    found = {
        f"the tag is {tag}, __version__ is {expected}": tag == f"v{expected}",
        f"CHANGELOG.md has no section '## {expected} (YYYY-MM-DD)' with text": bool(text),
        f"CITATION.cff does not have version {expected}": _one(r"^version: (.+)$", citation) == expected,
        f"CITATION.cff does not have date-released {date!r}": _one(r"^date-released: (.+)$", citation) == date,
        "CITATION.cff names another repository-code": _one(r"^repository-code: (.+)$", citation) == repository(root),
        f"pyproject.toml's Repository is {repository(root)}, this is {published_from}": (
            published_from is None or published_from == repository(root)
        ),
    }
    return [problem for problem, is_right in found.items() if not is_right]


def absolute_links(text: str, url: str, tag: str) -> str:
    """Make the relative links and images of README.md absolute.

    >>> absolute_links('[a](docs/a.md#b) [c](https://c) <img src="docs/d.svg">', "https://github.com/o/r", "v1")
    '[a](https://github.com/o/r/blob/v1/docs/a.md#b) [c](https://c) <img src="https://github.com/o/r/raw/v1/docs/d.svg">'
    """
    text = re.sub(r"(?<=\]\()(?![a-z]+:|#)(?=[^)\s])", f"{url}/blob/{tag}/", text)
    return re.sub(r'(?<=(?:src|set)=")(?![a-z]+:)', f"{url}/raw/{tag}/", text)


def _one(pattern: str, path: Path) -> str:
    """Return what a pattern captures in a file, or an empty string."""
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return found[1].strip('"') if found else ""


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("tag")
    shown = parse.add_mutually_exclusive_group()
    shown.add_argument("--notes", action="store_true")
    shown.add_argument("--readme", action="store_true")
    args = parse.parse_args()
    if args.notes:
        print(notes(ROOT, args.tag.removeprefix("v"))[1])
    elif args.readme:
        print(absolute_links((ROOT / "README.md").read_text(), repository(ROOT), args.tag), end="")
    else:
        name = os.environ.get("GITHUB_REPOSITORY")
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        if found := problems(ROOT, args.tag, f"{server}/{name}" if name else None):
            raise SystemExit("\n".join(found))
        print(f"{args.tag}: the files agree")


if __name__ == "__main__":
    main()
