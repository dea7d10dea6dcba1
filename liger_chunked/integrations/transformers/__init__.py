"""Hugging Face models: a fused head and loss inside `model.forward`, and base kernels.

head.py            a patched model's head and loss
head_forward.py    installs that forward in models and classes
patch.py           patches and restores models
patched_class.py   builds and sets the classes of patched modules
replaced.py        replaced attributes and rotary functions
found.py           what the kernels serve of a model or family
report.py          what was patched, and what was left alone
layers.py          layers that base kernels replace
detect.py          parts of a model, and whose code runs
source.py          whether functions are the same code
head_check.py      what a model computes between backbone and logits
overrides.py       stock code that kernels replace, and model families
verify.py          compares kernels with original code
check.py           compares patched and original models
survey.py          tells what is served of every class
shared_prefix.py   computes shared prompts once
trie.py            packs a batch as a trie
trie_attention.py  its masks and attention
"""

from typing import Any

from liger_chunked.integrations.transformers.check import ModelReport, check_model
from liger_chunked.integrations.transformers.head import HeadFn, HeadInput, logit_options
from liger_chunked.integrations.transformers.head_forward import attach_head, detach_head, run_head
from liger_chunked.integrations.transformers.patch import (
    AutoLigerKernelForCausalLM,
    AutoLigerKernelForImageTextToText,
    apply_liger_kernel,
    family_function,
    register_layer,
    revert_liger_kernel,
)
from liger_chunked.integrations.transformers.report import Applied
from liger_chunked.integrations.transformers.shared_prefix import (
    SharedBatch,
    share_batch,
    shared_prefix_hidden_states,
    why_not_shared,
)

_APPLY_TO = "apply_liger_kernel_to_"


def __getattr__(name: str) -> Any:
    """Return `apply_liger_kernel_to_<family>`."""
    if not name.startswith(_APPLY_TO):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return family_function(name.removeprefix(_APPLY_TO))
    except ValueError as unknown:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {unknown}") from None


__all__ = [
    "Applied",
    "AutoLigerKernelForCausalLM",
    "AutoLigerKernelForImageTextToText",
    "HeadFn",
    "HeadInput",
    "ModelReport",
    "SharedBatch",
    "apply_liger_kernel",
    "attach_head",
    "check_model",
    "detach_head",
    "logit_options",
    "register_layer",
    "revert_liger_kernel",
    "run_head",
    "share_batch",
    "shared_prefix_hidden_states",
    "why_not_shared",
]
