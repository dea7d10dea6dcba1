"""What the runs of `benchmarks.evidence` train on, and what held-out data says about a trained model.

- text: windows of Python's documentation, `pydoc_data.topics`; whole topics are held out
- preferences: `english_preferences` of the examples, a true continuation against a corrupted one
- questions with one right answer, after solved examples of the same kind: a reward that can be verified

`Judge` computes every held-out number with transformers' own forward in float32, whoever trained the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.align_data import Encoder, english_preferences
from examples.align_questions import KINDS, different_questions, is_right

WINDOW = 256  # tokens of a window of text
HELD_OUT_TOPICS = 0.2
SHOTS = 4  # solved examples before a question
_SEED = 0  # of what is held out, and of the training questions

Row = dict[str, Any]


# Text


def windows(tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[list[int]]]:
    """Return token ids to train on and held-out ones, in windows of `WINDOW` tokens."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    random.Random(_SEED).shuffle(names)
    cut = int(HELD_OUT_TOPICS * len(names))

    def of_topics(names: Sequence[str]) -> list[list[int]]:
        ids = tokenizer("\n\n".join(topics[name] for name in names), add_special_tokens=False)["input_ids"]
        return [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]

    return of_topics(names[cut:]), of_topics(names[:cut])


# Questions


class Prompted(NamedTuple):
    """A prompt that ends where the answer starts, and the only right answer."""

    prompt: str
    answer: str
    kind: str


def turn(question: str, answer: str | None = None) -> str:
    """Return a turn of a conversation in ChatML; without an answer, up to where it starts."""
    asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return asked if answer is None else f"{asked}{answer}<|im_end|>\n"


def prompted(n: int, rng: random.Random) -> list[Prompted]:
    """Return different questions, each after solved ones of its kind."""
    made = []
    for question in different_questions(n, rng):
        shots = [KINDS[question.kind](rng) for _ in range(SHOTS)]
        solved = "".join(turn(shot.asked, shot.answer) for shot in shots)
        made.append(Prompted(solved + turn(question.asked), question.answer, question.kind))
    return made


