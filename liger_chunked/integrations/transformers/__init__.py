"""Hugging Face models: chunked losses inside `model.forward`, and base kernels that replace layers.

head.py        finds hidden states, weight, logits transform and loss inputs of any model with an `lm_head`, on each
call
head_check.py  checks, by a dry run, what a model computes between its backbone and its logits
forward.py     the forward that every patched model gets, and `attach_head`
layers.py      replacements for norms, MLPs, rotary embeddings and losses
families.py    the table that maps the classes of each model family to these layers
apply.py       patches one model or a family, and reverts the patch
verify.py      compares the kernels of a table row with the code that they replace
check.py       compares a patched model with the original one
experts.py     computes the load-balancing loss as the model's own forward does
patches.py     replaces methods and attributes, and restores them
shared_prefix.py  computes prompts that sequences share once; trie.py packs them, trie_attention.py has the masks
auto.py        an `AutoModelForCausalLM` that returns patched models
"""

from typing import Any

from liger_chunked.integrations.transformers.apply import (
    APPLY_TO,
    Applied,
    apply_liger_kernel,
    register_family,
    revert_liger_kernel,
)
from liger_chunked.integrations.transformers.auto import AutoLigerKernelForCausalLM
from liger_chunked.integrations.transformers.check import ModelReport, check_model
from liger_chunked.integrations.transformers.families import FAMILIES, Family
from liger_chunked.integrations.transformers.forward import attach_head, detach_head
from liger_chunked.integrations.transformers.head import HeadFn, HeadInput, logit_options
from liger_chunked.integrations.transformers.shared_prefix import (
    SharedBatch,
    maybe_share,
    share_batch,
    shared_prefix_hidden_states,
    why_not_shared,
)


def __getattr__(name: str) -> Any:
    """Return `apply_liger_kernel_to_<family>`, also for families that were registered later."""
    if name in APPLY_TO:
        return APPLY_TO[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FAMILIES",
    "Applied",
    "AutoLigerKernelForCausalLM",
    "Family",
    "HeadFn",
    "HeadInput",
    "ModelReport",
    "SharedBatch",
    "apply_liger_kernel",
    "attach_head",
    "check_model",
    "detach_head",
    "logit_options",
    "maybe_share",
    "register_family",
    "revert_liger_kernel",
    "share_batch",
    "shared_prefix_hidden_states",
    "why_not_shared",
    *APPLY_TO,
]
