"""Heads with a low-rank adapter equal heads whose weight contains the adapter, in every loss and in PEFT's models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import POLICY, ROWS, SMALL, Batch, Row, evaluate, moved, n_valid, relative_error, rows
from test_cost import Memory
from test_values import ERROR_SIZES, FACTOR, rms
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import (
    AdaptedWeight,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    estimate_memory,
    functional,
    linear_token_stats,
)
from liger_chunked.engine import gradients
from liger_chunked.kernels import backend
from liger_chunked.testing import check_loss

by_row = pytest.mark.parametrize("row", ROWS, ids=repr)
RANK, SCALE = 3, 0.5
HEADS = ("", "ref_", "teacher_")  # prefixes of the weights that get an adapter
TRAINABLE = ("weight", "input", "bias", "down", "up")


def with_factors(batch: Batch, seed: int = 0) -> Batch:
    """Add `{prefix}down` (r, H) and `{prefix}up` (V, r) for each weight; an adapter adds a third to the logits."""
    generator = torch.Generator().manual_seed(seed + 7)
    batch = dict(batch)
    for prefix in HEADS:
        if f"{prefix}weight" in batch:
            vocab, hidden = batch[f"{prefix}weight"].shape
            batch[f"{prefix}down"] = torch.randn(RANK, hidden, generator=generator, dtype=torch.float64) / hidden**0.5
            batch[f"{prefix}up"] = torch.randn(vocab, RANK, generator=generator, dtype=torch.float64)
    return batch


def with_weights(batch: Batch, make: Callable[[Tensor, Tensor, Tensor], Any]) -> dict[str, Any]:
    """Replace the factors of each head by `make(weight, down, up)`."""
    batch = dict(batch)
    for prefix in HEADS:
        if f"{prefix}down" in batch:
            factors = (batch.pop(f"{prefix}{name}") for name in ("weight", "down", "up"))
            batch[f"{prefix}weight"] = make(*factors)
    return batch


def adapted(weight: Tensor, down: Tensor, up: Tensor) -> AdaptedWeight:
    # As PEFT does: `down` may be in another dtype than the hidden states.
    return AdaptedWeight(weight, up, lambda x: SCALE * F.linear(x.to(down.dtype), down))


def dense(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return weight + SCALE * up @ down


def compare(
    row: Row, batch: Batch, bound: float, trainable: Iterable[str] = TRAINABLE, upstream: float = 1.0, **options: Any
) -> None:
    expected = evaluate(lambda b: row.oracle(with_weights(b, dense)), batch, trainable, upstream)
    found = evaluate(lambda b: row.ours(with_weights(b, adapted), **options), batch, trainable, upstream)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) < bound, f"{row.id}: {name}"


SETTINGS = {
    "automatic": (SMALL, None),
    "chunks": (SMALL, 5),
    "one token": (SMALL, 1),
    "slices": (SMALL._replace(vocab=2503), 1.5),
    "no ignored tokens": (SMALL._replace(ignored=False), 9),
}


@pytest.mark.sampled(2)
@by_row
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("weight", "input"), ("down", "up")], ids=str)
def test_equal_to_the_dense_head(row, setting, frozen):
    sizes, tokens = SETTINGS[setting]
    batch = with_factors(row.sample(sizes, 3))
    budget = None if tokens is None else int(tokens * sizes.vocab * 8)
    compare(row, batch, 1e-9, [x for x in TRAINABLE if x not in frozen], upstream=-1.7, logits_budget=budget)


class PeftHead:
    """A weight whose product is that of PEFT's `lora.Linear`: the adapter in float32, added to the rounded output."""

    def __init__(self, weight: Tensor, down: Tensor, up: Tensor) -> None:
        self.weight, self.down, self.up = weight, down, up
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    def __getitem__(self, rows: slice) -> PeftHead:
        return PeftHead(self.weight[rows], self.down, self.up[rows])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        assert function is F.linear
        x, head, bias = args
        result = F.linear(x, head.weight, bias)
        return (result + SCALE * F.linear(F.linear(x.to(head.down.dtype), head.down), head.up)).to(result.dtype)


@pytest.mark.sampled
@by_row
@pytest.mark.parametrize("chunks", [False, True], ids=["one-chunk", "chunks"])
def test_bfloat16_error_is_that_of_peft(row, chunks):
    """With adapters in float32 beside a bfloat16 head, as PEFT keeps them."""
    budget = 61 * ERROR_SIZES.vocab * 2 if chunks else None
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(3 * row.batches):
        batch = with_factors(row.sample(ERROR_SIZES, seed), seed)
        factors = {name: x.float() for name, x in batch.items() if name.endswith(("down", "up"))}
        batch = moved(batch, torch.bfloat16) | factors
        exact = evaluate(lambda b: row.oracle(with_weights(b, dense)), moved(batch, torch.float64), TRAINABLE)
        eager = evaluate(lambda b: row.oracle(with_weights(b, PeftHead)), batch, TRAINABLE)
        ours = evaluate(lambda b: row.ours(with_weights(b, adapted), logits_budget=budget), batch, TRAINABLE)
        for name in exact.keys() - {"loss"}:
            assert ours[name].dtype == batch[name].dtype
            off = [float((result[name].double() - exact[name]).norm()) for result in (ours, eager)]
            errors.setdefault(name, []).append((off[0], off[1], float(exact[name].norm())))
    for name, found in errors.items():
        of_ours, of_eager, norms = map(list, zip(*found, strict=True))
        error, bound = rms(of_ours, norms), FACTOR * rms(of_eager, norms)
        assert error <= bound, f"{name}: {error:.3e} against {bound:.3e}"


