"""Hooks of modules and tensors around a head that defers: they run as often, in the same order, on the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Case, V, World, check, deferred, fused, loss_of, raises, refusable
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

# torch says in warnings that `.grad` of some tensors is empty, or that an input of a hooked module has no gradient.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# Hooks of modules

PLACES: dict[str, Callable[[World], nn.Module]] = {
    "head": lambda w: w.head,
    "body": lambda w: w.model.body,
    "linear": lambda w: w.model.body[0],
    "model": lambda w: w.model,
}

REGISTER = {
    "forward": lambda m, hook: m.register_forward_hook(hook),
    "forward-kwargs": lambda m, hook: m.register_forward_hook(lambda m, a, k, out: hook(m, a, out), with_kwargs=True),
    "forward-prepend": lambda m, hook: m.register_forward_hook(hook, prepend=True, always_call=True),
    "pre": lambda m, hook: m.register_forward_pre_hook(hook),
    "pre-kwargs": lambda m, hook: m.register_forward_pre_hook(lambda m, a, k: as_call(hook(m, a), k), with_kwargs=True),
    "backward": lambda m, hook: m.register_full_backward_hook(hook),
    "backward-pre": lambda m, hook: m.register_full_backward_pre_hook(hook),
}  # fmt: skip

REGISTER_GLOBAL = {
    "forward": of_modules.register_module_forward_hook,
    "pre": of_modules.register_module_forward_pre_hook,
    "backward": of_modules.register_module_full_backward_hook,
    "backward-pre": of_modules.register_module_full_backward_pre_hook,
}


def as_call(args: Any, kwargs: Any) -> Any:
    return None if args is None else (args, kwargs)


def shapes(xs: Any) -> list[Any]:
    xs = xs if isinstance(xs, tuple) else (xs,)
    return [None if x is None else (tuple(x.shape), x.dtype) for x in xs]


def doubled(xs: Any) -> Any:
    return tuple(None if x is None else 2 * x for x in xs) if isinstance(xs, tuple) else 2 * xs


def note_shapes(w: World) -> Callable[..., Any]:
    return lambda m, *xs: w.note(type(m).__name__, *map(shapes, xs))


def note_values(w: World) -> Callable[..., Any]:
    def hook(m: nn.Module, *xs: Any) -> None:
        w.note(type(m).__name__, *(y for x in xs for y in (x if isinstance(x, tuple) else (x,))))

    return hook


def edit_first(w: World) -> Callable[..., Any]:
    """Of a pre-hook the inputs, of a full backward hook the gradients of inputs, of a pre-hook those of outputs."""
    return lambda m, xs, *rest: doubled(xs)


def edit_output(w: World) -> Callable[..., Any]:
    return lambda m, args, out: doubled(out)


def edit_in_place(w: World) -> Callable[..., Any]:
    def hook(m: nn.Module, args: Any, out: Any) -> None:
        with torch.no_grad():
            out[..., 0].mul_(3)

    return hook


HOOKS: dict[str, dict[str, Callable[[World], Callable[..., Any]]]] = {
    "forward": {
        "shapes": note_shapes,
        "values": note_values,
        "edit": edit_output,
    },
    "pre": {"shapes": note_shapes, "values": note_values, "edit": edit_first},
    "backward": {"shapes": note_shapes, "values": note_values, "edit": edit_first},
    "backward-pre": {"shapes": note_shapes, "values": note_values, "edit": edit_first},
}
HOOKS["forward-kwargs"] = HOOKS["forward-prepend"] = HOOKS["forward"]
HOOKS["pre-kwargs"] = HOOKS["pre"]


def hooked(register: Callable[..., Any], hook: Callable[[World], Callable[..., Any]], until: str) -> Callable[..., Any]:
    """A step with a hook that is removed after the `until` of "forward", "loss" or "backward"."""

    def program(w: World) -> Any:
        handle = register(w, hook(w))
        try:
            z = w.model(w.x)
            if until == "forward":
                handle.remove()
            loss = loss_of(w, z)
            if until == "loss":
                handle.remove()
            loss.backward()
        finally:
            handle.remove()
        return loss.detach()

    return program


def at(kind: str, place: str) -> Callable[..., Any]:
    return lambda w, hook: REGISTER[kind](PLACES[place](w), hook)


def everywhere(kind: str) -> Callable[..., Any]:
    return lambda w, hook: REGISTER_GLOBAL[kind](hook)


MODULES: dict[str, Case] = {}
for kind in REGISTER:
    for place in PLACES:
        for name, hook in HOOKS[kind].items():
            for until in ("forward", "backward"):
                # A hook that looks at shapes needs no logits.
                stays = name == "shapes" or (place in ("body", "linear"))
                MODULES[f"{kind}-{name}-{place}-{until}"] = Case(hooked(at(kind, place), hook, until), fused=stays)
for kind in REGISTER_GLOBAL:
    for name, hook in HOOKS[kind].items():
        for until in ("forward", "loss", "backward"):
            stays = name == "shapes"
            MODULES[f"global-{kind}-{name}-{until}"] = Case(hooked(everywhere(kind), hook, until), fused=stays)
MODULES["forward-edit-in-place-head"] = Case(hooked(at("forward", "head"), edit_in_place, "backward"))
MODULES["forward-edit-in-place-model"] = Case(hooked(at("forward", "model"), edit_in_place, "backward"))


def added_between(kind: str, place: str) -> Callable[[World], Any]:
    """A hook that comes after the forward: it belongs to the next one."""

    def program(w: World) -> Any:
        z = w.model(w.x)
        handle = REGISTER[kind](PLACES[place](w), HOOKS[kind]["edit"](w))
        loss = loss_of(w, z)
        loss.backward()
        again = loss_of(w, w.model(w.x))
        again.backward()
        handle.remove()
        return loss.detach(), again.detach()

    return program


MODULES |= {f"later-{kind}-{p}": Case(added_between(kind, p)) for kind in REGISTER for p in ("head", "body", "model")}


# Hooks of tensors, and gradients of logits. Random programs (programs.py) have hooks that read or scale gradients.


def assigned(g: Any) -> Any:
    g = g.clone()
    g[..., 0] = 0
    return g


def in_place(method: str, *args: Any) -> Callable[[Any], None]:
    def hook(g: Any) -> None:
        getattr(g, method)(*args)

    return hook


GRADIENT_HOOKS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda g: g.clamp(-0.01, 0.01),
    "zeros": lambda g: torch.zeros_like(g),
    "other": lambda g: torch.linspace(-1, 1, V, dtype=g.dtype).expand(g.shape),
    "assign": assigned,
    "mul_": in_place("mul_", 2),
    "zero_": in_place("zero_"),
    "clamp_": in_place("clamp_", -0.01, 0.01),
}
TENSORS: dict[str, Callable[[Any], Any]] = {"z": lambda z: z, "softcap": lambda z: (z / 3).tanh() * 3}


def with_hook(hook: Callable[[Any], Any], of: Callable[[Any], Any], after: bool = False) -> Callable[[World], Any]:
    """A hook on what `of` makes of logits, registered before or after the loss of that."""

    def program(w: World) -> Any:
        made = of(w.z())
        if not after:
            made.register_hook(hook)
        loss = loss_of(w, made)
        if after:
            made.register_hook(hook)
        return loss

    return program


HOOKED: dict[str, Case] = {
    f"{name}-{of}-{'after' if after else 'before'}": Case(with_hook(hook, make, after))
    for name, hook in GRADIENT_HOOKS.items()
    for of, make in TENSORS.items()
    for after in (False, True)
}
HOOKED["wrong-shape"] = raises(RuntimeError, with_hook(lambda g: g[:1], TENSORS["z"]))


def hook_that_reads_the_shape(w: World) -> Any:
    z = w.z()
    z.register_hook(lambda g: w.note(tuple(g.shape), g.dtype))
    return loss_of(w, z)


HOOKED["shape"] = fused(hook_that_reads_the_shape)


def removed_hook(w: World) -> Any:
    z = w.model(w.x)
    handle = z.register_hook(lambda g: 3 * g)
    loss = loss_of(w, z)
    handle.remove()
    return loss


def hook_on_hidden(w: World) -> Any:
    h = w.hidden()
    h.register_hook(lambda g: (w.note(g), 2 * g)[1])
    z = w.head(h)
    w.seen.append(z)
    return loss_of(w, z)


def hook_on_parameters(w: World) -> Any:
    """In which order a module's own parameters get their gradients is left open."""
    seen: dict[str, Any] = {}
    w.head.weight.register_hook(lambda g: (seen.update(weight=g.clone()), 2 * g)[1])
    w.head.bias.register_hook(lambda g: seen.update(bias=g.shape))
    loss = loss_of(w, w.z())
    loss.backward()
    return loss.detach(), seen["weight"], seen["bias"]


