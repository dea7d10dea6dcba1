"""Stock trainers of TRL under `patch_trl`, and ours without `loss=`: TRL's values, without logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl")

import tiny
import torch
from peft import PromptTuningConfig
from sampling import exhaustive
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from trl_kinds import (
    KINDS,
    LOSS_OF,
    PATCHED,
    PLAIN,
    SEQUENCES,
    Log,
    assert_same,
    build,
    log_of,
    lora,
    of_family,
    rare,
    recorder,
    run,
)

from benchmarks import patched_trainers
from benchmarks.trl_kinds import measured
from liger_chunked.integrations.trl import patch_trl

pytestmark = [
    # Warnings of transformers and TRL about themselves, and about short runs without a GPU.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`:FutureWarning"),
]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Log]:
    return recorder(tmp_path)


CASES = [
    rare("SFT", {"loss_type": "dft"}),
    rare("SFT", {"label_smoothing_factor": 0.1}),
    rare("SFT", {"label_smoothing_factor": 0.3, "average_tokens_across_devices": False}),
    rare("SFT", {"label_smoothing_factor": 0.1, "packing": True, "max_length": 24}),
    rare("SFT", {"packing": True, "max_length": 24}),
    rare("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    ("SFT", {"padding_free": True, "max_length": None}),
    rare("SFT", {"completion_only_loss": False, "average_tokens_across_devices": False}),
    rare("DPO", {"loss_type": "ipo"}),
    rare("DPO", {"loss_type": "aot"}),
    rare("DPO", {"loss_type": "robust", "label_smoothing": 0.1}),
    ("DPO", {"use_weighting": True, "ld_alpha": 0.5}),
    rare("DPO", {"precompute_ref_log_probs": True}),
    rare("DPO", {"padding_free": True}),
    rare("KTO", {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}),
    ("GRPO", SEQUENCES),
    rare("GRPO", {"cast_lm_head_to_fp32": True, "entropy_coef": 0.01}),
    ("RLOO", {"temperature": 0.8}),
    ("Distillation", {"temperature": 0.8, "beta": 0.5}),
    rare("Distillation", {"beta": 1.0}),
    rare("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    rare("CPO", {"loss_type": "ipo", "cpo_alpha": 0.5}),
    rare("GKD", {"beta": 0.0}),
    ("GOLD", {"temperature": 0.8}),
]


@pytest.mark.parametrize(("kind", "config"), CASES, ids=str)
def test_logs_what_trl_logs(train, kind, config):
    """Compares training and evaluation. `test_without_logits` has the defaults."""
    stock = train(kind, ours=False, config=config, evaluate=True)
    assert_same(train(kind, ours=PATCHED, config=config, evaluate=True), stock)


class FewArguments(LlamaForCausalLM):
    """As remote code may be: its forward takes no cache, which TRL passes to backbones."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return CausalLMOutput(logits=self.lm_head(hidden))


def few_arguments(kind: str) -> dict[str, Any]:
    few = FewArguments(tiny.model().config)
    few.load_state_dict(tiny.model().state_dict())
    return {"model": few, "config": PLAIN}


def in_full(kind: str, family: str = "llama") -> dict[str, Any]:
    adapted = lora(kind, modules_to_save=["lm_head", "embed_tokens"])
    return {**adapted, "model": tiny.model(family), "config": PLAIN}


def prompt_tuning(kind: str) -> dict[str, Any]:
    """Virtual tokens precede the others in the policy, but not in the reference."""
    return {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "ref_model": None}


def images(kind: str) -> dict[str, Any]:
    models = {
        name: tiny.vision_model(seed)
        for seed, name in enumerate(("model", "ref_model", "teacher_model"))
        if name == "model" or name in KINDS[kind].needs
    }
    # Images need all of their tokens.
    whole = {"max_length": None} if kind in ("SFT", "DPO", "KTO") else {}
    data = tiny.vision_dataset("completions" if kind == "SFT" else KINDS[kind].data)
    config = {**PLAIN, **whole, "max_steps": 2, "max_grad_norm": 0.1}
    return {**models, "train_dataset": data, "processing_class": tiny.processor(), "config": config}


