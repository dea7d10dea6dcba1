"""Models beside the policy: references that are copies of a trained model, and teachers in mixed precision."""

from __future__ import annotations

import copy
import functools
import math
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
from peft import LoraConfig, get_peft_model
from sampling import exhaustive
from test_trl_trainers import build
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss
from liger_chunked.integrations.transformers import apply_liger_kernel, detach_head

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]

# TRL's defaults. Plain descent: Adam would turn rounding of a zero gradient into a step.
BF16 = {"bf16": True, "gradient_checkpointing": True, "optim": "sgd", "learning_rate": 0.05, "max_steps": 8}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Chain:
    """A model that goes through trainers; each reference is a copy of it at that time."""

    def __init__(self, folder: Path, ours: bool) -> None:
        self.folder, self.ours, self.model = folder, ours, tiny.model()

    def sft(self, **config: Any) -> Chain:
        losses(build(self.folder, "SFT", self.ours, {**BF16, **config}, model=self.model))
        return self

    def aligned(self, kind: str, loss: Any = None) -> list[float]:
        loss = {"loss": loss} if self.ours else {}
        reference = copy.deepcopy(self.model)
        return losses(build(self.folder, kind, self.ours, BF16, model=self.model, ref_model=reference, **loss))


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        exhaustive(("DPO", None), "DPO", False),
        exhaustive(("KTO", None), "KTO"),
        exhaustive(("DPO", LigerFusedLinearDPOLoss(beta=0.1)), "DPO-loss"),
        exhaustive(("KTO", LigerFusedLinearKTOLoss(beta=0.1)), "KTO-loss", False),
    ],
)
def test_a_copy_of_the_trained_model_is_the_reference(tmp_path, kind, loss):
    """The copy keeps its weights while the policy learns: losses leave their first value as in stock, in two rounds."""
    stock, ours = Chain(tmp_path, False).sft(), Chain(tmp_path, True).sft()
    first = math.log(2) if kind == "DPO" else 0.5
    for _ in range(2):
        expected, got = stock.aligned(kind), ours.aligned(kind, loss)
        # The policy is the reference, but for the last bits of bfloat16.
        assert got[0] == pytest.approx(first, rel=5e-3)
        assert abs(got[-1] - first) > 0.02 < abs(expected[-1] - first)
        assert got == pytest.approx(expected, rel=0.02)


@pytest.mark.sampled
@pytest.mark.parametrize("patched", [False, True], ids=["", "base-kernels"])
@pytest.mark.parametrize("detached", [False, True], ids=["", "detached"])
def test_a_copy_after_training_runs_on_its_own_weights(tmp_path, detached, patched):
    chain = Chain(tmp_path, True)
    if patched:
        apply_liger_kernel(chain.model)
    model = chain.sft().model
    if detached:
        detach_head(model)
    before = copy.deepcopy(model)
    ids = torch.randint(4, 260, (2, 5), generator=torch.Generator().manual_seed(0))
    sampled = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.eval().generate(ids, **sampled)
    expected_logits = model(ids).logits.detach()
    assert torch.equal(before.eval().generate(ids, **sampled), expected)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    assert torch.equal(before.generate(ids, **sampled), expected)
    assert torch.equal(before(ids).logits, expected_logits)
    assert not model(ids).logits.any()


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_reference_after_detach_head(tmp_path, kind):
    chain = Chain(tmp_path, True).sft()
    detach_head(chain.model)
    expected = Chain(tmp_path, False).sft().aligned(kind)
    got = chain.aligned(kind)
    assert abs(got[-1] - got[0]) > 0.02
    assert got == pytest.approx(expected, rel=0.02)


def closure(policy: PreTrainedModel, forward: Any) -> Any:
    return lambda *args, **kwargs: forward(*args, **kwargs)


def default(policy: PreTrainedModel, forward: Any) -> Any:
    return lambda *args, own=forward, **kwargs: own(*args, **kwargs)


def wraps(policy: PreTrainedModel, forward: Any) -> Any:
    @functools.wraps(forward)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return outer.__wrapped__(*args, **kwargs)

    return outer


