"""Adapters of training frameworks: their interfaces, and values and gradients against eager code on whole logits.

A comment above each interface names the version and file in which it was read. The interface of an installed package is
compared too. A framework that is not installed is replaced by a stub.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, summed
from table import relative_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearKLDivLoss, linear_token_stats
from liger_chunked.integrations.frameworks import cut_cross_entropy, megatron, nemo_rl, prime_rl, skyrl, verl

WORLD = 2
B, S, H, V = 3, 10, 8, 24  # V: rows of the head, the same on all ranks
IGNORE = -100
BOUND = 1e-9  # float64: a few thousand additions round to less


def statistics(logits: Tensor, target: Tensor, drops: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of logits (..., V), 0 where the target is ignored.

    `drops` (..., V) is True at logits that are no part of the softmax.
    """
    log_p = (logits if drops is None else logits.masked_fill(drops, -torch.inf)).log_softmax(-1)
    logps = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return logps.where(target != IGNORE, 0.0), entropy.where(target != IGNORE, 0.0)


class Case(NamedTuple):
    """Whole tensors, the same on all ranks."""

    weight: Tensor
    hidden: Tensor  # (B, S, H)
    target: Tensor  # (B, S), some ignored
    own: slice  # this rank's rows of weight
    part: slice  # this rank's part of the sequence

    def statistics(self, weight: Tensor, hidden: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        return statistics(hidden @ weight.T / temperature, self.target)

    def logps(self, weight: Tensor, hidden: Tensor) -> Tensor:
        return self.statistics(weight, hidden)[0]


def make_case(rank: int = 0, world: int = 1) -> Case:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target = torch.randint(V, (B, S), generator=generator)
    target[0, :4] = target[2, 7:] = IGNORE
    own, part = (slice(rank * n // world, (rank + 1) * n // world) for n in (V, S))
    return Case(randn(V, H), randn(B, S, H), target, own, part)


def check(found: Tensor | None, expected: Tensor, name: str) -> None:
    assert found is not None and found.shape == expected.shape, name
    assert relative_error(found.detach(), expected.detach()) < BOUND, name


Values = Tensor | tuple[Tensor, ...] | list[Tensor]


def check_step(
    ours: Callable[..., Values],
    exact: Callable[..., Values],
    case: Case,
    more: tuple[Tensor, ...] = (),
    *,
    layout: Callable[[Tensor], Tensor] = lambda hidden: hidden,
    is_share: bool = False,
    within: AbstractContextManager[Any] | None = None,
) -> list[Tensor]:
    """Compare values and gradients of a framework's step with those of eager code. Return the leaves of the first.

    Args:
        ours: called with this rank's rows of the weight, and with the hidden states in the framework's `layout`.
        exact: called with all of both, returns the values in the framework's shapes.
        more: further arguments of both, which have a gradient.
        is_share: whether dX is the rank's share, which the framework sums over the ranks.
        within: a context of the framework's step.
    """
    whole = [x.detach().clone().requires_grad_() for x in (case.weight, case.hidden, *more)]
    expected = listed(exact(*whole))
    upstream = [torch.cos(torch.arange(x.numel(), dtype=x.dtype) + i).view(x.shape) for i, x in enumerate(expected)]
    dw, dx, *others = torch.autograd.grad(expected, whole, upstream)
    leaves = [nn.Parameter(x.detach().clone()) for x in (case.weight[case.own], layout(case.hidden), *more)]
    with within or nullcontext():
        found = listed(ours(*leaves))
        torch.autograd.backward(found, upstream)
    for x, e in zip(found, expected, strict=True):
        check(x, e, "values")
    gradients = [x.grad for x in leaves]
    if is_share:
        assert gradients[1] is not None
        gradients[1] = summed(gradients[1])
    for name, x, e in zip(("dW", "dX", "others"), gradients, (dw[case.own], layout(dx), *others), strict=False):
        check(x, e, name)
    return leaves


def listed(values: Values) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


def positions_first(x: Tensor) -> Tensor:
    """Return (s, b, ...) in the place of (b, s, ...), as Megatron has it."""
    return x.transpose(0, 1).contiguous()


def check_sharded_step(
    model: nn.Module, step: Callable[[], Tensor], single: nn.Module, exact: Tensor, factor: float = 1.0
) -> Tensor:
    """Compare `factor` times FSDP's gradients with those of `exact`, a loss of `single`. Return the loss of `step`."""
    for _ in range(2):  # the second step finds FSDP's hooks as the first left them
        model.zero_grad()
        found = step()
        found.backward()
    single.zero_grad()
    exact.backward()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and q.grad is not None
        check(factor * p.grad.full_tensor(), q.grad, name)
    return found.detach()


def here(rank: int) -> tuple[dist.ProcessGroup, Case]:
    """Return the group of all ranks, and the case of this one."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD, make_case(rank, WORLD)


def installed(module: str) -> ModuleType | None:
    """Import a framework's module; None where it, or something that it needs, is missing."""
    try:
        return importlib.import_module(module)
    except Exception:
        return None


def put_modules(modules: dict[str, dict[str, Any]], patch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Put modules with these members, and their parents, where `import` finds them."""
    for name, members in modules.items():
        for end in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:end])
            patch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
        owner, _, last = name.rpartition(".")
        if owner:
            patch.setattr(sys.modules[owner], last, module, raising=False)
    return {name: sys.modules[name] for name in modules}


def adapter(name: str, patch: pytest.MonkeyPatch) -> Any:
    """Import an adapter of a framework that `patch` has replaced, anew and as long."""
    spec = importlib.util.find_spec(f"liger_chunked.integrations.frameworks.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def names(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "ctx")]


# Megatron-Core 0.19.2, megatron/core/models/gpt/gpt_model.py (GPTModel._postprocess): hidden states (s, b, h), the
# rank's part of s with sequence parallelism; labels and loss (b, s), shifted already; a padded row is in the softmax.
# megatron/core/tensor_parallel/layers.py (ColumnParallelLinear): the whole dX is summed over the ranks.
POSTPROCESS = {
    *("hidden_states", "output_layer", "output_weight", "labels", "loss_mask", "input_ids", "position_ids"),
    *("attention_mask", "decoder_input", "inference_context", "packed_seq_params", "runtime_gather_output", "context"),
    *("compute_language_model_loss", "scale_logits", "config"),
}
OF_FSDP, OF_MEGATRON = (f"verl.workers.engine.{kind}.transformer_impl" for kind in ("fsdp", "megatron"))
# By the module and the name of the framework's function: ours, and the names of its arguments.
CALLS: dict[str, tuple[Any, str]] = {
    "verl.utils.kernel.linear_cross_entropy:LinearCrossEntropy.forward": (
        verl.linear_cross_entropy, "hidden weight labels temperature reduction dist_process_group",
    ),
    "verl.utils.experimental.torch_functional:FusedLinearForPPO.__init__": (
        verl.FusedLinearForPPO, "chunk_size impl_backend",
    ),
    "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward": (
        verl.FusedLinearForPPO.forward, "hidden_states vocab_weights input_ids temperature",
    ),
    f"{OF_MEGATRON}:MegatronEngineWithLMHead.prepare_model_inputs": (None, "batch"),
    f"{OF_MEGATRON}:MegatronEngineWithLMHead.prepare_model_outputs": (None, "output data"),
    f"{OF_FSDP}:FSDPEngineWithLMHead.prepare_model_inputs": (None, "micro_batch"),
    f"{OF_FSDP}:FSDPEngineWithLMHead.prepare_model_outputs": (
        None, "output output_args micro_batch logits_processor_func",
    ),
    "skyrl.backends.skyrl_train.distributed.megatron.model_utils:FusedLinearChunkedDistributedLogprob.forward": (
        skyrl.FusedLinearChunkedDistributedLogprob.apply,
        "hidden weight target vocab_start_index vocab_end_index chunk_size tp_group inference_only",
    ),
    "nemo_rl.distributed.model_utils:ChunkedDistributedHiddenStatesToLogprobs.forward": (
        nemo_rl.ChunkedDistributedHiddenStatesToLogprobs.apply,
        "tensor_parallel_hidden_states target output_weight_layer vocab_start_index vocab_end_index chunk_size "
        "tp_group inference_only",
    ),
    "cut_cross_entropy:linear_cross_entropy": (
        cut_cross_entropy.linear_cross_entropy,
        "e c targets bias ignore_index softcap reduction shift return_lse filter_eps accum_e_fp32 accum_c_fp32 "
        "filter_e_grad filter_c_grad impl vocab_parallel_options",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theirs", CALLS)
def test_interface(theirs: str) -> None:
    (ours, call), (module, name) = CALLS[theirs], theirs.split(":")
    assert ours is None or names(ours) == call.split()
    if found := installed(module):
        assert names(attrgetter(name)(found)) == call.split()


def test_output_processors_take_what_megatron_passes() -> None:
    parameters = inspect.signature(megatron.OutputProcessor.__call__).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= POSTPROCESS
    assert any(p.kind is p.VAR_KEYWORD for p in parameters)
    if theirs := installed("verl.models.mcore.model_forward_fused"):
        given = names(theirs.fused_output_processor)
        assert set(given) - {"_ignored"} <= POSTPROCESS and "context" in given
        assert names(theirs.preprocess_thd_engine)[:3] == ["input_ids", "pre_process", "need_roll"]


# verl 0.9.1, verl/utils/kernel/linear_cross_entropy.py (LinearCrossEntropy.apply) and kernels.py: logps and entropy are
# (N,) float32, dX is not reduced, a rank's ids start at rank * rows. verl/utils/experimental/torch_functional.py:
# FusedLinearForPPO, constructed with `impl_backend` in verl/models/transformers/dense_common.py.
@on_ranks(WORLD)
def test_verl_megatron(rank: int) -> None:
    group, case = here(rank)

    def ours(weight: Tensor, hidden: Tensor, temperature: float = 1.0, reduction: str = "none") -> Any:
        return verl.linear_cross_entropy(hidden, weight, case.target.T, temperature, reduction, group)

    def exact(weight: Tensor, hidden: Tensor, temperature: float) -> Any:
        return [x.T.flatten() for x in case.statistics(weight, hidden, temperature)]

    for temperature in (1.0, 0.7):
        weight, hidden = check_step(
            partial(ours, temperature=temperature),
            partial(exact, temperature=temperature),
            case,
            layout=positions_first,
            is_share=True,
        )
    with torch.no_grad():
        logps, _ = ours(weight, hidden, 0.7)
    assert not logps.requires_grad
    check(logps, exact(case.weight, case.hidden, 0.7)[0], "no_grad")
    assert all(x.dtype == torch.float32 for x in ours(weight.bfloat16(), hidden.bfloat16()))
    with pytest.raises(ValueError, match="reduction must be 'none', got 'mean'"):
        ours(weight, hidden, reduction="mean")


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_verl_fsdp(chunk_size: int | None) -> None:
    case, module = make_case(), verl.FusedLinearForPPO(chunk_size=chunk_size, impl_backend="torch")
    check_step(lambda weight, hidden: module(hidden, weight, case.target.int(), temperature=1.0), case.statistics, case)
    flat = case._replace(hidden=case.hidden.flatten(0, 1), target=case.target.flatten())
    check_step(
        lambda weight, hidden: module(hidden, weight, flat.target.int(), temperature=0.7),
        partial(flat.statistics, temperature=0.7),
        flat,
    )
    logps, _ = module(case.hidden.bfloat16(), case.weight.bfloat16(), case.target)
    assert logps.dtype == torch.float32
    with pytest.raises(ValueError, match="chunk_size must be a positive number of tokens or None, got 0"):
        verl.FusedLinearForPPO(chunk_size=0)(case.hidden, case.weight, case.target)


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


@pytest.fixture
def verl_stub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of verl with what `distill_from_hidden_states` imports."""
    registry: dict[str, Any] = {}
    functional, engine = "verl.utils.experimental.torch_functional", type("Engine", (VerlEngine,), {})
    of_engine = {functional: {"FusedLinearForPPO": None}, OF_FSDP: {"FSDPEngineWithLMHead": engine}}
    modules = put_modules(verl_distillation(registry) | of_engine, monkeypatch)
    return SimpleNamespace(registry=registry, functional=modules[functional], Engine=engine)


OFFSETS = torch.tensor([0, 6, 10])  # of two sequences


def verl_batch(hidden: Tensor, target: Tensor, teacher: Tensor, only: bool) -> dict[str, Any]:
    """Return a micro-batch of sequences of 6 and 4 tokens, which end in responses of 3 tokens and one."""
    nested = partial(torch.nested.nested_tensor_from_jagged, offsets=OFFSETS)
    return {
        "input_ids": nested(target.clamp(min=0)), "hidden": nested(hidden), "teacher_hidden_states": nested(teacher),
        "responses": torch.zeros(2, 3), "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
        "distillation_use_topk": True, "distillation_only": only, "use_fused_kernels": True,
    }  # fmt: skip


@pytest.mark.parametrize("only", [True, False])
def test_verl_distillation(only: bool, verl_stub: SimpleNamespace) -> None:
    """Divergences of the positions that predict a response, from the head to the loss, with gradients."""
    loaded: list[int] = []
    case, teacher_weight = make_case(), torch.randn(V, 5, dtype=torch.float64)
    case = case._replace(hidden=case.hidden[0], target=case.target[0])
    teacher, engine = torch.randn(S, 5, dtype=torch.float64), verl_stub.Engine()
    verl.distill_from_hidden_states(lambda: loaded.append(1) or teacher_weight, loss_mode="hidden")  # type: ignore[func-returns-value]
    settings, loss = verl_stub.registry["hidden"]
    assert settings.use_topk
    read = torch.tensor([False, False, True, True, True, False, False, False, True, False])

    def step(weight: Tensor, data: dict[str, Any]) -> Any:
        inputs, args = engine.prepare_model_inputs(data)
        logps, entropy = verl_stub.functional.FusedLinearForPPO()(inputs["hidden"], weight, case.target[None], 0.7)
        output = SimpleNamespace(log_probs=logps, entropy=entropy)
        return engine.prepare_model_outputs(output, args, data, None)

    def ours(weight: Tensor, hidden: Tensor) -> Tensor:
        data = verl_batch(hidden, case.target, teacher, only)
        for _ in range(2):
            found = step(weight, data)
        assert (found["log_probs"] is None) == only and (found["entropy"] is None) == only
        if not only:
            check(found["log_probs"][0], case.statistics(weight, hidden, 0.7)[0], "logps")
        return loss(None, None, found, data)[0]

    def exact(weight: Tensor, hidden: Tensor) -> Tensor:
        log_p, log_q = (hidden @ weight.T / 0.7).log_softmax(-1), (teacher @ teacher_weight.T).log_softmax(-1)
        return (log_q.exp() * (log_q - log_p)).sum(-1).where(read, 0.0)

    weight, hidden = check_step(ours, exact, case)
    assert len(loaded) == 1
    data = verl_batch(hidden, case.target, teacher, only)
    plain = step(weight, data | {"distillation_use_topk": False})
    assert "distillation_losses" not in plain and plain["log_probs"].shape == (1, S)
    with pytest.raises(ValueError, match="loss_mode='hidden' needs teacher_hidden_states"):
        loss(None, None, plain, data)
    with pytest.raises(ValueError, match="teacher_hidden_states need use_fused_kernels=True"):
        step(weight, data | {"use_fused_kernels": False})
    engine.prepare_model_inputs(data)
    with pytest.raises(ValueError, match="did not call FusedLinearForPPO"):  # but verl's function in Triton
        engine.prepare_model_outputs(SimpleNamespace(log_probs=torch.zeros(1, S), entropy=None), {}, data, None)
    with pytest.raises(ValueError, match="with the 10 tokens of input_ids"):
        step(weight, data | {"teacher_hidden_states": teacher})


def test_verl_distillation_under_ulysses(verl_stub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank computes the divergences of its part of the padded tokens: together, those of one rank."""
    case, world, here = make_case(), 3, SimpleNamespace(rank=0)

    def part(x: Tensor, dim: int) -> Tensor:  # as verl 0.9.1 pads and cuts
        padding = x.new_zeros(*x.shape[:dim], -x.shape[dim] % world, *x.shape[dim + 1 :])
        return torch.cat([x, padding], dim).tensor_split(world, dim)[here.rank]

    put_modules({"verl.utils.ulysses": {"slice_input_tensor": part}}, monkeypatch)
    teacher_weight, teacher = torch.randn(V, 5, dtype=torch.float64), torch.randn(S, 5, dtype=torch.float64)
    verl.distill_from_hidden_states(teacher_weight, loss_mode="hidden")
    data = verl_batch(case.hidden[0], case.target[0], teacher, only=True)
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
            of_megatron, ids = patched[fused], self.prepare_model_inputs(batch)["input_ids"]
            packed, starts, _ = of_megatron.preprocess_thd_engine(ids, pre_process=True)
            labels, *_ = of_megatron.preprocess_thd_engine(
                ids.clone(), pre_process=True, need_roll=True, cp_layout="zigzag"
            )
            output_orig = model(
                input_ids=packed,
                labels=labels,
                output_processor=of_megatron.fused_output_processor,
                output_processor_context=SimpleNamespace(temperature=temperature),
            )
            output = {"log_probs": postprocess_thd_engine(output_orig.log_probs, starts, ids)}
            if batch["calculate_entropy"]:
                output["entropy"] = postprocess_thd_engine(output_orig.entropy, starts, ids)
            return self.prepare_model_outputs(output, batch)

    registry: dict[str, Any] = {}
    fused = "verl.models.mcore.model_forward_fused"
    modules = verl_distillation(registry) | {
        "verl.utils.model": {"CausalLMOutputForPPO": SimpleNamespace},
        fused: {"preprocess_thd_engine": preprocess_thd_engine, "fused_output_processor": None},
        OF_MEGATRON: {"MegatronEngineWithLMHead": Engine},
    }
    patched = put_modules(modules, pytest.MonkeyPatch())
    return SimpleNamespace(registry=registry, Engine=Engine, fused=patched[fused])


@contextmanager
def kept(owners: dict[Any, tuple[str, ...]]) -> Iterator[None]:
    """Give each owner these attributes back."""
    before = [(owner, name, getattr(owner, name)) for owner, of_owner in owners.items() for name in of_owner]
    yield
    for owner, name, x in before:
        setattr(owner, name, x)


def call_processor(processor: Any, weight: Tensor, hidden: Tensor, group: Any, is_tied: bool, **given: Any) -> Any:
    """Call an output processor as the end of Megatron's GPTModel does. `given` names what differs."""
    layer = SimpleNamespace(weight=None if is_tied else weight, bias=given.pop("bias", None), tp_group=group)
    layer.sequence_parallel = given.pop("sequence_parallel", False)
    arguments: dict[str, Any] = dict.fromkeys(POSTPROCESS)
    arguments |= {"hidden_states": hidden, "output_layer": layer, "output_weight": weight if is_tied else None}
    return processor(**arguments | {"scale_logits": lambda z: z, "config": SimpleNamespace()} | given)


@on_ranks(WORLD)
def test_verl_output_processor(rank: int) -> None:
    """Packed sequences of 7, 4 and 10 tokens, whose padded rows are 8, 4 and 10, on two tensor-parallel ranks."""
    group, case = here(rank)
    of_verl = stub_verl_megatron()
    from liger_chunked.integrations.frameworks import verl_megatron

    offsets = torch.tensor([0, 7, 11, 21])
    nested = partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
    ids = case.target.clamp(min=0).flatten()[:21]
    places = torch.tensor([*range(7), *range(8, 22)])  # of the tokens among the 22 packed ones
    teacher_states = case.hidden.flatten(0, 1)[8:29, :5].contiguous()
    case = case._replace(hidden=case.hidden.flatten(0, 1)[:22])
    bias = torch.linspace(-1, 1, V, dtype=torch.float64)
    data = {"input_ids": nested(ids), "calculate_entropy": True}
    engine = of_verl.Engine()
    hooks = ("prepare_model_inputs", "prepare_model_outputs")
    of_engine = {of_verl.Engine: hooks, of_verl.fused: ("preprocess_thd_engine",)}

    def model(weight: Tensor, hidden: Tensor, scale: float = 1.0, **given: Any) -> Callable[..., Any]:
        def forward(*, labels: Tensor, output_processor: Any, output_processor_context: Any, **_: Any) -> Any:
            context: dict[str, Any] = {"context": output_processor_context, "labels": labels}
            scaled = {"scale_logits": lambda z: scale * z}
            return call_processor(output_processor, weight, hidden, group, **given, **context, **scaled)

        return forward

    def part_of(sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
        part = slice(rank * 11, rank * 11 + 11) if sequence_parallel else slice(None)
        return lambda x: x[part, None]

    def exact_logits(weight: Tensor, hidden: Tensor, temperature: float, vocab: int, bias: Any = 0.0) -> Tensor:
        """Return logits of the 21 tokens."""
        return ((hidden @ weight.T + bias) / temperature)[places, :vocab]

    def labels_of(ids: Tensor) -> Tensor:
        return of_verl.fused.preprocess_thd_engine(nested(ids), need_roll=True)[0][0, places]

    def check_statistics(sequence_parallel: bool, is_tied: bool, temperature: float, vocab: int, biased: bool,
                         scale: float) -> list[Tensor]:  # fmt: skip
        few = ids.clamp(max=vocab - 1)
        of_verl.fused.fused_output_processor = verl_megatron.FusedOutputProcessor(
            vocab_size=None if vocab == V else vocab, logits_budget="1KiB"
        )

        def ours(weight: Tensor, hidden: Tensor) -> Any:
            given = {"is_tied": is_tied, "sequence_parallel": sequence_parallel, "scale": scale}
            of_model = model(weight, hidden, **given, bias=bias[case.own] if biased else None)
            found = engine.forward_step(of_model, data | {"input_ids": nested(few)}, temperature)
            assert torch.equal(found["log_probs"].offsets(), offsets)
            return found["log_probs"].values(), found["entropy"].values()

        def exact(weight: Tensor, hidden: Tensor) -> Any:
            z = exact_logits(weight, hidden, temperature / scale, vocab, bias if biased else 0.0)
            return statistics(z, labels_of(few))

        return check_step(ours, exact, case, layout=part_of(sequence_parallel))

    check_statistics(False, False, 1.0, V, False, 1.0)
    check_statistics(True, True, 0.7, V, False, 1.0)
    check_statistics(True, False, 1.3, V - 3, False, 1.0)
    check_statistics(False, True, 1.3, V, True, 1.0)
    weight, hidden = check_statistics(True, False, 1.0, V, False, 0.5)
    plain_model = model(weight, hidden, is_tied=False, sequence_parallel=True)
    with torch.no_grad():
        assert not engine.forward_step(plain_model, data, 1.0)["log_probs"].requires_grad

    # Distillation: responses of 3, 2 and 4 tokens, which the positions before them predict.
    teacher_weight = torch.cat([case.weight[:, 3:], case.weight[:2, 3:]])  # of two more tokens
    few = ids.clamp(max=V - 4)  # of all distillations: one has no more ids
    batch = data | {
        "input_ids": nested(few),
        "teacher_hidden_states": nested(teacher_states),
        "responses": torch.nested.nested_tensor_from_jagged(torch.zeros(9), torch.tensor([0, 3, 5, 9])),
        "distillation_use_topk": True,
    }
    read = torch.zeros(21, dtype=torch.bool)
    for end, n in zip((7, 11, 21), (3, 2, 4), strict=True):
        read[end - 1 - n : end - 1] = True

    def check_distillation(reverse: bool, vocab: int, sequence_parallel: bool, only: bool) -> None:
        mode, loaded = f"hidden{reverse}{vocab}{sequence_parallel}", []
        verl_megatron.distill_from_hidden_states(
            lambda: loaded.append(1) or teacher_weight,  # type: ignore[func-returns-value]
            partial(LigerFusedLinearKLDivLoss, reverse=reverse),
            loss_mode=mode,
            vocab_size=None if vocab == V else vocab,
            logits_budget="1KiB",
        )
        settings, loss = of_verl.registry[mode]
        assert settings.use_topk
        given = batch | {"distillation_only": only, "calculate_entropy": not only}
        engine = of_verl.Engine()
        both = {"is_tied": not only, "sequence_parallel": sequence_parallel, "scale": 0.5}

        def ours(weight: Tensor, hidden: Tensor) -> list[Tensor]:
            for _ in range(2):
                found = engine.forward_step(model(weight, hidden, **both), given, 0.7)
            losses, _ = loss(None, None, found, given)
            assert losses.is_nested and torch.equal(losses.offsets(), offsets)
            assert ("log_probs" in found, "entropy" in found) == (not only, not only)
            return [losses.values(), *(found[name].values() for name in ("log_probs", "entropy") if not only)]

        def exact(weight: Tensor, hidden: Tensor) -> list[Tensor]:
            z = exact_logits(weight, hidden, 1.4, vocab)
            log_p, log_q = z.log_softmax(-1), (teacher_states @ teacher_weight[:vocab].T).log_softmax(-1)
            terms = (log_p.exp() * (log_p - log_q)) if reverse else (log_q.exp() * (log_q - log_p))
            return [terms.sum(-1).where(read, 0.0), *(() if only else statistics(z, labels_of(few)))]

        leaves = check_step(ours, exact, case, layout=part_of(sequence_parallel))
        assert len(loaded) == 1
        undistilled = given | {"distillation_use_topk": False, "calculate_entropy": True}
        of_model = model(*leaves, is_tied=True, sequence_parallel=sequence_parallel)
        plain = engine.forward_step(of_model, undistilled, 0.7)
        assert set(plain) == {"log_probs", "entropy"} and plain["log_probs"].dim() == 2
        with pytest.raises(ValueError, match=f"loss_mode='{mode}' needs teacher_hidden_states"):
            loss(None, None, plain, data)

    for row in ((False, V, True, True), (True, V - 3, True, False), (False, V, False, False), (True, V, False, True)):
        with kept(of_engine):  # each is set in the place of verl's, not of the one before
            check_distillation(*row)
    with kept(of_engine):
        verl_megatron.distill_from_hidden_states(teacher_weight, loss_mode="refused")
        with pytest.raises(ValueError, match="teacher_hidden_states need use_fused_kernels=True"):
            engine.forward_step(plain_model, batch | {"use_fused_kernels": False}, 0.7)
        of_verl.fused.fused_output_processor = verl_megatron.FusedOutputProcessor()
        with pytest.raises(ValueError, match=r"did not call verl's fused_output_processor.*Megatron-Core 0\.18"):
            engine.forward_step(plain_model, batch, 0.7)
    verl_megatron.distill_from_hidden_states(teacher_weight[:-3], loss_mode="few")
    with pytest.raises(ValueError, match=r"a row for each of the student's 24, .* pass vocab_size"):
        engine.forward_step(plain_model, batch, 0.7)


# SkyRL 0.3.0, skyrl/backends/skyrl_train/distributed/megatron/model_utils.py: logps (B, S) float32, dX not reduced.
@on_ranks(WORLD)
def test_skyrl(rank: int) -> None:
    group, case = here(rank)
    apply, rows = skyrl.FusedLinearChunkedDistributedLogprob.apply, (case.own.start, case.own.stop)

    def logps(weight: Tensor, hidden: Tensor, chunk_size: int | None = None, inference_only: bool = False) -> Tensor:
        return apply(hidden, weight, case.target, *rows, chunk_size, group, inference_only)

    for chunk_size in (S, 3, None):
        weight, hidden = check_step(partial(logps, chunk_size=chunk_size), case.logps, case, is_share=True)
    found = logps(weight, hidden, inference_only=True)
    assert not found.requires_grad
    check(found, case.logps(case.weight, case.hidden), "inference_only")
    # The hidden states take the weight's dtype, and their gradient keeps their own.
    low = hidden.detach().bfloat16().requires_grad_()
    found = logps(weight.detach().float(), low)
    found.sum().backward()
    assert found.dtype == torch.float32 and low.grad is not None and low.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"the vocabulary range must be \d+ to \d+, the rows .* got 1 to 13"):
        apply(hidden, weight, case.target, 1, 13, None, group)


# NeMo-RL, commit 7ea279a of 2026-08-22, nemo_rl/distributed/model_utils.py: hidden states (S / ranks, B, H), logps
# (B, S) float32, dX (S / ranks, B, H) summed over the ranks.
@on_ranks(WORLD)
def test_nemo_rl(rank: int) -> None:
    group, case = here(rank)

    def logps(weight: Tensor, hidden: Tensor, chunk_size: int | None = None, inference_only: bool = False) -> Tensor:
        rows = case.own.start, case.own.stop
        apply = nemo_rl.ChunkedDistributedHiddenStatesToLogprobs.apply
        return apply(hidden, case.target, weight, *rows, chunk_size, group, inference_only)

    for chunk_size in (4, None):
        leaves = check_step(
            partial(logps, chunk_size=chunk_size), case.logps, case, layout=lambda x: positions_first(x)[case.part]
        )
    found = logps(*leaves, inference_only=True)
    assert not found.requires_grad
    check(found, case.logps(case.weight, case.hidden), "inference_only")


# NeMo-RL, nemo_rl/algorithms/loss/loss_functions.py: DistillationLossFn, with a top-k of the whole vocabulary.
@on_ranks(WORLD)
def test_nemo_rl_kl(rank: int) -> None:
    group, case = here(rank)
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(B, S, 5, generator=generator, dtype=torch.float64)
    teacher_weight = torch.randn(V, 5, generator=generator, dtype=torch.float64)

    def ours(weight: Tensor, hidden: Tensor, *given: Any, states: Tensor = teacher, **options: Any) -> Tensor:
        rows = case.own.start, case.own.stop
        chunk_size, *rest = given or (None,)
        return nemo_rl.ChunkedDistributedHiddenStatesToKL.apply(
            hidden, weight, states, teacher_weight[case.own], *rows, chunk_size, group, *rest, **options
        )

    def exact(weight: Tensor, hidden: Tensor, parts: tuple[float, float], mask: Tensor | None) -> Tensor:
        log_p, log_q = (hidden @ weight.T / 0.7).log_softmax(-1), (teacher @ teacher_weight.T).log_softmax(-1)
        forward, reverse = ((a.exp() * (a - b)).sum(-1) for a, b in ((log_q, log_p), (log_p, log_q)))
        found = parts[0] * forward + parts[1] * reverse
        return found if mask is None else found.where(mask, 0.0)

    for kl_type, parts, chunk_size, mask in (
        ("forward", (1.0, 0.0), 4, None),
        ("reverse", (0.0, 1.0), None, case.target >= 0),
        ("mixed", (0.3, 0.7), None, None),
    ):
        options = {"mask": mask, "kl_type": kl_type, "mixed_kl_weight": 0.3, "temperature": 0.7}
        weight, hidden = check_step(
            lambda w, x, chunk_size=chunk_size, options=options: ours(w, x, chunk_size, **options),
            partial(exact, parts=parts, mask=mask),
            case,
            layout=lambda x: positions_first(x)[case.part],
        )
    assert not ours(weight, hidden, None, True).requires_grad
    with pytest.raises(ValueError, match=r"kl_type must be one of .*'js'"):
        ours(weight, hidden, kl_type="js")
    with pytest.raises(ValueError, match=f"must have the {S} positions of all ranks"):
        ours(weight, hidden, states=teacher[:, case.part])


@on_ranks(WORLD)
def test_megatron(rank: int) -> None:
    group, case = here(rank)
    mask = torch.ones(B, S)
    mask[1, 2:5] = 0.0
    masked = case._replace(target=case.target.masked_fill(mask == 0, IGNORE))

    def layout_of(sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: positions_first(x)[case.part if sequence_parallel else slice(None)]

    def call(processor: megatron.OutputProcessor, weight: Tensor, hidden: Tensor, **given: Any) -> Any:
        given = {"is_tied": False, "labels": case.target, "loss_mask": mask, **given}
        return call_processor(processor, weight, hidden, group, **given)

    few, of_padded = masked.target.clamp(max=V - 4), megatron.OutputProcessor(linear_token_stats, vocab_size=V - 3)
    context = {"outputs": ("logps", "entropy"), "temperature": 0.7}
    for both in (False, True):
        given = {"sequence_parallel": both, "is_tied": both}
        # The cross entropy of each token, with MuP's multiplier: 1 / 0.5 is a temperature.
        leaves = check_step(
            partial(call, megatron.OutputProcessor(), **given, scale_logits=lambda z: 0.5 * z),
            lambda w, x: -masked.statistics(w, x, 2.0)[0],
            case,
            layout=layout_of(both),
        )
        # Statistics, at a temperature, without the rows of padding.
        of_few = partial(call, of_padded, **given, context=context, labels=few)
        check_step(
            lambda w, x, of_few=of_few: attrgetter("logps", "entropy")(of_few(w, x)),
            lambda w, x: statistics((x @ w.T / 0.7)[..., : V - 3], few),
            case,
            layout=layout_of(both),
        )

    # A divergence for each token, of a teacher's hidden states.
    teacher = {"teacher_weight": case.weight.flip(1), "teacher_input": case.hidden.flip(0)}
    loss = LigerFusedLinearKLDivLoss(reduction="none", reverse=True)
    own_teacher = {"teacher_weight": teacher["teacher_weight"][case.own], "teacher_input": teacher["teacher_input"]}
    check_step(
        lambda w, x: call(megatron.OutputProcessor(loss), w, x, context=own_teacher)[0],
        lambda w, x: loss(w, x, **teacher, target=masked.target)[0],
        case,
        layout=positions_first,
    )

    # A loss over sequences: two pairs of (b, s), chosen first.
    target = torch.cat([case.target, case.target[1:2]])
    dpo = megatron.OutputProcessor(partial(LigerFusedLinearDPOLoss, use_ref_model=False))
    of_pairs = {"sequence_parallel": True, "labels": target, "loss_mask": torch.ones(B + 1, S)}
    check_step(
        lambda w, x: call(dpo, w, x, **of_pairs)[0],
        lambda w, x: LigerFusedLinearDPOLoss(w, x, target, use_ref_model=False)[0],
        case._replace(hidden=torch.cat([case.hidden, case.hidden[:1].flip(1)])),
        layout=layout_of(True),
    )

    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "labels must be given", {"labels": None}),
        (TypeError, "output_processor_context must be a dict of keywords or None, got float", {"context": 0.7}),
        (ValueError, "defer_embedding_wgrad_compute", {"config": SimpleNamespace(defer_embedding_wgrad_compute=True)}),
        (ValueError, "this rank's rows", {"output_layer": SimpleNamespace(gtp_remat_size=2)}),
    ]
    for error, message, given in refused:
        with pytest.raises(error, match=message):
            call(megatron.OutputProcessor(), *leaves, **given)


def has_output_processor() -> bool:
    found = installed("megatron.core.models.gpt.gpt_model")
    return found is not None and "output_processor" in names(found.GPTModel.forward)


@pytest.mark.skipif(not has_output_processor(), reason="no Megatron-Core of 0.18 or newer")
@on_ranks(WORLD)
def test_megatron_model(rank: int) -> None:
    """A GPTModel of Megatron-Core: the same losses and gradients with the output processor as without."""
    _, case = here(rank)
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
        upstream = torch.linspace(-1, 2, B * S, dtype=torch.float64).view(B, S) * mask
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


# Megatron-Core 0.18 to 0.19, megatron/core/transformer/multi_token_prediction.py (process_mtp_loss): the states of the
# main model and of each depth lie one behind the other in s. At each depth it calls
# `output_layer(hidden, weight=, runtime_gather_output=)`, scales the logits, shifts the labels by one more, and calls
# `compute_language_model_loss(labels, logits)` for (b, s) losses; since 0.19 `_compute_mtp_acceptance_counts` too.
def stub_mtp() -> Any:
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

    name = "megatron.core.transformer.multi_token_prediction"
    members = {"process_mtp_loss": process_mtp_loss, "_compute_mtp_acceptance_counts": of_logits}
    module: Any = put_modules({name: members}, pytest.MonkeyPatch())[name]
    return module


def rolled(x: Tensor, shift: int) -> Tensor:
    return nn.functional.pad(x[:, shift:], (0, shift))


@on_ranks(WORLD)
def test_megatron_mtp(rank: int) -> None:
    """Two depths on a stub of Megatron-Core, whose own model `test_megatron_model` runs."""
    group, case = here(rank)
    target, mask = case.target.clamp(max=V - 4), torch.ones(B, S)
    mask[1, 2:5] = 0.0
    states = [x.transpose(0, 1) for x in (case.hidden.flip(2), case.hidden, case.hidden.flip(0))]
    case = case._replace(hidden=torch.stack(states))  # (3, s, b, h)
    module, model = stub_mtp(), ModuleType("a.model")
    stock = model.process_mtp_loss = module.process_mtp_loss  # type: ignore[attr-defined]
    sys.modules[model.__name__] = model

    def exact(weight: Tensor, hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the losses of each depth, and the numbers of right tokens and of all."""
        losses, counts = [], []
        for depth in (1, 2):
            labels, keep = rolled(target, depth), rolled(mask, depth)
            z = 0.5 * (hidden[depth].transpose(0, 1) @ weight.T)[..., : V - 3]
            losses.append(-statistics(z, labels)[0] * keep)
            counts += [((z.argmax(-1) == labels) & keep.bool()).sum().float(), keep.sum()]
        return losses, counts

    def ours(weight: Tensor, hidden: Tensor, both: bool) -> list[Tensor]:
        head = SimpleNamespace(weight=None if both else weight, bias=None, tp_group=group, gather_output=False)
        head.sequence_parallel = both
        with megatron.chunked_heads(vocab_size=V - 3, logits_budget=8 * 5 * V):
            assert module.process_mtp_loss is model.process_mtp_loss is not stock
            found = model.process_mtp_loss(
                hidden_states=hidden,
                labels=target,
                loss_mask=mask,
                output_layer=head,
                output_weight=weight if both else None,
                compute_language_model_loss=None,
                config=SimpleNamespace(mtp_num_layers=2),
                scale_logits_fn=lambda z: z * 0.5,
            )
        assert module.process_mtp_loss is model.process_mtp_loss is stock
        losses, *counts = zip(*found, strict=True)
        for x, e in zip((x for of_depth in zip(*counts, strict=True) for x in of_depth), expected, strict=True):
            check(x, e, "counts")
        return list(losses)

    _, expected = exact(case.weight, case.hidden)
    for both in (False, True):  # a tied head, and with sequence parallelism the rank's part of each depth
        part = case.part if both else slice(None)
        check_step(
            partial(ours, both=both),
            lambda w, x: exact(w, x)[0],
            case,
            layout=lambda x, part=part: x[:, part].flatten(0, 1),
        )


# torchtitan 0.3.0, torchtitan/components/loss.py and trainer.py: Trainer calls `config.loss.build(compile_config=...)`,
# `set_lm_head` if the loss is a ChunkedLossWrapper, and `loss(pred, labels, global_valid_tokens, **inputs)`. Labels
# are shifted already, -100 is ignored. Under "spmd_types" (distributed/spmd_types.py) parameters are plain rows, and
# pred is R on "tp": its gradient is the rank's share.
def stub_torchtitan(patch: pytest.MonkeyPatch) -> None:
    """Put the few names that the adapter needs in the place of torchtitan, if it is not installed."""
    if installed("torchtitan.components.loss") is not None:
        return
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

    modules = {
        "spmd_types": {"local": nullcontext, "no_typecheck": nullcontext, "is_type_checking": lambda: False},
        "torchtitan.components.loss": {"BaseLoss": BaseLoss, "ChunkedLossWrapper": ChunkedLossWrapper},
        "torchtitan.distributed.utils": {
            "get_spmd_backend": lambda: backend[0],
            "set_spmd_backend": lambda name: backend.__setitem__(0, name),
        },
        "torchtitan.distributed.spmd_types": {
            "current_spmd_mesh": lambda: meshes[-1] if meshes else None,
            "set_current_spmd_mesh": set_current_spmd_mesh,
            "spmd_mesh_size": lambda name: meshes[-1].size() if meshes else 1,
        },
    }
    put_modules(modules, patch)


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


def titan_loss(head: nn.Module | None = None, **options: Any) -> Any:
    from liger_chunked.integrations.frameworks.torchtitan import FusedLinearCrossEntropyLoss

    loss = FusedLinearCrossEntropyLoss(FusedLinearCrossEntropyLoss.Config(**options), compile_config=None)
    if head is not None:
        loss.set_lm_head(head)
    return loss


def head_of(weight: Tensor) -> nn.Linear:
    head = nn.Linear(H, V, bias=False, dtype=torch.float64)
    head.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return head


class Decoder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.lm_head = head_of(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@on_ranks(WORLD)
def test_torchtitan(rank: int) -> None:
    _, case = here(rank)
    stub_torchtitan(pytest.MonkeyPatch())
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    # One row less: the second rank has fewer rows than the first.
    case, valid = case._replace(weight=case.weight[:-1], target=case.target.clamp(max=V - 2)), torch.tensor(7)
    alone = case._replace(own=slice(None))

    def ours(weight: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        loss = titan_loss(head := head_of(weight), **options)
        found, metrics = loss(hidden, case.target, valid, positions=torch.arange(S))
        assert metrics == {} and "forward" not in vars(head)
        return found

    def exact(weight: Tensor, hidden: Tensor) -> Tensor:
        return -case.logps(weight, hidden).sum() / 7

    # One rank without parallelism; and validation.
    with pytest.raises(ValueError, match="call set_lm_head"):
        titan_loss()(case.hidden, case.target)
    weight, hidden = check_step(partial(ours, logits_budget="1KiB"), exact, alone)
    loss, value = titan_loss(head := head_of(case.weight.clone()), logits_budget="1KiB"), exact(*case[:2])
    with torch.no_grad():
        check(loss(case.hidden, case.target)[0], 7 * value, "validation")
        # One row of packed sequences, as torchtitan's main branch passes it.
        check(loss(case.hidden.flatten(0, 1), case.target.flatten(), valid)[0], value, "packed")

    # Under a CUDA graph: nothing is read on the host, whatever is ignored.
    waits = Waits(is_capturing=True)
    check_step(partial(ours, logits_budget="1KiB", cuda_graphs=True), exact, alone, within=waits)
    assert not waits.found, waits.found
    with Waits(is_capturing=False) as waits:
        loss(case.hidden, case.target, valid)
    assert waits.found
    head.forward = sharded = partial(head.forward)  # as torchtitan's Module.parallelize sets it
    loss(case.hidden, case.target)
    assert head.forward is sharded

    # Plain rows.
    with set_current_spmd_mesh(mesh):
        for cuda_graphs in (False, True):
            options = {"global_vocab_size": V - 1, "cuda_graphs": cuda_graphs}
            check_step(partial(ours, **options), exact, case, is_share=True)

    # DTensors.
    set_spmd_backend("partial_dtensor")

    whole = distribute_tensor(case.hidden, mesh, [Replicate()]).requires_grad_()
    loss = titan_loss(head := head_of(distribute_tensor(case.weight, mesh, [Shard(0)])))
    found, _ = loss(whole, case.target, valid)
    check(found, value, "loss")
    found.backward()
    assert isinstance(head.weight.grad, DTensor) and isinstance(whole.grad, DTensor)
    check(head.weight.grad.full_tensor(), weight.grad, "dW")
    check(whole.grad.full_tensor(), hidden.grad, "dX")
    set_spmd_backend("full_dtensor")
    with pytest.raises(ValueError, match="spmd_backend must be 'spmd_types' or 'partial_dtensor'"):
        loss(whole, case.target, valid)
    set_spmd_backend("spmd_types")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="cuda_graphs=True in the loss"):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        loss(SimpleNamespace(is_cuda=True), case.target, valid)

    # FSDP, which shards the norm and the head together: each rank has other sequences.
    single, sequences = Decoder(case.weight), slice(0, 2) if rank == 0 else slice(2, 3)
    for reshard, cuda_graphs in ((False, False), (True, False), (True, True)):
        model = Decoder(case.weight)
        fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        unsharded: list[bool] = []
        unshard = model.lm_head.unshard
        vars(model.lm_head)["unshard"] = lambda: unsharded.append(True) or unshard()  # noqa: B023
        loss = titan_loss(model.lm_head, cuda_graphs=cuda_graphs)
        of_all = nn.functional.cross_entropy(
            single.lm_head(single(case.hidden)).flatten(0, 1), case.target.flatten(), reduction="sum"
        )
        found = check_sharded_step(
            model,
            lambda: loss(model(case.hidden[sequences]), case.target[sequences], valid)[0],  # noqa: B023
            single,
            of_all / 7,
            factor=WORLD,  # FSDP divides by the ranks
        )
        check(summed(found), of_all / 7, "loss")
        assert len(unsharded) == 2 * cuda_graphs  # a capture cannot wait for what FSDP's own gather leaves behind


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
def test_torchtitan_cuda_graph(is_sharded: bool, logits_budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_torchtitan(monkeypatch)
    adapter("torchtitan", monkeypatch)
    if is_sharded:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        check_titan_capture(is_sharded, logits_budget)
    finally:
        if is_sharded:
            dist.destroy_process_group()


# torchtune, commit bd2a0fc of 2026-04-23 (0.7.0), torchtune/modules/loss/loss_types.py, transformer.py, tied_linear.py
# and recipes/full_finetune_distributed.py: `set_model_output(model)` after FSDP, `loss(outputs, labels)` after the
# model's forward with `skip_output_layer`, a mean over tokens. FSDP wraps the root with reshard_after_forward=False.
class TunedDecoder(nn.Module):
    def __init__(self, weight: Tensor, tied: bool) -> None:
        super().__init__()
        self.skip_output_layer = False
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.tok_embeddings = nn.Embedding(V, H, dtype=torch.float64)
        self.tok_embeddings.weight = nn.Parameter(weight.clone())
        self.output: Any = SimpleNamespace(tied_module=self.tok_embeddings) if tied else head_of(weight.clone())

    def forward(self, ids: Tensor) -> Tensor:
        assert self.skip_output_layer
        return self.norm(self.tok_embeddings(ids))


@on_ranks(WORLD)
def test_torchtune(rank: int) -> None:
    _, case = here(rank)
    patch = pytest.MonkeyPatch()
    put_modules({"torchtune.modules.loss": {"SFTLoss": type("SFTLoss", (ABC,), {})}}, patch)
    make = adapter("torchtune", patch).FusedLinearCrossEntropyLoss
    mesh = init_device_mesh("cpu", (WORLD,))
    ids, parts = case.target.roll(1, 1).clamp(min=0), (slice(0, 2), slice(2, 3))
    with pytest.raises(ValueError, match="call set_model_output"):
        make()(case.hidden, case.target)
    with pytest.raises(ValueError, match="tensor_parallel_dim must be 1"):
        make().patch_tp_plan({})
    for tied, own_group in ((False, False), (False, True), (True, False)):
        single, model = TunedDecoder(case.weight, tied), TunedDecoder(case.weight, tied)
        single.skip_output_layer = True
        if own_group:
            fully_shard(model.output, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        loss = make(logits_budget="1KiB").apply_compile_strategy()
        loss.set_model_output(model)
        weight = single.tok_embeddings.weight if tied else single.output.weight
        means = [
            nn.functional.cross_entropy((single(ids[part]) @ weight.T).flatten(0, 1), case.target[part].flatten())
            for part in parts
        ]
        found = check_sharded_step(
            model,
            lambda: loss(model(ids[parts[rank]]), case.target[parts[rank]]),  # noqa: B023
            single,
            torch.stack(means).mean(),
        )
        check(found, means[rank], "loss")
    assert make.forward.__code__.co_varnames[:3] == ("self", "outputs", "targets")


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

    path = "slime.backends.megatron_utils"
    modules = {
        "megatron.core.parallel_state": {"get_context_parallel_world_size": lambda: 1},
        "megatron.core.models.gpt": {"GPTModel": GPTModel},
        "megatron.core.tensor_parallel": {"ColumnParallelLinear": ColumnParallelLinear},
        **{f"{path}.{name}": {} for name in ("actor", "loss")},
        f"{path}.model": {"get_batch": lambda batch: batch},
    }
    put = {name.rpartition(".")[2]: module for name, module in put_modules(modules, pytest.MonkeyPatch()).items()}
    return SimpleNamespace(model=GPTModel, head=ColumnParallelLinear, modules=SimpleNamespace(**put))


@on_ranks(WORLD)
def test_slime(rank: int) -> None:
    group, case = here(rank)
    stub = stub_slime()
    from liger_chunked.integrations.frameworks import slime

    args, of_slime = SimpleNamespace(rollout_temperature=0.7), stub.modules
    slime.install(args)
    # One row of three sequences: of the lengths 12, 10 and 8, with responses of 5, 10 - 1 and 3 tokens.
    totals, responses = [12, 10, 8], [5, 9, 3]
    tokens = case.target.clamp(min=0).view(1, -1)
    parts = list(tokens[0].split(totals))
    given = {"args": args, "unconcat_tokens": parts, "non_loss_data": True}
    given |= {"total_lengths": totals, "response_lengths": responses, "with_entropy": True}
    case = case._replace(hidden=case.hidden.view(1, -1, H))

    def ours(weight: Tensor, hidden: Tensor, sequence_parallel: bool = False, **more: Any) -> list[Tensor]:
        head = stub.head(H, V // WORLD, bias=False, dtype=torch.float64)
        head.weight, head.tp_group, head.sequence_parallel = weight, group, sequence_parallel
        _, found = of_slime.loss.get_log_probs_and_entropy(stub.model(head, hidden)(tokens), **given, **more)
        assert of_slime.actor.get_log_probs_and_entropy is of_slime.loss.get_log_probs_and_entropy
        assert "forward" not in vars(head)
        return found["log_probs"] + found["entropy"]

    def exact(weight: Tensor, hidden: Tensor, spans: Any = (None, None, None)) -> list[Tensor]:
        """`spans`: the ids that are kept of each response's tokens, no id for all."""
        found = []
        for z, ids, n, of_tokens in zip(
            (hidden[0] @ weight.T / 0.7).split(totals), parts, responses, spans, strict=True
        ):
            rows = [[bool(x) and i not in x for i in range(V)] for x in of_tokens or ()]
            found.append(statistics(z[-n - 1 : -1], ids[-n:], torch.tensor(rows) if rows else None))
        return [x for of_kind in zip(*found, strict=True) for x in of_kind]

    for sequence_parallel in (False, True):
        half = slice(rank * B * S // 2, (rank + 1) * B * S // 2) if sequence_parallel else slice(None)
        check_step(
            partial(ours, sequence_parallel=sequence_parallel), exact, case, layout=lambda x, half=half: x[:, half]
        )

    # A replayed top-p: ids and offsets of each response, here an id beside the token, or none at a token.
    spans = [
        [[] if i == 1 else [int(y), (int(y) + 1) % V] for i, y in enumerate(ids[-n:])]
        for ids, n in zip(parts, responses, strict=True)
    ]
    replayed = {
        "rollout_top_p_token_ids": [torch.tensor([i for ids in x for i in ids]).int() for x in spans],
        "rollout_top_p_token_offsets": [torch.tensor([0, *map(len, x)]).cumsum(0).int() for x in spans],
    }
    lengths = {"total_lengths": totals, "response_lengths": responses}
    of_slime.model.get_batch({"tokens": tokens, **lengths, **replayed})
    _, hidden = check_step(partial(ours, top_p_token_ids=[[1]]), partial(exact, spans=spans), case)
    head = stub.head(H, V // WORLD, bias=False, dtype=torch.float64)
    with pytest.raises(ValueError, match="the tokens of slime's get_batch"):
        stub.model(head, hidden)(tokens[:, :-1])
    of_slime.model.get_batch({"tokens": tokens, **lengths})  # as for a reference, which slime does not replay

    class Critic(nn.Linear):
        def forward(self, hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
            return super().forward(hidden), None

    assert stub.model(Critic(H, 1, dtype=torch.float64), hidden)(tokens).shape == (1, B * S, 1)
    for refused, message in (
        ({"rollout_top_p": 0.9, "sequence_parallel": True}, "sequence_parallel must be off with rollout_top_p"),
        ({"enable_mtp_training": True}, "enable_mtp_training must be off"),
    ):
        with pytest.raises(ValueError, match=message):
            slime.install(SimpleNamespace(**refused))
    of_slime.parallel_state.get_context_parallel_world_size = lambda: 2
    with pytest.raises(ValueError, match="context_parallel_size must be 1"):
        slime.install(args)


# OpenRLHF 0.11.2, openrlhf/models/actor.py: log-probabilities and entropies at the temperature, both without the last
# position. (In 0.11.0 the entropy was at temperature 1.)
def stub_openrlhf() -> dict[str, dict[str, Any]]:
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

        def forward(self, sequences: Tensor, action_mask: Any, attention_mask: Any, *_: Any) -> Any:
            return self.model(sequences, attention_mask=attention_mask)

    members = {"Actor": Actor, "unpad_and_slice_tensor": unpad_and_slice_tensor}
    return {"openrlhf.models.actor": members | {"gather_and_pad_tensor": gather_and_pad_tensor}}


@pytest.mark.few(2)
@pytest.mark.parametrize("packing_samples", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_openrlhf(monkeypatch: pytest.MonkeyPatch, packing_samples: bool, temperature: float) -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    put_modules(stub_openrlhf(), monkeypatch)
    model = build("Gemma2ForCausalLM").double().eval()  # its logits have a softcap
    model.config.use_cache = False  # as OpenRLHF sets it
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(10, 90, (2, S), generator=generator)
    mask = torch.ones_like(sequences)
    mask[0, 9:] = mask[1, 8:] = 0
    action_mask, counts = mask[:, -4:].bool(), mask[:, 1:] * mask[:, :-1]
    ours = adapter("openrlhf", monkeypatch).FusedActor(
        copy.deepcopy(model), packing_samples=packing_samples, temperature=temperature
    )
    logps, output = ours(sequences, action_mask, mask, return_output=True, return_entropy=True)
    assert output.logits is None
    with torch.no_grad():
        every = [ours(sequences, action_mask, mask), ours(sequences, None, mask, return_logprobs=True) * counts]
    logits = model(sequences, attention_mask=mask).logits[:, :-1]
    all_logps, entropy = statistics(logits / temperature, sequences[:, 1:])
    exact = [all_logps[:, -4:] * action_mask, entropy * counts]
    upstream = [torch.linspace(-1, 1, 4).expand(2, 4).double(), exact[1].detach()]
    found = [logps, output.entropy * counts]
    torch.autograd.backward(found, upstream)
    torch.autograd.backward(exact, upstream)
    pairs = zip(ours.model.parameters(), model.parameters(), strict=True)
    for x, e in [*zip(found + every, [*exact, exact[0], all_logps * counts], strict=True),
                 *((p.grad, q.grad) for p, q in pairs)]:  # fmt: skip
        assert relative_error(x.detach(), e.detach()) < 1e-6  # Gemma's RMSNorm is in float32
    assert ours(sequences, None, mask, return_output=True).logits is not None


# cut_cross_entropy, commit d42911f of 2025-06-26: linear_cross_entropy.py, torch_compile.py, vocab_parallel/utils.py.
@on_ranks(WORLD)
def test_cut_cross_entropy_split(rank: int) -> None:
    group, case = here(rank)
    own = (slice(0, 7), slice(7, V))[rank]  # uneven shards
    case = case._replace(own=own)

    def ours(weight: Tensor, hidden: Tensor, reduced: bool, stop: int = own.stop) -> Tensor:
        options = SimpleNamespace(start=own.start, stop=stop, group=group, reduce_e_grad=reduced)
        return cut_cross_entropy.linear_cross_entropy(
            hidden, weight, case.target, reduction="none", vocab_parallel_options=options
        )

    for reduced in (True, False):
        leaves = check_step(partial(ours, reduced=reduced), lambda w, x: -case.logps(w, x), case, is_share=not reduced)
    with pytest.raises(ValueError, match="c must have the rows"):
        ours(*leaves, reduced=True, stop=own.stop + 1)


@pytest.mark.few(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, True, 3])
def test_cut_cross_entropy(reduction: str, shift: int) -> None:
    case, softcap, bias = make_case(), 3.0, torch.linspace(-1, 1, V, dtype=torch.float64)
    keep, later = slice(0, S - int(shift)), slice(int(shift), S)

    def exact(weight: Tensor, hidden: Tensor, bias: Tensor, return_lse: bool) -> list[Tensor]:
        z = softcap * torch.tanh((hidden[:, keep] @ weight.T + bias) / softcap)
        target = case.target[:, later]
        losses = nn.functional.cross_entropy(z.reshape(-1, V), target.reshape(-1), reduction=reduction)
        lse = z.logsumexp(-1).where(target != IGNORE, 0.0)
        return [losses.view(target.shape) if reduction == "none" else losses, *([lse] if return_lse else [])]

    def ours(weight: Tensor, hidden: Tensor, bias: Tensor, return_lse: bool) -> Any:
        options = {"softcap": softcap, "reduction": reduction, "shift": shift, "return_lse": return_lse}
        return cut_cross_entropy.linear_cross_entropy(hidden, weight, case.target, bias, **options)

    for return_lse in (False, True):
        check_step(partial(ours, return_lse=return_lse), partial(exact, return_lse=return_lse), case, (bias,))


@pytest.mark.parametrize(
    ("options", "message"), [({"shift": S}, "shift must be in 0 to 9"), ({"reduction": "max"}, "reduction must be")]
)
def test_cut_cross_entropy_refuses(options: dict[str, Any], message: str) -> None:
    case = make_case()
    with pytest.raises(ValueError, match=message):
        cut_cross_entropy.linear_cross_entropy(case.hidden, case.weight, case.target, **options)


# NeMo-Automodel 0.7.0, nemo_automodel/components/loss/linear_ce.py and linear_ce_base.py.
def test_nemo_automodel(monkeypatch: pytest.MonkeyPatch) -> None:
    class LinearCrossEntropy(nn.Module):
        @staticmethod
        def materialize_lm_weight(lm_weight: Tensor, *, grad_reduce_group: Any = None) -> Tensor:
            return lm_weight

    theirs = installed("nemo_automodel.components.loss.linear_ce")
    if theirs is None:
        base = "nemo_automodel.components.loss.linear_ce_base"
        put_modules({base: {"LinearCrossEntropy": LinearCrossEntropy}}, monkeypatch)
    ours = adapter("nemo_automodel", monkeypatch).FusedLinearCrossEntropy
    call = ["hidden_states", "labels", "lm_weight", "num_label_tokens", "grad_reduce_group", "loss_weights"]
    made = ["ignore_index", "logit_softcapping", "reduction", "impl"]
    for cls in (ours, *([] if theirs is None else [theirs.FusedLinearCrossEntropy])):
        assert names(cls.forward) == call and names(cls.__init__) == made
    case, weights = make_case(), torch.rand(B, S, generator=torch.Generator().manual_seed(0)).double()
    for given, factor in (({"num_label_tokens": 7}, 1 / 7), ({"loss_weights": weights}, weights), ({}, 1.0)):
        check_step(
            lambda w, x, given=given: ours()(x, case.target, w, **given),
            lambda w, x, factor=factor: -(factor * case.logps(w, x)).sum(),
            case,
        )
    with pytest.raises(ValueError, match="reduction must be 'sum' with num_label_tokens, got 'mean'"):
        ours(reduction="mean")(case.hidden, case.target, case.weight, num_label_tokens=3)
    assert ours()(case.hidden, torch.full_like(case.target, IGNORE), case.weight, num_label_tokens=0) == 0


# prime-rl 0.8.0 of 2026-08-21, src/prime_rl/trainer/models/layers/lm_head.py and lm_head_gemma.py. train.py passes
# float32 temperatures of each token, 1 at padding (batch.py), and labels of any value there.
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_prime_rl(softcap: float | None) -> None:
    case = make_case()
    labels = case.target.clamp(min=0)
    temperature = torch.tensor([0.6, 1.0, 1.7])[torch.arange(B * S).view(B, S) % 3]
    cls, more = (prime_rl.FusedOutputLinear, {}) if softcap is None else (
        prime_rl.GemmaFusedOutputLinear, {"softcap": softcap}
    )  # fmt: skip

    def ours(weight: Tensor, hidden: Tensor, **given: Any) -> list[Tensor]:
        head = cls(in_features=H, out_features=V, chunk_size=4, **more)
        head.weight = weight
        stats = head(hidden, **given)
        assert list(stats) == ["logprobs", "entropy"]
        return list(stats.values())

    def exact(weight: Tensor, hidden: Tensor, drops: Tensor | None = None) -> Any:
        z = hidden @ weight.T
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return statistics(z / temperature[..., None], labels, drops)

    given = {"labels": labels, "temperature": temperature}
    leaves = check_step(partial(ours, **given), exact, case)
    for name in given:
        with pytest.raises(ValueError, match=r"(labels|temperature) must be given"):
            ours(*leaves, **{name: given[name]})
    # What the sampler kept, padded with -1. Without the label among it, or without any, all ids count.
    mask = torch.full((B, S, 4), -1, dtype=torch.int32)
    mask[..., 0], mask[:, ::2, 1] = labels, ((labels + 1) % V)[:, ::2]
    mask[0, 0], mask[0, 1, 0] = -1, (labels[0, 1] + 1) % V
    keeps = (torch.arange(V) == mask[..., None].long()).any(-2)
    keeps |= ~keeps.gather(-1, labels[..., None])
    check_step(partial(ours, **given, sampling_mask=mask), partial(exact, drops=~keeps), case)
    half = prime_rl.FusedOutputLinear(H, V, None).bfloat16()
    assert half(case.hidden.bfloat16(), labels, temperature)["logprobs"].dtype == torch.float32
