"""`linear_token_stats` with the fused epilogue: values, gradients, and when that path is used."""

from __future__ import annotations

import eager
import pytest
import torch
from sampling import exhaustive
from spies import noted
from table import Batch, moved
from test_epilogue import BATCHES, HIDDEN, VOCAB, assert_error_is_that_of_eager_code, tokens
from torch import Tensor

from liger_chunked import LogitOptions, linear_token_stats
from liger_chunked.engine import epilogue
from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.epilogue import EpilogueStatistics, serves_statistics
from liger_chunked.kernels import grad_from_exponentials_, projection
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.kernels.projection import _regions
from liger_chunked.kernels.tuning.hopper import FEWEST_TILES, FEWEST_TILES_OF_ENTROPY, WIDEST, Tiling
from liger_chunked.types import HeadTensors, LossHead

ALL = ("logps", "lse", "entropy", "mean_logits")
# 36 tokens in tiles: five slices of the vocabulary, or blocks of 13 tokens and two slices
BUDGETS = {"slices": 2 * 36 * 128, "blocks": 2 * 13 * 512}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small steps use the fused epilogue too."""
    monkeypatch.setattr(epilogue, "SMALLEST", 0)


@pytest.fixture
def passes(by_epilogue: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the tiles of each pass that uses the fused epilogue."""
    return noted(monkeypatch, EpilogueStatistics, "statistics", lambda source, tokens: len(tokens.tiles))


def weighted(stats: dict[str, Tensor], wanted: tuple[str, ...], target: Tensor) -> Tensor:
    """Return a scalar with another upstream gradient for each token and statistic."""
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(len(ALL), *target.shape, generator=generator, dtype=torch.float64)
    total = sum((stats[n].double() * upstream[ALL.index(n)].to(target.device)).sum() for n in wanted)
    assert isinstance(total, Tensor)
    return total


def compare(batch: Batch, device: str, wanted: tuple[str, ...], outputs: tuple[str, ...] = ALL, **options) -> None:
    budget = options.pop("logits_budget", BUDGETS["slices"])
    dtype = options.pop("dtype", torch.bfloat16)

    def ours(batch: Batch) -> Tensor:
        stats = linear_token_stats(**batch, outputs=outputs, logits_budget=budget, **options)
        return weighted(stats._asdict(), wanted, batch["target"])

    def oracle(batch: Batch) -> Tensor:
        return weighted(eager.token_stats(**batch, outputs=outputs, **options), wanted, batch["target"])

    assert_error_is_that_of_eager_code(ours, oracle, batch, device=device, dtype=dtype)


@pytest.mark.few(5)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("wanted", [("logps",), ALL], ids=["logps", "all"])
def test_gradients(kind, wanted, device, passes):
    compare(BATCHES[kind](tokens()), device, wanted)
    assert passes and passes[0] >= 3


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("kind", ["plain", "lost"])
def test_float16(kind, device, passes, monkeypatch):
    """Exponentials of targets far from likely exceed its range: none are stored."""
    monkeypatch.setattr(epilogue, "grad_from_exponentials_", None)
    monkeypatch.setattr(projection, "_regions", lambda *given: [r for r in _regions(*given) if r[2] is None])
    compare(BATCHES[kind](tokens()), device, ("logps", "lse"), dtype=torch.float16)
    assert passes and passes[0] >= 3


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_float16_with_a_loss_scale(scale, device, passes):
    """A tile holds the gradient over the largest upstream gradient: its range is that of probabilities."""
    batch = moved(tokens(3), torch.float16, device)
    leaves = [batch[name].float().requires_grad_() for name in ("weight", "input")]

    def gradients(scale: float) -> tuple[Tensor, ...]:
        with torch.autocast(torch.device(device).type, torch.float16):
            logps = linear_token_stats(*leaves, batch["target"], logits_budget=BUDGETS["slices"]).logps
        return torch.autograd.grad(logps.sum(), leaves, torch.tensor(scale, device=device))

    for scaled, plain in zip(gradients(scale), gradients(1.0), strict=True):
        assert torch.equal(scaled, scale * plain) and plain.count_nonzero() > plain.numel() / 2
    assert len(passes) == 2


@pytest.mark.triton
def test_blocks_of_rows(device, passes):
    compare(tokens(2), device, ALL, logits_budget=BUDGETS["blocks"])
    assert passes == [4]


# Tokens, logits of a tile, blocks of rows in the forward, and regions of the last block
KEPT = {
    "columns": (300, 300 * 128, 1, 2),
    "squares": (300, 128 * 128, 1, 3),
    "blocks": (1000, 128 * 128, 2, 2),
    "all": (9, 9 * VOCAB, 1, 1),
}


