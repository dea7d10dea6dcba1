"""MLPs in tiles on two ranks: gradients of one process, and as many gathers as without tiles."""

from __future__ import annotations

import pytest
from ranks import on_ranks

pytest.importorskip("transformers")

from test_models_sharded import (
    VOCAB,
    WORLD,
    WRAPPERS,
    Samples,
    assert_as_good,
    error_of,
    gradients_of,
    gradients_of_one,
    run,
    samples_of,
    tiny,
)
from test_models_tensor_parallel import Watch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointError

from liger_chunked.integrations.transformers import apply_liger_kernel

KINDS = ("ddp", "fsdp2", "fsdp2-bf16", "fsdp2-offload", "fsdp1", "fsdp1-bf16")


def model_of(family: str, tokens: int | None, checkpoints: bool) -> nn.Module:
    model = tiny(family).build().train()
    apply_liger_kernel(model, tiled_mlp=tokens)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.slow
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("family", ["llama", pytest.param("olmo2", marks=pytest.mark.exhaustive)])
@on_ranks(WORLD)
def test_ddp_and_fsdp(rank: int, family: str) -> None:
    samples, num_items = samples_of(VOCAB)
    exact = gradients_of_one(family, samples, num_items)
    for kind in KINDS:
        for checkpoints in (False, True):
            if checkpoints and not stock_trains(kind, family, samples[rank][-1], num_items):
                assert (kind, family) == ("fsdp2-bf16", "olmo2")
                continue
            results = [step(kind, family, tokens, checkpoints, samples, num_items, rank, exact) for tokens in (None, 5)]
            (whole, gathers), (tiled, gathers_of_tiles) = results
            assert gathers == gathers_of_tiles, (kind, checkpoints)
            assert_as_good(tiled, whole, WRAPPERS[kind].dtype, (family, kind, checkpoints))
    # A projection that is a group of its own has a sharded weight when the MLP begins.
    model = model_of(family, 5, False)
    fully_shard(model.model.layers[0].mlp.down_proj)
    with pytest.raises(TypeError, match=r"tiles need whole tensors, got .*a DTensor: let FSDP wrap .*MLP or its layer"):
        run(model, samples[rank][0], "fused", num_items)


def stock_trains(kind: str, family: str, sample: dict[str, Tensor], num_items: Tensor) -> bool:
    """Whether checkpoints of stock layers keep their dtypes: not of OLMo 2 in bfloat16, up to transformers 5.17."""
    model = tiny(family).build().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        run(WRAPPERS[kind].wrap(model), sample, "stock", num_items).backward()
    except CheckpointError:
        return False
    return True


def step(
    kind: str,
    family: str,
    tokens: int | None,
    checkpoints: bool,
    samples: Samples,
    num_items: Tensor,
    rank: int,
    exact: dict[str, Tensor],
) -> tuple[dict[str, float], int]:
    wrapper = WRAPPERS[kind]
    model = wrapper.wrap(model_of(family, tokens, checkpoints))
    with Watch() as watch:
        for sample in samples[rank][:-1]:
            with wrapper.local(model):
                (WORLD * run(model, sample, "fused", num_items)).backward()
        (WORLD * run(model, samples[rank][-1], "fused", num_items)).backward()
    return error_of(gradients_of(model), exact), len(watch.gathers)
