"""The formula of a loss's memory, compared with the measured peaks of steps of every family."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from spies import Memory
from table import Batch, Row, Sizes, moved, rows
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import liger_chunked as lc
from liger_chunked import memory
from liger_chunked.engine.sink import Sink
from liger_chunked.engine.source import LogitsSource
from liger_chunked.kernels import backend

MIB = 1 << 20
QWEN, LLAMA = 151936, 128256

CrossEntropy, DPO = lc.LigerFusedLinearCrossEntropyLoss, lc.LigerFusedLinearDPOLoss
PAIRS = {"vocab_size": LLAMA, "hidden_size": 4096, "shape": (8, 2048), "valid": 8192}  # half of each is prompt
STUDENT = {"vocab_size": QWEN, "hidden_size": 1536, "shape": (8192,)}
LLAMA_TOKENS = {"vocab_size": LLAMA, "hidden_size": 4096, "shape": (8192,)}
QWEN_TOKENS = {"vocab_size": QWEN, "hidden_size": 1536, "shape": (8192,)}
SMALL_TOKENS = {"vocab_size": QWEN, "hidden_size": 896, "shape": (32768,)}
MANY_TOKENS = {"vocab_size": QWEN, "hidden_size": 2048, "shape": (65536,)}
LONG_PAIR = {"vocab_size": QWEN, "hidden_size": 2048, "shape": (2, 16384)}
ROLLOUTS = {"vocab_size": QWEN, "hidden_size": 2048, "shape": (8, 2048)}
STATS_BUDGET = {"logits_budget": 256 * MIB}
OVER_LOGITS = {"wide_tiles": False}  # a GPU without the fused epilogue
# Peaks in MiB on an H200, bfloat16, from the benchmarks.
MEASURED = [
    (3070, CrossEntropy(), LLAMA_TOKENS),
    (3070, CrossEntropy(logits_budget=1024 * MIB), LLAMA_TOKENS),  # logits and accumulator
    (3070, CrossEntropy(logits_budget=256 * MIB), LLAMA_TOKENS),  # the accumulator while it is rounded
    (2125, CrossEntropy(), QWEN_TOKENS),
    (1444, CrossEntropy(logits_budget=1792 * QWEN * 2), QWEN_TOKENS),
    (1782, CrossEntropy(), SMALL_TOKENS),
    (1103, CrossEntropy(logits_budget=1792 * QWEN * 2), SMALL_TOKENS),
    (2648, CrossEntropy(), MANY_TOKENS),
    (2039, CrossEntropy(logits_budget=1792 * QWEN * 2), MANY_TOKENS),
    (1446, lc.linear_token_stats, LLAMA_TOKENS | STATS_BUDGET),
    (755, lc.linear_token_stats, QWEN_TOKENS | STATS_BUDGET),
    (698, lc.linear_token_stats, SMALL_TOKENS | STATS_BUDGET),
    (1681, lc.linear_token_stats, MANY_TOKENS | STATS_BUDGET),
    (3262, DPO(), PAIRS),
    (3150, DPO(logits_budget=256 * MIB), PAIRS),  # one pair exceeds the budget
    (2034, DPO(), LONG_PAIR),
    (3262, lc.LigerFusedLinearORPOLoss(), PAIRS),
    (3262, lc.LigerFusedLinearCPOLoss(), PAIRS),
    (3262, lc.LigerFusedLinearSimPOLoss(), PAIRS),
    (3262, lc.LigerFusedLinearKTOLoss(), PAIRS),
    (2968, lc.LigerFusedLinearJSDLoss(), STUDENT),
    (2457, lc.LigerFusedLinearGRPOLoss(), ROLLOUTS),
    # Measured on the path over logits, before the fused epilogue replaced it.
    (2843, CrossEntropy(), QWEN_TOKENS | OVER_LOGITS),
    (1730, CrossEntropy(logits_budget=1024 * MIB), QWEN_TOKENS | OVER_LOGITS),
    (1508, CrossEntropy(logits_budget=2048 * QWEN * 2), QWEN_TOKENS | OVER_LOGITS),
    (1360, CrossEntropy(logits_budget=256 * MIB), QWEN_TOKENS | OVER_LOGITS),
    (1763, CrossEntropy(), SMALL_TOKENS | OVER_LOGITS),
    (2632, CrossEntropy(), MANY_TOKENS | OVER_LOGITS),
]


@pytest.mark.few(2, "linear_token_stats-1446")
@pytest.mark.parametrize(
    ("mib", "loss", "batch"),
    MEASURED,
    ids=[f"{getattr(loss, '__name__', type(loss).__name__)}-{mib}" for mib, loss, _ in MEASURED],
)
def test_agrees_with_benchmarks(mib, loss, batch, monkeypatch):
    monkeypatch.setattr(memory, "_has_wide_tiles", lambda: batch.get("wide_tiles", True))
    estimate = lc.estimate_memory(loss, **{name: x for name, x in batch.items() if name != "wide_tiles"})
    assert estimate.peak / MIB == pytest.approx(mib, rel=0.005), str(estimate)


# One row for each way in which the losses use the engine.
FAMILIES = {
    "ce", "ce-none", "dpo-sigmoid", "dpo-aot", "dpo-ref_logps-of-tokens", "orpo-nll_target", "cpo-sigmoid", "simpo",
    "kto", "kto-kl-of-mismatched", "bco", "kl", "jsd", "jsd-padded-teacher", "tvd", "cosine", "squared-error",
    "grpo", "grpo-kl", "gspo", "grpo-top-entropy", "stats-all",
    "on-policy-distillation-old-clipped", "on-policy-distillation-logps-advantages",
}  # fmt: skip
WITHOUT_KERNEL = {"squared-error"}  # take at most what they are counted with
ENGINES = {"ce", "dpo-sigmoid", "jsd", "stats-all"}
TRAINABLE = {
    "all": {},
    "frozen-head": {"trainable_head": False},
    "frozen-input": {"trainable_input": False},
    "nothing": {"trainable_head": False, "trainable_input": False},
}
# The budget, as a share of the logits of all tokens with a target, and the trainable tensors.
CASES = [
    pytest.param(
        row, part, trainable, id=f"{row}-{part}-{trainable}",
        # Outside of ENGINES, each family has one budget by default.
        marks=[pytest.mark.exhaustive] if row.id not in ENGINES and (part == 1.0) == bool(i % 2) else [],
    )
    for part, trainable in ((1.0, "all"), (0.3, "all"), (0.3, "frozen-head"), (0.3, "frozen-input"), (0.3, "nothing"))
    for i, row in enumerate(rows(*(FAMILIES if trainable == "all" else ENGINES)))
]  # fmt: skip


def predicted(row: Row, batch: Batch, budget: int | None, **settings: Any) -> lc.MemoryEstimate:
    """Estimate the memory of the loss that a row builds, for its batch."""
    modules: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, arguments: modules.append(module))
    with torch.no_grad():
        row.ours(batch, logits_budget=budget)
    hook.remove()
    vocab_size, hidden_size = batch["weight"].shape
    if "teacher_weight" in batch:
        settings["teacher_hidden_size"] = batch["teacher_weight"].shape[1]
    return lc.estimate_memory(
        modules[0] if modules else lc.linear_token_stats,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        shape=batch["target"].shape,
        valid=(batch["target"] != -100).sum(-1).tolist(),
        dtype=batch["weight"].dtype,
        logits_budget=budget,
        **settings,
    )


def leaves_of(batch: Batch, trainable_head: bool = True, trainable_input: bool = True) -> Batch:
    """Return copies of the trainable tensors."""
    names = (["weight", "bias"] if trainable_head else []) + (["input"] if trainable_input else [])
    return {name: batch[name].clone().requires_grad_() for name in names if name in batch}


def step(row: Row, batch: Batch, leaves: Batch, budget: int | None) -> None:
    loss = row.ours({**batch, **leaves}, logits_budget=budget)
    if leaves:
        loss.backward()


def budget_of(batch: Batch, part: float) -> int:
    n_valid = int((batch["target"] != -100).sum())
    return int(part * n_valid) * batch["weight"].shape[0] * batch["weight"].dtype.itemsize


@pytest.mark.few(1)
@pytest.mark.sampled(0.34)
@pytest.mark.ordinary_memory
@pytest.mark.parametrize(("row", "part", "trainable"), CASES)
def test_agrees_with_steps_on_a_cpu(row, part, trainable, monkeypatch):
    """In float32, where a CPU accumulates products as a GPU does."""
    sizes = Sizes(sequences=4, length=96, hidden=128, vocab=4099, ref_hidden=160)
    # The CPU path's blocks, about a dozen of one row each, which a GPU does not have.
    monkeypatch.setitem(backend.TORCH_BLOCK, "cpu", sizes.vocab)
    blocks = 12 * 4 * sizes.vocab
    batch = moved(row.sample(sizes, seed=0), torch.float32)
    leaves = leaves_of(batch, **TRAINABLE[trainable])
    budget = budget_of(batch, part)
    estimate = predicted(row, batch, budget, **TRAINABLE[trainable])
    measured = Memory()
    measured.expect(*batch.values(), *leaves.values())
    with measured:
        step(row, batch, leaves, budget)
    assert 0.95 * (measured.peak - blocks) <= estimate.peak, f"{estimate}, not {measured.peak}"
    if row.id not in WITHOUT_KERNEL:
        assert estimate.peak <= 1.05 * measured.peak, f"{estimate}, not {measured.peak}"


@pytest.mark.few(2, "stats-all")
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("row", rows(*ENGINES, "kl-top-k", "squared-error"), ids=repr)
def test_logits_are_gone_when_gradients_are_rounded(row, monkeypatch):
    """With several chunks, the rounding needs memory for both the float32 sum and its bfloat16 copy."""
    batch = moved(row.sample(Sizes(sequences=4, length=16, hidden=8, vocab=53, ref_hidden=8), seed=0), torch.bfloat16)
    buffers, finished = [], []
    reserve, finish = LogitsSource.reserve, Sink.finish

    def watch(self, elements):
        reserve(self, elements)
        buffers.append(weakref.ref(self._buffer.untyped_storage()))

    def check(self):
        finished.append([buffer() is None for buffer in buffers])
        return finish(self)

    monkeypatch.setattr(LogitsSource, "reserve", watch)
    monkeypatch.setattr(Sink, "finish", check)
    step(row, batch, leaves_of(batch), budget_of(batch, 0.3))
    assert len(finished) == 1 and buffers and all(finished[0])


@functools.cache
def on_gpu(row: Row) -> Batch:
    """260 MB of bfloat16 logits, so that the allocator's rounding of tensors over 1 MiB does not matter."""
    sizes = Sizes(sequences=8, length=512, hidden=512, vocab=64007, ref_hidden=768)
    return moved(row.sample(sizes, seed=0), torch.float32, "cuda")


