"""Random cases of every loss against its eager oracle in float64.

    python tests/soak.py --cases 3000 --seed 0     # on the CPU; --device cuda; --minutes 10 stops earlier
    python tests/soak.py --case 1234               # one case again, with its errors

A case draws a loss and its options, sizes, ignored tokens, a layout, a dtype, a logits budget, frozen parts, an
adapter on the head, an upstream gradient. Loss and gradients are compared with `tests/eager` on the same
numbers in float64:

    error <= 1.1 * eager + FLOOR[dtype] * norm + ROUNDINGS[dtype] * moved + SATURATED * operands

- `error` and `eager`: norms of the errors of this library, and of eager code in the dtype of the case; above the bound,
  the largest error of eager code on these inputs and on three others, each number moved by at most one rounding
- `norm`: norm of the exact result
- `moved`: how far the exact result moves if every input moves by at most one rounding of its dtype. An ill-conditioned
  result, such as the exponential of a long sequence's log-ratio, moves far.
- `operands`: norm of the hidden states and the weight. The slope of a sigmoid near 1 has an absolute error.

Beside the bound, the last lines compare errors of gradients with those of eager code in the same dtype.

The exit code is 1 if a case fails. Case i of a run has the seed `--seed` + i.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eager
import table
import torch
from eager.grpo import SURROGATES
from table import Batch, Row, Sizes, evaluate, moved, n_valid
from torch import Tensor

from liger_chunked.losses import cpo as cpo_losses
from liger_chunked.losses import dpo as dpo_losses

sys.path += [str(Path(__file__).parent / folder) for folder in ("engine", "losses")]
from test_lora_head import PeftHead, adapted, dense, with_factors, with_weights
from test_packed import kept, packed

FLOOR = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
ROUNDINGS = {torch.float64: 100.0, torch.float32: 10.0, torch.bfloat16: 3.0}
FACTOR, SATURATED = 1.1, 1e-15
PERTURBATIONS = 3
SHOWN = 12  # results whose error is largest beside that of eager code
MOST_LOGITS = 50_000  # of a case, which then takes a few hundredths of a second
# Ranks tokens. The covariances of two tokens, or of tokens with one advantage, are equal, and have no order.
COVARIANCE = "policy, by covariance"
BY_TOKEN = ("gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "ipo", "fipo", "a2po")  # have no other level
PARTS = (*table.PARAMETERS, "down", "up")

Draw = random.Random


# Losses: each function draws the options of one loss and returns a row of the table


def maybe(draw: Draw, probability: float, **options: Callable[[], Any]) -> dict[str, Any]:
    """Return each option with this probability."""
    return {name: make() for name, make in options.items() if draw.random() < probability}


def some(draw: Draw, low: float, high: float) -> float:
    """Return a number between `low` and `high`, uniform in its logarithm."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def transform(draw: Draw) -> dict[str, float]:
    return maybe(
        draw,
        0.3,
        softcap=lambda: some(draw, 1, 30),
        logit_scale=lambda: some(draw, 0.1, 3),
        temperature=lambda: some(draw, 0.5, 3),
    )


def items(draw: Draw) -> Any:
    return draw.choice([37, torch.tensor(37), 11.5])


def cross_entropy(draw: Draw) -> Row:
    reduction = draw.choice(["mean", "mean", "sum", "none"])
    shape = draw.choice(["plain", "plain", "smoothing", "focal", "dft"])
    shapes = {
        "plain": {},
        "smoothing": {"label_smoothing": draw.uniform(0, 0.5)},
        "focal": {"focal_gamma": draw.choice([0.5, 1.0, 2.0, 3.3])},
        "dft": {"dft": True},
    }
    settings = maybe(
        draw, 0.3, lse_square_scale=lambda: some(draw, 1e-4, 1e-1), entropy_weight=lambda: draw.uniform(-0.3, 0.3)
    )
    if reduction == "mean":
        settings |= maybe(draw, 0.3, num_items=lambda: items(draw))
    settings |= {name: draw.random() < 0.3 for name in ("ce_weight", "token_weights")}
    bias = draw.random() < 0.5
    return table._cross_entropy(
        "cross entropy", bias=bias, reduction=reduction, **shapes[shape], **settings, **transform(draw)
    )


