"""The memory of a whole training step, from a model's config.

One layer of each kind runs on the meta device, as a checkpoint runs it in the backward; `_Recorder` counts what it
allocates. The moments of a step with L layers are then sums:

    loss:             weights, optimizer states, L checkpoints, and the head (`estimate_memory`)
    backward of l:    weights, optimizer states, l checkpoints, gradients of the head and of the layers after l, layer l
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_chunked.integrations.transformers.patch import apply_liger_kernel
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.memory import estimate_memory, most_that_fits, ordinary_autograd, peak_bytes
from liger_chunked.private import tree_leaves, tree_map_only
from liger_chunked.types import budget_bytes, check_number, shown
from liger_chunked.typical import Loss

_ATTENTION = "liger_chunked_estimate"
_STEP = 1024  # tokens, the precision of `longest_sequence`
_MOST = 1 << 24  # tokens, where its search ends


@dataclass(frozen=True)
class StepEstimate:
    """A training step's memory on one device at its peak, by part, in bytes; `peak` is their sum.

    - `weights`: all parameters, and those of the reference
    - `optimizer`: its states
    - `gradients`: those that exist at the peak
    - `checkpoints`: inputs of the layers that are still to be recomputed, and what all layers read
    - `layer`: what the recomputation and the backward of one layer allocate, and the gradient that they get; 0 if the
      peak is at the loss
    - `head`: what the loss allocates, and the hidden states; 0 if the peak is in a layer

    `print` shows the parts in GiB.
    """

    weights: int
    optimizer: int
    gradients: int
    checkpoints: int
    layer: int
    head: int

    @property
    def peak(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {n / 2**30:.2f}" for name, n in asdict(self).items() if n)
        return f"{self.peak / 2**30:.2f} GiB: {parts}"


@ordinary_autograd()
def estimate_step(
    config: PretrainedConfig,
    *,
    shape: Sequence[int],
    loss: Loss | None = None,
    tiled_mlp: bool | int | Literal["auto"] | None = None,
    checkpoints: Literal["device", "host"] = "device",
    dtype: torch.dtype = torch.bfloat16,
    trainable: bool = True,
    adapter: Any = None,
    reference: bool = False,
    optimizer_bytes: float | None = None,
    accumulates: bool = False,
    logits_budget: int | float | str | None = None,
    capability: tuple[int, int] | None = None,
) -> StepEstimate:
    """Estimate the peak memory of a training step of a patched model on one GPU, with checkpointed layers.

    For decoders whose attention calls transformers' attention functions, which is counted as FlashAttention 2: no
    matrix of T x T, a float32 gradient of the queries, and gradients of all heads' keys. Not counted: the CUDA context,
    cuBLAS's workspace and fragmentation (allow 1 to 2 GiB).

    Args:
        config: of a causal language model of transformers. A model of images and text counts with the weights of all
            parts, and a step on text alone.
        shape: (B, T), sequences and their length.
        loss: as in `estimate_memory`, without a teacher. None: the cross entropy.
        tiled_mlp: whether the gated MLPs run in tiles: True, "auto" or the tokens of a tile, as in
            `apply_liger_kernel`. None: they run whole.
        checkpoints: where the inputs of the layers are between forward and backward. With "host", as under TRL's
            `activation_offloading`, the one of the layer at work is on the device.
        dtype: of weights, gradients and activations.
        trainable: whether the weights train. With `adapter`, its alone do.
        adapter: a config of PEFT for adapters of linear layers, as `LoraConfig(r=16, target_modules="all-linear")`.
            Their weights are in `dtype`, as `get_peft_model(..., autocast_adapter_dtype=False)` makes them. Float32
            ones, which are PEFT's default, take twice the bytes, and copy the input of each adapted layer in float32.
            None: no adapter.
        reference: whether a second, frozen model of this config is on the device, as TRL loads one for DPO and KTO
            without an adapter. Its weights count, and its hidden states, which `loss` gets. False: there is none, or
            its log-probabilities are given.
        optimizer_bytes: of its states, for each trainable parameter. None: two states in `dtype`, as torch's AdamW has
            them; 8 with float32 states, 12 with float32 weights too, 2 with 8-bit states.
        accumulates: whether gradients of an earlier micro-batch exist.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: the loss's own.
        capability: the GPU's compute capability, such as (9, 0) for Hopper. None: that of this machine's GPU, or
            without one Hopper's.

    Returns:
        A `StepEstimate`: bytes by part at the peak, and their sum `peak`.

    Raises:
        TypeError: `config` is no config of transformers, `adapter` none of PEFT, or another argument has the wrong
            type.
        ValueError: `checkpoints` is unknown, `shape` is invalid, `loss` takes no reference, transformers has no causal
            model for this config, its layers are not made for checkpoints, or they read values of tensors, which an
            estimate does not have.

    >>> from transformers import LlamaConfig
    >>> sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    >>> config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
    >>> whole, tiles = (estimate_step(config, shape=(1, 65536), tiled_mlp=t).layer >> 20 for t in (None, "auto"))
    >>> print(f"{whole:,} MiB, in tiles {tiles:,} MiB")
    5,800 MiB, in tiles 2,936 MiB
    """
    model = _Model(config, tiled_mlp, dtype, trainable, adapter, reference, optimizer_bytes)
    head = {"loss": loss, "logits_budget": logits_budget, "capability": capability}
    return model.estimate(shape, checkpoints, accumulates, head)


@ordinary_autograd()
def longest_sequence(
    config: PretrainedConfig,
    *,
    free: int | float | str,
    n_sequences: int = 1,
    loss: Loss | None = None,
    tiled_mlp: bool | int | Literal["auto"] | None = None,
    checkpoints: Literal["device", "host"] = "device",
    dtype: torch.dtype = torch.bfloat16,
    trainable: bool = True,
    adapter: Any = None,
    reference: bool = False,
    optimizer_bytes: float | None = None,
    accumulates: bool = False,
    logits_budget: int | float | str | None = None,
    capability: tuple[int, int] | None = None,
) -> int:
    """Return the longest sequence whose step takes at most `free` bytes, in multiples of 1024 tokens; 0 if none does.

    Args:
        config: of a causal language model of transformers, as in `estimate_step`.
        free: bytes of the device, a number or a string such as "78GiB"; leave out what `estimate_step` does not count.
        n_sequences: B, of a batch.
        loss: as in `estimate_memory`. None: the cross entropy.
        tiled_mlp: whether the gated MLPs run in tiles: True, "auto" or the tokens of a tile. None: they run whole.
        checkpoints: where the inputs of the layers are between forward and backward, "device" or "host".
        dtype: of weights, gradients and activations.
        trainable: whether the weights train. With `adapter`, its alone do.
        adapter: a config of PEFT, as in `estimate_step`. None: no adapter.
        reference: whether a second, frozen model of this config is on the device.
        optimizer_bytes: of its states, for each trainable parameter. None: two states in `dtype`.
        accumulates: whether gradients of an earlier micro-batch exist.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: the loss's own.
        capability: the GPU's compute capability, such as (9, 0) for Hopper. None: that of this machine's GPU, or
            without one Hopper's.

    Returns:
        T, at most 2**24.

    Raises:
        TypeError, ValueError: as `estimate_step`.
    """
    most = budget_bytes(free)
    if most is None:
        raise TypeError('free must be a number of bytes or a string such as "78GiB", got None')
    check_number("n_sequences", n_sequences, whole=True)
    model = _Model(config, tiled_mlp, dtype, trainable, adapter, reference, optimizer_bytes)
    head = {"loss": loss, "logits_budget": logits_budget, "capability": capability}

    def fits(steps: int) -> bool:
        return model.estimate((n_sequences, steps * _STEP), checkpoints, accumulates, head).peak <= most

    return _STEP * most_that_fits(fits, _MOST // _STEP)


@dataclass(frozen=True)
class _Layer:
    """Bytes of a layer: its input, its parameters' gradients, and the peak of its recomputation and backward."""

    checkpoint: int
    gradients: int
    backward: int


