"""Calls of the library in strictly typed code. `make lint` checks them with mypy and pyright; nothing runs.

`assert_type` says what a call returns. The comments `type: ignore[...]` mark mistakes that a type checker must report:
mypy warns of one that reports nothing, so types that are lost fail here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import _BaseModelWithGenerate  # pyright: ignore[reportPrivateUsage]
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_trainer import SFTTrainer
from typing_extensions import assert_type

import liger_chunked
from liger_chunked import (
    AutoLigerKernelForCausalLM,
    CrossEntropyMetrics,
    DeferHandle,
    DistillationMetrics,
    Examples,
    KeptIds,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearOnPolicyDistillationLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
    LigerLayerNorm,
    LigerRMSNorm,
    LogitOptions,
    MemoryEstimate,
    Pairs,
    PolicyMetrics,
    PreferenceMetrics,
    Rollouts,
    Surrogate,
    TokenStats,
    UnpairedPreferenceMetrics,
    apply_liger_kernel,
    attach_head,
    defer_logits,
    estimate_memory,
    liger_rms_norm,
    linear_token_stats,
    logit_options,
    revert_liger_kernel,
    run_head,
    shifted,
)
from liger_chunked.compat import chunked_loss as liger_losses
from liger_chunked.compat import transformers as liger_layers
from liger_chunked.compat.chunked_loss import PairMetrics
from liger_chunked.integrations.frameworks.cut_cross_entropy import linear_cross_entropy
from liger_chunked.integrations.frameworks.prime_rl import FusedOutputLinear
from liger_chunked.integrations.transformers import Applied, HeadInput, ModelReport
from liger_chunked.integrations.trl import LigerDPOTrainer, LigerGRPOTrainer, LigerSFTTrainer, patch_trl
from liger_chunked.losses.surrogates import Clip
from liger_chunked.testing import LossReport, check_loss, check_model
from liger_chunked.types import Head


class Hinge(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs: Pairs) -> Tensor:
        assert_type(pairs.logratios, Tensor)
        return torch.relu(1 - self.beta * (pairs.logps[:, 0] - pairs.logps[:, 1]))


class Signed(LigerFusedLinearUnpairedPreferenceBase):
    def preference_loss(self, examples: Examples) -> Tensor:
        return -examples.signs * examples.logratios


class Reinforce(LigerFusedLinearPolicyBase):
    token_outputs = ("mean_logits",)

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return -rollouts.advantages * rollouts.logps


@dataclass(frozen=True)
class Cubed(Surrogate):
    power: int = 3
    scope = "token"

    def cost(self, rollouts: Rollouts) -> Tensor:
        return -rollouts.advantages * rollouts.ratio**self.power


class Squared(LigerFusedLinearDistillationBase):
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return (student_logits - teacher_logits).square().sum(-1)


def losses(weight: Tensor, x: Tensor, target: Tensor, labels: Tensor) -> None:
    dpo = LigerFusedLinearDPOLoss(beta=0.1, loss_type="ipo", logits_budget="256MiB")
    assert_type(dpo, LigerFusedLinearDPOLoss)
    assert_type(dpo.options, LogitOptions)
    loss, metrics = dpo(weight, x, target, ref_logps=None, example_weights=None)
    assert_type(loss, Tensor)
    assert_type(metrics, PreferenceMetrics)
    assert_type(metrics.reward_margins, Tensor)
    assert_type(LigerFusedLinearGRPOLoss(epsilon_high=0.28, logits_budget="1GiB").surrogate, Surrogate)
    grpo = LigerFusedLinearGRPOLoss(surrogate=Clip(epsilon_low=0.1), reduction="dapo")
    grpo = LigerFusedLinearGRPOLoss(surrogate=Cubed(power=5))
    grpo = LigerFusedLinearGRPOLoss.from_loss_type("dapo")
    assert_type(grpo, LigerFusedLinearGRPOLoss)
    assert_type(grpo(weight, x, target, torch.ones(4)), tuple[Tensor, PolicyMetrics])
    jsd = LigerFusedLinearJSDLoss(temperature=2.0)
    assert_type(jsd(weight, x, weight, x, target), tuple[Tensor, DistillationMetrics])
    assert_type(LigerFusedLinearKTOLoss()(weight, x, target, labels), tuple[Tensor, UnpairedPreferenceMetrics])
    on_policy = LigerFusedLinearOnPolicyDistillationLoss()
    assert_type(on_policy(weight, x, weight, x, target), tuple[Tensor, PolicyMetrics])
    assert_type(Hinge(beta=1.0)(weight, x, target), tuple[Tensor, PreferenceMetrics])
    assert_type(Signed()(weight, x, target, labels), tuple[Tensor, UnpairedPreferenceMetrics])
    assert_type(Reinforce()(weight, x, target, torch.ones(4)), tuple[Tensor, PolicyMetrics])
    assert_type(Squared()(weight, x, weight, x, target), tuple[Tensor, DistillationMetrics])


def cross_entropy(weight: Tensor, x: Tensor, target: Tensor, flag: bool) -> None:
    plain = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    assert_type(plain, LigerFusedLinearCrossEntropyLoss[Tensor])
    assert_type(plain(weight, *shifted(x, target)), Tensor)
    with_metrics = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True, reduction="sum")
    assert_type(with_metrics(weight, x, target), tuple[Tensor, CrossEntropyMetrics])
    either = LigerFusedLinearCrossEntropyLoss(return_z_loss=flag)
    assert_type(either(weight, x, target), Tensor | tuple[Tensor, CrossEntropyMetrics])


def statistics(weight: Tensor, x: Tensor, target: Tensor) -> None:
    stats = linear_token_stats(weight, x, target, outputs=("logps", "entropy"))
    assert_type(stats, TokenStats)
    assert_type(stats.entropy, Tensor | None)


def modules(x: Tensor, labels: Tensor) -> None:
    assert_type(liger_rms_norm(x, x[0], 1e-6), Tensor)
    assert_type(LigerRMSNorm(8)(x), Tensor)
    assert_type(LigerRMSNorm(8)(x, x), tuple[Tensor, Tensor])
    assert_type(LigerLayerNorm(8)(x), Tensor)
    kept = KeptIds.cat([KeptIds.from_lists([[1], None]), KeptIds.from_completions([[[2, 3]]], torch.tensor([[2]]))])
    assert_type(kept.take(torch.tensor([0, -1])), KeptIds)
    ids = KeptIds.from_lists([[1], [2, 3], [2]])
    stats = linear_token_stats(torch.randn(16, 8), torch.randn(3, 8), torch.tensor([1, 3, 2]), kept=ids)
    assert_type(stats, TokenStats)
    assert_type(FusedOutputLinear(8, 16)(x, labels), dict[str, Tensor])
    assert_type(linear_cross_entropy(x, x, labels), Tensor | tuple[Tensor, Tensor])


def models(model: PreTrainedModel, lm_head: torch.nn.Linear, ids: Tensor) -> None:
    applied = apply_liger_kernel(model, logits_budget="1GB", rope=False, rms_norm=True, cross_entropy=None)
    for tiles in (True, 4096, None):
        apply_liger_kernel(model, tiled_mlp=tiles)
    apply_liger_kernel(model, tiled_mlp="auto")
    apply_liger_kernel(model, tiled_mlp="all")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(applied, Applied)
    assert_type(applied.left, dict[str, str])
    assert_type(liger_chunked.apply_liger_kernel_to_llama(rope=False), Applied | None)
    revert_liger_kernel(model)
    handle = defer_logits(lm_head)
    assert_type(handle, DeferHandle)
    handle.remove()
    attach_head(model)
    assert_type(logit_options(model), LogitOptions)

    def head_fn(head: Head, input: HeadInput) -> tuple[Tensor, PreferenceMetrics]:
        assert_type(input.target, Tensor)
        return input.loss(LigerFusedLinearDPOLoss(), head)

    assert_type(run_head(model, head_fn, input_ids=ids), tuple[Tensor, PreferenceMetrics])
    assert_type(check_model(model, swiglu=False), ModelReport)
    assert_type(AutoLigerKernelForCausalLM.from_pretrained("a/model"), _BaseModelWithGenerate)


def trainers(model: PreTrainedModel, rewards: Sequence[float]) -> None:
    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(text)) for text in completions]

    grpo = LigerGRPOTrainer(
        model, reward, GRPOConfig(), loss=LigerFusedLinearGRPOLoss(reduction="dapo"), share_prefix="auto",
        kept_ids=False, skip_zero_advantage="auto",
    )  # fmt: skip
    assert_type(grpo, LigerGRPOTrainer)
    of_trl: GRPOTrainer = grpo
    assert isinstance(of_trl, LigerGRPOTrainer)
    dpo: DPOTrainer = LigerDPOTrainer(model, args=DPOConfig(beta=0.2), loss=Hinge(beta=1.0), logits_budget=None)
    assert isinstance(dpo, LigerDPOTrainer)
    sft: SFTTrainer = LigerSFTTrainer(model="a/model", loss=LigerFusedLinearCrossEntropyLoss(dft=True))
    assert isinstance(sft, LigerSFTTrainer)
    with patch_trl(model, logits_budget="1GB") as patch:
        assert_type(patch, patch_trl)

    @patch_trl(share_prefix=False)
    def main(steps: int) -> float:
        return steps / 2

    assert_type(main(3), float)


class OwnTrainer(LigerDPOTrainer):
    """A user's subclass has the arguments too."""