def dpo(draw: Draw) -> Row:
    names = draw.sample(table.LOSS_TYPES, draw.choice([1, 1, 2, 3]))
    settings: dict[str, Any] = {"loss_type": names if len(names) > 1 else names[0], "beta": some(draw, 0.02, 0.5)}
    if len(names) > 1:
        settings |= maybe(draw, 0.5, loss_weights=lambda: [draw.uniform(0.1, 2) for _ in names])
    kinds = [dpo_losses.LOSS_TYPES[name] for name in names]
    if any("label_smoothing" in kind.reads for kind in kinds):
        settings["label_smoothing"] = draw.uniform(0.01, 0.4)
    averages = any(kind.averages for kind in kinds)
    if not averages:
        settings |= maybe(draw, 0.3, average_log_prob=lambda: True)
    if "discopop" in names:  # exp(-margin) of long sequences leaves float32
        settings |= {"discopop_tau": draw.uniform(0.3, 1), "beta": some(draw, 0.02, 0.1)}
        settings |= {} if averages else {"average_log_prob": True}
    if all("f_divergence_type" in kind.reads for kind in kinds) and draw.random() < 0.3:
        # Scores that are exponentials of the log-ratio: of a mean over tokens, because the losses cap exponents at 80.
        kind = "js_divergence" if averages else draw.choice(["forward_kl", "js_divergence", "alpha_divergence"])
        settings |= {"f_divergence_type": kind} | ({} if averages else {"average_log_prob": True})
        if kind == "alpha_divergence":
            settings |= maybe(draw, 0.7, f_alpha_divergence_coef=lambda: draw.uniform(0.3, 1.5))
    if all(kind.weighable for kind in kinds):
        settings |= maybe(draw, 0.2, use_weighting=lambda: True)
    settings |= maybe(draw, 0.2, ld_alpha=lambda: draw.choice([0.0, 0.3, 1.0]))
    if draw.random() < 0.3:
        settings |= {"compute_nll_loss": True, "alpha": draw.uniform(0.1, 2)}
    whole = settings.get("ld_alpha") is not None  # reference sums of sequences have no lengths
    ref = draw.choice(["states", "states", None, "tokens", *([] if whole else ["sequences"])])
    return table._dpo("DPO", ref=ref, bias=draw.random() < 0.5, **settings, **transform(draw))


def reference_free(draw: Draw) -> Row:
    name = draw.choice(["ORPO", "CPO", "SimPO"])
    settings: dict[str, Any] = {"beta": some(draw, 0.05, 2), "nll_target": draw.random() < 0.3}
    if name == "ORPO":
        return table._reference_free(name, table.LigerFusedLinearORPOLoss, eager.orpo, **settings, **transform(draw))
    if name == "CPO":
        kind = draw.choice(table.CPO_LOSS_TYPES)
        settings |= {"loss_type": kind, "cpo_alpha": draw.uniform(0.1, 2)}
        settings |= maybe(draw, 0.3, alphapo_alpha=lambda: draw.uniform(-0.1, 0.25))
        reads = cpo_losses.LOSS_TYPES[kind].reads
        if "label_smoothing" in reads:
            settings |= maybe(draw, 0.4, label_smoothing=lambda: draw.uniform(0, 0.4))
        if "simpo_gamma" in reads:
            settings |= maybe(draw, 0.4, simpo_gamma=lambda: draw.uniform(0, 2))
        return table._reference_free(name, table.LigerFusedLinearCPOLoss, eager.cpo, **settings, **transform(draw))
    kind = draw.choice(["sigmoid", "hinge"])
    settings |= {"loss_type": kind, "gamma": draw.uniform(0, 2)}
    if kind == "sigmoid":
        settings |= maybe(draw, 0.4, label_smoothing=lambda: draw.uniform(0, 0.4))
    if settings["nll_target"] or draw.random() < 0.4:
        settings |= {"compute_nll_loss": True, "alpha": draw.uniform(0.1, 2)}
    return table._reference_free(name, table.LigerFusedLinearSimPOLoss, eager.simpo, **settings, **transform(draw))


