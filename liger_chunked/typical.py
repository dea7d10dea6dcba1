"""A loss's call on a batch of given sizes, which `estimate_memory` reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.engine import Group, linear_token_stats
from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearOnPolicyDistillationLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearULDLoss,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.types import AdaptedWeight, LogitOptions, check_number, shown

Loss = nn.Module | Callable[..., Any]

_PREFERENCE = (LigerFusedLinearPreferenceBase, LigerFusedLinearUnpairedPreferenceBase)
_OF_SEQUENCES = (
    LigerFusedLinearPolicyBase,
    LigerFusedLinearUnpairedPreferenceBase,
    LigerFusedLinearOnPolicyDistillationLoss,
)
_LOSSES = (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearPreferenceBase,
    *_OF_SEQUENCES,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearULDLoss,
)


@dataclass(frozen=True)
class TypicalCall:
    """The sizes of a batch; see `estimate_memory`. `arguments` makes tensors of them.

        call = TypicalCall(LigerFusedLinearDPOLoss(), vocab_size=512, hidden_size=64, shape=(4, 32))
        given, trainable = call.arguments(torch.device("cuda"))
        loss, metrics = call.loss(**given, **call.marked(given, call.lengths))

    Raises:
        TypeError, ValueError: sizes are invalid, or the loss takes no such batch.
    """

    loss: Loss
    vocab_size: int
    hidden_size: int
    shape: Sequence[int]
    valid: int | Sequence[int] | None = None
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    trainable_head: bool = True
    trainable_input: bool = True
    lora_rank: int | None = None
    ref_hidden_size: int | None = None
    teacher_hidden_size: int | None = None
    teacher_vocab_size: int | None = None
    teacher_top_k: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {shown(self.dtype)}")
        optional = "lora_rank", "ref_hidden_size", "teacher_hidden_size", "teacher_vocab_size", "teacher_top_k"
        for name in ("vocab_size", "hidden_size", *optional):
            size = getattr(self, name)
            check_number(name, size, whole=True, optional=name in optional)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        if not isinstance(self.shape, Sequence) or not all(isinstance(n, int) for n in self.shape):
            raise TypeError(f"shape must be a tuple of ints, the target's, got {shown(self.shape)}")
        self._check_models()
        shape, by_token = tuple(self.shape), self.group == "token"
        if len(shape) not in (1, 2) or (not by_token and len(shape) != 2) or min(shape) < 1:
            expected = "(B, T) or (N,)" if by_token else "(B, T)"
            raise ValueError(f"shape must be {expected}, of positive sizes, for this loss, got {shape}")
        if self.group == "pair" and shape[0] % 2:
            raise ValueError(f"shape must stack as many chosen as rejected sequences, got an odd {shape[0]} in {shape}")
        _ = self.lengths  # checks `valid`

    def _check_models(self) -> None:
        """Check that the loss is one, and takes such a reference and teacher."""
        loss, is_function = self.loss, self.loss is linear_token_stats
        if not is_function and not isinstance(loss, _LOSSES):
            expected = ", ".join(base.__name__ for base in _LOSSES)
            described = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
            raise TypeError(f"loss must be linear_token_stats or an instance of {expected}, got {described}")
        name = "linear_token_stats" if is_function else type(loss).__name__
        if self.ref_hidden_size is not None:
            refuses = isinstance(loss, _PREFERENCE) and loss.use_ref_model is False
            if refuses or not isinstance(loss, (LigerFusedLinearPolicyBase, *_PREFERENCE)):
                raise ValueError(f"{name} takes no reference, got ref_hidden_size={self.ref_hidden_size}")
        states, top_k = self.teacher_hidden_size, self.teacher_top_k
        given = f"teacher_hidden_size={states}, teacher_top_k={top_k}"
        if isinstance(loss, LigerFusedLinearDistillationBase):
            if (states is None) == (top_k is None):
                raise ValueError(f"{name} takes one of teacher_hidden_size and teacher_top_k, got {given}")
            if top_k is not None and not loss.of_distributions:
                raise ValueError(f"{name} needs the teacher's logits, got teacher_top_k={top_k}")
            if top_k is not None and top_k > self.vocab_size:
                raise ValueError(f"teacher_top_k must be at most vocab_size={self.vocab_size}, got {top_k}")
        elif isinstance(loss, LigerFusedLinearULDLoss):
            if states is None or top_k is not None:
                raise ValueError(f"{name} takes teacher_hidden_size, and no teacher_top_k, got {given}")
        elif isinstance(loss, LigerFusedLinearOnPolicyDistillationLoss):
            if top_k is not None:
                raise ValueError(f"{name} takes no teacher_top_k, got {given}")
        elif states is not None or top_k is not None:
            raise ValueError(f"{name} takes no teacher, got {given}")
        rows = self.teacher_vocab_size
        if rows is not None and states is None:
            raise ValueError(f"teacher_vocab_size={rows} is given without teacher_hidden_size")
        if rows is not None and rows < self.vocab_size and not isinstance(loss, LigerFusedLinearULDLoss):
            raise ValueError(f"teacher_vocab_size must be at least vocab_size={self.vocab_size}, got {rows}")

    @property
    def options(self) -> LogitOptions:
        loss: Any = self.loss
        return LogitOptions() if loss is linear_token_stats else loss.options

    @property
    def group(self) -> Group:
        """What the first dimension of the call's tensors counts."""
        if isinstance(self.loss, LigerFusedLinearPreferenceBase):
            return "pair"
        return "sequence" if isinstance(self.loss, _OF_SEQUENCES) else "token"

    @property
    def lengths(self) -> list[int]:
        """The valid tokens of each sequence; one count is spread evenly."""
        n_sequences, length = self.shape if len(self.shape) == 2 else (1, *self.shape)
        valid = self.valid
        if valid is None:
            return [length] * n_sequences
        if isinstance(valid, int):
            lengths = [valid // n_sequences + (i < valid % n_sequences) for i in range(n_sequences)]
        else:
            lengths = list(valid)
        if len(lengths) != n_sequences or not all(0 <= n <= length for n in lengths):
            raise ValueError(
                f"valid must be a count up to {n_sequences * length}, or one up to {length} for each of {n_sequences} "
                f"sequences, got {shown(valid)}"
            )
        return lengths

    def arguments(self, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the arguments of the call except which tokens count (`marked`), and the trainable tensors.

        Values are random, and the same in each call; on the meta device there are none.
        """
        random, shape, loss = _Random(device, self.dtype), tuple(self.shape), self.loss
        head = self.vocab_size, self.hidden_size, self.bias
        given, leaves = random.head(*head, trainable=self.trainable_head, lora_rank=self.lora_rank)
        given["input"] = random.normal(*shape, self.hidden_size).requires_grad_(self.trainable_input)
        models = (
            ("ref", self.vocab_size, self.ref_hidden_size),
            ("teacher", self.teacher_vocab_size or self.vocab_size, self.teacher_hidden_size),
        )
        for name, rows, size in models:
            if size is not None:
                other, _ = random.head(rows, size, self.bias)
                other["input"] = random.normal(*shape, size)
                given |= {f"{name}_{key}": x for key, x in other.items()}
        if self.teacher_top_k is not None:
            given |= random.top_k(self.vocab_size, self.teacher_top_k, *shape)
        is_on_policy = isinstance(loss, LigerFusedLinearOnPolicyDistillationLoss)
        if isinstance(loss, LigerFusedLinearPolicyBase):
            given["advantages"] = random.normal(shape[0], dtype=torch.float32)
        if isinstance(loss, LigerFusedLinearPolicyBase) or is_on_policy:
            given["old_logps"] = random.logps(*shape)
        if is_on_policy and self.teacher_hidden_size is None:
            given["teacher_logps"] = random.logps(*shape)
        if isinstance(loss, LigerFusedLinearUnpairedPreferenceBase):
            given["preference_labels"] = torch.arange(shape[0], device=device) % 2 == 0
            if loss.reference_point is not None:
                given[loss.reference_point] = 0.0
        takes_reference = isinstance(loss, LigerFusedLinearPolicyBase) or (
            isinstance(loss, _PREFERENCE) and loss.use_ref_model is not False
        )
        if takes_reference and self.ref_hidden_size is None:
            given["ref_logps"] = random.logps(*shape)
        if not isinstance(loss, LigerFusedLinearULDLoss):
            given["target"] = random.ids(self.vocab_size, *shape)
        return given, [x for x in (given["input"], *leaves) if x.requires_grad]

    def marked(self, given: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
        """Return the argument that marks the first tokens of each sequence as those that count."""
        device = given["input"].device
        mask = torch.arange(self.shape[-1], device=device) < torch.tensor(lengths, device=device)[:, None]
        mask = mask.view(tuple(self.shape))
        if "target" not in given:
            return {"mask": mask}
        return {"target": given["target"].where(mask, self.options.ignore_index)}


class _Random:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype if dtype is None else dtype, device=self.device)
        return empty.normal_(generator=self.generator)

    def ids(self, vocab_size: int, *shape: int) -> Tensor:
        return torch.randint(vocab_size, shape, device=self.device, generator=self.generator)

    def logps(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.float32).abs_().neg_()

    def head(
        self, vocab_size: int, hidden_size: int, bias: bool, *, trainable: bool = False, lora_rank: int | None = None
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Return a head whose logits have variance 1, and its tensors."""
        weight = self.normal(vocab_size, hidden_size).mul_(hidden_size**-0.5).requires_grad_(trainable)
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
