"""Read the kept loss curves of `benchmarks.convergence`: how far fused training is from stock training."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STOCK, FUSED, NUDGED = "stock", "fused", "stock, nudged"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
BOUND = 1e-3  # nats, at every step in float32
NAMES = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma 2", "mixtral": "Mixtral"}
LAST = 20  # steps that are averaged for the final loss


@dataclass(frozen=True)
class Curve:
    """One training run: the loss of every step, in nats, before that step's update.

    - `family`: model family
    - `dtype`: of parameters and activations
    - `variant`: `STOCK`, `FUSED` or `NUDGED`
    - `seed`: of the initial weights
    """

    family: str
    dtype: str
    variant: str
    seed: int
    losses: list[float]

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


@dataclass(frozen=True)
class Convergence:
    """One result file. All of its curves use the same batches."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    curves: list[Curve]
    whole: bool

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(curve.family for curve in self.curves))

    def seeds(self, family: str, dtype: str) -> list[int]:
        of_stock = (curve for curve in self.curves if curve.variant == STOCK)
        return [curve.seed for curve in of_stock if (curve.family, curve.dtype) == (family, dtype)]

    def curve(self, family: str, dtype: str, variant: str, seed: int) -> Curve:
        wanted = (family, dtype, variant, seed)
        return next(c for c in self.curves if (c.family, c.dtype, c.variant, c.seed) == wanted)

    def differences(self, family: str, dtype: str, variant: str, seed: int) -> list[float]:
        pair = (self.curve(family, dtype, which, seed).losses for which in (variant, STOCK))
        return [abs(loss - stock) for loss, stock in zip(*pair, strict=True)]

    def largest(self, family: str, variant: str) -> float:
        seeds = self.seeds(family, FLOAT32)
        return max(max(self.differences(family, FLOAT32, variant, seed)) for seed in seeds)

    def finals(self, family: str, variant: str) -> list[float]:
        """Return the final loss of every seed in bfloat16."""
        return [self.curve(family, BFLOAT16, variant, seed).final for seed in self.seeds(family, BFLOAT16)]

    @property
    def title(self) -> str:
        env = self.environment
        versions = ", ".join(f"{name} {env['versions'][name]}" for name in ("torch", "transformers"))
        return f"{env['device']}, {versions}, {env['date']}"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"whole": self.whole, "environment": self.environment, "settings": self.settings}
        curves = ",\n  ".join(json.dumps(asdict(curve)) for curve in self.curves)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "curves": [\n  {curves}\n ]\n}}\n')


def load(path: Path) -> Convergence:
    content = json.loads(path.read_text())
    curves = [Curve(**curve) for curve in content["curves"]]
    return Convergence(content["environment"], content["settings"], curves, content["whole"])


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def markdown(run: Convergence) -> str:
    """Return a table with one row per family: differences in float32, and of final losses in bfloat16."""
    lines = [
        "| family | float32: fused | nudged | bfloat16: fused − stock | nudged − stock | spread of stock "
        "| spread of fused |",
        "|---|" + "---|" * 6,
    ]
    for family in run.families:
        stock, fused = run.finals(family, STOCK), run.finals(family, FUSED)
        apart = max((f - s for f, s in zip(fused, stock, strict=True)), key=abs)
        first = run.seeds(family, BFLOAT16)[0]
        nudged = run.curve(family, BFLOAT16, NUDGED, first).final - stock[0]
        cells = [
            NAMES[family],
            f"{run.largest(family, FUSED):.1e}",
            f"{run.largest(family, NUDGED):.1e}",
            f"{apart:+.4f}".replace("-", "−"),
            f"{nudged:+.4f}".replace("-", "−"),
            f"{spread(stock):.4f}",
            f"{spread(fused):.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{run.title}, commit {run.environment['commit'][:12]}"])
