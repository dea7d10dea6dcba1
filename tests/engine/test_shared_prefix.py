"""Prompts that are computed once give the hidden states, losses and gradients of the padded batch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import join

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from base_ops import dynamo_warns
from model_zoo import _TEXT, BY_ID, Tiny
from test_trie import padded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.neftune import activate_neftune
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_chunked import LigerFusedLinearDPOLoss
from liger_chunked.integrations.transformers import attach_head
from liger_chunked.integrations.transformers.head_input import HeadInput
from liger_chunked.shared_prefix import attention as trie_attention
from liger_chunked.shared_prefix import share, share_batch, shared_prefix_hidden_states, why_not_shared
from liger_chunked.shared_prefix.attention import BLOCK, dense_mask, trie_mask
from liger_chunked.shared_prefix.trie import pack_trie
from liger_chunked.types import Head

GPT_OSS = Tiny(
    "gpt_oss",
    "gpt_oss",
    "GptOssForCausalLM",
    "GptOssConfig",
    {
        **_TEXT,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
# The model and the changes to its config, by name.
MODELS: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "llama": (BY_ID["llama"], {}),
    "qwen3": (BY_ID["qwen3"], {}),
    "gemma2": (BY_ID["gemma2"], {"sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": (BY_ID["gemma3_text"], {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": (BY_ID["mistral"], {}),
    "gpt_oss": (GPT_OSS, {}),
    "qwen3_moe": (BY_ID["qwen3_moe"], {"output_router_logits": False}),
}
NO_SDPA = ("gemma2", "gpt_oss")
CASES = [
    (name, way)
    for name in MODELS
    for way in ("sdpa", "eager", "flex_attention")
    if name not in NO_SDPA or way != "sdpa"
]


class InFloat64(TorchFunctionMode):
    """Keep in float64 what a model would compute in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return (torch.Tensor.double if function is torch.Tensor.float else function)(*args, **kwargs)


# transformers and PEFT on transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


