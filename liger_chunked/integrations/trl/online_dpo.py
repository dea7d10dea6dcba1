"""`LigerOnlineDPOTrainer`: TRL's online DPO without logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from trl.experimental.online_dpo import OnlineDPOTrainer

from liger_chunked.integrations.trl.mixin import LigerTrainerMixin

_OF_THE_MODEL = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")


class LigerOnlineDPOTrainer(LigerTrainerMixin, OnlineDPOTrainer):
    """TRL's `OnlineDPOTrainer` without logits; it takes no `loss`."""

    models_without_head = ("model", "ref_model")

    def _forward(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        vision_inputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        if vision_inputs is None:
            # Truncate on the left, where the prompt is. Images need all of their tokens.
            too_long = max(prompt_ids.shape[1] + completion_ids.shape[1] - self.max_length, 0)
            prompt_ids, prompt_mask = prompt_ids[:, too_long:], prompt_mask[:, too_long:]
        # Score padding too, because TRL's mean entropy and KL count it. Without a prompt, position t scores token t.
        first = max(prompt_ids.shape[1] - 1, 0)
        input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        shift_labels = torch.full_like(input_ids, -100)
        scored = slice(first, first + completion_ids.shape[1])
        shift_labels[:, scored] = completion_ids
        return model(
            input_ids,
            attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
            **{name: x for name, x in (vision_inputs or {}).items() if name in _OF_THE_MODEL},
            shift_labels=shift_labels,
            fused_lm_head=True,
        ).log_probs[:, scored]
