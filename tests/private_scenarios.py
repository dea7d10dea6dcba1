"""What uses private names: steps that `test_private_names.py` runs in processes where some of them are missing.

Each function compares with public code of torch or with the stock model. Nothing of the package may be imported before
the names are hidden, so each imports what it needs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, H, V = 2, 7, 8, 23


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, hidden states and a target with ignored tokens."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=generator, dtype=dtype).requires_grad_()
    hidden = torch.randn(B, T, H, generator=generator, dtype=dtype).requires_grad_()
    target = torch.randint(V, (B, T), generator=generator)
    target[0, :2] = -100
    return weight, hidden, target


def assert_close(ours: Any, expected: Any, bound: float = 1e-12) -> None:
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)


def step(loss: Callable[..., Tensor], *data: Tensor) -> list[Tensor]:
    """Return a loss, and its gradients by the first two arguments."""
    value = loss(*data)
    return [value.detach(), *torch.autograd.grad(value, data[:2])]


def stock(weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.mT).flatten(0, -2), target.flatten())


def fused(weight: Tensor, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
    from liger_chunked import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(weight, hidden, target, logits_budget=4 * V * 8, **options)


@contextlib.contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"raised none of {kinds}")


@contextlib.contextmanager
def one_rank() -> Iterator[Any]:
    """Yield a mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


# Losses and kernels


def transforms() -> None:
    """Transforms of torch that no fused loss supports raise, whoever notices them."""
    from torch.autograd import forward_ad

    weight, hidden, target = tensors()
    failures = (RuntimeError, NotImplementedError)
    with raises(*failures):
        torch.func.grad(fused)(weight.detach(), hidden.detach(), target)
    with raises(*failures), forward_ad.dual_level():
        fused(forward_ad.make_dual(weight.detach(), torch.ones_like(weight)), hidden.detach(), target)
    values = fused(weight, hidden, target, reduction="none")
    with raises(*failures):
        upstream = torch.eye(B * T, dtype=torch.float64).view(B * T, *values.shape)
        torch.autograd.grad(values, weight, upstream, is_grads_batched=True)
    assert_close(step(fused, weight, hidden, target), step(stock, weight, hidden, target))


def numbers_of_the_host() -> None:
    """What the host writes to a device and what the device asserts."""
    from liger_chunked import private
    from liger_chunked.kernels.survey import on_device

    assert on_device([3, 0, 5], torch.device("cpu")).tolist() == [3, 0, 5]
    private.assert_async(torch.tensor(True), "holds")
    with raises(RuntimeError):
        private.assert_async(torch.tensor(False), "does not hold")
    data = tensors()
    assert_close(step(fused, *data), step(stock, *data))


def base_kernels() -> None:
    """Kernels that may work in place."""
    from liger_chunked.layers import liger_rotary_pos_emb, liger_swiglu

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 4, generator=generator, dtype=torch.float64) for heads in (2, 1))
    angle = torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    angle[..., 2:] = angle[..., :2]

    def rotated(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return x * angle.cos()[:, None] + turned * angle.sin()[:, None]

    mine = liger_rotary_pos_emb(q.clone(), k.clone(), angle.cos(), angle.sin(), inplace=True)
    assert_close(mine, [rotated(q), rotated(k)])
    leaf = q.clone().requires_grad_()
    with raises(ValueError, RuntimeError):  # a view of a leaf
        liger_rotary_pos_emb(leaf[:], k.clone(), angle.cos(), angle.sin(), inplace=True)

    gate, up = (torch.randn(3, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))

    def of(swiglu: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        y = swiglu(gate * 1, up * 1)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), (gate, up))]

    expected = of(lambda a, b: F.silu(a) * b)
    assert_close(of(lambda a, b: liger_swiglu(a, b, inplace=True)), expected)
    y = liger_swiglu(gate * 1, up * 1, inplace=True)
    assert_close(torch.autograd.grad(y.sin().sum(), (gate, up), retain_graph=True), expected[1:])
    assert_close(torch.autograd.grad(y.sin().sum(), (gate, up)), expected[1:])


