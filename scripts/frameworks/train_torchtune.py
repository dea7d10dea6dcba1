# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "torch==2.11.0", "torchvision==0.26.0", "torchao==0.18.0", "torchdata==0.11.0", "datasets", "huggingface_hub",
#     "safetensors", "kagglehub", "sentencepiece", "tiktoken", "blobfile", "tokenizers", "numpy", "tqdm", "omegaconf",
#     "psutil", "pillow",
# ]
#
# [tool.frameworks]
# no-deps = ["torchtune @ https://github.com/pytorch/torchtune/archive/bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1.tar.gz"]
# ///
"""torchtune, commit bd2a0fc: its recipe for full fine-tuning, with `LinearCrossEntropyLoss` and with our loss.

Environment: torchtune with its dependencies, torch 2.11.0 and torchao 0.18.0, which it needs. The released torchtune
0.6.1 does not have the interface of losses on hidden states. No package is a stub. The tokenizer, the data set of
random tokens, the logger and the checkpointer, which keeps nothing, are components of this file.

Runs `FullFinetuneRecipeSingleDevice` on the CPU with a tiny Llama 3, two micro-batches per update. Compares the logged
loss of each step (0 to 7 an own head, 8 to 15 tied embeddings), and exits with 1 if one differs by more than 1e-5. All
is float32.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtune
from common import compare, count_calls
from omegaconf import OmegaConf
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2

STEPS, VOCAB, LENGTH = 8, 512, 24
SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "max_seq_len": 64}
LOSSES: list[float] = []


def tokenizer() -> Any:
    return SimpleNamespace(pad_id=0)


def dataset(tokenizer: Any) -> list[dict[str, list[int]]]:
    """Return samples of random tokens with shifted labels. The first third of each has no loss, like a prompt."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(4 * STEPS):
        ids = torch.randint(1, VOCAB // 8, (LENGTH - i % 5,), generator=generator).tolist()
        samples.append({"tokens": ids, "labels": [-100] * 7 + ids[8:] + [-100]})
    return samples


class Logger:
    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, values: dict[str, Any], step: int) -> None:
        LOSSES.append(values["loss"])

    def close(self) -> None:
        pass


class Checkpointer:
    """Loads equal random weights, and saves nothing."""

    def __init__(self, tied: bool, **_: Any) -> None:
        self.tied = tied

    def load_checkpoint(self) -> dict[str, Any]:
        torch.manual_seed(0)
        build = llama3_2 if self.tied else llama3
        return {training.MODEL_KEY: build(vocab_size=VOCAB, **SIZES).state_dict()}

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        pass


def recipe_class() -> Any:
    """Return the recipe, whose folder cannot be imported as a package."""
    path = Path(torchtune.__file__).parents[1] / "recipes/full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeSingleDevice


def train(loss: str, tied: bool, folder: str) -> list[float]:
    here = "train_torchtune."
    model = "torchtune.models.llama3_2.llama3_2" if tied else "torchtune.models.llama3.llama3"
    config = OmegaConf.create(
        {
            "output_dir": folder,
            "device": "cpu",
            "dtype": "fp32",
            "seed": 0,
            "log_level": "ERROR",
            "epochs": 1,
            "max_steps_per_epoch": None,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "optimizer_in_bwd": False,
            "resume_from_checkpoint": False,
            "shuffle": False,
            "compile": False,
            "log_every_n_steps": 1,
            "model": {"_component_": model, "vocab_size": VOCAB, **SIZES},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3},
            "loss": {"_component_": loss},
            "tokenizer": {"_component_": here + "tokenizer"},
            "dataset": {"_component_": here + "dataset"},
            "metric_logger": {"_component_": here + "Logger"},
            "checkpointer": {"_component_": here + "Checkpointer", "tied": tied, "model_type": "LLAMA3"},
        }
    )
    LOSSES.clear()
    recipe = recipe_class()(config)
    recipe.setup(config)
    recipe.train()
    return list(LOSSES)


def main() -> None:
    from liger_chunked.integrations.frameworks.torchtune import FusedLinearCrossEntropyLoss

    calls = count_calls(FusedLinearCrossEntropyLoss, "forward")
    names = (
        "torchtune.modules.loss.LinearCrossEntropyLoss",
        "liger_chunked.integrations.frameworks.torchtune.FusedLinearCrossEntropyLoss",
    )
    with tempfile.TemporaryDirectory() as folder:
        stock, ours = ([x for tied in (False, True) for x in train(name, tied, folder)] for name in names)
    compare("torchtune", stock, ours, 1e-5, calls)


if __name__ == "__main__":
    sys.modules["train_torchtune"] = sys.modules["__main__"]  # because the configuration names components by module
    main()
