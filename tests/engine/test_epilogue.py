"""Test steps with the fused epilogue: values, gradients, and when that path is used."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import eager
import pytest
import torch
from spies import Memory, noted
from table import Batch, evaluate, moved, relative_error
from torch import Tensor

import liger_chunked as lc
from liger_chunked import memory as memory_of_losses
from liger_chunked.engine import choose, cutting, epilogue, rows, sink
from liger_chunked.engine.epilogue import EpilogueSource
from liger_chunked.engine.rows import all_rows, select_rows
from liger_chunked.kernels import add_rows, backend, projection, target_rows
from liger_chunked.kernels.survey import Found, find_tokens
from liger_chunked.types import AdaptedWeight, LossHead

OUTPUTS = ("logps", "lse", "entropy", "mean_logits")
# As in test_values.py. Triton's interpreter truncates to bfloat16, which doubles the error, and doubles it again where
# nearly all exponentials are 0 or 1.
FACTOR = 1.1 * (8**0.5 if backend.INTERPRETED else 1)
HIDDEN, VOCAB = 72, 603  # ragged last tiles in both, and buffer rows that need padding
BUDGET = 13 * VOCAB * 2  # 13 tokens per chunk
SMALLEST = epilogue.SMALLEST


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small chunks use the fused epilogue too."""
    monkeypatch.setattr(epilogue, "SMALLEST", 0)


