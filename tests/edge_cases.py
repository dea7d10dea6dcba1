"""One training step of a model, stock or fused, and what the step did: for `test_edges.py`.

A step is compared as a whole: loss, every gradient, the dtype of every module's output, and the largest number of rows
of logits that it held.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from model_zoo import BY_ID, HIDDEN, LENGTH, VOCAB, Tiny
from spies import Results
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl_kinds import set_head

from liger_chunked import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel, attach_head, run_head

N_TOKENS = 2 * LENGTH
# Four rows of float32 logits.
BUDGET = 4 * 4 * VOCAB
BF16 = 1e-2

_SMALL = {**BY_ID["llama"].config, "mlp_bias": False}
FAMILIES = {
    "llama": dataclasses.replace(BY_ID["llama"], config=_SMALL),
    "shallow": dataclasses.replace(BY_ID["llama"], config={**_SMALL, "num_hidden_layers": 1}),
    "cohere": Tiny("cohere", "cohere", "CohereForCausalLM", "CohereConfig", {**_SMALL, "logit_scale": 0.25}),
    **{name: BY_ID[name] for name in ("granite", "gemma2", "mixtral", "qwen3_moe")},
}


def build(family: str = "llama", seed: int = 0, model_class: type | None = None) -> Any:
    """Return a small model in training mode. Its vocabulary size is prime, and no other size is a multiple of it."""
    stock = FAMILIES[family].build(seed)
    if model_class is None:
        return stock.train()
    model = model_class(stock.config)
    model.load_state_dict(stock.state_dict())
    return model.train()


def batch(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return `input_ids`, `attention_mask` and `labels` of two sequences; a change to None removes an argument."""
    sample = FAMILIES[family].sample()
    arguments = {**sample.arguments, "labels": sample.labels, **changes}
    return {name: x for name, x in arguments.items() if x is not None}


# What a step holds and computes


class Logits(Results):
    """Records the most rows of logits that one tensor held."""

    def __init__(self, vocab: int = VOCAB, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.vocab, self.hidden, self.rows = vocab, hidden, 0

    def see(self, x: Tensor) -> None:
        # The head's weight has as many rows as the hidden states have columns.
        if x.numel() % self.vocab == 0 and x.numel() != self.vocab * self.hidden:
            self.rows = max(self.rows, x.numel() // self.vocab)


@dataclasses.dataclass
class Step:
    """What one training step returned. `rows` is None if it was not recorded."""

    loss: Tensor
    grads: dict[str, Tensor]
    dtypes: dict[str, list[torch.dtype]]
    rows: int | None = None
    output: Any = None


@contextmanager
def dtypes_of(model: nn.Module) -> Iterator[dict[str, list[torch.dtype]]]:
    """Record the dtypes of what the modules inside the decoder layers return."""
    seen: dict[str, list[torch.dtype]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            found = [x.dtype for x in tree_iter(output) if isinstance(x, Tensor)]
            seen.setdefault(name, []).extend(found[:1])

        return record

    handles = []
    for name, module in model.named_modules():
        _, inside, rest = name.partition("layers.")
        if inside:
            handles.append(module.register_forward_hook(hook(rest)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def step(
    call: Callable[..., Any],
    model: nn.Module,
    inputs: dict[str, Any],
    *,
    rows: bool = True,
    dtypes: bool = True,
    vocab: int = VOCAB,
) -> Step:
    """Run two training steps; the first records dtypes, the second logits."""
    with dtypes_of(model) if dtypes else nullcontext({}) as seen:
        output = call(model, **inputs)
        loss = loss_of(output)
        grads = gradients(model, loss)
    held = None
    if rows:
        with Logits(vocab) as logits:
            again = loss_of(call(model, **inputs))
            gradients(model, again)
        # The same step in float32: rounding alone may differ.
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
        held = logits.rows
    return Step(loss, grads, seen, held, output)


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.loss


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    if loss.requires_grad:
        loss.backward()
    grads = {plain(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def assert_close(ours: Tensor, stock: Tensor, tolerance: float, name: str) -> None:
    assert ours.shape == stock.shape, name
    assert ours.isfinite().all() and stock.isfinite().all(), name
    error = (ours.double() - stock.double()).norm()
    assert error <= tolerance * (stock.double().norm() + 1e-3), f"{name}: error {error:.2e} of {stock.norm():.2e}"


def assert_same(ours: Step, stock: Step, tolerance: float = 1e-5, fused: bool | None = True) -> None:
    """Compare two steps. `fused=None` allows our step to build logits."""
    assert ours.loss.requires_grad == stock.loss.requires_grad
    assert ours.loss.is_inference() == stock.loss.is_inference()
    different = {name: x for name, x in stock.dtypes.items() if ours.dtypes.get(name) != x}
    assert not different, f"stock's layers return {different}"
    assert ours.dtypes.keys() == stock.dtypes.keys()
    assert_close(ours.loss.detach(), stock.loss.detach(), tolerance, "loss")
    assert ours.grads.keys() == stock.grads.keys()
    assert bool(stock.grads) == stock.loss.requires_grad
    for name, gradient in stock.grads.items():
        assert_close(ours.grads[name], gradient, 5 * tolerance, name)
    if fused and ours.rows is not None:
        assert ours.rows <= N_TOKENS // 3, f"{ours.rows} rows of logits"


# The ways of training


LOSS = LigerFusedLinearCrossEntropyLoss(logits_budget=BUDGET)


def cross_entropy(head: Any, input: Any) -> CausalLMOutputWithPast:
    """A `head_fn` that computes the model's own loss."""
    loss = input.loss(LOSS, head, num_items=input.num_items_in_batch)
    if input.added_loss is not None:
        loss = loss + input.added_loss
    return CausalLMOutputWithPast(loss=loss)


def patch_all(model: nn.Module) -> None:
    """Fuse the head, and put kernels in the place of the layers."""
    apply_liger_kernel(model, logits_budget=BUDGET)


def patch_head(model: nn.Module) -> None:
    """Fuse the head and leave the layers, whose kernels round bfloat16 in another order."""
    switches = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
    apply_liger_kernel(model, logits_budget=BUDGET, **dict.fromkeys(switches, False))


def own_call(model: nn.Module, **inputs: Any) -> Any:
    return model(**inputs)


def attached_call(model: nn.Module, **inputs: Any) -> Any:
    return run_head(model, cross_entropy, **inputs)


def trl_call(model: nn.Module, **inputs: Any) -> Any:
    return model(**inputs, fused_lm_head=True)


@dataclasses.dataclass(frozen=True)
class Way:
    """`patch` changes a model; `call` then runs a training step on it."""

    name: str
    patch: Callable[[Any], None]
    call: Callable[..., Any]

    def __repr__(self) -> str:
        return self.name


def trainer_patch(model: Any) -> None:
    """Give a model the head of a trainer, as while it trains."""
    set_head(model, logits_budget=BUDGET, outputs=("log_probs", "entropy", "is_top1"))


APPLY = Way("apply", patch_head, own_call)
ATTACH = Way("attach", attach_head, attached_call)
TRAINER = Way("trainer", trainer_patch, trl_call)
LAYERS = Way("layers", patch_all, own_call)
WAYS = [APPLY, ATTACH, TRAINER]