def peak_of(run: Callable[[], None], leaves: Iterable[Tensor]) -> int:
    run()  # allocates cuBLAS workspaces and compiles
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_on_gpu(row: Row, batch: Batch, leaves: Batch, budget: int) -> int:
    return peak_of(lambda: step(row, batch, leaves, budget), leaves.values())


@pytest.mark.gpu
@pytest.mark.ordinary_memory
@pytest.mark.parametrize(("row", "part", "trainable"), CASES)
def test_agrees_with_the_allocator(row, part, trainable):
    batch = moved(on_gpu(row), torch.bfloat16)
    leaves, budget = leaves_of(batch, **TRAINABLE[trainable]), budget_of(batch, part)
    estimate = predicted(row, batch, budget, **TRAINABLE[trainable])
    peak = peak_on_gpu(row, batch, leaves, budget)
    message = f"predicted/measured {estimate.peak / peak:.3f}: {peak / MIB:.1f} MiB, not {estimate}"
    assert 0.95 * peak <= estimate.peak, message
    if row.id not in WITHOUT_KERNEL:
        assert estimate.peak <= 1.05 * peak, message


# Steps that use the fused epilogue, and their trainable tensors.
BY_EPILOGUE = [
    pytest.param(SMALL_TOKENS, "all", id="chunks"),
    pytest.param(SMALL_TOKENS, "frozen-head", id="chunks-frozen-head"),
    pytest.param(SMALL_TOKENS | {"valid": 20000}, "all", id="chunks-ignored"),
    pytest.param(QWEN_TOKENS | {"logits_budget": 2048 * QWEN * 2}, "all", id="budget"),
    pytest.param(QWEN_TOKENS | {"logits_budget": 8192 * QWEN * 2}, "frozen-head", id="one-chunk-frozen-head"),
]