class _Model:
    """A patched model on the meta device, and what is counted of it."""

    def __init__(
        self,
        config: PretrainedConfig,
        tiled_mlp: bool | int | Literal["auto"] | None,
        dtype: torch.dtype,
        trainable: bool,
        adapter: Any,
        reference: bool,
        optimizer_bytes: float | None,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise TypeError(f"config must be a config of transformers, got {shown(config)}")
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point torch.dtype, got {shown(dtype)}")
        if not (adapter is None or hasattr(adapter, "peft_type")):
            raise TypeError(f"adapter must be a config of PEFT, as LoraConfig(r=16), or None, got {shown(adapter)}")
        check_number("optimizer_bytes", optimizer_bytes, optional=True)
        with torch.device("meta"):
            self.model: Any = _causal_model(copy.deepcopy(config), dtype)  # a model sets its attention in its config
            self.model.train().requires_grad_(trainable)
            self.reference = _bytes_of(self.model.parameters()) if reference else 0
            if adapter is not None:
                _add_adapter(self.model, adapter, dtype)
        # A model that our kernels do not serve is counted with its own layers.
        with suppress(ValueError) if tiled_mlp in (None, False) else nullcontext():
            apply_liger_kernel(self.model, tiled_mlp=tiled_mlp, fused_linear_cross_entropy=False)
        self.dtype = dtype
        self.weights = _bytes_of(self.model.parameters())
        trained = _trained(self.model)
        self.gradients = _bytes_of(trained)
        states = 2 * dtype.itemsize if optimizer_bytes is None else optimizer_bytes
        self.optimizer = int(states * sum(p.numel() for p in trained))

    def estimate(self, shape: Sequence[int], checkpoints: str, accumulates: bool, head: dict[str, Any]) -> StepEstimate:
        if checkpoints not in ("device", "host"):
            raise ValueError(f"checkpoints must be 'device' or 'host', got {shown(checkpoints)}")
        if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
            raise ValueError(f"shape must be (B, T), two positive ints, got {shown(shape)}")
        layers, shared = self._layers(tuple(shape))
        output = self.model.get_output_embeddings()
        weight, rank = output.weight, sum(getattr(output, "r", {}).values())  # `r` of an adapter on the head
        hidden = prod(shape) * weight.shape[1] * self.dtype.itemsize
        ours = head["loss"] if head["loss"] is not None else LigerFusedLinearCrossEntropyLoss()
        of_head = estimate_memory(
            ours,
            vocab_size=weight.shape[0],
            hidden_size=weight.shape[1],
            shape=tuple(shape),
            dtype=self.dtype,
            trainable_head=weight.requires_grad,
            lora_rank=rank or None,
            ref_hidden_size=weight.shape[1] if self.reference else None,
            logits_budget=head["logits_budget"],
            capability=head["capability"],
        )
        kept = sum(layer.checkpoint for layer in layers)
        if checkpoints == "host":
            kept = max(layer.checkpoint for layer in layers)  # of the layer at work
        kept += shared
        constant = StepEstimate(self.weights + self.reference, self.optimizer, 0, 0, 0, 0)
        # The last norm keeps its input, the head its own, and the loss the reference's.
        states = (3 if self.reference else 2) * hidden
        at_loss = replace(
            constant, gradients=accumulates * self.gradients, checkpoints=kept, head=of_head.peak + states
        )
        moments = [at_loss]
        done = _bytes_of(_trained(output))  # gradients of the head and of the layers after this one
        for layer in reversed(layers):
            moments.append(
                replace(
                    constant,
                    gradients=self.gradients if accumulates else done,
                    checkpoints=kept,
                    layer=layer.backward,
                )
            )
            done += layer.gradients
            if checkpoints == "device":
                kept -= layer.checkpoint
        return max(moments, key=lambda moment: moment.peak)

    def _layers(self, shape: tuple[int, ...]) -> tuple[list[_Layer], int]:
        """Return the layers, and the bytes of what all of them read, such as angles of positions."""
        recorder = _Recorder()
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                vars(module).pop("forward", None)  # of the last estimate
                module.forward = recorder.of(module, module.forward)
        ids = torch.zeros(shape, dtype=torch.long, device="meta")
        base = self.model.base_model
        try:
            base(input_ids=ids, use_cache=False)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{type(self.model).__name__} reads values of tensors, and an estimate has none: {error}"
            ) from error
        if not recorder.layers:
            raise ValueError(f"{type(self.model).__name__} has no layers that transformers can checkpoint")
        return recorder.layers, _bytes_of(recorder.shared.values())


