"""How public training code uses logits: stock's loss and gradients, and for the idioms of `FUSED` no logits.

Random programs (programs.py) have the values and gradients of views, copies and losses in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Case, V, World, check, deferred, fused, replaced, slightly_wrong
from torch import Tensor, nn

from liger_chunked.kernels import backend


def ce(z: Any, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), **options)


def logps(z: Any, ids: Tensor) -> Any:
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def shifted(z: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1))


def selective_log_softmax(z: Any, ids: Tensor) -> Tensor:
    chosen = torch.gather(z, dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def z_loss(w: World) -> Tensor:
    z = w.z()
    return ce(z, w.y) + 1e-2 * torch.logsumexp(z, dim=-1).square().mean()


def focal(w: World) -> Tensor:
    per_token = ce(w.z(), w.y, reduction="none")
    return ((1 - torch.exp(-per_token)) ** 2 * per_token).sum() / w.mask.sum()


def grpo(w: World) -> Tensor:
    logp = selective_log_softmax(w.z() / 0.9, w.ids)
    with torch.no_grad():
        ref = selective_log_softmax(w.z_teacher() / 0.9, w.ids)
    old = logp.detach() - 0.1 * w.adv
    ratio = torch.exp(logp - old)
    surrogate = -torch.min(ratio * w.adv, ratio.clamp(0.8, 1.2) * w.adv)
    kl = torch.exp(ref - logp) - (ref - logp) - 1
    return ((surrogate + 0.04 * kl) * w.mask).sum() / w.mask.sum()


def dpo(w: World) -> Tensor:
    chosen, rejected = (logps(z, w.ids).sum(-1) for z in (w.model(w.x), w.model(w.x.flip(0))))
    with torch.no_grad():
        ref = [logps(z, w.ids).sum(-1) for z in (w.teacher(w.x_teacher), w.teacher(w.x_teacher.flip(0)))]
    return -F.logsigmoid(0.1 * ((chosen - rejected) - (ref[0] - ref[1]))).mean()


def dpo_of_one_batch(w: World) -> Tensor:
    logits = w.model(torch.cat([w.x, w.x.flip(0)]))[:, :-1]
    labels = torch.cat([w.y, w.y.flip(0)])[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2) * mask
    chosen, rejected = per_token.sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() - chosen.mean() / 7


def accuracy_of_the_shift(w: World) -> Any:
    z = w.z()
    loss = shifted(z, w.y)
    with torch.no_grad():
        predictions = z[..., :-1, :].detach().argmax(-1)
        return [loss, (predictions == w.y[..., 1:]).float().mean(), torch.argmax(z, dim=-1)]


def entropy(z: Any) -> Tensor:
    logp = F.log_softmax(z, dim=-1)
    return -(logp.exp() * logp).sum(-1)


def loss_and_entropy(w: World) -> Any:
    z = w.z()
    return ce(z, w.y) - 0.01 * entropy(z).mean()


def entropy_of_some_tokens(w: World) -> Any:
    """The product is made of all tokens, and its rows are selected before the sum."""
    logp = F.log_softmax(w.z(), -1)
    return -(logp.exp() * logp)[w.mask].sum(-1).mean()


def distillation(log_target: bool) -> Callable[[World], Tensor]:
    def program(w: World) -> Tensor:
        z, temperature = w.z(), 2.0
        with torch.no_grad():
            teacher = w.z_teacher()
        target = F.log_softmax(teacher / temperature, -1) if log_target else F.softmax(teacher / temperature, dim=-1)
        soft = F.kl_div(F.log_softmax(z / temperature, -1), target, reduction="batchmean", log_target=log_target)
        return ce(z, w.y) + 0.5 * temperature**2 * soft

    return program


def jsd(w: World) -> Tensor:
    student, teacher = w.z().log_softmax(-1), w.z_teacher().detach().log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([student, teacher]) + torch.tensor(0.5, dtype=w.dtype).log(), dim=0)
    sides = [F.kl_div(mixture, p, reduction="none", log_target=True).sum(-1) for p in (student, teacher)]
    return 0.5 * (sides[0] + sides[1])[w.mask].mean()


def unlikelihood(w: World) -> Tensor:
    z = w.z()
    negative = logps(z, (w.ids + 1) % V).exp()
    return ce(z, w.y) - torch.log((1 - negative).clamp(min=1e-5)).mean()


def symmetric_kl(a: Any, b: Any) -> Tensor:
    sides = [
        F.kl_div(F.log_softmax(p, dim=-1), F.softmax(q, dim=-1), reduction="none").sum(-1) for p, q in ((a, b), (b, a))
    ]
    return (sides[0] + sides[1]).mean() / 2


def r_drop(w: World) -> Tensor:
    a, b = w.model(w.x), w.model(F.dropout(w.x, 0.3))
    return 0.5 * (ce(a, w.y) + ce(b, w.y)) + symmetric_kl(a, b)


def lora(w: World) -> Tensor:
    h, a, b = w.hidden(), w.leaf("a", 6, 2), w.leaf("b", 2, V)
    z = w.head(h)
    w.seen.append(z)
    return ce(z + (h @ a) @ b * 2.0, w.y)


def tied(w: World) -> Tensor:
    embedding = nn.Embedding(V, 6, dtype=w.dtype)
    embedding.weight = w.head.weight
    z = w.model(w.x + embedding(w.ids))
    return ce(z, w.y)


def additive_mask(w: World) -> Tensor:
    mask = torch.zeros(V, dtype=w.dtype)
    mask[V - 3 :] = float("-inf")
    return ce(w.z() + mask, w.y.clamp(max=V - 4))


def multi_token_prediction(w: World) -> Tensor:
    z = w.z()
    losses = [ce(z[:, : -k or None], w.y[:, k:]) for k in range(3)]
    return torch.stack(losses).sum()


def sequences_of_packs(w: World) -> Tensor:
    z, bounds = w.rows(), [0, 4, 9, 15]
    return sum(ce(z[a:b], w.ids.flatten()[a:b]) for a, b in itertools.pairwise(bounds)) / 3  # type: ignore[return-value]


CLASS_WEIGHT = torch.linspace(0.2, 2, V, dtype=torch.float64)

FUSED: dict[str, Callable[[World], Any]] = {
    "view": lambda w: F.cross_entropy(w.z().view(-1, V), w.y.view(-1)),
    "entropy-of-some-tokens": entropy_of_some_tokens,
    "reshape-size": lambda w: (lambda z: F.cross_entropy(z.reshape(-1, z.size(-1)), w.y.reshape(-1)))(w.z()),
    "module": lambda w: nn.CrossEntropyLoss(ignore_index=-100)(w.rows(), w.y.view(-1)),
    "shift-contiguous": lambda w: shifted(w.z(), w.y),
    "2d-hidden": lambda w: F.cross_entropy(w.model(w.x.flatten(0, 1)), w.y.flatten()),
    "permute-classes": lambda w: F.cross_entropy(w.z().permute(0, 2, 1), w.y, reduction="none"),
    "mT-contiguous-classes": lambda w: F.cross_entropy(w.z().mT, w.y, label_smoothing=0.1),
    "none": lambda w: ce(w.z(), w.y, reduction="none").view(3, 5),
    "label-smoothing": lambda w: ce(w.z(), w.y, label_smoothing=0.1),
    "class-weight-smoothing": lambda w: ce(w.z(), w.y, weight=CLASS_WEIGHT, label_smoothing=0.2, reduction="sum"),
    "ignore-index": lambda w: ce(w.z(), w.y.clamp(min=0), ignore_index=0),
    "nll": lambda w: F.nll_loss(F.log_softmax(w.rows(), dim=-1), w.y.view(-1)),
    "nll-module": lambda w: nn.NLLLoss(reduction="sum")(nn.LogSoftmax(dim=-1)(w.rows()), w.y.view(-1)),
    "nll-3d": lambda w: F.nll_loss(F.log_softmax(w.z(), dim=-1).transpose(1, 2), w.y),
    "gather-log-softmax": lambda w: logps(w.z(), w.ids),
    "gather-minus-lse": lambda w: selective_log_softmax(w.z(), w.ids),
    "take-along-dim": lambda w: torch.take_along_dim(w.z().log_softmax(-1), w.ids[..., None], -1),
    "accuracy-shift": accuracy_of_the_shift,
    "z-loss": z_loss,
    "focal": focal,
    "grpo": grpo,
    "dpo": dpo,
    "dpo-one-batch": dpo_of_one_batch,
    "mask-of-rows": lambda w: F.cross_entropy(w.z()[w.mask], w.y[w.mask]),
    "rows-by-nonzero": lambda w: F.cross_entropy(w.rows()[w.mask.view(-1).nonzero().squeeze(-1)], w.y[w.mask]),
    "index-select": lambda w: ce(w.z().index_select(1, torch.tensor([3, 0])), w.y[:, [3, 0]]),
    "vocabulary-slice": lambda w: ce(w.z()[..., : V - 3], w.y.clamp(max=V - 4)),
    "vocabulary-mask": additive_mask,
    "split": lambda w: [ce(a, b) for a, b in zip(w.z().split([1, 2]), w.ids.split([1, 2]), strict=True)],
    "unbind": lambda w: [F.cross_entropy(a, b) for a, b in zip(w.z().unbind(0), w.ids.unbind(0), strict=True)],
    "chunk": lambda w: [ce(a, b) for a, b in zip(w.z().chunk(2, dim=1), w.ids.chunk(2, dim=1), strict=True)],
    "narrow": lambda w: ce(w.z().narrow(1, 1, 3), w.ids.narrow(1, 1, 3)),
    "last-position": lambda w: F.cross_entropy(w.z()[:, -1, :], w.ids[:, -1]),
    "softcap": lambda w: ce(torch.tanh(w.z() / 5.0) * 5.0, w.y),
    "softcap-scale-temperature": lambda w: ce((0.3 * w.z() / 5.0).tanh() * 5.0 / 0.7, w.y),
    "temperature": lambda w: logps(w.z() / 0.7, w.ids),
    "temperature-in-place": lambda w: logps(w.z().div_(0.7), w.ids),
    "temperature-tensor": lambda w: logps(w.z() / torch.tensor(0.7, dtype=torch.float64), w.ids),
    "unlikelihood": unlikelihood,
    "tied": tied,
    "multi-token": multi_token_prediction,
    "packs": sequences_of_packs,
    "mean-logits": lambda w: (lambda z: [ce(z, w.y), z.mean(-1).detach(), z.detach().mean()])(w.z()),
}

# Whether these are fused is left open: their values and gradients count.
EXACT: dict[str, Callable[[World], Any]] = {
    "entropy": loss_and_entropy,
    "entropy-categorical": lambda w: torch.distributions.Categorical(logits=w.z()).entropy(),
    "distillation": distillation(False),
    "distillation-log-target": distillation(True),
    "jsd": jsd,
    "r-drop": r_drop,
    "lora": lora,
    "one-hot": lambda w: -(F.one_hot(w.ids, V) * w.z().log_softmax(-1)).sum(-1).mean(),
    "smoothing-by-hand": lambda w: (lambda p: -0.9 * p.gather(-1, w.ids[..., None]).mean() - 0.1 * p.mean())(
        w.z().log_softmax(-1)
    ),
    "logits-of-choices": lambda w: F.cross_entropy(w.z()[:, -1, [3, 5, 7]], torch.tensor([0, 2, 1])),
    "margin": lambda w: F.multi_margin_loss(w.rows(), w.ids.flatten()),
    "stack-of-batches": lambda w: ce(torch.stack([w.model(x) for x in w.x]), w.y),
    "contrastive-decoding": lambda w: ce(1.5 * w.z() - 0.5 * w.z_teacher().detach(), w.y),
    "padded-sequence": lambda w: ce(
        nn.utils.rnn.pad_sequence(list(w.z().unbind(0)), batch_first=True), w.y
    ),
}  # fmt: skip

CASES = {name: fused(program) for name, program in FUSED.items()} | {n: Case(p) for n, p in EXACT.items()}


@pytest.fixture(autouse=True)
def small_blocks() -> Any:
    """The kernels on a CPU take blocks of rows too: let one be smaller than the logits."""
    with replaced(backend, "TORCH_BLOCK", {"cpu": 4 * V}):
        yield


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", CASES)
def test_idioms(name: str, bias: bool) -> None:
    check(CASES[name], deferred, bias=bias)


@pytest.mark.parametrize("frozen", ["head", "body", "input"])
@pytest.mark.parametrize("name", ["shift-contiguous", "gather-minus-lse", "class-weight-smoothing"])
def test_frozen(name: str, frozen: str) -> None:
    def program(w: World) -> Any:
        parts = {"head": w.head.parameters(), "body": w.model.body.parameters(), "input": [w.x]}
        for p in parts[frozen]:
            p.requires_grad_(False)
        return CASES[name].program(w)

    check(fused(program))


@pytest.mark.parametrize("name", ["view", "grpo", "entropy"])
def test_a_wrong_gradient_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match=r"gradient of model\.head\.weight: a relative error of 1\.0e-06"):
        check(Case(CASES[name].program), slightly_wrong)