@pytest.mark.gpu
@pytest.mark.ordinary_memory
@pytest.mark.parametrize(("batch", "trainable"), BY_EPILOGUE)
def test_agrees_with_the_allocator_by_the_epilogue(batch, trainable, monkeypatch):
    device = torch.device("cuda")
    if not backend.has_wide_tiles(device):
        pytest.skip("no tensor memory accelerator")
    monkeypatch.setattr(LogitsSource, "statistics", None)  # fails if a step computes logits
    settings = {"trainable_head": True, "trainable_input": True} | TRAINABLE[trainable]
    vocab, hidden, n = batch["vocab_size"], batch["hidden_size"], batch["shape"][0]
    weight = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16).mul_(hidden**-0.5)
    input = torch.randn(n, hidden, device=device, dtype=torch.bfloat16)
    target = torch.randint(vocab, (n,), device=device)
    target[batch.get("valid", n) :] = -100
    weight.requires_grad_(settings["trainable_head"])
    input.requires_grad_(settings["trainable_input"])
    loss = CrossEntropy(logits_budget=batch.get("logits_budget"))

    def run() -> None:
        value = loss(weight, input, target)
        if value.requires_grad:
            value.backward()

    peak = peak_of(run, [weight, input])
    estimate = lc.estimate_memory(CrossEntropy(), **batch, **TRAINABLE[trainable])
    assert estimate.peak == pytest.approx(peak, rel=0.05), (
        f"predicted/measured {estimate.peak / peak:.3f}: {peak / MIB:.1f} MiB, not {estimate}"
    )