def interpreted() -> None:
    """The Triton kernels, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from liger_chunked import LigerFusedLinearCrossEntropyLoss
    from liger_chunked.kernels import backend

    assert backend.INTERPRETED and backend.triton is not None
    data = tensors(torch.float32)
    assert_close(step(LigerFusedLinearCrossEntropyLoss, *data), step(stock, *data), 1e-5)


class Launches:
    """Stands for a jitted kernel and its compiled form. Counts launches by Triton and by this library."""

    function, packed_metadata = 7, ()

    def __init__(self) -> None:
        self.launched: list[str] = []

    def run(self, *received: Any) -> None:
        assert received == (1, 1, 1, STREAM, 7, (), None, None, None, received[9], 32)
        self.launched.append("us")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def jitted(*arguments: Any, **options: Any) -> Launches:
            self.launched.append("Triton")
            return self

        return jitted


STREAM = 11


def launches() -> None:
    """Each launch of a kernel happens once, whether by Triton or by us."""
    from types import SimpleNamespace

    from liger_chunked import private
    from liger_chunked.kernels import launch

    if private._triton_driver is not None:  # this machine may have none
        private._triton_driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: STREAM))
    launch._HAS_CURRENT_DEVICE, launch._REMEMBERS = False, private.KNOWS_TRITON
    launch.jit = lambda function: Launches()  # type: ignore[assignment]
    kernel = launch.Kernel(lambda x_ptr, n: None)
    for _ in range(4):
        kernel((1, 1, 1), (torch.zeros(32),), (32,), 4)
    launched = kernel.kernel.launched
    assert launched in (["Triton", "us", "us", "us"], ["Triton"] * 4), launched
    data = tensors()
    assert_close(step(fused, *data), step(stock, *data))


def selective() -> None:
    """A step inside of a selective checkpoint."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    weight, hidden, target = tensors()
    loss = checkpoint(lambda w, x: fused(w, x, target), weight, hidden, use_reentrant=False, context_fn=contexts)
    with contextlib.suppress(RuntimeError):  # without the private function, torch says what changed
        loss.backward()


