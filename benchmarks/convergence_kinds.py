"""Train six kinds of small models with and without the kernels for 100 steps, in float32 and in bfloat16.

python -m benchmarks.convergence_kinds                          about eight minutes on one core
python -m benchmarks.convergence_kinds --kinds hybrid --steps 20

Text, optimizer and schedule are those of `benchmarks.convergence`. For each seed of the initial weights, all runs see
the same batches: stock and fused in both dtypes, which are those of the parameters, and in float32 also stock from
weights one float32 step larger.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.convergence import (
    DEFAULT_ADAM,
    HEADS,
    HIDDEN,
    LOGITS_BUDGET,
    SIZES,
    VOCABULARY,
    english_batches,
    labelled,
    nudge,
    train,
)
from benchmarks.curves import BFLOAT16, FLOAT32, FUSED, LAST, NUDGED, STOCK, Curve
from benchmarks.harness import RESULTS, environment, new_file
from examples.align_data import Batch
from liger_chunked import apply_liger_kernel

STEPS, SEEDS = 100, 2
LARGEST_RATIO = 1.1  # of the distances to float32 in bfloat16
VARIANTS = {FLOAT32: (STOCK, FUSED, NUDGED), BFLOAT16: (STOCK, FUSED)}
STEM = "convergence_kinds"

_IMAGE_IDS = {
    "vision_start_token_id": VOCABULARY,
    "image_token_id": VOCABULARY + 1,
    "vision_end_token_id": VOCABULARY + 2,
    "video_token_id": VOCABULARY + 3,
}


def _with_images(batch: Batch) -> dict[str, Tensor]:
    """Put an image of 2 x 4 random patches, which are merged to two tokens, before each text."""
    arguments = labelled(batch)
    n = len(batch.input_ids)
    image = torch.tensor([VOCABULARY, VOCABULARY + 1, VOCABULARY + 1, VOCABULARY + 2]).expand(n, 4)
    before = {"input_ids": image, "attention_mask": torch.ones_like(image), "labels": torch.full_like(image, -100)}
    arguments = {name: torch.cat([x.to(arguments[name].device), arguments[name]], 1) for name, x in before.items()}
    generator = torch.Generator().manual_seed(int(batch.input_ids.sum()))
    pixels = torch.randn(n * 8, 3 * 2 * 4 * 4, generator=generator)
    device = batch.input_ids.device
    return {
        **arguments,
        "mm_token_type_ids": (arguments["input_ids"] == VOCABULARY + 1).int(),
        "pixel_values": pixels.to(device),
        "image_grid_thw": torch.tensor([[1, 2, 4]], device=device).expand(n, 3),
    }


@dataclass(frozen=True)
class Kind:
    """A model class, the arguments of its config, and those of its forward for a batch."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Callable[[Batch], dict[str, Tensor]] = labelled

    def build(self, dtype: str, seed: int, device: str) -> PreTrainedModel:
        torch.manual_seed(seed)
        cls = getattr(transformers, self.model)
        config = cls.config_class(**self.config)
        config._attn_implementation = "eager"
        return cls(config).to(device, getattr(torch, dtype)).train()