FIXED = {"vocab_size": 32000, "hidden_size": 512, "shape": (8, 512)}


def test_a_batch_may_give_its_lengths():
    """The chunks hold one pair each. Two pairs of 600 tokens need 600; pairs of 950 and 250 need 950."""
    even = lc.estimate_memory(DPO(), vocab_size=32000, hidden_size=512, shape=(4, 1000), valid=1200,
                           trainable_head=False, logits_budget=1000 * 64000)  # fmt: skip
    uneven = lc.estimate_memory(DPO(), vocab_size=32000, hidden_size=512, shape=(4, 1000), valid=[500, 50, 450, 200],
                             trainable_head=False, logits_budget=1000 * 64000)  # fmt: skip
    assert even.logits == 600 * 64000 and uneven.logits == 950 * 64000


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (CrossEntropy(), {"shape": (8, 0)}, r"shape must be \(B, T\) or \(N,\), .*, got \(8, 0\)"),
        (DPO(), {"shape": (3, 512)}, r"as many chosen as rejected sequences, got an odd 3 in \(3, 512\)"),
        (CrossEntropy(), {"valid": 4097}, "valid must be a count up to 4096, or .*, got 4097"),
        (DPO(), {"teacher_hidden_size": 8}, "teacher_hidden_size=8 is of losses with a teacher, got a LigerFused.*DPO"),
    ],
)  # fmt: skip
def test_refuses(loss, settings, message):
    with pytest.raises(ValueError, match=message):
        lc.estimate_memory(loss, **FIXED | settings)
