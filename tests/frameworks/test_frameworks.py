"""Adapters of training frameworks: their interfaces, and values and gradients against eager code on whole logits.

A comment above each interface names the version and file in which it was read. The interface of an installed package is
compared too. torchtitan is replaced by a stub where it is not installed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fresh_process import FreshProcesses
from table import relative_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearKLDivLoss, linear_token_stats
from liger_chunked.integrations.frameworks import cut_cross_entropy, megatron, nemo_rl, skyrl, verl

WORLD = 2
B, S, H, V = 3, 10, 8, 24  # V: rows of the head, the same on all ranks
IGNORE = -100
BOUND = 1e-9  # float64: a few thousand additions round to less

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


class Case(NamedTuple):
    """Whole tensors, the same on all ranks."""

    weight: Tensor
    hidden: Tensor  # (B, S, H)
    target: Tensor  # (B, S), some ignored
    upstream: Tensor  # (2, B, S), gradients of logps and entropy
    own: slice  # this rank's rows of weight
    part: slice  # this rank's part of the sequence


def make_case(rank: int = 0, world: int = 1) -> Case:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target = torch.randint(V, (B, S), generator=generator)
    target[0, :4] = target[2, 7:] = IGNORE
    own, part = (slice(rank * n // world, (rank + 1) * n // world) for n in (V, S))
    return Case(randn(V, H), randn(B, S, H), target, randn(2, B, S), own, part)


class Expected(NamedTuple):
    logps: Tensor
    entropy: Tensor
    weight_grad: Tensor
    hidden_grad: Tensor


def eager(case: Case, *, temperature: float = 1.0, vocab: int = V, upstream: Tensor | None = None) -> Expected:
    """Statistics at the tokens that count, and the gradients of `(upstream * statistics).sum()`."""
    weight, hidden = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
    z = (hidden @ weight.T / temperature)[..., :vocab].log_softmax(-1)
    counts = case.target != IGNORE
    logps = z.gather(-1, case.target.clamp(min=0)[..., None])[..., 0].where(counts, 0.0)
    entropy = -(z.exp() * z).sum(-1).where(counts, 0.0)
    g = case.upstream if upstream is None else upstream
    grads = torch.autograd.grad((g * torch.stack([logps, entropy])).sum(), (weight, hidden))
    return Expected(logps.detach(), entropy.detach(), *grads)


def only(case: Case, index: int) -> Tensor:
    """An upstream gradient of one statistic: 0 is logps, 1 is the entropy."""
    return case.upstream * torch.eye(2, dtype=torch.float64)[index].view(2, 1, 1)


def check(found: Tensor | None, expected: Tensor, name: str) -> None:
    assert found is not None and found.shape == expected.shape, name
    assert relative_error(found.detach(), expected) < BOUND, name


def summed(x: Tensor | None) -> Tensor:
    """Add the ranks' shares, as the framework does."""
    assert x is not None
    x = x.clone()
    dist.all_reduce(x)
    return x


def names(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "ctx")]


def installed(module: str) -> ModuleType | None:
    """Import a framework's module; None where it, or something that it needs, is missing."""
    try:
        return importlib.import_module(module)
    except Exception:
        return None


def initialize(rank: int, folder: str) -> dist.ProcessGroup:
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run(worker: Callable[..., None]) -> Callable[[Path, FreshProcesses], None]:
    """Return a test that runs `worker(rank, folder)` in two processes."""

    def test(tmp_path: Path, fresh_process: FreshProcesses) -> None:
        fresh_process.spawn(worker, WORLD, str(tmp_path))

    return needs_gloo(test)


# verl 0.9.1, verl/utils/kernel/linear_cross_entropy.py (LinearCrossEntropy.apply) and kernels.py: logps and entropy are
# (N,) float32, dX is not reduced, a rank's ids start at rank * rows. verl/utils/experimental/torch_functional.py:
# FusedLinearForPPO, constructed with `impl_backend` in verl/models/transformers/dense_common.py.
def verl_worker(rank: int, folder: str) -> None:
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    for temperature in (1.0, 0.7):
        expected = eager(case, temperature=temperature)
        # Megatron's layout: (s, b, h) hidden states, (s, b) labels.
        weight = case.weight[case.own].clone().requires_grad_()
        hidden = case.hidden.transpose(0, 1).contiguous().requires_grad_()
        found = verl.linear_cross_entropy(hidden, weight, case.target.T, temperature, "none", group)
        for x, e in zip(found, expected, strict=False):
            check(x, e.T.reshape(-1), "statistics")
        torch.autograd.backward(found, [g.T.reshape(-1) for g in case.upstream])
        check(weight.grad, expected.weight_grad[case.own], "dW")
        check(summed(hidden.grad), expected.hidden_grad.transpose(0, 1), "dX")
    with torch.no_grad():
        logps, _ = verl.linear_cross_entropy(hidden, weight, case.target.T, 0.7, "none", group)
        assert not logps.requires_grad
        check(logps, found[0], "no_grad")
    low = verl.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), case.target.T, 1.0, "none", group)
    assert all(x.dtype == torch.float32 for x in low)
    with pytest.raises(ValueError, match="reduction must be 'none', got 'mean'"):
        verl.linear_cross_entropy(hidden, weight, case.target.T, 1.0, "mean", group)
    dist.destroy_process_group()


test_verl_megatron = run(verl_worker)


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_verl_fsdp(chunk_size: int | None) -> None:
    case = make_case()
    module = verl.FusedLinearForPPO(chunk_size=chunk_size, impl_backend="torch")
    for temperature, rank in ((1.0, 3), (0.7, 2)):
        expected = eager(case, temperature=temperature)
        weight, hidden = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
        shape = (B, S) if rank == 3 else (B * S,)
        found = module(hidden.view(*shape, H), weight, case.target.view(shape).int(), temperature=temperature)
        for x, e in zip(found, expected, strict=False):
            check(x, e.view(shape), "statistics")
        torch.autograd.backward(found, [g.view(shape) for g in case.upstream])
        check(weight.grad, expected.weight_grad, "dW")
        check(hidden.grad, expected.hidden_grad, "dX")
    logps, _ = module(case.hidden.bfloat16(), case.weight.bfloat16(), case.target)
    assert logps.dtype == torch.float32
    with pytest.raises(ValueError, match="chunk_size must be a positive number of tokens or None, got 0"):
        verl.FusedLinearForPPO(chunk_size=0)(case.hidden, case.weight, case.target)


def test_verl_interfaces() -> None:
    call = ["hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"]
    assert names(verl.linear_cross_entropy) == call
    assert names(verl.FusedLinearForPPO) == ["chunk_size", "impl_backend"]
    assert names(verl.FusedLinearForPPO.forward) == ["hidden_states", "vocab_weights", "input_ids", "temperature"]
    if theirs := installed("verl.utils.kernel.linear_cross_entropy"):
        assert names(theirs.LinearCrossEntropy.forward) == call
    if theirs := installed("verl.utils.experimental.torch_functional"):
        for ours in ("__init__", "forward"):
            assert names(getattr(theirs.FusedLinearForPPO, ours)) == names(getattr(verl.FusedLinearForPPO, ours))
    if theirs := installed("verl.models.mcore.model_forward_fused"):
        given = names(theirs.fused_output_processor)
        assert set(given) - {"_ignored"} <= POSTPROCESS and "context" in given
        assert names(theirs.preprocess_thd_engine)[:3] == ["input_ids", "pre_process", "need_roll"]
    if theirs := installed("verl.workers.engine.megatron.transformer_impl"):
        assert names(theirs.MegatronEngineWithLMHead.prepare_model_inputs) == ["batch"]
        assert names(theirs.MegatronEngineWithLMHead.prepare_model_outputs) == ["output", "data"]
    if theirs := installed("verl.workers.engine.fsdp.transformer_impl"):
        for hook in ("prepare_model_inputs", "prepare_model_outputs"):
            assert names(getattr(theirs.FSDPEngineWithLMHead, hook)) == names(getattr(VerlEngine, hook))


# verl 0.9.1: verl/trainer/distillation/losses.py registers losses, and distillation_ppo_loss reads those of tokens from
# model_output; verl/workers/engine/fsdp/transformer_impl.py calls prepare_model_inputs, the model, and then
# prepare_model_outputs, which reads `fused_linear_aux` of a fused head.
class VerlEngine:
    """The parts of FSDPEngineWithLMHead that pass divergences on."""

    use_ulysses_sp = False

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        return {"hidden": micro_batch["hidden"].values()[None]}, {}

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        aux = getattr(output, "fused_linear_aux", None)
        found = {} if aux is None else {name: x.squeeze(0) for name, x in vars(aux).items()}
        return found | {"log_probs": output.log_probs, "entropy": output.entropy}


def verl_distillation(registry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Modules of verl that register a distillation loss, in `registry`."""
    return {
        "verl.trainer.distillation.losses": {
            "DistillationLossSettings": SimpleNamespace,
            "register_distillation_loss": lambda given: lambda f: registry.setdefault(given.names[0], (given, f))[1],
        },
        "verl.utils.tensordict_utils": {"get_non_tensor_data": lambda data, key, default: data.get(key, default)},
        "verl.workers.utils.padding": {"no_padding_2_padding": lambda x, data: x},
    }


def put_modules(patch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Put modules with these members, and their parents, where `import` finds them."""
    for name, members in modules.items():
        for end in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:end])
            patch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
        patch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module, raising=False)
    return {name: sys.modules[name] for name in modules}