_EXPERTS = {
    "moe_intermediate_size": 160,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,  # adds the auxiliary loss
    "router_aux_loss_coef": 0.02,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
KINDS = {
    "dense": Kind("Olmo2ForCausalLM", SIZES),
    "MoE": Kind("Qwen3MoeForCausalLM", {**SIZES, **_EXPERTS}),
    "hybrid": Kind(
        "Qwen3NextForCausalLM",
        {
            **SIZES,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [0, 1, 2],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": HIDDEN // HEADS,
            "linear_value_head_dim": HIDDEN // HEADS,
        },
    ),
    "multimodal": Kind(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**SIZES, "vocab_size": VOCABULARY + 4, "rope_parameters": _MROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_IMAGE_IDS,
        },
        _with_images,
    ),
    "softcap": Kind(
        "Gemma2ForCausalLM",
        {
            **SIZES,
            "query_pre_attn_scalar": HIDDEN // HEADS,
            "sliding_window": 32,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "partial rotary": Kind("Glm4ForCausalLM", {**SIZES, "partial_rotary_factor": 0.5}),
}


def trained(kind: str, dtype: str, variant: str, seed: int, batches: Sequence[Batch]) -> Curve:
    model = KINDS[kind].build(dtype, seed, batches[0].input_ids.device.type)
    if variant == FUSED:
        applied = apply_liger_kernel(model, logits_budget=LOGITS_BUDGET)
        assert "fused_linear_cross_entropy" in applied.replaced, str(applied)
    if variant == NUDGED:
        nudge(model)
    steps = [KINDS[kind].arguments(batch) for batch in batches]
    steps = [{n: x.to(model.dtype) if x.is_floating_point() else x for n, x in step.items()} for step in steps]
    return Curve(kind, dtype, variant, seed, train(model, steps, DEFAULT_ADAM))


@dataclass(frozen=True)
class Kinds:
    """One result file."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    curves: list[Curve]
    whole: bool

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(curve.family for curve in self.curves))

    def pairs(self, kind: str, one: tuple[str, str], other: tuple[str, str]) -> list[tuple[float, float]]:
        """Return the losses of two (dtype, variant), of every seed and step."""
        losses: dict[tuple[str, str], list[float]] = {one: [], other: []}
        for curve in sorted((c for c in self.curves if c.family == kind), key=lambda c: c.seed):
            if (key := (curve.dtype, curve.variant)) in losses:
                losses[key] += curve.losses
        return list(zip(losses[one], losses[other], strict=True))

    def difference(self, kind: str, variant: str) -> float:
        """Return the largest relative difference of a step's loss to stock in float32."""
        pairs = self.pairs(kind, (FLOAT32, variant), (FLOAT32, STOCK))
        return max(abs(loss - stock) / stock for loss, stock in pairs)

    def distance(self, kind: str, variant: str) -> float:
        """Return the root mean square, over seeds and steps, of a loss in bfloat16 minus stock's in float32."""
        pairs = self.pairs(kind, (BFLOAT16, variant), (FLOAT32, STOCK))
        return math.sqrt(statistics.fmean((x - exact) ** 2 for x, exact in pairs))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"whole": self.whole, "environment": self.environment, "settings": self.settings}
        curves = ",\n  ".join(json.dumps(asdict(curve)) for curve in self.curves)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "curves": [\n  {curves}\n ]\n}}\n')


def load(path: Path) -> Kinds:
    content = json.loads(path.read_text())
    curves = [Curve(**curve) for curve in content["curves"]]
    return Kinds(content["environment"], content["settings"], curves, content["whole"])


def markdown(run: Kinds) -> str:
    lines = [
        "| kind | class | float32: difference of fused | of nudged | bfloat16: distance of stock | of fused | ratio |",
        "|---|" + "---|" * 6,
    ]
    for kind in run.kinds:
        stock, fused = (run.distance(kind, variant) for variant in (STOCK, FUSED))
        cells = [
            kind,
            f"`{KINDS[kind].model}`",
            *(f"{run.difference(kind, variant):.1e}" for variant in (FUSED, NUDGED)),
            f"{stock:.4f}",
            f"{fused:.4f}",
            f"{fused / stock:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    env = run.environment
    versions = ", ".join(f"{name} {env['versions'][name]}" for name in ("torch", "transformers"))
    return "\n".join([*lines, "", f"{env['device']}, {versions}, {env['date']}, commit {env['commit'][:12]}"])


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parse.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parse.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parse.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args = parse.parse_args(arguments)
    for name in ("steps", "seeds"):
        if getattr(args, name) < 1:
            parse.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def main(arguments: Sequence[str] | None = None) -> Path:
    args = parse_arguments(arguments)
    batches = english_batches(args.steps, "cpu")
    curves = []
    for kind in args.kinds:
        begin = time.perf_counter()
        for seed in range(args.seeds):
            for dtype, variants in VARIANTS.items():
                curves += [trained(kind, dtype, variant, seed, batches) for variant in variants]
        run = Kinds({}, {}, curves, False)
        stock, fused = (run.distance(kind, variant) for variant in (STOCK, FUSED))
        seconds = time.perf_counter() - begin
        print(
            f"{kind:14s} float32: {run.difference(kind, FUSED):.1e}, nudged {run.difference(kind, NUDGED):.1e}  "
            f"bfloat16 to float32: {fused:.4f}, stock {stock:.4f}, ratio {fused / stock:.3f}  {seconds:.0f} s",
            flush=True,
        )
    settings = {
        "steps": args.steps,
        "seeds": args.seeds,
        "averaged_for_final": LAST,
        "logits_budget": LOGITS_BUDGET,
        "optimizer": DEFAULT_ADAM._asdict(),
        "kinds": {kind: {"model": KINDS[kind].model, "config": KINDS[kind].config} for kind in args.kinds},
    }
    whole = (args.kinds, args.steps, args.seeds) == (list(KINDS), STEPS, SEEDS)
    run = Kinds(environment("cpu"), settings, curves, whole)
    path = new_file(args.out, STEM, run.environment)
    run.write(path)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
