"""The package runs without each private name of another library: slower, or with an error that says why."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import private_names
import pytest
from fresh_process import FreshProcesses
from private_names import PRIVATE, SCENARIOS

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
SLOW = {"patched", "dpo_trainer", "kto_trainer", "stock_trainer", "grpo_trainer", "sft_trainer"}

RUN = """
import json, os, sys, warnings
scenario, names = sys.argv[1], json.loads(sys.argv[2])
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path += ["tests", "tests/trl"]
from private_names import Hidden
hidden = Hidden(names)
sys.meta_path.insert(0, hidden)
if "/" in scenario:
    import pytest
    assert pytest.main(["-q", "-p", "no:cacheprovider", f"tests/{scenario}"]) == 0
else:
    import private_scenarios
    getattr(private_scenarios, scenario)()
assert hidden.replaced == set(names), f"not imported: {set(names) - hidden.replaced}"
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return private_names.found()


@pytest.mark.slow
def test_every_private_name_is_listed(found: dict[str, list[str]]) -> None:
    listed = Counter(name for row in PRIVATE for name in row)
    assert max(listed.values()) == 1
    tried = {name for names in SCENARIOS.values() for name in names.split()}
    assert tried == {row[-1] for row in PRIVATE}, "SCENARIOS of tests/private_names.py names each row by its last name"
    unlisted = {name: places for name, places in found.items() if name not in listed}
    assert not unlisted, "list these in tests/private_names.md, each with what happens without it"
    assert found.keys() >= listed.keys(), "these are no longer used: take them out of tests/private_names.md"


def cases() -> list[object]:
    """Return each quick scenario without the last name of each of its rows; all, and without each one name, are
    exhaustive."""
    together: dict[tuple[str, bool], list[str]] = defaultdict(list)
    alone = []
    rows = {row[-1]: row for row in PRIVATE}
    for scenario, last_names in SCENARIOS.items():
        for name in last_names.split():
            together[scenario, name in GATES].append(name)
            alone += [(scenario, [each]) for each in rows[name]]
    default = [(scenario, names) for (scenario, _), names in together.items()]

    def case(scenario: str, names: list[str], is_exhaustive: bool) -> object:
        marks = [pytest.mark.exhaustive] if is_exhaustive else []
        return pytest.param(scenario, names, marks=marks, id=f"{Path(scenario).name}-{'+'.join(names)}"[:80])

    rest = [case(*each, True) for each in alone if each not in default]
    return [case(scenario, names, scenario in SLOW) for scenario, names in default] + rest


@pytest.mark.few(3)
@pytest.mark.parametrize(("scenario", "names"), cases())
def test_without(scenario: str, names: list[str], found: dict[str, list[str]], fresh_process: FreshProcesses) -> None:
    """Run what uses private names in a new process, in which the package cannot find them."""
    files = {name: [place.partition(":")[0] for place in found[name]] for name in names}
    fresh_process.run(RUN, scenario, json.dumps(files))
