"""Draw the figures of docs/, and write its tables, from the kept runs.

python -m benchmarks.figures                                draws docs/*.svg
python -m benchmarks.figures --table docs/benchmarks.md     also writes between that page's markers
                             --convergence docs/benchmarks.md   the same for the loss curves, between others
                             --headline README.md docs/index.md  what a user gains, with its figure
                             --pages                    the tables and numbers of the other pages, see `pages.py`
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchmarks import curves, headline, pages
from benchmarks.drawing.convergence import draw_convergence
from benchmarks.drawing.floor import draw_floor
from benchmarks.drawing.headline import draw_headlines
from benchmarks.drawing.scaling import draw_scaling
from benchmarks.drawing.steps import draw_steps
from benchmarks.drawing.style import STYLE, dark
from benchmarks.harness import RESULTS
from benchmarks.report import (
    FAMILIES,
    SHARED_STEPS,
    STEPS,
    kernels_markdown,
    markdown,
    newest,
    newest_file,
    steps_markdown,
)

DOCS = Path(__file__).parent.parent / "docs"
FLOOR, SCALING, CONVERGENCE = "benchmarks-floor.svg", "benchmarks-scaling.svg", "convergence.svg"
HEADLINE, HEADLINE_DARK = "headline.svg", "headline-dark.svg"
ALL_STEPS = STEPS | SHARED_STEPS
STEP_FIGURES = {family: f"benchmarks-{family.replace('_', '-')}.svg" for family in ALL_STEPS}
ALTERNATIVES = {
    FLOOR: "Time of every task over the time of its matrix products",
    SCALING: "Time and memory of the cross entropy against tokens and vocabulary",
    **{STEP_FIGURES[family]: f"{title}: tokens a second, and memory" for family, title in ALL_STEPS.items()},
    CONVERGENCE: "Loss of fused and of stock training, step by step, and their difference, for four families",
}
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
CONVERGENCE_BEGIN, CONVERGENCE_END = "<!-- convergence: begin -->", "<!-- convergence: end -->"
HEADLINE_BEGIN, HEADLINE_END = "<!-- headline: begin -->", "<!-- headline: end -->"


STEP_NOTE = (
    "A step, here and in the tables of TRL's trainers, is forward, backward and AdamW. Columns with × are ratios of "
    "speed, above 1 where this library is faster. *Loss, gradient apart*: relative differences to stock of the loss "
    "and of the gradient's norm in the first step."
)


KERNEL_NOTE = (
    "Forward and backward. Times are divided by the time of a copy that moves as many bytes as the operation must. All "
    "rows run as CUDA graphs, except those with *launches included*."
)


def write_between(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the text between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    page = path.read_text()
    head, has_begin, rest = page.partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{path}: expected the markers {begin} and {end}")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def drawn_as_markdown(paths: Sequence[Path], page_folder: Path) -> list[str]:
    return [f"![{ALTERNATIVES[path.name]}]({os.path.relpath(path, page_folder)})" for path in paths]


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    parse.add_argument("--out", type=Path, default=DOCS, help="folder for the figures")
    parse.add_argument("--table", type=Path, help="page to write table and figures into, between its markers")
    parse.add_argument("--convergence", type=Path, help="the same for the loss curves")
    parse.add_argument("--headline", type=Path, nargs="+", default=[], help="pages to write what a user gains into")
    parse.add_argument("--pages", action="store_true", help="write the tables and numbers of the other pages")
    args = parse.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {family: run for family in FAMILIES if (run := newest(args.results, family))}
    steps = {family: run for family in ALL_STEPS if (run := newest(args.results, family))}
    sweep = newest(args.results, "sweep")
    path = newest_file(args.results, "convergence")
    convergence = curves.load(path) if path else None
    shown = headline.steps(args.results) if headline.has_runs(args.results) else []
    figures = {}
    with matplotlib.rc_context(STYLE):
        if runs:
            figures[FLOOR] = draw_floor(runs)
        if sweep:
            figures[SCALING] = draw_scaling(sweep)
        for family, run in steps.items():
            figures[STEP_FIGURES[family]] = draw_steps(run, ALL_STEPS[family])
        if convergence:
            figures[CONVERGENCE] = draw_convergence(convergence)
        if shown:
            figures[HEADLINE] = draw_headlines(shown)
        for name, figure in figures.items():
            figure.savefig(args.out / name, facecolor="white", metadata={"Date": None})
            print(f"drew {args.out / name}")
    drawn = {name: args.out / name for name in figures}
    if HEADLINE in drawn:
        (args.out / HEADLINE_DARK).write_text(dark(drawn[HEADLINE].read_text()))
    if args.table:
        losses = [drawn[name] for name in (FLOOR, SCALING) if name in drawn]
        parts = [*drawn_as_markdown(losses, args.table.parent), *([markdown(runs)] if runs else [])]
        if kernels := newest(args.results, "base_kernels"):
            parts += ["## Base kernels", KERNEL_NOTE, kernels_markdown(kernels)]
        for family, run in steps.items():
            figure = drawn_as_markdown([drawn[STEP_FIGURES[family]]], args.table.parent)
            note = [STEP_NOTE] if family == next(iter(steps)) else []
            parts += [f"## {ALL_STEPS[family]}", *note, *figure, steps_markdown(run)]
        write_between(args.table, "\n\n".join(parts))
        print(f"wrote {args.table}")
    for page in args.headline if shown else []:
        write_between(page, headline.markdown(args.results), HEADLINE_BEGIN, HEADLINE_END)
        print(f"wrote {page}")
    if args.convergence and convergence:
        shown = drawn_as_markdown([drawn[CONVERGENCE]], args.convergence.parent)
        text = "\n\n".join([*shown, curves.markdown(convergence)])
        write_between(args.convergence, text, CONVERGENCE_BEGIN, CONVERGENCE_END)
        print(f"wrote {args.convergence}")
    for page, text in pages.written(DOCS.parent, args.results).items() if args.pages else ():
        page.write_text(text)
    return list(drawn.values())


if __name__ == "__main__":
    main()
