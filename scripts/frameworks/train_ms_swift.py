# /// script
# requires-python = "==3.11.*"
# dependencies = [
#     "torch==2.13.0", "transformers==5.16.1", "accelerate==1.15.0", "datasets==4.8.4", "peft==0.20.0", "trl==0.29.1",
#     "addict", "aiohttp", "attrdict", "binpacking", "dacite", "einops", "fastapi", "importlib-metadata", "json-repair",
#     "matplotlib", "modelscope", "nltk", "openai", "oss2", "pandas", "pillow", "requests", "rouge", "sentencepiece",
#     "setuptools", "simplejson", "sortedcontainers", "tensorboard", "tiktoken", "uvicorn", "zstandard",
# ]
# [tool.frameworks]
# no-deps = ["ms-swift==4.6.0"]
# ///
"""ms-swift 4.6.0: the plugin of docs/frameworks.md, through `sft_main` and `rlhf_main`, on a CPU.

Environment: the packages of the header. ms-swift accepts transformers below 5.20 and TRL below 1.0. No module is a
stub.

Trains sft (full, LoRA, weights of tokens by `loss_scale`, DFT, losses of channels), and dpo, kto, orpo, simpo and cpo.
All log the accuracy of tokens or the mean of logits in each step. See hf_common.py for what is compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hf_common import Case, main, sums, write_rows

PLUGIN = """
from liger_chunked import apply_liger_kernel_to_qwen3

apply_liger_kernel_to_qwen3()
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


SFT, ACTIONS, DPO, KTO = (("--dataset", f"{name}.jsonl") for name in ("answers", "actions", "pairs", "ratings"))
CASES = [
    case("sft", *SFT),
    case("sft-lora", *SFT, "--tuner_type", "lora"),
    case("loss-scale", *ACTIONS, "--loss_scale", "react"),
    case("dft", *SFT, "--enable_dft_loss", "true"),
    case("channel", *SFT, "--enable_channel_loss", "true"),
    case("dpo", *DPO, "--rlhf_type", "dpo"),
    case("kto", *KTO, "--rlhf_type", "kto"),
    case("orpo", *DPO, "--rlhf_type", "orpo"),
    case("simpo", *DPO, "--rlhf_type", "simpo"),
    case("cpo", *DPO, "--rlhf_type", "cpo"),
]


def prepare(folder: Path) -> None:
    (folder / "plugin.py").write_text(PLUGIN)

    def talk(row: dict[str, str], answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]

    rows = sums()
    write_rows(folder / "answers.jsonl", [{"messages": talk(row, "chosen"), "channel": "sums"} for row in rows])
    # The loss scale "react" gives an action the weight 2.
    actions = [{**row, "chosen": f"Thought: add\nAction: sum\nAction Input: {row['prompt']}\n"} for row in rows]
    write_rows(folder / "actions.jsonl", [{"messages": talk(row, "chosen")} for row in actions])
    pairs = [{"messages": talk(row, "chosen"), "rejected_response": row["rejected"]} for row in rows]
    write_rows(folder / "pairs.jsonl", pairs)
    ratings = [{"messages": talk(r, ("rejected", "chosen")[i % 2]), "label": bool(i % 2)} for i, r in enumerate(rows)]
    write_rows(folder / "ratings.jsonl", ratings)


if __name__ == "__main__":
    sys.exit(main(CASES, ("ms-swift", "torch", "transformers", "trl", "peft"), ["swift.pipelines"], prepare))