def others(weight: Tensor, x: Tensor, target: Tensor) -> None:
    estimate = estimate_memory(LigerFusedLinearDPOLoss(), vocab_size=100, hidden_size=8, shape=(2, 4))
    assert_type(estimate, MemoryEstimate)
    assert_type(estimate.peak, int)
    report = check_loss(Hinge())
    assert_type(report, LossReport)
    assert_type(report.budgets, tuple[int, ...])
    compatible = liger_losses.LigerFusedLinearDPOLoss(beta=0.1)
    assert_type(compatible(weight, x, target), tuple[Tensor, PairMetrics])
    assert_type(liger_layers.LigerLayerNorm(8)(x), Tensor)
    assert_type(liger_layers.apply_liger_kernel_to_llama(False, True, model=None), Applied | None)


def mistakes(model: PreTrainedModel, weight: Tensor, x: Tensor, target: Tensor) -> None:
    LigerFusedLinearDPOLoss(bta=0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    LigerFusedLinearDPOLoss(beta="large")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    LigerFusedLinearDPOLoss()(weight, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    LigerFusedLinearDPOLoss()(weight, x, target, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    LigerFusedLinearGRPOLoss(epsilon_lo=0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    LigerFusedLinearGRPOLoss(delta="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    LigerFusedLinearGRPOLoss(surrogate=Clip)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Clip(fipo_half_life=3.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    print(LigerFusedLinearDPOLoss()(weight, x, target)[1].margins)  # type: ignore[attr-defined]  # pyright: ignore
    LigerRMSNorm(8)("x")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    apply_liger_kernel(model, silu=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    apply_liger_kernel(model, rope="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    check_model(model, silu=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    defer_logits(model, budget=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    liger_chunked.defer_logit(model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    patch_trl(model, budget="1GB")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    OwnTrainer(args=None)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


class Wrong(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs: Rollouts) -> Tensor:  # type: ignore[override]  # pyright: ignore
        return pairs.logps
