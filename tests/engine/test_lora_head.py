"""Heads with a low-rank adapter equal heads whose weight contains the adapter, in every loss and in PEFT's models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import on_paths
from spies import flop_counter, memory_beside
from table import (
    ROWS,
    SMALL,
    Batch,
    Row,
    Sizes,
    assert_rounds_as_eager_code,
    assert_same,
    evaluate,
    live_fraction,
    moved,
    n_valid,
    relative_error,
)
from test_values import ERROR_SIZES
from torch import Tensor

import liger_chunked as lc

by_path = pytest.mark.parametrize("row", on_paths())
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


def adapted(weight: Tensor, down: Tensor, up: Tensor) -> lc.AdaptedWeight:
    # As PEFT does: `down` may be in another dtype than the hidden states.
    return lc.AdaptedWeight(weight, up, lambda x: SCALE * F.linear(x.to(down.dtype), down))


def dense(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return weight + SCALE * up @ down


def compare(
    row: Row, batch: Batch, bound: float, trainable: Iterable[str] = TRAINABLE, upstream: float = 1.0, **options: Any
) -> None:
    expected = evaluate(lambda b: row.oracle(with_weights(b, dense)), batch, trainable, upstream)
    found = evaluate(lambda b: row.ours(with_weights(b, adapted), **options), batch, trainable, upstream)
    assert expected.keys() == found.keys()
    assert_same(found, expected, bound)


SETTINGS = {
    "automatic": (SMALL, None),
    "chunks": (SMALL, 5),
    "one token": (SMALL, 1),
    "slices": (SMALL._replace(vocab=2503), 1.5),
    "no ignored tokens": (SMALL._replace(ignored=False), 9),
}


@pytest.mark.few(2)
@pytest.mark.sampled(4)
@by_path
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("weight", "input"), ("down", "up")], ids=str)
def test_equal_to_the_dense_head(row, setting, frozen, device):
    sizes, tokens = SETTINGS[setting]
    batch = moved(with_factors(row.sample(sizes, 3)), device=device)
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


# Not losses that clip: a token that rounding moves across the threshold dominates either error.
CLIP = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo")


@pytest.mark.few(4, "cpu-one-chunk-ce")
@pytest.mark.sampled
@pytest.mark.parametrize("row", on_paths(row for row in ROWS if not row.id.startswith(CLIP)))
@pytest.mark.parametrize("way", ["one-chunk", "chunks", "autocast"])
def test_bfloat16_error_is_that_of_peft(row, way, device):
    """With adapters in float32 beside a bfloat16 head, as PEFT keeps them, or all in float32 under autocast."""
    budget = 61 * ERROR_SIZES.vocab * 2 if way == "chunks" else None

    def batch_of(seed: int) -> tuple[Batch, Batch, Batch]:
        batch = moved(with_factors(row.sample(ERROR_SIZES, seed), seed), torch.float32, device)
        if way != "autocast":
            batch = moved(batch, torch.bfloat16) | {k: x for k, x in batch.items() if k.endswith(("down", "up"))}
        exact = evaluate(lambda b: row.oracle(with_weights(b, dense)), moved(batch, torch.float64), TRAINABLE)
        with torch.autocast(device, torch.bfloat16, enabled=way == "autocast"):
            eager = evaluate(lambda b: row.oracle(with_weights(b, PeftHead)), batch, TRAINABLE)
            ours = evaluate(lambda b: row.ours(with_weights(b, adapted), logits_budget=budget), batch, TRAINABLE)
        return ours, eager, exact

    assert_rounds_as_eager_code(map(batch_of, range(4 * row.batches)))


# PEFT


PEFT_WARNINGS = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def tiny_llama(**config: Any) -> Any:
    """Return a tiny Llama, with these changes to its config and the same weights in each call."""
    tiny = pytest.importorskip("model_zoo").BY_ID["llama"]
    return dataclasses.replace(tiny, config={**tiny.config, **config}).build()


def peft_model(
    targets: Iterable[str] = ("q_proj", "lm_head"), second: str = "", config: Any = None, **lora: Any
) -> Any:
    """Return a tiny Llama in float64 with nonzero adapters, in training mode.

    Args:
        second: "added": there is another adapter, "used": both are in use.
        config: changes to the model's config.
        lora: the arguments of `LoraConfig`.
    """
    peft = pytest.importorskip("peft")
    base = tiny_llama(**config or {})
    torch.manual_seed(0)
    lora = {"r": 3, "lora_alpha": 6, "target_modules": list(targets), "init_lora_weights": False, **lora}
    model = peft.get_peft_model(base, peft.LoraConfig(**lora))
    if second:
        model.add_adapter("other", peft.LoraConfig(**{**lora, "r": 2, "lora_alpha": 5}))
    if second == "used":
        model.base_model.set_adapter(["default", "other"])
    model.double().train()
    with torch.no_grad():  # PEFT's copies of modules and rows begin as the base model's
        for name, p in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens_delta" in name:
                p.add_(0.1 * torch.randn_like(p))
    return model


def labelled(sequences: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 60, (sequences, 7), generator=generator)
    labels = ids.clone()
    labels[:, :2] = labels[1, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def next_tokens(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def sft(head: Any, input: Any, budget: int | None) -> Tensor:
    loss = lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget)
    return loss(head.weight, input.hidden_states, input.target, head.bias)


def sft_on_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), next_tokens(batch["labels"]).flatten())


def logps_of(head: Any, input: Any) -> Tensor:
    logps = lc.linear_token_stats(head.weight, input.hidden_states, input.target, head.bias).logps
    assert logps is not None
    return logps


def logps_on_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return log-probabilities (B, T), 0 where ignored."""
    target = next_tokens(batch["labels"])
    logps = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    return logps.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != -100)


