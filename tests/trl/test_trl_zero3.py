"""ZeRO-3 from a model's view: a module has its parameters only during its own forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import tiny
from peft import LoraConfig, get_peft_model
from ranks import Gathering
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import TrainerCallback
from trl_kinds import KINDS, PLAIN, Log, assert_same, build, run

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


class Zero3(TrainerCallback):
    """DeepSpeed's hooks on one process. Outside of them, the parameters are empty."""

    def __init__(self, *models: nn.Module) -> None:
        self._whole = {p: p.data for model in models for p in model.parameters()}
        for model in models:
            for module in model.modules():
                if any(True for _ in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(self._of_deepspeed(lambda module, _: self._gather(module)))
                    module.register_forward_hook(
                        self._of_deepspeed(lambda module, inputs, outputs: self._after(module, inputs, outputs))
                    )
            self._release(model)

    def _of_deepspeed(self, hook: FunctionType) -> Callable[..., Any]:
        """Return `hook` as a function of DeepSpeed, because other packages' hooks may not change `lm_head`'s output."""
        theirs = {**globals(), "__name__": "deepspeed.runtime.zero.parameter_offload"}
        return FunctionType(hook.__code__, theirs, closure=hook.__closure__)

    def _gather(self, module: nn.Module, recurse: bool = False) -> None:
        for p in module.parameters(recurse):
            p.data = self._whole[p]

    def _release(self, module: nn.Module, recurse: bool = True) -> None:
        for p in module.parameters(recurse):
            p.data = p.data.new_empty(0)

    def _after(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        self._release(module, recurse=False)

        def gathering(x: Tensor) -> Tensor:
            return Gathering.apply(x, lambda: self._gather(module)) if x.requires_grad else x

        return tree_map_only(Tensor, gathering, outputs)

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self._gather(model, recurse=True)

    def on_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self._release(model)


# The budget holds two rows of logits, so backward must project again.
BUDGET = 2 * 4 * 300
CASES = [
    ("SFT", "softcap", None),
    ("DPO", "llama", None),
    pytest.param("ORPO", "softcap", None, marks=pytest.mark.exhaustive),
    pytest.param("GKD", "llama", None, marks=pytest.mark.exhaustive),
    ("GRPO", "llama", None),
    pytest.param("Distillation", "llama", None, marks=pytest.mark.exhaustive),
    ("DPO", "softcap", LigerFusedLinearDPOLoss(beta=0.1, logits_budget=BUDGET)),
    pytest.param("KTO", "llama", LigerFusedLinearKTOLoss(beta=0.1, logits_budget=BUDGET), marks=pytest.mark.exhaustive),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "family", "loss"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_parameters_that_come_and_go(tmp_path, kind, family, loss):
    """The steps are the same. Embeddings tied to the head (`softcap`) are released in between."""

    def logs(zero3: bool) -> Log:
        names = ["model", *({"ref_model", "teacher_model"} & {*KINDS[kind].needs})]
        models = {name: tiny.model(family, seed=seed) for seed, name in enumerate(names)}
        own: dict[str, Any] = {"callbacks": [Zero3(*models.values())]} if zero3 else {}
        own |= {"logits_budget": BUDGET} if loss is None else {"loss": loss}  # a loss has its own budget
        return run(tmp_path, kind, ours=True, config=PLAIN, **models, **own)

    assert_same(logs(zero3=True), logs(zero3=False))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_an_adapter_on_the_head_that_comes_and_goes(tmp_path, kind):
    """The reference of DPO is a copy of the adapter, which TRL makes before training."""

    def logs(zero3: bool) -> Log:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        own = {"ref_model": None} if "ref_model" in KINDS[kind].needs else {}
        model = get_peft_model(tiny.model(), config)
        trainer = build(tmp_path, kind, ours=True, config=PLAIN, model=model, logits_budget=BUDGET, **own)
        if zero3:
            trainer.add_callback(Zero3(trainer.model))
        trainer.train()
        measured = ("loss", "grad_norm", "rewards/margins", "train_loss")
        return [{k: entry[k] for k in measured if k in entry} for entry in trainer.state.log_history]

    assert_same(logs(zero3=True), logs(zero3=False))
