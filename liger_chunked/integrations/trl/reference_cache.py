"""`reference_cache=`: reference log-probabilities of TRL's DPO and KTO trainers, on disk.

With `precompute_ref_log_probs=True`, such a trainer reads its reference from columns of its data set, and runs no
reference in training. Here the columns come from a file of `write_cache`, which the first trainer writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainingArguments

from liger_chunked.cache import TokenCache, read_cache, write_cache
from liger_chunked.scoring import IGNORE_INDEX
from liger_chunked.types import shown

# What a collator calls a batch of sequences, how many it makes of a row, and the columns that the trainer reads.
_COLUMNS = {
    ("input_ids", 2): ("ref_chosen_logps", "ref_rejected_logps"),
    ("input_ids", 1): ("ref_logps",),
    ("KL_input_ids", 1): ("ref_KL_logps",),
}


def check_reference_cache(trainer: Any, config: TrainingArguments | None) -> None:
    """Raise ValueError if a trainer, not yet made, would not read its reference from a cache."""
    name = type(trainer).__name__
    if config is not None and not hasattr(config, "precompute_ref_log_probs"):
        raise ValueError(f"reference_cache is of DPO and KTO: {name} reads no reference log-probabilities from columns")
    if not getattr(config, "precompute_ref_log_probs", False):
        raise ValueError(f"reference_cache needs precompute_ref_log_probs=True in the config of {name}")
    classes = [cls for cls in type(trainer).__mro__ if "_precompute_ref_logps" in vars(cls)]
    if len(classes) < 2:  # ours, and TRL's
        raise RuntimeError(f"{name} of this TRL has no place where it would read reference_cache: leave it out")
    if getattr(config, "ld_alpha", None) is not None:
        raise ValueError("reference_cache holds sums over tokens, and ld_alpha weighs these: leave one of them out")


def with_reference(trainer: Any, dataset: Any, name: str, batch_size: int, path: Path) -> Any:
    """Return a data set with the reference columns of TRL, from the file `path`, which is written if there is none.

    Args:
        name: of the data set: "train", or another, whose name its file has too.
        batch_size: how many sequences the reference gets at once.

    Raises:
        ValueError: the file is of another reference, tokenizer, vocabulary or data set, or in another order, or the
            reference is a model without its adapter.
    """
    if name != "train":
        path = path.with_name(f"{path.stem}-{name}{path.suffix}")
    model = trainer.ref_model or trainer.model
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"{path} would hold the reference of a model with adapters: pass the reference as ref_model, or leave "
            "reference_cache out"
        )
    tokenizer = trainer.processing_class
    with trainer.accelerator.main_process_first():
        if not path.exists():
            if trainer.is_deepspeed_enabled:
                raise ValueError(
                    f"{path} does not exist, and DeepSpeed has no reference yet: write it in a run without"
                )
            sequences = (sequence for row in dataset for _, sequence in _of_row(trainer.data_collator, row))
            with trainer.accelerator.autocast():
                write_cache(path, model, sequences, tokenizer=tokenizer, batch_size=batch_size)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    cache = read_cache(path, temperature=1.0, tokenizer=tokenizer, vocab_size=vocab_size, model=model)
    for column, values in _columns(trainer.data_collator, dataset, cache).items():
        dataset = dataset.add_column(column, values)
    return dataset


def _columns(collator: Any, dataset: Any, cache: TokenCache) -> dict[str, list[float]]:
    if cache.info.k:
        raise ValueError(f"{cache.path} holds a top k of {cache.info.k}, expected the log-probabilities of a reference")
    columns: dict[str, list[float]] = {}
    cached = iter(cache)
    for i, row in enumerate(dataset):
        for name, sequence in _of_row(collator, row):
            found = next(cached, None)
            if found is None or any(not found[key].equal(x) for key, x in sequence.items()):
                raise ValueError(
                    f"{cache.path} has another sequence than row {i} of the data set, as the trainer tokenizes it: "
                    "delete the file, or name another"
                )
            columns.setdefault(name, []).append(float(found["logps"].double().sum()))
    if next(cached, None) is not None:
        raise ValueError(f"{cache.path} has more sequences than the data set: delete the file, or name another")
    return columns


def _of_row(collator: Any, row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the columns of TRL, and the sequence of each: tokenized and truncated as the trainer does."""
    batch = collator([dict(row)])
    for prefix in ("", "KL_"):
        if (ids := batch.get(f"{prefix}input_ids")) is None:
            continue
        labels = ids.masked_fill(batch[f"{prefix}completion_mask"] == 0, IGNORE_INDEX)
        attended = batch[f"{prefix}attention_mask"].bool()
        for i, name in enumerate(_COLUMNS[f"{prefix}input_ids", len(ids)]):
            yield name, {"input_ids": ids[i][attended[i]], "labels": labels[i][attended[i]]}


def checked_path(path: Any) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, (str, Path)) or Path(path).suffix != ".parquet":
        raise ValueError(f'reference_cache must be a path such as "reference.parquet", got {shown(path)}')
    return Path(path)
