"""Deferred logits of PEFT models: the adapters are those of the call, whatever is switched before they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
import torch.nn.functional as F
from model_zoo import VOCAB
from test_lora_head import PEFT_WARNINGS, peft_model
from torch import Tensor

from liger_chunked import apply_liger_kernel, defer_logits
from liger_chunked.deferred import DeferredLogits

pytestmark = PEFT_WARNINGS

IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dropout": {"lora_dropout": 0.5},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def built(adapter: str) -> Any:
    return peft_model(second="added", **ADAPTERS[adapter])


def loss_of(z: Any) -> Tensor:
    """The fused loss of logits."""
    return F.cross_entropy(z[:, :-1].reshape(-1, VOCAB), IDS[:, 1:].reshape(-1))


def loss_of_real(z: Any) -> Tensor:
    """A loss that takes real logits."""
    return loss_of(z * torch.ones(VOCAB))


Loss = Callable[[Any], Tensor]


def disabled(model: Any, loss_of: Loss) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        reference = model(IDS).logits
    return loss_of(model(IDS).logits) - loss_of(reference)


def used_while_disabled(model: Any, loss_of: Loss) -> Tensor:
    z = model(IDS).logits
    with model.disable_adapter():
        return loss_of(z)


def another_adapter(model: Any, loss_of: Loss) -> Tensor:
    model.set_adapter("other")
    z = model(IDS).logits
    model.set_adapter("default")
    return loss_of(z) + loss_of(model(IDS).logits)


def frozen_between(model: Any, loss_of: Loss) -> Tensor:
    z = model(IDS).logits
    model.requires_grad_(False)
    loss = loss_of(z)
    model.requires_grad_(True)
    return loss


def merged(model: Any, loss_of: Loss) -> Tensor:
    before = loss_of(model(IDS).logits)
    model.merge_adapter()
    with torch.no_grad():
        value = loss_of(model(IDS).logits)
    model.unmerge_adapter()
    return before + value


USES: dict[str, Callable[[Any, Loss], Tensor]] = {
    "disabled": disabled,
    "used while disabled": used_while_disabled,
    "another adapter": another_adapter,
    "frozen between": frozen_between,
    "merged": merged,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["apply", "defer"])
@pytest.mark.parametrize("loss", [loss_of, loss_of_real], ids=["fused", "real"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("adapter", ["lora", "modules_to_save"])
def test_adapters_of_the_call(adapter: str, use: str, loss: Loss, way: str) -> None:
    model = built(adapter)
    stock = copy.deepcopy(model)
    if way == "apply":
        apply_liger_kernel(model)
    else:
        defer_logits(model.get_base_model().lm_head)
    assert isinstance(model(IDS).logits, DeferredLogits)
    results = []
    for module in (model, stock):
        torch.manual_seed(0)
        value = USES[use](module, loss)
        value.backward()
        results.append((value.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}))
    (ours, found), (theirs, exact) = results
    # float32: the fused loss adds in another order than eager code; a gradient sums more terms.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_dropout_of_the_call() -> None:
    """The layer's own forward drew it, once, as without this library: `eval()` afterwards changes nothing."""
    model = built("dropout")
    apply_liger_kernel(model, rope=False, rms_norm=False, swiglu=False)
    z = model(IDS).logits
    model.eval()
    torch.manual_seed(1)
    first = loss_of(z)
    torch.manual_seed(2)
    assert torch.equal(first, loss_of(z)) and not z.is_computed
    torch.testing.assert_close(first, loss_of(z.tensor()))
    assert not model.training


def test_merged_after_the_call() -> None:
    model = built("lora")
    apply_liger_kernel(model)
    z = model(IDS).logits
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="merged or unmerged after the model called it"):
        loss_of(z)
    model.unmerge_adapter()
    torch.testing.assert_close(loss_of(z), loss_of(z.tensor()))


class FullyShardedDataParallel(torch.nn.Module):
    """Around one layer, as FSDP 1 with PEFT's policy: it calls that layer, and has its attributes."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "layer" else getattr(self.layer, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_layers_that_fsdp_wrapped_before() -> None:
    """A head whose layers are in wrappers already defers as well."""
    stock = built("lora")
    expected = loss_of(stock(IDS).logits)
    model = copy.deepcopy(stock)
    head = model.get_base_model().lm_head
    head.base_layer = FullyShardedDataParallel(head.base_layer)
    for layers in (head.lora_A, head.lora_B):
        layers["default"] = FullyShardedDataParallel(layers["default"])
    with defer_logits(head):
        z = model(IDS).logits
        assert isinstance(z, DeferredLogits)
        torch.testing.assert_close(loss_of(z), expected)
        assert not z.is_computed
