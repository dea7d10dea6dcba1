"""The policy losses against TRL's code, for every loss type."""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import Any

import eager
import pytest
import torch
from table import SMALL, Batch, evaluate, relative_error, rollouts
from torch import Tensor

from liger_chunked import LigerFusedLinearGRPOLoss
from liger_chunked.losses.grpo import LOSS_TYPES

pytest.importorskip("trl")

LENGTH = 11  # for Dr. GRPO
DEFAULTS = {
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "importance_level": "token",
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "top_entropy_quantile": 1.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def statistics(batch: Batch, prefix: str = "") -> dict[str, Tensor]:
    head = (batch[f"{prefix}weight"], batch[f"{prefix}input"], batch["target"], batch[f"{prefix}bias"])
    return eager.token_stats(*head, outputs=("logps", "entropy"))


def _trainer(batch: Batch, **attributes: Any) -> SimpleNamespace:
    """Return a trainer with only the attributes that the loss reads, and the statistics of given hidden states."""
    stats = statistics(batch)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (stats["logps"], stats["entropy"], None),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        **attributes,
    )


def _inputs(batch: Batch) -> dict[str, Tensor]:
    mask = (batch["target"] != -100).long()
    nothing = mask[:, :0]
    return {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": batch["target"].clamp(min=0),
        "completion_mask": mask,
        "advantages": batch["advantages"],
    }


def trl_grpo(batch: Batch, loss_type: str, num_items: int, **settings: Any) -> tuple[Tensor, dict[str, list[float]]]:
    """Run `GRPOTrainer._compute_loss` on full logits, and return its logs too."""
    from trl import GRPOTrainer

    s = SimpleNamespace(**DEFAULTS | settings)
    trainer = _trainer(
        batch,
        args=SimpleNamespace(**vars(s), steps_per_generation=1),
        loss_type=loss_type,
        importance_sampling_level=s.importance_level,
        beta=s.beta,
        epsilon_low=s.epsilon_low,
        epsilon_high=s.epsilon_high,
        top_entropy_quantile=s.top_entropy_quantile,
        max_completion_length=LENGTH,
        off_policy_mask_threshold=None,
        use_vllm="importance_weights" in batch,
        vllm_importance_sampling_correction=True,
        entropy_coef=s.entropy_coef,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(s.entropy_coef),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    inputs = _inputs(batch) | {"num_items_in_batch": torch.tensor(num_items)}
    if "old_logps" in batch:
        inputs["old_per_token_logps"] = batch["old_logps"]
    if "ref_logps" in batch:
        inputs["ref_per_token_logps"] = batch["ref_logps"]
    elif "ref_input" in batch:
        inputs["ref_per_token_logps"] = statistics(batch, "ref_")["logps"]
    if "importance_weights" in batch:
        weights = batch["importance_weights"]
        # 1 at padding, as in TRL.
        inputs["importance_sampling_ratio"] = (
            weights[:, None] if weights.ndim == 1 else torch.where(batch["target"] == -100, 1.0, weights)
        )
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


def module(loss_type: str, **settings: Any) -> LigerFusedLinearGRPOLoss:
    if loss_type == "dr_grpo":
        settings["max_completion_length"] = LENGTH
    if loss_type == "luspo":
        settings.setdefault("importance_level", "token")
    return LigerFusedLinearGRPOLoss.from_loss_type(loss_type, **settings)


def skip_unread(loss_type: str, level: str, corrected: bool = False) -> None:
    """Skip levels that ours refuses: TRL's VESPO has no ratio of a level, unless that corrects a KL term."""
    if loss_type == "vespo" and level != "token" and not corrected:
        with pytest.raises(ValueError, match="importance_level='sequence' is not read by surrogate 'vespo'"):
            module(loss_type, importance_level=level)
        pytest.skip("not read")


def assert_equal_to_trl(
    batch: Batch, loss_type: str, num_items: int = 37, budget: int | None = None, **settings: Any
) -> None:
    counted = {"num_items": num_items} if module(loss_type, **settings).reduction == "dapo" else {}
    if counted and "entropy_coef" in settings:
        counted["accumulation_steps"] = 1

    def ours(batch: Batch) -> Tensor:
        return module(loss_type, **settings, logits_budget=budget)(**batch, **counted)[0]

    def theirs(batch: Batch) -> Tensor:
        return trl_grpo(batch, loss_type, num_items, **settings)[0]

    result, exact = evaluate(ours, batch), evaluate(theirs, batch)
    for name in exact:
        assert relative_error(result[name], exact[name]) < 1e-12, name


# TRL converts SAPO's temperatures to float32, so use values that float32 represents exactly.
READ_BY = {"cispo": {"epsilon_high": 1.1}, "sapo": {"sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.0625}}

by_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)


# The KL is not multiplied by the importance weights, which VESPO includes in its own weights.
WEIGHTED = {"ref": "tokens", "weights": "tokens"}
BATCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "on-policy": ({"old": False}, {}),
    "kl": ({**WEIGHTED, "advantages": "tokens"}, {"beta": 0.3, "use_bias_correction_kl": False}),
    "corrected-kl": ({**WEIGHTED, "advantages": "sequences"}, {"beta": 0.3, "use_bias_correction_kl": True}),
    "entropy": (
        {"ref": "states", "weights": "sequences"},
        {"beta": 0.1, "entropy_coef": 0.3, "top_entropy_quantile": 0.35},
    ),
}


@by_loss_type
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("case", BATCHES)
def test_equal_to_trl(loss_type, level, case):
    sample, options = BATCHES[case]
    skip_unread(loss_type, level, options.get("use_bias_correction_kl", False))
    batch = rollouts(SMALL, seed=11, **sample)
    options = {"importance_level": level, **options, **READ_BY.get(loss_type, {})}
    assert_equal_to_trl(batch, loss_type, budget=8 * 9 * SMALL.vocab, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.99])