# Of trainers whose default leaves a term out.
BETAS = {"Distillation": 0.5, "GRPO": 0.1, "RLOO": 0.1}
# Arguments of a trainer, and changes to its config. The families have logits transforms, tied embeddings, and the
# load-balancing loss of a mixture of experts.
SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{
        family: lambda kind, family=family: {**of_family(kind, family), "config": PLAIN}
        for family in ("softcap", "scaled", "experts")
    },
    # Without a coefficient of its own, and without a loss of its router.
    "routed": lambda kind: {**of_family(kind, "routed"), "config": {**PLAIN, "router_aux_loss_coef": 0.3}},
    "smoothed-softcap": lambda kind: {
        **of_family(kind, "softcap"), "config": {**PLAIN, "label_smoothing_factor": 0.1},
    },
    "lora": lambda kind: {**lora(kind), "config": {"beta": BETAS[kind]} if kind in BETAS else {}},
    "in-full": in_full,
    "in-full-tied": lambda kind: in_full(kind, "softcap"),
    "prompt-tuning": prompt_tuning,
    "few-arguments": few_arguments,
    "images": images,
}  # fmt: skip
OFTEN = {
    *(("ORPO", "softcap"), ("GKD", "softcap"), ("Distillation", "scaled"), ("SFT", "experts"), ("GRPO", "experts")),
    *(("SFT", "routed"), ("GRPO", "routed")),
    *(("SFT", "smoothed-softcap"), ("SFT", "few-arguments"), ("DPO", "prompt-tuning")),
    *((kind, "lora") for kind in ("SFT", "DPO", "KTO", "ORPO", "GKD", "Distillation", "GRPO")),
    *(("SFT", "in-full"), ("DPO", "in-full-tied"), ("ORPO", "in-full-tied")),
    *((kind, "images") for kind in ("SFT", "DPO", "GRPO")),
}
SELDOM = {
    *((kind, "softcap") for kind in ("SFT", "DPO", "CPO", "Distillation")),
    *(("SFT", "scaled"), ("CPO", "scaled"), ("CPO", "lora"), ("RLOO", "lora"), ("KTO", "in-full"), ("GKD", "in-full")),
    *((kind, "experts") for kind in ("DPO", "KTO", "ORPO", "CPO")),
    *((kind, "routed") for kind in ("DPO", "KTO", "RLOO")),
    *(("KTO", "images"), ("Distillation", "images")),
}
WITH_LOSS = {
    ("DPO", "softcap"): False, ("GRPO", "softcap"): True, ("KTO", "experts"): True, ("DPO", "prompt-tuning"): False,
    ("DPO", "images"): False, ("GRPO", "images"): False, ("SFT", "images"): True, ("KTO", "images"): True,
    ("GRPO", "routed"): False, ("SFT", "routed"): True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "setting", "has_loss"),
    [
        *(exhaustive((*row, False), "-".join(row), row in SELDOM) for row in sorted(OFTEN | SELDOM)),
        *(exhaustive((*row, True), "-".join((*row, "loss")), is_rare) for row, is_rare in WITH_LOSS.items()),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_in_a_setting(tmp_path: Path, kind: str, setting: str, has_loss: bool) -> None:
    """Our class of the trainer, if there is one, or else TRL's under `patch_trl`."""

    def seeded(ours: bool, **loss: Any) -> Log:
        own = SETTINGS[setting](kind)
        torch.manual_seed(0)
        return run(tmp_path, kind, ours, **own, **loss)

    ours = seeded(ours=True, **({"loss": LOSS_OF[kind]()} if has_loss else {}))
    assert_same(ours, seeded(ours=False), common=has_loss, entries=3 if setting == "images" else 5)


@pytest.mark.parametrize(("kind", "has_loss"), [("SFT", False), ("GRPO", True)])
def test_a_router_whose_loss_nobody_knows(tmp_path: Path, kind: str, has_loss: bool) -> None:
    """It is an error, and not left out of the loss."""
    settings = SETTINGS["routed"](kind)
    settings["model"].config.num_experts = None
    with pytest.raises(ValueError, match=r"pass router_aux_loss_coef=0\.0"):
        run(tmp_path, kind, ours=True, **settings, **({"loss": LOSS_OF[kind]()} if has_loss else {}))


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO", "GRPO", rare("KTO"), rare("GKD")])
def test_gradient_checkpointing_and_autocast(train, kind):
    """Both project the head in bfloat16, but sum up in another order."""
    config = {**PLAIN, "gradient_checkpointing": True, "bf16": True}
    stock, ours = (train(kind, ours=ours, config=config) for ours in (False, PATCHED))
    for mine, theirs in zip(ours[:4], stock[:4], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.02)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *((kind, None) for kind in ("SFT", "DPO", "KTO", "GKD", "ORPO")),
        ("SFT", LOSS_OF["SFT"]()),
        ("DPO", LOSS_OF["DPO"]()),
        ("KTO", LOSS_OF["KTO"]()),
    ],
)
def test_compute_metrics_gets_what_trl_hands_it(tmp_path, kind, loss):
    """It gets logits if TRL's trainer returns them."""

    def predictions(ours: bool | str, **own: Any) -> tuple[float, np.ndarray, np.ndarray]:
        seen: list[Any] = []

        def keep(prediction: Any) -> dict[str, float]:
            seen.append(prediction)
            return {"seen": 1.0}

        trainer = build(tmp_path, kind, ours, evaluate=True, compute_metrics=keep, **own)
        return trainer.evaluate()["eval_loss"], seen[0].predictions, seen[0].label_ids

    loss_of, *rest = predictions(PATCHED) if loss is None else predictions(True, loss=loss)
    loss_of_trl, *rest_of_trl = predictions(False)
    assert loss_of == pytest.approx(loss_of_trl, rel=2e-5)
    for x, x_of_trl in zip(rest, rest_of_trl, strict=True):
        np.testing.assert_allclose(x, x_of_trl, rtol=1e-4, atol=1e-5)


