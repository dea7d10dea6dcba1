"""Every trainer of TRL that needs no server: its data, its settings, and what a training is measured by.

`benchmarks/patched_trainers.py` and the tests of the trainers use it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.generation import GenerationMixin

EXPERIMENTAL = "trl.experimental."


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL.

    - `data`: key of `DATA`
    - `needs`: further arguments of its `__init__`, models or rewards
    - `config`: settings without which it needs a server, or trains on whole distributions
    - `length`: the field of its config for the tokens of a completion, if it samples
    - `module`: where the trainer and its config are
    - `shares`: whether it computes shared prompts once
    """

    name: str
    data: str
    needs: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    length: str = "max_completion_length"
    module: str = "trl"
    shares: bool = False

    def stock(self) -> Any:
        return getattr(importlib.import_module(self.module), f"{self.name}Trainer")

    def config_class(self) -> Any:
        found = getattr(importlib.import_module(self.module), f"{self.name}Config", None)
        return found or importlib.import_module("trl").GRPOConfig  # of a trainer that extends GRPO


_REFERENCE, _TEACHER, _REWARD = ("ref_model",), ("teacher_model",), ("reward_funcs",)
_GROUPS = {"num_generations": 2}
_LIVE = {**_GROUPS, "teacher_model_kind": "live"}
_ALL = [
    Kind("SFT", "text", config={"loss_type": "nll"}),
    Kind("DPO", "pairs", _REFERENCE, shares=True),
    Kind("KTO", "unpaired", _REFERENCE),
    Kind("GRPO", "prompts", _REWARD, _GROUPS, shares=True),
    Kind("RLOO", "prompts", _REWARD, {**_GROUPS, "beta": 0.0}, shares=True),
    Kind("Distillation", "prompts", _TEACHER),
    Kind("ORPO", "pairs", module=f"{EXPERIMENTAL}orpo"),
    Kind("CPO", "pairs", module=f"{EXPERIMENTAL}cpo"),
    Kind("GKD", "messages", _TEACHER, {"lmbda": 0.0}, module=f"{EXPERIMENTAL}gkd"),
    Kind("GOLD", "messages", _TEACHER, {"lmbda": 0.0, "use_uld_loss": False}, module=f"{EXPERIMENTAL}gold"),
    Kind("OnlineDPO", "prompts", _REWARD, length="max_new_tokens", module=f"{EXPERIMENTAL}online_dpo"),
    Kind("GMPO", "prompts", _REWARD, _GROUPS, module=f"{EXPERIMENTAL}gmpo", shares=True),
    Kind("A2PO", "prompts", _REWARD, module=f"{EXPERIMENTAL}a2po"),
    Kind("TPO", "triples", module=f"{EXPERIMENTAL}tpo"),
    Kind("IWOPD", "messages", _TEACHER, module=f"{EXPERIMENTAL}iw_opd"),
    Kind(
        "SDFT",
        "privileged",
        config={**_LIVE, "distillation_mode": "full_logits", "distillation_topk": None},
        module=f"{EXPERIMENTAL}sdft",
    ),
    Kind("SDPO", "privileged", _REWARD, _LIVE, module=f"{EXPERIMENTAL}sdpo"),
]
if importlib.util.find_spec(f"{EXPERIMENTAL}ssd") is not None:  # of TRL 1.15
    _ALL.append(Kind("SSD", "prompts", module=f"{EXPERIMENTAL}ssd"))

KINDS = {kind.name: kind for kind in _ALL}

# What each kind of data makes of a prompt and two completions.
DATA: dict[str, Callable[[int, str, str, str], dict[str, Any]]] = {
    "text": lambda i, prompt, yes, no: {"text": prompt + yes},
    "pairs": lambda i, prompt, yes, no: {"prompt": prompt, "chosen": yes, "rejected": no},
    "triples": lambda i, prompt, yes, no: {"prompt": prompt, "chosen": yes, "rejected": no, "reference": yes[::-1]},
    "unpaired": lambda i, prompt, yes, no: {"prompt": prompt, "completion": no if i % 3 else yes, "label": i % 3 == 0},
    "prompts": lambda i, prompt, yes, no: {"prompt": prompt},
    "privileged": lambda i, prompt, yes, no: {"prompt": prompt, "privileged_context": prompt[::-1]},
    "messages": lambda i, prompt, yes, no: {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": yes}]
    },
}


_OF_WEIGHTS = ("t", "transpose", "detach", "alias", "view", "expand")  # a tied weight has the vocabulary's size last
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


class Measured(TorchDispatchMode):
    """Measure what runs under this mode.

    - `rows`: of the largest tensor of rows of the vocabulary, and `where` it came from
    - `products`: matrix products with a head, in rows: 2 N H V operations are N
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows, self.products, self.where = vocabulary, 0, 0.0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(t in (Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in types):
            return NotImplemented  # a stand-in of logits has the shape, and no values
        result = func(*args, **(kwargs or {}))
        name, size = func.overloadpacket.__name__, self.vocabulary
        for x in tree_leaves(result):
            if not isinstance(x, Tensor) or x.is_meta or x.ndim < 2 or not x.is_floating_point() or x.shape[-1] != size:
                continue
            if x.numel() // size > self.rows and not (name in _OF_WEIGHTS and x.ndim == 2):
                self.rows, self.where = x.numel() // size, name
        if name in _PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
            if size in sizes:
                sizes.remove(size)
                self.products += a.shape[:-2].numel() * sizes[0] * sizes[1]
        return result


@contextmanager
def around_generate(context: Callable[[], Any]) -> Iterator[None]:
    """Run each `generate` of a model inside `context()`."""
    stock = GenerationMixin.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        with context():
            return stock(*args, **kwargs)

    GenerationMixin.generate = generate
    try:
        yield
    finally:
        GenerationMixin.generate = stock


def measured(trainer: Any, evaluate: bool = False) -> Measured:
    """Train, and evaluate if asked, and return what was measured."""
    watched = Measured(trainer.model.config.vocab_size)
    with around_generate(_disable_current_modes), watched:
        trainer.train()
        if evaluate:
            trainer.evaluate()
    return watched
