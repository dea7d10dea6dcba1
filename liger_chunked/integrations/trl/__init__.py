"""TRL's trainers on chunked heads: TRL's data, metrics and losses, without logits.

    Liger*Trainer                  a mixin over TRL's class; overrides the method that builds logits, if there is one
      model(..., labels=,          the wrapped model: hooks of DDP, FSDP and ZeRO run, adapters apply
            fused_lm_head=True     TRL's call: returns `FusedCausalLMOutput`, from `linear_token_stats`
            head_fn=fn)            our call: returns `fn(head, input)`
        backbone -> hidden states
        fn(head, input)            in place of lm_head and loss, inside the model's forward

A loss is computed through that call in one of three ways:

1. SFT, DPO, KTO, GRPO and RLOO: TRL requests a fused head and computes its loss from the head's statistics. The head is
   ours; the loss and all metrics are TRL's.
2. ORPO, CPO (SimPO), GKD, GOLD, distillation and online DPO: TRL builds logits in one method, which our trainers
   override.
3. `loss=` replaces the trainer's loss by a loss of this library, or by a user's subclass of one of its bases. The
   forward computes its gradient, and the trainer logs its metrics under TRL's names.

Every trainer takes TRL's arguments and `logits_budget`, the bytes of logits in memory at once (see
`LigerTrainerMixin`). All but RLOO and online DPO take `loss`, which has a budget itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from liger_chunked.integrations.trl.versions import check_versions

check_versions()

# Each trainer imports only the TRL module that it extends.
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
