"""Reference log-probabilities, or a teacher's top k, of a data set: computed once and kept on disk.

    write_cache("teacher.parquet", teacher, data, tokenizer=tokenizer, k=64, temperature=2.0)
    cache = read_cache("teacher.parquet", temperature=2.0, tokenizer=tokenizer, vocab_size=49152)
    for batch in DataLoader(cache, batch_size=8, shuffle=True, collate_fn=cache.collate):
        ...                                                                 batch["teacher"] is a `TopK`

The file is Parquet, which `datasets` and pandas read too, with one row for each sequence. For a sequence of T tokens, n
of which are predicted (`next_tokens`), a row has

    input_ids   (T,) int32        the tokens
    labels      (T,) int32        the tokens too; -100 at those that are not predicted
    lse         (n,) float32      log-sum-exp of the logits over the temperature, in nats
    logps       (n,) float32      log-probabilities of the predicted tokens                                 if k = 0
    top_ids     (n * k,) int32    the k most likely tokens of each position, most likely first              if k > 0
    top_logps   (n * k,) float32  their log-probabilities under the softmax over the whole vocabulary       if k > 0

and its metadata say what the numbers are (`CacheInfo`), as JSON. Nothing is pickled. Pages have checksums, and the file
gets its name when it is complete.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from liger_chunked.scoring import IGNORE_INDEX, next_tokens, scored, top_k_and_lse
from liger_chunked.teachers import TopK
from liger_chunked.types import LogitOptions, check_number, shown

_KEY = b"liger_chunked"  # of the metadata
_FORMAT = 1
_SAMPLED = 64  # values of each parameter in a fingerprint


@dataclass(frozen=True)
class CacheInfo:
    """What the numbers of a cache are.

    - `temperature`: by which logits were divided
    - `k`: how many tokens of each position; 0: the log-probabilities of the predicted tokens
    - `vocab_size`: how many ids the softmax is over
    - `tokenizer`: `tokenizer_fingerprint`, or None
    - `model`: `model_fingerprint`
    """

    temperature: float
    k: int
    vocab_size: int
    tokenizer: str | None
    model: str
    format: int = _FORMAT


def model_fingerprint(model: nn.Module) -> str:
    """Return a hash of a model's parameters: names, shapes and some values of each, which every update changes."""
    found = hashlib.sha256()
    for name, x in sorted(model.named_parameters()):
        flat = x.detach().reshape(-1)
        places = torch.linspace(0, max(0, flat.numel() - 1), min(_SAMPLED, flat.numel()), dtype=torch.float64)
        values = flat[places.long().to(flat.device)].double().tolist()
        found.update(json.dumps([name, list(x.shape), str(x.dtype), values]).encode())
    return found.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Return a hash of a tokenizer's ids, by `get_vocab()`; None for None."""
    if tokenizer is None:
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def write_cache(
    path: str | os.PathLike[str],
    model: nn.Module,
    data: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any,
    k: int = 0,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    batch_size: int = 8,
    share_prefix: bool = False,
    logits_budget: int | float | str | None = None,
) -> TokenCache:
    """Compute what a frozen model says of each sequence, and write it to a Parquet file.

    Takes one product of the head with each predicted token, as `score` and `teacher_top_k`, which computes them. The
    file gets its name when it is complete: a process that ends before leaves `path` as it was.

    Args:
        path: of the file, such as "teacher.parquet".
        model: a model that `score` takes, whose forward has `input_ids` and `attention_mask`.
        data: sequences, each a mapping with `input_ids`, and `labels` where not all tokens are predicted (-100): a
            `datasets.Dataset`, a list, or a generator. Each is a row of the cache, in this order.
        tokenizer: whose ids these are; anything with `get_vocab()`. None: not known, and a reader must say so too.
        k: how many tokens to keep of each position, for a teacher. 0: the log-probability of the predicted token, for a
            reference.
        temperature: positive divisor of the logits: that of the loss.
        vocab_size: the student's. The softmax is over the model's first `vocab_size` ids; others are padding. None: all
            rows of the model's head.
        batch_size: how many sequences the model gets at once.
        share_prefix: compute what sequences of a batch have in common at their start once, such as a prompt.
        logits_budget: most bytes of logits alive at once: a number, or a string such as "512MiB". None: automatic.

    Returns:
        The cache, opened.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `data` has no sequence, or `k`, `temperature` or `vocab_size` do not fit.
    """
    pa, pq = _pyarrow()
    check_number("k", k, whole=True)
    options = LogitOptions(temperature=temperature, logits_budget=logits_budget)
    path, partial = Path(path), Path(f"{os.fspath(path)}.partial")
    writer, rows = None, iter(data)
    try:
        while chunk := list(itertools.islice(rows, batch_size)):
            batch = _padded([_sequence(row) for row in chunk])
            columns, size = _columns(model, batch, k, options, vocab_size, share_prefix)
            if writer is None:
                info = CacheInfo(
                    options.temperature, k, size, tokenizer_fingerprint(tokenizer), model_fingerprint(model)
                )
                schema = pa.schema(
                    [(name, pa.list_(pa.float32() if name in _FLOATS else pa.int32())) for name in columns],
                    metadata={_KEY: json.dumps(asdict(info)).encode()},
                )
                # Ids use two or three of their four bytes, and the exponents of log-probabilities are few: with the
                # bytes of each place together, zstd leaves about two thirds.
                writer = pq.ParquetWriter(
                    partial, schema, compression="zstd", use_dictionary=False, use_byte_stream_split=True,
                    write_page_checksum=True, write_statistics=False,
                )  # fmt: skip
            writer.write_table(pa.table(columns, schema))  # a row group, which a reader decodes as one
        if writer is None:
            raise ValueError("data has no sequence: there is nothing to write")
        writer.close()
        os.replace(partial, path)
    except BaseException:
        if writer is not None:
            writer.close()
        partial.unlink(missing_ok=True)
        raise
    return TokenCache(path)


