"""Programs of public bug reports, run with stock logits and with deferred ones.

Each report is about other software: tensor subclasses, losses in `torch.autograd.Function`, transforms, pipelines and
tools that look into the graph. Its docstring names the repository and number. A program must have the values and the
gradients of stock, or be refused in words.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Case, V, check, deferred, differences, fused, is_tensor, loss_of, run, stock
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

CASES: dict[str, Case] = {}


def forbidden() -> Tensor:
    """Return a bias that forbids every third id."""
    return torch.where(torch.arange(V) % 3 == 0, -math.inf, 0.0).double()


# Ids of probability zero


def entropy_of_forbidden_ids(w: Any) -> Any:
    """huggingface/trl#7221: the entropy by hand is not a number if an id has probability zero."""
    logps = (w.z() + forbidden()).log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def kl_of_forbidden_ids(w: Any) -> Any:
    """google-deepmind/optax#1786: a student that forbids an id of the teacher has an infinite divergence."""
    return F.kl_div((w.z() + forbidden()).log_softmax(-1), w.z_teacher().softmax(-1), reduction="none").sum(-1)


def value_of(program: Any) -> Any:
    """The values, computed as for training: infinite losses have no gradient to compare."""
    return lambda w: program(w).detach()


def value_without_grad(program: Any) -> Any:
    return torch.no_grad()(program)


def kl_of_two_masked_heads(w: Any) -> Any:
    """google-deepmind/optax#1786: an id that both forbid is zero times infinity."""
    return F.kl_div(
        (w.z() + forbidden()).log_softmax(-1), (w.z_teacher() + forbidden()).softmax(-1), reduction="batchmean"
    )


def kl_of_a_large_negative_mask(teacher_trains: bool) -> Any:
    """google-deepmind/optax#1786, with the smallest finite number in place of minus infinity: the KL is finite."""

    def program(w: Any) -> Any:
        mask = forbidden().clamp(min=torch.finfo(torch.float64).min)
        w.teacher.requires_grad_(teacher_trains)
        w.x_teacher.requires_grad_(teacher_trains)
        return F.kl_div((w.z() + mask).log_softmax(-1), w.z_teacher().softmax(-1), reduction="none").sum(-1).detach()

    return program


def reverse_kl_at_a_low_temperature(w: Any) -> Any:
    """MakazhanAlpamys/Soup#719: finite logits, a finite reverse KL, and gradients that are not numbers."""
    return F.kl_div((w.z_teacher() / 0.002).log_softmax(-1), (w.z() / 0.002).softmax(-1), reduction="none").sum(-1)


def logsumexp_of_infinite_logits(w: Any) -> Any:
    with torch.no_grad():
        w.head.bias[3] = math.inf
    return w.z().logsumexp(-1)


PROGRAMS = {
    "optax-1786-kl": kl_of_forbidden_ids,
    "infinite-logits": logsumexp_of_infinite_logits,
}
CASES |= {f"{name}-value": Case(value_of(program)) for name, program in PROGRAMS.items()}
CASES |= {f"{name}-without-grad": Case(value_without_grad(program)) for name, program in PROGRAMS.items()}
CASES["optax-1786-finite"] = Case(kl_of_a_large_negative_mask(True))
CASES["optax-1786-finite-of-a-frozen-teacher"] = Case(kl_of_a_large_negative_mask(False))


# Where stock multiplies zero by the logarithm of zero, which is no number, fused sums have the limit, zero.


def entropy_of(logps: Tensor) -> Tensor:
    p = logps.exp()
    return -(p * logps.masked_fill(p == 0, 0.0)).sum(-1)


def kl_of(logps: Tensor, others: Tensor) -> Tensor:
    p = logps.exp()
    return (p * (logps - others).masked_fill(p == 0, 0.0)).sum(-1)


def exact_kl_of_two_masked_heads(w: Any) -> Any:
    z, z_teacher = w.z() + forbidden(), w.z_teacher() + forbidden()
    return kl_of(z_teacher.log_softmax(-1), z.log_softmax(-1)).sum() / z.shape[0]


