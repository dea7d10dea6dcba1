"""The formula of `top_p`, which the engine's filter and `KeptIds.from_top_p` share.

    p = z.softmax(-1)                              z (rows, m), logits in falling order
    dropped = beyond_top_p(mass_from(p), top_p)    (rows, m)

They differ in what they do with it. The filter needs one bound for a row, below which logits are dropped, so equal
logits stay or go together. `KeptIds` has the ids that a sampler kept, which of equal logits takes the first.
"""

from __future__ import annotations

from torch import Tensor


def mass_from(p: Tensor) -> Tensor:
    """Return (rows, m), the sum of each probability and of all after it.

    Args:
        p: (rows, m), probabilities in falling order.
    """
    # From the smallest, because in floating point a sum from the largest reaches 1 too early.
    return p.flip(-1).cumsum(-1).flip(-1)


def beyond_top_p(mass: Tensor, top_p: float) -> Tensor:
    """Return (rows, m) bool, False at the fewest of the largest probabilities that sum to `top_p`, True after them.

    Args:
        mass: of `mass_from`.
        top_p: in (0, 1].
    """
    dropped = mass <= 1 - top_p
    dropped[:, 0].fill_(False)  # the largest stays, also where `1 - top_p` rounds to 1
    return dropped