def unpaired(draw: Draw) -> Row:
    name = draw.choice(["KTO", "BCO"])
    settings: dict[str, Any] = {
        "ref": draw.choice(["states", "states", None, "tokens", "sequences"]),
        "labels": draw.choice(["mixed", "mixed", *table.LABELS]),
        "weights": draw.random() < 0.3,
        "average_log_prob": draw.random() < 0.3,
        "beta": some(draw, 0.01, 0.3),
        **transform(draw),
    }
    if name == "BCO":
        delta = draw.choice([0.0, -0.4, torch.tensor(0.3)])
        return table._unpaired(name, table._BCO, eager.bco, delta=delta, **settings)
    kind = draw.choice(["kto", "kto", "apo_zero_unpaired"])
    if kind == "kto":
        kl = draw.choice(["given", "negative", "states", "logps"])
        if kl in ("states", "logps"):
            settings |= {"mismatched": kl, "ref": "states", "beta": 0.05}
        else:
            settings["kl"] = draw.uniform(0, 4) if kl == "given" else -1.0
        settings |= maybe(
            draw, 0.3, desirable_weight=lambda: draw.uniform(0.5, 2), undesirable_weight=lambda: draw.uniform(0.5, 2)
        )
    return table._unpaired(name, table._KTO, eager.kto, loss_type=kind, **settings)


def distillation(draw: Draw) -> Row:
    skew, beta = draw.uniform(0.05, 0.9), draw.choice([0.0, 1.0, 0.5, draw.uniform(0.02, 0.98)])
    name, loss, divergence, parameter, module = draw.choice(
        [
            ("KL", table._KL, "kl", 0.5, {}),
            ("KL", table._KL, "reverse_kl", 0.5, {"reverse": True}),
            ("KL", table._KL, "skew_kl", skew, {"skew": skew}),
            ("KL", table._KL, "skew_reverse_kl", skew, {"skew": skew, "reverse": True}),
            ("JSD", table._JSD, "jsd", beta, {"beta": beta}),
            ("JSD", table._JSD, "jsd", beta, {"beta": beta}),
            ("TVD", table._TVD, "tvd", 0.5, {}),
            ("cosine", table._COSINE, "cosine", 0.5, {}),
            ("divergence of a user", table._SquaredError, "squared_error", 0.5, {}),
        ]
    )
    settings: dict[str, Any] = {"bias": draw.random() < 0.5, **transform(draw)}
    if name in ("KL", "JSD", "TVD") and draw.random() < 0.25:
        settings["top_k"] = draw.choice([2, 5, 9])
    else:
        settings["padding"] = draw.choice([0, 0, 1, 7, 128])
        if draw.random() < 0.25:
            settings |= {"teacher_softcap": 5.0, "teacher_logit_scale": 0.7, "teacher_temperature": 1.3}
    if name == "cosine":  # of which no temperature changes anything
        settings = {k: x for k, x in settings.items() if not k.endswith("temperature")}
    hard = draw.choice([0.0, 0.5, 0.5, 0.9, 1.0])
    settings |= {"weight_hard_loss": hard, "weight_soft_loss": 1 - hard}
    settings |= maybe(draw, 0.3, num_items=lambda: items(draw))
    return table._distillation(name, loss, divergence, parameter, module=module, **settings)


