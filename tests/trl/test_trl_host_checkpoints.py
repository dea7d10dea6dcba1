"""Our trainers under TRL's `activation_offloading`: checkpoints on the host, MLPs in tiles, prompts computed once."""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import tiny
from torch import Tensor
from trl.models import activation_offloading
from trl.models.activation_offloading import OffloadActivations
from trl_kinds import PLAIN, Log, assert_same, build, log_of

from liger_chunked.integrations.transformers import apply_liger_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]
CHECKPOINTED = {
    **PLAIN, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
}  # fmt: skip


class Offloaded:
    """The shapes of what TRL moves to the host, on a machine whose accelerator is its CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        if torch.accelerator.current_accelerator(check_available=True) is not None:
            pytest.skip("a GPU is here: TRL's own device")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: None)  # TRL 1.13 asks for it even without streams
        contexts = functools.partial(
            activation_offloading.get_act_offloading_ctx_manager,
            use_pin_memory=False, use_streams=False, min_offload_size=0,
        )  # fmt: skip
        for name in ("sft", "dpo", "kto"):
            monkeypatch.setattr(
                import_module(f"trl.trainer.{name}_trainer"), "get_act_offloading_ctx_manager", contexts
            )
        stock = OffloadActivations.__init__

        def watched(offload: Any, *args: Any, **kwargs: Any) -> None:
            stock(offload, *args, **kwargs)
            pack = offload.pack_hook

            def record(x: Tensor) -> Any:
                self.shapes.append(tuple(x.shape))
                return pack(x)

            offload.pack_hook = record

        monkeypatch.setattr(OffloadActivations, "__init__", watched)


def train(folder: Path, name: str, tokens: int | None, config: dict[str, Any], **arguments: Any) -> Log:
    model = tiny.model()
    trainer = build(folder, name, True, {**CHECKPOINTED, **config}, model=model, **arguments)
    apply_liger_kernel(trainer.model, tiled_mlp=tokens, fused_linear_cross_entropy=False)
    trainer.train()
    return log_of(trainer)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SFT", {}),
        ("DPO", {}),
        ("DPO", {"share_prefix": True}),
        ("KTO", {}),
    ],
    ids=["sft", "dpo", "dpo-shared", "kto"],
)
def test_same_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any]) -> None:
    expected = train(tmp_path, name, None, {}, **arguments)
    offloaded = Offloaded(monkeypatch)
    found = train(tmp_path, name, 7, {"activation_offloading": True}, **arguments)
    assert_same(found, expected)
    # The layers' inputs go; no logits and no gradient of the head exist in what autograd saves.
    assert offloaded.shapes
    assert not [shape for shape in offloaded.shapes if 300 in shape and len(shape) > 2]
