"""`patch_trl`: how it is applied and undone, which trainers it serves, and what it leaves of their models."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("trl")

import tiny
import torch
from fused import asked_logits, is_deferred, real
from torch import Tensor, nn
from trl.trainer import utils
from trl_kinds import KINDS, PATCHED, PLAIN, assert_same, beside, build, log_of, run, state_of

from liger_chunked import apply_liger_kernel, explain
from liger_chunked.integrations import trl as integration
from liger_chunked.integrations.trl import heads, patch, patch_trl
from liger_chunked.integrations.trl.patch import ServedTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]

SHORT = {**PLAIN, "max_steps": 2}


def state_of_trl() -> dict[tuple[str, str], Any]:
    """Return what TRL's modules and trainer classes hold."""
    found = {}
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "trl":
            for key, x in vars(module).items():
                found[name, key] = x
                if isinstance(x, type) and issubclass(x, patch._BaseTrainer):
                    found |= {(x.__qualname__, member): value for member, value in vars(x).items()}
    return found


def is_served(trainer: Any) -> bool:
    return isinstance(trainer, ServedTrainer)


def make(folder: Path, kind: str = "SFT", **arguments: Any) -> Any:
    return build(folder, kind, False, SHORT, **arguments)


def test_ways_to_apply_it(tmp_path: Path) -> None:
    for kind in KINDS.values():
        kind.stock()  # TRL imports its modules on first use
    before = state_of_trl()
    undone = patch_trl()
    assert is_served(make(tmp_path))
    undone.undo()
    undone.undo()  # nothing is left to undo
    assert not is_served(make(tmp_path))
    with patch_trl() as entered:
        assert is_served(make(tmp_path))
        with patch_trl(logits_budget="1MiB"):
            assert make(tmp_path)._liger_heads.plain.logits_budget == 2**20
        assert make(tmp_path)._liger_heads.plain.logits_budget == 512 * 2**20
    assert isinstance(entered, patch_trl) and not is_served(make(tmp_path))

    @patch_trl(logits_budget="2MiB")
    def main(name: str) -> Any:
        """Train."""
        return make(tmp_path, name)

    assert (main.__name__, main.__doc__) == ("main", "Train.")
    assert not is_served(make(tmp_path))  # decorating patches nothing
    assert main("DPO")._liger_heads.plain.logits_budget == 2**21
    with pytest.raises(ZeroDivisionError), patch_trl():
        _ = 1 / 0
    trainer = main("ORPO")
    trainer.train()
    after = state_of_trl()
    assert all(x is after[key] for key, x in before.items())
    new = [x for key, x in after.items() if key not in before]  # what TRL has imported meanwhile
    assert not any(getattr(x, "__module__", "").startswith("liger_chunked") for x in new)


@pytest.mark.parametrize(
    ("given", "of_model", "expected"),
    [(None, "64KiB", 2**16), ("1MiB", "64KiB", 2**20), (None, None, 512 * 2**20)],
)
def test_the_budget_of_the_model(tmp_path: Path, given: Any, of_model: Any, expected: int) -> None:
    """Without a budget of its own, a trainer keeps that of `apply_liger_kernel`, for all its models."""
    model = tiny.model()
    apply_liger_kernel(model, logits_budget=of_model)
    with patch_trl(logits_budget=given):
        trainer = build(tmp_path, "DPO", config={"max_steps": 1}, model=model)
    trainer.train()
    budgets = [ran.options.logits_budget for ran in explain(model).trained.values()]
    assert budgets == [expected] == [ran.options.logits_budget for ran in explain(trainer.ref_model).untrained.values()]
    own = build(tmp_path, "SFT", True, SHORT, model=model, logits_budget=given)
    assert own._liger_heads.plain.logits_budget == expected


