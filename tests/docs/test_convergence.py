"""The convergence benchmarks for three steps: they train the right models, and figures show their results."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")


from benchmarks import convergence, convergence_kinds, curves, report
from benchmarks.curves import BFLOAT16, BOUND, FLOAT32, FUSED, NUDGED, STOCK, Convergence
from benchmarks.harness import RESULTS

FAMILIES = ("gemma2", "mixtral")  # tied with softcaps; experts with an auxiliary loss
STEPS, SEEDS = 3, 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ["--families", *FAMILIES, "--steps", str(STEPS), "--seeds", str(SEEDS), "--lr", "2e-3", "--device", "cpu"]
    return convergence.main([*sizes, "--out", str(tmp_path_factory.mktemp("results"))])


@pytest.fixture(scope="module")
def run(written: Path) -> Convergence:
    return curves.load(written)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_agree(run: Convergence, family: str) -> None:
    assert run.largest(family, FUSED) < 1e-5
    assert run.largest(family, NUDGED) < 1e-5
    for seed in range(SEEDS):
        assert 0 < max(run.differences(family, BFLOAT16, FUSED, seed)) < 0.01
    # Another seed gives another model.
    assert curves.spread(run.finals(family, STOCK)) > 1e-4


def test_fused_is_fused_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    applied, chunks = [], []

    def apply(model, **options):
        applied.append(apply_liger_kernel(model, **options))
        return applied[-1]

    def statistics(logits, *args, **kwargs):
        chunks.append(logits.shape[0])
        return logits_stats_torch(logits, *args, **kwargs)

    apply_liger_kernel = convergence.apply_liger_kernel
    monkeypatch.setattr(convergence, "apply_liger_kernel", apply)
    kernel = importlib.import_module("liger_chunked.kernels.logits_stats")
    logits_stats_torch = kernel._logits_stats_torch
    monkeypatch.setattr(kernel, "_logits_stats_torch", statistics)
    batches = convergence.english_batches(1, "cpu")
    for variant in (STOCK, NUDGED):
        convergence.trained("gemma2", FLOAT32, variant, 0, batches)
    assert not applied and not chunks
    convergence.trained("gemma2", FLOAT32, FUSED, 0, batches)
    (kernels,) = applied
    assert kernels.replaced.keys() == {"rope", "rms_norm", "geglu", "fused_linear_cross_entropy"}
    assert len(chunks) >= 5 and max(chunks) == 32


def test_the_kept_run_is_within_its_bounds() -> None:
    """Every step agrees in float32; in bfloat16, the distance to stock is at most the distance between two seeds."""
    path = report.newest_file(RESULTS, "convergence")
    assert path is not None
    kept = curves.load(path)
    assert kept.families == list(convergence.FAMILIES)
    for family in kept.families:
        assert kept.largest(family, FUSED) < BOUND
        stock, fused = kept.finals(family, STOCK), kept.finals(family, FUSED)
        apart = max(abs(f - s) for f, s in zip(fused, stock, strict=True))
        assert apart <= min(curves.spread(stock), curves.spread(fused)), family


# Six kinds of models.


def test_the_kept_run_of_six_kinds_is_within_its_bounds() -> None:
    """In float32, fused differs no more than rounding does; in bfloat16, it is as far from float32 as stock."""
    path = report.newest_file(RESULTS, convergence_kinds.STEM)
    assert path is not None
    kept = convergence_kinds.load(path)
    assert kept.kinds == list(convergence_kinds.KINDS)
    assert (kept.settings["steps"], kept.settings["seeds"]) == (convergence_kinds.STEPS, convergence_kinds.SEEDS)
    for kind in kept.kinds:
        # Twice, because both are single draws of rounding.
        assert kept.difference(kind, FUSED) <= 2 * kept.difference(kind, NUDGED), kind
        distance = kept.distance(kind, FUSED)
        assert distance <= convergence_kinds.LARGEST_RATIO * kept.distance(kind, STOCK), kind
    assert convergence_kinds.markdown(kept) in (RESULTS.parent.parent / "docs" / "benchmarks.md").read_text()
