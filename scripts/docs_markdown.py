"""What the site makes of Markdown: figures for both themes, links to papers, docstrings without examples."""

from __future__ import annotations

import re

FIGURE = re.compile(r"!\[([^]]*)\]\(([^)#\s]+)\.svg\)")
BOTH = r'<figure class="drawn" markdown="span">![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)</figure>'
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
# A paper's number, alone or with what names it; not in a link.
ARXIV = re.compile(r"(?:(?<!\]\()(?<!<)https://arxiv\.org/abs/|\barXiv:? ?|(?<![\w./[]))(\d{4}\.\d{5})\b")
# What every constructor says of the options of all losses; the reference says it once.
OPTIONS = re.compile(r"\*\*options: fields of `LogitOptions`:.*?(?=\n\n|\n\s*\w+(?:, \w+)*: |\Z)", re.DOTALL)
ALL_LOSSES = "**options: fields of `LogitOptions`, see [all losses](losses.md#what-all-losses-share)."
# What every call says of its arguments for several ranks and packed sequences; the page of all losses says it once.
OF_ALL_CALLS = re.compile(r"^( +)(?:vocab_shard|cu_seqlens|sequence_group): .*\n(?:\1 +.*\n)*", re.MULTILINE)
TABLE = re.compile(r"^( *)\|.*\|$\n?(?:^ *\|.*\|$\n?)*", re.MULTILINE)
LINK = r"[\1](https://arxiv.org/abs/\1)"
PAGE = re.compile(r"`?docs/((?:[\w-]+/)*([\w-]+)\.md(?:#[\w-]+)?)`?")


def page_markdown(text: str) -> str:
    """Return a page with both versions of its figures, and with links to papers. Code stays as it is.

    >>> page_markdown("| `2305.18290` | 2305.18290 |")
    '| `2305.18290` | [2305.18290](https://arxiv.org/abs/2305.18290) |'
    """
    parts = CODE.split(text)
    parts[::2] = [ARXIV.sub(LINK, FIGURE.sub(BOTH, part)) for part in parts[::2]]
    return "".join(parts)


def docstring_markdown(docstring: str, *, tables: bool = True, of_all_calls: bool = True) -> str:
    """Return a docstring without its examples, which guides have, and whose papers and pages are links.

    Without `tables`, the result has none, because the page has them above. Without `of_all_calls`, it has no argument
    that every call of a loss has.

    The links to pages are for reference pages, which are in a folder of `docs/`; mkdocs checks them.
    """
    docstring = OPTIONS.sub(ALL_LOSSES, docstring)
    if not of_all_calls:
        docstring = OF_ALL_CALLS.sub("", docstring)
    if not tables:
        docstring = TABLE.sub(r"\1(see the table above)\n", docstring)
    paragraphs = (part for part in docstring.split("\n\n") if not part.lstrip().startswith(">>>"))
    link = LINK.replace("[", "[arXiv ", 1)
    return "\n\n".join(PAGE.sub(r"[\2](../\1)", ARXIV.sub(link, part)) for part in paragraphs)
