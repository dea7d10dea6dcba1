"""Heads that defer their logits: `defer_logits` for any model, and the mechanism under the patches of transformers.

Read `logits.py` first, then `gradient.py`, `fused.py`, `rules.py` and `defer.py`.
"""

from liger_chunked.deferred import joined as _joined  # noqa: F401 - fills the table of functions, as `rules` does
from liger_chunked.deferred.defer import DeferHandle, Deferral, defer_logits, deferral_of, is_deferring, set_deferral
from liger_chunked.deferred.logits import DeferredLogits

__all__ = [
    "DeferHandle",
    "Deferral",
    "DeferredLogits",
    "defer_logits",
    "deferral_of",
    "is_deferring",
    "set_deferral",
]
