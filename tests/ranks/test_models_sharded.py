"""A hard step of patched models under DDP, FSDP and ZeRO: gradients, and how often the head is gathered.

A step has two micro-batches on each of two ranks, and the loss divides by the number of valid tokens of all four. One
micro-batch has no valid token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import no_gloo, on_ranks, some_or_all

pytest.importorskip("transformers")

import torch
from fresh_process import FreshProcesses
from fused import is_deferred
from model_zoo import BY_ID, Tiny
from test_models_tensor_parallel import Watch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from liger_chunked import linear_token_stats
from liger_chunked.integrations.transformers import apply_liger_kernel, attach_head

WORLD, MICRO, VOCAB = 2, 2, 1024


def tiny(family: str) -> Tiny:
    """Return a row whose head is larger than everything else."""
    return dataclasses.replace(BY_ID[family], config={**BY_ID[family].config, "vocab_size": VOCAB})


def token_loss(head: Any, input: Any) -> Tensor:
    """A `head_fn` whose backward reads the head's weight again, because its budget holds two rows of logits."""
    stats = linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, logits_budget=2 * 4 * VOCAB)
    return -stats.logps.sum() / input.num_items_in_batch


def run(model: nn.Module, sample: dict[str, Tensor], way: str, num_items: Tensor) -> Tensor:
    if way == "head_fn":
        return model(**sample, num_items_in_batch=num_items, head_fn=token_loss)
    return model(**sample, num_items_in_batch=num_items).loss


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """`local(model)`: a context for all but the last micro-batch, which keeps gradients on their rank."""

    wrap: Callable[[Any], Any]
    local: Callable[[Any], contextlib.AbstractContextManager[Any]]
    gathers: int  # of as many values as the head has, in a step; untied embeddings are as large
    dtype: torch.dtype = torch.float32
    deferred_gathers: int | None = None  # of a head that defers, where they are fewer: its group stays gathered


