"""Random programs on logits, run on stock logits and on deferred ones.

    python -m tests.deferred.programs --count 20000 --seed 0      none may be wrong

A program is a list of lines of Python. The generator runs each line on stock logits as it writes it, and so knows the
shapes. The lines take views, copies, casts, scales and slices of logits, edit them in place, read them, hook their
gradients, compute losses, and run backward one to three times. Values, gradients, retained gradients and errors are
compared, in float64. A program that differs is printed.

- equal: as on stock logits; also with the right gradients where torch says that what backward reads was edited
- refused: a RuntimeError that speaks of deferred logits, where stock has a value
- both raised: errors of the same class, or a refusal
- wrong: the rest

Program `i` of a seed is always the same: `--start i --count 1` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent))  # as a command, outside of pytest
from against_stock import Defer, deferred, is_tensor, is_version_error, plain, same_value, saved_copies, stock

H, V = 4, 11
BOUND, BOUND_FLOAT32 = 1e-9, 1e-3  # programs may lose digits by cancellation

Kind = str  # "equal", "refused", "wrong" or "both raised"


@dataclass(frozen=True)
class Setting:
    """The head, its input, and what is frozen. A bias comes with two dimensions only: with three, torch's own logits
    are a view of another tensor, and their in-place edits have errors of their own.
    """

    shape: tuple[int, ...]
    bias: bool
    frozen: str

    @staticmethod
    def drawn(rng: random.Random) -> Setting:
        shape = rng.choice([(2, 3), (3, 4), (2, 2, 2), (5,), (7,)])
        frozen = rng.choice(["", "", "", "", "head", "input", "bias"])
        return Setting(shape, len(shape) == 1 and rng.random() < 0.7, frozen)


def values(shape: tuple[int, ...], salt: int) -> Tensor:
    """Return numbers that look random, are of order 1, and need no generator."""
    n = torch.Size(shape).numel()
    return ((torch.arange(1, n + 1, dtype=torch.float64) * (0.7548 + 0.1 * salt) * 7.31).sin() * 1.5).reshape(shape)


def ids(shape: tuple[int, ...], classes: int, salt: int, ignored: bool = False) -> Tensor:
    """Return ids below `classes`. With `ignored`, every third is -100, and never all of them."""
    n = torch.Size(shape).numel()
    result = (torch.arange(n) * (2 * salt + 5) + salt) % classes
    if ignored:
        result[2::3] = -100
    return result.reshape(shape)


def mask(n: int, salt: int) -> Tensor:
    """Return a mask of `n`, neither all true nor all false if n > 1."""
    return (torch.arange(n) + salt) % 2 == 0


class Run:
    """The variables of a program, and what it noted."""

    def __init__(self, setting: Setting, defer: Defer) -> None:
        self.notes: list[Any] = []
        self.hooked: dict[str, list[Any]] = {}
        head = nn.Linear(H, V, bias=setting.bias, dtype=torch.float64)
        x, factor = values((*setting.shape, H), 1), values((V,), 5)
        with torch.no_grad():
            head.weight.copy_(values((V, H), 2))
            if setting.bias:
                head.bias.copy_(values((V,), 3))
        if setting.frozen == "head":
            head.requires_grad_(False)
        if setting.frozen == "bias" and setting.bias:
            head.bias.requires_grad_(False)
        x.requires_grad_(setting.frozen != "input")
        self.leaves = {"x": x, "factor": factor.requires_grad_(), **dict(head.named_parameters())}
        self.variables: dict[str, Any] = {
            "torch": torch, "F": F, "V": V, "head": head, "x": x, "factor": factor, "h": x.tanh(),
            "values": values, "ids": ids, "mask": mask, "note": self.note, "hook": self.hook,
        }  # fmt: skip
        self.error: Exception | None = None
        defer(head)

    def note(self, *values: Any) -> None:
        self.notes += [plain(x) if is_tensor(x) else x for x in values]

    def hook(self, name: str, gradient: Any, factor: float | None = None) -> Any:
        """Keep a gradient under the name of its tensor: in which order unrelated hooks run is left open."""
        self.hooked.setdefault(name, []).append(plain(gradient))
        return None if factor is None else gradient * factor

    def line(self, code: CodeType) -> bool:
        """Run a line. Returns whether it raised nothing."""
        try:
            exec(code, self.variables)
        except Exception as error:
            self.error = error
            return False
        return True


def compiled(line: str) -> CodeType:
    return compile(line, "<program>", "exec")


# The generator


@dataclass
class Writer:
    """Writes a program, and runs it on stock logits."""

    rng: random.Random
    setting: Setting
    lines: list[str] = field(default_factory=list)
    pool: list[str] = field(default_factory=list)  # variables that hold logits and what was made of them
    losses: list[str] = field(default_factory=list)
    retained: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.run = Run(self.setting, stock)

    def add(self, line: str) -> bool:
        self.lines.append(line)
        return self.run.line(compiled(line))

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def tensor(self, name: str) -> Tensor:
        return self.run.variables[name]

    def pick(self) -> str:
        """Any variable, more often one of the last."""
        return self.pool[-1] if self.rng.random() < 0.4 else self.rng.choice(self.pool)

    def number(self, *choices: float) -> float:
        return self.rng.choice(choices or (0.5, 2.0, 1.5, 0.7))


def rows_of(w: Writer, x: Tensor) -> str:
    """A slice of a dimension that is not the last, as the inside of brackets; empty if there is none."""
    if x.ndim < 2:
        return ""
    dim = w.rng.randrange(x.ndim - 1)
    start = w.rng.randrange(x.shape[dim])
    stop = w.rng.randint(start + 1, x.shape[dim])
    part = w.rng.choice([f"{start}:", f"{start}:{stop}", f":{stop}", f"{start - x.shape[dim]}:"])
    return ":, " * dim + part


def columns_of(w: Writer, x: Tensor) -> str:
    start = w.rng.randrange(max(1, x.shape[-1] - 2))
    return w.rng.choice([f"..., {start}:", f"..., : {x.shape[-1] - start}"])


def views(w: Writer, t: str, x: Tensor) -> list[str]:
    r, c = w.rng, x.shape[-1]
    found = [f"{t}[:]", f"{t}.view_as({t})", f"{t}.unsqueeze(0)", f"{t}.reshape(-1, {c})", f"{t}[{columns_of(w, x)}]"]
    found += [f"{t}.reshape(-1, {t}.size(-1))", f"{t}.squeeze(0)"]
    if x.is_contiguous():
        found += [f"{t}.view(-1, {c})"] * 3
    if x.ndim > 1:
        d = r.randrange(x.ndim - 1)
        i = r.randrange(x.shape[d])
        found += [f"{t}[{rows_of(w, x)}]"] * 3
        found += [f"{t}.select({d}, {i})", f"{t}.unbind({d})[{i}]", f"{t}.narrow({d}, {i}, 1)", f"{t}.mT"]
        found += [f"{t}.split(1, {d})[{i}]", f"{t}.chunk(2, {d})[0]", f"{t}.unsqueeze({d}).expand({expanded(x, d)})"]
    if x.ndim > 2:
        found += [f"{t}.flatten(0, -2)", f"{t}.transpose(0, 1)", f"{t}.flatten(0, 1)", f"{t}.movedim(0, 1)"]
    return found


def expanded(x: Tensor, dim: int) -> str:
    return ", ".join(map(str, (*x.shape[:dim], 2, *x.shape[dim:])))


def copies(w: Writer, t: str, x: Tensor) -> list[str]:
    found = [f"{t}.clone()", f"{t}.contiguous()", f"{t} * 1.0", f"{t}.to(torch.float64, copy=True)", f"{t}.double()"]
    found += [f"{t}.to(torch.float64)", f"{t}.clone(memory_format=torch.contiguous_format)"]
    if w.rng.random() < 0.1:
        found += [f"{t}.float()"] * 4
    if x.ndim > 1:
        d = w.rng.randrange(x.ndim - 1)
        before, n = ":, " * d, x.shape[d]
        rows = [w.rng.randrange(n) for _ in range(w.rng.randint(1, 3))]
        found += [f"{t}[{before}{rows}]", f"{t}[{before}torch.tensor({rows})]", f"{t}[{before}mask({n}, 0)]"]
        found += [f"{t}.index_select({d}, torch.tensor({rows}))", f"torch.cat([{t}, {t}], {d})"]
    return found


def transforms(w: Writer, t: str, x: Tensor) -> list[str]:
    a, c = w.number(), x.shape[-1]
    found = [f"{t} * {a}", f"{a} * {t}", f"{t} / {a}", f"{t} * torch.tensor({a})", f"torch.mul({t}, {a})", f"-{t}"]
    found += [f"({t} / 3.0).tanh() * 3.0", f"torch.tanh({t})", f"{t}.tanh() * {a}", f"{t} + {a}", f"{t} - {a}"]
    found += [f"{t} + values(({c},), 4)", f"{t}.log_softmax(-1)", f"F.log_softmax({t}, dim=-1)", f"{t}.softmax(-1)"]
    found += [f"{t}.relu()", f"{t}.masked_fill(mask({c}, 1), -3.0)", f"torch.where({t} > 0, {t}, 0.1)", f"1 - {t}"]
    if c == V:
        found += [f"{t} * factor", f"{t} + factor"]
    same = [u for u in w.pool if u != t and w.tensor(u).shape == x.shape and w.tensor(u).dtype == x.dtype]
    if same:
        found += [f"{t} + {w.rng.choice(same)}", f"torch.stack([{t}, {w.rng.choice(same)}])"]
    return found


def edits(w: Writer, t: str, x: Tensor) -> list[str]:
    a, c = w.number(), x.shape[-1]
    k = w.rng.randrange(c)
    found = [f"{t}.mul_({a})", f"{t}.div_({a})", f"{t}.add_({a})", f"{t} *= {a}", f"{t} += {a}", f"{t}.tanh_()"]
    found += [f"{t}[..., {k}] = {a}", f"{t}[..., {k}].mul_({a})", f"{t}.clamp_(-1, 1)", f"{t}[...] = {a}"]
    found += [f"{t}.fill_({a})", f"F.relu({t}, inplace=True)", f"{t}.masked_fill_(mask({c}, 1), -2.0)"]
    found += [f"torch._foreach_mul_([{t}], {a})", f"{t}.add_(values(({c},), 6))", f"{t}.copy_({t} * {a})"]
    found += [f"{t}.data.mul_({a})", f"{t}.data[..., {k}] = {a}", f"{t}.detach().mul_({a})", f"{t}.exp_()"]
    found += [f"torch._foreach_add_([{t}], {a})", f"torch._foreach_zero_([{t}])"]
    found += [f"{t}.scatter_(-1, ids({(*x.shape[:-1], 1)}, {c}, 1), {a})"]
    found += [f"with torch.no_grad(): torch.add({t}.detach(), {a}, out={t}.detach())"]
    found += [f"{t}.detach().numpy()[..., {k}] = {a}", f"torch.from_dlpack({t}.detach())[..., {k}] = {a}"]
    found += [f"{t}.data = values({tuple(x.shape)}, 7)"]
    found += [f"with torch.no_grad(): {t}.{w.rng.choice([f'mul_({a})', f'add_({a})', f'fill_({a})'])}"]
    if x.ndim > 1:
        rows = rows_of(w, x)
        found += [f"{t}[{rows}] = {a}", f"{t}[{rows}].mul_({a})", f"{t}[{rows}].zero_()", f"{t}[{rows}] *= {a}"]
        found += [
            f"{t}[mask({x.shape[0]}, 0)] = {a}",
            f"{t}[0].fill_({a})",
            f"{t}.index_fill_(0, torch.tensor([0]), {a})",
            f"{t}.index_put_((torch.tensor([0]),), torch.tensor({a}, dtype={t}.dtype))",
        ]
    if c == V:
        found += [f"{t}.mul_(factor)"]
    return found


def reads(w: Writer, t: str, x: Tensor) -> list[str]:
    found = [f"note({t})", f"note({t}.shape, {t}.requires_grad)", f"note({t}.sum().item())"]
    found += [f"note({t}.{statistic})" for statistic in STATISTICS]
    found += [f"note({t}.detach().argmax(-1))", f"note({t}.detach().max(), {t}.dtype)", f"note({t}.data.sum(-1))"]
    found += [f"with torch.no_grad(): note({t}.{w.rng.choice(STATISTICS)})", f"note(torch.argmax({t}, dim=-1))"]
    return found


STATISTICS = ["logsumexp(-1)", "mean(-1)", "softmax(-1)", "argmax(-1)", "log_softmax(-1)", "sum()", "max(-1).values"]


def losses(w: Writer, t: str, x: Tensor) -> list[str]:
    c, rows, k = x.shape[-1], x.shape[:-1], w.rng.randrange(3)
    n = rows.numel()
    flat = f"{t}.reshape(-1, {c})"
    salt = f"({n},), {c}, {k}"
    one = f"ids({(*rows, 1)}, {c}, {k})"
    weighted = f"values(({n},), 7)"
    found = [
        f"F.cross_entropy({flat}, ids({salt}))",
        f"F.cross_entropy({flat}, ids({salt}, True))",
        f"F.cross_entropy({flat}, ids({salt}), reduction='sum')",
        f"F.cross_entropy({flat}, ids({salt}), label_smoothing=0.1)",
        f"F.cross_entropy({flat}, ids({salt}), values(({c},), 8).abs() + 0.1)",
        f"F.cross_entropy({flat}, ids({salt}), ignore_index={k})" if n > 2 and c > n + 3 else f"{t}.mean()",
        f"(F.cross_entropy({flat}, ids({salt}, True), reduction='none') * {weighted}).sum()",
        f"F.nll_loss({flat}.log_softmax(-1), ids({salt}))",
        f"F.nll_loss(F.log_softmax({flat}, -1), ids({salt}, True), reduction='sum')",
        f"({t}.log_softmax(-1).gather(-1, {one}) * 0.3).sum()",
        f"torch.gather(F.log_softmax({t}, -1), -1, {one}).exp().mean()",
        f"({t}.gather(-1, {one}).squeeze(-1) - {t}.logsumexp(-1)).square().mean()",
        f"{t}.gather(-1, {one}).sum()",
        f"{t}.logsumexp(-1).square().mean()",
        f"torch.logsumexp({t}, dim=-1).sum()",
        f"{t}.mean(-1).square().sum()",
        f"{t}.mean()",
        f"{t}.sum()",
        f"{t}.square().mean()",
        f"({t}.softmax(-1) * {t}.log_softmax(-1)).sum()",
        f"F.cross_entropy({flat}, values(({n}, {c}), 9).softmax(-1))",
    ]
    if x.ndim == 3:
        found += [f"F.cross_entropy({t}.transpose(1, 2), ids({tuple(rows)}, {c}, {k}))"] * 2
    return found


def hooks(w: Writer, t: str, x: Tensor) -> list[str]:
    if not x.requires_grad:
        return []
    count = sum("register_hook" in line for line in w.lines)
    name = f"'{t}, {count}'"
    # Without a look at `grad_fn`, torch 2.13 crashes at a hook of a view whose base was edited since.
    found = [f"{t}.grad_fn; {t}.register_hook(lambda g: hook({name}, g{factor}))" for factor in ("", ", 2.0")]
    return found


def step(w: Writer) -> bool:
    """Add one or two lines. Returns whether the last one raised nothing."""
    t = w.pick()
    x = w.tensor(t)
    draw = w.rng.random()
    if draw < 0.52:
        make = views if draw < 0.22 else copies if draw < 0.34 else transforms
        name = w.new("t")
        if not w.add(f"{name} = {w.rng.choice(make(w, t, x))}"):
            return False
        if w.tensor(name).ndim and w.tensor(name).shape[-1] > 1:
            w.pool.append(name)
        return True
    if draw < 0.64:
        return w.add(w.rng.choice(edits(w, t, x)))
    if draw < 0.74:
        return w.add(w.rng.choice(reads(w, t, x)))
    if draw < 0.80 and (lines := hooks(w, t, x)):
        return w.add(w.rng.choice(lines))
    if draw < 0.83 and x.requires_grad and t not in w.retained:
        w.retained.append(t)
        return w.add(f"{t}.retain_grad()")
    if draw < 0.84:
        changed = w.rng.choice(["head.weight.mul_(1.5)", "h.mul_(1.5)", "head.weight[3].zero_()", "h[:1].zero_()"])
        return w.add(f"with torch.no_grad(): {changed}")
    if draw < 0.87:
        name = w.new("z")
        w.pool.append(name)
        return w.add(f"{name} = head({w.rng.choice(['h', 'h * 0.5', 'h[:1]', 'h.detach()'])})")
    if draw < 0.89:
        name = w.new("t")
        w.pool.append(name)
        return w.add(f"{name} = {t}.detach()")
    return loss(w, t, x)


def loss(w: Writer, t: str, x: Tensor) -> bool:
    name = w.new("loss")
    if not w.add(f"{name} = {w.rng.choice(losses(w, t, x))}; note({name})"):
        return False
    if not w.tensor(name).requires_grad:
        return True
    w.losses.append(name)
    draw = w.rng.random()
    if draw < 0.15:
        return w.add(f"{name}.backward(retain_graph=True)")
    if draw < 0.22:
        other = w.pick()
        if w.tensor(other).requires_grad:
            options = "retain_graph=True, allow_unused=True"
            return w.add(f"note(*torch.autograd.grad({name}, [x, {other}][x.requires_grad ^ 1:], {options}))")
    return True


def finish(w: Writer) -> None:
    """Run backward once to three times, and look at retained gradients."""
    if not w.losses:
        t = w.pick()
        loss(w, t, w.tensor(t))
    if not w.losses or w.run.error is not None:
        return
    total = " + ".join(w.losses)
    backward = w.rng.choice(
        [
            [f"({total}).backward()"],
            [f"(3 * ({total})).backward()"],
            [f"{name}.backward(retain_graph=True)" for name in w.losses[:3]],
            [f"({total}).backward(retain_graph=True)"] * 2,
        ]
    )
    for line in backward + [f"note({t}.grad)" for t in w.retained]:
        if not w.add(line):
            return


def written(seed: int, index: int) -> tuple[Setting, list[str], Run]:
    """Return program `index` of a seed, and its run on stock logits."""
    rng = random.Random(f"{seed}-{index}")
    setting = Setting.drawn(rng)
    w = Writer(rng, setting)
    under = "with torch.no_grad(): " if rng.random() < 0.03 else ""
    w.pool.append("z")
    w.add(f"{under}z = head(h)")
    for _ in range(rng.randint(1, 10)):
        if not step(w):
            break
    else:
        finish(w)
    return setting, w.lines, w.run


# The comparison


def executed(setting: Setting, codes: list[CodeType], defer: Defer) -> Run:
    run = Run(setting, defer)
    for code in codes:
        if not run.line(code):
            break
    return run


def is_refusal(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "deferred logits" in str(error)


def compared(found: Run, exact: Run, bound: float) -> tuple[Kind, str]:
    """Return the kind of result, and what differs."""
    if exact.error is not None:
        if found.error is None:
            return "wrong", f"nothing raised for {exact.error!r}"
        if is_refusal(found.error) or isinstance(found.error, type(exact.error)):
            return "both raised", ""
        return "wrong", f"{found.error!r} for {exact.error!r}"
    if found.error is not None:
        return ("refused" if is_refusal(found.error) else "wrong"), f"{found.error!r}"
    if len(found.notes) != len(exact.notes):
        return "wrong", f"{len(found.notes)} notes for {len(exact.notes)}"
    for i, (ours, theirs) in enumerate(zip(found.notes, exact.notes, strict=True)):
        if (text := same_value(ours, theirs, bound)) is not None:
            return "wrong", f"note {i}: {text}"
    for name in {**exact.hooked, **found.hooked}:
        ours, theirs = found.hooked.get(name, []), exact.hooked.get(name, [])
        if len(ours) != len(theirs):
            return "wrong", f"the hook of {name} ran {len(ours)} times, not {len(theirs)}"
        for a, b in zip(ours, theirs, strict=True):
            if (text := same_value(a, b, bound)) is not None:
                return "wrong", f"the hook of {name}: {text}"
    for name, leaf in exact.leaves.items():
        ours, theirs = (None if g is None else plain(g) for g in (found.leaves[name].grad, leaf.grad))
        if (text := same_value(ours, theirs, bound)) is not None:
            return "wrong", f"the gradient of {name}: {text}"
    return "equal", ""


def bound_of(lines: list[str]) -> float:
    return BOUND_FLOAT32 if any(".float()" in line for line in lines) else BOUND


def judged(setting: Setting, lines: list[str], defer: Defer, exact: Run | None = None) -> tuple[Kind, str]:
    codes = [compiled(line) for line in lines]
    exact = exact or executed(setting, codes, stock)
    if isinstance(exact.error, NameError | SyntaxError):  # of a program that was cut
        return "equal", ""
    found = executed(setting, codes, defer)
    if found.error is None and is_version_error(exact.error):
        with saved_copies():
            exact = executed(setting, codes, stock)
    kind, text = compared(found, exact, bound_of(lines))
    if kind == "wrong" and any(name in line for name in (".data", "numpy", "dlpack") for line in lines):
        # torch does not count these writes: stock's backward reads what was written, ours what the forward read.
        with saved_copies():
            return compared(found, executed(setting, codes, stock), bound_of(lines))
    return kind, text


@dataclass
class Report:
    counts: Counter[Kind] = field(default_factory=Counter)
    wrong: list[tuple[int, Setting, list[str], str]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by message

    def texts(self) -> Iterator[str]:
        for index, setting, lines, reason in self.wrong:
            yield "\n".join([f"program {index}, {setting}: {reason}", *(f"    {line}" for line in lines)])


def examine(count: int, seed: int = 0, start: int = 0, defer: Defer = deferred) -> Report:
    """Run programs, and collect those that are wrong."""
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, such as those about `.grad` of tensors that are no leaves
        for index in range(start, start + count):
            setting, lines, exact = written(seed, index)
            kind, reason = judged(setting, lines, defer, exact)
            report.counts[kind] += 1
            if kind == "refused":
                report.refused[reason[:100]] += 1
            if kind == "wrong":
                report.wrong.append((index, setting, lines, reason))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--show", type=int, default=20, help="how many wrong programs are printed")
    parser.add_argument("--stock", action="store_true", help="compare stock logits with themselves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    defer: Callable[..., Any] = stock if options.stock else deferred
    with contextlib.suppress(KeyboardInterrupt):
        report = examine(options.count, options.seed, options.start, defer)
        for text in list(report.texts())[: options.show]:
            print(text)
        for message, n in report.refused.most_common(10):
            print(f"refused {n} times: {message}")
        counts = ", ".join(f"{report.counts[kind]} {kind}" for kind in ("equal", "refused", "wrong", "both raised"))
        print(f"{options.count} programs in {time.perf_counter() - begin:.0f} s: {counts}")
        sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
