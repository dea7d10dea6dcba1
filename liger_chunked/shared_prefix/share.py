"""Compute once a prefix that sequences share, such as a prompt in GRPO or DPO (docs/shared_prefix.md).

The model's own forward runs on a trie, with its wrappers, adapters, hooks and gradient checkpointing.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.device import is_on_gpu
from liger_chunked.integrations.transformers.attach import attach_head
from liger_chunked.integrations.transformers.detect import head_of, inner_model
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput, kept
from liger_chunked.shared_prefix.attention import BLOCK, serve
from liger_chunked.shared_prefix.inputs import TAKE_DENSE, dtype_of, implementation_of, model_inputs, windows_of
from liger_chunked.shared_prefix.served import ROUTER, facts_of, hidden_states_of, why_not_shared
from liger_chunked.shared_prefix.trie import PackedTrie, TriePlan, gather_rows, plan_trie
from liger_chunked.types import Head
from liger_chunked.what_ran import record_of, sharing

logger = logging.getLogger(__name__)

WORTHWHILE = 0.1  # least share of tokens to save
_DENSE = 1024  # longest row with a dense mask on a GPU
_SHORT = 256  # tokens of a short row on a CPU
_ROW = 1 << 16  # longest row for FlexAttention


@dataclass(frozen=True)
class SharedBatch:
    trie: PackedTrie
    inputs: dict[str, Any]  # of `model.forward`

    def hidden_states(self, packed: Tensor, logits_to_keep: int | Tensor = 0) -> Tensor:
        """Return the padded batch's hidden states (B, T, H), zero at padding, from `packed` (R, L, H) of `inputs`.

        `logits_to_keep` is as in `model.forward`.
        """
        index = kept(self.trie.node[..., None], logits_to_keep)[..., 0]
        return gather_rows(packed.flatten(0, 1), index)

    def head_fn(self, head_fn: HeadFn, *, logits_to_keep: int | Tensor = 0) -> HeadFn:
        """Wrap a function for `model(**batch.inputs, ...)`: it gets the padded batch's hidden states.

        Pass padded labels to the model, but `logits_to_keep` here. `HeadInput.outputs` stays the trie's.
        """

        def on_padded_batch(head: Head, input: HeadInput) -> Any:
            input = replace(input, hidden_states=self.hidden_states(input.hidden_states, logits_to_keep))
            with sharing(self.trie.input_ids.numel(), self.trie.tokens):
                return head_fn(head, input)

        return on_padded_batch


def share_batch(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> SharedBatch:
    """Merge the common prefixes of a batch.

    Positions count tokens without padding, as in `generate`.

    Args:
        input_ids: (B, T), padded anywhere.
        attention_mask: (B, T), 0 at padding.

    Raises:
        ValueError: see `why_not_shared`.
    """
    reason = why_not_shared(model)
    if reason is not None:
        raise ValueError(f"{type(inner_model(model)).__name__} cannot share prompts: {reason}")
    inner = inner_model(model)
    return _share(inner, _plan(inner, input_ids, attention_mask))


def share_pass(
    model: PreTrainedModel, arguments: dict[str, Any], *, always: bool = False, with_trailing: bool = False
) -> SharedBatch | None:
    """Merge common prefixes in `arguments` of `model.forward`, if that saves a tenth of the tokens.

    Returns None if the model cannot share, or if hidden states would differ from those of `forward`, which counts
    padding in positions. What happens is logged once per model.

    Args:
        model: without wrappers.
        always: share if anything is saved, or raise ValueError.
        with_trailing: as in `pack_trie`.
    """
    plan = None
    reason = _reason_of_arguments(arguments) or why_not_shared(model)
    if reason is None:
        plan = _plan(model, arguments["input_ids"], arguments.get("attention_mask"), with_trailing)
        reason = _reason_of_padding(model, plan, with_trailing)
    worthwhile = plan is not None and plan.saved >= (0 if always else WORTHWHILE)
    if (head := head_of(model)) is not None:
        too_little = None if worthwhile else "sharing would save less than a tenth of the tokens"
        record_of(head).why_not_shared = reason or too_little
    if reason is not None:
        if always:
            raise ValueError(f"{type(model).__name__} cannot share prompts: {reason}")
        _log_refusal(model, reason)
        return None
    assert plan is not None
    return _logged(model, _share(model, plan)) if worthwhile else None


_KNOWN_ARGUMENTS = (
    "input_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "ignore_index",
    "use_cache", "return_dict",
)  # fmt: skip


def _reason_of_arguments(arguments: dict[str, Any]) -> str | None:
    others = [
        name for name, x in arguments.items() if name not in _KNOWN_ARGUMENTS and x is not None and x is not False
    ]
    if "output_router_logits" in others:
        return ROUTER
    if others:
        return f"the pass has {others[0]}, and only tokens and their mask can be merged"
    if not isinstance(arguments.get("input_ids"), Tensor):
        return "the pass has no input_ids"
    if torch.compiler.is_compiling():
        return "its forward is compiled"
    mask = arguments.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        return f"its attention_mask has {mask.ndim} dimensions, and one of (B, T) can be merged"
    return None


def _reason_of_padding(model: PreTrainedModel, plan: TriePlan, with_trailing: bool) -> str | None:
    if plan.padding == "between":
        return "there is padding between the tokens of a sequence, which counts in their positions"
    if plan.padding == "left" and not facts_of(model).relative:
        return "its positions are absolute, and count the padding on the left"
    if plan.longest < plan.batch.shape[1] and facts_of(model).width_matters:
        return "its positions are scaled by the width of the batch, which counts padding"
    window = min((w for w in windows_of(model.config).values() if w is not None), default=None)
    if with_trailing and window is not None and plan.most_trailing >= window:
        return f"the metrics of this trainer read padding, here beyond the sliding window of {window} tokens"
    return None


_LOGGED: weakref.WeakKeyDictionary[PreTrainedModel, set[str]] = weakref.WeakKeyDictionary()


def _is_new(model: PreTrainedModel, message: str) -> bool:
    logged = _LOGGED.setdefault(model, set())
    is_new = message not in logged
    logged.add(message)
    return is_new


def _log_refusal(model: PreTrainedModel, reason: str) -> None:
    if _is_new(model, reason):
        logger.info("%s computes shared prompts once for each sequence: %s", type(model).__name__, reason)


def _logged(model: PreTrainedModel, batch: SharedBatch) -> SharedBatch:
    if _is_new(model, "shared"):
        trie = batch.trie
        logger.info(
            "%s computes shared prompts once: %d tokens in place of %d (%.0f%% saved) in this batch",
            type(model).__name__, trie.input_ids.numel(), trie.tokens, 100 * trie.saved,
        )  # fmt: skip
    return batch


def shared_prefix_hidden_states(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return the backbone's hidden states (B, T, H), zero at padding. Computes common prefixes once.

    Differentiable. With an `lm_head`, use `attach_head(model)`, which also runs wrappers.

    Raises:
        ValueError: see `why_not_shared`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    >>> batch = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    >>> mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    >>> hidden_states = shared_prefix_hidden_states(model, batch, mask)
    >>> hidden_states.shape, torch.equal(hidden_states[0, :2], hidden_states[1, :2])
    (torch.Size([2, 4, 16]), True)
    """
    batch = share_batch(model, input_ids, attention_mask)
    if inner_model(model).get_output_embeddings() is None:
        return batch.hidden_states(model(**batch.inputs).last_hidden_state)
    attach_head(model)
    return model(**batch.inputs, head_fn=batch.head_fn(hidden_states_of))


def _plan(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, with_trailing: bool = False
) -> TriePlan:
    if is_on_gpu(input_ids):
        row_tokens, tree_tokens, multiple = _ROW, None, 2 * BLOCK
    else:
        # Dense attention grows with a row's square. Twice the width holds any pair.
        row_tokens = tree_tokens = max(2 * input_ids.shape[1], _SHORT)
        multiple = 8 if implementation_of(model) in TAKE_DENSE else 2 * BLOCK
    return plan_trie(
        input_ids, attention_mask, row_tokens=row_tokens, tree_tokens=tree_tokens, multiple=multiple,
        with_trailing=with_trailing,
    )  # fmt: skip


def _share(model: PreTrainedModel, plan: TriePlan) -> SharedBatch:
    implementation = implementation_of(model)
    dense = implementation in TAKE_DENSE
    if is_on_gpu(plan.input_ids):
        dense = dense and (plan.row_length <= _DENSE or dtype_of(model) == torch.float64)
    if not dense:
        serve(implementation)
    trie = plan.pack()
    return SharedBatch(trie, model_inputs(model, trie, implementation, dense))