@contextlib.contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """As Accelerate does for FSDP2."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def kept_whole(model: Any) -> Iterator[None]:
    model.set_reshard_after_backward(False)
    with without_sync(model):
        yield
    model.set_reshard_after_backward(True)


def fsdp2(model: Any, apart: bool = False, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if apart:
        fully_shard(model.lm_head, **{"reshard_after_forward": False, **options})
    return fully_shard(model, **options)


def fsdp1(model: Any, apart: bool = False, **options: Any) -> Any:
    kinds = {type(model.model.layers[0]), *([type(model.lm_head)] if apart else [])}
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(kinds), use_orig_params=True, device_id=device, **options
    )


def no_sync(model: Any) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync()


HALF = torch.bfloat16
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
MIXED = {"mp_policy": MixedPrecisionPolicy(HALF, torch.float32)}
P = functools.partial
WRAPPERS = {
    "ddp": Wrapper(DistributedDataParallel, no_sync, 0),
    # Head, embeddings and last norm are one group.
    "fsdp2": Wrapper(fsdp2, without_sync, MICRO),
    "fsdp2-whole-between-steps": Wrapper(fsdp2, kept_whole, 1),
    "fsdp2-bf16": Wrapper(P(fsdp2, **MIXED), without_sync, MICRO, HALF),
    "fsdp2-offload": Wrapper(P(fsdp2, **OFFLOAD), without_sync, MICRO),
    "fsdp1": Wrapper(fsdp1, no_sync, MICRO),
    "fsdp1-bf16": Wrapper(P(fsdp1, mixed_precision=MixedPrecision(HALF, torch.float32)), no_sync, MICRO, HALF),
    # The head is apart from the embeddings.
    "fsdp2-apart": Wrapper(P(fsdp2, apart=True), without_sync, 2 * MICRO),
    "fsdp2-apart-whole-between-steps": Wrapper(P(fsdp2, apart=True), kept_whole, 2),
    "fsdp2-apart-bf16": Wrapper(P(fsdp2, apart=True, **MIXED), without_sync, 2 * MICRO, HALF),
    # FSDP gathers what it frees after the forward again for the backward: here all of it, there the head.
    "fsdp2-apart-freed": Wrapper(
        P(fsdp2, apart=True, reshard_after_forward=True), without_sync, 4 * MICRO, deferred_gathers=3 * MICRO
    ),
    # As `SHARD_GRAD_OP` does, the head's unit stays gathered between micro-batches that do not reduce gradients.
    "fsdp1-apart": Wrapper(P(fsdp1, apart=True), no_sync, 3 * MICRO, deferred_gathers=MICRO + 1),
}


Samples = list[list[dict[str, Tensor]]]


def samples_of(vocab: int) -> tuple[Samples, Tensor]:
    """Return the micro-batches of each rank, and the number of their valid tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for rank in range(WORLD):
        own = []
        for i in range(MICRO):
            ids = torch.randint(10, vocab - 10, (2, 9), generator=generator)
            labels = ids.clone()
            labels[0, : 2 + rank] = -100
            if rank == 1 and i == 0:
                labels[:] = -100
            own.append({"input_ids": ids, "labels": labels})
        samples.append(own)
    return samples, sum((sample["labels"][:, 1:] != -100).sum() for own in samples for sample in own)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, p in model.named_parameters():
            g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            grads[name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")] = g.float()
    return grads


def error_of(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    # The gradient of a key's bias is zero except for rounding.
    names = [name for name in exact if "k_proj.bias" not in name]
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in names}


def prepared(family: str, way: str) -> Any:
    model = tiny(family).build().train()
    if way == "fused":
        apply_liger_kernel(model)
    elif way == "head_fn":
        attach_head(model)
    return model


def gradients_of_one(family: str, samples: Samples, num_items: Tensor) -> dict[str, Tensor]:
    stock = prepared(family, "stock")
    for sample in (sample for own in samples for sample in own):
        run(stock, sample, "stock", num_items).backward()
    return gradients_of(stock)


def assert_as_good(found: dict[str, float], stock: dict[str, float], dtype: torch.dtype, tag: Any) -> None:
    if dtype == torch.float32:
        assert max(found.values()) < 1e-5, (tag, found)  # sums in another order
    else:  # the library's bound on errors, for all gradients together
        assert sum(found.values()) < 1.1 * sum(stock.values()), (tag, found, stock)


@pytest.mark.slow
@pytest.mark.ordinary_memory
@some_or_all
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@on_ranks(WORLD)
def test_ddp_and_fsdp(rank: int, family: str, every: bool) -> None:
    samples, num_items = samples_of(VOCAB)
    exact = gradients_of_one(family, samples, num_items)
    size = tiny(family).build().lm_head.weight.numel()
    for i, (name, wrapper) in enumerate(WRAPPERS.items()):
        if family == "qwen2" and "apart" in name:  # its head is tied
            continue
        errors = {}
        for way in ("stock", "fused", "head_fn") if every else ("stock", ("fused", "head_fn")[i % 2]):
            model = wrapper.wrap(prepared(family, way))
            with Watch() as watch:
                for sample in samples[rank][:-1]:
                    with wrapper.local(model):
                        (WORLD * run(model, sample, way, num_items)).backward()
                (WORLD * run(model, samples[rank][-1], way, num_items)).backward()
            gathers = sum(n >= size for n in watch.gathers)
            expected = wrapper.gathers if way == "stock" else wrapper.deferred_gathers or wrapper.gathers
            assert gathers == expected, (family, name, way, gathers)
            errors[way] = error_of(gradients_of(model), exact)
            assert_as_good(errors[way], errors["stock"], wrapper.dtype, (family, name, way))


@pytest.mark.ordinary_memory
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(WORLD)
def test_evaluation(rank: int, every: bool) -> None:
    """Evaluation without gradients defers, and one rank alone may read the logits."""
    samples, _ = samples_of(VOCAB)
    sample = samples[rank][1]
    for name in WRAPPERS if every else ("ddp", "fsdp2", "fsdp1-bf16", "fsdp2-apart-freed", "fsdp1-apart"):
        wrapper = WRAPPERS[name]
        with torch.no_grad():
            expected = wrapper.wrap(prepared("llama", "stock")).eval()(**sample)
        model = tiny("llama").build()
        apply_liger_kernel(model, rms_norm=False, swiglu=False, rope=False)  # the head alone, whose logits are the same
        model = wrapper.wrap(model)
        for _ in range(2):
            with torch.no_grad():
                output = model.eval()(**sample)
                assert is_deferred(output.logits), name
                rtol = 1e-5 if wrapper.dtype == torch.float32 else 1e-3  # of logits that stock rounds
                torch.testing.assert_close(output.loss, expected.loss, rtol=rtol, atol=0, check_dtype=False)
                if rank == 0:
                    torch.testing.assert_close(output.logits.tensor(), expected.logits, rtol=1e-5, atol=1e-6)
            run(model.train(), sample, "fused", torch.tensor(7)).backward()


# Without prefetching and reuse, which depend on sizes.
ZERO: dict[str, Any] = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "overlap_comm": False,
}
CPU = {"device": "cpu"}
STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero2": ({"stage": 2}, {}),
    "zero2-bf16": ({"stage": 2}, {"bf16": {"enabled": True}}),
    "zero2-offload": ({"stage": 2, "offload_optimizer": CPU}, {}),
    "zero3": ({"stage": 3}, {}),
    "zero3-bf16": ({"stage": 3}, {"bf16": {"enabled": True}}),
    "zero3-offload": ({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, {}),
}


def zero(rank: int, folder: str, port: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    samples, num_items = samples_of(VOCAB)
    for family in ("llama", "qwen2"):
        exact = gradients_of_one(family, samples, num_items)
        size = tiny(family).build().lm_head.weight.numel()
        for name, (stage, precision) in STAGES.items():
            errors, gathers = {}, {}
            for way in ("stock", "fused", "head_fn"):
                model = prepared(family, way)
                config = {
                    "train_micro_batch_size_per_gpu": len(samples[0][0]["input_ids"]),
                    "gradient_accumulation_steps": MICRO,
                    "zero_optimization": {**ZERO, **stage},
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                    **precision,
                }
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
                with Watch() as watch:
                    for i, sample in enumerate(samples[rank]):
                        # The engine divides by the number of micro-batches.
                        engine.backward(WORLD * MICRO * run(engine, sample, way, num_items))
                        if i < MICRO - 1:
                            engine.step()
                found = {name: safe_get_full_grad(p).float() for name, p in engine.module.named_parameters()}
                gathers[way] = sum(n >= size for n in watch.gathers)
                errors[way] = error_of(found, exact)
                # ZeRO-3 gathers head and embeddings for forward and backward.
                assert gathers[way] == (4 * MICRO if stage["stage"] == 3 else 0), (family, name, way, gathers)
                dtype = HALF if precision else torch.float32
                assert_as_good(errors[way], errors["stock"], dtype, (family, name, way))
                engine.destroy()


@no_gloo
@pytest.mark.exhaustive  # it builds an extension
@pytest.mark.ordinary_memory
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed")
def test_zero(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fresh_process.spawn(zero, WORLD, str(tmp_path), str(port))