@pytest.mark.few(5, "cpu-more-squares")
@pytest.mark.triton
@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        exhaustive([wanted, kind], f"{name}-{kind}", INTERPRETED and (name == "logps") != (kind in ("columns", "all")))
        for name, wanted in (("logps", ("logps",)), ("more", ("logps", "lse", "mean_logits")))
        for kind in KEPT
    ],
)
def test_the_last_tile_is_not_projected_again(kind, wanted, device, passes, monkeypatch, cut_with):
    if (kind, wanted) == ("blocks", ("logps",)):
        pytest.skip("without entropies, one block")
    n, elements, blocks, regions = KEPT[kind]
    cut_with(MIN_TILE_COLUMNS=128, ROUND=128)
    for name in ("FEWEST_TILES", "FEWEST_TILES_OF_ENTROPY"):
        monkeypatch.setattr(epilogue, name, 1)
    kept, found = [], []

    def from_exponentials(exponentials: Tensor, *rest) -> Tensor:
        kept.append(exponentials.shape)
        return grad_from_exponentials_(exponentials, *rest)

    monkeypatch.setattr(epilogue, "grad_from_exponentials_", from_exponentials)
    monkeypatch.setattr(projection, "_regions", lambda *given: found.append(_regions(*given)) or found[-1])
    outputs = wanted if len(wanted) == 1 else ALL  # the entropy without a gradient
    batch = BATCHES["repeated" if kind == "columns" else "ignored"](tokens(6, n=n))
    compare(batch, device, wanted, outputs=outputs, logits_budget=2 * elements)
    assert len(kept) == 1 and len(found) >= blocks and len(found[-1]) == regions
    if kind == "columns":  # hooks may offload what is saved
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            compare(batch, device, wanted, outputs=outputs, logits_budget=2 * elements)
        assert not kept


@pytest.mark.triton
@pytest.mark.parametrize("hidden", [1536, exhaustive([2048], "2048", INTERPRETED)])
def test_tiles_of_wider_heads(hidden, device, passes, monkeypatch):
    tiling = Tiling.of(hidden)
    assert tiling != Tiling.of(HIDDEN)
    monkeypatch.setattr(Tiling, "of", lambda *_, **__: tiling)
    compare(tokens(5, n=150), device, ALL, logits_budget=2 * 150 * 128)
    assert passes


@pytest.mark.few(4)
@pytest.mark.triton
@pytest.mark.parametrize("kind", BATCHES)
def test_values(kind, device, passes):
    """The logits are never rounded: errors are those of float32, in bfloat16 too."""
    batch = moved(BATCHES[kind](tokens(3)), torch.bfloat16, device)
    with torch.no_grad():
        found = linear_token_stats(**batch, outputs=ALL)
    exact = eager.token_stats(**moved(batch, torch.float64), outputs=ALL)
    valid = batch["target"] != -100
    for name in ALL:
        value = getattr(found, name)
        assert value.dtype == torch.float32 and not value[~valid].any()
        # Sums of 603 terms, and differences of numbers of about 16 for targets near certainty. The entropy of a row far
        # above its target is a difference of numbers of up to 44, whose float32 values are 2^-18 apart.
        atol = 2 * 2.0**-18 if kind == "lost" and name == "entropy" else 3e-6
        torch.testing.assert_close(value[valid].double(), exact[name][valid], rtol=3e-5, atol=atol)
    assert passes == [1]


@pytest.mark.triton
@pytest.mark.parametrize("hidden", [896, 1536, 2048])
def test_a_value_has_the_same_bits_with_a_backward(hidden, device, passes):
    """With a backward, the forward also writes exponentials; the budget sets their tile."""
    if device == "cpu":
        pytest.skip("compares kernels for a GPU")
    generator = torch.Generator(device).manual_seed(hidden)
    x, weight = (torch.randn(n, hidden, device=device, generator=generator).bfloat16() for n in (4096, 16000))
    target = torch.randint(16000, (4096,), device=device, generator=generator)
    found = []
    for budget, needs_grad in ((None, False), (2 * 4096 * 4096, True), (2 * 1536 * 1536, True)):
        given = x.clone().requires_grad_(needs_grad)
        found.append(
            linear_token_stats(
                hidden**-0.5 * weight, given, target, outputs=ALL, logits_budget=budget, deterministic="batch"
            )
        )
    for name in ALL:
        values = [getattr(stats, name).detach() for stats in found]
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2]), name
    assert passes[1] > 1 and passes[2] > passes[1]


