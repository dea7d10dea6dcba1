"""What the package exports, and how it shifts labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import liger_chunked
from liger_chunked import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, shifted


@pytest.mark.slow
def test_star_import_without_transformers(fresh_process):
    code = """
import sys
sys.modules["transformers"] = None
from liger_chunked import *
assert LigerFusedLinearDPOLoss and linear_token_stats and "apply_liger_kernel" not in globals()
"""
    fresh_process.run(code)


# On a free machine it takes a few milliseconds.
MOST_SECONDS = 0.25
IMPORT = """
import sys, time
# Not every environment keeps compiled modules.
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
start = time.process_time()
import liger_chunked
print(time.process_time() - start)
loaded = {"triton", "transformers", "trl", "torch._dynamo", "torch._inductor"} & sys.modules.keys()
assert not loaded, f"import liger_chunked imported {loaded}"
"""


def test_an_import_is_quick_and_loads_neither_compilers_nor_frameworks(fresh_process, tmp_path):
    """If it fails, `python -X importtime -c "import torch, liger_chunked"` shows what takes the time."""
    seconds = [float(fresh_process.run(IMPORT, str(tmp_path))) for _ in range(6)]
    assert min(seconds) <= MOST_SECONDS, seconds


def test_every_name_is_there():
    pytest.importorskip("transformers")
    assert len(set(liger_chunked.__all__)) == len(liger_chunked.__all__)
    for name in liger_chunked.__all__:
        assert getattr(liger_chunked, name) is not None


def test_shifted_is_what_a_causal_model_predicts():
    hidden, labels = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(11, (2, 5))
    labels[0, 3] = -100
    weight = torch.randn(11, 4, dtype=torch.float64)
    input, target = shifted(hidden, labels)
    assert input.data_ptr() == hidden.data_ptr() and target.shape == (2, 4)
    logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, labels[:, 1:].flatten())
    assert torch.isclose(LigerFusedLinearCrossEntropyLoss()(weight, input, target), expected)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("hidden", "labels", "error", "message"),
    [
        (torch.zeros(2, 5, 4), torch.zeros(2, 4, dtype=torch.int64), ValueError, "shifted already go with hidden"),
        (torch.zeros(2, 5, 4), torch.zeros(2, 3, dtype=torch.int64), ValueError, r"labels must be \(2, 5\)"),
        (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64), ValueError, r"hidden must be \(B, T, H\)"),
        (torch.zeros(2, 5, 4), torch.zeros(2, 5), TypeError, "labels must be a tensor of token ids"),
        (torch.zeros(2, 5, 4, dtype=torch.int64), torch.zeros(2, 5), TypeError, "hidden must be a floating-point"),
        (None, None, TypeError, "hidden must be a floating-point"),
    ],
)
def test_shifted_refuses(hidden, labels, error, message):
    with pytest.raises(error, match=message):
        shifted(hidden, labels)


@pytest.mark.few(5)
@pytest.mark.parametrize("loss", [LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearDPOLoss()], ids=["ce", "dpo"])
@pytest.mark.parametrize(("length", "suggests"), [(6, True), (4, True), (3, False), (7, False)])
def test_a_miss_by_one_position_suggests_shifted(loss, length, suggests):
    weight, input, target = torch.zeros(11, 4), torch.zeros(2, 5, 4), torch.zeros(2, length, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"target must be \(2, 5\)") as refused:
        loss(weight, input, target)
    assert ("input, target = shifted(hidden, labels)" in str(refused.value)) == suggests
