"""Two processes: under DDP and tensor parallelism, the logs equal those of TRL's trainers; under FSDP, the gradients
equal those of whole models.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
import torch
import torch.distributed as dist
from datasets import disable_progress_bars
from fresh_process import FreshProcesses
from test_models_tensor_parallel import start
from test_trl_trainers import KINDS, PLAIN, assert_same, run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
)
from liger_chunked.integrations.trl import add_chunked_lm_head
from liger_chunked.integrations.trl.base import loss_step as preference_step
from liger_chunked.integrations.trl.distillation import distillation_step

WORLD = 2
# A replaced head, a trainer whose TRL version builds logits, gradients in forward; then two nested models.
CASES = {
    "each-way": [
        ("SFT", None),
        ("ORPO", None),
        ("DPO", LigerFusedLinearDPOLoss(beta=0.1)),
    ],
    "other-losses": [
        ("Distillation", None),
        ("KTO", LigerFusedLinearKTOLoss(beta=0.1)),
        ("ORPO", LigerFusedLinearORPOLoss(beta=0.1)),
        ("GRPO", LigerFusedLinearGRPOLoss(reduction="dapo")),
    ],
}
# TRL's ORPO includes prompts and padding in its mean logit. Its DPO counts the samples that fill up a last batch twice.
NOT_TRLS = {"ORPO": "logits/", "DPO": "eval_"}


def train(folder: Path, cases: str) -> None:
    for kind, loss in CASES[cases]:
        stock = run(folder, kind, ours=False, evaluate=True)
        ours = run(folder, kind, ours=True, evaluate=True, loss=loss)
        if loss is not None and kind in NOT_TRLS:
            for entry in (*stock, *ours):
                for name in [name for name in entry if NOT_TRLS[kind] in name and name != "eval_loss"]:
                    entry.pop(name)
        assert_same(ours, stock, common=loss is not None)
    # Both ranks log the same norms, so the optimizer saw the same gradients.
    norms = torch.tensor([entry["grad_norm"] for entry in ours if "grad_norm" in entry])
    gathered = [torch.empty_like(norms) for _ in range(WORLD)]
    dist.all_gather(gathered, norms)
    assert torch.equal(*gathered)


def models(sharded: bool) -> tuple[nn.Module, nn.Module]:
    """Return a policy (or student) and a teacher."""
    pair = tiny.model(), tiny.model("wide", seed=1)
    for model in pair:
        add_chunked_lm_head(model, logits_budget=2 * 4 * 300)
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
    return pair


def losses(model: nn.Module, teacher: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """Yield one loss for each way through a head."""
    inputs = {"input_ids": ids}
    yield model(**inputs, labels=ids, fused_lm_head=True).loss
    yield preference_step(model, LigerFusedLinearDPOLoss(logits_budget=2 * 4 * 300), inputs, ids).loss
    yield distillation_step(model, teacher, LigerFusedLinearJSDLoss(logits_budget=2 * 4 * 300), inputs, ids).loss


def shard(rank: int) -> None:
    samples = torch.randint(10, 300, (WORLD, 2, 9), generator=torch.Generator().manual_seed(0))
    whole, teacher = models(sharded=False)
    for ids in samples:
        for loss in losses(whole, teacher, ids):
            (loss / WORLD).backward()
    model, teacher = models(sharded=True)
    for loss in losses(model, teacher, samples[rank]):
        loss.backward()
    for (name, p), exact in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), exact.grad, rtol=2e-4, atol=1e-5, msg=name)


def worker(rank: int, folder: str, port: str, cases: str) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    train(Path(folder), cases)
    if cases == "each-way":
        shard(rank)
    dist.destroy_process_group()


@pytest.mark.ordinary_memory
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("cases", ["each-way", pytest.param("other-losses", marks=pytest.mark.exhaustive)])
def test_two_processes(cases: str, tmp_path: Path, fresh_process: FreshProcesses) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fresh_process.spawn(worker, WORLD, str(tmp_path), str(port), cases)


SHARDED = {
    "common": [("SFT", None), ("DPO", LigerFusedLinearDPOLoss(beta=0.1))],
    "others": [
        ("DPO", None),
        ("SFT", LigerFusedLinearCrossEntropyLoss()),
        ("KTO", LigerFusedLinearKTOLoss(beta=0.1)),
        ("ORPO", None),
        ("ORPO", LigerFusedLinearORPOLoss(beta=0.1)),
        ("CPO", None),
        ("GKD", None),
    ],
}


def of_kind(kind: str) -> dict[str, nn.Module]:
    """Return the models of a trainer, with two heads of attention to split."""
    names = ["model", *({"ref_model", "teacher_model"} & KINDS[kind].arguments().keys())]
    return {name: tiny.model(seed=seed, num_key_value_heads=2) for seed, name in enumerate(names)}


def split(rank: int, folder: str, port: str, cases: str) -> None:
    """Train models that `from_pretrained` shards over both ranks. Accelerate refuses this on a CPU only."""
    from accelerate import ParallelismConfig

    start(rank, folder)
    disable_progress_bars()
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    plan = DistributedConfig(tp_size=WORLD, tp_plan="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None)
        for i, (kind, loss) in enumerate(SHARDED[cases]):
            models = {
                name: AutoModelForCausalLM.from_pretrained(
                    f"{folder}/{kind}-{name}", dtype=torch.float32, distributed_config=plan
                )
                for name in of_kind(kind)
            }
            ours = run(Path(folder), kind, ours=True, config=PLAIN, loss=loss, **models)
            stock = json.loads((Path(folder) / f"{i}.json").read_text())
            # The trainer adds up the operations of both ranks. TRL's ORPO averages logits of prompts and padding too.
            own = ("total_flos", *([NOT_TRLS[kind]] if loss is not None and kind in NOT_TRLS else []))
            for entry in (*ours, *stock):
                for name in [name for name in entry if name.startswith(own)]:
                    entry.pop(name)
            assert_same(ours, stock, common=loss is not None)
    dist.destroy_process_group()


@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore")  # of transformers and TRL, about a short run on a CPU
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("cases", ["common", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_tensor_parallelism(cases: str, tmp_path: Path, fresh_process: FreshProcesses) -> None:
    for i, (kind, _) in enumerate(SHARDED[cases]):
        models = of_kind(kind)
        for name, model in models.items():
            model.save_pretrained(tmp_path / f"{kind}-{name}")
        (tmp_path / f"{i}.json").write_text(json.dumps(run(tmp_path, kind, ours=False, config=PLAIN, **models)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fresh_process.spawn(split, WORLD, str(tmp_path), str(port), cases)
