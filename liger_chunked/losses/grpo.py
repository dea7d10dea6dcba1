"""GRPO and its kin: a policy loss of a surrogate, with the reductions and importance levels of the base.

Surrogates are in surrogates.py, so that each is written once for all reductions and levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor
from typing_extensions import Self, Unpack

from liger_chunked.arguments import own_options
from liger_chunked.losses.policy import LigerFusedLinearPolicyBase
from liger_chunked.losses.rollouts import IMPORTANCE_LEVELS
from liger_chunked.losses.settings import is_set
from liger_chunked.losses.surrogates import Surrogate, SurrogateOptions, surrogate_of
from liger_chunked.types import LogitOptionsDict, Rollouts, shown

LOSS_TYPES: Mapping[str, Mapping[str, str]] = {
    "grpo": {"surrogate": "clip", "reduction": "grpo"},
    "bnpo": {"surrogate": "clip", "reduction": "bnpo"},
    "dr_grpo": {"surrogate": "clip", "reduction": "dr_grpo"},
    "dapo": {"surrogate": "clip", "reduction": "dapo"},
    "cispo": {"surrogate": "cispo", "reduction": "dapo"},
    "sapo": {"surrogate": "sapo", "reduction": "grpo"},
    "luspo": {"surrogate": "clip", "reduction": "luspo", "importance_level": "sequence"},
    "vespo": {"surrogate": "vespo", "reduction": "dapo"},
}


class LigerFusedLinearGRPOLoss(LigerFusedLinearPolicyBase):
    """Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3), fused.

    With advantage `A`, importance ratio `r = pi / pi_old` and stopped gradient `sg`, a token costs

    | surrogate | cost | paper |
    |---|---|---|
    | `clip` | `-min(min(r, delta) A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A)` | PPO 1707.06347; 2505.07291 |
    | `reinforce` | `-r A` | |
    | `cispo` | `-sg(clamp(r, cispo_epsilon_low, epsilon_high)) A log pi` | 2506.13585, equation 4; 2510.13786 |
    | `gmpo` | `-exp(mean over the sequence of log c) A`, with `c` the ratio bounded by the sign of `A` | 2507.20673 |
    | `sapo` | `-4 / tau sigmoid(tau (r - 1)) A`, `tau` by the sign of `A` | 2511.20347 |
    | `vespo` | `-sg(w^k e^(lambda (1 - w))) A log pi`, with `w` the ratio of the sequence | 2602.10693 |
    | `clip_cov` | as `clip`, but 0 for `clip_cov_ratio` of the tokens | Clip-Cov, 2505.22617 |
    | `kl_cov` | `-r A`, plus `ppo_kl_coef abs(log r)` for `kl_cov_ratio` of the tokens | KL-Cov, 2505.22617 |
    | `log_prob` | `-A log pi` | GPG, 2504.02546 |
    | `dppo_tv`, `dppo_kl` | `-min(r, ratio_max) A` inside a trust region, else 0 | DPPO, 2602.04879 |
    | `ipo` | the same, with a region for both signs of `A` | prime-rl |
    | `fipo` | as `clip`, times `clamp(exp(F), 1 - fipo_clip_low, 1 + fipo_clip_high)` | 2603.19835 |
    | `real` | classification of a group's sequences by the sign of `A` | 2602.05630 |
    | `a2po` | `(a2po_beta log(pi(y) / pi_ref(y)) - A)^2` of a sequence `y` | A*-PO, 2505.20686 |

    Classes of `liger_chunked.losses.surrogates`, such as `Clip`, define them, with their settings. A surrogate's name
    takes its settings as keywords of the loss. An object has its own: `surrogate=Clip(epsilon_low=0.1)`, also of a
    subclass of `Surrogate` that you write ("Rollouts" in `docs/writing-a-loss.md`).

    If `old_logps` is None, `r` is 1 with the gradient of `log pi`. Ratios are at most e^80 = 5.5e34 and constant
    beyond, and `old_logps` of -inf count as -1e18: a token that is clipped, filtered by its entropy, or has an
    advantage or a weight of 0 has a gradient of exactly zero, however stale it is ("Far ends" in `docs/numerics.md`).

    Variants (TRL's and Liger-Kernel's default reduction is `"dapo"`, which gives long completions more weight):

    | name | arguments |
    |---|---|
    | GRPO | `reduction="grpo"`, the default |
    | DAPO, 2503.14476 | `reduction="dapo", epsilon_high=0.28` |
    | Dr. GRPO, 2503.20783 | `reduction="dr_grpo", max_completion_length=...` |
    | CISPO | `surrogate="cispo", reduction="dapo", epsilon_high=5.0` |
    | SAPO | `surrogate="sapo", reduction="grpo"` |
    | VESPO | `surrogate="vespo", reduction="dapo"` |
    | GSPO, 2507.18071 | `importance_level="sequence", reduction="grpo", epsilon_low=3e-4, epsilon_high=4e-4` |
    | GSPO-token | as GSPO, with `importance_level="sequence_token"` |
    | GMPO | `surrogate="gmpo", reduction="grpo", epsilon_low=0.4, epsilon_high=0.4` |
    | LUSPO, 2602.05261 | `importance_level="sequence", reduction="luspo"` |
    | PPO's policy term, 1707.06347 | `reduction="dapo"`, with advantages (B, T) of its critic |
    | RLOO, 2402.14740, as TRL clips it | `importance_level="trajectory", reduction="grpo"` |
    | REINFORCE | `surrogate="reinforce", importance_level="trajectory", reduction="grpo"` |
    | DPPO, as in verl | `surrogate="dppo_tv", reduction="token-mean"` |
    | | `surrogate="dppo_kl", reduction="token-mean", epsilon_low=0.05, epsilon_high=0.05` |
    | prime-rl's default | `surrogate="dppo_tv", reduction="dapo", ratio_max=None, sampler_kl_coef=1e-3` |
    | prime-rl's IPO | `surrogate="ipo", reduction="dapo", ratio_max=None, sampler_kl_coef=1e-3` |
    | DRO, 2405.19107, as in verl | `surrogate="log_prob", sampler_kl_coef=dro_beta / 2, reduction="token-mean"` |
    | Clip-Cov | `surrogate="clip_cov", reduction="dapo"` |
    | KL-Cov | `surrogate="kl_cov", reduction="dapo"` |
    | FIPO | `surrogate="fipo", reduction="dapo"` |
    | REAL | `surrogate="real", reduction="grpo", group_size=...` |
    | A*-PO | `surrogate="a2po", reduction="grpo"`, with advantages `reward - V` |

    Levels other than "token", `gmpo`, `vespo` and `off_policy_mask_threshold` cost one more GEMM for a sequence over
    budget; `clip_cov` and `kl_cov`, for a batch over budget.

    Args:
        beta: weight of the KL to the reference, not negative; above 0, a call requires a reference.
        surrogate: a name from the first table, or a `Surrogate`.
        reduction: what the sum over tokens is divided by. "grpo": the mean over sequences of the mean over tokens;
            "bnpo": the valid tokens of the batch; "dapo": `num_items`, or else as "bnpo"; "dr_grpo":
            `B * max_completion_length`; "luspo": `B`. verl's "seq-mean-token-mean", "token-mean",
            "seq-mean-token-sum-norm" and "seq-mean-token-sum" are "grpo", "dapo", "dr_grpo" and "luspo".
        importance_level: of the ratio: "token"; "sequence", the tokens' geometric mean `s` (GSPO,
            https://arxiv.org/abs/2507.18071); "sequence_token", `sg(s) pi / sg(pi)` with stopped gradient `sg`, for
            advantages per token (GSPO-token); "trajectory", their product.
        max_completion_length: positive number of tokens, required by the reduction "dr_grpo" and refused by others.
            None: not given.
        kl_estimator: "k1", "k2", "k3" or "abs", with `d = log pi_ref - log pi` the estimates `-d`, `d^2 / 2`,
            `exp(d) - d - 1` and `abs(d)`; verl's "kl" and "mse" are the first two, and its "low_var_kl" is `k3` of `d`
            in [-20, 20], at most 10 and constant where it is bounded. With `use_bias_correction_kl`, `k1` and `k3` have
            the KL's gradient; without, `k2` has it, and `k1`'s is zero on average.
        use_bias_correction_kl: multiply the estimate by the importance ratio (DeepSeek-V3.2,
            https://arxiv.org/abs/2512.02556).
        off_policy_mask_threshold: in nats, not negative: tokens with a negative advantage cost 0 where the sequence's
            mean of `old_logps - logps` is above it (DeepSeek-V3.2, whose old policy is the sampler). None: no such
            mask.
        entropy_coef: weight of the entropy bonus, the mean over the call's tokens with any reduction, as in TRL.
        top_entropy_quantile: in [0, 1]; only this share of the call's tokens, at least one, with the highest entropy
            keeps cost and bonus (https://arxiv.org/abs/2506.01939). Below 1, costs one more GEMM if logits exceed the
            budget; large steps leave the other tokens out of the backward.
        sampler_kl_coef: weight, not negative, of `(log pi - log pi_old)^2` of every valid token (Kimi K2.5,
            https://arxiv.org/abs/2602.02276), which no mask and no importance weight changes; prime-rl's `kl_tau`.
        **options: settings of the surrogate, which its class in `liger_chunked.losses.surrogates` describes, such as
            `epsilon_low` of `Clip`; and fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip;
            `softcap`, `logit_scale` and `temperature` transform the logits; `logits_budget` is the most bytes of logits
            in memory, such as "512MiB" (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit
            products (None: rounded). Use the sampler's `temperature`; it also applies to the reference.

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)        # two completions of up to three tokens
    >>> target, advantages = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([1.0, -1.0])
    >>> loss, metrics = LigerFusedLinearGRPOLoss()(weight, input, target, advantages)
    >>> bool(torch.isclose(loss, -advantages.mean(), atol=1e-6)), metrics.clip_ratio.item()        # on-policy
    (True, 0.0)
    """

    def __init__(
        self,
        *,
        beta: float = 0.0,
        surrogate: str | Surrogate = "clip",
        reduction: str = "grpo",
        importance_level: str = "token",
        max_completion_length: int | None = None,
        kl_estimator: str = "k3",
        use_bias_correction_kl: bool = True,
        off_policy_mask_threshold: float | None = None,
        entropy_coef: float = 0.0,
        top_entropy_quantile: float = 1.0,
        sampler_kl_coef: float = 0.0,
        **options: Unpack[SurrogateOptions],
    ) -> None:
        if "loss_type" in options:
            name = type(self).__name__
            raise TypeError(f"{name} takes TRL's loss_type as {name}.from_loss_type(loss_type, ...)")
        own_options(type(self), options, SurrogateOptions.__annotations__)
        of_logits = {name: x for name, x in options.items() if name in LogitOptionsDict.__annotations__}
        chosen, by = surrogate_of(surrogate, {name: x for name, x in options.items() if name not in of_logits})
        if chosen.needs_tokens and importance_level != "token":
            raise ValueError(
                f"{by} takes its ratios per token: importance_level must be 'token', got {shown(importance_level)}"
            )
        if not is_set(beta):
            for name, value, default in (
                ("kl_estimator", kl_estimator, "k3"),
                ("use_bias_correction_kl", use_bias_correction_kl, True),
            ):
                if value != default:
                    raise ValueError(f"{name}={shown(value)} is not read with beta=0, the weight of the KL term")
        if not (chosen.reads_ratio or importance_level == "token" or (is_set(beta) and use_bias_correction_kl)):
            raise ValueError(
                f"importance_level={shown(importance_level)} is not read by {by}, whose cost has no "
                "ratio of that level: only a KL term with use_bias_correction_kl would read it"
            )
        super().__init__(
            beta=beta,
            reduction=reduction,
            importance_level=importance_level,
            max_completion_length=max_completion_length,
            kl_estimator=kl_estimator,
            use_bias_correction_kl=use_bias_correction_kl,
            off_policy_mask_threshold=off_policy_mask_threshold,
            sampler_kl_coef=sampler_kl_coef,
            entropy_coef=entropy_coef,
            top_entropy_quantile=top_entropy_quantile,
            clipped=chosen.clipped,
            **cast(LogitOptionsDict, of_logits),
        )
        self.surrogate = chosen
        mixes_tokens = IMPORTANCE_LEVELS[importance_level].mixes_tokens
        self.scope = "sequence" if mixes_tokens and chosen.scope == "token" else chosen.scope
        self.weighs = chosen.weighs
        self.needs_reference = chosen.needs_reference
        if chosen.token_outputs:
            self.token_outputs = chosen.token_outputs

    @classmethod
    def from_loss_type(cls, loss_type: str, **settings: Any) -> Self:
        """Return the loss that TRL calls `loss_type`; `settings` take precedence.

        `luspo` has sequence level, as in its paper, unlike in TRL.

        Args:
            loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
            **settings: arguments of the constructor. "dr_grpo" needs `max_completion_length`.

        Returns:
            The loss, with the `surrogate`, `reduction` and `importance_level` of this name and else the constructor's
            defaults.

        Raises:
            TypeError: the constructor has no such argument, or one has the wrong type.
            ValueError: `loss_type` is unknown, or a setting is out of range or not read.

        >>> LigerFusedLinearGRPOLoss.from_loss_type("dapo", epsilon_high=0.28).reduction
        'dapo'
        """
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {sorted(LOSS_TYPES)}")
        arguments: dict[str, Any] = {**LOSS_TYPES[loss_type], **settings}
        return cls(**arguments)

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return self.surrogate.cost(rollouts)

    def extra_repr(self) -> str:
        return f"surrogate={self.surrogate!r}, {super().extra_repr()}"