LIMITS = {
    "trl-7221-entropy": (entropy_of_forbidden_ids, lambda w: entropy_of((w.z() + forbidden()).log_softmax(-1))),
    "optax-1786-kl-of-both": (kl_of_two_masked_heads, exact_kl_of_two_masked_heads),
    "soup-719-reverse-kl": (
        reverse_kl_at_a_low_temperature,
        lambda w: kl_of((w.z() / 0.002).log_softmax(-1), (w.z_teacher() / 0.002).log_softmax(-1)),
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_zero_times_the_logarithm_of_zero(name: str) -> None:
    program, exact = LIMITS[name]
    limit = run(exact, stock)
    assert all(x.isfinite().all() for x in (*limit.values, *limit.gradients.values()) if is_tensor(x))
    assert not differences(run(program, deferred), limit, 1e-9)


# Transforms that capture logits


def one() -> Tensor:
    return torch.tensor(1.3, dtype=torch.float64)


READS: dict[str, Any] = {
    "cross-entropy": lambda w, z: F.cross_entropy(z, w.y.flatten()),
    "logsumexp": lambda w, z: z.logsumexp(-1).sum(),
    "tokens": lambda w, z: z.log_softmax(-1).gather(-1, w.ids.view(-1, 1)).sum(),
}


def captured(transform: Any, read: Any) -> Any:
    """Dao-AILab/flash-attention#2071: a loss in an `autograd.Function` is called inside `torch.func.grad`.

    The logits come from outside, and the transform is of a weight of the loss.
    """

    def program(w: Any) -> Any:
        z = w.rows()
        return transform(lambda weight: weight * read(w, z))

    return program


def in_grad(f: Any) -> Any:
    return torch.func.grad(f)(one())


def in_vmap(f: Any) -> Any:
    return torch.vmap(f)(torch.tensor([1.0, 2.0], dtype=torch.float64))


def vmap_over_targets(w: Any) -> Any:
    z = w.rows()
    return torch.vmap(lambda y: F.cross_entropy(z, y))(torch.stack([w.ids.flatten(), w.ids.flatten().flip(0)]))


def linearized(w: Any) -> Any:
    z = w.z().detach()
    value, tangent = torch.func.linearize(lambda t: F.cross_entropy((z * t).flatten(0, 1), w.ids.flatten()), one())
    return value, tangent(one())


CASES |= {
    f"flash-attention-2071-{name}-in-{transform.__name__[3:]}": Case(captured(transform, read))
    for name, read in READS.items()
    for transform in (in_grad, in_vmap)
}
CASES |= {
    "flash-attention-2071-targets": Case(vmap_over_targets),
    "flash-attention-2071-linearize": Case(linearized),
}


# Selective activation checkpointing


def selective(saves: Any, whole: bool, tokens: bool = False) -> Any:
    """pytorch/pytorch#153334: selective activation checkpointing around an `autograd.Function`."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def program(w: Any) -> Any:
        def loss(z: Any) -> Tensor:
            if not tokens:
                return loss_of(w, z)
            logps = z.log_softmax(-1).gather(-1, w.ids[..., None])
            return z.logsumexp(-1).sum() + logps.square().mean()

        if whole:
            return checkpoint(lambda x: loss(w.model(x)), w.x, use_reentrant=False, context_fn=contexts)
        return loss(checkpoint(w.model, w.x, use_reentrant=False, context_fn=contexts))

    return program


def products(op: Any) -> bool:
    return op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


CASES |= {
    f"pytorch-153334-{name}-{'whole' if whole else 'model'}-{'tokens' if tokens else 'loss'}": fused(
        selective(saves, whole, tokens)
    )
    for name, saves in {"products": products, "all": lambda op: True, "none": lambda op: False}.items()
    for whole in (False, True)
    for tokens in (False, True)
}


def selective_zeros(w: Any) -> Any:
    """NVIDIA-NeMo/Automodel#3274: a kept result that is written later is another one when it is computed again.

    Stock writes into none, so that the check for that may be off.
    """
    kept = [torch.ops.aten.zeros.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept, allow_cache_entry_mutation=True)

    def two_losses(x: Tensor) -> Tensor:
        other = F.cross_entropy(w.head(w.hidden() * 0.5).flatten(0, 1), w.ids.flatten())
        return loss_of(w, w.model(x)) + other

    return checkpoint(two_losses, w.x, use_reentrant=False, context_fn=contexts)


CASES["automodel-3274"] = Case(selective_zeros)


# Backward in two parts: first of the input, then of the weights


def zero_bubble(loss: Any) -> Any:
    """pytorch/pytorch#166577: a pipeline's backward of the input, and later that of the weights.

    pytorch/pytorch#170277 is about the nodes in between, whose gradients are kept meanwhile.
    """

    def program(w: Any) -> Any:
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        value = loss(w, w.model(w.x))
        inputs, groups = stage_backward_input([value], None, [w.x], iter(w.model.parameters()))
        weights = stage_backward_weight(iter(w.model.parameters()), groups)
        return value.detach(), list(inputs), list(weights)

    return program


CASES |= {
    "pytorch-166577-loss": fused(zero_bubble(loss_of)),
    "pytorch-166577-tokens": Case(
        zero_bubble(lambda w, z: z.log_softmax(-1).gather(-1, w.ids[..., None]).sum() + z.logsumexp(-1).sum())
    ),
    "pytorch-166577-topk": Case(zero_bubble(lambda w, z: z.topk(2, -1).values.sum() + loss_of(w, z))),
}


# Losses that write into logits


class WritesInBackward(torch.autograd.Function):
    """Its gradient takes the memory of the logits."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.z, ctx.y, ctx.p = z, y, z.softmax(-1)
        return -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, ids = ctx.z, ctx.y.unsqueeze(-1)
        with torch.no_grad():
            z.copy_(ctx.p).scatter_add_(-1, ids, -torch.ones_like(ids, dtype=z.dtype)).mul_(g / ids.numel())
        return z, None


class WritesInForward(torch.autograd.Function):
    """Its probabilities take the memory of the logits, unannounced."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        z.sub_(z.max(-1, keepdim=True).values)
        e = torch.exp(z, out=z)
        total = e.sum(-1, keepdim=True)
        loss = (total.log() - e.gather(-1, y.unsqueeze(-1)).log()).mean()
        ctx.save_for_backward(e.div_(total), y)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        p, y = ctx.saved_tensors
        rows = p.view(-1, p.size(-1))
        rows[torch.arange(len(rows)), y.flatten()] -= 1.0
        return p.mul_(g / y.numel()), None


def written(function: Any, read_after: bool = False) -> Any:
    """unslothai/unsloth#5002 and linkedin/Liger-Kernel#343: a cross entropy writes its gradient into the logits."""

    def program(w: Any) -> Any:
        z = w.z()
        loss = function.apply(z, w.ids)
        if not read_after:
            return loss
        found = loss, z.detach().sum(-1), z.argmax(-1), z.detach().logsumexp(-1)
        loss.backward()
        return tuple(x.detach() for x in found)

    return program


def written_for_two_losses(w: Any) -> Any:
    """modelscope/ms-swift#10130: the logits that a loss wrote into serve an auxiliary loss."""
    z = w.z()
    return WritesInBackward.apply(z, w.ids) + z.logsumexp(-1).square().mean()


CASES |= {
    "unsloth-5002": Case(written(WritesInBackward)),
    "unsloth-5002-read": Case(written(WritesInBackward, read_after=True)),
    "liger-343": Case(written(WritesInForward)),
    "liger-343-read": Case(written(WritesInForward, read_after=True)),
    "ms-swift-10130": Case(written_for_two_losses, may_raise=True),
}


# Tools that look into modules, operations and memory


def watched(watch: Any, loss: Any, grad: bool) -> Any:
    """pytorch/pytorch#131753: `autograd.grad` inside a counter of FLOPs raises an error, and `backward` does not."""

    def program(w: Any) -> Any:
        with watch(w):
            value = loss(w, w.z())
            if grad:
                return value.detach(), torch.autograd.grad(value, [w.x, w.head.weight])
            value.backward()
        return value.detach()

    return program


def flop_counter(w: Any) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


CASES |= {
    f"pytorch-131753-{kind}-{'grad' if grad else 'backward'}": Case(watched(flop_counter, loss, grad), may_raise=grad)
    for grad in (False, True)
    for kind, loss in {"loss": loss_of, "topk": lambda w, z: z.topk(2, -1).values.sum() + loss_of(w, z)}.items()
}


# TorchScript


def scripted(w: Any) -> Any:
    """pytorch/pytorch#57739: a scripted function gets an object with `__torch_function__`."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()

    f = torch.jit.script(loss)
    return [f(w.z(), w.ids) for _ in range(3)]  # the third call runs the optimized graph


def traced(example: Any) -> Any:
    def program(w: Any) -> Any:
        f = torch.jit.trace(
            lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), (example(w), w.ids), check_trace=False
        )
        return [f(w.z(), w.ids) for _ in range(3)]

    return program


CASES |= {
    "pytorch-57739-script": Case(scripted),
    "pytorch-57739-trace": Case(traced(lambda w: torch.zeros(w.z().shape, dtype=torch.float64))),
    "pytorch-57739-trace-of-logits": Case(traced(lambda w: w.z())),
}


@pytest.mark.parametrize("name", CASES)
def test_reports(name: str) -> None:
    check(CASES[name])