def tensor_kinds() -> None:
    """Tensors that are not what they seem: right, or refused with a TypeError."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    weight, hidden, target = tensors()
    expected = stock(weight, hidden, target)
    with torch.no_grad():
        try:
            value = fused(weight, AsyncCollectiveTensor(hidden.detach()), target)
        except TypeError as error:
            assert "pass the plain torch.Tensor" in str(error)
        else:
            assert_close([value], [expected.detach()])
    with FakeTensorMode(), raises(TypeError):
        fused(torch.empty(V, H), torch.empty(B, T, H), torch.empty(B, T, dtype=torch.int64))
    assert_close([fused(weight, hidden, target)], [expected])


# Compiled code


def compiled() -> None:
    """Compiled steps, whose graph breaks at a loss."""
    from liger_chunked import LigerFusedLinearCrossEntropyLoss

    data = tensors()
    expected = step(stock, *data)
    module = LigerFusedLinearCrossEntropyLoss()

    @torch.compile(backend="eager")
    def by_module(weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        return 2 * module(weight * 1, hidden * 1, target)

    for compiled, factor in ((by_module, 2), (torch.compile(module, backend="eager"), 1)):
        for _ in range(2):
            assert_close(step(compiled, *data), [factor * x for x in expected])


def any_sizes() -> None:
    """FlexAttention that is compiled once for all sizes."""
    from liger_chunked import private
    from liger_chunked.shared_prefix import attention

    assert attention.any_sizes is private.any_sizes
    run = torch.compile(lambda x, y: x @ y.mT + y.shape[0], backend="eager", fullgraph=True)
    for n in (5, 5, 9):
        x, y = torch.randn(n, 3), torch.randn(5, 3)
        with private.any_sizes((x, (0,)), (y, (0,))):
            assert_close([run(x, y)], [x @ y.mT + 5], 1e-6)


# Deferred logits


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H)
        self.body = nn.Sequential(nn.Linear(H, H), nn.GELU())
        self.lm_head = nn.Linear(H, V, bias=False)

    def forward(self, ids: Tensor) -> Any:
        return self.lm_head(self.body(self.embedding(ids)))


IDS = torch.arange(20).view(2, 10) % V


def decoder_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())


def training(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """Return the losses of two steps, and the parameters after them."""
    values = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.detach())
    return [*values, *(p.detach() for p in model.parameters())]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def token_logps(model: nn.Module) -> Tensor:
    logits = model(IDS[:, :-1])
    rows = zip(logits, IDS[:, 1:], strict=True)
    return -torch.stack([F.log_softmax(z, dim=-1).gather(-1, ids[:, None])[:, 0] for z, ids in rows]).mean()


USES: dict[str, Callable[[nn.Module], Tensor]] = {
    "loss": decoder_loss,
    "log_softmax": token_logps,
    "sums": lambda model: torch.stack([model(IDS).exp().mean(), model(IDS).sum()]).sum() / 100,
    "function": lambda model: Doubled.apply(model(IDS)).logsumexp(-1).mean(),
}


def deferred() -> None:
    """Heads that defer their logits, in each use of them, and with hooks that see them."""
    from liger_chunked import defer_logits

    for use in USES.values():
        expected = training(Decoder(), use)
        model = Decoder()
        defer_logits(model.lm_head)
        assert_close(training(model, use), expected, 1e-5)

    def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 0.5 if isinstance(module, nn.Linear) and module.out_features == V else output

    for register in (
        lambda model: model.lm_head.register_forward_hook(halve),
        lambda model: nn.modules.module.register_module_forward_hook(halve),
        lambda model: model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,)),
    ):
        results = []
        for deferring in (False, True):
            model = Decoder()
            if deferring:
                defer_logits(model.lm_head)
            handle = register(model)
            results.append(training(model, decoder_loss))
            handle.remove()
        assert_close(*results, 1e-5)

    # The weights change between the call of the model and the loss: an error, or the value of the call.
    model = Decoder()
    exact = model(IDS).logsumexp(-1).mean().detach()
    defer_logits(model.lm_head)
    logits = model(IDS)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    try:
        value = logits.logsumexp(-1).mean().detach()
    except RuntimeError as error:
        assert "changed after the model called it" in str(error)
    else:
        assert_close([value], [exact], 1e-5)


def deferred_in_ranks() -> None:
    """A deferring head in DDP, FSDP2 and FSDP1: alone in a group, and in that of the root."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from liger_chunked import defer_logits

    def fsdp1(model: Any, apart: bool) -> Any:
        if apart:
            model.lm_head = FullyShardedDataParallel(model.lm_head, use_orig_params=True, device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    def fsdp2(model: Any, apart: bool) -> Any:
        if apart:
            fully_shard(model.lm_head)
        return fully_shard(model)

    with one_rank():
        for wrap in (lambda model, apart: DistributedDataParallel(model), fsdp1, fsdp2):
            for apart in (False, True):
                steps = []
                for defers in (False, True):
                    torch.manual_seed(0)
                    model = Decoder()
                    if defers:
                        defer_logits(model.lm_head)
                    model = wrap(model, apart)
                    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
                    for _ in range(3):
                        losses.append(decoder_loss(model))
                        losses[-1].backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    steps.append([loss.detach() for loss in losses])
                # float32: the fused loss adds in another order.
                assert_close(*steps, 1e-5)


# Models of transformers


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).train()


def labelled_loss(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def head_fn_loss(model: nn.Module) -> Tensor:
    from liger_chunked import LigerFusedLinearCrossEntropyLoss

    def fn(head: Any, given: Any) -> Tensor:
        return LigerFusedLinearCrossEntropyLoss(head.weight, given.hidden_states, given.target, head.bias)

    return model(input_ids=IDS, labels=IDS, head_fn=fn)


def patched() -> None:
    """A patched model, one with `attach_head`, and their removal."""
    from liger_chunked import apply_liger_kernel, attach_head, revert_liger_kernel

    expected = training(llama(), labelled_loss)
    model = llama()
    apply_liger_kernel(model)
    assert_close(training(model, labelled_loss), expected, 1e-4)
    revert_liger_kernel(model)
    assert_close([labelled_loss(model)], [labelled_loss(with_parameters_of(model))], 1e-6)
    model = llama()
    attach_head(model)
    try:
        trained = training(model, head_fn_loss)
    except ValueError as error:
        assert "which this torch does not show" in str(error)
    else:
        assert_close(trained, expected, 1e-4)
    model = llama()
    attach_head(model)
    compiled = torch.compile(model, backend="eager")
    assert_close(training(compiled, labelled_loss), expected, 1e-4)
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: output * 0.5)
    apply_liger_kernel(model)
    twin = with_parameters_of(model)
    twin.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: output * 0.5)
    assert_close(training(model, labelled_loss), training(twin, labelled_loss), 1e-4)


