"""The data of `align.py`: English text that ships with Python, or a preference file, as batches of token ids."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

IGNORE_INDEX = -100
_PASSAGE_WORDS = 48  # half of them prompt, half of them continuation
_HELD_OUT_SHARE = {"topics": 0.2, "jsonl": 0.1}
_FIELDS = ("prompt", "chosen", "rejected")

T = TypeVar("T")


class Preference(NamedTuple):
    """A prompt, a preferred and a rejected continuation; `kind` says how the rejected one was made.

    Prompt and continuation are concatenated as they are: a continuation starts with its leading space.
    """

    prompt: str
    chosen: str
    rejected: str
    kind: str


class Dataset(NamedTuple):
    """Training pairs and held-out pairs. They share no document, or, for a file, no prompt."""

    train: list[Preference]
    held_out: list[Preference]


class Batch(NamedTuple):
    """The tensors of a step, all (sequences, T). `target[:, t]` is the token that position `t` predicts."""

    input_ids: Tensor
    attention_mask: Tensor
    target: Tensor


class DataError(ValueError):
    """A preference file that cannot be used; the message says where and why."""


# ---- English


def english_topics() -> dict[str, list[str]]:
    """Return the prose of Python's own documentation, `pydoc_data.topics`: paragraphs by topic.

    Topics quote each other. Only the first copy of a paragraph is kept, so that no held-out text is in a training
    topic.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents: dict[str, list[str]] = {}
    for name in sorted(topics):
        for block in topics[name].split("\n\n"):
            words = block.split()
            paragraph = " ".join(words)
            letters = sum(c.isalpha() or c == " " for c in paragraph)
            is_prose = len(words) >= 8 and letters >= 0.85 * len(paragraph)
            if is_prose and paragraph not in seen:
                documents.setdefault(name, []).append(paragraph)
            seen.add(paragraph)
    return documents


def _passages(paragraphs: Sequence[str]) -> list[tuple[str, str]]:
    """Cut a topic into (prompt, continuation) pairs."""
    words = " ".join(paragraphs).split()
    starts = range(0, len(words) - _PASSAGE_WORDS + 1, _PASSAGE_WORDS)
    half = _PASSAGE_WORDS // 2
    return [(" ".join(words[i : i + half]), " " + " ".join(words[i + half : i + _PASSAGE_WORDS])) for i in starts]


def _swap_neighbours(words: Sequence[str], rng: random.Random) -> list[str]:
    """Swap four pairs of neighbouring words, which breaks the grammar."""
    words = list(words)
    for i in rng.sample(range(0, len(words) - 1, 2), 4):
        words[i], words[i + 1] = words[i + 1], words[i]
    return words


def _blur(words: Sequence[str], common: Sequence[str], rng: random.Random) -> list[str]:
    """Replace six words by words that are common everywhere.

    A language model finds the result as likely as the true text, because common words are likely. So it must learn the
    preference.
    """
    words = list(words)
    for i in rng.sample(range(len(words)), 6):
        words[i] = rng.choice(common)
    return words


def _pair_up(topics: Sequence[list[tuple[str, str]]], common: Sequence[str], rng: random.Random) -> list[Preference]:
    """Make two pairs for each passage: its continuation against two corruptions of it.

    The continuation of another passage would not work as the rejected one. It differs only in its topic, and a model of
    this size cannot learn to see that from so little text.
    """
    pairs = []
    for prompt, continuation in (passage for topic in topics for passage in topic):
        words = continuation.split()
        for kind, corrupted in (
            ("neighbours swapped", _swap_neighbours(words, rng)),
            ("common words put in", _blur(words, common, rng)),
        ):
            pairs.append(Preference(prompt, continuation, " " + " ".join(corrupted), kind))
    return pairs


def english_preferences(seed: int) -> Dataset:
    """Return pairs of true and corrupted passages. Whole topics are held out."""
    rng = random.Random(seed)
    topics = {name: passages for name, text in english_topics().items() if (passages := _passages(text))}
    train, held_out = _hold_out(topics, _HELD_OUT_SHARE["topics"], rng)
    counts = Counter(word for topic in train for passage in topic for text in passage for word in text.split())
    common = [word for word, _ in counts.most_common(20)]
    return Dataset(_pair_up(train, common, rng), _pair_up(held_out, common, rng))


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`. The tokenizer starts every text with `<s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


# ---- a preference file


