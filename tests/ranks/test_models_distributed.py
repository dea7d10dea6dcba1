"""Two processes with one sample each and LoRA on the head: the gradients are those of the mean loss, for all wrappers.

Models without an adapter are in test_models_sharded.py, a head that is a DTensor in test_models_tensor_parallel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from ranks import on_ranks

pytest.importorskip("transformers")

import torch
from model_zoo import BY_ID, VOCAB
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from liger_chunked import linear_token_stats
from liger_chunked.integrations.transformers import apply_liger_kernel, attach_head

WORLD = 2


def token_loss(head: Any, input: Any) -> Tensor:
    """A `head_fn` whose backward reads the head's weight again, because its budget holds two rows of logits."""
    stats = linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, logits_budget=2 * 4 * VOCAB)
    return -stats.logps.sum() / (input.target != -100).sum()


def adapted(model: Any) -> Any:
    """Return the model with the same nonzero adapters on every rank."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def adapters_sharded(model: Any, head_apart: bool) -> nn.Module:
    lm_head = model.get_base_model().lm_head
    parts = [lm_head.lora_A.default, lm_head.lora_B.default, lm_head.base_layer, lm_head] if head_apart else []
    for part in [*model.get_base_model().model.layers, *parts]:
        fully_shard(part)
    return fully_shard(model)


def adapters_wrapped(model: Any) -> nn.Module:
    """Wrap each Linear, those of the adapters included, as PEFT's policy for FSDP does."""
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


ADAPTER_WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": adapters_wrapped,
    "fsdp": functools.partial(adapters_sharded, head_apart=False),
    "fsdp-head-apart": functools.partial(adapters_sharded, head_apart=True),
}


def losses(model: nn.Module, sample: dict[str, Tensor], way: str) -> Tensor:
    return model(**sample, head_fn=token_loss) if way == "head_fn" else model(**sample).loss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, p in model.named_parameters():
        g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        grads[name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")] = g
    return grads


@pytest.mark.ordinary_memory
@on_ranks(WORLD)
def test_wrapped_and_sharded(rank: int) -> None:
    tiny = BY_ID["llama"]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(10, VOCAB - 10, (2, 9), generator=generator) for _ in range(WORLD)]
    samples = [{"input_ids": x, "labels": x} for x in ids]

    stock = adapted(tiny.build())
    sum(stock(**sample).loss for sample in samples).div(WORLD).backward()
    exact = {name: g for name, g in gradients_of(stock).items() if g is not None}
    assert any("lm_head.lora_A" in name for name in exact)
    for wrapper, wrap in ADAPTER_WRAPPERS.items():
        for way in ("fused", "head_fn"):
            model = adapted(tiny.build())
            apply_liger_kernel(model) if way == "fused" else attach_head(model)
            model = wrap(model)
            losses(model, samples[rank], way).backward()
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                gradients = {name: g for name, g in gradients_of(model).items() if g is not None}
            assert gradients.keys() == exact.keys(), wrapper
            for name, g in gradients.items():
                error = (g - exact[name]).norm() / exact[name].norm()
                assert error < 2e-4, (wrapper, way, name, error)