def test_a_patch_inside_itself(tmp_path: Path) -> None:
    """The end of an inner block, or a function decorated in a block, leaves the outer block patched."""
    with patch_trl(logits_budget="1MiB") as patch:
        with patch:
            assert is_served(make(tmp_path))
        assert is_served(make(tmp_path))
        with patch_trl(logits_budget="2MiB"):
            with patch:
                assert make(tmp_path)._liger_heads.plain.logits_budget == 2**20
            assert make(tmp_path)._liger_heads.plain.logits_budget == 2**21
        assert make(tmp_path)._liger_heads.plain.logits_budget == 2**20
        assert is_served(patch(make)(tmp_path)) and is_served(make(tmp_path))
    assert not is_served(make(tmp_path))
    with patch, patch:
        patch.undo()  # undoes all of it
        assert not is_served(make(tmp_path))
        with patch:
            assert is_served(make(tmp_path))
    assert not is_served(make(tmp_path))
    made = patch_trl()
    with made:
        pass
    assert not is_served(make(tmp_path))  # the block began what the call had made active


def test_a_class_of_a_user_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook defines its trainer again and again, with what the class holds."""
    trl = importlib.import_module("trl")

    def served() -> weakref.ref[type]:
        class Mine(trl.SFTTrainer):  # type: ignore[misc, name-defined]
            pass

        with monkeypatch.context() as context:
            context.setattr(trl, "SFTTrainer", Mine)
            trainers = [make(tmp_path), make(tmp_path)]
        assert all(is_served(trainer) for trainer in trainers) and type(trainers[0]) is type(trainers[1])
        return weakref.ref(Mine)

    with patch_trl():
        mine = served()
        gc.collect()
        assert mine() is None


def test_one_model_alone(tmp_path: Path) -> None:
    """Other models' trainers stay TRL's. The reference of a served trainer is served."""
    ours, other = tiny.model(), tiny.model(seed=3)
    before = state_of(other)
    with patch_trl(ours):
        assert is_served(make(tmp_path, "DPO", model=ours, ref_model=tiny.model(seed=2)))
        trainer = make(tmp_path, model=other)
        assert not is_served(trainer) and not is_served(make(tmp_path, "DPO", model=other, ref_model=ours))
    assert state_of(other) != before and state_of(other)["lm_head"] is nn.Linear  # TRL's head
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(ours, LoraConfig(target_modules=["q_proj"]))
    with patch_trl(adapted):
        assert is_served(make(tmp_path, model=adapted)) and is_served(make(tmp_path, model=ours))
    with pytest.raises(TypeError, match="model must be, or wrap, a transformers PreTrainedModel"):
        patch_trl("meta-llama/Llama-3.2-1B")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transformers PreTrainedModel"):
        patch_trl(nn.Linear(2, 2))


def test_subclasses_and_later_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = importlib.import_module("trl")

    class Before(trl.DPOTrainer):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.own = True
            super().__init__(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    name = "trl.experimental.orpo.orpo_trainer"
    for module in (name, "trl.experimental.orpo"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with patch_trl(logits_budget=8 * 1200):

        class Inside(Before):
            pass

        assert is_served(make(tmp_path, "ORPO")) and name in sys.modules
        monkeypatch.setattr(trl, "DPOTrainer", Inside)
        trainer = make(tmp_path, "DPO")
        assert trainer.own and isinstance(trainer, Inside) and type(trainer).__name__ == "Inside"
        trainer.train()
    monkeypatch.setattr(trl, "DPOTrainer", Inside)
    stock = make(tmp_path, "DPO")
    assert not is_served(stock)
    stock.train()
    assert_same(log_of(trainer), log_of(stock), entries=3)


def tripled(stock: Any, method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Return a trainer's class whose static method gives TRL's value times 3, and a list of its calls."""
    calls: list[str] = []

    def times_3(value: Tensor) -> Tensor:
        calls.append(method)
        return 3 * value

    if way == "super":

        def through_super(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            return times_3(getattr(super(cls, self), method)(*args, **kwargs))

        cls = type("Tripled", (stock,), {method: through_super})
        return cls, calls
    theirs = getattr(stock, method)
    function = staticmethod(lambda *args, **kwargs: times_3(theirs(*args, **kwargs)))
    if way == "static":
        return type("Tripled", (stock,), {method: function}), calls
    monkeypatch.setattr(stock, method, function)
    return stock, calls


# The trainers whose losses read logits in a static method, and that method.
STATIC = {"ORPO": "get_batch_logps", "CPO": "get_batch_logps", "GKD": "generalized_jsd_loss"}


@pytest.mark.parametrize("way", ["static", "super", "replaced"])
@pytest.mark.parametrize("name", STATIC)
def test_a_static_method_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    """A subclass overrides it, or somebody replaces it on TRL's class: it is called, and gets TRL's value."""
    module, method = importlib.import_module(KINDS[name].module), STATIC[name]
    cls, calls = tripled(KINDS[name].stock(), method, way, monkeypatch)
    monkeypatch.setattr(module, f"{name}Trainer", cls)
    before = vars(cls)[method]
    stock = run(tmp_path, name, False, SHORT)
    n_calls = len(calls)
    with asked_logits() as asked:
        ours = run(tmp_path, name, PATCHED, SHORT)
    assert n_calls > 0 and len(calls) == 2 * n_calls
    assert_same(ours, stock, entries=3)
    assert vars(cls)[method] is before
    assert way != "super" or not asked  # super() is fused


@pytest.mark.parametrize("name", STATIC)
def test_static_methods_of_a_served_trainer(tmp_path: Path, name: str) -> None:
    """They are TRL's for real logits, of the class and of its trainer; other trainers have none of them."""
    torch.manual_seed(0)
    trainer, method = make(tmp_path, name), STATIC[name]
    with patch_trl():
        served = make(tmp_path, name)
        assert not any(hasattr(make(tmp_path), other) for other in STATIC.values())
    logits, others, labels = torch.randn(2, 5, 7), torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    # `is_encoder_decoder` by position, and a temperature.
    args: Any = (logits, others, labels, 0.3, 0.7) if name == "GKD" else (logits, labels, True, True)
    expected = getattr(trainer, method)(*args)
    for holder in (served, type(served)):
        assert torch.equal(getattr(holder, method)(*args), expected)
        with served.heads_set():
            assert torch.equal(getattr(holder, method)(*args), expected)


@pytest.mark.parametrize("settings", [{}, {"num_items_in_batch": 4}, {"reduction": "sum"}], ids=str)
def test_a_divergence_without_labels(tmp_path: Path, settings: dict[str, Any]) -> None:
    """TRL divides by the number of sequences, and ours did by the number of tokens."""
    with patch_trl():
        trainer = make(tmp_path, "GKD")
    ids = torch.arange(4, 16).view(2, 6)
    with trainer.heads_set(), torch.no_grad():
        student, teacher = trainer.model(ids).logits, trainer.teacher_model(ids).logits
        assert is_deferred(student) and is_deferred(teacher)
        found = trainer.generalized_jsd_loss(student, teacher, **settings)
    theirs = KINDS["GKD"].stock().generalized_jsd_loss(real(student), real(teacher), **settings)
    torch.testing.assert_close(found, theirs)


# Modules where somebody replaces `selective_log_softmax`, and a trainer that calls it: by its name, or inside its
# `get_batch_logps`.
CALLED_IN = {"trl.experimental.a2po.a2po_trainer": "A2PO", "trl.experimental.orpo.orpo_trainer": "ORPO"}


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("module", CALLED_IN)
def test_a_function_of_a_user_in_a_module_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, wraps: bool
) -> None:
    """It is called, as without the patch, also if `functools.wraps` gives it the names of TRL's."""
    holder, calls = importlib.import_module(module), []
    theirs = holder.selective_log_softmax

    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return 2 * theirs(*args, **kwargs)

    monkeypatch.setattr(holder, "selective_log_softmax", functools.wraps(theirs)(doubled) if wraps else doubled)
    stock = run(tmp_path, CALLED_IN[module], False, SHORT)
    n_calls = len(calls)
    assert_same(run(tmp_path, CALLED_IN[module], PATCHED, SHORT), stock, entries=3)
    assert n_calls > 0 and len(calls) == 2 * n_calls


