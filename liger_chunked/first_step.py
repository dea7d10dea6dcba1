from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_chunked.losses import (
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.memory import Loss, check_sizes, meta_rows, ordinary_autograd, read_loss, valid_lengths
from liger_chunked.types import AdaptedWeight, TokenStats, described

# Triton compiles a variant for sizes and addresses that are no multiples of 16.
_MULTIPLE = 16


@ordinary_autograd()
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
    device: torch.device | str | None = None,
    **arguments: Any,
) -> None:
    """Compile the Triton kernels of `loss` before the first step: seconds of work, unless Triton's cache has them.

    Runs three steps on random tensors of these sizes. Call it on each rank before training, after
    `torch.cuda.set_device`. It needs the memory of the inputs and of `estimate_memory`, and frees it. It changes no
    random state, and does not compile a patched model's layers.

    Args:
        loss: `linear_token_stats`, or an instance of the cross entropy or of a subclass of
            `LigerFusedLinearPolicyBase`, `LigerFusedLinearPreferenceBase`, `LigerFusedLinearUnpairedPreferenceBase` or
            `LigerFusedLinearDistillationBase`, also your own. ULD and on-policy distillation are refused.
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
    check_sizes(dtype, shape, vocab_size=vocab_size, hidden_size=hidden_size, lora_rank=lora_rank,
                ref_hidden_size=ref_hidden_size, teacher_hidden_size=teacher_hidden_size,
                teacher_top_k=teacher_top_k)  # fmt: skip
    group, options = read_loss(loss, ref_hidden_size, teacher_hidden_size, teacher_top_k)
    shape = tuple(shape)
    meta_rows(group, shape, valid)  # checks both
    if teacher_top_k is not None and teacher_top_k > vocab_size:
        raise ValueError(f"teacher_top_k must be at most vocab_size={vocab_size}, got {teacher_top_k}")
    found = _device(device)

    def run() -> None:
        """Keep no tensor alive."""
        random = _Random(found, dtype)
        given, leaves = random.head(vocab_size, hidden_size, trainable_head, lora_rank, bias)
        given["input"] = random.normal(*shape, hidden_size).requires_grad_(trainable_input)
        for name, size in (("ref", ref_hidden_size), ("teacher", teacher_hidden_size)):
            if size is not None:
                head, _ = random.head(vocab_size, size, False, None, bias)
                head["input"] = random.normal(*shape, size)
                given |= {f"{name}_{key}": x for key, x in head.items()}
        if teacher_top_k is not None:
            given |= random.top_k(vocab_size, teacher_top_k, *shape)
        given |= _of_family(loss, random, shape, ref_hidden_size is not None)
        target = random.ids(vocab_size, *shape)
        for lengths in _variants(valid, shape):
            given["target"] = target.where(_mask(lengths, shape, found), options.ignore_index)
            with torch.autocast(found.type, dtype=autocast, enabled=autocast is not None):
                value = _scalar(loss(**{**given, **arguments}))
            trained = [x for x in (given["input"], *leaves) if x.requires_grad]
            if trained:
                torch.autograd.grad(value, trained)

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
        raise ValueError("device must have memory, got 'meta': estimate_memory runs a step without memory")
    return found


def _variants(valid: int | Sequence[int] | None, shape: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield each sequence's valid tokens: multiples of 16, then an odd first sequence, then an odd last one too."""
    n_sequences, length = shape if len(shape) == 2 else (1, *shape)
    lengths = [n // _MULTIPLE * _MULTIPLE or n for n in valid_lengths(valid, n_sequences, length)]
    yield list(lengths)
    for i in (0, -1):
        lengths[i] -= lengths[i] > 1
        yield list(lengths)


def _mask(lengths: list[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    mask = torch.arange(shape[-1], device=device) < torch.tensor(lengths, device=device)[:, None]
    return mask.view(shape)


class _Random:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype if dtype is None else dtype, device=self.device)
        return empty.normal_(generator=self.generator)

    def weight(self, vocab_size: int, hidden_size: int) -> Tensor:
        """Return a weight whose logits have variance 1."""
        return self.normal(vocab_size, hidden_size).mul_(hidden_size**-0.5)

    def ids(self, vocab_size: int, *shape: int) -> Tensor:
        return torch.randint(vocab_size, shape, device=self.device, generator=self.generator)

    def logps(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.float32).abs_().neg_()

    def head(
        self, vocab_size: int, hidden_size: int, trainable: bool, lora_rank: int | None, bias: bool
    ) -> tuple[dict[str, Any], list[Tensor]]:
        weight = self.weight(vocab_size, hidden_size).requires_grad_(trainable)
        head: dict[str, Any] = {"weight": weight}
        leaves = [weight]
        if lora_rank is not None:
            up = self.normal(vocab_size, lora_rank, dtype=torch.float32).requires_grad_()
            down = self.normal(lora_rank, hidden_size, dtype=torch.float32).mul_(hidden_size**-0.5).requires_grad_()
            head["weight"] = AdaptedWeight(weight, up, lambda x: x.to(down.dtype) @ down.t())
            leaves += [up, down]
        if bias:
            head["bias"] = self.normal(vocab_size).requires_grad_(trainable)
            leaves.append(head["bias"])
        return head, leaves

    def top_k(self, vocab_size: int, k: int, *shape: int) -> dict[str, Tensor]:
        first = self.ids(vocab_size, *shape, 1)
        ids = (first + torch.arange(k, device=self.device)) % vocab_size
        # Their probabilities sum to less than 1.
        logps = self.normal(*shape, k, dtype=torch.float32).log_softmax(-1) - 0.1
        return {"teacher_ids": ids, "teacher_logps": logps}


def _of_family(loss: Any, random: _Random, shape: tuple[int, ...], has_ref_head: bool) -> dict[str, Any]:
    given: dict[str, Any] = {}
    is_policy = isinstance(loss, LigerFusedLinearPolicyBase)
    is_unpaired = isinstance(loss, LigerFusedLinearUnpairedPreferenceBase)
    if is_policy:
        given["advantages"] = random.normal(shape[0], dtype=torch.float32)
        given["old_logps"] = random.logps(*shape)
    if is_unpaired:
        given["preference_labels"] = torch.arange(shape[0], device=random.device) % 2 == 0
        if loss.reference_point is not None:
            given[loss.reference_point] = 0.0
    takes_ref = is_policy or (
        (is_unpaired or isinstance(loss, LigerFusedLinearPreferenceBase)) and loss.use_ref_model is not False
    )
    if takes_ref and not has_ref_head:
        given["ref_logps"] = random.logps(*shape)
    return given


def _scalar(result: Any) -> Tensor:
    if isinstance(result, TokenStats):
        parts = [x.sum() for x in result if x is not None and x.is_floating_point()]
        return torch.stack(parts).sum()
    value = result[0] if isinstance(result, tuple) else result
    if not isinstance(value, Tensor):
        raise TypeError(f"loss must return a tensor, or a tuple whose first item is one, got {described(value)}")
    return value.sum()
