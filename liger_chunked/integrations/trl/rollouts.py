"""The common part of trainers on sampled completions: the sampler's kept ids, and sequences without a gradient.

Both enter where TRL asks the model for log-probabilities, so that TRL's own loss, its old policy and its reference get
them too. `compute_loss` says which batch it is (`_Batch`), and `_get_per_token_logps_and_entropies` runs a part of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DefaultFlowCallback, IntervalStrategy, ProcessorMixin, TrainerControl
from trl.models.utils import disable_gradient_checkpointing

from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.kept_ids import (
    changes_of_logits,
    filters,
    record_kept_ids,
    why_not_recorded,
)
from liger_chunked.integrations.trl.losses import MULTIMODAL, LossMixin
from liger_chunked.integrations.trl.stand_ins import lent
from liger_chunked.kept_ids import KeptIds
from liger_chunked.types import shown


class Part(NamedTuple):
    """Sequences of a batch, up to some token of their completions.

    Attributes:
        rows: (n,) int64, the sequences.
        length: how many of the K tokens of completions, at least one.
        first: the first column of prompts and completions. 0, except for the one token of `_one_token`.
    """

    rows: Tensor
    length: int
    first: int = 0

    def of_sequences(self, x: Tensor, completion_length: int) -> Tensor:
        """Select from (B, prompts + K)."""
        return x[self.rows, self.first : x.shape[1] - completion_length + self.length]

    def of_completions(self, x: Tensor) -> Tensor:
        """Select from (B, K), or from (B,) or (B, 1), one value a sequence."""
        return x[self.rows] if x.ndim == 1 else x[self.rows, : self.length]


@dataclass(frozen=True)
class Batch:
    """The batch of a step.

    Attributes:
        kept: the ids at its positions (B, K), flattened; None: not known.
        mask: (B, K), True at the completions' tokens that the loss reads.
        part: the sequences with a gradient, the only ones that are computed. If none has one, it is one token without
            a target, which keeps this rank in step with the others. None: the whole batch.
        skipped: the sequences with tokens that are not in `part`; None without any.
        n_live: how many sequences have a gradient. None: nobody asked.
        logps: (B, K), log-probabilities of the skipped sequences, see `_of_skipped`.
        entropies: (B, K), theirs; NaN where they are not known.
    """

    kept: KeptIds | None = None
    mask: Tensor | None = None
    part: Part | None = None
    skipped: Part | None = None
    n_live: int | None = None
    logps: Tensor | None = None
    entropies: Tensor | None = None

    def skips(self, *, with_empty: bool) -> bool:
        """Whether sequences are skipped; `with_empty`: also those without tokens."""
        if self.part is None or not with_empty:
            return self.skipped is not None
        assert self.mask is not None and self.n_live is not None
        return self.n_live < len(self.mask)


# Metrics of TRL that read sequences without a gradient.
_OF_ALL_TOKENS = ("entropy", "vespo/phi_seq_mean")


class RolloutsMixin(LossMixin):
    """Trainers that sample their completions.

    Args:
        kept_ids: record the ids that `generate` kept of each token (top-p, top-k, min-p). Log-probabilities and
            entropies of the policy, the old policy and the reference are then of the softmax over these. Needs
            transformers' `generate`, without tools and `rollout_func`. A sampler that changes logits otherwise than
            by temperature and filters, such as with a `repetition_penalty`, raises ValueError: ratios would be wrong.
            One without a filter warns: it keeps all ids.
        skip_zero_advantage: leave sequences whose advantages are all zero out of the model's forward and backward, and
            end the others at their last token. Denominators do not change. "auto": where nothing else gives these
            sequences a gradient; True raises ValueError for other settings; False: never. The metrics are TRL's, but
            `entropy` is of the logging steps, which run the sequences without gradient for it.
    """

    _recorded: Callable[[Tensor], KeptIds] | None = None
    _batch: Batch = Batch()

    def __init__(
        self, *args: Any, kept_ids: bool = False, skip_zero_advantage: bool | str = "auto", **kwargs: Any
    ) -> None:
        if not isinstance(kept_ids, bool):
            raise TypeError(f"kept_ids must be True or False, got {shown(kept_ids)}")
        if not (isinstance(skip_zero_advantage, bool) or skip_zero_advantage == "auto"):
            raise ValueError(f"skip_zero_advantage must be 'auto', True or False, got {shown(skip_zero_advantage)}")
        self.kept_ids, self.skip_zero_advantage = kept_ids, skip_zero_advantage
        super().__init__(*args, **kwargs)

    def _check_made(self) -> None:
        if self.kept_ids:
            self._check_records()
        if self.skip_zero_advantage is True and (reason := self._why_not_skipped()) is not None:
            raise ValueError(f"skip_zero_advantage=True: {reason}")

    def _check_records(self) -> None:
        others = {
            "use_vllm=True, whose client returns no kept ids": getattr(self, "use_vllm", False),
            "continuous batching": getattr(self, "use_transformers_continuous_batching", False),
            "tools, whose results are no samples": getattr(self, "tools", None),
            "a rollout_func": getattr(self, "rollout_func", None),
        }
        refused = [name for name, given in others.items() if given]
        if refused:
            raise ValueError(f"kept_ids=True records transformers' generate, got {' and '.join(refused)}")
        self._check_sampler()

    def _check_sampler(self) -> None:
        """Refuse a sampler whose kept ids are of another distribution, and say so once if it keeps all ids.

        `generate` has the last word: it takes what TRL leaves out from the model, and is checked too.
        """
        of_model = getattr(inner_model(self.model), "generation_config", None)
        configs = [x for x in (getattr(self, "generation_config", None), of_model) if x is not None]
        if len(configs) < 2:  # a TRL that samples in another way
            return

        def option(name: str) -> Any:
            return next((x for config in configs if (x := getattr(config, name, None)) is not None), None)

        changes = changes_of_logits(option)
        if changes:
            raise ValueError(f"kept_ids=True: {why_not_recorded(changes)}")
        if not filters(option):
            warnings.warn(
                "kept_ids=True records all ids of the vocabulary for each token: the sampler has no filter. Results "
                "are those of kept_ids=False, and sampling is slower, because the host waits at each token. Set top_p, "
                f"top_k or min_p of {type(self.args).__name__}, or leave kept_ids out",
                UserWarning,
                stacklevel=5,
            )

    # Sequences without a gradient

    def _why_not_skipped(self) -> str | None:
        """Return what gives sequences of zero advantage a gradient; None: nothing does."""
        if not hasattr(super(), "_get_per_token_logps_and_entropies"):
            return "this TRL has no method that could run a part of a batch"
        if self._overridden() is not None and self.skip_zero_advantage is not True:
            return "a _compute_loss of your own may have a gradient there"
        if self.aux_loss_enabled:
            return "the router loss has a gradient in every sequence"
        if self._may_get_images():
            return "images are rows of their own, which no part of a batch selects"
        parallelism = getattr(self.args, "parallelism_config", None)
        if getattr(parallelism, "cp_size", 1) > 1 or getattr(parallelism, "sp_size", 1) > 1:
            return "parallelism_config splits the sequences"
        return None

    def _may_get_images(self) -> bool:
        """Whether a batch of any rank may have images: ranks decide alike, so that they run equally many passes."""
        if not isinstance(self.processing_class, ProcessorMixin):
            return False
        columns = getattr(self.train_dataset, "column_names", None)
        if columns is None or not {"image", "images"}.isdisjoint(columns):
            return True
        return any(getattr(self, name, None) for name in ("tools", "rollout_func", "environment_factories"))

    def _live(self, inputs: dict[str, Any]) -> Batch | None:
        """Return the batch with what has a gradient; None: all of it may. Waits for the device."""
        if self.skip_zero_advantage is False or not (self.model.training and torch.is_grad_enabled()):
            return None
        if self._why_not_skipped() is not None or any(name in inputs for name in MULTIMODAL):
            return None
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1) != 0
        completion_length = mask.shape[1]
        ends = (mask * torch.arange(1, completion_length + 1, device=mask.device)).amax(1)
        advantages = inputs["advantages"]
        acts = (advantages if advantages.ndim == 2 else advantages[:, None]) != 0
        of_live = ends * (acts & mask).any(1)
        lengths, all_lengths = torch.stack([of_live, ends]).tolist()

        def part(rows: list[int], length: int) -> Part:
            return Part(torch.tensor(rows, device=mask.device), length)

        rows = [i for i, n in enumerate(lengths) if n]
        skipped = [i for i, n in enumerate(all_lengths) if n and not lengths[i]]
        others = part(skipped, max(all_lengths[i] for i in skipped)) if skipped else None
        if len(rows) == len(lengths) and max(lengths) == completion_length:
            return Batch(n_live=len(rows))
        # A rank without live sequences stays in step with the others, whose models gather parameters.
        live = part(rows, max(lengths)) if rows else _one_token(inputs)
        return Batch(mask=mask, part=live, skipped=others, n_live=len(rows))

    def _logs_after_this_step(self) -> bool:
        state = replace(self.state, global_step=self.state.global_step + 1)
        control = DefaultFlowCallback().on_step_end(self.args, state, TrainerControl())
        # Any step may be an epoch's last.
        return control.should_log or self.args.logging_strategy == IntervalStrategy.EPOCH

    def _old_logps(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return the old policy's log-probabilities (B, K); None: those of this policy."""
        raise NotImplementedError

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = dict(inputs)
        sequences = inputs.pop("kept_ids", None)
        kept = None if sequences is None else KeptIds.cat(sequences)
        live = self._live(inputs)
        logs = live is not None and self._logs_after_this_step()
        batch = Batch(kept)
        if live is not None:
            with lent(self, _batch=batch):
                logps, entropies = self._of_skipped(model, inputs, live.skipped, logs)
            if live.part is not None:
                batch = replace(live, kept=kept, logps=logps, entropies=entropies)
        with lent(self, _batch=batch):
            value = super().compute_loss(model, inputs, *args, **kwargs)
        if live is not None and not logs:
            for name in _OF_ALL_TOKENS:
                values = self._liger_metrics.get(name)
                # NaN on every rank if one skipped sequences.
                if values and math.isnan(values[-1]):
                    values.pop()
                if not values:
                    self._liger_metrics.pop(name, None)
        return value

    def _of_skipped(
        self, model: nn.Module, inputs: dict[str, Any], skipped: Part | None, logs: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return log-probabilities and entropies (B, K) of the skipped sequences, for metrics; others are arbitrary.

        Logging steps compute them. Other steps have the old policy's log-probabilities, and entropies of NaN.
        """
        mask = inputs["completion_mask"]
        logps = self._old_logps(inputs)
        logps = torch.zeros(mask.shape, device=mask.device) if logps is None else logps.clone()
        entropies = torch.zeros_like(logps)
        if skipped is not None:
            entropies[skipped.rows] = math.nan
        if logs and (skipped is not None or self.accelerator.num_processes > 1):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            seen = torch.cat([inputs["prompt_mask"], mask], 1)
            # Ranks that skip nothing run one token, because a sharded model's forward is every rank's.
            part = skipped or _one_token(inputs)
            quiet = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
            with torch.no_grad(), quiet:
                found = self._of_part(part, model, ids, seen, mask.shape[1], compute_entropy=True)
            if skipped is not None:
                logps[part.rows, : part.length] = found[0].to(logps.dtype)
                entropies[part.rows] = 0.0
                entropies[part.rows, : part.length] = found[1].to(entropies.dtype)
        return logps, entropies

    def _of_part(
        self,
        part: Part | None,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Return what TRL's method returns, of a part of a batch (n, length); with the kept ids of the batch."""
        kept = self._batch.kept
        if self._recorded is not None:
            seen = attention_mask[:, -logits_to_keep:] != 0
            kept = self._recorded(input_ids[:, -logits_to_keep:].masked_fill(~seen, -100))
        if part is not None:
            if kept is not None:
                kept = kept.take(positions_of(part, logits_to_keep))
            ids, seen = (part.of_sequences(x, logits_to_keep) for x in (input_ids, attention_mask))
            if part.first:
                seen = seen.clone()
                seen[:, -part.length :] = 0  # no target
            input_ids, attention_mask, logits_to_keep = ids, seen, part.length
        if kept is not None:
            model = _WithKeptIds(model, kept, input_ids.shape, logits_to_keep)
        found: tuple[Tensor, ...] = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, **kwargs
        )
        return found

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if args:  # by name from here on
            kwargs = dict(zip(("batch_size", "compute_entropy", "compute_aux_loss"), args, strict=False)) | kwargs
        batch = self._batch
        found = self._of_part(batch.part, model, input_ids, attention_mask, logits_to_keep, **kwargs)
        if batch.part is None:
            return found
        part, (logps, entropies, *others) = batch.part, found
        assert batch.logps is not None and batch.entropies is not None
        if not batch.n_live:
            # A connected zero: the model's backward runs, as on other ranks.
            return batch.logps + 0 * logps.sum(), batch.entropies, *others
        return _scattered(batch.logps, part, logps), _scattered(batch.entropies, part, entropies), *others

    # Kept ids

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.kept_ids:
            return super()._generate_and_score_completions(inputs)
        with record_kept_ids(self.model) as recorder, lent(self, _recorded=recorder.kept_ids):
            output = super()._generate_and_score_completions(inputs)
        target = output["completion_ids"].masked_fill(output["completion_mask"] == 0, -100)
        # A list, which TRL shuffles and splits by sequence.
        output["kept_ids"] = _by_sequence(recorder.kept_ids(target), *target.shape)
        return output


