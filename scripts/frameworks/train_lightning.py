# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "torch==2.14.1", "transformers==5.24.0", "accelerate", "peft", "pytorch-lightning==2.6.6", "lightning==2.6.6",
# ]
# ///
"""PyTorch Lightning 2.6.6, under both import names, on a CPU.

Environment: the packages of the header.

Trains a `training_step` with a cross entropy of logits, with `defer_logits` and with a patched model, in float32 and in
`bf16-mixed`, with validation on real logits; and the DPO of examples/lightning_module.py beside the same loss on whole
logits. See hf_common.py for what is compared.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_common import TOLERANCE, Case, main, sums

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def rows(folder: Path) -> Any:
    """Return a data loader of sums."""
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    data = []
    for row in sums():
        start, end = tokenizer(row["prompt"])["input_ids"], tokenizer(row["chosen"])["input_ids"]
        data.append({"input_ids": start + end, "labels": [-100] * len(start) + end})
    return DataLoader(data, batch_size=4, collate_fn=DataCollatorForSeq2Seq(tokenizer))


def run(folder: Path, fused: bool, package: str, *, patch: bool, **options: Any) -> None:
    """Train with a cross entropy on logits, as `training_step` had it before."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    from liger_chunked import apply_liger_kernel, defer_logits

    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # Lightning keeps the mode of each module, and `from_pretrained` returns a model in evaluation mode.
            self.model = AutoModelForCausalLM.from_pretrained(folder / "llama").train()
            if fused:
                if patch:
                    print(apply_liger_kernel(self.model))
                else:
                    defer_logits(self.model.lm_head)

        def training_step(self, batch: Any, index: int) -> Any:
            labels = batch.pop("labels")
            logits = self.model(**batch).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

        def validation_step(self, batch: Any, index: int) -> None:
            labels = batch.pop("labels")
            logits = self.model(**batch).logits
            assert type(logits) is torch.Tensor
            self.log("accuracy", (logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = pl.Trainer(
        max_steps=4,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tempfile.mkdtemp(dir=folder),
        **options,
    )
    trainer.fit(Module(), rows(folder), rows(folder))


def example_dpo(folder: Path, fused: bool) -> None:
    """Run `DPO` of examples/lightning_module.py; the stock side is the same loss on whole logits."""
    import pytorch_lightning as pl
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    sys.path.insert(0, str(EXAMPLES))
    toy = importlib.import_module("toy")
    example = runpy.run_path(str(EXAMPLES / "lightning_module.py"))
    model, tokenizer = toy.tiny_model(), toy.byte_tokenizer()

    class Eager(example["DPO"]):  # type: ignore[misc]
        def logps(self, model: Any, batch: Any) -> Any:
            z = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], skip_logits=False).logits
            target = batch["labels"][:, 1:]
            logps = z[:, :-1].log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
            return logps.where(target != -100, 0.0).sum(-1)

        def training_step(self, batch: Any, index: int) -> Any:
            with torch.no_grad():
                reference = self.logps(self.reference, batch)
            chosen, rejected = (self.logps(self.model, batch) - reference).chunk(2)
            return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    def pairs(rows: list[dict[str, str]]) -> Any:
        encoded = [toy.encode(tokenizer, row["prompt"], row[key]) for key in ("chosen", "rejected") for row in rows]
        return toy.collate(encoded)

    data = DataLoader(toy.sums(), batch_size=8, collate_fn=pairs)
    module = (example["DPO"] if fused else Eager)(model, beta=0.1, learning_rate=3e-3)
    pl.Trainer(
        max_steps=6, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=str(folder)
    ).fit(module, data)


def case(name: str, package: str, tolerance: float = TOLERANCE, **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, package, **options), tolerance=tolerance)


CASES = [
    case("defer-logits", "pytorch_lightning", patch=False),
    case("patched", "lightning.pytorch", patch=True),
    # bfloat16: stock rounds the logits to 8 bits, and this library does not.
    case("bf16-mixed", "pytorch_lightning", 2**-8, patch=False, precision="bf16-mixed"),
    Case("dpo-example", example_dpo),
]

if __name__ == "__main__":
    sys.exit(
        main(CASES, ("pytorch-lightning", "lightning", "torch", "transformers"), ["pytorch_lightning", "lightning"])
    )