def test_top_entropy_quantiles(quantile):
    assert_equal_to_trl(rollouts(SMALL, seed=15), "grpo", top_entropy_quantile=quantile)


@pytest.mark.few(2)
@pytest.mark.parametrize("delta", [1.05, 1.3, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_delta(delta, level):
    assert_equal_to_trl(rollouts(SMALL, seed=16), "bnpo", delta=delta, importance_level=level)


@pytest.mark.parametrize(
    "settings", [{"vespo_k_pos": 1.25, "vespo_lambda_pos": 2.5}, {"vespo_lambda_neg": 0.5}], ids=str
)
def test_vespo_settings(settings):
    assert_equal_to_trl(rollouts(SMALL, seed=17, advantages="tokens"), "vespo", **settings)


@pytest.mark.few(3, "token-luspo-sequences-none")
@pytest.mark.parametrize("empty", [[], [0], [1, 4], range(SMALL.sequences)], ids=["none", "one", "two", "all"])
@pytest.mark.parametrize("advantages", ["sequences", "tokens"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_logged_clip_ratios(loss_type, level, advantages, empty):
    """Keys and values of the trainer's log are TRL's, also with completions that a mask empties."""
    from liger_chunked.integrations.trl.losses import Step
    from liger_chunked.integrations.trl.policy import LigerGRPOTrainer

    batch = rollouts(SMALL, seed=20, ref="tokens", advantages=advantages)
    batch["target"][list(empty)] = -100
    bounds = {"epsilon_high": 0.98} if loss_type == "cispo" else {"epsilon_low": 0.04, "epsilon_high": 0.05}
    options = {"importance_level": level, "beta": 0.1, **bounds}
    _, theirs = trl_grpo(batch, loss_type, 37, **options)
    loss = module(loss_type, **options)
    value, metrics = loss(**batch)

    trainer = object.__new__(LigerGRPOTrainer)
    trainer.loss_override, trainer._metrics = loss, {"train": defaultdict(list)}
    trainer.model, trainer.accelerator = SimpleNamespace(training=True), SimpleNamespace(gather=lambda x: x)
    trainer._log_metrics(Step(value, metrics, batch["target"], None), batch["advantages"])
    ours = trainer._liger_metrics
    assert ours.keys() == theirs.keys()
    assert any("clip_ratio" in name for name in ours)
    for name in ours:
        # TRL computes these means in float32.
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6, nan_ok=True), name
    if not empty:
        assert any(0 < ours[name][0] < 1 for name in ours if "clip_ratio" in name)


@pytest.mark.few(2)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_clip_ratios_of_ranks(loss_type, level):
    """Each rank logs what one process with all sequences would. A rank without tokens adds no extreme."""
    from liger_chunked.integrations.trl.losses import Step
    from liger_chunked.integrations.trl.policy import LigerGRPOTrainer

    batch = rollouts(SMALL._replace(sequences=12), seed=21, ref="tokens")
    batch["target"][4:8] = -100
    bounds = {"epsilon_high": 0.98} if loss_type == "cispo" else {"epsilon_low": 0.04, "epsilon_high": 0.05}
    loss = module(loss_type, importance_level=level, beta=0.1, **bounds)
    parts = [{name: x[i : i + 4] if len(x) == 12 else x for name, x in batch.items()} for i in (0, 4, 8)]
    steps = [Step(*loss(**part), part["target"], None) for part in parts]
    gathered: list[list[Tensor]] = []

    def trainer_of(gather: Any) -> Any:
        trainer = object.__new__(LigerGRPOTrainer)
        trainer.loss_override, trainer._metrics = loss, {"train": defaultdict(list)}
        trainer.model, trainer.accelerator = SimpleNamespace(training=True), SimpleNamespace(gather=gather)
        return trainer

    for step, part in zip(steps, parts, strict=True):
        gathered.append([])

        def keep(x: Tensor) -> Tensor:
            gathered[-1].append(x)
            return x

        trainer_of(keep)._log_metrics(step, part["advantages"])
    of_calls = iter([torch.cat(parts) for parts in zip(*gathered, strict=True)])
    trainer = trainer_of(lambda x: next(of_calls))
    trainer._log_metrics(steps[1], parts[1]["advantages"])
    _, theirs = trl_grpo(batch, loss_type, 37, importance_level=level, beta=0.1, **bounds)
    assert trainer._liger_metrics.keys() == theirs.keys()
    for name, value in trainer._liger_metrics.items():
        assert value == pytest.approx(theirs[name], rel=1e-6), name


def test_rloo():
    """TRL's RLOO clips the ratio of whole sequences; its KL is in the reward."""
    from trl import RLOOTrainer

    batch = rollouts(SMALL, seed=19)

    def theirs(batch: Batch) -> Tensor:
        trainer = _trainer(batch, epsilon_low=0.2, epsilon_high=0.2)
        mask = batch["target"] != -100
        inputs = _inputs(batch) | {"old_logps": (batch["old_logps"] * mask).sum(1)}
        return RLOOTrainer._compute_loss(trainer, None, inputs)

    def ours(batch: Batch) -> Tensor:
        return LigerFusedLinearGRPOLoss(importance_level="trajectory", reduction="grpo")(**batch)[0]

    result, exact = evaluate(ours, batch), evaluate(theirs, batch)
    for name in exact:
        assert relative_error(result[name], exact[name]) < 1e-12, name
