"""The package runs without each private name of another library: slower, or with an error that says why."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import private_names
import pytest
from fresh_process import FreshProcesses
from private_names import PRIVATE

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"

pytest.importorskip("trl")
pytest.importorskip("peft")

# Without one of these, a scenario touches few of the others: they have a process of their own.
GATES = {
    "_functorch",
    "_version",
    "_buffers",
    "_backward_pre_hooks",
    "_global_forward_hooks",
    "driver",
    "_compute_loss",
}
# Train models, for seconds.
SLOW = {"patched", "dpo_trainer", "kto_trainer", "online_trainer", "gold_trainer", "grpo_trainer", "sft_trainer"}

RUN = """
import json, os, sys, warnings
scenario, names = sys.argv[1], json.loads(sys.argv[2])
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.append("tests")
from private_names import Hidden
hidden = Hidden(names)
sys.meta_path.insert(0, hidden)
import private_scenarios
getattr(private_scenarios, scenario)()
assert hidden.replaced == set(names), f"not imported: {set(names) - hidden.replaced}"
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return private_names.found()


def test_every_private_name_is_listed(found: dict[str, list[str]]) -> None:
    listed = Counter(name for entry in PRIVATE for name in entry.names.split())
    assert max(listed.values()) == 1
    unlisted = {name: places for name, places in found.items() if name not in listed}
    assert not unlisted, "list these in tests/private_names.py, each with what happens without it"
    assert found.keys() >= listed.keys(), "these are no longer used: take them out of tests/private_names.py"


def cases() -> list[object]:
    """Return each quick scenario without the last name of each of its entries; all, and without each one name, are
    exhaustive."""
    together: dict[tuple[str, bool], list[str]] = defaultdict(list)
    alone = []
    for entry in PRIVATE:
        names = entry.names.split()
        for scenario in entry.scenarios.split():
            together[scenario, names[-1] in GATES].append(names[-1])
            alone += [(scenario, [name]) for name in names]
    default = [(scenario, names) for (scenario, _), names in together.items()]
    made = [
        pytest.param(
            *case,
            marks=[pytest.mark.exhaustive] if case[0] in SLOW else [],
            id=f"{case[0]}-{'+'.join(case[1])}"[:80],
        )
        for case in default
    ]
    rest = [case for case in alone if case not in default]
    return made + [pytest.param(*case, marks=pytest.mark.exhaustive, id=f"{case[0]}-{case[1][0]}") for case in rest]


@pytest.mark.parametrize(("scenario", "names"), cases())
def test_without(scenario: str, names: list[str], found: dict[str, list[str]], fresh_process: FreshProcesses) -> None:
    """Run what uses private names in a new process, in which the package cannot find them."""
    files = {name: [place.partition(":")[0] for place in found[name]] for name in names}
    fresh_process.run(RUN, scenario, json.dumps(files))


def test_the_table_of_the_documentation() -> None:
    assert private_names.table() in RELIABILITY.read_text(), "replace it by the output of tests/private_names.py"