@pytest.fixture
def verl_stub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of verl with what `distill_from_hidden_states` imports."""
    registry: dict[str, Any] = {}
    modules = put_modules(monkeypatch, verl_distillation(registry) | {
        "verl.utils.experimental.torch_functional": {"FusedLinearForPPO": None},
        "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": type("Engine", (VerlEngine,), {})},
    })  # fmt: skip
    return SimpleNamespace(
        registry=registry, functional=modules["verl.utils.experimental.torch_functional"],
        Engine=sys.modules["verl.workers.engine.fsdp.transformer_impl"].FSDPEngineWithLMHead,
    )  # fmt: skip


@pytest.mark.parametrize("only", [True, False])
def test_verl_distillation(only: bool, verl_stub: SimpleNamespace) -> None:
    """Divergences of the positions that predict a response, from the head to the loss, with gradients."""
    loaded: list[int] = []
    case, teacher_weight = make_case(), torch.randn(V, 5, dtype=torch.float64)
    verl.distill_from_hidden_states(lambda: loaded.append(1) or teacher_weight, loss_mode="hidden")  # type: ignore[func-returns-value]
    settings, loss = verl_stub.registry["hidden"]
    assert settings.use_topk

    def nested(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 6, 10]))

    hidden, teacher = case.hidden[0].clone().requires_grad_(), torch.randn(S, 5, dtype=torch.float64)
    data = {
        "input_ids": nested(case.target[0].clamp(min=0)), "hidden": nested(hidden),
        "teacher_hidden_states": nested(teacher), "responses": torch.zeros(2, 3),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),  # responses of 3 and 1 tokens
        "distillation_use_topk": True, "distillation_only": only, "use_fused_kernels": True,
    }  # fmt: skip
    read = torch.tensor([False, False, True, True, True, False, False, False, True, False])
    engine, weight = verl_stub.Engine(), case.weight.clone().requires_grad_()

    def step(data: dict[str, Any]) -> Any:
        inputs, args = engine.prepare_model_inputs(data)
        logps, entropy = verl_stub.functional.FusedLinearForPPO()(inputs["hidden"], weight, case.target[:1], 0.7)
        output = SimpleNamespace(log_probs=logps, entropy=entropy)
        return engine.prepare_model_outputs(output, args, data, None)

    for _ in range(2):
        found = step(data)
    assert len(loaded) == 1
    log_p, log_q = (hidden @ weight.T / 0.7).log_softmax(-1), (teacher @ teacher_weight.T).log_softmax(-1)
    expected = (log_q.exp() * (log_q - log_p)).sum(-1).where(read, 0.0)
    losses, _ = loss(None, None, found, data)
    check(losses, expected.detach(), "KL")
    ours, exact = (torch.autograd.grad((x * case.upstream[0, 0]).sum(), (weight, hidden)) for x in (losses, expected))
    for a, b in zip(ours, exact, strict=True):
        check(a, b, "gradient")
    assert (found["log_probs"] is None) == only and (found["entropy"] is None) == only
    if not only:
        check(found["log_probs"][0], eager(case, temperature=0.7).logps[0], "logps")
    plain = step(data | {"distillation_use_topk": False})
    assert "distillation_losses" not in plain and plain["log_probs"].shape == (1, S)
    with pytest.raises(ValueError, match="loss_mode='hidden' needs teacher_hidden_states"):
        loss(None, None, plain, data)
    with pytest.raises(ValueError, match="teacher_hidden_states need use_fused_kernels=True"):
        step(data | {"use_fused_kernels": False})
    engine.prepare_model_inputs(data)
    with pytest.raises(ValueError, match="did not call FusedLinearForPPO"):  # but verl's function in Triton
        engine.prepare_model_outputs(SimpleNamespace(log_probs=torch.zeros(1, S), entropy=None), {}, data, None)
    with pytest.raises(ValueError, match="with the 10 tokens of input_ids"):
        step(data | {"teacher_hidden_states": teacher})


def test_verl_distillation_under_ulysses(verl_stub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank computes the divergences of its part of the padded tokens: together, those of one rank."""
    case, world, here = make_case(), 3, SimpleNamespace(rank=0)

    def part(x: Tensor, dim: int) -> Tensor:  # as verl 0.9.1 pads and cuts
        padding = x.new_zeros(*x.shape[:dim], -x.shape[dim] % world, *x.shape[dim + 1 :])
        return torch.cat([x, padding], dim).tensor_split(world, dim)[here.rank]

    ulysses = ModuleType("verl.utils.ulysses")
    ulysses.slice_input_tensor = part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ulysses.__name__, ulysses)
    teacher_weight, teacher = torch.randn(V, 5, dtype=torch.float64), torch.randn(S, 5, dtype=torch.float64)
    verl.distill_from_hidden_states(teacher_weight, loss_mode="hidden")
    offsets = torch.tensor([0, 6, 10])
    data = {
        "input_ids": torch.nested.nested_tensor_from_jagged(case.target[0].clamp(min=0), offsets),
        "hidden": torch.nested.nested_tensor_from_jagged(case.hidden[0], offsets),
        "teacher_hidden_states": torch.nested.nested_tensor_from_jagged(teacher, offsets),
        "responses": torch.zeros(2, 3), "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
        "distillation_use_topk": True, "distillation_only": True, "use_fused_kernels": True,
    }  # fmt: skip
    found = {}
    for is_split in (False, True):
        engine, losses = verl_stub.Engine(), []
        engine.use_ulysses_sp = is_split
        for rank in range(world if is_split else 1):
            here.rank = rank
            inputs, args = engine.prepare_model_inputs(data)
            hidden, target = inputs["hidden"], case.target[:1]
            if is_split:
                hidden, target = part(hidden, 1), part(target, 1)
            logps, entropy = verl_stub.functional.FusedLinearForPPO()(hidden, case.weight, target, 0.7)
            output = SimpleNamespace(log_probs=logps, entropy=entropy)
            losses.append(engine.prepare_model_outputs(output, args, data, None)["distillation_losses"])
        found[is_split] = torch.cat(losses)[:S]
    assert found[False].count_nonzero() == 4
    check(found[True], found[False], "parts")


