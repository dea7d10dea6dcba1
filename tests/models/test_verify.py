"""Layers and rotary functions are recognised by their code; here each is compared with the kernel, in every class.

`verify.py` runs a small copy of a layer with random weights, forward and backward, in evaluation and in training mode.
Layers with the same code, configuration and kernel are compared once.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers
import verify
from test_sweep import EARLIER, NOT_BUILT
from tiny_models import CAUSAL, IMAGE_TEXT, small_model
from transformers import PreTrainedModel

from liger_chunked import versions
from liger_chunked.integrations.transformers import patch
from liger_chunked.integrations.transformers.found import found_in
from liger_chunked.integrations.transformers.overrides import rope_of

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore")]

_COMPARED: set[Any] = set()


def compare(model: PreTrainedModel) -> None:
    found = found_in(model)
    for _, module, binding in found.layers:
        cls = type(module)
        plain = {n: x for n, x in vars(module).items() if isinstance(x, (bool, int, float, str, tuple))}
        parts = {**module._modules, **module._parameters}
        key = cls, binding, repr(plain), repr([(n, type(x), getattr(x, "shape", 0)) for n, x in parts.items()])
        if key not in _COMPARED:
            verify.check_layer(binding, module, cls)
            _COMPARED.add(key)
    rotary = [module for module in model.modules() if "Rotary" in type(module).__name__]
    for module, function in found.ropes:
        stock = getattr(importlib.import_module(module), function)
        assert verify.rotary_difference(rope_of(stock), stock, rotary) is None, (module, function)


@pytest.mark.parametrize("name", [name for name in CAUSAL + IMAGE_TEXT if name not in NOT_BUILT])
def test_layers(name):
    try:
        model = small_model(name)
    except Exception as error:
        if not EARLIER:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build it: {error}")
    compare(model)


def test_a_transformers_that_was_not_compared_is_named(monkeypatch, caplog):
    """The table names stock classes of the installed release, which may compute something else in a later one."""
    assert transformers.__version__.startswith(versions.NEWEST_COMPARED) or EARLIER
    model = small_model("LlamaForCausalLM")
    caplog.set_level(logging.WARNING, logger="liger_chunked")
    for version, warned in ((versions.NEWEST_COMPARED + ".9", False), ("99.0.0", True)):
        patch._warn_of_newer.cache_clear()
        monkeypatch.setattr(patch.transformers, "__version__", version)
        caplog.clear()
        patch.apply_liger_kernel(model)
        assert any("check_model(model) once" in record.getMessage() for record in caplog.records) == warned
    patch._warn_of_newer.cache_clear()