def dpo(head: Any, input: Any, budget: int | None, ref_logps: Tensor) -> Tensor:
    loss = lc.LigerFusedLinearDPOLoss(beta=0.3, logits_budget=budget)
    return loss(head.weight, input.hidden_states, input.target, head.bias, ref_logps=ref_logps)[0]


def dpo_of(logps: Tensor, ref_logps: Tensor) -> Tensor:
    chosen, rejected = (logps - ref_logps).sum(1).chunk(2)
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean()


def dpo_on_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        ref_logps = logps_on_logits(model, batch)
    return dpo_of(logps_on_logits(model, batch), ref_logps)


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
    assert_same(our_gradients, their_gradients, 1e-9)


class Halved(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() / 2


def parametrized(part: str) -> Callable[[Any], None]:
    """The weight of an adapter as a function of a parameter, which gets the gradient."""

    def change(model: Any) -> None:
        adapter = getattr(model.get_base_model().lm_head, part).default
        torch.nn.utils.parametrize.register_parametrization(adapter, "weight", Halved())

    return change


def hooked(kind: str, part: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_base_model().lm_head.get_submodule(part)
        if kind == "pre":
            module.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        else:
            module.register_forward_hook(lambda module, args, output: 2 * output)

    return change


def normed(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.get_base_model().lm_head.base_layer)


# The adapters' options, and what else the model has.
ADAPTERS: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None]] = {
    "lora": ({}, None),
    "dropout": ({"lora_dropout": 0.4}, None),
    "two adapters, dropout": ({"second": "used", "lora_dropout": 0.3}, None),
    "bias": ({"lora_bias": True}, None),
    "parametrized lora_A": ({}, parametrized("lora_A")),
    "parametrized lora_B": ({"second": "used"}, parametrized("lora_B")),
    "parametrized base layer": ({}, normed),
    "pre-hook": ({}, hooked("pre", "")),
    "pre-hook of lora_A": ({}, hooked("pre", "lora_A.default")),
    "hook of lora_A": ({}, hooked("post", "lora_A.default")),
}


def attached(kind: str) -> Any:
    from liger_chunked import attach_head

    lora, change = ADAPTERS[kind]
    model = peft_model(**lora)
    attach_head(model)
    if change is not None:
        change(model)
    return model


BUDGETS = pytest.mark.parametrize("budget", [None, 3 * 8 * 64], ids=["one-chunk", "chunks"])


@pytest.mark.few(3)
@PEFT_WARNINGS
@BUDGETS
@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_sft(kind, budget):
    head_fn = functools.partial(sft, budget=budget)
    assert_same_training(
        attached(kind), labelled(), lambda model, batch: model(**batch, head_fn=head_fn), sft_on_logits
    )


