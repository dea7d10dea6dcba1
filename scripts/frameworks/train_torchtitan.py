# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.14.1", "torchtitan==0.3.0"]
# ///
"""torchtitan 0.3.0: training steps of its Trainer, with `ChunkedLossWrapper` and with the loss of this library.

Environment: torchtitan with all its dependencies, and torch 2.14.1 (torchtitan pins none). No package is a stub.
torchtitan takes "cuda" where it finds no accelerator: this script names "cpu" instead, with a device module that has no
memory statistics. Its flex attention has no backward on a CPU: the model's attention is torchtitan's
`ScaledDotProductAttention`. Tokens are random, because its tokenizer and data set are not in the package.

Runs the debug model of Llama 3, with two layers, in `Trainer.train`: on one rank (steps 0 to 7); on two gloo ranks with
tensor parallelism and sequence parallelism (`spmd_types`, steps 8 to 15). torchtitan's FSDP does not run with gloo
("Cannot use ReduceOp.PREMUL_SUM with Gloo"). Compares the loss of each step from equal weights, and exits with 1 if one
differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
import torchtitan.tools.utils as titan
from common import compare, count_calls

STEPS, VOCAB = 8, 2048
PARALLELISM: list[dict[str, int]] = [{}, {"tensor_parallel_degree": 2}]


def on_cpu() -> None:
    """Name the CPU as torchtitan's device. To be called before other modules of torchtitan are imported."""
    module: Any = ModuleType("cpu_device")
    vars(module).update(vars(torch.cpu))
    module.get_device_name = lambda device=None: "CPU"
    module.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    module.reset_peak_memory_stats = module.empty_cache = lambda: None
    module.memory_stats = lambda device=None: {}
    module.set_device = lambda device: None
    module.current_device = lambda: 0
    titan.device_type, titan.device_module = "cpu", module
    titan.get_local_device = lambda: torch.device("cpu")


def configuration(ours: bool, parallelism: dict[str, int], folder: str) -> Any:
    """Return the debug configuration of torchtitan, made smaller."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from liger_chunked.integrations.frameworks.torchtitan import FusedLinearCrossEntropyLoss

    class Tokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return VOCAB

    class Random(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.shape = (local_batch_size, seq_len + 1)
            self.generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                ids = torch.randint(VOCAB // 8, self.shape, generator=self.generator)
                labels = ids[:, 1:].clone()
                labels[:, ::5] = -100  # the masked tokens of a prompt
                yield {"input": ids[:, :-1]}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    config = llama3_debugmodel()
    config.dump_folder = folder
    config.tokenizer, config.dataloader = Tokenizer.Config(), Random.Config()
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if ours:
        config.loss = FusedLinearCrossEntropyLoss.Config(global_vocab_size=VOCAB)
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, 64, STEPS
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    config.lr_scheduler.warmup_steps = 0
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 0
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def worker(rank: int, ranks: int, ours: bool, parallelism: dict[str, int], folder: str) -> None:
    """Train on one rank. Rank 0 saves the losses and the calls of our loss."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    on_cpu()
    from torchtitan.trainer import Trainer

    from liger_chunked.integrations.frameworks.torchtitan import FusedLinearCrossEntropyLoss

    torch.set_num_threads(1)
    calls = count_calls(FusedLinearCrossEntropyLoss, "__call__")
    trainer = Trainer(configuration(ours, parallelism, folder))
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    trainer.metrics_processor.should_log = lambda step: True
    trainer.train()
    if rank == 0:
        torch.save((losses, dict(calls)), f"{folder}/losses")
    torch.distributed.destroy_process_group()


def main() -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29617"}
    results: dict[bool, list[float]] = {False: [], True: []}
    calls: Counter[str] = Counter()
    for parallelism in PARALLELISM:
        ranks = 2 if parallelism else 1
        for ours in (False, True):
            print(parallelism, "ours" if ours else "stock", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(worker, (ranks, ours, parallelism, folder), ranks)
                losses, counted = torch.load(f"{folder}/losses")
            results[ours] += losses
            calls.update(counted)
    compare("torchtitan", results[False], results[True], 1e-5, calls)


if __name__ == "__main__":
    main()
