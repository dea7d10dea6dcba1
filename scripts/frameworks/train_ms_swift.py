"""ms-swift on a CPU."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hf_common import Case, main, sums, write_rows

PLUGIN = """
from liger_chunked import apply_liger_kernel_to_qwen3

print(apply_liger_kernel_to_qwen3())
"""


def run(folder: Path, fused: bool, *options: str) -> None:
    """Do what `swift sft --external_plugins plugin.py` does, or `swift rlhf` with `--rlhf_type`."""
    from swift.pipelines import rlhf_main, sft_main

    (sft_main, rlhf_main)["--rlhf_type" in options](
        [
            *("--model", str(folder / "qwen3"), "--model_type", "qwen3", "--template", "dummy"),
            *("--use_hf", "true", "--tuner_type", "full", "--torch_dtype", "float32"),
            *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"),
            *("--max_steps", "4", "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"),
            *("--output_dir", tempfile.mkdtemp(dir=folder), "--dataset_num_proc", "1", "--use_cpu", "true"),
            *("--dataloader_num_workers", "0", "--split_dataset_ratio", "0"),
            *(("--external_plugins", str(folder / "plugin.py")) if fused else ()),
            *(str(folder / option) if option.endswith(".jsonl") else option for option in options),
        ]
    )


def case(name: str, *options: str, real_logits: tuple[str, ...] = ()) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, *options), real_logits, model="qwen3")


SFT, DPO, KTO = (("--dataset", f"{name}.jsonl") for name in ("answers", "pairs", "ratings"))
CASES = [
    case("sft", *SFT),
    case("sft-lora", *SFT, "--tuner_type", "lora"),
    case("loss-scale", *SFT, "--loss_scale", "default+ignore_empty_think"),
    case("react", *SFT, "--loss_scale", "default+react"),
    case("dft", *SFT, "--enable_dft_loss", "true", real_logits=("x",)),
    case("channel", *SFT, "--enable_channel_loss", "true", real_logits=("x",)),
    case("dpo", *DPO, "--rlhf_type", "dpo", real_logits=("mean at",)),
    case("kto", *KTO, "--rlhf_type", "kto", real_logits=("sum at",)),
    case("orpo", *DPO, "--rlhf_type", "orpo", real_logits=("mean at",)),
    case("simpo", *DPO, "--rlhf_type", "simpo", real_logits=("mean at",)),
    case("cpo", *DPO, "--rlhf_type", "cpo", real_logits=("mean at",)),
]


def prepare(folder: Path) -> None:
    (folder / "plugin.py").write_text(PLUGIN)

    def talk(row: dict[str, str], answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]

    rows = sums()
    write_rows(folder / "answers.jsonl", [{"messages": talk(row, "chosen"), "channel": "sums"} for row in rows])
    pairs = [{"messages": talk(row, "chosen"), "rejected_response": row["rejected"]} for row in rows]
    write_rows(folder / "pairs.jsonl", pairs)
    ratings = [{"messages": talk(r, ("rejected", "chosen")[i % 2]), "label": bool(i % 2)} for i, r in enumerate(rows)]
    write_rows(folder / "ratings.jsonl", ratings)


if __name__ == "__main__":
    sys.exit(main(CASES, ("ms-swift", "torch", "transformers", "trl", "peft"), ["swift.pipelines"], prepare))
