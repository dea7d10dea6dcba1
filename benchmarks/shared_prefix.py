"""Compare training steps on a padded batch with steps on its trie, where a prompt is computed once.

python -m benchmarks.shared_prefix                                  every shape, uneven batches, and the packing alone
python -m benchmarks.shared_prefix GRPO:qwen2.5-0.5b:8:2048:512     loss:model:sequences:prompt:completion

GRPO has one prompt for 8 sequences, DPO one for each pair. A step is packing, forward and backward, with
random weights in bfloat16, all layers checkpointed (not reentrant), and an optimizer that changes nothing. Both
contenders use the same fused loss. The padded batch has SDPA without a mask, its fastest form.

    first       seconds of the first step, which compiles, and checks a small copy of the model
    tokens      through the backbone
    graphs      that torch.compile made until then

An uneven task runs `--uneven-steps` steps whose prompts and completions have random lengths, up to those of its name.
Its `ms` is the median of all steps, "slowest" that of the slowest after the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, STOCK, Row, Table, median_ms, peak_mib, synchronize
from benchmarks.steps import StepRow, TrainingStep, allocated_mib, compare, parts, steps_parser
from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
from liger_chunked.integrations.transformers import HeadInput, attach_head
from liger_chunked.shared_prefix import share_batch
from liger_chunked.shared_prefix.attention import trie_mask
from liger_chunked.shared_prefix.trie import gather_rows, pack_trie
from liger_chunked.types import Head

SHAPES = ["GRPO:qwen2.5-0.5b:16:2048:512", "GRPO:llama-3.2-1b:8:2048:512", "DPO:llama-3.2-1b:16:1024:512"]
SMALL = ["GRPO:tiny-qwen2:4:24:8", "DPO:tiny-llama:4:24:8"]
PADDED, SHARED = f"{STOCK}, padded", f"{OURS}, shared"
GROUP = 8  # sequences of a prompt in GRPO
PACKED = (64, 4096) if DEVICE == "cuda" else (8, 64)  # sequences and tokens of the packing alone
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Sequences (n, T), padded on the right, with labels on their completions."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @classmethod
    def random(cls, loss: str, n: int, vocabulary: int, prompts: Tensor, completions: Tensor) -> Batch:
        """`prompts`, `completions` (n,): their lengths, equal prompts having equal ones."""
        width = int((prompts + completions).max())
        ids = torch.randint(3, vocabulary, (n, width))
        for i in range(n):
            of = i % cls.n_prompts(loss, n)
            ids[i, : prompts[i]] = ids[of, : prompts[i]]
        place = torch.arange(width)
        mask = place < (prompts + completions)[:, None]
        labels = ids.masked_fill(~mask | (place < prompts[:, None]), IGNORE_INDEX)
        return cls(*(x.to(DEVICE) for x in (ids, mask.long(), labels)))

    @staticmethod
    def n_prompts(loss: str, n: int) -> int:
        return max(1, n // GROUP) if loss == "GRPO" else n // 2

    @classmethod
    def even(cls, loss: str, n: int, vocabulary: int, prompt: int, completion: int) -> Batch:
        torch.manual_seed(1)
        return cls.random(loss, n, vocabulary, torch.full((n,), prompt), torch.full((n,), completion))

    @classmethod
    def uneven(cls, loss: str, n: int, vocabulary: int, prompt: int, completion: int, *, steps: int) -> Iterator[Batch]:
        torch.manual_seed(2)
        for _ in range(steps):
            prompts = torch.randint(prompt // 4, prompt + 1, (cls.n_prompts(loss, n),)).repeat(n)[:n]
            yield cls.random(loss, n, vocabulary, prompts, torch.randint(completion // 8, completion + 1, (n,)))


def grpo(head: Head, input: HeadInput) -> Tensor:
    advantages = torch.linspace(-1, 2, len(input.hidden_states), device=DEVICE)
    return LigerFusedLinearGRPOLoss()(head.weight, input.hidden_states, input.target, advantages, head.bias)[0]


def dpo(head: Head, input: HeadInput) -> Tensor:
    """The reference's log-probabilities are those of random weights, roughly, so that the loss is not saturated."""
    ref_logps = -(input.target != IGNORE_INDEX).sum(1) * torch.log(torch.tensor(float(len(head.weight))))
    loss = LigerFusedLinearDPOLoss()
    return loss(head.weight, input.hidden_states, input.target, head.bias, ref_logps=ref_logps.float())[0]


LOSSES: dict[str, Callable[[Head, HeadInput], Tensor]] = {"GRPO": grpo, "DPO": dpo}


def loss_on(model: PreTrainedModel, loss: str, batch: Batch, shares: bool) -> tuple[Tensor, int]:
    """Return the loss, and how many tokens the backbone computed."""
    if not shares:
        mask = None if batch.mask.numel() == batch.ids.numel() and bool(batch.mask.all()) else batch.mask
        output = model(batch.ids, attention_mask=mask, labels=batch.labels, use_cache=False, head_fn=LOSSES[loss])
        return output, batch.ids.numel()
    shared = share_batch(model, batch.ids, batch.mask)
    output = model(**shared.inputs, labels=batch.labels, head_fn=shared.head_fn(LOSSES[loss]))
    return output, shared.trie.input_ids.numel()