class Caller:
    """A callable that holds the forward, and one whose method does."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


FORWARDS = {
    "bound": lambda policy, forward: forward,
    "method": lambda policy, forward: types.MethodType(type(policy).forward, policy),
    "partial": lambda policy, forward: functools.partial(forward, use_cache=False),
    "partial-of-function": lambda policy, forward: functools.partial(type(policy).forward, policy),
    "closure": closure,
    "default": default,
    "wraps": wraps,
    "object": lambda policy, forward: Caller(forward),
    "method-of-object": lambda policy, forward: Caller(forward).__call__,
    "list": lambda policy, forward: (lambda fs: lambda *args, **kwargs: fs[0](*args, **kwargs))([forward]),
    "nested": lambda policy, forward: functools.partial(wraps(policy, closure(policy, forward))),
    "autocast": lambda policy, forward: torch.autocast("cpu", torch.bfloat16)(forward),
    "compiled": lambda policy, forward: torch.compile(forward, backend="eager"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@pytest.mark.parametrize("form", FORWARDS)
def test_a_reference_whose_forward_runs_another_model(tmp_path, kind, form):
    """It is refused, with or without the policy in it: it does not compute with its own weights."""
    policy, reference = tiny.model(), tiny.model()
    reference.forward = FORWARDS[form](policy, policy.forward)
    message = (
        r"the forward that is set on ref_model \(LlamaForCausalLM\) runs another model, .*: a copy of a model keeps "
        r"the forward of its original\. Load the reference by itself: model\.save_pretrained\(path\)"
    )
    for model in (policy, tiny.model(seed=3)):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, kind, True, model=model, ref_model=reference)
    # The same on the model that it runs is right, and on a part of a reference it is as wrong.
    policy.forward = FORWARDS[form](policy, policy.forward)
    assert build(tmp_path, kind, True, model=policy, ref_model=tiny.model(seed=2))
    part = tiny.model()
    part.model.layers[0].forward = FORWARDS[form](policy.model.layers[0], policy.model.layers[0].forward)
    with pytest.raises(ValueError, match=r"set on model\.layers\.0 of ref_model \(LlamaForCausalLM\) runs another"):
        build(tmp_path, kind, True, model=tiny.model(), ref_model=part)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_forwards_that_stay_in_the_reference(tmp_path, kind):
    """What wraps the reference's own forward, holds a module without parameters, or was copied with it, is no fault."""
    for form in FORWARDS:
        reference = tiny.model(seed=2)
        reference.forward = FORWARDS[form](reference, reference.forward)
        layer, silent = reference.model.layers[0], nn.Dropout(0.0)
        layer.forward = functools.partial(
            lambda own, drop, *args, **kwargs: own(*args, **kwargs), layer.forward, silent
        )
        assert build(tmp_path, kind, True, ref_model=reference)
    for form in ("bound", "method", "partial", "partial-of-function"):
        original = tiny.model(seed=2)
        original.forward = FORWARDS[form](original, original.forward)
        assert build(tmp_path, kind, True, ref_model=copy.deepcopy(original))


def test_a_policy_whose_forward_runs_the_reference(tmp_path):
    """A copy of a wrapped model is trained, and the original is the reference."""
    original = tiny.model()
    original.forward = closure(original, original.forward)
    with pytest.raises(ValueError, match=r"set on model \(LlamaForCausalLM\) runs ref_model, so the parameters of"):
        build(tmp_path, "DPO", True, model=copy.deepcopy(original), ref_model=original)


def test_a_copy_of_a_model_that_trl_trained(tmp_path):
    """TRL's own trainers set a forward that stays bound to the original."""
    model = Chain(tmp_path, False).sft().model
    with pytest.raises(ValueError, match="runs another model"):
        build(tmp_path, "DPO", True, model=model, ref_model=copy.deepcopy(model))
    model.save_pretrained(tmp_path / "trained")
    reference = type(model).from_pretrained(tmp_path / "trained")
    assert losses(build(tmp_path, "DPO", True, BF16, model=model, ref_model=reference))[-1] < 0.68


