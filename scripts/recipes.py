"""What fits cards of 24, 48 and 80 GB: the table of `docs/memory.md`, from `longest_sequence`.

python -m scripts.recipes        writes the table into the page, between its two marks

`tests/models/test_recipes.py` compares every cell with `estimate_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- recipes: python -m scripts.recipes -->\n", "<!-- end of recipes -->\n"

# Bytes that a step may take. Cards of 24 GB have 22.5 to 24 GiB, those of 48 GB 44.5 to 48, those of 80 GB 79 to 80; a
# CUDA context, cuBLAS and fragmentation take 1.5 to 2 of them.
CARDS = {"24 GB": "21GiB", "48 GB": "43GiB", "80 GB": "77GiB"}
_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        **_LLAMA_3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    },
    "Llama-3.2-3B": {
        **_LLAMA_3, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "tie_word_embeddings": True,
    },
    "Llama-3-8B": {
        **_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}  # fmt: skip
# "full": bfloat16 weights and the two bfloat16 states of AdamW. "LoRA": rank 16 on all linear layers but the head.
RANK = 16
BUDGETS = {"full": "512MiB", "LoRA": "256MiB"}
TOKENS = 8192  # of the columns of `PEAKS`, in GiB
PEAKS: dict[str, dict[str, Any]] = {f"{TOKENS:,} tokens": {}, "8,192, with a budget": {"logits_budget": BUDGETS}}
LONGEST: dict[str, dict[str, Any]] = {
    "longest": {},
    "longest, tiles": {"tiled_mlp": "auto"},
    "longest, tiles and host": {"tiled_mlp": "auto", "checkpoints": "host"},
}


@dataclass(frozen=True)
class Recipe:
    """A row: a model, what trains, and on which card."""

    card: str
    model: str
    training: str

    @property
    def free(self) -> str:
        return CARDS[self.card]

    def settings(self, column: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `estimate_step` beside the shape."""
        from peft import LoraConfig
        from transformers import LlamaConfig

        lora = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        return {
            "config": LlamaConfig(**MODELS[self.model]),
            "adapter": lora if self.training == "LoRA" else None,
            "capability": (9, 0),
            **{name: x[self.training] if x is BUDGETS else x for name, x in column.items()},
        }

    def peaks(self) -> list[str]:
        from liger_chunked import estimate_step

        found = [estimate_step(**self.settings(column), shape=(1, TOKENS)).peak for column in PEAKS.values()]
        return [f"{peak / 2**30:.1f} GiB" for peak in found]

    def longest(self) -> list[str]:
        from liger_chunked import longest_sequence

        return [f"{longest_sequence(**self.settings(column), free=self.free):,}" for column in LONGEST.values()]


RECIPES = [
    Recipe("24 GB", "Llama-3.2-1B", "full"),
    Recipe("24 GB", "Llama-3.2-1B", "LoRA"),
    Recipe("24 GB", "Llama-3-8B", "LoRA"),
    Recipe("48 GB", "Llama-3.2-3B", "full"),
    Recipe("48 GB", "Llama-3-8B", "LoRA"),
    Recipe("80 GB", "Llama-3-8B", "full"),
    Recipe("80 GB", "Llama-3-8B", "LoRA"),
]


def table() -> str:
    columns = ["card", "model", "", *PEAKS, *LONGEST]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for recipe in RECIPES:
        row = [recipe.card, recipe.model, recipe.training, *recipe.peaks(), *recipe.longest()]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def cells_of(page: str) -> dict[Recipe, list[str]]:
    """Return the cells of a page, by row."""
    rows = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {Recipe(*row[:3]): row[3:] for row in cells}


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])