# PEFT


PEFT_WARNINGS = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def peft_model(targets: Iterable[str] = ("q_proj", "lm_head"), second: bool = False, **lora: Any) -> Any:
    """Return a tiny Llama in float64 with nonzero adapters, in training mode."""
    peft = pytest.importorskip("peft")
    zoo = pytest.importorskip("model_zoo")
    torch.manual_seed(0)
    config = {"r": 3, "lora_alpha": 6, "target_modules": list(targets), "init_lora_weights": False, **lora}
    model = peft.get_peft_model(zoo.BY_ID["llama"].build(), peft.LoraConfig(**config))
    if second:
        model.add_adapter("other", peft.LoraConfig(**{**config, "r": 2, "lora_alpha": 5}))
        model.base_model.set_adapter(["default", "other"])
    return model.double().train()


def labelled(sequences: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 60, (sequences, 7), generator=generator)
    labels = ids.clone()
    labels[:, :2] = labels[1, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def next_tokens(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def sft(head: Any, input: Any, budget: int | None) -> Tensor:
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=budget)
    return loss(head.weight, input.hidden_states, input.target, head.bias)


def sft_on_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), next_tokens(batch["labels"]).flatten())


def logps_of(head: Any, input: Any) -> Tensor:
    logps = linear_token_stats(head.weight, input.hidden_states, input.target, head.bias).logps
    assert logps is not None
    return logps.sum(1)


def dpo(head: Any, input: Any, budget: int | None, ref_logps: Tensor) -> Tensor:
    loss = LigerFusedLinearDPOLoss(beta=0.3, logits_budget=budget)
    return loss(head.weight, input.hidden_states, input.target, head.bias, ref_logps=ref_logps)[0]


def dpo_on_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    def scores() -> Tensor:
        target = next_tokens(batch["labels"])
        logps = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
        return (logps.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != -100)).sum(1)

    with torch.no_grad(), model.disable_adapter():
        ref_logps = scores()
    chosen, rejected = (scores() - ref_logps).chunk(2)
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean()


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(model: Any, batch: dict[str, Tensor], fused: Any, eager: Any) -> None:
    results = []
    for run in (eager, fused):
        torch.manual_seed(5)  # one dropout mask for both
        loss = run(model, batch)
        results.append((loss.detach(), gradients_of(model, loss)))
    (expected, their_gradients), (found, our_gradients) = results
    assert relative_error(found, expected) < 1e-9
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        assert relative_error(our_gradients[name], gradient) < 1e-9, name


ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.4},
    "two adapters": {"second": True},
    "two adapters, dropout": {"second": True, "lora_dropout": 0.3},
    "bias": {"lora_bias": True},
    "only the head": {"targets": ["lm_head"]},
    "trained embeddings": {"modules_to_save": ["embed_tokens"]},
}


@PEFT_WARNINGS
@pytest.mark.parametrize("budget", [None, 3 * 8 * 64], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_sft(kind, budget):
    from liger_chunked import attach_head

    model, batch = peft_model(**ADAPTERS[kind]), labelled()
    attach_head(model)
    head_fn = functools.partial(sft, budget=budget)
    assert_same_training(model, batch, lambda model, batch: model(**batch, head_fn=head_fn), sft_on_logits)


@PEFT_WARNINGS
@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_dpo_with_a_disabled_adapter_as_reference(kind):
    from liger_chunked import attach_head

    def fused(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            ref_logps = model(**batch, head_fn=logps_of)
        return model(**batch, head_fn=functools.partial(dpo, budget=None, ref_logps=ref_logps))

    model, batch = peft_model(**ADAPTERS[kind]), labelled()
    attach_head(model)
    assert_same_training(model, batch, fused, dpo_on_logits)


@PEFT_WARNINGS
def test_a_patched_model_follows_the_adapters_state():
    """Switched off, merged, unmerged, replaced; in evaluation without dropout."""
    from liger_chunked import apply_liger_kernel

    model, batch = peft_model(second=True, lora_dropout=0.3), labelled()
    apply_liger_kernel(model)
    losses = []

    def check(mode: str = "eval") -> None:
        getattr(model, mode)()
        torch.manual_seed(3)
        with torch.no_grad():
            found = model(**batch, skip_logits=True)
            assert found.logits is None
            torch.manual_seed(3)
            expected = sft_on_logits(model, batch)
        assert relative_error(found.loss, expected) < 1e-9
        losses.append(float(expected))

    check("train")
    check()
    for names in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(names)
        check()
    both = losses[-1]
    with model.disable_adapter():
        check()
    assert losses[1] == both and len(set(losses)) == 5
    model.merge_adapter()
    assert type(model.get_base_model().lm_head.base_layer) is torch.nn.Linear
    check()
    assert abs(losses[-1] - both) < 1e-9
    with model.disable_adapter():  # PEFT's forward unmerges
        check()
    assert losses[-1] == pytest.approx(losses[5], abs=1e-9) and not model.get_base_model().lm_head.merged