def nearly_certain(device: str) -> Batch:
    """Rows with about 0.999 on one token, and another as target."""
    generator = torch.Generator().manual_seed(9)
    weight = 0.3 * torch.randn(VOCAB, HIDDEN, generator=generator)
    input = 0.3 * torch.randn(300, HIDDEN, generator=generator)
    weight[VOCAB - 5, 0], input[:, 0] = 13.0, 1.0
    target = torch.randint(VOCAB - 8, (300,), generator=generator)
    return moved({"weight": weight, "input": input, "target": target}, torch.bfloat16, device)


@pytest.mark.triton
def test_entropy_gradient_near_certainty(device, passes, cut_with):
    """The last tile, with the certain token, is projected again: the rounding of p would exceed `log p + entropy`."""
    cut_with(MIN_TILE_COLUMNS=128, ROUND=128)
    batch = nearly_certain(device)
    exact = eager.token_stats(**moved(batch, torch.float64), outputs=("entropy",))["entropy"]
    assert 1e-3 < exact.median() < 0.1
    compare(batch, device, ("entropy",), outputs=("logps", "entropy"), logits_budget=2 * 300 * 128)
    assert passes == [5]


def nearly_certain_of_another_token(device: str) -> Batch:
    """Rows whose target is 41 to 43 nats below the maximum: the epilogue's centre is the target's logit."""
    input = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    input[:, 0] = 1
    input[:, 1] = torch.linspace(0, 1, 64)
    weight = torch.zeros(300, 64, dtype=torch.bfloat16, device=device)
    weight[:, 0], weight[0, 0], weight[1, 0] = -22, 0, -41
    weight[1, 1] = -2
    return {"weight": weight, "input": input, "target": torch.ones(64, dtype=torch.int64, device=device)}


@pytest.mark.triton
def test_entropy_near_certainty_of_another_token(device, passes):
    batch = nearly_certain_of_another_token(device)
    found = linear_token_stats(**batch, outputs=("entropy",)).entropy
    exact = eager.token_stats(**moved(batch, torch.float64), outputs=("entropy",))["entropy"]
    # Two roundings of numbers near 43, the distance of the centre.
    assert passes and found.min() >= 0 and (found - exact).abs().max() <= 2**-17


REFUSED = {
    "bias": {"bias": torch.zeros(VOCAB)},
    "softcap": {"options": LogitOptions(softcap=30.0)},
    "argmax": {"outputs": ("logps", "argmax")},
    "class-weight": {"class_weight": torch.ones(VOCAB)},
    "float32": {"dtype": torch.float32},
    "float16-of-few-tiles": {"dtype": torch.float16, "tiles": FEWEST_TILES_OF_ENTROPY - 1, "outputs": ("logps",)},
    "few-tiles": {"tiles": FEWEST_TILES_OF_ENTROPY - 1},
    "one-tile": {"tiles": FEWEST_TILES - 1, "outputs": ("logps",)},
    "wide": {"hidden": WIDEST + 8},
}


@pytest.mark.few(5)
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_serves_not(change):
    def served(
        bias=None,
        options=LogitOptions(),  # noqa: B008
        outputs=ALL,
        class_weight=None,
        dtype=torch.bfloat16,
        tiles=FEWEST_TILES_OF_ENTROPY,
        hidden=HIDDEN,
    ):
        head = LossHead(torch.zeros(VOCAB, hidden, dtype=dtype), bias)
        cut = [Tile(slice(0, 8), slice(128 * i, 128 * (i + 1))) for i in range(tiles)]
        return serves_statistics(head, dtype, options, class_weight, outputs, cut, needs_grad=True)

    assert served() and served(tiles=FEWEST_TILES, outputs=("logps",), hidden=WIDEST + 8) and not served(**change)


@pytest.mark.parametrize("outputs", [("logps",), ("logps", "entropy")], ids=["logps", "entropy"])
@pytest.mark.parametrize("hidden", [1024, 4096])
def test_places_of_partial_sums_fit_32_bits(hidden, outputs):
    """With a budget of 16 GiB and millions of tokens. A place beyond would wrap, to memory before the sums."""
    head = HeadTensors(torch.empty(262_144, hidden, device="meta"), None)
    statistics = EpilogueStatistics(head, LogitOptions(), outputs, tile_size=1 << 33)
    n_tokens, tiling = 1 << 22, Tiling.of(hidden)
    blocks = [rows for rows, *_ in statistics._blocks(n_tokens, (), tiling)]
    assert [rows.start for rows in blocks] == [0, *(rows.stop for rows in blocks[:-1])] and blocks[-1].stop == n_tokens
    n_parts = 262_144 // tiling.cols
    assert max(n_parts * (rows.stop - rows.start) for rows in blocks) <= 2**31