VOCABULARY = 300


@pytest.mark.parametrize("name", KINDS)
def test_without_logits(tmp_path: Path, name: str) -> None:
    """Two steps give stock's parameters, with no tensor of more rows of logits than the budget, and few products.

    So does an evaluation after them, where TRL's trainer has one.
    """
    rows, runs, evaluate = 8, [], name != "OnlineDPO"
    for budget in (None, rows * VOCABULARY * 4):
        with nullcontext() if budget is None else patch_trl(logits_budget=budget):
            trainer = build(tmp_path, name, config={**PLAIN, "max_steps": 2}, evaluate=evaluate)
        runs.append((measured(trainer, evaluate), trainer))
    (stock, of_stock), (ours, patched) = runs
    assert ours.rows <= rows < stock.rows, f"{ours.rows} rows of logits in {ours.where}, {stock.rows} in stock"
    # A chunk of a loss over the budget is projected once more, a token of a router or a metric too.
    assert ours.products <= 1.5 * stock.products
    assert_same(log_of(patched), log_of(of_stock), entries=3)
    for (key, x), (_, y) in zip(patched.model.state_dict().items(), of_stock.model.state_dict().items(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=key)
    assert type(patched.model) is type(of_stock.model) and type(patched.model.lm_head) is torch.nn.Linear
    assert vars(patched.model).keys() <= vars(of_stock.model).keys()


def test_a_data_set_with_images_keeps_all_sequences(tmp_path: Path) -> None:
    """Also a batch without images: a rank that skips sequences may run a pass more, and the others wait for it."""
    for data, skips in ((tiny.vision_dataset("prompts"), False), (tiny.dataset("prompts"), True)):
        own = {"train_dataset": data, "processing_class": tiny.processor(), "model": tiny.vision_model()}
        trainer = build(tmp_path, "GRPO", True, **own)
        assert (trainer._why_not_skipped() is None) == skips
        trainer.model.train()
        # Two prompts of two tokens, with completions of three. One prompt has no advantage.
        batch = {name: torch.ones(2, n, dtype=torch.int64) for name, n in (("prompt_ids", 2), ("completion_ids", 3))}
        batch |= {"prompt_mask": batch["prompt_ids"], "completion_mask": batch["completion_ids"]}
        assert (trainer._live({**batch, "advantages": torch.tensor([0.0, 1.0])}) is not None) == skips


@pytest.mark.slow
def test_the_benchmark_of_all_trainers(tmp_path: Path) -> None:
    (stock, ours) = json.loads(patched_trainers.main(["--out", str(tmp_path), "--task", "ORPO"]).read_text())["rows"]
    assert stock["failure"] is ours["failure"] is None
    assert ours["rows"] < stock["rows"] and ours["products"] < stock["products"]
    assert ours["apart"][1] < 1e-4 and min(stock["ms"], ours["ms"]) > 0