# verl 0.9.1: verl/models/mcore/model_forward_fused.py packs the sequences of a nested tensor into one row, each padded
# for the tensor-parallel ranks, rolls the labels, calls the model with `fused_output_processor`, and unpacks its
# log_probs and entropy. verl/workers/engine/megatron/transformer_impl.py calls prepare_model_inputs before it, and
# prepare_model_outputs with what it returns.
def stub_verl_megatron() -> SimpleNamespace:
    """Put modules of verl in place, with what `verl_megatron` imports."""

    def preprocess_thd_engine(
        input_ids: Tensor, pre_process: bool = True, need_roll: bool = False, cp_layout: str = "zigzag"
    ) -> tuple[Tensor, Any, None]:
        parts = [nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % WORLD)) for x in input_ids.unbind()]
        packed = torch.cat(parts)[None]
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        return packed.roll(-1, 1) if need_roll else packed, starts, None

    def postprocess_thd_engine(output: Tensor, starts: Tensor, input_ids: Tensor) -> Tensor:
        lengths = input_ids.offsets().diff().tolist()
        parts = [output[0][a : a + n] for a, n in zip(starts.tolist(), lengths, strict=False)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    class Engine:
        engine_config = SimpleNamespace(use_fused_kernels=True)

        def prepare_model_inputs(self, batch: Any) -> dict[str, Any]:
            return {"input_ids": batch["input_ids"]}

        def prepare_model_outputs(self, output: Any, data: Any) -> Any:
            return output

        def forward_step(self, model: Any, batch: Any, temperature: float) -> Any:
            of_megatron, ids = patched["verl.models.mcore.model_forward_fused"], self.prepare_model_inputs(batch)
            packed, starts, _ = of_megatron.preprocess_thd_engine(ids["input_ids"], pre_process=True)
            labels, *_ = of_megatron.preprocess_thd_engine(
                ids["input_ids"].clone(), pre_process=True, need_roll=True, cp_layout="zigzag"
            )
            output_orig = model(
                input_ids=packed,
                labels=labels,
                output_processor=of_megatron.fused_output_processor,
                output_processor_context=SimpleNamespace(temperature=temperature),
            )
            output = {"log_probs": postprocess_thd_engine(output_orig.log_probs, starts, ids["input_ids"])}
            if batch["calculate_entropy"]:
                output["entropy"] = postprocess_thd_engine(output_orig.entropy, starts, ids["input_ids"])
            return self.prepare_model_outputs(output, batch)

    registry: dict[str, Any] = {}
    modules = verl_distillation(registry) | {
        "verl.utils.model": {"CausalLMOutputForPPO": SimpleNamespace},
        "verl.models.mcore.model_forward_fused": {
            "preprocess_thd_engine": preprocess_thd_engine,
            "fused_output_processor": None,
        },
        "verl.workers.engine.megatron.transformer_impl": {"MegatronEngineWithLMHead": Engine},
    }
    patched = put_modules(pytest.MonkeyPatch(), modules)
    return SimpleNamespace(registry=registry, Engine=Engine, fused=patched["verl.models.mcore.model_forward_fused"])


def verl_processor_worker(rank: int, folder: str) -> None:
    """Packed sequences of 7, 4 and 10 tokens, whose padded rows are 8, 4 and 10, on two tensor-parallel ranks."""
    group, case = initialize(rank, folder), make_case(rank, WORLD)
    of_verl = stub_verl_megatron()
    from liger_chunked.integrations.frameworks import verl_megatron

    offsets = torch.tensor([0, 7, 11, 21])
    ids = torch.nested.nested_tensor_from_jagged(case.target.clamp(min=0).flatten()[:21], offsets)
    places = torch.tensor([*range(7), *range(8, 22)])  # of the tokens among the 22 packed ones
    packed_hidden, teacher_states = case.hidden.flatten(0, 1)[:22], case.hidden.flatten(0, 1)[8:29, :5].contiguous()
    labels = of_verl.fused.preprocess_thd_engine(ids, need_roll=True)[0][0, places]
    data = {"input_ids": ids, "calculate_entropy": True}
    upstream = case.upstream.flatten(1)[:, :21]

    class Model:
        """The last layers of Megatron's GPTModel, which end in an output processor."""

        def __init__(self, sequence_parallel: bool, tied: bool, bias: bool = False, scale: float = 1.0) -> None:
            self.weight = case.weight[case.own].clone().requires_grad_()
            part = slice(rank * 11, rank * 11 + 11) if sequence_parallel else slice(None)
            self.hidden, self.part = packed_hidden[part, None].clone().requires_grad_(), part
            self.bias = torch.linspace(-1, 1, V, dtype=torch.float64)[case.own].requires_grad_() if bias else None
            self.layer = SimpleNamespace(weight=None if tied else self.weight, bias=self.bias, tp_group=group)
            self.layer.sequence_parallel, self.tied, self.scale = sequence_parallel, tied, scale

        def __call__(self, *, labels: Tensor, output_processor: Any, output_processor_context: Any, **_: Any) -> Any:
            arguments: dict[str, Any] = dict.fromkeys(POSTPROCESS)
            arguments |= {"hidden_states": self.hidden, "output_layer": self.layer, "labels": labels}
            arguments |= {"output_weight": self.weight if self.tied else None, "context": output_processor_context}
            arguments |= {"scale_logits": lambda z: self.scale * z, "config": SimpleNamespace()}
            return output_processor(**arguments)

    def exact(temperature: float, vocab: int = V, bias: bool = False) -> Any:
        """The parts of what this test expects: leaves, and whole log-probabilities of the 21 tokens."""
        w, x = case.weight.clone().requires_grad_(), packed_hidden.clone().requires_grad_()
        z = x @ w.T + (torch.linspace(-1, 1, V, dtype=torch.float64) if bias else 0.0)
        return w, x, (z / temperature)[places, :vocab].log_softmax(-1)

    def statistics(log_p: Tensor) -> tuple[Tensor, Tensor]:
        few = labels.clamp(max=log_p.shape[1] - 1)
        return log_p.gather(-1, few[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def check_grads(model: Model, w: Tensor, x: Tensor, message: str) -> None:
        assert w.grad is not None and x.grad is not None
        check(model.weight.grad, w.grad[case.own], f"dW {message}")
        check(model.hidden.grad, x.grad[model.part, None], f"dX {message}")

    engine = of_verl.Engine()
    for sequence_parallel, tied, temperature, vocab, bias, scale in (
        (False, False, 1.0, V, False, 1.0),
        (True, True, 0.7, V, False, 1.0),
        (True, False, 1.3, V - 3, False, 1.0),
        (False, True, 1.3, V, True, 1.0),
        (True, False, 1.0, V, False, 0.5),
    ):
        message = f"{sequence_parallel=} {tied=} {temperature=} {vocab=} {bias=} {scale=}"
        batch = data | {"input_ids": torch.nested.nested_tensor_from_jagged(ids.values().clamp(max=vocab - 1), offsets)}
        of_verl.fused.fused_output_processor = verl_megatron.FusedOutputProcessor(
            vocab_size=None if vocab == V else vocab, logits_budget="1KiB"
        )
        model = Model(sequence_parallel, tied, bias, scale)
        found = engine.forward_step(model, batch, temperature)
        w, x, log_p = exact(temperature / scale, vocab, bias)
        logps, entropy = statistics(log_p)
        check(found["log_probs"].values(), logps.detach(), message)
        check(found["entropy"].values(), entropy.detach(), message)
        assert torch.equal(found["log_probs"].offsets(), offsets)
        ours = torch.stack([found[name].values() for name in ("log_probs", "entropy")])
        (ours * upstream).sum().backward()
        (torch.stack([logps, entropy]) * upstream).sum().backward()
        check_grads(model, w, x, message)
    with torch.no_grad():
        assert not engine.forward_step(model, batch, 1.0)["log_probs"].requires_grad

    # Distillation: responses of 3, 2 and 4 tokens, which the positions before them predict.
    loaded: list[int] = []
    teacher_weight = torch.cat([case.weight[:, 3:], case.weight[:2, 3:]])  # of two more tokens
    response = torch.tensor([3, 2, 4])
    batch = data | {
        "teacher_hidden_states": torch.nested.nested_tensor_from_jagged(teacher_states, offsets),
        "responses": torch.nested.nested_tensor_from_jagged(torch.zeros(9), torch.tensor([0, 3, 5, 9])),
        "distillation_use_topk": True,
    }
    read = torch.zeros(21, dtype=torch.bool)
    for end, n in zip(offsets[1:].tolist(), response.tolist(), strict=True):
        read[end - 1 - n : end - 1] = True
    engine_hooks = [getattr(of_verl.Engine, name) for name in ("prepare_model_inputs", "prepare_model_outputs")]
    preprocess = of_verl.fused.preprocess_thd_engine
    few = ids.values().clamp(max=V - 4)  # of all distillations: one has no more ids
    batch["input_ids"] = torch.nested.nested_tensor_from_jagged(few, offsets)
    labels = labels.clamp(max=V - 4)
    for i, (reverse, vocab, sequence_parallel, only) in enumerate(
        ((False, V, True, True), (True, V - 3, True, False), (False, V, False, False), (True, V, False, True))
    ):
        verl_megatron.distill_from_hidden_states(
            lambda: loaded.append(1) or teacher_weight,  # type: ignore[func-returns-value]
            partial(LigerFusedLinearKLDivLoss, reverse=reverse),
            loss_mode=f"hidden{i}",
            vocab_size=None if vocab == V else vocab,
            logits_budget="1KiB",
        )
        settings, loss = of_verl.registry[f"hidden{i}"]
        assert settings.use_topk
        given = batch | {"distillation_only": only, "calculate_entropy": not only}
        engine = of_verl.Engine()
        for _ in range(2):
            model = Model(sequence_parallel, tied=not only, scale=0.5)
            found = engine.forward_step(model, given, 0.7)
        assert len(loaded) == i + 1
        w, x, log_p = exact(1.4, vocab)
        log_q = (teacher_states @ teacher_weight[:vocab].T).log_softmax(-1)
        terms = (log_p.exp() * (log_p - log_q)) if reverse else (log_q.exp() * (log_q - log_p))
        expected = [terms.sum(-1).where(read, 0.0)]
        losses, _ = loss(None, None, found, given)
        assert losses.is_nested and torch.equal(losses.offsets(), offsets)
        ours = [losses.values()]
        assert ("log_probs" in found, "entropy" in found) == (not only, not only)
        if not only:
            expected += statistics(log_p)
            ours += [found["log_probs"].values(), found["entropy"].values()]
        weights = [*upstream, upstream[0].flip(0)]
        for mine, value in zip(ours, expected, strict=True):
            check(mine, value.detach(), f"distillation {i}")
        sum((mine * g).sum() for mine, g in zip(ours, weights, strict=False)).backward()  # type: ignore[union-attr]
        sum((value * g).sum() for value, g in zip(expected, weights, strict=False)).backward()  # type: ignore[union-attr]
        check_grads(model, w, x, f"distillation {i}")
        undistilled = given | {"distillation_use_topk": False, "calculate_entropy": True}
        plain = engine.forward_step(Model(sequence_parallel, True), undistilled, 0.7)
        assert set(plain) == {"log_probs", "entropy"} and plain["log_probs"].dim() == 2
        with pytest.raises(ValueError, match=f"loss_mode='hidden{i}' needs teacher_hidden_states"):
            loss(None, None, plain, data)
        if i < 3:  # the next one is set in the place of verl's, not of this one
            for name, hook in zip(("prepare_model_inputs", "prepare_model_outputs"), engine_hooks, strict=True):
                setattr(of_verl.Engine, name, hook)
            of_verl.fused.preprocess_thd_engine = preprocess
    with pytest.raises(ValueError, match="teacher_hidden_states need use_fused_kernels=True"):
        engine.forward_step(model, batch | {"use_fused_kernels": False}, 0.7)
    of_verl.fused.fused_output_processor = verl_megatron.FusedOutputProcessor()
    with pytest.raises(ValueError, match=r"did not call verl's fused_output_processor.*Megatron-Core 0\.18"):
        engine.forward_step(model, batch, 0.7)
    for name, hook in zip(("prepare_model_inputs", "prepare_model_outputs"), engine_hooks, strict=True):
        setattr(of_verl.Engine, name, hook)
    verl_megatron.distill_from_hidden_states(teacher_weight[:-3], loss_mode="few")
    with pytest.raises(ValueError, match=r"a row for each of the student's 24, .* pass vocab_size"):
        engine.forward_step(model, batch, 0.7)
    dist.destroy_process_group()


test_verl_output_processor = run(verl_processor_worker)


# SkyRL 0.3.0, skyrl/backends/skyrl_train/distributed/megatron/model_utils.py: logps (B, S) float32, dX not reduced.
def skyrl_worker(rank: int, folder: str) -> None:
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    apply = skyrl.FusedLinearChunkedDistributedLogprob.apply
    expected = eager(case, upstream=only(case, 0))
    for chunk_size in (S, 3, None):
        weight, hidden = case.weight[case.own].clone().requires_grad_(), case.hidden.clone().requires_grad_()
        logps = apply(hidden, weight, case.target, case.own.start, case.own.stop, chunk_size, group, False)
        check(logps, expected.logps, "logps")
        logps.backward(case.upstream[0])
        check(weight.grad, expected.weight_grad[case.own], "dW")
        check(summed(hidden.grad), expected.hidden_grad, "dX")
    found = apply(hidden, weight, case.target, case.own.start, case.own.stop, None, group, True)
    assert not found.requires_grad
    check(found, expected.logps, "inference_only")
    # The hidden states take the weight's dtype, and their gradient keeps their own.
    low = hidden.detach().bfloat16().requires_grad_()
    found = apply(low, weight.detach().float(), case.target, case.own.start, case.own.stop, None, group)
    found.sum().backward()
    assert found.dtype == torch.float32 and low.grad is not None and low.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"the vocabulary range must be \d+ to \d+, the rows .* got 1 to 13"):
        apply(hidden, weight, case.target, 1, 13, None, group)
    dist.destroy_process_group()


test_skyrl = run(skyrl_worker)


def test_skyrl_interface() -> None:
    call = ["hidden", "weight", "target", "vocab_start_index", "vocab_end_index", "chunk_size", "tp_group"]
    assert names(skyrl.FusedLinearChunkedDistributedLogprob.apply) == [*call, "inference_only"]
    if theirs := installed("skyrl.backends.skyrl_train.distributed.megatron.model_utils"):
        assert names(theirs.FusedLinearChunkedDistributedLogprob.forward) == [*call, "inference_only"]


# NeMo-RL, commit 7ea279a of 2026-08-22, nemo_rl/distributed/model_utils.py: hidden states (S / ranks, B, H), logps
# (B, S) float32, dX (S / ranks, B, H) summed over the ranks.
def nemo_rl_worker(rank: int, folder: str) -> None:
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    apply = nemo_rl.ChunkedDistributedHiddenStatesToLogprobs.apply
    expected = eager(case, upstream=only(case, 0))
    whole = case.hidden.transpose(0, 1)
    for chunk_size in (4, None):
        weight = case.weight[case.own].clone().requires_grad_()
        hidden = whole[case.part].clone().requires_grad_()
        logps = apply(hidden, case.target, weight, case.own.start, case.own.stop, chunk_size, group, False)
        check(logps, expected.logps, "logps")
        logps.backward(case.upstream[0])
        check(weight.grad, expected.weight_grad[case.own], "dW")
        check(hidden.grad, expected.hidden_grad.transpose(0, 1)[case.part], "dX")
    found = apply(hidden, case.target, weight, case.own.start, case.own.stop, None, group, inference_only=True)
    assert not found.requires_grad
    check(found, expected.logps, "inference_only")
    dist.destroy_process_group()


test_nemo_rl = run(nemo_rl_worker)


# NeMo-RL, nemo_rl/algorithms/loss/loss_functions.py: DistillationLossFn, with a top-k of the whole vocabulary.
def kl_of_nemo_rl(log_p: Tensor, log_q: Tensor, kl_type: str, weight: float) -> Tensor:
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    return {"forward": forward, "reverse": reverse, "mixed": weight * forward + (1.0 - weight) * reverse}[kl_type]


def nemo_rl_kl_worker(rank: int, folder: str) -> None:
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    apply = nemo_rl.ChunkedDistributedHiddenStatesToKL.apply
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(B, S, 5, generator=generator, dtype=torch.float64)
    teacher_weight = torch.randn(V, 5, generator=generator, dtype=torch.float64)
    whole, rows = case.hidden.transpose(0, 1), (case.own.start, case.own.stop)
    for kl_type, chunk_size, mask in (("forward", 4, None), ("reverse", None, case.target >= 0), ("mixed", None, None)):
        w, x = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
        log_p, log_q = (x @ w.T / 0.7).log_softmax(-1), (teacher @ teacher_weight.T).log_softmax(-1)
        expected = kl_of_nemo_rl(log_p, log_q, kl_type, 0.3)
        expected = expected if mask is None else expected.where(mask, 0.0)
        exact = torch.autograd.grad((expected * case.upstream[0]).sum(), (w, x))
        weight, hidden = case.weight[case.own].clone().requires_grad_(), whole[case.part].clone().requires_grad_()
        found = apply(
            hidden, weight, teacher, teacher_weight[case.own], *rows, chunk_size, group, mask=mask, kl_type=kl_type,
            mixed_kl_weight=0.3, temperature=0.7,
        )  # fmt: skip
        check(found, expected.detach(), kl_type)
        found.backward(case.upstream[0])
        check(weight.grad, exact[0][case.own], "dW")
        check(hidden.grad, exact[1].transpose(0, 1)[case.part], "dX")
    assert not apply(hidden, weight, teacher, teacher_weight[case.own], *rows, None, group, True).requires_grad
    with pytest.raises(ValueError, match=r"kl_type must be one of .*'js'"):
        apply(hidden, weight, teacher, teacher_weight[case.own], *rows, None, group, kl_type="js")
    with pytest.raises(ValueError, match=f"must have the {S} positions of all ranks"):
        apply(hidden, weight, teacher[:, case.part], teacher_weight[case.own], *rows, None, group)
    dist.destroy_process_group()


test_nemo_rl_kl = run(nemo_rl_kl_worker)


def test_nemo_rl_interface() -> None:
    call = ["tensor_parallel_hidden_states", "target", "output_weight_layer", "vocab_start_index", "vocab_end_index"]
    call += ["chunk_size", "tp_group", "inference_only"]
    assert names(nemo_rl.ChunkedDistributedHiddenStatesToLogprobs.apply) == call
    if theirs := installed("nemo_rl.distributed.model_utils"):
        assert names(theirs.ChunkedDistributedHiddenStatesToLogprobs.forward) == call


# Megatron-Core 0.19.2, megatron/core/models/gpt/gpt_model.py (GPTModel._postprocess): hidden states (s, b, h), the
# rank's part of s with sequence parallelism; labels and loss (b, s), shifted already; a padded row is in the softmax.
# megatron/core/tensor_parallel/layers.py (ColumnParallelLinear): the whole dX is summed over the ranks.
POSTPROCESS = {
    *("hidden_states", "output_layer", "output_weight", "labels", "loss_mask", "input_ids", "position_ids"),
    *("attention_mask", "decoder_input", "inference_context", "packed_seq_params", "runtime_gather_output", "context"),
    *("compute_language_model_loss", "scale_logits", "config"),
}


def megatron_worker(rank: int, folder: str) -> None:
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    mask = torch.ones(B, S)
    mask[1, 2:5] = 0.0
    masked = case._replace(target=case.target.masked_fill(mask == 0, IGNORE))
    whole = case.hidden.transpose(0, 1)

    def call(processor: megatron.OutputProcessor, sequence_parallel: bool, tied: bool, **given: Any) -> Any:
        weight = case.weight[case.own].clone().requires_grad_()
        hidden = (whole[case.part] if sequence_parallel else whole).clone().requires_grad_()
        layer = SimpleNamespace(
            weight=None if tied else weight, bias=None, tp_group=group, sequence_parallel=sequence_parallel
        )
        arguments: dict[str, Any] = dict.fromkeys(POSTPROCESS)
        arguments |= {"hidden_states": hidden, "output_layer": layer, "output_weight": weight if tied else None}
        arguments |= {"labels": case.target, "loss_mask": mask, "scale_logits": lambda z: z, **given}
        return processor(**arguments), weight, hidden

    def check_grads(weight: Tensor, hidden: Tensor, expected: Expected, sequence_parallel: bool) -> None:
        grad = expected.hidden_grad.transpose(0, 1)
        check(weight.grad, expected.weight_grad[case.own], "dW")
        check(hidden.grad, grad[case.part] if sequence_parallel else grad, "dX")

    for sequence_parallel, tied in ((False, False), (True, True)):
        # The cross entropy of each token, with MuP's multiplier: 1 / 0.5 is a temperature.
        expected = eager(masked, temperature=2.0, upstream=only(case, 0))
        losses, weight, hidden = call(
            megatron.OutputProcessor(), sequence_parallel, tied, scale_logits=lambda z: 0.5 * z
        )
        check(losses, -expected.logps, "loss")
        losses.backward(-case.upstream[0])
        check_grads(weight, hidden, expected, sequence_parallel)

        # Statistics, at a temperature, without the rows of padding.
        few = masked._replace(target=masked.target.clamp(max=V - 4))
        expected = eager(few, temperature=0.7, vocab=V - 3)
        processor = megatron.OutputProcessor(linear_token_stats, vocab_size=V - 3)
        context = {"outputs": ("logps", "entropy"), "temperature": 0.7}
        stats, weight, hidden = call(processor, sequence_parallel, tied, context=context, labels=few.target)
        check(stats.logps, expected.logps, "logps")
        check(stats.entropy, expected.entropy, "entropy")
        torch.autograd.backward([stats.logps, stats.entropy], list(case.upstream))
        check_grads(weight, hidden, expected, sequence_parallel)

    # A divergence for each token, of a teacher's hidden states.
    x, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    teacher = {"teacher_weight": case.weight.flip(1), "teacher_input": case.hidden.flip(0)}
    exact, _ = LigerFusedLinearKLDivLoss(w, x, **teacher, target=masked.target, reduction="none", reverse=True)
    (exact * case.upstream[0]).sum().backward()
    loss = LigerFusedLinearKLDivLoss(reduction="none", reverse=True)
    own_teacher = {"teacher_weight": teacher["teacher_weight"][case.own], "teacher_input": teacher["teacher_input"]}
    (found, _), weight, hidden = call(megatron.OutputProcessor(loss), False, False, context=own_teacher)
    check(found, exact.detach(), "KL")
    found.backward(case.upstream[0])
    assert w.grad is not None and x.grad is not None
    check(weight.grad, w.grad[case.own], "dW")
    check(hidden.grad, x.grad.transpose(0, 1), "dX")

    # A loss over sequences: two pairs of (b, s), chosen first.
    case = case._replace(hidden=torch.cat([case.hidden, case.hidden[:1].flip(1)]))
    case = case._replace(target=torch.cat([case.target, case.target[1:2]]))
    whole, mask = case.hidden.transpose(0, 1), torch.ones(B + 1, S)
    (loss, _), weight, hidden = call(
        megatron.OutputProcessor(partial(LigerFusedLinearDPOLoss, use_ref_model=False)), True, False
    )
    loss.backward()
    w, x = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
    exact, _ = LigerFusedLinearDPOLoss(w, x, case.target, use_ref_model=False)
    exact.backward()
    check(loss, exact.detach(), "dpo")
    assert w.grad is not None and x.grad is not None
    check(weight.grad, w.grad[case.own], "dW")
    check(hidden.grad, x.grad.transpose(0, 1)[case.part], "dX")

    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "labels must be given", {"labels": None}),
        (TypeError, "output_processor_context must be a dict of keywords or None, got float", {"context": 0.7}),
        (ValueError, "defer_embedding_wgrad_compute", {"config": SimpleNamespace(defer_embedding_wgrad_compute=True)}),
        (ValueError, "this rank's rows", {"output_layer": SimpleNamespace(gtp_remat_size=2)}),
    ]
    for error, message, given in refused:
        with pytest.raises(error, match=message):
            call(megatron.OutputProcessor(), False, False, **given)
    dist.destroy_process_group()