_FLOATS = ("lse", "logps", "top_logps")


def _columns(
    model: nn.Module, batch: dict[str, Tensor], k: int, options: LogitOptions, vocab_size: int | None, share: bool
) -> tuple[dict[str, Any], int]:
    """Return the columns of a batch, a list of arrays each, and how many ids the softmax is over."""
    if k:
        top, lse, target, size = top_k_and_lse(model, batch, k, options, "bin", vocab_size, share)
        found = {"lse": lse, "top_ids": top.ids, "top_logps": top.logps}
    else:
        settings = {"temperature": options.temperature, "logits_budget": options.logits_budget}
        stats, target, size = scored(model, batch, ("logps", "lse"), vocab_size, share, **settings)
        found = {"lse": stats.lse, "logps": stats.logps}  # type: ignore[dict-item]
    lengths = batch["attention_mask"].sum(1).tolist()
    columns: dict[str, Any] = {
        name: [x[:n].int().numpy() for x, n in zip(batch[name], lengths, strict=True)]
        for name in ("input_ids", "labels")
    }
    predicted = target != IGNORE_INDEX
    for name, x in found.items():
        assert x is not None
        x = x.float() if name in _FLOATS else x.int()
        columns[name] = [row[counts].flatten().cpu().numpy() for row, counts in zip(x, predicted, strict=True)]
    return columns, size