def _one_token(inputs: dict[str, Any]) -> Part:
    """Return a part whose pass computes the last token of a prompt, and nothing of it."""
    prompts = inputs["prompt_ids"]
    return Part(torch.zeros(1, dtype=torch.int64, device=prompts.device), 1, prompts.shape[1] - 1)


def positions_of(part: Part, completion_length: int) -> Tensor:
    """Return the places (n * length,) of a part among flattened completions (B, K)."""
    columns = torch.arange(part.length, device=part.rows.device)
    return (part.rows[:, None] * completion_length + columns).flatten()


def _scattered(whole: Tensor, part: Part, x: Tensor | None) -> Tensor | None:
    """Return `whole` (B, K) with the values x (n, length) of a part, differentiable by them."""
    if x is None:
        return None
    whole = whole.to(x.dtype).clone()
    whole[part.rows, : part.length] = x
    return whole


def _by_sequence(kept: KeptIds, n: int, length: int) -> list[KeptIds]:
    starts = kept.offsets[::length].tolist()
    return [
        KeptIds(kept.ids[starts[i] : starts[i + 1]], kept.offsets[i * length : (i + 1) * length + 1] - starts[i])
        for i in range(n)
    ]


class _WithKeptIds:
    """A model that passes kept ids to its head, for TRL's loop over the sequences of a batch.

    Args:
        model: with the head of a served trainer.
        kept: of (n, K) completions, flattened.
        shape: (n, T) of the whole sequences, which end with the completions.
        completion_length: K.
    """

    def __init__(self, model: Any, kept: KeptIds, shape: torch.Size, completion_length: int) -> None:
        self.model, self.kept, self.start = model, kept, 0
        n, width = shape
        # A position predicts the next token.
        self.places = torch.full((n, width), -1, device=kept.ids.device)
        places = torch.arange(n * completion_length, device=kept.ids.device)
        self.places[:, width - completion_length - 1 : width - 1] = places.view(n, completion_length)

    def __call__(self, **inputs: Any) -> Any:
        end = self.start + len(inputs["input_ids"])
        kept = self.kept.take(self.places[self.start : end].flatten())
        self.start = end
        return self.model(**inputs, kept_ids=kept)