def post_accumulate(w: World) -> Any:
    """As optimizers that step inside of backward."""
    seen: dict[Tensor, Tensor] = {}

    def step(p: Tensor) -> None:
        assert p.grad is not None and p not in seen
        seen[p] = p.grad.clone()
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in w.model.parameters()]
    first = loss_of(w, w.z())
    first.backward()
    for handle in handles:
        handle.remove()
    return first.detach(), [seen[p] for p in w.model.parameters()], loss_of(w, w.z())


def grad_of(
    inputs: Callable[[World, Any], Any], loss: Callable[[World, Any], Tensor] = loss_of, **options: Any
) -> Callable[..., Any]:
    def program(w: World) -> Any:
        z = w.model(w.x)
        value = loss(w, z)
        return [g if g is None else g.detach() for g in torch.autograd.grad(value, inputs(w, z), **options)]

    return program


def grad_then_backward(w: World) -> Any:
    """The gradient of the logits alone, then their own backward: as code that cuts a graph at the logits."""
    z = w.model(w.x)
    (g,) = torch.autograd.grad(loss_of(w, z), z)
    z.backward(g)
    return g


def grad_behind_a_hook_that_writes(w: World) -> Any:
    """`torch.autograd.grad` for logits, with a hook before them that writes to a view of their gradient."""
    z = w.model(w.x)
    scaled = z * 2.0

    def hook(g: Tensor) -> None:
        g[:1].zero_()

    z.register_hook(hook)
    return [g.detach() for g in torch.autograd.grad(loss_of(w, scaled), [scaled, w.x])]


