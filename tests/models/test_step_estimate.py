"""Estimates of a whole step, against the bytes of one that runs on the meta device from its start to its end."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from model_zoo import BY_ID, Tiny
from spies import Memory
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    apply_liger_kernel,
    estimate_memory,
    estimate_step,
    longest_sequence,
)
from liger_chunked.integrations.transformers import estimate

SIZES = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=6)


def config_of(tiny: Tiny) -> Any:
    module = importlib.import_module(f"transformers.models.{tiny.family}.configuration_{tiny.family}")
    return getattr(module, tiny.config_class)(**tiny.config)


def measured(config: Any, n: int, tiles: Any, trainable: bool = True, adapter: Any = None) -> int:
    """Return the peak above the weights of a forward and backward of the backbone, all layers of it."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=estimate._ATTENTION
        )
        model.train().requires_grad_(trainable)
        if adapter is not None:
            peft.get_peft_model(model, adapter).to(torch.bfloat16)
    apply_liger_kernel(model, tiled_mlp=tiles, fused_linear_cross_entropy=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    leaf = torch.empty(1, n, config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    memory = Memory()
    memory.expect(leaf, *model.parameters(), *model.buffers())
    with memory:  # embeddings are new in a step, and nothing but the first layer's checkpoint holds them
        model.model(inputs_embeds=leaf.clone(), use_cache=False).last_hidden_state.mul(2.0).sum().backward()
    return memory.peak


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("tiles", [None, 256])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "phi3", "olmo2"])
def test_agrees_with_a_whole_step(name, tiles, trainable):
    config = config_of(BY_ID[name])
    for field, size in {**SIZES, "num_hidden_layers": 6, "head_dim": 16}.items():
        setattr(config, field, size)
    if hasattr(config, "layer_types"):
        config.layer_types = 6 * ["full_attention"]
    n = 8192
    found = estimate_step(config, shape=(1, n), tiled_mlp=tiles, trainable=trainable, logits_budget="1MiB")
    head = trainable * config.vocab_size * config.hidden_size * 2
    if found.head:  # the peak is at the loss: compare the layers alone
        pytest.fail(f"sizes of this test must make layers the peak, got {found}")
    layers = found.peak - found.weights - found.optimizer - head
    assert layers == pytest.approx(measured(config, n, tiles, trainable), rel=0.01)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("tiles", [None, 256])
def test_agrees_with_a_whole_step_of_adapters(tiles):
    n, adapter = 8192, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    found = estimate_step(LLAMA, shape=(1, n), tiled_mlp=tiles, adapter=adapter, logits_budget="1MiB")
    assert found.layer and not found.head
    layers = found.peak - found.weights - found.optimizer
    assert layers == pytest.approx(measured(LLAMA, n, tiles, adapter=adapter), rel=0.01)


