"""The ids that `generate` kept of each sampled token, for losses of the softmax over these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.kept_ids import KeptIds, at_target, check_completions

# A processor may drop ids by the lowest number of the dtype, not by -inf: transformers' `remove_invalid_values` does so
# to what was dropped before it. A temperature above 1 then raises that number. No logit of a model is as low.
_DROPPED_BELOW = -1e30


class KeptIdsRecorder(LogitsProcessor):
    """A `LogitsProcessor` that records, for each sampled token, the ids that were not dropped. Scores do not change.

    Dropped ids have a score of -inf, or one below every logit: less than -1e30, or the lowest number of the dtype.

    It must be the last of its list. `generate` puts a caller's processors before its own temperature, top-k, top-p and
    min-p, so use `record_kept_ids`, or pass a list that warps the scores itself to `generate(top_k=0, top_p=1.0)`.

    It keeps 8 bytes for each kept id, and the host waits for the device at each token.
    """

    temperature: float | None = None  # of the ids; None: not known. `record_kept_ids` knows that of `generate`

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
            ValueError: all ids of a sequence are dropped.
        """
        lowest = max(_DROPPED_BELOW, torch.finfo(scores.dtype).min)  # of float16: -65504
        self._of_length[input_ids.shape[1]] = KeptIds.from_mask(scores > lowest, temperature=self.temperature)
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


# Processors of `generate` that change logits otherwise than by a temperature or by dropping ids: the class in
# transformers, the option that adds it, and the option's value that changes nothing.
_CHANGES_LOGITS: dict[str, tuple[str, Any]] = {
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", 1.0),
    "EncoderRepetitionPenaltyLogitsProcessor": ("encoder_repetition_penalty", 1.0),
    "SequenceBiasLogitsProcessor": ("sequence_bias", None),
    "ExponentialDecayLengthPenalty": ("exponential_decay_length_penalty", None),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": ("guidance_scale", 1.0),
    "WatermarkLogitsProcessor": ("watermarking_config", None),
    "SynthIDTextWatermarkLogitsProcessor": ("watermarking_config", None),
}
# Options that drop ids, and their values that drop none.
_FILTERS: dict[str, tuple[Any, ...]] = {
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "bad_words_ids": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}


def _is(processor: Any, kind: str) -> bool:
    """Whether a processor is of a class of transformers with this name, and not one that drops words by a bias."""
    names = [x.__name__ for x in type(processor).__mro__]
    return kind in names and "NoBadWordsLogitsProcessor" not in names


def changes_of_logits(options: Callable[[str], Any]) -> dict[str, Any]:
    """Return the options, by name, with which `generate` changes logits otherwise than by temperature and filters.

    Args:
        options: the value of an option by its name; None: not set.
    """
    found = {name: (options(name), neutral) for name, neutral in _CHANGES_LOGITS.values()}
    return {name: value for name, (value, neutral) in found.items() if value is not None and value != neutral}


def filters(options: Callable[[str], Any]) -> dict[str, Any]:
    """Return the options, by name, with which `generate` drops ids."""
    found = {name: options(name) for name in _FILTERS}
    return {name: value for name, value in found.items() if value is not None and value not in _FILTERS[name]}


def why_not_recorded(changes: dict[str, Any]) -> str:
    """Return an error message.

    Args:
        changes: values of options, by name; None: a processor of the caller does what the option would.
    """
    values = [f"{name}={value!r}" for name, value in changes.items() if value is not None]
    own = [f"a processor of logits_processor that acts as {name}" for name, value in changes.items() if value is None]
    neutral = dict(_CHANGES_LOGITS.values())
    off = ", ".join(f"{name}={neutral[name]!r}" for name, value in changes.items() if value is not None)
    way_out = [f"sample with {off}, also in model.generation_config"] if values else []
    way_out += ["leave the processor out"] if own else []
    return (
        f"kept ids need a sampler that only filters and divides by a temperature, got {' and '.join(values + own)}, "
        "which changes the logits that are kept: their softmax would not be the sampler's, and ratios to it wrong. "
        f"Either {', '.join(way_out)}, or train without kept ids"
    )


@contextmanager
def record_kept_ids(model: nn.Module) -> Iterator[KeptIdsRecorder]:
    """Record what `model.generate` keeps inside the block, after its own processors and warpers.

        with record_kept_ids(model) as recorder:
            sequences = model.generate(**prompts, do_sample=True, top_p=0.9)
        labels = sequences.masked_fill(...)                    # -100 at prompts, and at padding after the end
        target = shifted(labels)
        kept = recorder.kept_ids(target, recorder.prompt_length - 1)

    The recorder holds the last `generate` of the block. The softmax over kept ids is the sampler's, if only the
    temperature and filters changed its logits. So `generate` refuses settings that change logits otherwise, such as
    `repetition_penalty`, also of `model.generation_config`. A `LogitsProcessor` of your own must not do so either.
    Where `generate` filters nothing, each token has the whole vocabulary, which is right, and costs what a call without
    `kept` does.

    Args:
        model: a model of transformers, also inside wrappers and PEFT.

    Raises:
        ValueError: `generate` searches with several beams, whose sequences change places, or changes logits.
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
        changed = [option for kind, (option, _) in _CHANGES_LOGITS.items() if any(_is(x, kind) for x in processors)]
        if changed:
            of_config = changes_of_logits(lambda name: getattr(generation_config, name, None))
            raise ValueError(why_not_recorded({name: of_config.get(name) for name in changed}))
        recorder.clear()
        # A processor of the caller's own may divide by a temperature too.
        if all(type(x).__module__.startswith("transformers.") for x in processors):
            temperature = generation_config.temperature if generation_config.do_sample else None
            recorder.temperature = 1.0 if temperature is None else temperature
        processors.append(recorder)
        return processors

    setattr(inner, name, with_recorder)
    try:
        yield recorder
    finally:
        delattr(inner, name)
        if replaced is not None:  # of an outer block
            setattr(inner, name, replaced)
