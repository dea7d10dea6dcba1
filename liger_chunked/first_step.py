from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_chunked.engine.hooks import isolated
from liger_chunked.private import without_modes
from liger_chunked.types import TokenStats, described
from liger_chunked.typical import Loss, TypicalCall

# Triton compiles a variant for sizes and addresses that are no multiples of 16.
_MULTIPLE = 16


@contextmanager
def _ordinary_autograd() -> Iterator[None]:
    with (
        without_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
        isolated(),
    ):
        yield


@_ordinary_autograd()
def warmup(
    loss: Loss,
    *,
    vocab_size: int,
    hidden_size: int,
    shape: Sequence[int],
    valid: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    bias: bool = False,
    trainable_head: bool = True,
    trainable_input: bool = True,
    lora_rank: int | None = None,
    ref_hidden_size: int | None = None,
    teacher_hidden_size: int | None = None,
    teacher_top_k: int | None = None,
    teacher_vocab_size: int | None = None,
    device: torch.device | str | None = None,
    **arguments: Any,
) -> None:
    """Compile the Triton kernels of `loss` before the first step: seconds of work, unless Triton's cache has them.

    Runs three steps on random tensors of these sizes, and of losses on rollouts whose formula a kernel knows others
    without `old_logps`, and without `ref_logps` where these are not needed: Triton compiles a variant for each. Call it
    on each rank before training, after `torch.cuda.set_device`. It needs the memory of the inputs and of
    `estimate_memory`, and frees it. It changes no random state, and does not compile a patched model's layers.

    Args:
        loss: `linear_token_stats`, or an instance of the cross entropy or of a subclass of
            `LigerFusedLinearPolicyBase`, `LigerFusedLinearPreferenceBase`, `LigerFusedLinearUnpairedPreferenceBase` or
            `LigerFusedLinearDistillationBase`, also your own, or of ULD or on-policy distillation.
        vocab_size: V, the rows of the head's weight.
        hidden_size: H, its columns.
        shape: of the target, (B, T) or (N,); (B, T) for losses of sequences, and with an even B for losses of pairs.
        valid: tokens with a target: an int, the number in the batch, spread evenly, or a sequence of B ints. None: all.
        dtype: of weight, bias and hidden states.
        autocast: the dtype of an active autocast. None: it is off.
        bias: whether the head has a bias.
        trainable_head: whether weight and bias need a gradient.
        trainable_input: whether the hidden states need one; if neither they nor the head do, only forwards run.
        lora_rank: r of a trainable float32 adapter on the head (`AdaptedWeight`). None: no adapter.
        ref_hidden_size: the columns of the reference's weight. None: calls pass `ref_logps`, or no reference.
        teacher_hidden_size: the columns of the teacher's weight. None: calls pass `teacher_logps`, or no teacher.
        teacher_top_k: k of `teacher_logps`; distillation needs this or `teacher_hidden_size`. None: there are none.
        teacher_vocab_size: the rows of the teacher's weight. None: `vocab_size`.
        device: of the tensors, such as "cuda". None: the current accelerator, or else the CPU.
        **arguments: others of the loss's call, such as `outputs` of `linear_token_stats`.

    Raises:
        TypeError: `loss` is of another kind or returns no tensor, a size, `dtype` or `shape` has the wrong type, or the
            loss has no such argument.
        ValueError: a size is not positive, `shape` or `valid` does not fit the loss, or the loss takes no such
            reference or teacher, or needs one. Or `teacher_top_k` exceeds `vocab_size`, or `device` is unknown or
            "meta".

    >>> from liger_chunked import LigerFusedLinearDPOLoss
    >>> sizes = {"vocab_size": 512, "hidden_size": 64, "shape": (4, 32), "dtype": torch.float32}
    >>> warmup(LigerFusedLinearDPOLoss(), **sizes, device="cpu")
    """
    call = TypicalCall(
        loss, vocab_size, hidden_size, shape, valid, dtype, bias, trainable_head, trainable_input, lora_rank,
        ref_hidden_size, teacher_hidden_size, teacher_vocab_size, teacher_top_k,
    )  # fmt: skip
    found = _device(device)

    def run() -> None:
        """Keep no tensor alive."""
        given, trainable = call.arguments(found)
        steps = [call.marked(given, lengths) for lengths in _variants(call.lengths)]
        for changed in steps:
            with torch.autocast(found.type, dtype=autocast, enabled=autocast is not None):
                value = _scalar(loss(**{**given, **changed, **arguments}))
            if trainable:
                torch.autograd.grad(value, trainable)

    run()
    if found.type != "cpu":
        # Autograd's thread may hold the last gradients until it gets another graph.
        scalar = torch.zeros((), device=found, requires_grad=True)
        torch.autograd.grad(scalar * 1, scalar)
        torch.accelerator.synchronize(found)
        getattr(torch, found.type).empty_cache()


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a device such as 'cuda', got {device!r}: {error}") from None
    if found.type == "meta":
        raise ValueError("device must have memory, got 'meta': estimate_memory needs no device")
    return found


def _variants(lengths: list[int]) -> Iterator[list[int]]:
    """Yield each sequence's valid tokens: multiples of 16, then an odd first sequence, then an odd last one too."""
    lengths = [n // _MULTIPLE * _MULTIPLE or n for n in lengths]
    yield list(lengths)
    for i in (0, -1):
        lengths[i] -= lengths[i] > 1
        yield list(lengths)


def _scalar(result: Any) -> Tensor:
    if isinstance(result, TokenStats):
        parts = [x.sum() for x in result if x is not None and x.is_floating_point()]
        return torch.stack(parts).sum()
    value = result[0] if isinstance(result, tuple) else result
    if not isinstance(value, Tensor):
        raise TypeError(f"loss must return a tensor, or a tuple whose first item is one, got {described(value)}")
    return value.sum()
