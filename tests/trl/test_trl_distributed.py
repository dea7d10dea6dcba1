"""Two processes: under DDP and tensor parallelism, the logs equal those of TRL's trainers; under FSDP, the gradients
equal those of whole models.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks

pytest.importorskip("trl")

import tiny
import torch
import torch.distributed as dist
from datasets import disable_progress_bars
from fresh_process import FreshProcesses
from model_zoo import BY_ID, VOCAB
from test_models_distributed import gradients_of
from test_models_tensor_parallel import FIRST_DTENSORS, by_module, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from trl_kinds import KINDS, LOSS_OF, PLAIN, assert_same, join, run, set_head, spawn

from liger_chunked import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
)
from liger_chunked.integrations.trl.losses import loss_step
from liger_chunked.integrations.trl.stand_ins import distilled

WORLD = 2
# A replaced head, a trainer whose TRL version builds logits, gradients in forward; then two nested models.
CASES = {
    "each-way": [
        ("SFT", None),
        ("ORPO", None),
        ("DPO", LOSS_OF["DPO"]()),
    ],
    "other-losses": [
        ("Distillation", None),
        ("KTO", LOSS_OF["KTO"]()),
        ("GRPO", LOSS_OF["GRPO"]()),
    ],
}
# TRL's DPO counts the samples that fill up a last batch twice.
NOT_TRLS = {"DPO": ("eval_rewards/", "eval_logps/")}


def train(folder: Path, cases: str) -> None:
    for kind, loss in CASES[cases]:
        stock = run(folder, kind, ours=False, evaluate=True)
        ours = run(folder, kind, ours=True, evaluate=True, **({} if loss is None else {"loss": loss}))
        if loss is not None and kind in NOT_TRLS:
            for entry in (*stock, *ours):
                for name in [name for name in entry if name.startswith(NOT_TRLS[kind])]:
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
        set_head(model, logits_budget=2 * 4 * 300)
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
    return pair


def losses(model: nn.Module, teacher: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """Yield one loss for each way through a head."""
    inputs = {"input_ids": ids}
    yield model(**inputs, labels=ids, fused_lm_head=True).loss
    yield loss_step(model, LigerFusedLinearDPOLoss(use_ref_model=False, logits_budget=2 * 4 * 300), inputs, ids).loss
    with torch.no_grad():
        teacher_logits = teacher(**inputs).logits
    logits, target = model(**inputs).logits, nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    yield distilled(LigerFusedLinearJSDLoss(logits_budget=2 * 4 * 300), logits, teacher_logits, target)[0]


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


def worker(rank: int, folder: str, cases: str, port: str) -> None:
    join(rank, port)
    train(Path(folder), cases)
    if cases == "each-way":
        shard(rank)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.ordinary_memory
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("cases", ["each-way", pytest.param("other-losses", marks=pytest.mark.exhaustive)])
def test_two_processes(cases: str, tmp_path: Path, fresh_process: FreshProcesses) -> None:
    spawn(fresh_process, worker, str(tmp_path), cases)


SHARDED = {
    "common": [("SFT", None), ("DPO", LOSS_OF["DPO"]())],
    "others": [
        ("DPO", None),
        ("SFT", LOSS_OF["SFT"]()),
        ("KTO", LOSS_OF["KTO"]()),
        ("ORPO", None),
        ("CPO", None),
        ("GKD", None),
    ],
}


def sequence() -> None:
    """Hidden states that are sharded on the sequence, and a head on the vocabulary. The teacher is whole."""
    mesh, row = init_device_mesh("cpu", (WORLD,)), BY_ID["llama"]
    ids = torch.randint(10, VOCAB - 10, (2, 12), generator=torch.Generator().manual_seed(0))
    whole, sharded, teacher = row.build().train(), by_module(mesh, "sequence", "llama", torch.float32), row.build(1)
    for model in (whole, sharded, teacher):
        set_head(model, logits_budget=2 * 4 * VOCAB)
    for expected, found in zip(losses(whole, teacher, ids), losses(sharded, teacher, ids), strict=True):
        torch.testing.assert_close(found, expected)
        (expected / 3).backward()
        (found / 3).backward()
    for name, exact in gradients_of(whole).items():
        torch.testing.assert_close(gradients_of(sharded)[name], exact, rtol=2e-4, atol=1e-5, msg=name)


def split(rank: int, folder: str, cases: str, port: str) -> None:
    """Train models that `from_pretrained` shards over both ranks. Accelerate refuses this on a CPU only."""
    from accelerate import ParallelismConfig

    ranks.join(rank, WORLD, folder)
    start(rank)
    disable_progress_bars()
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # Stock 5.5 has the plan as an argument of its own.
    takes_sizes = "tp_size" in DistributedConfig.__dataclass_fields__
    config = DistributedConfig(tp_size=WORLD, tp_plan="auto") if takes_sizes else None
    plan = {"distributed_config": config} if takes_sizes else {"tp_plan": "auto"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None)
        for kind, loss in SHARDED[cases]:
            names = ["model", *({"ref_model", "teacher_model"} & {*KINDS[kind].needs})]
            logs = []
            for ours in (False, True):
                models = {
                    name: AutoModelForCausalLM.from_pretrained(f"{folder}/{i}", dtype=torch.float32, **plan)
                    for i, name in enumerate(names)
                }
                given = models if loss is None or not ours else {**models, "loss": loss}
                logs.append(run(Path(folder), kind, ours, PLAIN, **given))
            stock, ours = logs
            if loss is not None and kind in NOT_TRLS:
                for entry in (*ours, *stock):
                    for name in [name for name in entry if name.startswith(NOT_TRLS[kind])]:
                        entry.pop(name)
            assert_same(ours, stock, common=loss is not None)
    if cases == "common" and not FIRST_DTENSORS:
        sequence()
    dist.destroy_process_group()


@pytest.mark.ordinary_memory
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("cases", ["common", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_tensor_parallelism(cases: str, tmp_path: Path, fresh_process: FreshProcesses) -> None:
    for i in range(2):  # two heads of attention to split
        tiny.model(seed=i, num_key_value_heads=2).save_pretrained(tmp_path / str(i))
    spawn(fresh_process, split, str(tmp_path), cases)