@pytest.fixture
def passes(by_epilogue: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of each chunk that uses the fused epilogue."""
    return noted(monkeypatch, EpilogueSource, "statistics", lambda source, tokens: tokens.x.shape[0])


def tokens(seed: int = 0, n: int = 36, vocab: int = VOCAB) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    weight = 2 * HIDDEN**-0.5 * torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    input = torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64)
    return {"weight": weight, "input": input, "target": torch.randint(vocab, (n,), generator=generator)}


def ignored(batch: Batch) -> Batch:
    batch["target"][::5] = -100
    return batch


def repeated(batch: Batch) -> Batch:
    batch["target"][:] = 7
    return batch


def alternating(batch: Batch) -> Batch:
    batch["target"][::2], batch["target"][1::2] = 600, 7
    return batch


def certain(batch: Batch) -> Batch:
    """Make every target's probability close to 1."""
    rows = batch["weight"][batch["target"]]
    batch["input"] = 0.1 * batch["input"] + 16 * rows / rows.norm(dim=1, keepdim=True)
    return batch


def lost(batch: Batch) -> Batch:
    """Make logits hundreds above those of the targets."""
    batch["weight"][[1, 301, 601]] *= 100
    batch["target"] = batch["target"] // 2 * 2
    return batch


BATCHES = {"plain": lambda batch: batch} | {f.__name__: f for f in (ignored, repeated, alternating, certain, lost)}


def assert_error_is_that_of_eager_code(
    ours, oracle, *batches: Batch, device: str, dtype: torch.dtype = torch.bfloat16, **kwargs
) -> Batch:
    """Compare root mean squares over several batches: one batch's error depends on its few largest weights.

    Returns our loss and gradients of the last batch.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        batch = moved(batch, dtype, device)
        exact = evaluate(oracle, moved(batch, torch.float64), **kwargs)
        eager, value = evaluate(oracle, batch, **kwargs), evaluate(ours, batch, **kwargs)
        assert value.keys() == exact.keys()
        for name in exact:
            both = tuple(relative_error(x[name], exact[name]) for x in (value, eager))
            errors.setdefault(name, []).append(both)
    for name, of_batches in errors.items():
        # A loss is a single error: allow one unit in the last place of its terms.
        floor = 2**-8 / 3 if name == "loss" else 0.0
        error, bound = (math.hypot(*each) / len(each) ** 0.5 for each in zip(*of_batches, strict=True))
        assert error <= max(FACTOR * bound, floor), f"{name}: {error:.2e} against {bound:.2e}"
    return value


def cross_entropy(batch: Batch, settings: dict, ours: bool) -> Tensor:
    if not ours:
        return eager.cross_entropy(**batch, **settings)
    return lc.LigerFusedLinearCrossEntropyLoss(**settings, logits_budget=BUDGET)(**batch)


def compare_cross_entropy(batch: Batch, device: str, settings: dict | None = None, **kwargs) -> None:
    ours, oracle = (partial(cross_entropy, settings=settings or {}, ours=which) for which in (True, False))
    assert_error_is_that_of_eager_code(ours, oracle, batch, device=device, **kwargs)


@pytest.mark.few(5)
@pytest.mark.triton
@pytest.mark.parametrize("kind", BATCHES)
def test_cross_entropy(kind, device, passes):
    compare_cross_entropy(BATCHES[kind](tokens()), device)
    assert len(passes) >= 3 and max(passes) == 13


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 1.7, "logit_scale": -0.6, "lse_square_scale": 1e-2}, id="transform-and-z-loss"),
        pytest.param({"focal_gamma": 2.0, "reduction": "sum"}, id="focal"),
    ],
)
def test_settings(settings, device, passes):
    compare_cross_entropy(tokens(1), device, settings)
    assert passes


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("trainable", ["weight", "input"])
def test_frozen(trainable, device, passes):
    compare_cross_entropy(tokens(2), device, trainable=(trainable,))
    assert passes


@pytest.mark.triton
def test_strided_inputs(device, passes):
    batch = moved(tokens(3), torch.bfloat16, device)
    apart = {**batch, "input": torch.stack([batch["input"]] * 2, 1)[:, 1]}
    assert apart["input"].stride(0) == 2 * HIDDEN
    loss = lc.LigerFusedLinearCrossEntropyLoss(logits_budget=BUDGET)
    together = evaluate(lambda batch: loss(**batch), batch)
    weight, input = batch["weight"].requires_grad_(), apart["input"].requires_grad_()
    value = loss(weight, input, batch["target"])
    gradients = dict(zip(("weight", "input"), torch.autograd.grad(value, (weight, input)), strict=True))
    for name, x in {"loss": value.detach(), **gradients}.items():
        assert torch.equal(x, together[name]), name
    assert passes


def sequences(seed: int, n: int = 4, length: int = 10) -> Batch:
    batch = ignored(tokens(seed, n * length))
    return {**batch, **{name: batch[name].unflatten(0, (n, length)) for name in ("input", "target")}}


class Shifted(lc.LigerFusedLinearPreferenceBase):
    """Uses a statistic that preference losses only report."""

    def preference_loss(self, pairs):
        return pairs.token_stats.mean_logits.sum((1, 2)) - pairs.token_logps.sum((1, 2))


@pytest.mark.triton
def test_a_gradient_must_be_declared(device, passes):
    def oracle(batch):
        stats = eager.token_stats(**batch, outputs=("logps", "mean_logits"))
        return (stats["mean_logits"] - stats["logps"]).sum() / 2

    loss = Shifted(logits_budget=20 * VOCAB * 2, use_ref_model=False)
    batch = moved(sequences(7), torch.bfloat16, device)
    batch["weight"].requires_grad_()
    with pytest.raises(
        ValueError, match=r"reaches mean_logits, .*: add it to token_outputs, as in token_outputs = \('mean_logits',\)"
    ):
        loss(**batch)
    passes.clear()
    loss.token_outputs = ("mean_logits",)
    assert_error_is_that_of_eager_code(lambda batch: loss(**batch)[0], oracle, sequences(7), device=device)
    assert not passes


# Which steps


def served(change: dict) -> bool:
    arguments = {
        "head": LossHead(torch.zeros(16, 8, dtype=torch.bfloat16)),
        "options": lc.LogitOptions(temperature=0.7),
        "class_weight": None,
        "outputs": OUTPUTS,
        "differentiates": ("logps", "lse"),
        "chunks": [cutting.tiles(3, 16, 64)] * 2,
    }
    arguments |= change
    head, options, differentiates = (arguments[name] for name in ("head", "options", "differentiates"))
    dtype = arguments.get("dtype", head.weight.dtype)
    computed = epilogue.can_hold(dtype) and epilogue.computes(
        head, dtype, options, arguments["class_weight"], arguments["outputs"]
    )
    chunks = arguments["chunks"]
    return computed and epilogue.serves(head.weight.shape[1], options, differentiates, chunks)


REFUSED = {
    "float32": {"head": LossHead(torch.zeros(16, 8))},
    "float16": {"head": LossHead(torch.zeros(16, 8, dtype=torch.float16))},
    "adapter": {
        "head": LossHead(AdaptedWeight(torch.zeros(16, 8).bfloat16(), torch.zeros(16, 2).bfloat16(), torch.relu))
    },
    "bias": {"head": LossHead(torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.bfloat16))},
    "wide": {"head": LossHead(torch.zeros(16, 3080, dtype=torch.bfloat16))},
    "odd-width": {"head": LossHead(torch.zeros(16, 12, dtype=torch.bfloat16))},
    "transposed": {"head": LossHead(torch.zeros(8, 16, dtype=torch.bfloat16).t())},
    "unaligned": {"head": LossHead(torch.zeros(16 * 8 + 1, dtype=torch.bfloat16)[1:].view(16, 8))},
    "softcap": {"options": lc.LogitOptions(softcap=30.0)},
    "constant-logits": {"options": lc.LogitOptions(logit_scale=0.0)},
    "class-weight": {"class_weight": torch.ones(16)},
    "argmax": {"outputs": ("logps", "argmax")},
    "entropy-in-the-loss": {"differentiates": ("logps", "entropy")},
    "slices": {"chunks": [cutting.tiles(3, 16, 8)]},
}


def test_serves_what_a_cast_aligns():
    """Autocast makes an aligned copy of a float32 weight, at any offset in a flat parameter."""
    weight = torch.zeros(16 * 8 + 1)[1:].view(16, 8)
    assert served({"head": LossHead(weight), "dtype": torch.bfloat16})
    assert not served({"head": LossHead(weight.t()), "dtype": torch.bfloat16})


@pytest.mark.few(6)
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_serves_not(change):
    assert served({}) and served({"head": LossHead(torch.zeros(16, 3072, dtype=torch.bfloat16))})
    assert served(REFUSED["wide"] | {"options": lc.LogitOptions(logits_dtype=torch.float32)})
    assert not served(change)


QWEN = {"vocab_size": 151936, "hidden_size": 896, "shape": (4, 2048)}
AUTOMATIC = {
    "two chunks": ({}, 4096),
    "one too wide": ({"hidden_size": 2056}, 8192),
    "the smallest chunks": ({"hidden_size": 1536, "shape": (7168,)}, 3584),
    "a chunk that is smaller, the first in whole tiles": ({"hidden_size": 1536, "shape": (7296,)}, 3840),
    "a chunk of one token": ({"loss": lc.LigerFusedLinearKTOLoss(), "shape": (2, 4096), "valid": [4096, 1]}, 4097),
    "small work": ({"vocab_size": 32000}, 8192),
    "a device without the tiles": ({"wide_tiles": False}, 8192),
    "logits with a cap": ({"loss": lc.LigerFusedLinearCrossEntropyLoss(softcap=30.0)}, 8192),
    "a bias": ({"bias": True}, 8192),
    "pairs": ({"loss": lc.LigerFusedLinearDPOLoss()}, 4096),
    "a pair that is not cut": ({"loss": lc.LigerFusedLinearDPOLoss(), "shape": (2, 4096)}, 8192),
}


@pytest.mark.few(5, "a device without the tiles", "pairs")
@pytest.mark.parametrize(("change", "tokens"), AUTOMATIC.values(), ids=AUTOMATIC)
def test_the_automatic_budget(change, tokens, monkeypatch):
    """The fused epilogue takes two chunks, where the step could be one chunk of logits."""
    monkeypatch.setattr(epilogue, "SMALLEST", SMALLEST)
    given = {"loss": lc.LigerFusedLinearCrossEntropyLoss()} | QWEN | change
    loss, shape, vocab_size = given["loss"], given["shape"], given["vocab_size"]
    monkeypatch.setattr(choose, "has_wide_tiles", lambda device: given.get("wide_tiles", True))
    target = torch.zeros(shape, dtype=torch.int64)
    for sequence, n in enumerate(given.get("valid", ())):
        target[sequence, n:] = -100
    bias = torch.empty(vocab_size, dtype=torch.bfloat16) if given.get("bias") else None
    plan = choose.for_loss(
        LossHead(torch.empty(vocab_size, given["hidden_size"], dtype=torch.bfloat16), bias),
        select_rows(target, loss._group, -100, vocab_size),
        torch.bfloat16,
        outputs=loss._outputs,
        differentiates=loss._differentiates,
        options=lc.LogitOptions(softcap=loss.options.softcap, logits_budget=given.get("logits_budget")),
        whole_batch=loss._whole_batch,
    )
    assert plan.largest_tile == tokens * vocab_size


@pytest.mark.parametrize("transposed", [False, True])
def test_a_head_that_the_epilogue_cannot_read_is_one_chunk(transposed, monkeypatch):
    monkeypatch.setattr(choose, "has_wide_tiles", lambda device: True)
    monkeypatch.setattr(epilogue, "SMALLEST", SMALLEST)
    weight = torch.empty(896, 151936, dtype=torch.bfloat16, device="meta").t()
    plan = choose.for_loss(
        LossHead(weight if transposed else weight.contiguous()),
        all_rows((8192,)),
        torch.bfloat16,
        outputs=("logps",),
        differentiates=("logps",),
        options=lc.LogitOptions(),
        whole_batch=False,
    )
    assert len(plan.chunks) == (1 if transposed else 2)


@pytest.mark.parametrize(
    ("capability", "setting"),
    [
        pytest.param((8, 0), (), id="Ampere"),
        pytest.param((9, 0), (None, "9", "9, 10"), id="Hopper"),
        pytest.param((10, 3), ("9, 10", "10"), id="Blackwell"),
        pytest.param((12, 0), (), id="Blackwell-of-desktops"),  # 99 KiB of shared memory
    ],
)
def test_wide_tiles(capability, setting, monkeypatch):
    """Only Hopper has wide tiles by default. The setting adds or removes architectures."""
    for text in (None, "9", "10", "9, 10", ""):
        monkeypatch.setattr(backend, "WIDE_TILES", backend.wide_tiles_setting(text))
        assert backend.wide_tiles(capability) == (text in setting)


# Memory


class NotLaunched:
    """A kernel that does nothing; on a GPU kernels do not allocate either."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **named):
        pass


@pytest.fixture
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the epilogue's path on a CPU with the allocations of a GPU, products included."""
    if backend.triton is None:
        pytest.skip("no tensor descriptors without Triton")
    monkeypatch.setattr(choose, "has_wide_tiles", lambda device: True)
    monkeypatch.setattr(add_rows, "use_triton", lambda x: True)
    for module in (projection, target_rows, add_rows):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NotLaunched())
    for module in (sink, epilogue):
        monkeypatch.setattr(module, "accumulate", lambda *args, **kwargs: None)

    def with_token_at(target: Tensor, *args: Any) -> Found:
        return find_tokens(target, *args)._replace(token_at=torch.zeros(target.numel(), dtype=torch.int32))

    monkeypatch.setattr(rows, "find_tokens", with_token_at)  # no kernel writes it on a CPU