def overriding(stock: Any, name: str, calls: list[str]) -> Any:
    """Return a subclass of a trainer with a member of its own, called `name`, that changes what is trained."""

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return 2 * stock.compute_loss(self, *args, **kwargs)

    def _compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        loss, *others = stock._compute_loss(self, *args, **kwargs)
        return 2 * loss, *others

    def _get_last_hidden_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return 2 * stock._get_last_hidden_state(self, *args, **kwargs)

    def factor(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return 3.0

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)() * stock.training_step(self, *args, **kwargs)

    trls = {x.__name__: x for x in (compute_loss, _compute_loss, _get_last_hidden_state)}
    members: dict[str, Any] = {name: trls[name]} if name in trls else {name: factor, "training_step": training_step}
    return type("Own", (stock,), members)


OF_LOSSES = ("compute_loss", "_compute_loss", "_get_last_hidden_state")


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        *((name, whose) for name in OF_LOSSES for whose in ("patched", "liger")),
        *((name, "patched") for name in ("gathered_mean", "_check_made")),  # of our mixin
    ],
)
def test_members_of_a_users_distillation_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whose: str
) -> None:
    """Ours computes TRL's loss of this trainer, unless the user's class computes it; other names are the user's."""
    trl, calls = importlib.import_module("trl"), []
    stock_class = KINDS["Distillation"].stock()
    with monkeypatch.context() as context:
        context.setattr(trl, "DistillationTrainer", overriding(stock_class, name, calls))
        stock = run(tmp_path, "Distillation", False, SHORT)
        n_calls = len(calls)
        if whose == "patched":
            ours = run(tmp_path, "Distillation", PATCHED, SHORT)
    if whose == "liger":
        cls = overriding(integration.LigerDistillationTrainer, name, calls)
        monkeypatch.setattr(integration, "LigerDistillationTrainer", cls)
        ours = run(tmp_path, "Distillation", True, SHORT)
    assert n_calls > 0 and len(calls) == 2 * n_calls
    assert_same(ours, stock, entries=3)