def n_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@dataclass
class SharedRow(StepRow):
    first_s: float | None = None
    tokens: int | None = None
    graphs: int | None = None
    slowest_ms: float | None = None

    def measured(self, first: Any) -> str:
        slowest = "" if self.slowest_ms is None else f", slowest {self.slowest_ms:.1f} ms"
        notes = f"  first {self.first_s:.1f} s{slowest}  {self.tokens} tokens  {self.graphs} graphs"
        return super().measured(first) + notes


def fill(row: SharedRow, table: Table, loss: str, name: str, batches: list[Batch], shares: bool) -> None:
    """Measure steps on one batch, or each of several batches once."""
    torch._dynamo.utils.counters.clear()
    before = allocated_mib()
    model = models.build(name, checkpointing=not table.args.no_checkpointing)
    attach_head(model)
    n_tokens: list[int] = []

    def backward(batch: Batch) -> Tensor:
        value, computed = loss_on(model, loss, batch, shares)
        n_tokens.append(computed)
        value.backward()
        return value.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = [TrainingStep(partial(backward, batch), optimizer) for batch in batches]
    begin = time.perf_counter()
    row.loss, row.grad_norm = steps[0].first()
    synchronize()
    row.first_s = round(time.perf_counter() - begin, 2)
    if len(steps) == 1:
        row.mib = peak_mib(steps[0], ())
        row.ms = round(median_ms(steps[0], table.args.repeats, warmup=1), 3)
    else:
        times = [median_ms(step, repeats=1, warmup=0) for step in steps[1:]]
        row.ms, row.slowest_ms = round(sorted(times)[len(times) // 2], 3), round(max(times), 3)
    if row.mib is not None:
        row.resident_mib = round(allocated_mib() - before, 1)
    row.tokens, row.graphs = n_tokens[-1], n_graphs()
    valid = sum(int(batch.mask.sum()) for batch in batches) / len(batches)
    row.tokens_per_s = round(valid / row.ms * 1e3, 1)


@dataclass
class PackRow(Row):
    saved: float | None = None

    def measured(self, first: Any) -> str:
        return f"{self.ms:9.3f} ms" + ("" if self.saved is None else f"  {self.saved:.0%} of the tokens saved")


def pack(row: PackRow, n_prompts: int) -> None:
    ids = _sequences(n_prompts)
    mask = torch.ones_like(ids)
    row.saved = pack_trie(ids, mask).saved
    row.ms = round(median_ms(lambda: pack_trie(ids, mask), repeats=51), 3)


def mask(row: PackRow) -> None:
    trie = pack_trie(_sequences(PACKED[0] // 8), multiple=256)
    row.ms = round(median_ms(lambda: trie_mask(trie.end, trie.position_ids), repeats=51), 3)


def gather(row: PackRow) -> None:
    """The gather and its gradient, of all tokens of 8 sequences and 2048 values each."""
    trie = pack_trie(_sequences(1)[:8])
    rows = torch.randn(trie.input_ids.numel(), 2048, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(*trie.node.shape, 2048, device=DEVICE, dtype=torch.bfloat16)
    gradients = [torch.autograd.grad(gather_rows(rows, trie.node), rows, upstream)[0] for _ in range(2)]
    assert torch.equal(*gradients), "the gradient differs from run to run"
    row.ms = round(median_ms(lambda: torch.autograd.grad(gather_rows(rows, trie.node), rows, upstream)), 3)


def _sequences(n_prompts: int) -> Tensor:
    """Return sequences whose first half is one of `n_prompts` prompts; 0 for unrelated ones."""
    n, length = PACKED
    torch.manual_seed(3)
    ids = torch.randint(3, 100_000, (n, length), device=DEVICE)
    if n_prompts:
        ids[:, : length // 2] = ids[torch.arange(n, device=DEVICE) % n_prompts, : length // 2]
    return ids


def measure(table: Table, loss: str, model: str, n: int, prompt: int, completion: int) -> None:
    shape = (loss, n, models.vocabulary(model), prompt, completion)
    for kind in ("", "uneven "):
        batches = list(Batch.uneven(*shape, steps=table.args.uneven_steps)) if kind else [Batch.even(*shape)]
        fills = {
            name: partial(fill, table=table, loss=loss, name=model, batches=batches, shares=shares)
            for name, shares in ((PADDED, False), (SHARED, True))
        }
        compare(table, {"loss": f"{kind}{loss}", "model": model}, n, prompt + completion, fills, SharedRow)


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = steps_parser(__doc__ or "", "loss:model:sequences:prompt:completion", repeats=5, seconds=0)
    parse.add_argument("--uneven-steps", type=int, default=30)
    args = parse.parse_args(arguments)
    table = Table("shared_prefix", args, whole=not args.shapes)
    packing = {
        f"{OURS}, unrelated": partial(pack, n_prompts=0),
        f"{OURS}, {PACKED[0] // 8} prompts": partial(pack, n_prompts=PACKED[0] // 8),
        f"{OURS}, mask": mask,
        f"{OURS}, gather": gather,
    }
    n, length = PACKED
    table.compare(f"packing {n}x{length}", {"sequences": n, "length": length}, packing, PackRow)
    for shape in args.shapes or (SMALL if DEVICE == "cpu" else SHAPES):
        measure(table, *parts(shape))
    return table.finish()


if __name__ == "__main__":
    main()
