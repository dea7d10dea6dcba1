"""TRL's trainers on chunked heads: their own data, metrics and loss mathematics, without logits.

    Liger*Trainer                  one mixin over TRL's class, and the one method that builds logits where one does
      model(..., labels=,          the wrapped model: hooks of DDP, FSDP and ZeRO run, adapters apply
            fused_lm_head=True     TRL's call: its `FusedCausalLMOutput`, from `linear_token_stats`
            head_fn=fn)            ours: whatever `fn` returns
        backbone -> hidden states
        fn(head, input)            in the place of lm_head and loss, inside the model's forward

Three ways to a loss go through that call:

1. SFT, DPO, KTO, GRPO and RLOO ask TRL for a fused head and compute their loss from its statistics: the head is ours,
   the loss and every metric stay TRL's.
2. ORPO, CPO (SimPO), GKD, GOLD, distillation and online DPO build logits in one method; that method is overridden.
3. `loss=`, a loss of this library or a user's own on one of its bases, takes the place of the trainer's: its gradient
   is computed in forward, and its metrics are logged under TRL's names.

Every trainer takes TRL's arguments, and `loss` and `logits_budget` (bytes of logits alive at once, see
`LigerTrainerMixin`; a `loss` has its own).
"""

from __future__ import annotations

import importlib
from typing import Any

from liger_chunked.integrations.trl.versions import check_versions

check_versions()

# Each trainer imports the TRL module that it extends, and that alone.
_MODULES = {
    "LigerCPOTrainer": "cpo",
    "LigerDPOTrainer": "dpo",
    "LigerDistillationTrainer": "distillation",
    "LigerGKDTrainer": "gkd",
    "LigerGOLDTrainer": "gold",
    "LigerGRPOTrainer": "grpo",
    "LigerKTOTrainer": "kto",
    "LigerORPOTrainer": "orpo",
    "LigerOnlineDPOTrainer": "online_dpo",
    "LigerRLOOTrainer": "rloo",
    "LigerSFTTrainer": "sft",
    "add_chunked_lm_head": "fused_output",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