def test_attributes_of_a_users_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a served trainer have names that nobody else uses."""
    trl = importlib.import_module("trl")

    class Own(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        _depth = 7

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._heads = [1, 2]

    monkeypatch.setattr(trl, "SFTTrainer", Own)
    with patch_trl():
        trainer = make(tmp_path)
    trainer.train()
    assert is_served(trainer) and trainer._depth == 7 and trainer._heads == [1, 2]


def test_modules_that_import_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has TRL's function by name gets ours while a trainer is made, and TRL's again, also after an error."""
    theirs, seen = utils.add_fused_lm_head, []
    holder, later = ModuleType("holder"), ModuleType("later")
    holder.add_fused_lm_head = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "holder", holder)
    give = patch.Heads.give

    def noted(self: Any, model: Any, settings: Any) -> None:
        seen.append(holder.add_fused_lm_head)
        later.add_fused_lm_head = utils.add_fused_lm_head  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "later", later)
        give(self, model, settings)

    monkeypatch.setattr(patch.Heads, "give", noted)
    build(tmp_path, "DPO", PATCHED)
    assert len(seen) == 2 and all(function is not theirs for function in seen)
    model = tiny.model()
    with pytest.raises(ValueError, match="cannot be the same object"):
        build(tmp_path, "DPO", PATCHED, model=model, ref_model=model)
    held = [m.add_fused_lm_head for m in [*sys.modules.values()] if "add_fused_lm_head" in getattr(m, "__dict__", {})]
    assert later in sys.modules.values() and all(function is theirs for function in held)


def test_a_second_step_of_a_loop_looks_through_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own calls `training_step`, which swaps functions each time; there are thousands of modules."""
    theirs, looks = utils.selective_log_softmax, []

    class Watched(ModuleType):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            looks.append(self)
            return {}

    monkeypatch.setitem(sys.modules, "watched", Watched("watched"))
    trainer = build(tmp_path, "SFT", PATCHED)
    looks.clear()
    for _ in range(2):
        with trainer.heads_set():
            assert utils.selective_log_softmax is not theirs
        assert utils.selective_log_softmax is theirs
    assert len(looks) == 1


def test_modules_of_trl_that_are_imported_between_steps_are_served(tmp_path: Path) -> None:
    """The functions of a trainer that was imported while a loop of another one's was open are ours in a step."""
    trainer = build(tmp_path, "SFT", PATCHED)
    with trainer.heads_set():
        pass
    late = ModuleType("late")
    theirs = late.selective_log_softmax = utils.selective_log_softmax  # type: ignore[attr-defined]
    sys.modules["late"] = late
    try:
        with trainer.heads_set():
            assert late.selective_log_softmax is not theirs
        assert late.selective_log_softmax is theirs
    finally:
        del sys.modules["late"]