def test_parts_of_adapters():
    batch: dict[str, Any] = {"shape": (2, 4096)}
    frozen = estimate_step(LLAMA, **batch, trainable=False)
    of_queries = 6 * 4 * (64 + 64)  # rank 4, in and out of 64 columns, 6 layers
    found = estimate_step(LLAMA, **batch, adapter=peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert (found.weights - frozen.weights, found.optimizer) == (2 * of_queries, 4 * of_queries)
    assert frozen.layer < found.layer < estimate_step(LLAMA, **batch).layer
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    of_head = 4 * (64 + 500)
    found = estimate_step(LLAMA, **batch, adapter=adapter, optimizer_bytes=12, accumulates=True)
    assert (found.gradients, found.optimizer) == (2 * (of_queries + of_head), 12 * (of_queries + of_head))
    wide = LlamaConfig(**{**SIZES, "vocab_size": 50000}, num_hidden_layers=1)
    sizes: dict[str, Any] = {"vocab_size": 50000, "hidden_size": 64, "shape": (2, 256), "trainable_head": False}
    of_loss = estimate_memory(LigerFusedLinearCrossEntropyLoss(), **sizes, lora_rank=4).peak
    assert estimate_step(wide, shape=(2, 256), adapter=adapter).head == of_loss + 2 * 2 * 256 * 64 * 2
    assert longest_sequence(LLAMA, free="64MiB", adapter=adapter) > 0


def test_parts_with_a_reference():
    alone, both = (
        estimate_step(LLAMA, shape=(2, 4096), loss=LigerFusedLinearDPOLoss(), reference=x) for x in (False, True)
    )
    assert alone.layer and both == replace(alone, weights=2 * alone.weights)
    # Where the peak is at the loss, the reference's hidden states are in memory too, and its head may run.
    wide = LlamaConfig(**{**SIZES, "vocab_size": 50000}, num_hidden_layers=1)
    sizes: dict[str, Any] = {"vocab_size": 50000, "hidden_size": 64, "shape": (2, 256), "ref_hidden_size": 64}
    of_loss = estimate_memory(LigerFusedLinearDPOLoss(), **sizes).peak
    found = estimate_step(wide, shape=(2, 256), loss=LigerFusedLinearDPOLoss(), reference=True)
    assert found.head == of_loss + 3 * 2 * 256 * 64 * 2
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"])
    batch: dict[str, Any] = {"shape": (2, 4096), "loss": LigerFusedLinearDPOLoss(), "adapter": lora}
    more = estimate_step(LLAMA, **batch, reference=True).weights - estimate_step(LLAMA, **batch).weights
    assert more == alone.weights  # without an adapter
    with pytest.raises(ValueError, match="takes no reference"):
        estimate_step(LLAMA, shape=(2, 4096), reference=True)


def test_parts():
    n_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(LLAMA).parameters())
    found = estimate_step(LLAMA, shape=(2, 4096))
    assert (found.weights, found.optimizer) == (2 * n_parameters, 4 * n_parameters)
    assert 0 < found.gradients < found.weights and found.layer and not found.head
    # At the first layer to run backward, all checkpoints exist.
    angles = 4096 * (2 * 16 * 2 + 8)  # cosines, sines and positions
    assert found.checkpoints == 6 * 2 * 4096 * 64 * 2 + angles
    assert found.peak == sum(vars(found).values())
    assert str(found).startswith(f"{found.peak / 2**30:.2f} GiB: weights ")
    assert estimate_step(LLAMA, shape=(2, 4096), optimizer_bytes=12).optimizer == 12 * n_parameters
    assert estimate_step(LLAMA, shape=(2, 4096), accumulates=True).gradients == found.weights
    frozen = estimate_step(LLAMA, shape=(2, 4096), trainable=False)
    assert (frozen.optimizer, frozen.gradients) == (0, 0) and frozen.layer < found.layer
    host = estimate_step(LLAMA, shape=(2, 4096), checkpoints="host")
    assert host.checkpoints - angles == (found.checkpoints - angles) // 6


