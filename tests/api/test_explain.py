"""`explain`: what it says ran is what did run, and a step records it without a tensor."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_chunked as library
from liger_chunked import Explanation, KeptIds, defer_logits, explain
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.what_ran import record_of

VOCAB, HIDDEN = 64, 16


def batch(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(VOCAB, (n,))
    target[:4] = -100
    return torch.randn(VOCAB, HIDDEN, requires_grad=True), torch.randn(n, HIDDEN, requires_grad=True), target


def cross_entropy(**options: Any) -> Any:
    return library.LigerFusedLinearCrossEntropyLoss(**options)


def test_bare_loss() -> None:
    loss = cross_entropy(logits_budget=10 * VOCAB * 4)
    assert str(explain(loss)) == "What ran in LigerFusedLinearCrossEntropyLoss:\n  nothing ran yet"
    loss(*batch()).backward()
    found = explain(loss)
    assert (found.layers, found.untrained, found.tiled, found.notes) == (None, {}, None, ())
    ran = found.trained[""]
    assert (ran.n_tokens, ran.n_chunks, ran.largest_tile, ran.kept) == (36, 4, 10 * VOCAB, None)
    assert str(found).splitlines()[1] == (
        "  with gradients: 36 tokens with a target; 4 chunks, 4 tiles of at most 2.5 KiB of logits; "
        "logits_budget 2.5 KiB; PyTorch on cpu, because no kernel runs on cpu"
    )
    with torch.no_grad():
        loss(*batch(8))
    assert explain(loss).trained == found.trained and explain(loss).untrained[""].n_tokens == 4
    loss(*(x.double() if x.is_floating_point() else x for x in batch())).backward()
    assert "because no kernel computes float64" in str(explain(loss))


@pytest.mark.parametrize("budget", ["100 bytes", "64 KiB", "1.5 MiB", "512 MiB"])
def test_budgets_are_shown_as_written(budget: str) -> None:
    loss = cross_entropy(logits_budget=budget.replace("bytes", "B"))
    loss(*batch())
    assert f"; logits_budget {budget}; " in str(explain(loss))


@pytest.mark.parametrize("kind", ["preference", "policy", "distillation"])
def test_kinds_of_losses(kind: str) -> None:
    weight, x, target = batch()
    of_sequences = weight, x.view(4, 10, -1), target.view(4, 10)
    if kind == "preference":
        loss: Any = library.LigerFusedLinearDPOLoss()
        loss(*of_sequences, ref_weight=weight.detach(), ref_input=of_sequences[1].detach())
        assert explain(loss).untrained[""].n_tokens == 36  # its reference
    elif kind == "policy":
        loss = library.LigerFusedLinearGRPOLoss(beta=0.0)
        loss(*of_sequences, torch.ones(4))
    else:
        loss = library.LigerFusedLinearKLDivLoss()
        loss(weight, x, weight.detach(), x.detach(), target)
    assert explain(loss).trained[""].n_tokens == 36


def test_kept_ids() -> None:
    weight, x, target = batch()
    x, target = x.view(4, 10, -1), target.view(4, 10)
    loss = library.LigerFusedLinearGRPOLoss(beta=0.0)
    flat = target.flatten().tolist()
    kept = KeptIds.from_lists([[y, (y + 1) % VOCAB] if y >= 0 else [] for y in flat])
    loss(weight, x, target, torch.ones(4), kept=kept)[0].backward()
    ran = explain(loss).trained[""]
    assert (ran.kept, ran.n_chunks, ran.largest_tile) == ((36, 72), 0, 0)
    assert "2.0 kept ids a token, at 36 tokens" in str(ran) and "chunk" not in str(ran)
    kept = KeptIds.from_lists([[y, (y + 1) % VOCAB] if y >= 0 and i % 2 else [] for i, y in enumerate(flat)])
    loss(weight, x, target, torch.ones(4), kept=kept)[0].backward()
    ran = explain(loss).trained[""]
    assert (ran.kept, ran.n_tokens, ran.n_chunks) == ((18, 36), 18, 1)  # the others have the whole vocabulary


def test_deferred_logits(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    assert explain(model).notes == ("not patched: no head in it defers its logits; see explain(loss) too",)
    handle = defer_logits(model[1], logits_budget=2**20)
    _, x, target = batch()
    for _ in range(2):
        with caplog.at_level(logging.INFO, "liger_chunked"):
            F.cross_entropy(model(x), target).backward()
    (line,) = caplog.messages  # once a run
    assert line.startswith("What ran in Linear: with gradients: 36 tokens with a target; 1 chunk") and "\n" not in line
    assert explain(model).trained["1"].options.logits_budget == 2**20
    model(x).topk(2)
    assert explain(model).notes[0].startswith(f"'1', logits were computed for topk at {__file__}:")
    assert "  '1', with gradients: 36 tokens" in str(explain(model))
    F.cross_entropy(model(x), target)
    assert explain(model).notes == ()
    handle.remove()
    assert explain(model).trained["1"].n_tokens == 36  # what ran stays so


def test_the_line_in_the_log_is_the_explanation(caplog: pytest.LogCaptureFixture) -> None:
    """Its facts, in one line and unchanged."""
    model = nn.Sequential(nn.Linear(HIDDEN, VOCAB))
    defer_logits(model[0])
    record_of(model[0]).why_not_shared = "a mask:; or so"
    _, x, target = batch()
    with caplog.at_level(logging.INFO, "liger_chunked"):
        F.cross_entropy(model(x), target).backward()
    title, trained, note = str(explain(model[0])).splitlines()
    assert caplog.messages == [f"{title} {trained.strip()}; {note.strip()}"]
    assert note.endswith("a mask:; or so")


def test_a_head_has_one_record() -> None:
    """To ask again makes none: records are numbered, and numbers are in compiled graphs."""
    head = nn.Linear(HIDDEN, VOCAB)
    record = record_of(head)
    assert record_of(head) is record
    assert record_of(nn.Linear(HIDDEN, VOCAB)).number == record.number + 1


def test_copies_have_their_own_record() -> None:
    loss, (weight, x, target) = cross_entropy(), batch()
    loss(weight, x, target)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert explain(other).trained == {}
        other(weight, x[:8], target[:8])
        assert explain(other).trained[""].n_tokens == 4 and explain(loss).trained[""].n_tokens == 36
    head = nn.Linear(HIDDEN, VOCAB)
    with defer_logits(head):
        F.cross_entropy(head(x), target)
        other = copy.deepcopy(head)
        F.cross_entropy(other(x[:8]), target[:8])
        assert (explain(head).trained[""].n_tokens, explain(other).trained[""].n_tokens) == (36, 4)


def test_a_step_records_no_tensor() -> None:
    loss, (weight, x, target) = cross_entropy(), batch()
    with torch.no_grad():
        loss(weight, x, target)
    gone = weakref.ref(target), weakref.ref(x)
    del x, target
    gc.collect()
    assert [ref() for ref in gone] == [None, None] and explain(loss).untrained[""].n_tokens == 36


def test_a_compiled_step() -> None:
    loss, (weight, x, target) = cross_entropy(), batch()
    step = torch.compile(lambda w, h, y: loss(w, h, y) * 2, backend="aot_eager", fullgraph=True)
    step(weight, x, target).backward()
    assert explain(loss).trained[""].n_tokens == 36


@pytest.mark.parametrize("model", [3, cross_entropy, "llama"])
def test_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a module, such as a patched model or a loss, got "):
        explain(model)


def patched_model(**options: Any) -> tuple[Any, Explanation]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2)).train()
    library.apply_liger_kernel(model, **options)
    return model, explain(model)


def test_patched_model(caplog: pytest.LogCaptureFixture) -> None:
    model, before = patched_model(rope=False, tiled_mlp=8, logits_budget=1024)
    assert (before.trained, before.untrained, before.tiled) == ({}, {}, None)
    ids = torch.randint(VOCAB, (2, 20))
    with caplog.at_level(logging.INFO, "liger_chunked"):
        model(ids, labels=ids).loss.backward()
        model(ids, labels=ids).loss.backward()
    found = explain(model)
    assert found.name == "LlamaForCausalLM" and found.tiled == (40, 8)
    assert found.trained["lm_head"].n_tokens == 38 and found.trained["lm_head"].options.logits_budget == 1024
    assert found.trained["lm_head"].n_chunks == len(range(0, 38, 4))
    text = str(found).splitlines()
    assert text[2] == "  MLPs: 40 tokens in 5 tiles of at most 8"
    if not INTERPRETED:
        assert text.pop(3) == "  patched layers outside tiles: stock code, because no kernel runs on cpu"
    assert text[3:] == str(found.layers).splitlines() and found.layers.replaced["rms_norm"] == {"LlamaRMSNorm": 5}
    (line,) = caplog.messages
    assert line.startswith("What ran in LlamaForCausalLM: 'lm_head', with gradients: 38 tokens")
    assert "rms_norm: LlamaRMSNorm x 5" in line and "\n" not in line


def test_patched_layers_without_tiles() -> None:
    model, _ = patched_model()
    ids = torch.randint(VOCAB, (2, 20))
    model(ids, labels=ids)
    why = "  patched layers: stock code, because no kernel runs on cpu"
    assert str(explain(model)).splitlines()[2] == why or INTERPRETED
    model.double()(ids, labels=ids)
    assert "  patched layers: stock code, because no kernel computes float64" in str(explain(model))


def test_a_step_without_a_fused_loss() -> None:
    model, before = patched_model()
    assert str(before).splitlines()[1] == "  nothing ran yet"
    model.lm_head.register_forward_hook(lambda module, args, logits: print(logits.max()))
    ids = torch.randint(VOCAB, (2, 20))
    model(ids, labels=ids)
    _, nothing, why, *_ = str(explain(model)).splitlines()
    assert nothing == "  no fused loss ran"
    assert why.startswith(f"  'lm_head', logits were computed for max at {__file__}:")


@pytest.mark.parametrize(
    ("training", "keywords", "why"),
    [
        (True, {"skip_logits": False}, "skip_logits=False"),
        (False, {}, "a call in evaluation mode with gradients"),
        (False, {"skip_logits": False}, "skip_logits=False"),
    ],
)
def test_a_step_with_real_logits_is_the_last_one(training: bool, keywords: Any, why: str) -> None:
    """The fused step before it is no longer the last."""
    model, _ = patched_model()
    ids = torch.randint(VOCAB, (2, 20))
    with torch.no_grad():
        model(ids, labels=ids)
    model(ids, labels=ids).loss.backward()
    model.train(training)(ids[:1, :9], labels=ids[:1, :9], **keywords).loss.backward()
    found = explain(model)
    assert found.trained == {} and found.untrained["lm_head"].n_tokens == 38
    assert found.notes == (f"'lm_head', logits were computed for {why}",)
    model.train()(ids, labels=ids)
    assert explain(model).notes == () and explain(model).trained["lm_head"].n_tokens == 38


def test_steps_without_gradients_that_compute_logits() -> None:
    model, _ = patched_model(defer_in_evaluation=False)
    ids = torch.randint(VOCAB, (2, 20))
    with torch.no_grad():
        model.eval()(ids, labels=ids)
        assert explain(model).notes == ("'lm_head', logits were computed for defer_in_evaluation=False",)
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert explain(model).notes == ("'lm_head', logits were computed for generate",)


def test_hidden_states_that_no_loss_takes() -> None:
    head = nn.Linear(HIDDEN, VOCAB)
    defer_logits(head)
    head(torch.randn(HIDDEN))
    assert explain(head).notes == ("logits were computed for arguments of the head that no fused loss takes",)
    head.register_forward_pre_hook(lambda module, args: module.double() and None)
    with pytest.raises(RuntimeError):
        head(torch.randn(2, HIDDEN))
    why = "logits were computed for hidden states in torch.float32 of a head in torch.float64"
    assert explain(head).notes == (why,)


@pytest.mark.parametrize("options", [{"fused_linear_cross_entropy": False}, {"cross_entropy": True}])
def test_a_patch_without_a_fused_loss(options: Any) -> None:
    model, _ = patched_model(**options)
    ids = torch.randint(VOCAB, (2, 20))
    model(ids, labels=ids).loss.backward()
    assert explain(model).notes == (
        "patched without a fused loss: no head in it defers its logits; see explain(loss) too",
    )


def test_an_adapter_that_no_loss_computes() -> None:
    peft = pytest.importorskip("peft")
    model, _ = patched_model()
    ids = torch.randint(VOCAB, (2, 20))
    model(ids, labels=ids).loss.backward()
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model(input_ids=ids, labels=ids).loss.backward()
    found = explain(model)  # and the step before the adapter is not the last
    (note,) = found.notes
    assert found.trained == {} and "logits were computed for a head that no fused loss computes: " in note
    assert "DoraLinearVariant" in note


def test_a_trainer_that_was_made_before_the_patch(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from trl_kinds import build

    trainer = build(tmp_path, "DPO", config={"max_steps": 1})
    with library.patch_trl():
        trainer.train()
    assert explain(trainer.model).notes == ("not patched: no head in it defers its logits; see explain(loss) too",)


def test_trainer_of_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("trl")
    from trl_kinds import PATCHED, build

    with caplog.at_level(logging.INFO, "liger_chunked"):
        trainer = build(tmp_path, "DPO", PATCHED, {"max_steps": 2}, share_prefix=True)
        trainer.train()
    (ran,) = explain(trainer.model).trained.values()  # also after the heads came off
    assert ran.n_tokens > 0 and ran.n_chunks == 1 and ran.options.logits_budget == 512 * 2**20
    assert ran.prompts is not None and ran.prompts[0] < ran.prompts[1]
    assert f"shared prompts: the model computed {ran.prompts[0]} tokens in place of {ran.prompts[1]}" in str(ran)
    (of_reference,) = explain(trainer.ref_model).untrained.values()
    assert explain(trainer.ref_model).trained == {} and of_reference.prompts is not None
    lines = [line for line in caplog.messages if line.startswith("What ran")]
    assert len(lines) == 1 and "shared prompts" in lines[0]