@pytest.fixture(autouse=True)
def in_float64(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if request.node.get_closest_marker("gpu") else InFloat64():
        yield


def build(name: str, implementation: str = "eager", seed: int = 0) -> PreTrainedModel:
    tiny, changes = MODELS[name]
    model = dataclasses.replace(tiny, config={**tiny.config, **changes}).build(seed).double()
    if getattr(model.config, "num_local_experts", getattr(model.config, "num_experts", None)):
        model.config._experts_implementation = "eager"  # the others have no float64
    model.config._attn_implementation = implementation
    return model


def stock(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same parameters and an attention that transformers runs on a CPU."""
    if model.config._attn_implementation != "flex_attention":
        return model
    other = copy.deepcopy(model)
    other.config._attn_implementation = "eager"
    for theirs, own in zip(other.modules(), model.modules(), strict=True):
        vars(theirs)["_parameters"] = vars(own)["_parameters"]
    return other


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def padded_hidden_states(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    backbone = stock(model).base_model
    output = backbone(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
    return output.last_hidden_state * mask[..., None]


Gradients = dict[str, Tensor]


def gradients(model: nn.Module, loss: Tensor) -> Gradients:
    model.zero_grad()
    # `loss.backward()` would suspend `InFloat64`, also for layers that are computed again.
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Tensor | Gradients, expected: Tensor | Gradients) -> None:
    """Compare to 1e-9 of the largest value."""
    if isinstance(got, dict):
        assert isinstance(expected, dict) and got.keys() == expected.keys() and got
        # float64 on both paths: the bound is relative to the largest gradient.
        scale = max(float(x.detach().abs().max()) for x in expected.values())
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=1e-9 * scale, msg=lambda m, name=name: f"{name}: {m}")
        return
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9 * float(expected.detach().abs().max()))


PROMPTS = ([10, 11, 12, 13, 14, 15, 16, 17], [20, 21], [30])
# A tree of conversations, identical sequences, an empty completion, prompts of one token, and no sequence at all.
SEQUENCES = [
    *([*PROMPTS[0], *completion] for completion in ([40, 41, 42, 43], [40, 41, 50], [60], [60], [])),
    *([*PROMPTS[1], *completion] for completion in ([22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [50])),
    *([*PROMPTS[2], *completion] for completion in ([31, 32], [33])),
    [99, 98, 97, 96, 95, 94, 93, 92],
]


@pytest.mark.few(2, "right-gemma2-flex_attention")
@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_and_their_gradients(name: str, way: str, side: str) -> None:
    model = build(name, way)
    ids, mask = padded([*SEQUENCES, []] if side == "right" else SEQUENCES, side, extra=2, token=40)
    got, expected = shared_prefix_hidden_states(model, ids, mask), padded_hidden_states(model, ids, mask)
    assert_same(got, expected)
    assert (got[mask == 0] == 0).all()
    upstream = torch.randn(got.shape)
    parts = [gradients(model, (x * upstream).sum()) for x in (got, expected)]
    assert_same(*parts)


def dpo(head: Head, input: HeadInput) -> Tensor:
    loss = LigerFusedLinearDPOLoss(softcap=input.options.softcap, logit_scale=input.options.logit_scale)
    ref_logps = torch.linspace(-9, -4, len(input.hidden_states), dtype=torch.float64)
    return loss(head.weight, input.hidden_states, input.target, head.bias, ref_logps=ref_logps)[0]


def completions(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and labels of chosen and then rejected completions, or of two groups of rollouts."""
    sequences = [PROMPTS[0] + [40, 41, 42, 43], PROMPTS[1] + [22, 23], PROMPTS[0] + [40, 50], PROMPTS[1] + [60, 61, 62]]
    ids, mask = padded(sequences, side)
    lengths = torch.tensor([8, 2, 8, 2])
    labels = ids.masked_fill((mask == 0) | (positions(mask) < lengths[:, None]), -100)
    return ids, mask, labels


# Wrappers.


@pytest.mark.few(1)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.ordinary_memory
def test_under_data_parallel(wrapper: str, tmp_path: Path) -> None:
    join(0, 1, str(tmp_path))
    try:
        model = build("gemma3", "sdpa")
        ids, mask, labels = completions("right")
        attach_head(model)
        expected = gradients(model, model(ids, attention_mask=mask, labels=labels, head_fn=dpo))
        model.zero_grad()
        if wrapper == "ddp":
            wrapped: nn.Module = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (1,))
            for part in (*model.model.layers, model):
                wrapped = fully_shard(part, mesh=mesh)
        attach_head(wrapped)
        batch = share_batch(wrapped, ids, mask)
        wrapped(**batch.inputs, labels=labels, head_fn=batch.head_fn(dpo)).backward()
        whole = {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for name, p in model.named_parameters()
        }
        assert_same(whole, expected)
    finally:
        dist.destroy_process_group()


# FlexAttention.


def _long(seed: int, lengths: tuple[int, ...] = (300, 200, 100, 17, 250)) -> tuple[Tensor, Tensor]:
    """Return `end` and `depth` of two rows with trees of completions."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for root in (1, 2, 3):
        prompt = [root, *torch.randint(9, (170,), generator=generator).tolist()]
        for n in lengths:
            sequences.append([*prompt, *torch.randint(9, (n,), generator=generator).tolist()])
    packed = pack_trie(*padded(sequences), row_tokens=2048, multiple=2 * BLOCK)
    return packed.end, packed.position_ids


@pytest.mark.few(2, "400")
@pytest.mark.parametrize("window", [None, 1, 100, 400])
def test_blocks(window: int | None) -> None:
    end, depth = _long(0)
    mask, expected = trie_mask(end, depth, window), dense_mask(end, depth, window)
    for index in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert index is not None and index.is_contiguous()  # FlexAttention's kernels do not look at their strides
    n = end.shape[1] // BLOCK
    by_block = expected.view(len(end), 1, n, BLOCK, n, BLOCK).transpose(3, 4).flatten(4)
    computed, full = mask.to_dense().bool(), torch.zeros(by_block.shape[:4], dtype=torch.bool)
    for row, i in torch.cartesian_prod(torch.arange(len(end)), torch.arange(n)).tolist():
        full[row, 0, i, mask.full_kv_indices[row, 0, i, : mask.full_kv_num_blocks[row, 0, i]]] = True
    if window is None:
        assert torch.equal(computed, by_block.any(-1)) and torch.equal(full, by_block.all(-1))
    assert not (by_block.any(-1) & ~computed).any() and not (full & ~by_block.all(-1)).any()
    if window != 1:  # far shorter than a block, so that depths alone say little
        assert computed.sum() <= 2 * by_block.any(-1).sum()
    by_key = torch.zeros_like(computed)
    kinds = ((mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices))
    for number, indices in kinds:
        for row, j in torch.cartesian_prod(torch.arange(len(end)), torch.arange(n)).tolist():
            by_key[row, 0, indices[row, 0, j, : number[row, 0, j]], j] = True
    assert torch.equal(by_key, computed)


def _layer(length: int, n_rows: int = 1) -> list[Tensor]:
    """Return query, key and value of four query heads in two groups, and sinks."""
    shapes = [(n_rows, 4, length, 8), (n_rows, 2, length, 8), (n_rows, 2, length, 8), (4,)]
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture
def flex_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow FlexAttention's gradients on a CPU, which it refuses because they are slow."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda query, key, value: None)


@pytest.mark.few(1)
@pytest.mark.usefixtures("flex_gradients")
@pytest.mark.parametrize("setting", ["plain", "window, softcap, sinks"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(setting: str) -> None:
    end, depth = _long(1, (90, 20))
    mask = trie_mask(end, depth, 30 if "window" in setting else None)
    q, k, v, sinks = _layer(end.shape[1], len(end))
    softcap = 1.5 if "softcap" in setting else None
    leaves = [q, k, v]
    if "sinks" in setting:
        leaves.append(sinks)
    with_sinks = "sinks" in setting
    sinks_by_head = sinks[None, :, None] if with_sinks else None
    parts = mask.blocks, mask.end, mask.depth, mask.window
    got = trie_attention._attend(q, k, v, *parts, sinks_by_head, 0.3, softcap)
    expected = trie_attention._attend_densely(q, k, v, mask, 0.3, softcap, sinks if with_sinks else None)
    upstream = torch.randn_like(got)
    # Sinks need the logsumexp of FlexAttention, which is float32.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 if "sinks" in setting else 1e-12)
    for x, y in zip(*(torch.autograd.grad(z, leaves, upstream) for z in (got, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5 if "sinks" in setting else 1e-11)


@pytest.mark.usefixtures("flex_gradients")
@pytest.mark.ordinary_memory
@dynamo_warns
def test_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with and without a window, rows of any length, and new masks run one graph with gradients, one without."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(trie_attention, "_compiled", functools.cache(trie_attention._compiled.__wrapped__))
    # The first mask has as many blocks as heads. That must not make the number of blocks a constant.
    for length, window in ((512, None), (768, 9), (256, None), (1280, 9)):
        end = torch.full((1, length), length, dtype=torch.int32)
        mask = trie_mask(end, torch.arange(length)[None], window, has_windows=True)
        q, k, v, sinks = _layer(length)
        q = q.transpose(1, 2).flatten(2).view(1, length, 4, 8).transpose(1, 2)  # a view, as in models
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                trie_attention._run_compiled(q, k, v, mask, sinks[None, :, None], 0.3, 1.5)
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.ordinary_memory
@dynamo_warns
@pytest.mark.parametrize(
    ("name", "way"), [("llama", "sdpa"), ("gemma2", "flex_attention"), ("gpt_oss", "flex_attention")]
)
def test_flex_attention_on_a_gpu(name: str, way: str) -> None:
    """The compiled function, over rows of several lengths, against dense attention in float32 on a CPU."""
    tiny, changes = MODELS[name]
    # FlexAttention needs heads of 16 or more.
    changes = {**changes, "head_dim": 16, "max_position_embeddings": 2048}
    model = dataclasses.replace(tiny, config={**tiny.config, **changes}).build()
    model.config._attn_implementation = "flex_attention"
    torch._dynamo.reset()
    graphs = []
    for n in (600, 900, 700):
        generator = torch.Generator().manual_seed(n)
        prompt = torch.randint(3, 100, (n,), generator=generator).tolist()
        ids, mask = padded([prompt + torch.randint(3, 100, (n,), generator=generator).tolist() for _ in range(2)])
        results = []
        for device in ("cpu", "cuda"):
            model.to(device).config._attn_implementation = "flex_attention" if device == "cpu" else way
            hidden_states = shared_prefix_hidden_states(model, ids.to(device), mask.to(device))
            upstream = torch.randn(hidden_states.shape, generator=generator.manual_seed(0)).to(device)
            results.append(gradients(model, (hidden_states * upstream).sum()) | {"": hidden_states.detach()})
        for key, x in results[0].items():
            assert (results[1][key].cpu() - x).norm() <= 1e-2 * x.norm(), key
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]


def test_serving_leaves_other_masks_alone() -> None:
    model = build("llama", "sdpa")
    ids, mask = padded(SEQUENCES)
    before = padded_hidden_states(model, ids, mask)
    trie_attention.serve("sdpa")
    served = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    trie_attention.serve("sdpa")
    assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] is served
    assert torch.equal(padded_hidden_states(model, ids, mask), before)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        trie_attention.serve("eager")


# The check of a model, and the decision.

_LM = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
_HEADS = {**_LM, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Mamba", _LM, "carry a state"),
    ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    ("Lfm2", {**_HEADS, "layer_types": ["conv", "full_attention"]}, "of the type conv"),
    ("Bert", {**_LM, "intermediate_size": 64, "num_attention_heads": 4, "is_decoder": False}, "differ by"),
    ("Mixtral", {**_HEADS, "num_local_experts": 4, "output_router_logits": True}, "router loss"),
    (
        "Llama4",
        {**_HEADS, "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "moe_layers": []},
        "differ by",
    ),
]


def _causal(prefix: str, config: dict[str, Any]) -> PreTrainedModel:
    kind = "LMHeadModel" if prefix in ("Bert",) else "ForCausalLM"
    text = "Text" if prefix == "Llama4" else ""
    return getattr(transformers, f"{prefix}{kind}")(getattr(transformers, f"{prefix}{text}Config")(**config))


@pytest.mark.few(4)
@pytest.mark.parametrize(("prefix", "config", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_refused(prefix: str, config: dict[str, Any], reason: str) -> None:
    model = _causal(prefix, config).eval()
    found = why_not_shared(model)
    assert found is not None and reason in found
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    with pytest.raises(ValueError, match="cannot share prompts"):
        share_batch(model, ids)
    assert share.share_pass(model, {"input_ids": ids}) is None


def changed(training: bool = True, **config: Any) -> PreTrainedModel:
    model = build("llama").train(training)
    vars(model.config).update(config)
    return model


def with_noise() -> PreTrainedModel:
    model = build("llama").train()
    activate_neftune(model, 5.0)
    return model


def louder(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, 2 * query, *args, **kwargs)


def attention_of_a_user() -> PreTrainedModel:
    AttentionInterface.register("sdpa_louder", louder)
    return build("llama", "sdpa_louder")


def adapted(kind: str, base: bool = True, **config: Any) -> Any:
    """Return a model with an adapter, or the base model in its wrapper, which the trainers ask about."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **config))
    return model.get_base_model() if base else model


ALORA: dict[str, Any] = {"target_modules": ["q_proj"], "alora_invocation_tokens": [60]}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: changed(attention_dropout=0.1), "attention_dropout is 0.1"),
        (with_noise, "NEFTune"),
        (attention_of_a_user, "'sdpa_louder', is not one of transformers"),
        (lambda: BY_ID["qwen2_vl"].build(), "more than text"),
        (lambda: adapted("PromptTuningConfig", base=False, num_virtual_tokens=2), "virtual tokens"),
        (lambda: adapted("LoraConfig", base=False, **ALORA), "starts at a token"),
        (lambda: adapted("PolyConfig", target_modules=["q_proj"], n_tasks=2), "PolyConfig"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused_as_it_is(make: Callable[[], Any], reason: str) -> None:
    assert reason in (why_not_shared(make()) or "")


_FACTORS = [1.0, 2.0, 3.0, 4.0]
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": _FACTORS,
    "long_factor": [4 * x for x in _FACTORS], "original_max_position_embeddings": 32, "factor": 4.0,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_TEMPERATURE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
# Positions that change the model only beyond a length, and whether padding on the right does too.
BY_LENGTH = {
    "Phi3": ({**_HEADS, "pad_token_id": 0, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32}, True),
    "Llama": ({**_HEADS, "max_position_embeddings": 32, "rope_parameters": _DYNAMIC}, True),
    "Ministral3": ({**_HEADS, "head_dim": 8, "rope_parameters": _TEMPERATURE}, False),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", BY_LENGTH)
def test_padding_beyond_the_length_that_changes_positions(name: str) -> None:
    """A batch is shared if and only if it has the hidden states of `forward`."""
    config, counts_right = BY_LENGTH[name]
    once = _causal(name, {**config, "attn_implementation": "eager"}).double().eval()
    prompt = list(range(3, 23))
    sequences = [[*prompt, *range(30, 30 + n)] for n in (8, 10, 5)]
    for left, right in ((0, 0), (8, 0), (0, 8)):
        # Copies: dynamic frequencies of stock 5.5 that a long batch changed stay for shorter ones.
        padded_model, model = copy.deepcopy(once), copy.deepcopy(once)
        ids, mask = padded(sequences, "right")
        ids, mask = F.pad(ids, (left, right), value=1), F.pad(mask, (left, right))
        arguments = {"input_ids": ids, "attention_mask": mask}
        expected = padded_model.base_model(**arguments, use_cache=False).last_hidden_state * mask[..., None]
        plain = share._share(model, share._plan(model, ids, mask))
        found = plain.hidden_states(model.base_model(**plain.inputs).last_hidden_state)
        is_same = bool((found - expected).norm() <= 1e-9 * expected.norm())
        assert is_same == (not left and not (right and counts_right))
        assert (share.share_pass(model, arguments) is not None) == is_same


def test_decision(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=share.__name__)
    model = build("llama")
    torch.manual_seed(0)
    unrelated = torch.randint(3, 100, (4, 16))
    assert share.share_pass(model, {"input_ids": unrelated}) is None and not caplog.messages
    alike = torch.cat([unrelated[:1, :12].expand(4, -1), unrelated[:, 12:]], dim=1)
    for _ in range(2):
        batch = share.share_pass(model, {"input_ids": alike})
        assert batch is not None and batch.trie.nodes == 12 + 16
    assert caplog.messages == [
        "LlamaForCausalLM computes shared prompts once: 32 tokens in place of 64 (50% saved) in this batch"
    ]
    mamba = _causal("Mamba", _LM)
    for _ in range(2):
        assert share.share_pass(mamba, {"input_ids": alike % 64}) is None
    assert caplog.messages[1:] == [
        "MambaForCausalLM computes shared prompts once for each sequence: its layers carry a state from token to token"
    ]