def test_a_teacher_that_trains_gets_its_gradient(tmp_path: Path) -> None:
    """A fused divergence has none by the teacher, so TRL's function runs."""
    found = []
    for served in (False, True):
        trainer = build(tmp_path, "GKD", PATCHED if served else PLAIN)
        models = trainer.model.train(), trainer.teacher_model.train().requires_grad_()
        ids = torch.tensor([[3, 4, 5, 6]])
        with trainer.heads_set() if served else contextlib.nullcontext():
            student, teacher = (model(input_ids=ids).logits for model in models)
            trainer.generalized_jsd_loss(student, teacher, ids).backward()
        found.append([model.lm_head.weight.grad for model in models])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("before", [torch.log_softmax, lambda z, dim: z.tanh().tanh()])
def test_what_is_no_logits_goes_to_trls_function(tmp_path: Path, before: Any) -> None:
    """A loss of a user's may pass log-probabilities, or a curve that no loss can express."""
    found = []
    for served in (False, True):
        trainer = build(tmp_path, "SFT", PATCHED if served else PLAIN)
        batch = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
        with trainer.heads_set() if served else contextlib.nullcontext():
            logits = before(trainer.model.train()(**batch).logits, -1)
            found.append(utils.selective_log_softmax(logits, batch["input_ids"]).detach())
    torch.testing.assert_close(found[1], found[0])