def share(of: str, model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model have parameters of another: the objects, or their values."""
    if of == "module":
        model.model.layers[0] = other.model.layers[0]
    elif of == "parameter":
        model.lm_head.weight = other.lm_head.weight
    else:
        model.lm_head.weight = nn.Parameter(other.lm_head.weight.data, requires_grad=False)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@pytest.mark.parametrize("of", ["module", "parameter", "values"])
def test_a_reference_that_shares_parameters(tmp_path, kind, of):
    """Those that are trained are refused; frozen ones need no second copy."""
    policy, reference = tiny.model(), tiny.model()
    share(of, reference, policy)
    match = (
        r"ref_model shares \d+ parameters with model that are trained, such as .*, so it would change with every step"
    )
    with pytest.raises(ValueError, match=match):
        build(tmp_path, kind, True, model=policy, ref_model=reference)
    policy.model.layers[0].requires_grad_(False)
    policy.lm_head.requires_grad_(False)
    assert build(tmp_path, kind, True, model=policy, ref_model=reference)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_reference_and_an_adapter(tmp_path, kind):
    """An adapter freezes what the reference may share, but not what lies inside the model that it adapts."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    policy, reference = tiny.model(), tiny.model()
    share("parameter", reference, policy)
    assert build(tmp_path, kind, True, model=policy, ref_model=reference, peft_config=adapter)
    assert build(tmp_path, kind, True, model=tiny.model(), ref_model=None, peft_config=adapter)
    assert build(tmp_path, kind, True, model=get_peft_model(tiny.model(), adapter), ref_model=None)
    policy = get_peft_model(tiny.model(), adapter)
    with pytest.raises(ValueError, match=r"such as .*lora_A"):
        build(tmp_path, kind, True, model=policy, ref_model=policy.get_base_model())


class Dtypes:
    """Record the dtypes of hidden states inside a layer of a model, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[torch.dtype] = []
        model.model.layers[1].mlp.gate_proj.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen.append(output.dtype)


BESIDE: dict[str, Callable[[Any], nn.Module]] = {
    "GKD": lambda trainer: trainer.teacher_model,
    "GOLD": lambda trainer: trainer.teacher_model,
    "Distillation": lambda trainer: trainer.teacher_model,
    "OnlineDPO": lambda trainer: trainer.ref_model,
    "DPO": lambda trainer: trainer.ref_model,
}


@pytest.mark.sampled
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", BESIDE)
def test_precision_of_the_model_beside_the_policy(tmp_path, kind, bf16):
    """TRL prepares some of these models before our head comes, and some after it."""
    seen, values = [], []
    config = {"bf16": bf16, "optim": "sgd", "learning_rate": 0.02, "max_steps": 2}
    for ours in (False, True):
        own = {"share_prefix": False} if ours and kind in ("DPO", "OnlineDPO") else {}
        torch.manual_seed(0)
        trainer = build(tmp_path, kind, ours, config, **own)
        beside, policy = Dtypes(BESIDE[kind](trainer)), Dtypes(trainer.model)
        values.append(losses(trainer))
        seen.append((beside.seen, policy.seen))
    assert set(seen[1][0]) == {torch.bfloat16 if bf16 else torch.float32}
    if kind != "Distillation":  # TRL runs the models of this trainer past accelerate's autocast
        assert seen[1] == seen[0]
    assert values[1] == pytest.approx(values[0], rel=0.02 if bf16 else 2e-5)


@pytest.mark.parametrize("kind", ["GKD", "GOLD", "Distillation"])
def test_a_copy_of_the_student_is_the_teacher(tmp_path, kind):
    """Both share an autocast object, which the student enters inside of its teacher."""
    model = Chain(tmp_path, True).sft().model
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    trainer = build(tmp_path, kind, True, BF16, model=model, teacher_model=teacher)
    student = Dtypes(model)
    assert losses(trainer)[0] > 0.01
    assert not torch.is_autocast_enabled("cpu")
    assert set(student.seen) == {torch.bfloat16}
    expected = tiny.model()
    expected.load_state_dict(teacher.state_dict())
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(teacher.eval()(ids).logits, expected.eval()(ids).logits.float())


@pytest.mark.parametrize("kind", ["GKD", "GOLD"])
def test_a_teacher_with_another_precision(tmp_path, kind):
    """Its autocast is not the student's, which runs inside of it."""
    seen = []
    for ours in (False, True):
        teacher = tiny.model("wide", seed=1)
        teacher.forward = torch.autocast("cpu", torch.bfloat16)(teacher.forward)
        trainer = build(tmp_path, kind, ours, teacher_model=teacher)
        beside, policy = Dtypes(teacher), Dtypes(trainer.model)
        value = losses(trainer)
        seen.append((set(beside.seen), set(policy.seen), value))
    assert seen[0][:2] == seen[1][:2] == ({torch.bfloat16}, {torch.float32})
    assert seen[1][2] == pytest.approx(seen[0][2], rel=0.02)


@pytest.mark.parametrize(
    ("kind", "changes", "way_out"),
    [
        ("DPO", {"ref_model": None}, "pass ref_model"),
        ("KTO", {"ref_model": None}, "pass ref_model"),
        ("GRPO", {"config": {"beta": 0.1}}, r"save_pretrained\(path\)"),
        ("RLOO", {"config": {"beta": 0.1}}, r"save_pretrained\(path\)"),
    ],
)
def test_a_model_without_a_name_has_no_reference_to_load(tmp_path, kind, changes, way_out):
    with pytest.raises(ValueError, match=f"Liger{kind}Trainer needs a reference, .* was not loaded from .*{way_out}"):
        build(tmp_path, kind, True, **changes)


def test_a_reference_that_is_not_loaded_needs_no_name(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    none = {"ref_model": None}
    for kind, changes in (
        ("DPO", {"peft_config": lora, **none}),
        ("DPO", {"model": get_peft_model(tiny.model(), lora), **none}),
        ("DPO", {"config": {"precompute_ref_log_probs": True}, **none}),
        ("DPO", {"loss": LigerFusedLinearDPOLoss(use_ref_model=False), **none}),
        ("GRPO", {"peft_config": lora, "config": {"beta": 0.1}}),
        ("GRPO", {}),
    ):
        assert build(tmp_path, kind, True, **changes).ref_model is None