def with_parameters_of(model: nn.Module) -> Any:
    twin = llama()
    twin.load_state_dict(model.state_dict())
    return twin


def shared_prompts() -> None:
    """Prompts that are computed once for several sequences, or a reason why not."""
    from liger_chunked.shared_prefix import why_not_shared

    model = llama(attn_implementation="sdpa").eval()
    assert why_not_shared(model) is None or "attention" in str(why_not_shared(model))


def recorded() -> None:
    """The ids that `generate` keeps, or an error that says it cannot be recorded."""
    from liger_chunked.integrations.transformers import record_kept_ids

    model = llama().eval()
    try:
        with record_kept_ids(model) as recorder:
            sequences = model.generate(torch.tensor([[5, 6]]), do_sample=True, top_k=3, max_new_tokens=2)
    except RuntimeError as error:
        assert "no generate of transformers" in str(error)
        return
    assert recorder.kept_ids(sequences[:, 2:]).ids.numel() == 6


def offloaded() -> None:
    """Models whose weights accelerate's hooks bring and take away."""
    from accelerate import cpu_offload

    from liger_chunked import apply_liger_kernel, defer_logits

    def loss(model: nn.Module) -> list[Tensor]:
        value = F.cross_entropy(model(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        return [value.detach()]

    expected = loss(llama())
    for prepare in (
        lambda model: (cpu_offload(model), defer_logits(model.lm_head)),
        lambda model: (defer_logits(model.lm_head), cpu_offload(model)),
        lambda model: (cpu_offload(model), apply_liger_kernel(model)),
        lambda model: (apply_liger_kernel(model), cpu_offload(model)),
    ):
        model = llama()
        prepare(model)
        with torch.no_grad():
            assert_close(loss(model), expected, 1e-4)


def second_trainer() -> None:
    """A head on a model that a trainer of TRL left, with its own head and accelerate's autocast."""
    from accelerate import Accelerator
    from trl.trainer import utils

    from liger_chunked.integrations.trl.heads import Heads, HeadSettings

    model = llama()
    utils.add_fused_lm_head(model)
    expected = model(IDS, labels=IDS, fused_lm_head=True).log_probs
    utils.add_fused_lm_head(model, temperature=2.0)
    Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    heads = Heads(HeadSettings())
    heads.set([model])
    assert "forward" not in vars(model)
    assert_close([model(IDS, labels=IDS, fused_lm_head=True).log_probs], [expected], 1e-4)


def replicated() -> None:
    """The copies of `nn.DataParallel` defer too. It gathers their logits, which makes them real."""
    from liger_chunked import DeferredLogits, defer_logits

    model = Decoder().train()
    defer_logits(model.lm_head)
    assert isinstance(model(IDS), DeferredLogits)
    copy = model.lm_head._replicate_for_data_parallel()
    copy.weight, copy.bias = model.lm_head.weight * 1, None
    x = torch.randn(2, H)
    assert_close([torch.cat([copy(x), copy(x)])], [F.linear(torch.cat([x, x]), copy.weight)], 1e-5)


def parallel() -> None:
    """Layers that `parallelize_module` runs on DTensors."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    from liger_chunked import apply_liger_kernel

    def build(mesh: Any) -> Any:
        model = llama()
        layer = "model.layers.0."
        plan = {
            f"{layer}mlp.gate_proj": ColwiseParallel(),
            f"{layer}mlp.up_proj": ColwiseParallel(),
            f"{layer}mlp.down_proj": RowwiseParallel(),
            "model.norm": SequenceParallel(use_local_output=True),
        }
        return parallelize_module(model, mesh, plan)

    with one_rank() as mesh:
        expected = build(mesh)(input_ids=IDS, labels=IDS).loss
        model = build(mesh)
        apply_liger_kernel(model)
        try:
            value = model(input_ids=IDS, labels=IDS).loss
        except (TypeError, RuntimeError) as error:
            assert "DTensor" in str(error)
        else:
            assert_close([value], [expected], 1e-5)


# Trainers of TRL


def multi_token() -> None:
    """A Megatron-Core that has only what `chunked_heads` looks up."""
    import sys
    from types import ModuleType

    from liger_chunked.integrations.frameworks.megatron import chunked_heads

    path = "megatron.core.transformer.multi_token_prediction"
    parts = path.split(".")
    modules = {".".join(parts[: i + 1]): ModuleType(".".join(parts[: i + 1])) for i in range(len(parts))}
    for name in parts[1:]:
        outer, _, _ = path.partition(f".{name}")
        setattr(modules[outer], name, modules[f"{outer}.{name}"])

    def process_mtp_loss(output_layer: Any, config: Any, compute_language_model_loss: Any) -> None: ...

    stock = modules[path].process_mtp_loss = process_mtp_loss  # type: ignore[attr-defined]
    sys.modules.update(modules)
    with chunked_heads():
        assert modules[path].process_mtp_loss is not stock
    assert modules[path].process_mtp_loss is stock


def _log(name: str, ours: bool, config: dict[str, Any] | None = None, **arguments: Any) -> list[dict[str, float]]:
    from trl_kinds import run

    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), name, ours, {"max_steps": 2, **(config or {})}, **arguments)


def _assert_same_training(name: str, loss: nn.Module | None = None, **arguments: Any) -> None:
    """Train two steps as TRL does, or raise a RuntimeError that names TRL."""
    theirs = _log(name, False, **arguments)
    given = {} if loss is None else {"loss": loss}
    try:
        ours = _log(name, True, **given, **arguments)
    except RuntimeError as error:
        assert "TRL" in str(error)
        return
    for mine, stock in zip(ours, theirs, strict=True):
        for key in mine.keys() & stock.keys() & {"loss", "grad_norm", "train_loss"}:
            assert abs(mine[key] - stock[key]) <= 1e-4 * abs(stock[key]) + 1e-5, (key, mine, stock)


def dpo_trainer() -> None:
    from liger_chunked import LigerFusedLinearDPOLoss

    _assert_same_training("DPO", LigerFusedLinearDPOLoss())


def grpo_trainer() -> None:
    """As TRL does, and over what the sampler kept."""
    from liger_chunked import LigerFusedLinearGRPOLoss

    _assert_same_training("GRPO")
    _assert_same_training("GRPO", LigerFusedLinearGRPOLoss(reduction="dapo"))
    try:
        _log("GRPO", True, {"top_p": 0.9}, kept_ids=True)
    except RuntimeError as error:
        assert "TRL" in str(error) or "generate" in str(error)


def sft_trainer() -> None:
    _assert_same_training("SFT")


def stock_trainer() -> None:
    """A stock trainer under `patch_trl`; or an error that says what is missing."""
    import tiny
    from trl import DPOConfig, DPOTrainer

    try:
        from liger_chunked import patch_trl
    except ImportError as error:
        assert "_BaseTrainer" in str(error)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = {"precompute_ref_log_probs": True, "max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
        given: Any = {"processing_class": tiny.tokenizer(), "train_dataset": tiny.dataset("pairs")}
        with patch_trl():
            DPOTrainer(tiny.model(), args=DPOConfig(folder, **config), **given).train()


def distillation_trainer() -> None:
    from liger_chunked import LigerFusedLinearJSDLoss

    _assert_same_training("Distillation")
    _assert_same_training("Distillation", LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0))


def kto_trainer() -> None:
    from liger_chunked import LigerFusedLinearKTOLoss

    _assert_same_training("KTO", LigerFusedLinearKTOLoss())