def _parse_line(line: str, where: str) -> Preference:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with {', '.join(_FIELDS)}, got {type(record).__name__}")
    for name in _FIELDS:
        if name not in record:
            raise DataError(f"{where}: field {name!r} is missing, got {sorted(record)}")
        if not isinstance(record[name], str):
            raise DataError(f"{where}: field {name!r} must be a string, got {type(record[name]).__name__}")
        if name != "prompt" and not record[name].strip():
            raise DataError(f"{where}: field {name!r} is empty")
    return Preference(*(record[name] for name in _FIELDS), kind="all")


def read_preferences(path: Path, seed: int) -> Dataset:
    """Read one JSON object per line, with the strings `prompt`, `chosen` and `rejected`. Holds out a tenth of the
    prompts.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    by_prompt: dict[str, list[Preference]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            pair = _parse_line(line, f"{path}, line {number}")
            by_prompt.setdefault(pair.prompt, []).append(pair)
    if len(by_prompt) < 2:
        raise DataError(f"{path}: holding pairs out takes at least 2 different prompts, got {len(by_prompt)}")
    train, held_out = _hold_out(by_prompt, _HELD_OUT_SHARE["jsonl"], random.Random(seed))
    return Dataset([pair for group in train for pair in group], [pair for group in held_out for pair in group])


def _hold_out(groups: dict[str, list[T]], share: float, rng: random.Random) -> tuple[list[list[T]], list[list[T]]]:
    """Split groups at random into training and held-out groups.

    The held-out groups have up to `share` of all items, and at least the size of the smallest group.
    """
    names = sorted(groups)
    rng.shuffle(names)
    quota = max(share * sum(map(len, groups.values())), min(map(len, groups.values())))
    train, held_out, n_held_out = [], [], 0
    for name in names:
        group = groups[name]
        if n_held_out + len(group) <= quota:
            held_out.append(group)
            n_held_out += len(group)
        else:
            train.append(group)
    return train, held_out


# ---- batches


class Encoded(NamedTuple):
    """A prompt and a completion, truncated together to the length limit."""

    prompt: list[int]
    completion: list[int]


class Encoder:
    """Converts text to batches on a device. Completions end with the end-of-text token, and rows are padded on the
    right.

    A text over `max_length` tokens loses the end of its completion, down to half of the limit, then the start of its
    prompt.

    Args:
        predict_prompts: whether the tokens of prompts are targets of `texts`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        device: torch.device,
        *,
        predict_prompts: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.device = device
        self.predict_prompts = predict_prompts

    def _encode(self, prompt: str, completion: str) -> Encoded:
        prompt_ids = self.tokenizer(prompt)["input_ids"]
        ids = self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        if self.tokenizer.eos_token_id is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
        ids = ids[: max(self.max_length // 2, self.max_length - len(prompt_ids))]
        room = self.max_length - len(ids)
        return Encoded(prompt_ids[-room:] if room else [], ids)

    def texts(self, pairs: Sequence[Preference]) -> Batch:
        """Encode prompts with their chosen completions."""
        return self._batch([self._encode(p.prompt, p.chosen) for p in pairs], predict_prompt=self.predict_prompts)

    def pairs(self, pairs: Sequence[Preference]) -> Batch:
        """Encode chosen sequences, then rejected ones; only the completions' tokens are targets."""
        chosen = [self._encode(p.prompt, p.chosen) for p in pairs]
        rejected = [self._encode(p.prompt, p.rejected) for p in pairs]
        return self._batch(chosen + rejected, predict_prompt=False)

    def _batch(self, rows: Sequence[Encoded], predict_prompt: bool) -> Batch:
        length = max(len(row.prompt) + len(row.completion) for row in rows)
        input_ids = torch.zeros(len(rows), length, dtype=torch.long)  # the value of padding does not matter
        attention_mask = torch.zeros_like(input_ids)
        target = torch.full_like(input_ids, IGNORE_INDEX)
        for i, (prompt, completion) in enumerate(rows):
            ids = torch.tensor(prompt + completion)
            first = 1 if predict_prompt else max(1, len(prompt))
            input_ids[i, : len(ids)] = ids
            attention_mask[i, : len(ids)] = 1
            target[i, first - 1 : len(ids) - 1] = ids[first:]
        return Batch(*(x.to(self.device) for x in (input_ids, attention_mask, target)))


def shuffled_chunks(items: Sequence[T], size: int, count: int, seed: int) -> Iterator[list[T]]:
    """Yield `count` lists of `size` items: epoch after epoch, in a random order determined by the seed."""
    rng = random.Random(seed)
    queue: list[T] = []
    for _ in range(count):
        while len(queue) < size:
            queue += rng.sample(list(items), len(items))
        yield queue[:size]
        del queue[:size]