def policy(draw: Draw) -> Row:
    # REAL needs whole groups of sequences, which the sizes of a case are not drawn for.
    surrogate = draw.choice([*(name for name in SURROGATES if name != "real"), "clip", "clip", "clip"])
    by_token = surrogate in BY_TOKEN
    level = "token" if by_token or draw.random() < 0.5 else draw.choice(["sequence", "sequence_token", "trajectory"])
    reduction = draw.choice(["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "token-mean", "seq-mean-token-sum"])
    settings: dict[str, Any] = {"surrogate": surrogate, "reduction": reduction, "importance_level": level}
    if surrogate in ("clip", "gmpo", "clip_cov"):
        settings |= {"epsilon_low": draw.uniform(0.01, 0.4), "epsilon_high": draw.uniform(0.01, 0.4)}
    if surrogate in ("dppo_tv", "dppo_kl"):
        settings |= {"epsilon_low": draw.uniform(1e-3, 0.1), "epsilon_high": draw.uniform(1e-3, 0.1)}
    if surrogate == "ipo":
        settings |= {"ipo_threshold": draw.uniform(1e-3, 0.1)}
    if surrogate == "fipo":
        settings |= {"fipo_half_life": draw.uniform(1, 40), "fipo_clip_low": draw.uniform(0, 0.5)}
    if surrogate == "a2po":
        settings |= {"a2po_beta": draw.uniform(0.01, 0.3)}
    if surrogate == "clip":
        settings |= maybe(draw, 0.3, delta=lambda: draw.uniform(1.05, 3))
    if surrogate == "cispo":
        settings |= {"epsilon_high": draw.uniform(0.9, 3)} | maybe(draw, 0.4, cispo_epsilon_low=lambda: 0.8)
    if surrogate == "clip_cov":
        settings |= {"clip_cov_ratio": draw.uniform(0.01, 0.5), "clip_cov_lb": 0.05, "clip_cov_ub": 3.0}
    if surrogate == "kl_cov":
        settings |= {"kl_cov_ratio": draw.uniform(0.01, 0.5), "ppo_kl_coef": draw.uniform(0.1, 2)}
    if surrogate == "sapo":
        settings |= {"sapo_temperature_pos": draw.uniform(0.5, 2), "sapo_temperature_neg": draw.uniform(0.5, 2)}
    if reduction == "dr_grpo":
        settings["max_completion_length"] = 11
    if reduction in ("dapo", "token-mean"):
        settings |= maybe(draw, 0.4, num_items=lambda: items(draw))
    settings |= maybe(
        draw,
        0.2,
        entropy_coef=lambda: draw.uniform(-0.5, 0.7),
        sampler_kl_coef=lambda: draw.uniform(0, 0.5),
        top_entropy_quantile=lambda: draw.uniform(0.1, 0.9),
        off_policy_mask_threshold=lambda: draw.uniform(0.02, 0.3),
        attention_mask=lambda: True,
    )
    if "num_items" in settings and "entropy_coef" in settings:
        settings["accumulation_steps"] = draw.randint(1, 4)
    sample: dict[str, Any] = {
        "advantages": draw.choice(["sequences", "tokens"]),
        "weights": draw.choice([None, None, "sequences", "tokens"]),
        "old": draw.random() < 0.8,
    }
    if draw.random() < 0.5 or surrogate == "a2po":
        sample["ref"] = draw.choice(["tokens", "states"])
        settings |= {
            "beta": some(draw, 0.01, 0.5),
            "kl_estimator": draw.choice(["k1", "k2", "k3", "abs"]),
            "use_bias_correction_kl": draw.random() < 0.5,
        }
    if surrogate in ("vespo", "log_prob") and not settings.get("use_bias_correction_kl"):
        settings["importance_level"] = "token"  # no other ratio is read
    return table._grpo(
        COVARIANCE if surrogate.endswith("_cov") else "policy", sample=sample, **settings, **transform(draw)
    )


def statistics(draw: Draw) -> Row:
    names = ["logps", "lse", "entropy", "mean_logits"]
    return table._statistics("statistics", tuple(draw.sample(names, draw.randint(1, 4))), **transform(draw))


KINDS = (cross_entropy, cross_entropy, dpo, dpo, reference_free, unpaired, distillation, policy, policy, statistics)


# Cases


@dataclass
class Case:
    """One drawn case; `description` lists its settings."""

    seed: int
    row: Row
    batch: Batch
    dtype: torch.dtype
    trainable: tuple[str, ...]
    upstream: float
    budget: int | None
    ignore_index: int
    keep: Tensor | None  # of a packed batch
    description: dict[str, Any] = field(default_factory=dict)


def draw_case(seed: int, dtype: torch.dtype | None = None) -> Case:
    """Return the case of a seed, with a float64 batch on the CPU that holds numbers of the case's dtype."""
    draw = random.Random(seed)
    row = draw.choice(KINDS)(draw)
    vocab, sequences = draw.choice([2, 5, 17, 23, 64, 101, 257, 300, 1025, 2503]), 2 * draw.choice([1, 1, 2, 3, 5])
    sizes = Sizes(
        sequences=sequences,
        length=min(draw.choice([1, 2, 3, 7, 16, 33]), max(1, MOST_LOGITS // (vocab * sequences))),
        hidden=draw.choice([1, 3, 8, 16, 33, 64]),
        vocab=vocab,
        ref_hidden=draw.choice([1, 8, 24]),
        ignored=draw.random() < 0.8,
    )
    if (
        row.id == "cosine" and sizes.hidden == 1
    ):  # the scale of one number does not count: its gradient is only rounding
        sizes = sizes._replace(hidden=2)
    drawn_dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16])
    dtype = dtype or drawn_dtype
    batch = row.sample(sizes, seed)
    mask = draw.choice(["as sampled"] * 5 + ["random", "sequences", "last", "one", "none"])
    valid = ignored(batch["target"].shape, mask, seed)
    batch["target"] = batch["target"].masked_fill(~valid, -100)

    if row.id == COVARIANCE and (n_valid(batch) == 2 or _one_advantage(batch)):
        batch["target"].fill_(-100)
    adapter = draw.random() < 0.15
    if adapter:
        batch = with_factors(batch, seed)
    present = [name for name in PARTS if name in batch]
    trainable = tuple(present if draw.random() < 0.6 else draw.sample(present, draw.randint(1, len(present))))
    if draw.random() < 0.2:
        batch["input"] = batch["input"].transpose(0, 1).contiguous().transpose(0, 1)
    batch = moved(moved(batch, dtype), torch.float64)

    n = max(1, n_valid(batch))
    v = sizes.vocab
    logits = draw.choice([None, None, 1, max(1, v // 3), v, 3 * v, 5 * v, max(1, n - 1) * v, (n + 9) * v])
    ignore_index = draw.choice([-100, -100, -100, -1, -7, 10**6])
    keep = None
    if row.scope in ("pair", "sequence", "batch") and draw.random() < 0.25:
        keep = kept(batch, seed)
        # Rows of values could not tell an empty sequence from one of a token, nor sequences of one token from tokens.
        if not keep.any(1).all() or keep.sum(1).max() == 1:
            keep = None
    batch["target"] = batch["target"].masked_fill(batch["target"] == -100, ignore_index)
    upstream = draw.choice([1.0, 1.0, -3.0, 0.0, 1e-3, 0.37])
    case = Case(seed, row, batch, dtype, trainable, upstream, None, ignore_index, keep)
    case.budget = None if logits is None else logits * dtype.itemsize
    case.description = {
        "loss": row.id, "sizes": tuple(sizes), "dtype": str(dtype).removeprefix("torch."), "mask": mask,
        "trainable": trainable, "upstream": upstream, "budget in logits": logits, "ignore_index": ignore_index,
        "packed": keep is not None, "adapter": adapter,
    }  # fmt: skip
    return case


def _one_advantage(batch: Batch) -> bool:
    """Whether all tokens that count have the same advantage."""
    valid, advantages = batch["target"] != -100, batch["advantages"]
    advantages = advantages if advantages.ndim == 2 else advantages[:, None].expand(valid.shape)
    return bool(valid.any()) and bool((advantages[valid] == advantages[valid][0]).all())


def ignored(shape: torch.Size, mask: str, seed: int) -> Tensor:
    """Return the tokens that keep their target."""
    generator = torch.Generator().manual_seed(seed + 3)
    valid = torch.ones(shape, dtype=torch.bool)
    if mask == "random":
        valid = torch.rand(shape, generator=generator) < 0.7
    elif mask == "sequences":
        valid &= torch.rand(shape[0], 1, generator=generator) < 0.5
    elif mask == "last":
        valid[:, :-1] = False
    elif mask == "one":
        one = torch.randint(valid.numel(), (), generator=generator)
        valid = torch.zeros(valid.numel(), dtype=torch.bool).index_fill(0, one[None], True).view(shape)
    elif mask == "none":
        valid[:] = False
    return valid


def perturbed(batch: Batch, dtype: torch.dtype, seed: int) -> Batch:
    """Move hidden states, weights and biases by at most one rounding of `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def shaken(name: str, x: Tensor) -> Tensor:
        if not name.endswith(("input", "weight", "bias", "down", "up")):
            return x
        noise = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
        return x * (1 + torch.finfo(dtype).eps / 2 * noise.to(x.device))

    return {name: shaken(name, x) for name, x in batch.items()}


@dataclass
class Outcome:
    """The errors of a case, by result: `ratio` is an error over its bound."""

    case: Case
    report: dict[str, Mapping[str, float]]

    @property
    def worst(self) -> float:
        return max(numbers["ratio"] for numbers in self.report.values())

    @property
    def failed(self) -> bool:
        return not all(numbers["ratio"] <= 1 for numbers in self.report.values())  # NaN fails


def run_case(case: Case, device: str = "cpu") -> Outcome:
    row, names = case.row, {"ignore_index": case.ignore_index}
    batch = moved(case.batch, device=device)
    valid = int((batch["target"] != case.ignore_index).sum())

    def results(loss: Callable[..., Tensor], batch: Batch, head: Callable[..., Any], **options: Any) -> Batch:
        return evaluate(lambda b: loss(with_weights(b, head), **names, **options), batch, case.trainable, case.upstream)

    def exactly(batch: Batch) -> Batch:
        if valid and not (found := results(row.oracle, batch, dense))["loss"].isnan():
            return found
        # A mean over no token, or over weights of zero: NaN or an unconnected zero in eager code.
        zeros = {name: torch.zeros_like(batch[name]) for name in case.trainable}
        return {"loss": batch["input"].new_zeros(()), **zeros}

    def by_eager_code(batch: Batch, exact: Batch) -> dict[str, float]:
        if case.dtype == torch.float64 or not valid:
            return dict.fromkeys(exact, 0.0)
        found = results(row.oracle, moved(batch, case.dtype), PeftHead)
        errors = {name: float((found[name].double() - value).norm()) for name, value in exact.items()}
        return {name: error if math.isfinite(error) else 0.0 for name, error in errors.items()}  # no bound

    exact = exactly(batch)
    ours = fused(case, moved(batch, case.dtype), results)
    eager_errors = by_eager_code(batch, exact)
    shifts = [exactly(perturbed(batch, case.dtype, case.seed + i)) for i in range(PERTURBATIONS)]
    assert ours.keys() == exact.keys()
    operands = float(batch["input"].norm() + batch["weight"].norm())

    def report() -> dict[str, Mapping[str, float]]:
        found = {}
        for name, value in exact.items():
            norm, error, by_eager = float(value.norm()), float((ours[name].double() - value).norm()), eager_errors[name]
            move = max(float((x[name] - value).norm()) for x in shifts)
            bound = FACTOR * by_eager + FLOOR[case.dtype] * norm + ROUNDINGS[case.dtype] * move
            bound += SATURATED * operands
            found[name] = {"error": error, "eager": by_eager, "norm": norm, "moved": move, "ratio": error / bound}
        return found

    outcome = Outcome(case, report())
    if outcome.failed:
        # One error of eager code may be small by chance.
        for i in range(PERTURBATIONS):
            near = moved(moved(perturbed(batch, case.dtype, case.seed + 100 + i), case.dtype), torch.float64)
            found = by_eager_code(near, exactly(near))
            eager_errors = {name: max(error, found[name]) for name, error in eager_errors.items()}
        outcome = Outcome(case, report())
    return outcome


def fused(case: Case, batch: Batch, results: Callable[..., Batch]) -> Batch:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="logits_budget=", category=UserWarning)
        if case.keep is None:
            return results(case.row.ours, batch, adapted, logits_budget=case.budget)
        keep = case.keep.to(batch["input"].device)
        factors = {name: x for name, x in batch.items() if name.endswith(("down", "up"))}  # not of tokens
        given = packed({name: x for name, x in batch.items() if name not in factors}, keep) | factors
        found = results(case.row.ours, given, adapted, logits_budget=case.budget)
    if "input" in found:
        rows = found["input"]
        found["input"] = rows.new_zeros(batch["input"].shape).masked_scatter(keep[..., None], rows)
    return found


# The command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], help="of all cases; default: drawn")
    parser.add_argument("--case", type=int, help="run one case and print its errors")
    args = parser.parse_args(arguments)
    dtype = args.dtype and getattr(torch, args.dtype)
    seeds = range(args.seed, args.seed + args.cases) if args.case is None else [args.case]
    start = time.monotonic()
    worst: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, -1))
    counts: dict[str, int] = defaultdict(int)
    beside: list[tuple[float, str, int]] = []  # errors over those of eager code
    failures: list[int] = []
    for seed in seeds:
        if time.monotonic() - start > 60 * args.minutes:
            break
        name = "drawing"
        try:
            case = draw_case(seed, dtype)
            name = case.row.id
            outcome = run_case(case, args.device)
            ratio, failed = outcome.worst, outcome.failed
            beside += [
                (n["error"] / n["eager"], f"{name}, {result}", seed)
                for result, n in outcome.report.items()
                if n["eager"] and result != "loss"  # the error of one number is small by chance
            ]
        except Exception as error:
            if args.case is not None:
                raise
            ratio, failed = math.inf, True
            print(f"case {seed}, {name}: {type(error).__name__}: {error}", flush=True)
        else:
            if failed or args.case is not None:
                print(f"case {seed}: {case.description}", flush=True)
                for result, numbers in outcome.report.items():
                    print(f"  {result}: " + ", ".join(f"{key} {x:.3g}" for key, x in numbers.items()), flush=True)
        counts[name] += 1
        worst[name] = max(worst[name], (ratio, seed))
        failures += [seed] * failed
    print(f"{sum(counts.values())} cases on {args.device}, torch {torch.__version__}, {time.monotonic() - start:.0f} s")
    for name in sorted(counts):
        ratio, seed = worst[name]
        print(f"  {name}: {counts[name]} cases, largest error {ratio:.2f} of its bound (case {seed})")
    if beside:
        beside.sort(reverse=True)
        middle, above = beside[len(beside) // 2][0], sum(ratio > FACTOR for ratio, *_ in beside)
        print(f"{len(beside)} gradients, error over eager code's: median {middle:.2f}, {above} above {FACTOR}; largest")
        for ratio, result, seed in beside[:SHOWN]:
            print(f"  {ratio:.2f} {result} (case {seed})")
    print(f"failed: {len(failures)} {failures or ''}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
