"""The ids that `generate` kept of each sampled token, for losses of the softmax over these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.kept_ids import KeptIds, at_target, check_completions


class KeptIdsRecorder(LogitsProcessor):
    """A `LogitsProcessor` that records, for each sampled token, the ids whose score is finite. Scores do not change.

    It must be the last of its list. `generate` puts a caller's processors before its own temperature, top-k, top-p and
    min-p, so use `record_kept_ids`, or pass a list that warps the scores itself to `generate(top_k=0, top_p=1.0)`.

    It keeps 8 bytes for each kept id, and the host waits for the device at each token.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded, before another `generate`."""
        # By the length of what came before, so that a position which is scored again replaces the first scores.
        self._of_length: dict[int, KeptIds] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the ids of one step.

        Args:
            input_ids: (B, S), the tokens so far, with the prompts.
            scores: (B, V), what the next token is sampled from, as the other processors left them.

        Returns:
            `scores`.

        Raises:
            ValueError: a sequence has no finite score.
        """
        self._of_length[input_ids.shape[1]] = KeptIds.from_mask(scores > -torch.inf)
        return scores

    @property
    def prompt_length(self) -> int:
        """The columns of the prompts, with their padding: the first generated token is at this index."""
        self._check_recorded()
        return min(self._of_length)

    def kept_ids(self, target: Tensor, first: int = 0, *, ignore_index: int = -100) -> KeptIds:
        """Return the ids at the positions of a loss's target. Waits for the device.

        Args:
            target: (B, T), integer ids, or `ignore_index`, in the order of the sequences that `generate` returned.
            first: the column of `target` with the first generated token. It is 0 if `target` holds completions alone,
                and `prompt_length - 1` if it holds whole sequences, shifted as by `shifted`.
            ignore_index: the target of padding after the end of a sequence, and of prompts that no loss reads. These
                positions get no ids, and cost nothing.

        Returns:
            The ids of B * T positions. Those before `first` that have a target have the whole vocabulary.

        Raises:
            TypeError, ValueError: nothing was recorded, `target` has other sequences, or a target beyond the last
                recorded token.

        >>> recorder = KeptIdsRecorder()
        >>> _ = recorder(torch.tensor([[4, 5]]), torch.tensor([[0.1, -torch.inf, 0.3]]))      # the sampler takes id 2
        >>> recorder.kept_ids(torch.tensor([[2]])).ids
        tensor([0, 2])
        >>> recorder.kept_ids(torch.tensor([[-100, 2, -100]]), recorder.prompt_length - 1).offsets
        tensor([0, 0, 2, 2])
        """
        self._check_recorded()
        lengths = sorted(self._of_length)
        if lengths != list(range(lengths[0], lengths[0] + len(lengths))):
            raise ValueError(f"each token of one generate must be recorded, got tokens at {lengths}: call clear()")
        steps = [self._of_length[length] for length in lengths]
        n = steps[0].positions
        check_completions(target, n)
        tokens = KeptIds.cat(steps).to(target.device)
        return at_target(tokens, target, first, torch.arange(n), n, torch.full((n,), len(steps)), ignore_index)

    def _check_recorded(self) -> None:
        if not self._of_length:
            raise ValueError("no token was recorded: generate must run first, with this recorder as the last processor")


@contextmanager
def record_kept_ids(model: nn.Module) -> Iterator[KeptIdsRecorder]:
    """Record what `model.generate` keeps inside the block, after its own processors and warpers.

        with record_kept_ids(model) as recorder:
            sequences = model.generate(**prompts, do_sample=True, top_p=0.9)
        labels = sequences.masked_fill(...)                    # -100 at prompts, and at padding after the end
        target = shifted(labels)
        kept = recorder.kept_ids(target, recorder.prompt_length - 1)

    The recorder holds the last `generate` of the block. The softmax over kept ids is the sampler's, if only the
    temperature and filters changed its logits: a penalty such as `repetition_penalty` is not in it.

    Args:
        model: a model of transformers, also inside wrappers and PEFT.

    Raises:
        ValueError: `generate` searches with several beams, whose sequences change places.
        RuntimeError: the model has no `generate` of transformers.
    """
    inner: Any = inner_model(model)
    name = "_get_logits_processor"
    theirs, replaced = getattr(inner, name, None), vars(inner).get(name)
    if theirs is None:
        raise RuntimeError(f"{type(inner).__name__} has no generate of transformers that could be recorded")
    recorder = KeptIdsRecorder()

    def with_recorder(generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if (generation_config.num_beams or 1) > 1:
            raise ValueError(f"num_beams must be 1 to record kept ids, got {generation_config.num_beams}")
        processors = theirs(generation_config, *args, **kwargs)
        recorder.clear()
        processors.append(recorder)
        return processors

    setattr(inner, name, with_recorder)
    try:
        yield recorder
    finally:
        delattr(inner, name)
        if replaced is not None:  # of an outer block
            setattr(inner, name, replaced)
