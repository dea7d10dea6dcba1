"""Compare training runs of a framework with and without this library, each in a process of its own.

A script of this folder describes its runs as `Case`s and calls `main(cases)`:

1. The parent saves a tiny random model, its tokenizer and data sets in a temporary folder.
2. Each case runs twice, each time in a process of its own, through the framework's own entry point: `stock`, and
   `fused`, as docs/frameworks.md says. Both start from the same weights and see the same batches.
3. Each process records every tensor whose `backward` is called: the loss of a micro-batch in full precision. It counts
   how often a fused loss or metric ran in a head that defers its logits, and how often such a head computed its
   logits. The library's log names the places that asked for them.
4. The parent prints the losses side by side. It exits with 1 if a loss differs by more than the tolerance, if no fused
   loss ran, if the loss did not change between steps, or if real logits were computed at another place than the case
   says.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# One thread: the parent may fork after it has computed, as OpenMP then has no threads that a fork would lose.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
}

# float32: layers and losses round in another order than stock, and Adam carries the difference through the steps.
TOLERANCE = 1e-4

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """A training run.

    - `run(folder, fused)`: trains in this process; `folder` holds the model and the data
    - `real_logits`: parts of the log lines that name places which need real logits; a case that lists one must meet it
    - `tolerance`: the largest relative difference of a step's loss
    - `model`: the family of the tiny model, `llama` or `qwen3`
    """

    name: str
    run: Callable[[Path, bool], Any]
    real_logits: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    model: str = "llama"


@dataclass
class Record:
    """What one process saw."""

    losses: list[float] = field(default_factory=list)
    fused_losses: int = 0
    computed_logits: int = 0
    asked_by: list[str] = field(default_factory=list)
    logits_in_training: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Count from now on."""
        import torch

        from liger_chunked.deferred.fused import Pass
        from liger_chunked.deferred.logits import Source

        backward, run, product = torch.Tensor.backward, Pass._run, Source.product

        def backward_of_loss(loss: Any, *args: Any, **kwargs: Any) -> None:
            self.losses.append(float(loss))
            backward(loss, *args, **kwargs)

        def fused_loss(self_: Pass, wants_grad: bool) -> Any:
            self.fused_losses += 1
            return run(self_, wants_grad)

        def real_logits(self_: Source) -> torch.Tensor:
            self.computed_logits += 1
            return product(self_)

        torch.Tensor.backward = backward_of_loss
        Pass._run, Source.product = fused_loss, real_logits
        record = self

        class Lines(logging.Handler):
            def emit(self, line: logging.LogRecord) -> None:
                message = line.getMessage()
                if "were computed" in message:
                    record.asked_by.append(message.partition(" for ")[2].partition(". Fused")[0])
                if "returns logits in training" in message:
                    record.logits_in_training.append(message)

        logging.getLogger("liger_chunked").addHandler(Lines())


def save_model(folder: Path, family: str) -> None:
    """Save a random model of about 100,000 weights and a tokenizer with one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    vocabulary = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, chat_template=CHAT_TEMPLATE)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]})
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        # Large weights, so that a wrong loss cannot hide near log(V).
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **tokens)).save_pretrained(folder)


def sums(n: int = 32) -> list[dict[str, str]]:
    """Return sums, each with a right and a wrong answer, of several lengths."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(1000), numbers.randrange(100)) for _ in range(n)]
    return [{"prompt": f"{a} + {b} =", "chosen": f"{a + b}", "rejected": f"{a + b + 1} or so"} for a, b in pairs]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSON file of a list (.json), or of one row a line (.jsonl)."""
    lines = "\n".join(json.dumps(row) for row in rows)
    path.write_text(lines + "\n" if path.suffix == ".jsonl" else json.dumps(list(rows)))


def _run(case: Case, folder: Path, fused: bool) -> Record | None:
    """Run one side in a process of its own; None if it failed, with the end of its output printed.

    The process is a fork of this one, which has imported the framework, because imports take longer than the steps.
    """
    side = "fused" if fused else "stock"
    log, result = folder / f"{case.name}-{side}.log", folder / f"{case.name}-{side}.json"
    result.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        code = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(folder)
            record = Record()
            record.watch()
            case.run(folder, fused)
            result.write_text(json.dumps(asdict(record)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # no exit handlers of the parent
    os.waitpid(process, 0)
    if not result.exists():
        print(f"{case.name}: the {side} run failed\n{log.read_text()[-4000:]}", flush=True)
        return None
    return Record(**json.loads(result.read_text()))


def _problems(case: Case, stock: Record, fused: Record) -> list[str]:
    found = []
    steps = list(zip(stock.losses, fused.losses, strict=False))
    if len(stock.losses) != len(fused.losses) or len(steps) < 2:
        found.append(f"{len(stock.losses)} stock losses, {len(fused.losses)} fused ones")
    elif len(set(stock.losses)) < 2:
        found.append("the loss is the same in all steps")
    if not all(abs(a - b) <= case.tolerance * max(abs(a), 1e-3) for a, b in steps):
        found.append(f"losses differ by more than {case.tolerance:g}")
    if stock.fused_losses:
        found.append("the stock run used fused losses")
    if not fused.fused_losses:
        found.append("no fused loss ran")
    found += fused.logits_in_training
    for place in fused.asked_by:
        if not any(part in place for part in case.real_logits):
            found.append(f"real logits for {place}")
    if fused.computed_logits and not fused.asked_by:
        found.append("real logits, without a line in the log")
    for part in case.real_logits:
        if not any(part in place for place in fused.asked_by):
            found.append(f"no real logits for {part}, which this case expects")
    return found


def _report(case: Case, stock: Record, fused: Record) -> bool:
    pairs = list(zip(stock.losses, fused.losses, strict=False))
    error = max((abs(a - b) / max(abs(a), 1e-3) for a, b in pairs), default=float("nan"))
    problems = _problems(case, stock, fused)
    print(f"{case.name}: {'FAILED' if problems else 'passed'}")
    print("  stock  " + " ".join(f"{x:9.6f}" for x in stock.losses))
    print("  fused  " + " ".join(f"{x:9.6f}" for x in fused.losses))
    print(f"  largest relative difference {error:.1e}; fused losses: {fused.fused_losses}; ", end="")
    print(f"calls with real logits: {fused.computed_logits}")
    for line in (*(f"real logits for {place}" for place in fused.asked_by), *(f"PROBLEM: {x}" for x in problems)):
        print(f"  {line}")
    sys.stdout.flush()
    return not problems


def main(
    cases: Sequence[Case],
    packages: Sequence[str],
    imports: Sequence[str],
    prepare: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Run the cases named on the command line, or all; return the exit code.

    Args:
        packages: their versions are printed.
        imports: modules that are imported once, before the runs.
        prepare: `prepare(folder)` writes data sets.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(case.name for case in cases)}")
    parser.add_argument("--keep", type=Path, help="a folder for models, data and logs")
    options = parser.parse_args()
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        # The runs share no cache, in which a framework might keep batches of another script.
        os.environ.update(SETTINGS, HF_HOME=str(folder / "cache"))
        for module in (*imports, "transformers", "liger_chunked.integrations.transformers"):
            importlib.import_module(module)
        for family in sorted({case.model for case in cases}):
            save_model(folder / family, family)
        prepare(folder)
        passed = True
        for case in cases:
            if options.cases and case.name not in options.cases:
                continue
            stock = _run(case, folder, False)
            fused = _run(case, folder, True) if stock else None
            passed &= stock is not None and fused is not None and _report(case, stock, fused)
    return 0 if passed else 1