def test_the_backward_of_attention_holds_all_that_it_saved():
    """A checkpoint hands out a saved tensor once, and the kernel reads the output and the log-sum-exp to its end."""
    n, d, heads = 64, 8, 4
    q, k, v = (torch.empty(1, h, n, d, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (heads, 2, 2))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return estimate._attend(None, 2 * q, 2 * k, 2 * v)[0]  # type: ignore[arg-type]

    upstream = torch.empty(1, n, heads, d, dtype=torch.bfloat16, device="meta")
    peak = estimate.peak_bytes(lambda: checkpoint(attention, q, k, v, use_reentrant=False).backward(upstream))
    a_head = n * d * 2
    saved = (4 + 2 + 2 + 4) * a_head + heads * n * 4  # q, k, v, output, log-sum-exp
    gradients = (4 + 2 + 2) * a_head
    # Sums of rows, a float32 gradient of the queries, and gradients of all heads' keys and values.
    work = heads * n * 4 + 4 * 2 * a_head + 2 * 4 * a_head
    assert peak == 4 * a_head + saved + gradients + work  # the first forward's output is alive too


def test_tiles_take_less_where_they_tile():
    whole, tiles, auto, short = (
        estimate_step(LLAMA, shape=(1, n), tiled_mlp=t).layer
        for n, t in ((65536, None), (65536, 4096), (65536, "auto"), (4096, "auto"))
    )
    assert auto <= tiles < whole - 3 * 2 * 50000 * 512  # three of four tensors of all tokens
    assert short == estimate_step(LLAMA, shape=(1, 4096)).layer


@pytest.mark.parametrize("adapter", [None, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")])
def test_chosen_tiles_raise_no_peak(adapter):
    chosen, small = (estimate_step(LLAMA, shape=(1, 65536), tiled_mlp=t, adapter=adapter) for t in ("auto", 1024))
    assert chosen.layer == small.layer


def test_the_loss_may_be_the_peak():
    config = LlamaConfig(**{**SIZES, "vocab_size": 50000}, num_hidden_layers=1)
    for loss in (None, LigerFusedLinearDPOLoss()):
        found = estimate_step(config, shape=(2, 256), loss=loss, logits_budget="16MiB")
        assert found.layer == 0
        ours = LigerFusedLinearCrossEntropyLoss() if loss is None else loss
        of_loss = estimate_memory(ours, vocab_size=50000, hidden_size=64, shape=(2, 256), logits_budget="16MiB")
        assert found.head == of_loss.peak + 2 * 2 * 256 * 64 * 2


def test_longest_sequence():
    free = 256 << 20
    found = {
        (tiles, checkpoints): longest_sequence(LLAMA, free=free, tiled_mlp=tiles, checkpoints=checkpoints)
        for tiles in (None, "auto")
        for checkpoints in ("device", "host")
    }
    for (tiles, checkpoints), n in found.items():
        peaks = [
            estimate_step(LLAMA, shape=(1, length), tiled_mlp=tiles, checkpoints=checkpoints).peak
            for length in (n, n + 1024)
        ]
        assert peaks[0] <= free < peaks[1]
    assert found[None, "device"] < min(found["auto", "device"], found[None, "host"]) < found["auto", "host"]
    assert longest_sequence(LLAMA, free="256MiB") == found[None, "device"]
    assert longest_sequence(LLAMA, free=1 << 20) == 0
    assert longest_sequence(LLAMA, free=free, n_sequences=2) <= found[None, "device"] // 2 + 1024


@pytest.mark.parametrize("name", ["mistral", "gemma", "gemma3_text", "gemma3", "qwen2_vl", "granite", "glm4"])
def test_every_kind_of_decoder(name):
    """Also the text models of those with images, and layers with a sliding window."""
    found = estimate_step(config_of(BY_ID[name]), shape=(2, 300), tiled_mlp=100)
    assert found.layer or found.head


def test_the_config_stays_as_it_is():
    config = LlamaConfig(**SIZES, num_hidden_layers=1)
    before = config.to_dict(), config._attn_implementation
    estimate_step(config, shape=(1, 64))
    assert (config.to_dict(), config._attn_implementation) == before


def test_a_model_without_our_layers():
    found = estimate_step(GPT2Config(n_layer=2, n_embd=32, n_head=2), shape=(1, 512))
    assert found.peak > 0


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"config": "llama"}, TypeError, "config must be a config of transformers, got 'llama'"),
        ({"shape": (16,)}, ValueError, r"shape must be \(B, T\), two positive ints"),
        ({"checkpoints": "disk"}, ValueError, "checkpoints must be 'device' or 'host', got 'disk'"),
        ({"dtype": "bf16"}, TypeError, "dtype must be a floating-point torch.dtype, got 'bf16'"),
        ({"tiled_mlp": "all"}, TypeError, "tiled_mlp must be True, False, None"),
        ({"adapter": "lora"}, TypeError, r"adapter must be a config of PEFT, as LoraConfig\(r=16\), or None, got"),
        (
            {"adapter": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])},
            ValueError,
            r"adapter must be of linear layers alone, got modules_to_save=\['lm_head'\]",
        ),
        ({"optimizer_bytes": "8"}, TypeError, "optimizer_bytes must be"),
        ({"config": GPT2Config(n_layer=1), "tiled_mlp": True}, ValueError, "tiled_mlp matches nothing in gpt2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_errors(changed, error, message):
    arguments = {"config": LLAMA, "shape": (1, 64), **changed}
    with pytest.raises(error, match=message):
        estimate_step(arguments.pop("config"), **arguments)


def test_autocast_must_be_a_dtype():
    batch: dict[str, Any] = {"vocab_size": 64, "hidden_size": 8, "shape": (4,)}
    for autocast in ("bf16", torch.int8):
        with pytest.raises(TypeError, match=r"autocast must be a floating-point torch.dtype or None, got"):
            estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, autocast=autocast)
