"""Compute once a prefix that sequences share, such as a prompt in GRPO or DPO (docs/shared_prefix.md).

    attach_head(model)
    batch = share_batch(model, input_ids, attention_mask)  # the trie of the batch's tokens
    # `fn` gets the padded batch's hidden states
    loss = model(**batch.inputs, labels=labels, head_fn=batch.head_fn(fn))

share.py        the batch, and when sharing pays
served.py       which models can share: declared reasons, and a comparison on a small copy
inputs.py       what the model's forward gets
attention.py    masks of a trie, and FlexAttention
trie.py         packing on the host, and the gather that undoes it
"""

# ruff: noqa: E402 (an old transformers fails at the first name that it lacks)
from liger_chunked import versions

versions.require(__name__, "transformers")

from liger_chunked.shared_prefix.served import why_not_shared
from liger_chunked.shared_prefix.share import SharedBatch, share_batch, shared_prefix_hidden_states

__all__ = ["SharedBatch", "share_batch", "shared_prefix_hidden_states", "why_not_shared"]
