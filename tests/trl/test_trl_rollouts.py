"""Trainers on rollouts: sequences without a gradient are left out, and the softmax is over what the sampler kept."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import tiny
import torch.distributed as dist
from fresh_process import FreshProcesses
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from trl_kinds import PLAIN, assert_same, build, join, log_of, rare, run, set_head, spawn

from liger_chunked import LigerFusedLinearGRPOLoss, LigerFusedLinearPolicyBase, Rollouts, Surrogate
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.trl.losses import LossMixin
from liger_chunked.kept_ids import KeptIds
from liger_chunked.losses.surrogates import Clip

# Four completions of two prompts a step, in four micro-batches that mix them.
ROLLOUTS = {
    **PLAIN,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "max_completion_length": 7,
}


def tied(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return rewards that are equal for the completions of every other prompt."""
    return [
        1.0 if ord(prompt[0]) % 2 else float(sum(map(ord, text)) % 7)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def all_tied(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


class Widths:
    """The shapes of token ids that a trainer's model ran on, with and without gradient."""

    def __init__(self, trainer: Any) -> None:
        self.with_gradient: list[tuple[int, ...]] = []
        self.without: list[tuple[int, ...]] = []
        inner_model(trainer.model).register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        shape = tuple(kwargs["input_ids"].shape)
        if torch.is_grad_enabled():
            self.with_gradient.append(shape)
        elif "labels" in kwargs or "head_fn" in kwargs:  # not of `generate`
            self.without.append(shape)

    @property
    def tokens(self) -> int:
        return sum(n * t for n, t in self.with_gradient)


def trained(folder: Path, name: str, config: dict[str, Any], **arguments: Any) -> tuple[list[Any], Widths, nn.Module]:
    trainer = build(folder, name, True, {**ROLLOUTS, **config}, share_prefix=False, **arguments)
    widths = Widths(trainer)
    trainer.train()
    return log_of(trainer), widths, trainer.model


def ends_soon() -> Any:
    """Return a model with many ids that end a sequence, so that lengths differ and few are truncated."""
    model = tiny.model()
    model.generation_config.eos_token_id = [2, *range(200, 260)]
    return model


def gradients(folder: Path, name: str, config: dict[str, Any], **arguments: Any) -> list[list[Tensor | None]]:
    """Return the gradients of each optimizer step."""
    trainer = build(folder, name, True, {**ROLLOUTS, **config}, **arguments)
    found: list[list[Tensor | None]] = []
    step = torch.optim.SGD.step

    def noted(self: Any, closure: Any = None) -> Any:
        of_model = [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
        found.append(of_model)
        return step(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", noted)
        trainer.train()
    return found


LOSSES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "dapo": lambda: LigerFusedLinearGRPOLoss(reduction="dapo"),
    "grpo": lambda: LigerFusedLinearGRPOLoss(),
    "bnpo": lambda: LigerFusedLinearGRPOLoss(reduction="bnpo"),
    "dr_grpo": lambda: LigerFusedLinearGRPOLoss(reduction="dr_grpo", max_completion_length=7),
    "luspo": lambda: LigerFusedLinearGRPOLoss(reduction="luspo", importance_level="sequence"),
    "cispo": lambda: LigerFusedLinearGRPOLoss.from_loss_type("cispo", epsilon_high=1.01),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01, "num_iterations": 2},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "vespo": {"loss_type": "vespo", "num_iterations": 2},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "masked": {"mask_truncated_completions": True},
}


# One of a mean over tokens, over sequences, and of each way in which a later pass on the rollouts differs.
@pytest.mark.slow
@pytest.mark.parametrize("config", [c if c in ("cispo", "bnpo", "grpo", "masked") else rare(c) for c in CONFIGS])
def test_logs_what_trl_logs(config: str, tmp_path: Path) -> None:
    """With TRL's own loss, every entry of the log is stock's."""
    stock = run(tmp_path, "GRPO", False, {**ROLLOUTS, **CONFIGS[config]}, reward_funcs=[tied], model=ends_soon())
    log, widths, _ = trained(tmp_path, "GRPO", CONFIGS[config], reward_funcs=[tied], model=ends_soon())
    assert_same(log, stock)
    assert any(entry.get("frac_reward_zero_std") not in (None, 0.0) for entry in stock)
    arguments = {"reward_funcs": [tied], "model": ends_soon(), "skip_zero_advantage": False}
    _, whole, _ = trained(tmp_path, "GRPO", CONFIGS[config], **arguments)
    assert widths.tokens < 0.8 * whole.tokens, (widths.with_gradient, whole.with_gradient)


@pytest.mark.slow
def test_rloo(tmp_path: Path) -> None:
    config = {"beta": 0.0, "num_iterations": 2}
    stock = run(tmp_path, "RLOO", False, {**ROLLOUTS, **config}, reward_funcs=[tied])
    log, widths, _ = trained(tmp_path, "RLOO", config, reward_funcs=[tied])
    assert_same(log, stock)
    _, whole, _ = trained(tmp_path, "RLOO", config, reward_funcs=[tied], skip_zero_advantage=False)
    assert widths.tokens < 0.8 * whole.tokens


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("share_prefix", [False, "auto"])
def test_gradients_with_and_without_skipping(name: str, share_prefix: bool | str, tmp_path: Path) -> None:
    config = {"num_iterations": 2} if name in ("cispo", "grpo") else {}
    arguments = {"reward_funcs": [tied], "share_prefix": share_prefix}
    found = [
        gradients(
            tmp_path, "GRPO", config, loss=LOSSES[name](), model=ends_soon(), skip_zero_advantage=skip, **arguments
        )
        for skip in ("auto", False)
    ]
    assert len(found[0]) == len(found[1]) == 4
    for skipped, whole in zip(*found, strict=True):
        for ours, expected in zip(skipped, whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert any(g is not None and g.abs().max() > 1e-3 for g in found[0][0])


def test_entropy_between_logging_steps(tmp_path: Path) -> None:
    """At other steps no pass runs for metrics, and the entropy is that of the logging steps."""
    log, widths, _ = trained(tmp_path, "GRPO", {"logging_steps": 2}, reward_funcs=[tied])
    assert len(widths.without) > 0
    each, at_each, _ = trained(tmp_path, "GRPO", {"logging_steps": 1}, reward_funcs=[tied])
    assert len(widths.without) < len(at_each.without)
    by_step = {entry["step"]: entry for entry in each if "entropy" in entry}
    for entry in (entry for entry in log if "entropy" in entry):
        assert entry["entropy"] == pytest.approx(by_step[entry["step"]]["entropy"], rel=0.2)
    _, none, _ = trained(tmp_path, "GRPO", {"logging_strategy": "no"}, reward_funcs=[tied])
    assert not none.without


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "dapo", rare("bnpo")])
def test_nothing_has_a_gradient(name: str, tmp_path: Path) -> None:
    """One token runs, and parameters get zeros, as ranks that wait for each other need."""
    found = gradients(tmp_path, "GRPO", {}, reward_funcs=[all_tied], loss=LOSSES[name]())
    assert all(g is not None and (g == 0).all() for step in found for g in step)
    log, widths, _ = trained(tmp_path, "GRPO", {}, reward_funcs=[all_tied], loss=LOSSES[name]())
    assert set(widths.with_gradient) == {(1, 2)}
    arguments = {"reward_funcs": [all_tied], "loss": LOSSES[name](), "skip_zero_advantage": False}
    whole = trained(tmp_path, "GRPO", {}, **arguments)[0]
    assert_same(log, whole)


class Squared(LigerFusedLinearPolicyBase):
    """Not zero where advantages are."""

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return (rollouts.advantages - rollouts.ratio) ** 2


class Weighted(LigerFusedLinearPolicyBase):
    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return -rollouts.advantages * rollouts.ratio


class OwnSurrogate(Surrogate):
    """Not zero where advantages are."""

    def cost(self, rollouts: Rollouts) -> Tensor:
        return (rollouts.advantages - rollouts.ratio) ** 2


WITH_A_GRADIENT: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "KL": ({"beta": 0.1}, lambda: None, "a KL term"),
    "entropy": ({"entropy_coef": 0.1}, lambda: None, "an entropy bonus"),
    "adaptive": ({"use_adaptive_entropy": True, "entropy_target": 0.1}, lambda: None, "an entropy bonus"),
    "quantile": ({"top_entropy_quantile": 0.5}, lambda: None, "tokens by their entropy"),
    "loss-KL": ({"beta": 0.1}, lambda: LigerFusedLinearGRPOLoss(beta=0.1), "a KL term"),
    "loss-entropy": ({}, lambda: LigerFusedLinearGRPOLoss(entropy_coef=0.1), "an entropy bonus"),
    "loss-sampler-KL": ({}, lambda: LigerFusedLinearGRPOLoss(sampler_kl_coef=0.1), "a KL term"),
    "loss-batch": ({}, lambda: LigerFusedLinearGRPOLoss(surrogate="kl_cov"), "tokens in the batch"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", WITH_A_GRADIENT)
def test_other_gradients_keep_all_sequences(case: str, tmp_path: Path) -> None:
    config, loss, reason = WITH_A_GRADIENT[case]
    config = {**config, "max_steps": 1}
    reference = {"model": str(tmp_path / "model")} if config.get("beta") else {}
    if reference:
        tiny.model().save_pretrained(tmp_path / "model")
    _, widths, _ = trained(tmp_path, "GRPO", config, reward_funcs=[all_tied], loss=loss(), **reference)
    assert all(n == 2 for n, _ in widths.with_gradient) and widths.tokens > 40
    with pytest.raises(ValueError, match=f"skip_zero_advantage=True: .*{reason}"):
        build(tmp_path, "GRPO", True, {**ROLLOUTS, **config}, loss=loss(), skip_zero_advantage=True, **reference)


def test_losses_of_a_user(tmp_path: Path) -> None:
    """Whether they are zero at advantages of zero, only their author knows."""
    config = {"max_steps": 1}
    surrogates = [LigerFusedLinearGRPOLoss(surrogate=surrogate) for surrogate in (OwnSurrogate(), Clip())]
    for loss, skip, skips in (
        *((Squared(), "auto", False), (Weighted(), "auto", False), (Weighted(), True, True)),
        *((surrogates[0], "auto", False), (surrogates[1], "auto", True)),
    ):
        arguments = {"reward_funcs": [all_tied], "loss": loss, "skip_zero_advantage": skip}
        _, widths, _ = trained(tmp_path, "GRPO", config, **arguments)
        assert ((1, 2) in widths.with_gradient) == skips


def test_a_compute_loss_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's own loss reads the log-probabilities of all sequences, and may train any of them."""
    import liger_chunked.integrations.trl as integration

    class Cloning(integration.LigerGRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
            logps, *_ = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([prompts, completions], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                completions.shape[1],
            )
            return -(logps * inputs["completion_mask"]).mean()

    monkeypatch.setattr(integration, "LigerGRPOTrainer", Cloning)
    config, arguments = {"max_steps": 1}, {"reward_funcs": [all_tied]}
    (of_all,) = gradients(tmp_path, "GRPO", config, **arguments)
    assert any(g is not None and g.abs().max() > 1e-3 for g in of_all)
    _, widths, _ = trained(tmp_path, "GRPO", config, skip_zero_advantage=True, **arguments)
    assert set(widths.with_gradient) == {(1, 2)}


class LogsRatios(LigerFusedLinearGRPOLoss):
    def logged_metrics(self, metrics: Any) -> dict[str, Tensor]:
        return {"own_entropy": metrics.entropy, "least_ratio": metrics.ratio_min}


def test_metrics_of_a_loss_without_a_sequence(tmp_path: Path) -> None:
    """A micro-batch that is skipped adds nothing to the loss's own metrics; zeros and infinities are no values."""
    config = {"num_iterations": 2, "max_steps": 3}
    log, *_ = trained(tmp_path, "GRPO", config, reward_funcs=[all_tied], loss=LogsRatios(reduction="dapo"))
    steps = [entry for entry in log if "entropy" in entry]
    assert len(steps) == 3 and all(entry["own_entropy"] is entry["least_ratio"] is None for entry in steps)
    log, *_ = trained(tmp_path, "GRPO", config, reward_funcs=[tied], loss=LogsRatios(reduction="dapo"))
    steps = [entry for entry in log if "entropy" in entry]
    assert any(entry.get("frac_reward_zero_std") for entry in steps)
    assert all(entry["own_entropy"] > 1 and 0.2 < entry["least_ratio"] < 5 for entry in steps)


def test_metrics_of_several_ranks() -> None:
    """A rank without a sequence does not count. A NaN of a rank with some is no such rank: it is shown."""

    def logged(*ranks: float | None) -> float:
        given: list[Tensor] = []

        def gather_for_metrics(x: Tensor) -> Tensor:
            given.append(x)
            return torch.cat(given)

        loss = SimpleNamespace(logged_metrics=lambda metrics: {"own": metrics})
        accelerator = SimpleNamespace(device="cpu", gather_for_metrics=gather_for_metrics)
        rank: Any = SimpleNamespace(loss_override=loss, accelerator=accelerator, _liger_metrics={"own": []})
        for x in ranks:
            LossMixin.log_own_metrics(rank, torch.inf if x is None else x, of_nothing=x is None)
        return rank._liger_metrics["own"][-1]  # of the last one, which sees all

    assert logged(1.0, None, 3.0) == logged(None, 2.0) == 2
    assert math.isnan(logged(None, None))
    assert math.isnan(logged(1.0, math.nan))


def test_an_unknown_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'auto', True or False"):
        build(tmp_path, "GRPO", True, ROLLOUTS, skip_zero_advantage="always")
    with pytest.raises(TypeError, match="kept_ids must be True or False"):
        build(tmp_path, "GRPO", True, ROLLOUTS, kept_ids="yes")


# Kept ids


FILTERS = {"top_p": 0.7, "temperature": 0.9}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("name", ["none", "dapo"])
def test_ratios_to_the_sampler_are_one(kind: str, name: str, tmp_path: Path) -> None:
    """The old policy's log-probabilities are the sampler's, and so are those of the first step on the rollouts."""
    if kind == "RLOO" and name != "none":
        pytest.skip("RLOO takes no loss")
    config = {**ROLLOUTS, **FILTERS, "num_iterations": 2, "max_steps": 2, "beta": 0.0}
    loss = {} if kind == "RLOO" else {"loss": LOSSES[name]()}
    trainer = build(tmp_path, kind, True, config, kept_ids=True, **loss)
    inner, generate = inner_model(trainer.model), type(inner_model(trainer.model)).generate
    sampled: list[Tensor] = []

    def with_scores(*args: Any, generation_config: Any, **kwargs: Any) -> Tensor:
        own = copy.deepcopy(generation_config)
        own.output_scores = own.return_dict_in_generate = True
        output = generate(inner, *args, generation_config=own, **kwargs)
        scores = torch.stack([x.log_softmax(-1) for x in output.scores], 1)
        tokens = output.sequences[:, -scores.shape[1] :]
        sampled.append(scores.gather(-1, tokens[..., None])[..., 0])
        return output.sequences

    inner.generate = with_scores
    outputs: list[dict[str, Any]] = []
    scored = type(trainer)._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        output = scored(trainer, inputs)
        outputs.append(output)
        return output

    trainer._generate_and_score_completions = noted
    trainer.train()
    assert len(outputs) == len(sampled) >= 1
    for output, logps in zip(outputs, sampled, strict=True):
        mask = output["completion_mask"].bool()
        logps = torch.where(mask, logps[:, : mask.shape[1]], 0.0)
        if kind == "RLOO":
            torch.testing.assert_close(output["old_logps"], logps.sum(1), rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(output["old_per_token_logps"], logps, rtol=1e-4, atol=1e-4)
        assert sum(part.ids.numel() for part in output["kept_ids"]) > mask.sum()
    # On these rollouts, the first pass is on-policy.
    log = trainer.state.log_history[0]
    assert log["clip_ratio/region_mean"] == 0


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["none", "dapo", "grpo"])
@pytest.mark.parametrize("share_prefix", [False, "auto"])
def test_gradients_over_kept_ids(name: str, share_prefix: bool | str, tmp_path: Path) -> None:
    """TRL's loss and ours, with and without skipped sequences, agree; all differ from the whole softmax."""
    config = {**FILTERS, "num_iterations": 2, "loss_type": "grpo" if name == "grpo" else "dapo"}
    arguments = {"reward_funcs": [tied], "share_prefix": share_prefix}
    found = [
        gradients(tmp_path, "GRPO", config, loss=loss, **options, **arguments)
        for loss, options in (
            (None, {"kept_ids": True, "skip_zero_advantage": False}),
            (None, {"kept_ids": True}),
            (None, {}),
        )
    ]
    if name != "none":
        config.pop("loss_type")
        found[1] = gradients(tmp_path, "GRPO", config, loss=LOSSES[name](), kept_ids=True, **arguments)
    for ours, expected in zip(found[1], found[0], strict=True):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(found[0][0], found[2][0], strict=True) if a is not None)


def test_a_reference_over_kept_ids(tmp_path: Path) -> None:
    """Of the same model, at the first step: the KL is zero over kept ids."""
    tiny.model().save_pretrained(tmp_path / "model")
    config = {**FILTERS, "beta": 0.1, "max_steps": 1}
    log, _, _ = trained(tmp_path, "GRPO", config, model=str(tmp_path / "model"), kept_ids=True)
    assert abs(log[0]["kl"]) < 1e-6


@pytest.mark.parametrize("call", [{}, {"fused_lm_head": False}, {"head_fn": lambda head, input: input}])
def test_kept_ids_that_nothing_reads(call: dict[str, Any]) -> None:
    model, ids = tiny.model(), torch.arange(4, 12)[None]
    heads = set_head(model)
    with pytest.raises(ValueError, match=r"kept_ids is read by fused_lm_head=True alone, .*: pass fused_lm_head=True"):
        model(ids, labels=ids, kept_ids=KeptIds(ids[0], torch.arange(9)), **call)
    model(ids, labels=ids, kept_ids=None, **call)
    heads.take_off()


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a rollout_func"):
        build(tmp_path, "GRPO", True, ROLLOUTS, kept_ids=True, rollout_func=lambda *_: {})


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_sampler_that_changes_logits(kind: str, tmp_path: Path) -> None:
    """Of the trainer's config, and of the model where the config says nothing."""
    message = r"kept_ids=True: .*got {}, which changes .*Either sample with {}, also in model\.generation_config"
    penalty = message.format("repetition_penalty=1.2", r"repetition_penalty=1\.0")
    with pytest.raises(ValueError, match=penalty):
        build(tmp_path, kind, True, {**ROLLOUTS, **FILTERS, "repetition_penalty": 1.2}, kept_ids=True)
    build(tmp_path, kind, True, {**ROLLOUTS, **FILTERS, "repetition_penalty": 1.2})
    model = tiny.model()
    model.generation_config.sequence_bias = {(5,): 2.0}
    with pytest.raises(ValueError, match=message.format(r"sequence_bias=\{\(5,\): 2.0\}", "sequence_bias=None")):
        build(tmp_path, kind, True, {**ROLLOUTS, **FILTERS}, kept_ids=True, model=model)


def test_a_sampler_without_a_filter(tmp_path: Path) -> None:
    """It is said once, at construction, and gradients are those without kept ids."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept = gradients(tmp_path, "GRPO", {"num_iterations": 2}, kept_ids=True)
    (message,) = (str(x.message) for x in said if "has no filter" in str(x.message))
    assert "Set top_p, top_k or min_p of GRPOConfig" in message
    whole = gradients(tmp_path, "GRPO", {"num_iterations": 2})
    for ours, expected in zip(kept, whole, strict=True):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# Two processes


def rollouts(rank: int, live: tuple[float, float]) -> dict[str, Tensor]:
    """Return four completions of two prompts, with the share `live[rank]` of sequences that have an advantage."""
    generator = torch.Generator().manual_seed(rank)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    advantages = torch.tensor([0.5, 1.0, -1.0, -0.5])
    advantages[int(4 * live[rank]) :] = 0
    return {
        "prompt_ids": torch.randint(10, 300, (4, 6), generator=generator),
        "prompt_mask": torch.ones(4, 6, dtype=torch.long),
        "completion_ids": torch.randint(10, 300, (4, 5), generator=generator) * mask,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(2 * int(mask.sum())),
    }


def sharded_gradients(folder: Path, rank: int, name: str, live: tuple[float, float], skip: bool | str) -> list[Tensor]:
    config = {**ROLLOUTS, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = build(folder, "GRPO", True, config, skip_zero_advantage=skip, loss=LOSSES[name]())
    model = inner_model(trainer.model).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    trainer.current_gradient_accumulation_steps = trainer.state.logging_steps = 1
    trainer.compute_loss(model, rollouts(rank, live)).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def worker(rank: int, folder: str, port: str) -> None:
    join(rank, port)
    # DDP: what TRL logs, at steps where a rank has few live sequences or none.
    config = {**ROLLOUTS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    for rewards in (tied, all_tied):
        stock = run(Path(folder), "GRPO", False, config, reward_funcs=[rewards])
        ours = run(Path(folder), "GRPO", True, config, reward_funcs=[rewards])
        assert_same(ours, stock)
    loss = LigerFusedLinearGRPOLoss(reduction="bnpo")
    logs = [
        run(Path(folder), "GRPO", True, config, reward_funcs=[tied], loss=loss, skip_zero_advantage=skip)
        for skip in ("auto", False)
    ]
    assert_same(*logs)
    # FSDP2: the ranks gather parameters together.
    for name in ("none", "bnpo"):
        for live in ((0.5, 0.5), (0.5, 0.0), (1.0, 0.75), (1.0, 0.0)):
            skipped, whole = (sharded_gradients(Path(folder), rank, name, live, skip) for skip in ("auto", False))
            for ours, expected in zip(skipped, whole, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
            assert any(g.abs().max() > 1e-4 for g in whole)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.ordinary_memory
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_two_processes(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    spawn(fresh_process, worker, str(tmp_path))
