"""Use your own loss in TRL's DPO trainer: two lines define the cost of a pair; the library and TRL do the rest.

python examples/trl_custom_loss.py [--model PATH] [--steps N]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from trl import DPOConfig
from trl_common import preference_data, setup

from liger_chunked import LigerFusedLinearPreferenceBase, Pairs
from liger_chunked.integrations.trl import LigerDPOTrainer


class MarginPerToken(LigerFusedLinearPreferenceBase):
    """The chosen answer should gain more on the reference, per token, than the rejected one, by a margin."""

    def preference_loss(self, pairs: Pairs) -> Tensor:
        chosen, rejected = (pairs.logratios / pairs.lengths).unbind(-1)
        return -F.logsigmoid(self.beta * (chosen - rejected) - 0.5)


if __name__ == "__main__":
    model, tokenizer, settings, _ = setup()
    trainer = LigerDPOTrainer(
        model=model,
        args=DPOConfig(**settings, precompute_ref_log_probs=True),
        processing_class=tokenizer,
        train_dataset=preference_data(),
        loss=MarginPerToken(beta=2.0),
    )
    trainer.train()