def _causal_model(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    kinds: tuple[tuple[Any, Any], ...] = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    )
    for found in (config.get_text_config(), config):
        for mapping, auto in kinds:
            if type(found) in mapping:
                return auto.from_config(found, dtype=dtype, attn_implementation=_ATTENTION)
    raise ValueError(f"transformers has no causal language model for a {type(config).__name__}")


def _add_adapter(model: Any, adapter: Any, dtype: torch.dtype) -> None:
    """Add an adapter of PEFT to a model on the meta device, with weights in `dtype`, and freeze the model's own."""
    if getattr(adapter, "modules_to_save", None):
        raise ValueError(f"adapter must be of linear layers alone, got modules_to_save={adapter.modules_to_save}")
    get_peft_model = import_module("peft").get_peft_model
    get_peft_model(model, copy.deepcopy(adapter), autocast_adapter_dtype=False)
    for x in _trained(model):
        x.data = x.data.to(dtype)  # PEFT casts only adapters that have values


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [x for x in module.parameters() if x.requires_grad]


def _bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class _Recorder:
    """Takes the place of the forward of each layer that a checkpoint would recompute, and counts what it allocates.

    Layers of one kind have equal classes, parameters and attributes; the first of each runs.
    """

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
        self.shared: dict[int, Tensor] = {}
        self._kinds: dict[Any, tuple[_Layer, Any]] = {}

    def of(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            self.shared |= {id(x): x for x in tree_leaves(kwargs) if isinstance(x, Tensor)}
            key = _kind(layer)
            if key not in self._kinds:
                self._kinds[key] = self._count(layer, partial(forward, **kwargs), args)
            counted, output = self._kinds[key]
            self.layers.append(counted)
            return tree_map_only(Tensor, lambda x: torch.empty_like(x), output)

        return record

    def _count(self, layer: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[_Layer, Any]:
        floating = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
        given = tree_map_only(Tensor, lambda x: _leaf(x), args)
        output: Any = None

        def backward() -> None:
            nonlocal output
            output = checkpoint(function, *given, use_reentrant=False)
            first = next(x for x in tree_leaves(output) if isinstance(x, Tensor))
            # The product's backward makes an upstream gradient that, as in a step, only autograd holds.
            first.mul(2.0).sum().backward()

        peak = peak_bytes(backward)
        layer.zero_grad()
        trained = _trained(layer)
        result = tree_map_only(Tensor, lambda x: x.detach(), output)
        # In a step nothing holds a layer's output during its backward. Here it is the input of the layers that follow.
        held = _bytes_of(x for x in tree_leaves(output) if isinstance(x, Tensor))
        return _Layer(_bytes_of(floating), _bytes_of(trained), peak - held), result


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() else x


def _kind(layer: nn.Module) -> Any:
    plain = (bool, int, float, str)
    names = ("layer_idx",)  # alone tells equal layers apart
    attributes = [
        sorted((n, x) for n, x in vars(module).items() if isinstance(x, plain) and n not in names)
        for module in layer.modules()
    ]
    return type(layer), repr(attributes), tuple(p.shape for p in layer.parameters())


class _FlashAttention(torch.autograd.Function):
    """Allocates what FlashAttention 2 does; q, k and v are (B, heads, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The kernel reads the output and the log-sum-exp too, to its end. Under a checkpoint nothing else holds them.
        q, k, v, output, lse = ctx.saved_tensors
        row_sums = torch.empty_like(lse)  # sums of the rows of output * its gradient
        sums = torch.empty_like(q, dtype=torch.float32)
        heads = (q.shape[0], q.shape[1], k.shape[2])
        of_heads = [x.new_empty(*heads, x.shape[-1]) for x in (k, v)] if k.shape[1] < q.shape[1] else []
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del output, row_sums, sums, of_heads
        return gradients


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _FlashAttention.apply(query, key, value), None


# Without a function for masks of the same name, transformers makes no mask.
AttentionInterface.register(_ATTENTION, _attend)
