"""Our trainers with prompts that are computed once, against the same trainers without: the same logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import tiny
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from spies import Memory
from torch import Tensor
from trl import DPOConfig
from trl_kinds import KINDS, LOSS_OF, PLAIN, SEQUENCES, SHARING, Log, build, run

from liger_chunked.integrations.trl import LigerDPOTrainer, heads
from liger_chunked.shared_prefix import SharedBatch, served, share
from liger_chunked.shared_prefix.trie import TriePlan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


def long_prompts(kind: str) -> Dataset:
    """Return rows whose prompts, of uneven lengths, are most of their tokens."""

    rows = tiny.dataset(KINDS[kind].data)
    return Dataset.from_list([{**row, "prompt": (row["prompt"] * 9)[: 20 + 5 * (i % 3)]} for i, row in enumerate(rows)])


class Passes:
    """Count the passes of the model, and record the tries of those that shared prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n, self.shared, self.saved = 0, [], []

        def watched(*args: Any, **options: Any) -> SharedBatch | None:
            batch = stock(*args, **options)
            self.n += 1
            self.shared += [] if batch is None else [batch.trie]
            return batch

        def planned(*args: Any, **options: Any) -> TriePlan:
            found = plan(*args, **options)
            self.saved.append(found.saved)
            return found

        stock, plan = heads.share_pass, share.plan_trie
        monkeypatch.setattr(heads, "share_pass", watched)
        monkeypatch.setattr(share, "plan_trie", planned)

    def check(self, least: float) -> None:
        """Check that a pass shared if and only if it saves `least` of its tokens, and that most passes shared."""
        assert len(self.saved) >= self.n >= 8
        assert [trie.saved for trie in self.shared] == [saved for saved in self.saved if saved >= least]
        assert len(self.shared) >= self.n / 2


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Passes]:
    def check(
        kind: str,
        config: dict[str, Any] | None = None,
        own: Callable[[], dict[str, Any]] = dict,
        share_prefix: bool | str = True,
    ) -> Passes:
        """Train and evaluate with and without sharing, and return the passes of the former."""
        served.why_not_shared(tiny.model())  # whose tries would be counted
        evaluate = kind != "OnlineDPO"  # TRL's does not support it

        def seeded(share_prefix: bool | str) -> Log:
            torch.manual_seed(0)
            arguments = {"train_dataset": long_prompts(kind), **own(), "share_prefix": share_prefix}
            return run(tmp_path, kind, True, {**PLAIN, **(config or {})}, evaluate, **arguments)

        plain = seeded(False)
        passes = Passes(monkeypatch)
        shared = seeded(share_prefix)
        assert len(shared) == len(plain) >= 5
        for ours, theirs in zip(shared, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-5)
        return passes

    return check


CONFIGS = {
    "GRPO": {"beta": 0.1, **SEQUENCES},  # with a reference, and an old policy
    "RLOO": {"beta": 0.1, "num_iterations": 2},
}


# Preference and policy; the other trainers only in the exhaustive run.
RARELY = [kind if kind in ("DPO", "GRPO") else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in SHARING]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", RARELY)
def test_same_logs(compare, kind, tmp_path):
    """Policy, old policy and reference, in training and evaluation; GRPO pads prompts on the left, DPO on the right."""
    tiny.model(seed=2).save_pretrained(tmp_path / "reference")

    def own() -> dict[str, Any]:
        model = tiny.model()
        model.config._name_or_path = str(tmp_path / "reference")  # GRPO and RLOO load it from this path
        return {"model": model}

    passes = compare(kind, CONFIGS.get(kind), own, share_prefix="auto")
    passes.check(least=share.WORTHWHILE)
    assert {trie.padding for trie in passes.shared} >= ({"left"} if KINDS[kind].data == "prompts" else {"right"})


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["GRPO", "DPO"])
def test_same_logs_of_a_loss(compare, kind):
    compare(kind, own=lambda: {"loss": LOSS_OF[kind]()}).check(least=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RARELY)
def test_same_logs_with_gradient_checkpointing_and_adapters(compare, kind):
    def own() -> dict[str, Any]:
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return {"peft_config": adapter, **({"ref_model": None} if kind == "DPO" else {})}

    compare(kind, {**CONFIGS.get(kind, {}), "gradient_checkpointing": True}, own).check(least=0)


