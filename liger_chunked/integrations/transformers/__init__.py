"""Hugging Face models: a fused head and loss inside `model.forward`, and base kernels.

Read `patch.py` first, then `forward.py`.
"""

# ruff: noqa: E402 (an old transformers fails at the first name that it lacks)
from liger_chunked import versions

versions.require(__name__, "transformers")

from liger_chunked.integrations.transformers.attach import attach_head, detach_head, run_head
from liger_chunked.integrations.transformers.check import ModelReport, check_model
from liger_chunked.integrations.transformers.family import FamilyFunction, family_function, revert_liger_kernel
from liger_chunked.integrations.transformers.forward import logit_options
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput
from liger_chunked.integrations.transformers.kept_ids import KeptIdsRecorder, record_kept_ids
from liger_chunked.integrations.transformers.patch import (
    AutoLigerKernelForCausalLM,
    AutoLigerKernelForImageTextToText,
    apply_liger_kernel,
    register_layer,
)
from liger_chunked.integrations.transformers.report import Applied

_APPLY_TO = "apply_liger_kernel_to_"


# For type checkers every other name is such a function: they report a wrong one where it is used.
def __getattr__(name: str) -> FamilyFunction:
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
    "KeptIdsRecorder",
    "ModelReport",
    "apply_liger_kernel",
    "attach_head",
    "check_model",
    "detach_head",
    "logit_options",
    "record_kept_ids",
    "register_layer",
    "revert_liger_kernel",
    "run_head",
]