def grad_of_a_leaf_copy(w: World) -> Any:
    """As chunked losses by hand: logits as a leaf, and their gradient sent on."""
    z = w.model(w.x)
    leaf = z.detach().requires_grad_()
    loss = loss_of(w, leaf)
    loss.backward()
    z.backward(leaf.grad)
    return loss.detach(), leaf.grad


def gradient_norm_of_the_weight(w: World) -> Any:
    """As loss balancing (GradNorm, adaptive weights of auxiliary losses)."""
    z = w.model(w.x)
    first, second = loss_of(w, z), torch.logsumexp(z, -1).square().mean()
    norms = [torch.autograd.grad(x, w.head.weight, retain_graph=True)[0].norm() for x in (first, second)]
    return first + norms[0] / norms[1] * second


def penalty(inputs: Callable[[World, Any], Any], via_backward: bool = False) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.model(w.x)
        loss = loss_of(w, z)
        if via_backward:
            loss.backward(create_graph=True)
            return w.x.grad.square().sum()
        grads = torch.autograd.grad(loss, inputs(w, z), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    return program


def node_hook(prehook: bool) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.model(w.x)
        node = z.grad_fn
        if prehook:
            node.register_prehook(lambda outputs: w.note(outputs[0]))
        else:
            node.register_hook(lambda inputs, outputs: w.note(outputs[0]))
        return loss_of(w, z)

    return program


def multi_grad_hook(mode: str) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.model(w.x)
        hook = (lambda g: w.note(g)) if mode == "any" else (lambda gs: w.note(*gs))
        handle = torch.autograd.graph.register_multi_grad_hook((z, w.x), hook, mode=mode)  # type: ignore[arg-type]
        loss = loss_of(w, z)
        loss.backward()
        handle.remove()
        return loss.detach()

    return program


def detect_anomaly(w: World) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        loss = loss_of(w, w.model(w.x))
        loss.backward()
    return loss.detach()


def backward_to(inputs: Callable[[World, Any], Any]) -> Callable[[World], Any]:
    def program(w: World) -> Any:
        z = w.model(w.x)
        loss = loss_of(w, z)
        loss.backward(inputs=inputs(w, z))
        return loss.detach(), [x.grad for x in inputs(w, z)]

    return program


def hook_in_place_after_backward_hook(w: World) -> Any:
    """torch refuses in-place edits of the output of a module with a full backward hook."""
    w.head.register_full_backward_hook(lambda m, i, o: None)
    z = w.model(w.x)
    z.mul_(2)
    return loss_of(w, z)


def grad_after_free(w: World) -> Any:
    loss = loss_of(w, w.model(w.x))
    loss.backward()
    loss.backward()
    return loss.detach()


OTHERS: dict[str, Case] = {
    "removed": fused(removed_hook),
    "hidden": fused(hook_on_hidden),
    "parameters": fused(hook_on_parameters),
    "post-accumulate": fused(post_accumulate),
    "grad-z-and-x": Case(grad_of(lambda w, z: [z, w.x, w.head.weight])),
    "grad-weight-and-x": fused(grad_of(lambda w, z: [w.head.weight, w.x])),
    "grad-unused": fused(grad_of(lambda w, z: [w.x, w.x_teacher], allow_unused=True)),
    "grad-z-outputs": Case(
        grad_of(
            lambda w, z: [z],
            lambda w, z: F.cross_entropy(z.view(-1, V), w.y.view(-1), reduction="none"),
            grad_outputs=torch.linspace(-1, 1, 15, dtype=torch.float64),
        )
    ),
    "grad-then-backward": Case(grad_then_backward),
    "grad-behind-a-hook-that-writes": Case(grad_behind_a_hook_that_writes),
    "leaf-copy": Case(grad_of_a_leaf_copy),
    "norms": Case(gradient_norm_of_the_weight),
    "penalty-x": refusable(penalty(lambda w, z: [w.x])),
    "penalty-z": refusable(penalty(lambda w, z: [z])),
    "penalty-backward": refusable(penalty(lambda w, z: [], via_backward=True)),
    "node-prehook": Case(node_hook(True)),
    "node-hook": Case(node_hook(False)),
    "multi-all": Case(multi_grad_hook("all")),
    "multi-any": Case(multi_grad_hook("any")),
    "anomaly": Case(detect_anomaly),
    "backward-inputs-x": fused(backward_to(lambda w, z: [w.x])),
    "backward-inputs-z": Case(backward_to(lambda w, z: [z])),
    "in-place-after-backward-hook": raises(RuntimeError, hook_in_place_after_backward_hook),
    "backward-twice": raises(RuntimeError, grad_after_free),
    "hook-without-grad": raises(RuntimeError, lambda w: w.z().detach().register_hook(lambda g: g)),
}

CASES = {
    **{f"module-{name}": case for name, case in MODULES.items()},
    **{f"tensor-{name}": case for name, case in HOOKED.items()},
    **OTHERS,
}


@pytest.mark.parametrize("name", CASES)
def test_hooks(name: str) -> None:
    check(CASES[name], deferred)
