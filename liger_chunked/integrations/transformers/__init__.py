"""Hugging Face models: the head inside its model, the fused forward, and base kernels patched in by a table.

head.py      hidden states, weight, logits transform and loss inputs of any model with an `lm_head`, on each call
forward.py   the one forward of all families, and `attach_head`
patches.py   attributes replaced for a while
"""

from liger_chunked.integrations.transformers.forward import attach_head, detach_head
from liger_chunked.integrations.transformers.head import HeadFn, HeadInput, logit_options

__all__ = ["HeadFn", "HeadInput", "attach_head", "detach_head", "logit_options"]