class Sizes(NamedTuple):
    """Sizes of a step, in chunks of `chunk` tokens."""

    n: int
    chunk: int
    hidden: int
    vocab: int


# The tensors that reach the peak with the exponentials: partial sums for a small H, otherwise a product.
SIZES = {"sums": Sizes(2048, 512, 64, 40013), "products": Sizes(2048, 512, 1536, 10007)}
TRAINABLE = {
    "all": {},
    "frozen-head": {"trainable_head": False},
    "frozen-input": {"trainable_input": False},
}
LOSSES = {
    "cross-entropy": lc.LigerFusedLinearCrossEntropyLoss,  # one partial sum
    "grpo": lc.LigerFusedLinearGRPOLoss,  # another for the entropy
}


@pytest.mark.few(1)
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("valid", [1.0, 0.75])
@pytest.mark.parametrize("trainable", TRAINABLE.values(), ids=TRAINABLE)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("of", LOSSES.values(), ids=LOSSES)
def test_estimate(of, sizes, trainable, valid, nothing_launched, monkeypatch):
    """A step allocates the estimated memory, apart from the loss's own use of the statistics."""
    monkeypatch.setattr(memory_of_losses, "_has_wide_tiles", lambda: True)
    head, states = {"trainable_head": True, "trainable_input": True, **trainable}.values()
    weight = torch.zeros(sizes.vocab, sizes.hidden, dtype=torch.bfloat16, requires_grad=head)
    input = torch.zeros(4, sizes.n // 4, sizes.hidden, dtype=torch.bfloat16, requires_grad=states)
    target = torch.zeros(input.shape[:2], dtype=torch.int64)
    n_valid = int(valid * target.shape[1])
    target[:, n_valid:] = -100
    loss = of(logits_budget=sizes.chunk * sizes.vocab * 2)
    estimate = lc.estimate_memory(
        loss,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        shape=target.shape,
        valid=target.shape[0] * n_valid,
        **trainable,
    )
    given = {"advantages": torch.ones(4)} if of is lc.LigerFusedLinearGRPOLoss else {}
    memory = Memory()
    memory.expect(weight, input, target, *given.values())
    with memory:
        value = loss(weight, input, target, **given)
        value = value[0] if given else value
        if value.requires_grad:
            value.backward()
    of_the_loss = 16 * sizes.n if given else 0
    assert 0.95 * (memory.peak - of_the_loss) <= estimate.peak <= 1.05 * memory.peak, f"{estimate!r}, not {memory.peak}"


@pytest.mark.triton
def test_no_exponentials_without_a_backward(device, passes, monkeypatch):
    """An evaluation has the loss of a training step, bit for bit, and writes one or two vectors."""
    batch = moved(lost(tokens(11, n=20)), torch.bfloat16, device)  # two chunks
    loss = lc.LigerFusedLinearCrossEntropyLoss(logits_budget=BUDGET, lse_square_scale=1e-2)
    trained = evaluate(lambda batch: loss(**batch), batch)["loss"]
    written = noted(monkeypatch, epilogue, "project_exp", lambda *args: args[4])
    frozen = loss(**batch)
    batch["weight"].requires_grad_()
    with torch.no_grad():
        evaluated = loss(**batch)
    assert written and all(out is None for out in written)
    assert torch.equal(frozen, trained) and torch.equal(evaluated, trained)