test_megatron = run(megatron_worker)


def megatron_model_worker(rank: int, folder: str) -> None:
    """A GPTModel of Megatron-Core: the same losses and gradients with the output processor as without."""
    initialize(rank, folder)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # torch's norm refuses sequence parallelism, whose ranks must sum the gradients of a norm. This test does not.
    make_norm = WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **options: Any) -> Any:
        return make_norm(cls, SimpleNamespace(**vars(config) | {"sequence_parallel": False}), *args, **options)

    # Megatron asks for a GPU in two places, for a buffer and for dropout.
    WrappedTorchNorm.__new__ = norm
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    case = make_case(rank, WORLD)
    # Sequence parallelism, a tied head, MuP's multiplier, depths of multi-token prediction.
    cases = ((False, False, False, 0), (True, True, False, 0), (True, False, True, 0), (False, False, True, 2))
    for sequence_parallel, tied, use_mup, depths in (*cases, (True, True, False, 2)):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            tensor_model_parallel_size=WORLD,
            use_cpu_initialization=True,
            sequence_parallel=sequence_parallel,
            params_dtype=torch.float64,
            pipeline_dtype=torch.float64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention_softmax_in_fp32=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            use_mup=use_mup,
            mup_base_hidden_size=8 if use_mup else None,
            mtp_num_layers=depths or None,
        )
        torch.manual_seed(0)
        spec = get_gpt_layer_local_spec()
        model = GPTModel(
            config,
            spec,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False) if depths else None,
            vocab_size=V,
            max_sequence_length=S,
            share_embeddings_and_output_weights=tied,
        ).double()
        ids = case.target.clamp(min=0)
        labels, mask = ids.roll(-1, 1), torch.ones(B, S)
        mask[:, -1] = mask[0, :4] = 0.0
        upstream = case.upstream[0] * mask
        causal = torch.ones(1, 1, S, S).triu(1).bool()

        def step(model: Any = model, given: Any = (ids, labels, mask, upstream, causal), **options: Any) -> Any:
            ids, labels, mask, upstream, causal = given
            positions = torch.arange(S).expand_as(ids)
            losses = model(ids, positions, causal, labels=labels, loss_mask=mask, **options)
            grads = torch.autograd.grad((losses * upstream).sum(), list(model.parameters()))
            tracked = [x.clone() for x in MTPLossLoggingHelper.tracker.values() if isinstance(x, Tensor)]
            MTPLossLoggingHelper.tracker.clear()
            return [losses * mask, *grads, *tracked]

        stock = step()
        assert (len(stock) > 1 + len(list(model.parameters()))) == bool(depths)
        with megatron.chunked_heads():
            ours = step(output_processor=megatron.OutputProcessor())
        # Megatron's softmax is in float32.
        for x, e in zip(ours, stock, strict=True):
            assert relative_error(x.detach(), e.detach()) < 1e-6, (sequence_parallel, tied, use_mup, depths)
    dist.destroy_process_group()


