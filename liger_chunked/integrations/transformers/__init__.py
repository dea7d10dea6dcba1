"""Hugging Face models: the head inside its model, the fused forward, and base kernels patched in by a table.

head.py       hidden states, weight, logits transform and loss inputs of any model with an `lm_head`, on each call
forward.py    the one forward of all families, and `attach_head`
layers.py     what takes the place of norms, MLPs, rotary embeddings, losses
families.py   the table: which class of which family is which layer
apply.py      patching one model, or a family; and back
verify.py     a row of the table against the code that its kernels replace
check.py      a patched model against the stock one
experts.py    the load-balancing loss, as the model's own forward computes it
patches.py    methods and attributes replaced for a while
auto.py       models that come patched
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


def __getattr__(name: str) -> Any:
    """`apply_liger_kernel_to_<family>`, of families that were registered too."""
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
    "apply_liger_kernel",
    "attach_head",
    "check_model",
    "detach_head",
    "logit_options",
    "register_family",
    "revert_liger_kernel",
    *APPLY_TO,
]