HELD_OUT_QUESTIONS, TRAINING_QUESTIONS = 300, 2000


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return a reward of 1 for each completion that is the answer, and of 0 for any other."""
    return [float(is_right(text, right)) for text, right in zip(completions, answer, strict=True)]


# Data sets, as the trainers take them


class Data:
    """Rows to train on, in an order of each seed; `limit` cuts held-out data, for a quick try."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> None:
        if tokenizer.pad_token is None:  # TRL's SFT, DPO and GRPO trainers do the same; its GKD trainer refuses
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer
        pairs = english_preferences(_SEED)
        self._pairs, self.held_out_pairs = pairs.train, pairs.held_out[:limit]
        self._windows, held_out = windows(tokenizer)
        self.held_out_windows = torch.tensor(held_out[:limit])
        every = prompted(HELD_OUT_QUESTIONS + TRAINING_QUESTIONS, random.Random(_SEED))
        self.held_out_questions, self._questions = every[:HELD_OUT_QUESTIONS][:limit], every[HELD_OUT_QUESTIONS:]

    def text(self, seed: int) -> list[Row]:
        return [{"input_ids": ids} for ids in self._shuffled(self._windows, seed)]

    def preferences(self, seed: int) -> list[Row]:
        pairs = self._shuffled(self._pairs, seed)
        return [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]

    def labelled(self, seed: int) -> list[Row]:
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in self.preferences(seed)
            for side in ("chosen", "rejected")
        ]
        return self._shuffled(rows, seed)

    def messages(self, seed: int) -> list[Row]:
        """Return conversations whose answer is the second half of a window of text."""
        rows = []
        for ids in self._shuffled(self._windows, seed):
            start, end = (self.tokenizer.decode(half) for half in (ids[: WINDOW // 2], ids[WINDOW // 2 :]))
            asked, answered = {"role": "user", "content": start}, {"role": "assistant", "content": end}
            rows.append({"messages": [asked, answered]})
        return rows

    def prompts(self, seed: int) -> list[Row]:
        return [{"prompt": x.prompt, "answer": x.answer} for x in self._shuffled(self._questions, seed)]

    @staticmethod
    def _shuffled(items: Sequence[Any], seed: int) -> list[Any]:
        return random.Random(seed).sample(items, len(items))


# Held-out numbers


class Score(NamedTuple):
    """A held-out number: the mean of `n` values."""

    value: float
    n: int


Scores = dict[str, Score]


class Judge:
    """Scores trained weights on held-out data, in float32 and with transformers' own forward.

    Args:
        model: the pretrained model. It is the reference of preferences and the teacher of distillation.
        data: with the held-out data.
    """

    def __init__(self, model: PreTrainedModel, data: Data) -> None:
        self.pretrained = model.eval().requires_grad_(False)
        self.data = data
        self.device = model.device
        self._encoder = Encoder(data.tokenizer, WINDOW, model.device)
        self._reference: Tensor | None = None

    @torch.no_grad()
    def text(self, model: PreTrainedModel) -> Scores:
        """Return the mean negative log-probability of a token, in nats, and how often the likeliest token is right."""
        nll, right, n = 0.0, 0.0, 0
        for ids in self.data.held_out_windows.split(16):
            ids = ids.to(self.device)
            logits, target = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            nll += F.cross_entropy(logits, target, reduction="sum").item()
            right += (logits.argmax(-1) == target).sum().item()
            n += len(target)
        return {"nll": Score(nll / n, n), "accuracy": Score(right / n, n)}

    @torch.no_grad()
    def divergence(self, model: PreTrainedModel) -> Scores:
        """Return KL(teacher, student) of a token, in nats, where the teacher is the pretrained model."""
        total, n = 0.0, 0
        for ids in self.data.held_out_windows.split(16):
            student, teacher = (m(ids.to(self.device), use_cache=False).logits for m in (model, self.pretrained))
            for rows in range(0, len(ids), 4):  # limits the memory of the log-probabilities
                logps = [x[rows : rows + 4, :-1].log_softmax(-1) for x in (student, teacher)]
                total += F.kl_div(*logps, reduction="sum", log_target=True).item()
            n += ids[:, 1:].numel()
        return {"kl": Score(total / n, n), "nll": self.text(model)["nll"]}

    @torch.no_grad()
    def preferences(self, model: PreTrainedModel) -> Scores:
        """Return how often the chosen continuation gains more on the pretrained model, and how much more, in nats.

        A tie counts half, so that the pretrained model itself has 0.5.
        """
        if self._reference is None:
            self._reference = self._pair_logps(self.pretrained)
        chosen, rejected = self._pair_logps(model) - self._reference
        margin = (chosen - rejected).double()
        return {
            "accuracy": Score((0.5 + 0.5 * margin.sign()).mean().item(), len(margin)),
            "margin": Score(margin.mean().item(), len(margin)),
        }

    def _pair_logps(self, model: PreTrainedModel) -> Tensor:
        """Return the log-probabilities (2, n) of chosen and rejected continuations."""
        found = []
        for batch in map(self._encoder.pairs, _chunks(self.data.held_out_pairs, 16)):
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            nll = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="none")  # 0 if ignored
            found.append(-nll.view_as(batch.target).sum(-1).view(2, -1))
        return torch.cat(found, -1)

    @torch.no_grad()
    def questions(self, model: PreTrainedModel) -> Scores:
        """Return how often the greedy answer is right, over all questions and by kind."""
        tokenizer, right = self.data.tokenizer, []
        for part in _chunks(self.data.held_out_questions, 100):
            batch = tokenizer([x.prompt for x in part], return_tensors="pt", padding=True, padding_side="left").to(
                self.device
            )
            out = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=MAX_ANSWER,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            right += exact(answers, [x.answer for x in part])
        kinds = [x.kind for x in self.data.held_out_questions]
        by_kind = {kind: [r for r, k in zip(right, kinds, strict=True) if k == kind] for kind in dict.fromkeys(kinds)}
        groups = {"accuracy": right, **by_kind}
        return {name: Score(sum(values) / len(values), len(values)) for name, values in groups.items()}


MAX_ANSWER = 8  # tokens


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