def _sequence(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` (T,), int64."""
    ids = torch.as_tensor(row["input_ids"]).long()
    labels = ids if row.get("labels") is None else torch.as_tensor(row["labels"]).long()
    if ids.ndim != 1 or labels.shape != ids.shape or not len(ids):
        raise ValueError(
            f"a sequence of data needs input_ids (T,) with a token, and labels (T,) or none, got {tuple(ids.shape)} "
            f"and {tuple(labels.shape)}"
        )
    return {"input_ids": ids, "labels": labels}


def _padded(rows: Sequence[Mapping[str, Tensor]], pad_token_id: int = 0) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask` and `labels` (B, T), padded on the right."""
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    mask = [torch.ones_like(x) for x in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
    }


def read_cache(
    path: str | os.PathLike[str],
    *,
    temperature: float,
    tokenizer: Any,
    vocab_size: int,
    model: nn.Module | None = None,
) -> TokenCache:
    """Open a cache, if it is what the training expects.

    Args:
        path: of the file that `write_cache` wrote.
        temperature: of the loss.
        tokenizer: of the student, or None for a cache that was written without one.
        vocab_size: how many ids the student's softmax is over: the rows of its head.
        model: the model that the cache should be of, such as the reference of a trainer. None: any.

    Returns:
        A `TokenCache`, a map-style data set for a `DataLoader`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the file is no cache, was cut off or changed, or is one of another temperature, tokenizer,
            vocabulary or model.
    """
    check_number("temperature", temperature)
    check_number("vocab_size", vocab_size, whole=True)
    cache = TokenCache(path)
    expected = {
        "temperature": temperature,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": vocab_size,
        "model": cache.info.model if model is None else model_fingerprint(model),
    }
    for name, value in expected.items():
        if (found := getattr(cache.info, name)) != value:
            raise ValueError(
                f"{cache.path} was written with {name} {shown(found)}, but {shown(value)} is asked for: no formula "
                f"changes it, so write the cache again with this {name}"
            )
    return cache


class TokenCache(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A cache on disk, as a map-style data set of sequences. `read_cache` opens one that fits.

    `cache[i]` is a sequence of T tokens: `input_ids` and `labels` (T,), int64, and at each position t, of the
    prediction of token t + 1, `lse` (T,), float32; `logps` (T,), float32, or `top_ids` (T, k), int64, and `top_logps`
    (T, k), float32. Where nothing is predicted, `lse` and `logps` are 0, `top_ids` 0 and `top_logps` -inf.

    Args:
        path: of the file.

    Attributes:
        info: a `CacheInfo`.

    Raises:
        ValueError: the file is no cache, or was cut off.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self._open() as file:
            text = (file.schema_arrow.metadata or {}).get(_KEY)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        if text is None:
            raise ValueError(f"{self.path} is no file of write_cache: it has no metadata of liger_chunked")
        self.info = CacheInfo(**json.loads(text))
        if self.info.format != _FORMAT:
            raise ValueError(f"{self.path} has format {self.info.format} of caches, this version reads {_FORMAT}")
        self._group_of = [(group, i) for group, n in enumerate(sizes) for i in range(n)]
        self._group = functools.lru_cache(maxsize=4)(self._read_group)

    def _open(self) -> Any:
        pa, pq = _pyarrow()
        try:
            return pq.ParquetFile(self.path, page_checksum_verification=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{self.path} is no Parquet file, or was cut off: {error}. Write it again") from None

    def _read_group(self, group: int) -> dict[str, list[Any]]:
        # Opened at each read, so that workers of a DataLoader share no file position.
        with self._open() as file:
            try:
                table = file.read_row_group(group)
            except OSError as error:
                raise ValueError(f"{self.path} was changed or cut off: {error}. Write it again") from None
        return {name: [torch.tensor(x.values.to_numpy()) for x in table[name]] for name in table.column_names}

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TokenCache.__init__(self, state["path"])

    def __len__(self) -> int:
        return len(self._group_of)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        group, i = self._group_of[index]
        row = {name: values[i] for name, values in self._group(group).items()}
        sequence = {name: row.pop(name).long() for name in ("input_ids", "labels")}
        predicted = next_tokens({"labels": sequence["labels"][None]})[0] != IGNORE_INDEX
        for name, x in row.items():
            shape = (len(predicted), self.info.k) if name.startswith("top") else (len(predicted),)
            x = x.long() if name == "top_ids" else x
            dense = x.new_full(shape, -math.inf if name == "top_logps" else 0)
            dense[predicted] = x.view(-1, *shape[1:])
            sequence[name] = dense
        return sequence

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))

    def collate(
        self,
        rows: Sequence[Mapping[str, Tensor]],
        *,
        pad_token_id: int = 0,
        tail: Literal["bin", "renormalize"] = "bin",
    ) -> dict[str, Any]:
        """Return a batch of sequences, padded on the right: a `collate_fn`.

        Args:
            rows: sequences of this cache.
            pad_token_id: the id of padding.
            tail: of the teacher, see `TopK`.

        Returns:
            `input_ids`, `attention_mask` and `labels` (B, T), int64, and `lse` (B, T), float32. If k = 0 `ref_logps`
            (B, T), float32, else `teacher`, a `TopK` (B, T, k). Position t has the values of token t + 1.
        """
        batch: dict[str, Any] = _padded(rows, pad_token_id)

        def of(name: str, padding: float = 0.0) -> Tensor:
            return pad_sequence([row[name] for row in rows], batch_first=True, padding_value=padding)

        batch["lse"] = of("lse")
        if self.info.k:
            batch["teacher"] = TopK(of("top_ids"), of("top_logps", -math.inf), self.info.temperature, tail)
        else:
            batch["ref_logps"] = of("logps")
        return batch


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ModuleNotFoundError("a cache needs pyarrow: pip install datasets", name="pyarrow") from None
    return pyarrow, pyarrow.parquet
