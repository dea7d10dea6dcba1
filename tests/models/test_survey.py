"""`docs/supported-models.md` against fresh rows, for the transformers that it names; `liger-chunked models`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from sampling import sampled

from liger_chunked import cli
from liger_chunked.integrations.transformers import survey

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "supported-models.md").read_text()
ROWS = {m[1]: m[0] for m in re.finditer(r"^\| `(\w+)` \|.*", PAGE, re.MULTILINE)}
VERSION = re.search(r"classes of transformers ([\d.]+):", PAGE)[1]

pytestmark = pytest.mark.ordinary_memory
of_the_page = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the page is that of transformers {VERSION}"
)


def without_rounding(row: str) -> str:
    return re.sub(r"\d+\.\d+(e[+-]\d+)?", "number", row)


@of_the_page
@pytest.mark.parametrize("name", sampled(ROWS, parts=64))
def test_row_of_the_page(name):
    if "requires the timm library" in ROWS[name]:
        pytest.skip("depends on what is installed")
    assert without_rounding(survey.survey(name).markdown) == without_rounding(ROWS[name])


@of_the_page
def test_page_is_complete():
    assert list(ROWS) == survey.class_names()
    heads = [re.split(r" \| |:| \|", row.split(" | ", 2)[2])[0] for row in ROWS.values()]
    counts = f"{len(ROWS)} classes of transformers {VERSION}: {heads.count('fused')} fused heads"
    assert f"{counts}, {heads.count('not built')} not built." in PAGE
    assert f"[{heads.count('fused')} of the {len(ROWS)} causal" in (ROOT / "README.md").read_text()
    assert PAGE.startswith(survey.page([]).partition("0 classes")[0]), "the introduction is another"


def test_models(capsys):
    torch.manual_seed(3)
    state, verbosity = torch.get_rng_state(), transformers.logging.get_verbosity()
    assert cli.main(["models", "llamaforcausal*", "BertLMHeadModel", "MusicgenForCausalLM"]) == 0
    printed = capsys.readouterr()
    bert, llama, musicgen, summary = printed.out.splitlines()
    assert re.fullmatch(r"BertLMHeadModel +fused +layer_norm", bert)
    assert re.fullmatch(r"MusicgenForCausalLM +logits +layer_norm +lm_head is computed by .*ModuleList: .*", musicgen)
    assert re.fullmatch(r"LlamaForCausalLM +fused +rms_norm, swiglu, rope", llama)
    assert (
        summary == f"3 classes of transformers {transformers.__version__}: 2 fused heads, 0 not built."
        and printed.err == ""
    )
    assert torch.equal(torch.get_rng_state(), state) and transformers.logging.get_verbosity() == verbosity


@of_the_page
def test_models_in_markdown(capsys):
    assert cli.main(["models", "--markdown", "Llama4*", "LlamaForCausalLM"]) == 0
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `(\w+)` \|.*", capsys.readouterr().out, re.MULTILINE)}
    assert rows == {name: ROWS[name] for name in ROWS if re.match("Llama4|LlamaForCausal", name)} and len(rows) == 3


def test_a_class_that_cannot_be_built_has_a_row(monkeypatch):
    def fail(name):
        raise OSError("a | b. More\nis not shown")

    monkeypatch.setattr(survey, "small_model", fail)
    row = survey.survey("LlamaForCausalLM")
    assert row == ("LlamaForCausalLM", "not built", (), "OSError: a | b")
    assert row.markdown == r"| `LlamaForCausalLM` |  | not built: OSError: a \| b |"


def test_patterns_that_match_nothing(capsys, monkeypatch):
    for unknown, close in (("Lama", "LlamaForCausalLM"), ("zzz", r"zzz\*")):
        assert cli.main(["models", "Llama*", unknown]) == 2
        assert re.search(f"'{unknown}' matches no causal .*, such as .*{close}", capsys.readouterr().err)
    monkeypatch.setattr(cli.app, "find_spec", lambda name: None)
    assert cli.main(["models"]) == 2
    assert "pip install 'liger_chunked[transformers]'" in capsys.readouterr().err