def test_a_trainer_of_another_thread_keeps_trls_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread makes a served trainer, another one makes a trainer that is not served."""
    model, seen = tiny.model(), []
    give = patch.Heads.give

    def beside(self: Any, *args: Any) -> None:
        give(self, *args)
        thread = threading.Thread(target=lambda: seen.append(utils.add_fused_lm_head(model, 1.0)))
        thread.start()
        thread.join()

    monkeypatch.setattr(patch.Heads, "give", beside)
    build(tmp_path, "SFT", PATCHED)
    assert len(seen) == 1 and heads.newer_head(model) is not None


def test_a_model_that_nobody_else_keeps_is_freed() -> None:
    """The heads of a trainer do not keep a model that the trainer has replaced."""
    given = heads.Heads(heads.HeadSettings())
    model = tiny.model()
    given.set([model])
    given.settings_of(tiny.model())
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None and not given._records


def test_what_a_user_put_around_trls_head_stays() -> None:
    model = tiny.model()
    utils.add_fused_lm_head(model, 1.0)
    below = model.forward

    @functools.wraps(below)
    def around(*args: Any, **kwargs: Any) -> Any:
        return below(*args, **kwargs)

    model.forward = around
    heads._clear(model)
    assert vars(model)["forward"] is around
    model.forward = below
    heads._clear(model)
    assert heads.newer_head(model) is None


def test_what_runs_later_is_not_decorated() -> None:
    def generator() -> Any:
        yield

    async def coroutine() -> None:
        pass

    async def both() -> Any:
        yield

    for function in (generator, coroutine, both, functools.partial(generator)):
        with pytest.raises(TypeError, match="use `with patch_trl"):
            patch_trl()(function)


@pytest.mark.parametrize("name", ["DPO", "ORPO", "GKD"])
def test_a_model_is_left_as_it_was_found(tmp_path: Path, name: str) -> None:
    """After training, after an error in it, after a trainer that never trained; and it is served again afterwards."""
    models = {"model": tiny.model(), **beside(name)}
    before = {key: state_of(model) for key, model in models.items()}

    def left() -> bool:
        return all(state_of(model) == before[key] for key, model in models.items())

    with patch_trl():
        trainer = make(tmp_path, name, evaluate=True, **models)
        assert not left()
        trainer.train()
        assert left()
    trainer.evaluate()  # outside of the block: it was made inside
    assert left()
    batch = next(iter(trainer.get_train_dataloader()))
    with asked_logits() as asked:
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)).backward()
    assert not asked and not left()  # a loop of one's own has no end
    with patch_trl():
        second = make(tmp_path, name, **models)
    second.get_train_dataloader = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        second.train()
    assert left()
    with patch_trl():
        unused = make(tmp_path, name, **models)
    assert not left()
    del unused
    gc.collect()
    assert left()


def test_an_evaluation_has_the_precision_of_the_training(tmp_path: Path) -> None:
    """accelerate prepares the model once: its autocast is set aside with the head, and comes back with it."""
    losses = []
    for ours in (False, PATCHED):
        trainer = build(tmp_path, "SFT", ours, {**SHORT, "bf16": True, "learning_rate": 0.0}, evaluate=True)
        trainer.train()
        assert ("forward" in vars(trainer.model)) == (not ours)
        losses.append(trainer.evaluate()["eval_loss"])
    exact = build(tmp_path, "SFT", PATCHED, {**SHORT, "learning_rate": 0.0}, evaluate=True).evaluate()["eval_loss"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[1] != exact


@pytest.mark.parametrize("name", ["ORPO", "A2PO", "TPO", "SDPO"])
def test_kernels_of_trl_get_no_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On a GPU TRL computes log-probabilities of logits by a kernel, which would need real ones."""
    if not hasattr(utils, "is_triton_available"):
        pytest.skip("this TRL has no such kernel")
    monkeypatch.setattr(utils, "is_triton_available", lambda: True)
    monkeypatch.setattr(utils, "_supports_trl_loss_kernel", lambda *args: True)
    monkeypatch.setattr(utils, "_fused_logprob_entropy", lambda *args, **kwargs: pytest.fail("TRL's kernel ran"))
    run(tmp_path, name, PATCHED, SHORT)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "uld": ("GOLD", {"use_uld_loss": True}, "use_uld_loss=True of GOLDConfig makes GOLDTrainer read whole"),
    "top-k": ("SDFT", {"distillation_mode": "topk_logits", "distillation_topk": 5}, "distillation_mode='topk_logits'"),
    "top-1": ("IWOPD", {"distillation_objective": "jsd", "loss_top_k": 1}, "loss_top_k=1 of IWOPDConfig"),
    "liger": ("SFT", {"use_liger_kernel": True}, "use_liger_kernel=True activates the package Liger-Kernel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_served(tmp_path: Path, case: str) -> None:
    """They are refused when the trainer is made, and its models stay as they were."""
    name, config, message = REFUSED[case]
    models = {"model": tiny.model(), **beside(name)}
    before = [state_of(model) for model in models.values() if isinstance(model, nn.Module)]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, name, PATCHED, config, **models)
    assert [state_of(model) for model in models.values() if isinstance(model, nn.Module)] == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logits_budget": "lots"}, "logits_budget"),
        ({"share_prefix": "on"}, "share_prefix must be 'auto', True or"),
        ({"logit_budget": "1MiB"}, "patch_trl has no argument 'logit_budget': did you mean 'logits_budget'"),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], message: str) -> None:
    before = state_of_trl()
    with pytest.raises((TypeError, ValueError), match=message):
        patch_trl(**settings)
    assert all(x is before[key] for key, x in state_of_trl().items())


def test_imports(fresh_process: Any) -> None:
    """The package imports no framework, and the patch no trainer of TRL."""
    code = """
import sys, liger_chunked
assert not {"trl", "transformers"} & sys.modules.keys()
from liger_chunked.integrations.trl import patch_trl
with patch_trl():
    pass
assert not any(name.startswith(("trl.trainer.grpo", "trl.experimental.")) for name in sys.modules)
"""
    fresh_process.run(code)
    assert set(dir(integration)) >= {*(f"Liger{kind}Trainer" for kind in ("SFT", "DPO", "GRPO")), "patch_trl"}
    with pytest.raises(AttributeError, match="LigerPPOTrainer"):
        _ = integration.LigerPPOTrainer
