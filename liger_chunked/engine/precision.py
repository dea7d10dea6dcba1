"""How cuBLAS adds up the products of a step: in float32 to the end, whatever the process allows elsewhere."""

from __future__ import annotations

import threading

import torch


class Refused:
    """One of the permissions of `torch.backends.cuda.matmul` to round sums, refused while any step is running.

    The permission belongs to the whole process, and steps run on several threads: those of `nn.DataParallel`, or the
    one on which autograd runs a backward. The first step to enter takes the permission away, and the last one to leave
    gives it back. Other threads' products are more exact meanwhile.

    A permission that the user gives meanwhile is taken away by the next step that enters, and is there again after the
    last one. A permission that the user takes away meanwhile cannot be seen, and is given back: change these settings
    between steps.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._inside = 0
        self._was_given = False

    def enter(self) -> None:
        with self._lock:
            matmul = torch.backends.cuda.matmul
            if getattr(matmul, self.name):
                setattr(matmul, self.name, False)
                self._was_given = True
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_given:
                self._was_given = False
                setattr(torch.backends.cuda.matmul, self.name, True)


# By default cuBLAS may split a sum over a long inner dimension and add the parts in the dtype of the product. Where the
# user allows it, it adds all of a float16 product in float16. What float32 products may do (TF32) stays the user's.
_OF_DTYPE = {
    torch.bfloat16: (Refused("allow_bf16_reduced_precision_reduction"),),
    torch.float16: (Refused("allow_fp16_reduced_precision_reduction"), Refused("allow_fp16_accumulation")),
}


def refused(dtypes: tuple[torch.dtype, ...]) -> tuple[Refused, ...]:
    """What products of these dtypes must not be allowed, each once."""
    return tuple(permission for dtype in dict.fromkeys(dtypes) for permission in _OF_DTYPE.get(dtype, ()))