@pytest.mark.few(1)
@PEFT_WARNINGS
@BUDGETS
@pytest.mark.parametrize("kind", ["lora", "two adapters, dropout"])
def test_peft_dpo_with_a_disabled_adapter_as_reference(kind, budget):
    def fused(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            ref_logps = model(**batch, head_fn=logps_of)
        return model(**batch, head_fn=functools.partial(dpo, budget=budget, ref_logps=ref_logps))

    assert_same_training(attached(kind), labelled(), fused, dpo_on_logits)


class Rounding(torch.nn.Linear):
    """Has its own product, as the Linears of bitsandbytes and FP8."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).round()


MIXED = {"adapter_names": ["default", "other", "default", "__base__"]}
UNSUPPORTED = {
    "dora": ({"use_dora": True}, {}, "adapter 'default' of the kind DoraLinearVariant"),
    "alora": ({"alora_invocation_tokens": [3, 4]}, {}, "adapter 'default' of the kind ALoraLinearVariant"),
    "quantized lora_B": ({}, {}, "computed by .*Rounding.* a fused loss needs a weight in floating point"),
    "adapters that differ in a batch": (
        {"second": "used"}, MIXED, "head_fn takes .*: a hook or the forward .*, add at",
    ),
}  # fmt: skip


@PEFT_WARNINGS
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_heads_are_refused(case):
    from liger_chunked import attach_head

    lora, arguments, message = UNSUPPORTED[case]
    model = peft_model(**lora).train(not arguments)
    if "lora_B" in case:
        up = model.get_base_model().lm_head.lora_B
        up["default"] = Rounding(up.default.in_features, up.default.out_features, bias=False).double()
    with pytest.raises(ValueError, match=message):
        attach_head(model)
        model(**labelled(), **arguments, head_fn=logps_of)


@PEFT_WARNINGS
@BUDGETS
def test_adapters_merged_before_the_backward(budget):
    """PEFT writes to `weight.data`, which has no version. Unmerged again, the gradient is that of the forward."""
    model, batch = attached("lora"), labelled()
    head_fn = functools.partial(sft, budget=budget)
    expected = gradients_of(model, model(**batch, head_fn=head_fn))
    model.zero_grad()  # the refused backward reaches some parameters
    found = model(**batch, head_fn=head_fn)
    lm_head = model.get_base_model().lm_head
    lm_head.merge()
    with pytest.raises(
        RuntimeError, match=r"adapters of the head .* were merged or unmerged after the model called it"
    ):
        found.backward(retain_graph=True)
    lm_head.unmerge()
    for name, gradient in gradients_of(model, found).items():
        # Merging and unmerging rounds the weight.
        assert relative_error(gradient, expected[name]) < 1e-9, name


@PEFT_WARNINGS
@pytest.mark.parametrize(
    ("dtype", "adapter", "largest", "scaling"),
    [
        ("bfloat16", "float32", None, 2.0),
        ("bfloat16", "bfloat16", None, 2.0),
        ("float16", "float32", 0.05, 2.0),
        ("float16", "float32", 2.0, 2.0),
        ("float16", "float32", 2e5, 2.0),
        ("float16", "float16", 2.0, 2.0),
        ("float16", "float16", 5e4, 4.0),
    ],
)
def test_peft_in_16_bits(dtype, adapter, largest, scaling):
    """Errors at most 1.1 times those of PEFT, also where `largest`, an input of `lora_B`, is beyond float16.

    PEFT's float32 adapters have no overflow. Its float16 adapters overflow in `lora_A(x)`, not in the scaling.
    """
    from liger_chunked import attach_head

    of_model, of_adapter = getattr(torch, dtype), getattr(torch, adapter)

    def batch_of(seed: int) -> tuple[Batch, Batch, Batch]:
        model, batch = peft_model(targets=["lm_head"], lora_alpha=3 * scaling), labelled(16)
        lm_head = model.get_base_model().lm_head
        torch.manual_seed(seed)
        seen = []
        hook = lm_head.lora_A.default.register_forward_hook(lambda *call, to=seen: to.append(call[-1]))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.to(of_model)).add_(0.05 * torch.randn_like(p)).copy_(p.to(of_model))
            if largest is not None:
                model(batch["input_ids"])
                factor = largest / float(seen[0].abs().max())
                lm_head.lora_A.default.weight.mul_(factor)
                lm_head.lora_B.default.weight.div_(factor * scaling)
                for p in lm_head.parameters():
                    p.copy_(p.to(of_adapter))
        hook.remove()
        exact = gradients_of(model, sft_on_logits(model, batch))
        for name, p in model.named_parameters():
            p.data = p.data.to(of_adapter if "lora_" in name else of_model)
        # One set of hidden states, whose rounding is not the head's.
        eager = gradients_of(model, sft_on_logits(model, batch).float())
        attach_head(model)
        return gradients_of(model, model(**batch, head_fn=functools.partial(sft, budget=None))), eager, exact

    assert_rounds_as_eager_code(map(batch_of, range(8)))


# Cost

COST = Sizes(sequences=6, length=9, hidden=16, vocab=2503, ref_hidden=24)


def flops(row: Row, batch: dict[str, Any], leaves: dict[str, Tensor], make: Any, budget: int | None) -> int:
    with flop_counter() as counter:
        loss = row.ours(make({**batch, **leaves}), logits_budget=budget)
        if leaves:
            loss.backward()
    return counter.get_total_flops()


def policy_adapter(batch: Batch) -> dict[str, Any]:
    """Give an adapter to the policy alone."""
    batch = {name: x for name, x in batch.items() if name in ("down", "up") or not name.endswith(("_down", "_up"))}
    return with_weights(batch, adapted)


@pytest.mark.few(2, "chunks-input-stats-kept-products")
@pytest.mark.sampled
@pytest.mark.parametrize("row", on_paths(row for row in ROWS if row.products and "mismatched" not in row.id))
@pytest.mark.parametrize("frozen_input", [False, True], ids=["input", "frozen-input"])
@pytest.mark.parametrize("tokens", [None, 18], ids=["one-chunk", "chunks"])
def test_products_of_a_frozen_weight(row, frozen_input, tokens):
    """Two products with the weight, or one without a gradient for the input, and the products of rank r."""
    if tokens is not None and (not row.fused or row.scope == "batch"):
        tokens = None
    budget = None if tokens is None else tokens * 8 * COST.vocab
    batch = with_factors(row.sample(COST, 0))
    n, total = n_valid(batch), batch["target"].numel()
    trainable = [x for x in ("input", "down", "up") if not (frozen_input and x == "input")]
    leaves = {name: batch[name].clone().requires_grad_() for name in trainable}
    plain = {name: x for name, x in batch.items() if not name.endswith(("down", "up"))}
    products = {name: x for name, x in leaves.items() if name == "input"}
    without = flops(row, plain, products, lambda b: b, budget)
    found = flops(row, batch, leaves, policy_adapter, budget)
    # The adapter changes which rows have a gradient.
    live = live_fraction(row, {**plain, "weight": plain["weight"] + batch["up"] @ batch["down"]})
    if not frozen_input:
        without += (live - live_fraction(row, plain)) * 2 * n * COST.hidden * COST.vocab
    of_up = (1 + 2 * live) * 2 * n * RANK * COST.vocab  # logits, and du and dup of rows with a gradient
    of_down = (2 + (not frozen_input)) * 2 * total * RANK * COST.hidden  # u, its gradient, and dX
    assert found == pytest.approx(without + of_up + of_down, rel=1e-12)


@pytest.mark.few(2, "bf16-squared-error")
@pytest.mark.ordinary_memory
@pytest.mark.sampled
@by_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_frozen_weight_has_no_copy(row, dtype):
    sizes = Sizes(sequences=8, length=32, hidden=32, vocab=1009, ref_hidden=32, ignored=False)
    batch = with_factors(row.sample(sizes, 0))
    batch = moved(batch, dtype) | {name: x.float() for name, x in batch.items() if name.endswith(("down", "up"))}
    leaves = {name: batch[name].clone().requires_grad_() for name in ("input", "bias", "down", "up") if name in batch}
    budget = 75 * sizes.vocab * dtype.itemsize
    with memory_beside(*batch.values(), *leaves.values()) as memory:
        row.ours(with_weights({**batch, **leaves}, adapted), logits_budget=budget).backward()
    assert memory.largest <= max(budget, sizes.vocab * 3 * RANK * 4)
    n = n_valid(batch)
    of_adapter = sizes.vocab * RANK * 3 * (2 * 4 * 4 + 2 * 2)  # up, its parts, their gradients, of two heads
    per_token = 40 * n * 8 + 20 * sizes.vocab * 4
    assert memory.peak <= budget + 12 * n * sizes.hidden * 4 + of_adapter + per_token + 12 * (4 << 12)
    if dtype == torch.float32:  # with 16 bits, the copies above are larger
        assert memory.peak < budget + sizes.vocab * sizes.hidden * 4 * 3


def test_float32_adapters_of_a_float16_head_may_have_gradients_beyond_float16(device):
    """The rest of an adapter's rounding has no gradient of its own, which would pass through float16."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (97, 16), "input": (24, 16), "down": (RANK, 16), "up": (97, RANK)}
    given = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    given = {**given, "down": given["down"].float() / 20, "up": given["up"].float() * 20}
    target = torch.randint(97, (24,), generator=generator).to(device)

    def run(batch: Batch) -> list[Tensor]:
        leaves = {name: x.to(device, copy=True).requires_grad_() for name, x in batch.items()}
        weight = adapted(leaves["weight"], leaves["down"], leaves["up"])
        loss = lc.LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, leaves["input"], target)
        (loss * 2**16).backward()
        return [leaves["down"].grad.double(), leaves["up"].grad.double()]

    expected = run(moved(given, torch.float64))
    assert expected[0].abs().max() > torch.finfo(torch.float16).max
    for found, exact in zip(run(given), expected, strict=True):
        assert relative_error(found, exact) < 3e-3