@needs_gloo
def test_megatron_model(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    found = installed("megatron.core.models.gpt.gpt_model")
    if found is None or "output_processor" not in names(found.GPTModel.forward):
        pytest.skip("no Megatron-Core of 0.18 or newer")
    fresh_process.spawn(megatron_model_worker, WORLD, str(tmp_path))


# Megatron-Core 0.18 to 0.19, megatron/core/transformer/multi_token_prediction.py (process_mtp_loss): the states of the
# main model and of each depth lie one behind the other in s. At each depth it calls
# `output_layer(hidden, weight=, runtime_gather_output=)`, scales the logits, shifts the labels by one more, and calls
# `compute_language_model_loss(labels, logits)` for (b, s) losses; since 0.19 `_compute_mtp_acceptance_counts` too.
def mtp_module(name: str) -> Any:
    module: Any = ModuleType(name)

    def of_logits(*_: Any) -> None:
        raise AssertionError("there are no logits")

    def process_mtp_loss(
        hidden_states: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        compute_language_model_loss: Any,
        config: Any,
        scale_logits_fn: Any,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for depth, hidden in enumerate(hidden_states.chunk(1 + config.mtp_num_layers)[1:], 1):
            logits = scale_logits_fn(output_layer(hidden, weight=output_weight, runtime_gather_output=None)[0])
            shifted, mask = rolled(labels, depth), rolled(loss_mask, depth)
            losses = compute_language_model_loss(shifted, logits) * mask
            gathers = output_layer.gather_output
            counts = module._compute_mtp_acceptance_counts(logits, shifted, mask, output_layer, gathers)
            found.append((losses, *counts))
        return found

    module.process_mtp_loss, module._compute_mtp_acceptance_counts = process_mtp_loss, of_logits
    return module


def rolled(x: Tensor, shift: int) -> Tensor:
    return nn.functional.pad(x[:, shift:], (0, shift))


def mtp_worker(rank: int, folder: str) -> None:
    """Two depths on a stub of Megatron-Core, whose own model `megatron_model_worker` runs."""
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    target, mask = case.target.clamp(max=V - 4), torch.ones(B, S)
    mask[1, 2:5] = 0.0
    states = [x.transpose(0, 1) for x in (case.hidden.flip(2), case.hidden, case.hidden.flip(0))]
    w, *xs = (x.clone().requires_grad_() for x in (case.weight, *states))
    exact = []
    for depth, x in enumerate(xs[1:], 1):
        labels, keep = rolled(target, depth), rolled(mask, depth)
        z = 0.5 * (x.transpose(0, 1) @ w.T)[..., : V - 3]
        losses = nn.functional.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(B, S)
        exact.append((losses * keep, ((z.argmax(-1) == labels) & keep.bool()).sum().float(), keep.sum()))
    torch.autograd.backward([losses for losses, *_ in exact], list(case.upstream))

    name = "megatron.core.transformer.multi_token_prediction"
    module, model, parent = mtp_module(name), ModuleType("a.model"), ModuleType("megatron.core.transformer")
    stock = model.process_mtp_loss = module.process_mtp_loss  # type: ignore[attr-defined]
    parent.multi_token_prediction = module  # type: ignore[attr-defined]
    for of_stub in (ModuleType("megatron"), ModuleType("megatron.core"), parent, module, model):
        sys.modules[of_stub.__name__] = of_stub
    for sequence_parallel, tied in ((False, False), (True, True)):
        weight = case.weight[case.own].clone().requires_grad_()
        # With sequence parallelism, a rank has its part of each depth.
        part = case.part if sequence_parallel else slice(None)
        local = torch.cat([x[part] for x in states]).requires_grad_()
        head = SimpleNamespace(weight=None if tied else weight, bias=None, tp_group=group, gather_output=False)
        head.sequence_parallel = sequence_parallel
        with megatron.chunked_heads(vocab_size=V - 3, logits_budget=8 * 5 * V):
            assert module.process_mtp_loss is model.process_mtp_loss is not stock
            found = model.process_mtp_loss(
                hidden_states=local,
                labels=target,
                loss_mask=mask,
                output_layer=head,
                output_weight=weight if tied else None,
                compute_language_model_loss=None,
                config=SimpleNamespace(mtp_num_layers=2),
                scale_logits_fn=lambda z: z * 0.5,
            )
        assert module.process_mtp_loss is model.process_mtp_loss is stock
        torch.autograd.backward([losses for losses, *_ in found], list(case.upstream))
        for ours, theirs in zip(found, exact, strict=True):
            for mine, value in zip(ours, theirs, strict=True):
                check(mine, value.detach(), "losses and counts")
        assert w.grad is not None and local.grad is not None
        check(weight.grad, w.grad[case.own], "dW")
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]
        check(local.grad, torch.cat([g[part] for g in grads]), "dX")
    dist.destroy_process_group()


test_megatron_mtp = run(mtp_worker)


def test_megatron_passes_these_arguments() -> None:
    parameters = inspect.signature(megatron.OutputProcessor.__call__).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= POSTPROCESS
    assert any(p.kind is p.VAR_KEYWORD for p in parameters)


# torchtitan 0.3.0, torchtitan/components/loss.py and trainer.py: Trainer calls `config.loss.build(compile_config=...)`,
# `set_lm_head` if the loss is a ChunkedLossWrapper, and `loss(pred, labels, global_valid_tokens, **inputs)`. Labels
# are shifted already, -100 is ignored. Under "spmd_types" (distributed/spmd_types.py) parameters are plain rows, and
# pred is R on "tp": its gradient is the rank's share.
class Module(ModuleType):
    """A stub of a framework's module."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        vars(self).update(contents)
        sys.modules[name] = self


def stub_torchtitan() -> None:
    """Put the few names that the adapter needs in the place of torchtitan."""
    backend, meshes = ["spmd_types"], []

    class BaseLoss(ABC):  # noqa: B024
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    class ChunkedLossWrapper(BaseLoss):
        def set_lm_head(self, lm_head: nn.Module) -> None:
            self.lm_head = lm_head

    @contextmanager
    def set_current_spmd_mesh(mesh: Any) -> Iterator[None]:
        meshes.append(mesh)
        yield
        meshes.pop()

    Module("spmd_types", local=nullcontext, no_typecheck=nullcontext, is_type_checking=lambda: False)
    for name in ("torchtitan", "torchtitan.components", "torchtitan.distributed"):
        Module(name)
    Module("torchtitan.components.loss", BaseLoss=BaseLoss, ChunkedLossWrapper=ChunkedLossWrapper)
    Module(
        "torchtitan.distributed.utils",
        get_spmd_backend=lambda: backend[0],
        set_spmd_backend=lambda name: backend.__setitem__(0, name),
    )
    Module(
        "torchtitan.distributed.spmd_types",
        current_spmd_mesh=lambda: meshes[-1] if meshes else None,
        set_current_spmd_mesh=set_current_spmd_mesh,
        spmd_mesh_size=lambda name: meshes[-1].size() if meshes else 1,
    )


class Waits(TorchDispatchMode):
    """Takes the path of a GPU, which may capture a graph, and collects the operations that its host would wait for."""

    def __init__(self, is_capturing: bool) -> None:
        super().__init__()
        self.is_capturing = is_capturing

    def __enter__(self) -> Waits:
        self.found: list[str] = []
        self.patch, tolist = pytest.MonkeyPatch(), Tensor.tolist
        self.patch.setattr("liger_chunked.engine.checks.is_on_gpu", lambda x: True)
        self.patch.setattr("liger_chunked.engine.checks.is_capturing", lambda: self.is_capturing)
        self.patch.setattr("liger_chunked.kernels.scale.on_host", lambda x: False)
        self.patch.setattr(Tensor, "tolist", lambda x: self.found.append("tolist") or tolist(x))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh"):
            self.found.append(name)
        return func(*args, **kwargs or {})


def titan_loss(**options: Any) -> Any:
    from liger_chunked.integrations.frameworks.torchtitan import FusedLinearCrossEntropyLoss

    return FusedLinearCrossEntropyLoss(FusedLinearCrossEntropyLoss.Config(**options), compile_config=None)


def titan_head(weight: Tensor) -> nn.Linear:
    head = nn.Linear(H, V, bias=False, dtype=torch.float64)
    head.weight = nn.Parameter(weight)
    return head


def torchtitan_worker(rank: int, folder: str) -> None:
    if installed("torchtitan.components.loss") is None:
        stub_torchtitan()
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    initialize(rank, folder)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    # One row less: the second rank has fewer rows than the first.
    case = make_case(rank, WORLD)
    case = case._replace(weight=case.weight[:-1], target=case.target.clamp(max=V - 2))
    ones = torch.zeros(2, B, S, dtype=torch.float64)
    ones[0] = -1 / 7  # the sum of the cross entropy over 7 tokens
    expected = eager(case, upstream=ones)
    value, valid = -expected.logps.sum() / 7, torch.tensor(7)

    # One rank without parallelism; and validation.
    loss, head = titan_loss(logits_budget="1KiB"), titan_head(case.weight.clone())
    with pytest.raises(ValueError, match="call set_lm_head"):
        loss(case.hidden, case.target)
    loss.set_lm_head(head)
    hidden = case.hidden.clone().requires_grad_()
    found, metrics = loss(hidden, case.target, valid, positions=torch.arange(S))
    check(found, value, "loss")
    assert metrics == {} and "forward" not in vars(head)
    found.backward()
    check(head.weight.grad, expected.weight_grad, "dW")
    check(hidden.grad, expected.hidden_grad, "dX")
    with torch.no_grad():
        check(loss(hidden, case.target)[0], 7 * value, "validation")
        # One row of packed sequences, as torchtitan's main branch passes it.
        check(loss(hidden.flatten(0, 1), case.target.flatten(), valid)[0], value, "packed")

    # Under a CUDA graph: nothing is read on the host, whatever is ignored.
    loss, head = titan_loss(logits_budget="1KiB", cuda_graphs=True), titan_head(case.weight.clone())
    loss.set_lm_head(head)
    hidden = case.hidden.clone().requires_grad_()
    with Waits(is_capturing=True) as waits:
        found, _ = loss(hidden, case.target, valid)
        found.backward()
    assert not waits.found, waits.found
    check(found, value, "loss")
    check(head.weight.grad, expected.weight_grad, "dW")
    check(hidden.grad, expected.hidden_grad, "dX")
    loss.config.cuda_graphs = False
    with Waits(is_capturing=False) as waits:
        loss(hidden, case.target, valid)
    assert waits.found
    head.forward = sharded = partial(head.forward)  # as torchtitan's Module.parallelize sets it
    loss(hidden, case.target)
    assert head.forward is sharded

    # Plain rows.
    with set_current_spmd_mesh(mesh):
        for cuda_graphs in (False, True):
            loss = titan_loss(global_vocab_size=V - 1, cuda_graphs=cuda_graphs)
            head = titan_head(case.weight[case.own].clone())
            loss.set_lm_head(head)
            hidden = case.hidden.clone().requires_grad_()
            found, _ = loss(hidden, case.target, valid)
            check(found, value, "loss")
            found.backward()
            check(head.weight.grad, expected.weight_grad[case.own], "dW")
            check(summed(hidden.grad), expected.hidden_grad, "dX")

    # DTensors.
    set_spmd_backend("partial_dtensor")
    loss, head = titan_loss(), titan_head(distribute_tensor(case.weight, mesh, [Shard(0)]))
    loss.set_lm_head(head)
    whole = distribute_tensor(case.hidden, mesh, [Replicate()]).requires_grad_()
    found, _ = loss(whole, case.target, valid)
    check(found, value, "loss")
    found.backward()
    assert isinstance(head.weight.grad, DTensor) and isinstance(whole.grad, DTensor)
    check(head.weight.grad.full_tensor(), expected.weight_grad, "dW")
    check(whole.grad.full_tensor(), expected.hidden_grad, "dX")
    set_spmd_backend("full_dtensor")
    with pytest.raises(ValueError, match="spmd_backend must be 'spmd_types' or 'partial_dtensor'"):
        loss(whole, case.target, valid)
    set_spmd_backend("spmd_types")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="cuda_graphs=True in the loss"):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        loss(SimpleNamespace(is_cuda=True), case.target, valid)

    # FSDP, which shards the norm and the head together: each rank has other sequences.
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(H, dtype=torch.float64)
            self.lm_head = titan_head(case.weight.clone())

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    model, single = Decoder(), Decoder()
    for reshard, cuda_graphs in ((False, False), (True, False), (True, True)):
        model = Decoder()
        fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        loss = titan_loss(cuda_graphs=cuda_graphs)
        unsharded: list[bool] = []
        unshard = model.lm_head.unshard
        vars(model.lm_head)["unshard"] = lambda: unsharded.append(True) or unshard()  # noqa: B023
        loss.set_lm_head(model.lm_head)
        sequences = slice(0, 2) if rank == 0 else slice(2, 3)
        for _ in range(2):  # the second step finds FSDP's hooks as the first left them
            model.zero_grad()
            found, _ = loss(model(case.hidden[sequences]), case.target[sequences], valid)
            found.backward()
        check(summed(found.detach()), eager_ce(single, case).detach() / 7, "loss")
        assert len(unsharded) == 2 * cuda_graphs  # a capture cannot wait for what FSDP's own gather leaves behind
        single.zero_grad()
        (eager_ce(single, case) / 7).backward()
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and q.grad is not None
            check(WORLD * p.grad.full_tensor(), q.grad, name)  # FSDP divides by the ranks
    dist.destroy_process_group()


def eager_ce(model: Any, case: Case) -> Tensor:
    """The sum of the cross entropy, with logits."""
    logits = model.lm_head(model.norm(case.hidden))
    return nn.functional.cross_entropy(logits.flatten(0, 1), case.target.flatten(), reduction="sum")


test_torchtitan = run(torchtitan_worker)


@contextmanager
def titan_in_place() -> Iterator[None]:
    """torchtitan, or its stub, which is gone afterwards."""
    before = {*sys.modules}
    if installed("torchtitan.components.loss") is None:
        stub_torchtitan()
    try:
        yield
    finally:
        for name in {*sys.modules} - before:
            if name.startswith(("torchtitan", "spmd_types", "liger_chunked.integrations.frameworks.torchtitan")):
                del sys.modules[name]


class TitanModel(nn.Module):
    """The end of a decoder, on one device or as shards of FSDP."""

    def __init__(self, vocab: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.to("cuda", dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def grads(self) -> list[Tensor]:
        found = [p.grad for p in self.parameters()]
        return [(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in found if g is not None]

    def clear(self) -> None:
        """Zero the gradients in place, as Trainer does with CUDA graphs."""
        for p in self.parameters():
            if p.grad is not None:
                p.grad.zero_()


def check_titan_capture(is_sharded: bool, logits_budget: int | None) -> None:
    """A capture of forward and backward, as torchtitan 0.3.0 makes it (distributed/cudagraph.py, CUDAGraphWrapper).

    One eager step on the stream of the capture, then the capture, into a shared pool, with errors of this thread alone.
    Its replays have other hidden states, labels, and numbers of ignored labels: the bits of an eager step.
    """
    vocab, width, shape = 1000, 128, (4, 96)
    torch.manual_seed(0)
    model = TitanModel(vocab, width, torch.bfloat16)
    twin = copy.deepcopy(model)
    losses = []
    for m in (model, twin):
        if is_sharded:
            mesh = init_device_mesh("cuda", (1,))
            fully_shard([m.norm, m.lm_head], mesh=mesh, reshard_after_forward=True)
            fully_shard(m, mesh=mesh)
        losses.append(titan_loss(cuda_graphs=True, logits_budget=logits_budget))
        losses[-1].set_lm_head(m.lm_head)

    def batch(seed: int, ignored: float) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(vocab, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < ignored] = IGNORE
        labels[0, 0] = 3  # one label is left
        x = torch.randn(*shape, width, generator=generator).bfloat16()
        return x.cuda(), labels.cuda(), (labels != IGNORE).sum().cuda()

    def step(m: TitanModel, loss: Any, x: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        found: Tensor
        found, _ = loss(m(x), labels, valid)
        found.backward()
        return found.detach()

    static = batch(0, 0.1)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(model, losses[0], *static)
    torch.cuda.current_stream().wait_stream(stream)
    model.clear()
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        captured = step(model, losses[0], *static)
    for seed, ignored in ((1, 0.0), (2, 0.9), (3, 0.3), (4, 1.0)):
        data = batch(seed, ignored)
        for kept, given in zip(static, data, strict=True):
            kept.copy_(given)
        model.clear()
        graph.replay()
        twin.zero_grad()
        eager = [step(twin, losses[1], *data), *twin.grads()]
        for ours, theirs in zip([captured.clone(), *model.grads()], eager, strict=True):
            assert torch.equal(ours, theirs), f"{seed=} {ours.shape}"


@pytest.mark.gpu
@pytest.mark.parametrize("logits_budget", [None, 1000 * 2 * 64])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_torchtitan_cuda_graph(is_sharded: bool, logits_budget: int | None) -> None:
    if is_sharded:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        with titan_in_place():
            check_titan_capture(is_sharded, logits_budget)
    finally:
        if is_sharded:
            dist.destroy_process_group()


# torchtune, commit bd2a0fc of 2026-04-23 (0.7.0), torchtune/modules/loss/loss_types.py, transformer.py, tied_linear.py
# and recipes/full_finetune_distributed.py: `set_model_output(model)` after FSDP, `loss(outputs, labels)` after the
# model's forward with `skip_output_layer`, a mean over tokens. FSDP wraps the root with reshard_after_forward=False.
def stub_torchtune() -> None:
    for name in ("torchtune", "torchtune.modules"):
        Module(name)
    Module("torchtune.modules.loss", SFTLoss=type("SFTLoss", (ABC,), {}))


class TunedDecoder(nn.Module):
    def __init__(self, weight: Tensor, tied: bool) -> None:
        super().__init__()
        self.skip_output_layer = False
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.tok_embeddings = nn.Embedding(V, H, dtype=torch.float64)
        self.tok_embeddings.weight = nn.Parameter(weight.clone())
        self.output: Any = SimpleNamespace(tied_module=self.tok_embeddings) if tied else titan_head(weight.clone())

    def forward(self, ids: Tensor) -> Tensor:
        assert self.skip_output_layer
        return self.norm(self.tok_embeddings(ids))


def torchtune_worker(rank: int, folder: str) -> None:
    stub_torchtune()
    from liger_chunked.integrations.frameworks.torchtune import FusedLinearCrossEntropyLoss

    initialize(rank, folder)
    mesh = init_device_mesh("cpu", (WORLD,))
    case = make_case(rank, WORLD)
    ids, own = case.target.roll(1, 1).clamp(min=0), slice(0, 2) if rank == 0 else slice(2, 3)
    with pytest.raises(ValueError, match="call set_model_output"):
        FusedLinearCrossEntropyLoss()(case.hidden, case.target)
    with pytest.raises(ValueError, match="tensor_parallel_dim must be 1"):
        FusedLinearCrossEntropyLoss().patch_tp_plan({})
    for tied, own_group in ((False, False), (False, True), (True, False)):
        single, model = TunedDecoder(case.weight, tied), TunedDecoder(case.weight, tied)
        single.skip_output_layer = True
        if own_group:
            fully_shard(model.output, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        loss = FusedLinearCrossEntropyLoss(logits_budget="1KiB").apply_compile_strategy()
        loss.set_model_output(model)
        for _ in range(2):  # the second step finds FSDP's hooks as the first left them
            model.zero_grad()
            found = loss(model(ids[own]), case.target[own])
            found.backward()
        weight = single.tok_embeddings.weight if tied else single.output.weight
        means = [
            nn.functional.cross_entropy((single(ids[part]) @ weight.T).flatten(0, 1), case.target[part].flatten())
            for part in (slice(0, 2), slice(2, 3))
        ]
        check(found, means[rank].detach(), "loss")
        (sum(means) / WORLD).backward()  # type: ignore[union-attr]
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and q.grad is not None
            check(p.grad.full_tensor(), q.grad, name)
    assert FusedLinearCrossEntropyLoss.forward.__code__.co_varnames[:3] == ("self", "outputs", "targets")
    dist.destroy_process_group()


test_torchtune = run(torchtune_worker)


# slime, commit 624b824 of 2026-08-21 (0.3.1), slime/backends/megatron_utils: model.py calls GPTModel without labels,
# and passes its float32 result (1, T, V) to `get_log_probs_and_entropy` of loss.py; actor.py imports that name too. A
# critic's output layer is an nn.Linear (model_provider.py).
def stub_slime() -> Any:
    class ColumnParallelLinear(nn.Linear):
        def forward(self, hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
            raise AssertionError("logits")

    class GPTModel(nn.Module):
        def __init__(self, head: nn.Module, hidden: Tensor) -> None:
            super().__init__()
            self.output_layer, self.hidden = head, hidden

        def forward(self, input_ids: Tensor, position_ids: Any = None, attention_mask: Any = None, **_: Any) -> Tensor:
            logits, _ = self.output_layer(self.hidden.transpose(0, 1), weight=None, runtime_gather_output=None)
            return logits.transpose(0, 1).contiguous()

    for name in ("megatron", "megatron.core.models", "slime", "slime.backends"):
        Module(name)
    state = Module("megatron.core.parallel_state", get_context_parallel_world_size=lambda: 1)
    Module("megatron.core", parallel_state=state)
    Module("megatron.core.models.gpt", GPTModel=GPTModel)
    Module("megatron.core.tensor_parallel", ColumnParallelLinear=ColumnParallelLinear)
    parts = {name: Module(f"slime.backends.megatron_utils.{name}") for name in ("actor", "loss")}
    parts["steps"] = Module("slime.backends.megatron_utils.model", get_batch=lambda batch: batch)
    Module("slime.backends.megatron_utils", **{"model" if n == "steps" else n: x for n, x in parts.items()})
    return SimpleNamespace(state=state, model=GPTModel, head=ColumnParallelLinear, **parts)


def slime_worker(rank: int, folder: str) -> None:
    stub = stub_slime()
    from liger_chunked.integrations.frameworks import slime

    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    args = SimpleNamespace(rollout_temperature=0.7)
    slime.install(args)
    for sequence_parallel in (False, True):
        # One row of three sequences: of the lengths 12, 10 and 8, with responses of 5, 10 - 1 and 3 tokens.
        totals, responses = [12, 10, 8], [5, 9, 3]
        tokens = case.target.clamp(min=0).view(1, -1)
        head = stub.head(H, V // WORLD, bias=False, dtype=torch.float64)
        head.weight = nn.Parameter(case.weight[case.own].clone())
        head.tp_group, head.sequence_parallel = group, sequence_parallel
        half = slice(rank * B * S // 2, (rank + 1) * B * S // 2) if sequence_parallel else slice(None)
        hidden = case.hidden.view(1, -1, H)[:, half].clone().requires_grad_()
        model = stub.model(head, hidden)
        given = {"args": args, "unconcat_tokens": list(tokens[0].split(totals)), "non_loss_data": True}
        given |= {"total_lengths": totals, "response_lengths": responses, "with_entropy": True}
        _, found = stub.loss.get_log_probs_and_entropy(model(tokens), **given)
        assert stub.actor.get_log_probs_and_entropy is stub.loss.get_log_probs_and_entropy
        assert "forward" not in vars(head)

        weight, whole = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
        log_p = (whole.view(-1, H) @ weight.T / 0.7).log_softmax(-1).split(totals)
        exact: list[list[Tensor]] = [[], []]
        for p, ids, n in zip(log_p, given["unconcat_tokens"], responses, strict=True):
            exact[0].append(p[-n - 1 : -1].gather(1, ids[-n:, None])[:, 0])
            exact[1].append(-(p.exp() * p).sum(-1)[-n - 1 : -1])
        for x, e in zip(found["log_probs"] + found["entropy"], exact[0] + exact[1], strict=True):
            check(x, e.detach(), "statistics")
        torch.cat(found["log_probs"] + found["entropy"]).square().sum().backward()
        torch.cat(exact[0] + exact[1]).square().sum().backward()
        assert weight.grad is not None and whole.grad is not None
        check(head.weight.grad, weight.grad[case.own], "dW")
        check(hidden.grad, whole.grad.view(1, -1, H)[:, half], "dX")

    # A replayed top-p: ids and offsets of each response, here an id beside the token, or none at a token.
    head.sequence_parallel, model.hidden = False, case.hidden.view(1, -1, H).clone().requires_grad_()
    spans = [
        [[] if i == 1 else [int(y), (int(y) + 1) % V] for i, y in enumerate(ids[-n:])]
        for ids, n in zip(given["unconcat_tokens"], responses, strict=True)
    ]
    replayed = {
        "rollout_top_p_token_ids": [torch.tensor([i for ids in x for i in ids]).int() for x in spans],
        "rollout_top_p_token_offsets": [torch.tensor([0, *map(len, x)]).cumsum(0).int() for x in spans],
    }
    lengths = {"total_lengths": totals, "response_lengths": responses}
    stub.steps.get_batch({"tokens": tokens, **lengths, **replayed})
    weight, whole = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
    z = (whole.view(-1, H) @ weight.T / 0.7).split(totals)
    exact = [[], []]
    for part, ids, n, kept in zip(z, given["unconcat_tokens"], responses, spans, strict=True):
        drops = torch.tensor([[bool(x) and i not in x for i in range(V)] for x in kept])
        p = part[-n - 1 : -1].masked_fill(drops, -torch.inf).log_softmax(-1)
        exact[0].append(p.gather(1, ids[-n:, None])[:, 0])
        exact[1].append(-(p.exp() * p.masked_fill(drops, 0.0)).sum(-1))
    head.weight.grad = None
    _, found = stub.loss.get_log_probs_and_entropy(model(tokens), **given, top_p_token_ids=[[1]])
    for x, e in zip(found["log_probs"] + found["entropy"], exact[0] + exact[1], strict=True):
        check(x, e.detach(), "statistics of kept ids")
    torch.cat(found["log_probs"] + found["entropy"]).square().sum().backward()
    torch.cat(exact[0] + exact[1]).square().sum().backward()
    assert weight.grad is not None and whole.grad is not None
    check(head.weight.grad, weight.grad[case.own], "dW")
    check(model.hidden.grad, whole.grad.view(1, -1, H), "dX")
    with pytest.raises(ValueError, match="the tokens of slime's get_batch"):
        model(tokens[:, :-1])
    stub.steps.get_batch({"tokens": tokens, **lengths})  # as for a reference, which slime does not replay

    class Critic(nn.Linear):
        def forward(self, hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
            return super().forward(hidden), None

    assert stub.model(Critic(H, 1, dtype=torch.float64), whole)(tokens).shape == (B, S, 1)
    with pytest.raises(ValueError, match="sequence_parallel must be off with rollout_top_p"):
        slime.install(SimpleNamespace(rollout_top_p=0.9, sequence_parallel=True))
    with pytest.raises(ValueError, match="enable_mtp_training must be off"):
        slime.install(SimpleNamespace(enable_mtp_training=True))
    stub.state.get_context_parallel_world_size = lambda: 2
    with pytest.raises(ValueError, match="context_parallel_size must be 1"):
        slime.install(args)
    dist.destroy_process_group()


test_slime = run(slime_worker)


# OpenRLHF 0.11.2, openrlhf/models/actor.py: log-probabilities and entropies at the temperature, both without the last
# position. The stub computes them from logits, as the original does. (In 0.11.0 the entropy was at temperature 1.)
def stub_openrlhf() -> Any:
    def unpad_and_slice_tensor(sequences: Tensor, attention_mask: Tensor, ring_attn_group: Any) -> Any:
        indices = attention_mask.flatten().nonzero()[:, 0]
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        rows = [x.flatten()[indices][None] for x in (sequences, positions, sequences.roll(-1, 1))]
        return *rows, 0, indices

    def gather_and_pad_tensor(x: Tensor, group: Any, padding: int, indices: Tensor, batch: int, length: int) -> Tensor:
        return x.new_zeros(batch * length).index_copy(0, indices, x[0]).view(batch, length)

    class Actor(nn.Module):
        def __init__(self, model: nn.Module, packing_samples: bool = False, temperature: float = 1.0) -> None:
            super().__init__()
            self.model, self.packing_samples, self.temperature = model, packing_samples, temperature

        def forward(
            self,
            sequences: Tensor,
            action_mask: Any = None,
            attention_mask: Any = None,
            return_output: bool = False,
            allgather_logits: bool = False,
            return_logprobs: bool = False,
            ring_attn_group: Any = None,
            packed_seq_lens: Any = None,
            return_entropy: bool = False,
            **mm_inputs: Any,
        ) -> Any:
            ids, mask, target = sequences, attention_mask, sequences.roll(-1, 1)
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
            if self.packing_samples:
                ids, positions, target, _, indices = unpad_and_slice_tensor(sequences, attention_mask, None)
                mask = None
            output = self.model(ids, attention_mask=mask, position_ids=positions)
            if action_mask is None and not return_logprobs:
                return output
            log_p = (output.logits / self.temperature).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            logps = log_p.gather(-1, target[..., None])[..., 0]
            if self.packing_samples:
                logps, entropy = (
                    gather_and_pad_tensor(x, None, 0, indices, *sequences.shape) for x in (logps, entropy)
                )
            output.entropy = entropy[:, :-1] if return_entropy else None
            logps = logps[:, :-1]
            if action_mask is not None:
                logps = logps[:, -action_mask.shape[1] :] * action_mask
            return (logps, output) if return_output else logps

    Module("openrlhf")
    actor = Module(
        "openrlhf.models.actor",
        Actor=Actor,
        unpad_and_slice_tensor=unpad_and_slice_tensor,
        gather_and_pad_tensor=gather_and_pad_tensor,
    )
    Module("openrlhf.models", actor=actor, Actor=Actor)
    return Actor


@pytest.fixture
def openrlhf() -> Iterator[Any]:
    before = set(sys.modules)
    yield stub_openrlhf()
    for name in set(sys.modules) - before:
        if name.startswith("openrlhf") or name == "liger_chunked.integrations.frameworks.openrlhf":
            del sys.modules[name]


@pytest.mark.few(2)
@pytest.mark.parametrize("packing_samples", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_openrlhf(openrlhf: Any, packing_samples: bool, temperature: float) -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    from liger_chunked.integrations.frameworks.openrlhf import FusedActor

    model = build("Gemma2ForCausalLM").double().eval()  # its logits have a softcap
    model.config.use_cache = False  # as OpenRLHF sets it
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(10, 90, (2, S), generator=generator)
    mask = torch.ones_like(sequences)
    mask[0, 9:] = mask[1, 8:] = 0
    action_mask = mask[:, -4:].bool()
    ours = FusedActor(copy.deepcopy(model), packing_samples=packing_samples, temperature=temperature)
    stock = openrlhf(model, packing_samples=packing_samples, temperature=temperature)
    results = []
    for actor in (ours, stock):
        logps, output = actor(sequences, action_mask, mask, return_output=True, return_entropy=True)
        assert (output.logits is None) == (actor is ours)
        entropy = output.entropy * mask[:, 1:] * mask[:, :-1]
        torch.autograd.backward([logps, entropy], [torch.linspace(-1, 1, 4).expand(2, 4).double(), entropy.detach()])
        results.append([logps.detach(), entropy.detach(), *(p.grad for p in actor.parameters())])
        with torch.no_grad():
            results[-1] += [actor(sequences, action_mask, mask), actor(sequences, None, mask, return_logprobs=True)]
    counted = [mask[:, 1:] * mask[:, :-1]]
    for i, (x, e) in enumerate(zip(*results, strict=True)):
        last = counted[0] if i == len(results[0]) - 1 else 1
        assert relative_error(x * last, e * last) < 1e-6  # Gemma's RMSNorm is in float32
    assert ours(sequences, None, mask, return_output=True).logits is not None


# cut_cross_entropy, commit d42911f of 2025-06-26: linear_cross_entropy.py, torch_compile.py, vocab_parallel/utils.py.
def cce_worker(rank: int, folder: str) -> None:
    group = initialize(rank, folder)
    case = make_case(rank, WORLD)
    starts = (0, 7, V)  # uneven shards
    own = slice(starts[rank], starts[rank + 1])
    expected = eager(case, upstream=only(case, 0))
    for reduced in (True, False):
        options = SimpleNamespace(start=own.start, stop=own.stop, group=group, reduce_e_grad=reduced)
        weight, hidden = case.weight[own].clone().requires_grad_(), case.hidden.clone().requires_grad_()
        call = partial(cut_cross_entropy.linear_cross_entropy, hidden, weight, case.target)
        losses = call(reduction="none", vocab_parallel_options=options)
        check(losses, -expected.logps, "loss")
        losses.backward(-case.upstream[0])
        check(weight.grad, expected.weight_grad[own], "dW")
        check(hidden.grad if reduced else summed(hidden.grad), expected.hidden_grad, "dX")
    options.stop += 1
    with pytest.raises(ValueError, match="c must have the rows"):
        call(vocab_parallel_options=options)
    dist.destroy_process_group()


test_cut_cross_entropy_split = run(cce_worker)


@pytest.mark.few(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, True, 3])
def test_cut_cross_entropy(reduction: str, shift: int) -> None:
    case, softcap, bias = make_case(), 3.0, torch.linspace(-1, 1, V, dtype=torch.float64)
    keep, later = slice(0, S - int(shift)), slice(int(shift), S)

    def loss(e: Tensor, c: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = softcap * torch.tanh((e[:, keep] @ c.T + b) / softcap)
        target = case.target[:, later]
        losses = nn.functional.cross_entropy(z.reshape(-1, V), target.reshape(-1), reduction=reduction)
        lse = z.logsumexp(-1).where(target != IGNORE, 0.0)
        return losses.view(target.shape) if reduction == "none" else losses, lse

    for return_lse in (False, True):
        leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, bias)]
        exact = loss(*leaves)
        options = {"softcap": softcap, "reduction": reduction, "shift": shift, "return_lse": return_lse}
        found = cut_cross_entropy.linear_cross_entropy(leaves[0], leaves[1], case.target, leaves[2], **options)
        pairs = list(zip(found if return_lse else [found], exact, strict=False))
        weights = [torch.linspace(-1, 2, e.numel(), dtype=torch.float64).view(e.shape) for _, e in pairs]
        for x, e in pairs:
            check(x, e.detach(), "values")
        ours, eagers = (torch.autograd.grad([p[k] for p in pairs], leaves, weights, retain_graph=True) for k in (0, 1))
        for x, e in zip(ours, eagers, strict=True):
            check(x, e, "gradients")


def test_cut_cross_entropy_interface() -> None:
    call = ["e", "c", "targets", "bias", "ignore_index", "softcap", "reduction", "shift", "return_lse", "filter_eps"]
    call += ["accum_e_fp32", "accum_c_fp32", "filter_e_grad", "filter_c_grad", "impl", "vocab_parallel_options"]
    assert names(cut_cross_entropy.linear_cross_entropy) == call
    case = make_case()
    for options, message in (({"shift": S}, "shift must be in 0 to 9"), ({"reduction": "max"}, "reduction must be")):
        with pytest.raises(ValueError, match=message):
            cut_cross_entropy.linear_cross_entropy(case.hidden, case.weight, case.target, **options)


# NeMo-Automodel 0.7.0, nemo_automodel/components/loss/linear_ce.py and linear_ce_base.py.
def stub_automodel(monkeypatch: pytest.MonkeyPatch) -> None:
    class LinearCrossEntropy(nn.Module):
        @staticmethod
        def materialize_lm_weight(lm_weight: Tensor, *, grad_reduce_group: Any = None) -> Tensor:
            return lm_weight

    module = ModuleType("nemo_automodel.components.loss.linear_ce_base")
    vars(module)["LinearCrossEntropy"] = LinearCrossEntropy
    for name in ("nemo_automodel", "nemo_automodel.components", "nemo_automodel.components.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "liger_chunked.integrations.frameworks.nemo_automodel", raising=False)


def test_nemo_automodel(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = installed("nemo_automodel.components.loss.linear_ce")
    if theirs is None:
        stub_automodel(monkeypatch)
    ours = importlib.import_module("liger_chunked.integrations.frameworks.nemo_automodel").FusedLinearCrossEntropy
    call = ["hidden_states", "labels", "lm_weight", "num_label_tokens", "grad_reduce_group", "loss_weights"]
    assert names(ours.forward) == call
    assert names(ours.__init__) == ["ignore_index", "logit_softcapping", "reduction", "impl"]
    if theirs is not None:
        assert all(
            names(getattr(theirs.FusedLinearCrossEntropy, f)) == names(getattr(ours, f))
            for f in ("forward", "__init__")
        )
    case, weights = make_case(), torch.rand(B, S, generator=torch.Generator().manual_seed(0)).double()
    for given, upstream in (({"num_label_tokens": 7}, -1 / 7), ({"loss_weights": weights}, -weights), ({}, -1.0)):
        g = torch.zeros(2, B, S, dtype=torch.float64)
        g[0] = upstream
        expected = eager(case, upstream=g)
        weight, hidden = case.weight.clone().requires_grad_(), case.hidden.clone().requires_grad_()
        loss = ours()(hidden, case.target, weight, **given)
        check(loss, (g[0] * expected.logps).sum(), "loss")
        loss.backward()
        check(weight.grad, expected.weight_grad, "dW")
        check(hidden.grad, expected.hidden_grad, "dX")
    with pytest.raises(ValueError, match="reduction must be 'sum' with num_label_tokens, got 'mean'"):
        ours(reduction="mean")(case.hidden, case.target, case.weight, num_label_tokens=3)
    assert ours()(case.hidden, torch.full_like(case.target, IGNORE), case.weight, num_label_tokens=0) == 0
