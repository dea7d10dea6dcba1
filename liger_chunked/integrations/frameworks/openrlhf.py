"""OpenRLHF, from 0.11.1.

Run with OpenRLHF 0.11.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrlhf.models import actor
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from liger_chunked.calls import typed_like
from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.transformers import HeadInput, attach_head
from liger_chunked.types import Head

__all__ = ["FusedActor"]


class FusedActor(actor.Actor):
    """OpenRLHF's `Actor`, whose outputs with log-probabilities have no logits.

    Log-probabilities and entropies are those of the policy at `temperature`. OpenRLHF 0.11.0 still took the entropy at
    temperature 1. Models of images and text, and calls for logits alone, run OpenRLHF's code.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach_head(self.model)

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: Any = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        if (action_mask is None and not return_logprobs) or getattr(self, "is_vlm", False):
            return super().forward(
                sequences,
                action_mask,
                attention_mask,
                return_output,
                allgather_logits,
                return_logprobs,
                ring_attn_group,
                packed_seq_lens,
                return_entropy,
                **mm_inputs,
            )
        assert attention_mask is not None
        batch, length = sequences.shape
        packed = self.packing_samples
        if packed:
            ids, positions, target, padding, indices = actor.unpad_and_slice_tensor(
                sequences, attention_mask, ring_attn_group
            )
        else:
            ids, target = sequences, sequences.roll(-1, 1)
            positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)

        def head_fn(head: Head, input: HeadInput) -> Any:
            stats = linear_token_stats(
                head.weight,
                input.hidden_states,
                input.target,
                head.bias,
                outputs=("logps", "entropy") if return_entropy else ("logps",),
                temperature=self.temperature,
                softcap=input.options.softcap,
                logit_scale=input.options.logit_scale,
            )
            output = MoeCausalLMOutputWithPast(aux_loss=input.aux_loss)
            output.entropy = stats.entropy if return_entropy else None
            return stats.logps, output

        mask = None if packed else attention_mask
        logps, output = self.model(
            ids, attention_mask=mask, position_ids=positions, shift_labels=target, head_fn=head_fn, **mm_inputs
        )

        def restored(x: Tensor) -> Tensor:
            if packed:
                x = actor.gather_and_pad_tensor(x, ring_attn_group, padding, indices, batch, length)
            return x[:, :-1]

        logps = restored(logps)
        if output.entropy is not None:
            output.entropy = restored(output.entropy)
        if action_mask is not None:
            logps = logps[:, -action_mask.shape[1] :] * action_mask.float()
        return (logps, output) if return_output else logps

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