# Calls


def example(**changes: Any) -> tuple[lc.AdaptedWeight, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    parts = {
        "weight": torch.randn(11, 4, generator=generator),
        "up": torch.randn(11, 2, generator=generator),
        "down": lambda x: x[..., :2],
    }
    input = torch.randn(2, 3, 4, generator=generator)
    return lc.AdaptedWeight(**parts | changes), input, torch.tensor([[1, 2, 3], [4, 5, -100]])


class Tagged(Tensor):
    pass


def test_down_runs_once_with_the_callers_modes():
    calls = []

    def down(x: Tensor) -> Tensor:
        calls.append((tuple(x.shape), torch.is_grad_enabled()))
        return x[..., :2]

    weight, input, target = example(down=down)
    budget = {"logits_budget": 2 * 11 * 4}
    lc.LigerFusedLinearDPOLoss(**budget)(weight, input, target, ref_input=2 * input, ref_weight=weight)
    assert calls == [((2, 3, 4), False), ((2, 3, 4), True)]
    lc.LigerFusedLinearJSDLoss(**budget)(weight, input, weight, input)
    assert [grad for _, grad in calls[2:]] == [False, True]
    tagged = example(up=example()[0].up.as_subclass(Tagged))[0]
    assert lc.LigerFusedLinearCrossEntropyLoss(tagged, input, target) == lc.LigerFusedLinearCrossEntropyLoss(
        weight, input, target
    )


REFUSED = [
    ("up", [1.0], TypeError, r"^weight\.up must be a floating-point tensor, got list"),
    ("up", torch.ones(11, 2).long(), TypeError, r"weight\.up must be a floating-point tensor, got \(11, 2\)"),
    ("up", torch.ones(10, 2), ValueError, r"weight\.up must be \(V, r\).*weight \(11, 4\).*\(10, 2\)"),
    ("up", torch.ones(11, 0), ValueError, r"weight\.up must be \(V, r\).*got \(11, 0\)"),
    ("up", torch.ones(11), ValueError, r"weight\.up must be \(V, r\)"),
    ("up", torch.ones(11, 2, device="meta"), ValueError, r"weight\.up is on meta, weight\.weight on"),
    ("up", torch.ones(11, 2).to_sparse(), TypeError, r"weight\.up must be a plain dense torch\.Tensor"),
    ("weight", None, TypeError, r"weight\.weight must be a floating-point tensor, got NoneType"),
    ("weight", torch.ones(11), ValueError, r"weight\.weight must be \(V, H\)"),
    ("weight", torch.ones(11, 5), ValueError, r"input and weight\.weight must agree on the hidden"),
    ("weight", torch.ones(11, 4).to_sparse(), TypeError, r"weight\.weight must be a plain dense"),
    ("down", torch.ones(2, 4), TypeError, r"weight\.down must be a function of hidden states"),
    ("down", lambda x: None, TypeError, r"weight\.down must return a floating-point.*None"),
    ("down", lambda x: x[..., :3], ValueError, r"weight\.down must return \(2, 3, 2\).*got \(2, 3, 3\)"),
    ("down", lambda x: x[0, :, :2], ValueError, r"weight\.down must return \(2, 3, 2\)"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("part", "value", "kind", "message"), REFUSED, ids=[f"{part}-{i}" for i, (part, *_) in enumerate(REFUSED)]
)
def test_refused(part, value, kind, message):
    weight, input, target = example(**{part: value})
    for call in (lc.LigerFusedLinearCrossEntropyLoss, lc.linear_token_stats):
        with pytest.raises(kind, match=message):
            call(weight, input, target)
    if part == "up":
        with pytest.raises(kind, match=message.removeprefix("^").replace("weight\\.", "ref_weight\\.")):
            lc.LigerFusedLinearDPOLoss(example()[0], input, target, ref_input=input, ref_weight=weight)
