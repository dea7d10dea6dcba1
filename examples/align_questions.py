"""Questions with one right answer, which a program can verify: the largest number, the last word, and the like."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Question(NamedTuple):
    """A question that names all candidates, and the only right one of them."""

    asked: str
    answer: str
    wrong: tuple[str, ...]
    kind: str


_NOUNS = (
    "apple river stone table music cloud winter garden paper window forest silver bridge candle dragon engine flower "
    "guitar hammer island jacket kitchen ladder mirror needle orange pencil rocket saddle ticket valley wallet"
).split()
_SHORT = "cat sun map ice dog cup bus hat key pen box fox jar leg net owl pig rug toy van".split()
_LONG = "mountain elephant breakfast notebook telephone butterfly umbrella chocolate furniture newspaper".split()


def _of_numbers(kind: str, choose: Callable[[Sequence[int]], int], rng: random.Random) -> Question:
    numbers = rng.sample(range(10, 100), 3)
    words = [str(number) for number in numbers]
    return _question(f"Which number is the {kind}", words, str(choose(numbers)), kind)


def _of_words(kind: str, index: int, rng: random.Random) -> Question:
    words = rng.sample(_NOUNS, 4)
    return _question(f"What is the {kind} word", words, words[index], kind)


def _longest(rng: random.Random) -> Question:
    words = [*rng.sample(_SHORT, 2), rng.choice(_LONG)]
    answer = words[-1]
    rng.shuffle(words)
    return _question("Which word has the most letters", words, answer, "longest")


def _question(start: str, words: Sequence[str], answer: str, kind: str) -> Question:
    return Question(f"{start}: {', '.join(words)}?", answer, tuple(word for word in words if word != answer), kind)


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "largest": lambda rng: _of_numbers("largest", max, rng),
    "smallest": lambda rng: _of_numbers("smallest", min, rng),
    "last": lambda rng: _of_words("last", -1, rng),
    "second": lambda rng: _of_words("second", 1, rng),
    "longest": _longest,
}


def different_questions(n: int, rng: random.Random) -> list[Question]:
    """Return `n` questions of all kinds in turn, no two of which are equal."""
    made: dict[str, Question] = {}
    kinds = list(KINDS)
    while len(made) < n:
        question = KINDS[kinds[len(made) % len(kinds)]](rng)
        made.setdefault(question.asked, question)
    return list(made.values())


def is_right(text: str, answer: str) -> bool:
    """Whether a model's text is the answer, and nothing else."""
    return text.strip() == answer