@pytest.mark.few(2)
@pytest.mark.sampled
@pytest.mark.parametrize("family", ["softcap", "experts", "scaled"])
@pytest.mark.parametrize("kind", ["GRPO", "DPO"])
def test_families(compare, kind, family):
    config = {"router_aux_loss_coef": 0.0} if family == "experts" else {}

    def own() -> dict[str, Any]:
        references = {"ref_model": tiny.model(family, seed=2)} if kind == "DPO" else {}
        return {"model": tiny.model(family), **references}

    assert compare(kind, config, own, share_prefix="auto").shared or family == "experts"


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", RARELY)
def test_no_tensor_of_the_size_of_the_logits(tmp_path, monkeypatch, kind):
    vocabulary, budget = 6000, 256 * 1024
    config = {"max_steps": 1, "optim": "sgd", "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    config |= {KINDS[kind].length: 24} if KINDS[kind].data == "prompts" else {}
    models = {"model": tiny.model(vocab_size=vocabulary)}
    models |= {"ref_model": tiny.model(seed=1, vocab_size=vocabulary)} if kind == "DPO" else {}
    options = {"logits_budget": budget, "share_prefix": "auto"}
    # The check of a model allocates too, once for each config.
    facts = served._measured(tiny.model(), "sdpa")
    monkeypatch.setattr(served, "_measured", lambda *_: facts)
    memory, passes = Memory(), Passes(monkeypatch)
    memory.expect(*(parameter for model in models.values() for parameter in model.parameters()))
    with memory:
        data = long_prompts(kind)
        run(tmp_path, kind, True, config, **models, train_dataset=data, **options)
    assert passes.shared
    weight_gradient, logits = vocabulary * 32 * 4, 4 * 24 * vocabulary * 4
    assert weight_gradient <= memory.largest <= 1.2 * weight_gradient < logits / 2


def test_auto_steps_aside_where_little_is_saved(tmp_path, monkeypatch):
    short = Dataset.from_list([{**row, "prompt": row["prompt"][:1]} for row in tiny.rows(scale=2)])
    passes = Passes(monkeypatch)
    run(tmp_path, "DPO", True, PLAIN, train_dataset=short, share_prefix="auto")
    assert passes.n >= 8 and not passes.shared


@pytest.mark.few(1)
@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_split_sequences_are_not_shared(tmp_path, monkeypatch, size):
    """Context and sequence parallelism put a prompt and its completion on different ranks."""
    config = DPOConfig(str(tmp_path), use_cpu=True)
    config.parallelism_config = SimpleNamespace(**{"cp_size": 1, "sp_size": 1, size: 2})
    with pytest.raises(ValueError, match="share_prefix=True needs whole sequences, and parallelism_config splits them"):
        LigerDPOTrainer(tiny.model(), tiny.model(), config, share_prefix=True)


def test_what_cannot_be_shared(tmp_path):
    with pytest.raises(ValueError, match=r"share_prefix must be 'auto', True or False, got 'on'"):
        build(tmp_path, "DPO", True, share_prefix="on")
    with pytest.raises(ValueError, match="sequences of LigerSFTTrainer have no prompts in common"):
        build(tmp_path, "SFT", True, share_prefix=True)
    with pytest.raises(ValueError, match="share_prefix=True: ORPOTrainer reads the logits of whole batches"):
        build(tmp_path, "ORPO", True, share_prefix=True)
    prompt_tuning = {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "ref_model": None}
    with pytest.raises(ValueError, match=r"cannot share prompts: its adapter .* adds virtual tokens"):
        build(tmp_path, "DPO", True, share_prefix=True, **prompt_tuning)
    with pytest.raises(ValueError, match=r"its router loss"):
        run(tmp_path, "GRPO", True, {"router_aux_loss_coef": 0.1}, share_prefix=True, model=tiny.model("experts"))


def arguments(mask: list[list[int]]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    row = torch.randint(3, 100, (len(mask[0]),))
    return {"input_ids": row.expand(len(mask), -1), "attention_mask": torch.tensor(mask)}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position_ids": torch.zeros(2, 8)}, "the pass has position_ids"),
        ({"input_ids": None}, "the pass has no input_ids"),
        ({"output_router_logits": True}, "its router loss"),
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, "its attention_mask has 4 dimensions"),
    ],
)
def test_passes_that_are_left_alone(changes, reason):
    given = {**arguments([[1] * 8] * 2), "output_router_logits": False, "use_cache": False}
    assert share.share_pass(tiny.model(), given) is not None
    assert share.share_pass(tiny.model(), {**given, **changes}) is None
    with pytest.raises(ValueError, match=reason):
        share.share_pass(tiny.model(), {**given, **changes}, always=True)


def test_positions_that_count_padding():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0, bos_token_id=1, eos_token_id=2
        )
    )
    right, left = [[1] * 16, [1] * 12 + [0] * 4], [[0] * 4 + [1] * 12] * 2
    assert share.share_pass(model, arguments(right)) is not None
    assert share.share_pass(model, arguments(left)) is None
    with pytest.raises(ValueError, match="absolute"):
        share.share_pass(model, arguments(left), always=True)
    llama = tiny.model()
    assert share.share_pass(llama, arguments(left)) is not None
    with pytest.raises(ValueError, match="between"):
        share.share_pass(llama, arguments([[1] * 8 + [0] * 4 + [1] * 4] * 2), always=True)


@pytest.mark.parametrize("loss", [None, LOSS_OF["DPO"]()], ids=["swap", "loss"])
def test_policy_with_a_router_loss_and_its_reference(tmp_path, monkeypatch, loss):
    """The policy cannot share prompts, so its reference does not: equal models give margins of exactly zero."""
    passes = Passes(monkeypatch)
    models = {"model": tiny.model("experts"), "ref_model": tiny.model("experts")}
    arguments = {**models, "train_dataset": long_prompts("DPO"), "share_prefix": "auto", "loss": loss}
    log = run(tmp_path, "DPO", True, {"learning_rate": 0.0}, **arguments)
    assert [(entry["rewards/margins"], entry["rewards/accuracies"]) for entry in log[:4]] == [(0, 0)] * 4
    assert not passes.shared
