"""Benchmark the experts of one layer of a mixture of experts, forward and backward, in the sizes of the models.

python -m benchmarks.experts qwen3-30b-a3b:8192 gpt-oss-20b:8192 deepseek-v3:8192        layer:tokens

Each token takes random experts. Contenders: transformers' module, with each of its `experts_implementation`s, after our
`apply_liger_kernel(model)`, and after Liger-Kernel's function. They share the weights. DeepSeek-V3 has 32 of its 256
experts, as on each of eight ranks: each expert gets as many rows as if all ranks had sent theirs.

The floor is the time of the grouped products alone: two forward, four backward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import models
from benchmarks.base_kernels import Backward
from benchmarks.harness import (
    DEVICE,
    DTYPE,
    OURS,
    STOCK,
    Contenders,
    Loss,
    Skipped,
    Table,
    benchmark,
    hidden_states,
    median_ms,
)
from liger_chunked import apply_liger_kernel

# torch 2.9 has it under this name.
GROUPED_MM: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm

_ONE_LAYER: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 1, "pad_token_id": None}
_TINY: dict[str, Any] = {
    **_ONE_LAYER,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
_TINY_DEEPSEEK: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Model type, sizes beyond the defaults of its config, and the dtype of a router's weights.
LAYERS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "qwen3-30b-a3b": ("qwen3_moe", _ONE_LAYER, DTYPE),
    "gpt-oss-20b": ("gpt_oss", {**_ONE_LAYER, "num_local_experts": 32}, DTYPE),
    "deepseek-v3": (
        "deepseek_v3",
        {**_ONE_LAYER, "first_k_dense_replace": 0, "n_routed_experts": 32, "bos_token_id": None, "eos_token_id": None},
        torch.float32,
    ),
    "tiny-qwen3-moe": ("qwen3_moe", {**_TINY, "num_experts": 4}, DTYPE),
    "tiny-gpt-oss": ("gpt_oss", {**_TINY, "num_local_experts": 4, "head_dim": 16}, DTYPE),
    "tiny-deepseek-v3": (
        "deepseek_v3",
        {**_TINY, **_TINY_DEEPSEEK, "first_k_dense_replace": 0, "n_routed_experts": 4},
        torch.float32,
    ),
}
SHAPES = ["qwen3-30b-a3b:8192", "gpt-oss-20b:8192", "deepseek-v3:8192"]
SMALL = ["tiny-qwen3-moe:32", "tiny-gpt-oss:32", "tiny-deepseek-v3:32"]
DEFAULT = "grouped_mm"


class Layer:
    """The experts of one layer, whose weights all contenders share, and a batch."""

    def __init__(self, name: str, tokens: int) -> None:
        self.family, self.sizes, dtype = LAYERS[name]
        model = self.model()
        self.config, self.weights = model.config, dict(experts_of(model).named_parameters())
        n, top_k = self.config.num_local_experts, self.config.num_experts_per_tok
        self.input = hidden_states(tokens, self.config.hidden_size).requires_grad_()
        self.index = torch.rand(tokens, n, device=DEVICE).topk(top_k).indices
        self.routing = torch.randn(tokens, top_k, device=DEVICE).softmax(-1).to(dtype).requires_grad_()
        self.grad = hidden_states(tokens, self.config.hidden_size)

    def model(self) -> PreTrainedModel:
        config = AutoConfig.for_model(self.family, **self.sizes)
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(config, dtype=DTYPE, experts_implementation=DEFAULT)

    def experts(self, model: PreTrainedModel) -> nn.Module:
        """Return the experts of a model, with the weights that the contenders share."""
        experts = experts_of(model)
        for name, weight in self.weights.items():
            setattr(experts, name, weight)
        return experts

    def loss(self, experts: Any) -> Loss:
        return lambda x, routing: Backward(experts(x, self.index, routing), [self.grad])

    def stock(self, way: str = DEFAULT) -> Loss:
        model = self.model()
        model.set_experts_implementation(way)
        return self.loss(self.experts(model))

    def ours(self) -> nn.Module:
        model = self.model()
        report = apply_liger_kernel(model)
        if type(experts_of(model)).__name__ in report.left:
            raise RuntimeError(str(report))
        return self.experts(model)

    def liger_kernel(self) -> Loss:
        model = self.model()
        with models.liger_kernel(model, fused=False):
            experts = self.experts(model)
        if "forward" not in vars(experts):
            raise Skipped("Liger-Kernel leaves these experts alone")
        return self.loss(experts)

    def compiled(self, experts: nn.Module) -> Loss:
        if DEVICE == "cpu":
            raise Skipped("torch.compile is only measured on a GPU")
        return self.loss(torch.compile(experts, dynamic=False))

    def contenders(self) -> Contenders:
        return {
            STOCK: self.stock,
            OURS: lambda: self.loss(self.ours()),
            f"{STOCK}, torch.compile": lambda: self.compiled(self.experts(self.model())),
            f"{OURS}, torch.compile": lambda: self.compiled(self.ours()),
            "liger-kernel": self.liger_kernel,
            f"{STOCK}, eager": lambda: self.stock("eager"),
            f"{STOCK}, batched_mm": lambda: self.stock("batched_mm"),
        }

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"input": self.input, "routing": self.routing, **self.weights}

    def exact(self) -> dict[str, Tensor]:
        """Return the gradients in float64."""
        experts = copy.deepcopy(self.experts(self.model())).double()
        experts.config._experts_implementation = "eager"
        x, routing = (leaf.detach().double().requires_grad_() for leaf in (self.input, self.routing))
        experts(x, self.index, routing).backward(self.grad.double())
        leaves = {"input": x, "routing": routing, **dict(experts.named_parameters())}
        return {name: leaf.grad for name, leaf in leaves.items()}

    def products_ms(self) -> float:
        """Return the time of the grouped products of the rows, sorted by expert."""
        rows = self.index.numel()
        ends = torch.bincount(self.index.flatten(), minlength=self.config.num_local_experts).cumsum(0).int()
        operands = []
        for weight in self.weights.values():
            if weight.ndim == 3:
                matrix = weight.detach() if self.family == "gpt_oss" else weight.detach().transpose(1, 2)
                _, n_in, n_out = matrix.shape
                operands.append((hidden_states(rows, n_in), matrix, hidden_states(rows, n_out)))

        def products() -> None:
            for x, matrix, grad in operands:
                x, matrix = x.requires_grad_(), matrix.requires_grad_()
                torch.autograd.grad(GROUPED_MM(x, matrix, offs=ends), (x, matrix), grad)

        return median_ms(products)


def experts_of(model: PreTrainedModel) -> Any:
    return model.model.layers[0].mlp.experts


def measure(table: Table, name: str, tokens: int) -> None:
    layer = Layer(name, tokens)
    config = layer.config
    shape = {"tokens": tokens, "hidden": config.hidden_size, "experts": config.num_local_experts}
    shape["top_k"] = config.num_experts_per_tok
    table.measure(
        f"experts of {name} {tokens}x{config.hidden_size}",
        layer.products_ms(),
        shape,
        layer.contenders(),
        (layer.input, layer.routing),
        layer.leaves,
        layer.exact,
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    return benchmark("experts", __doc__, "layer:tokens", SHAPES, SMALL, measure, 300, arguments)


if __name__ == "__main__":
    main()
