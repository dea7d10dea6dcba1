"""Layers are recognised by their source, and compared with the code that they replace."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import time

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
import verify
from model_zoo import BY_ID
from packaging.version import Version
from test_models import assert_same_step, labelled, state_of, step
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_chunked.integrations.transformers import (
    apply_liger_kernel,
    found,
    layers,
    overrides,
    register_layer,
    revert_liger_kernel,
    rotary,
    source,
)

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore::FutureWarning")]
# The tables are those of this release; an earlier one has fewer families.
EARLIER = Version(transformers.__version__) < Version("5.23")


def modeling(family: str):
    name = f"transformers.models.{family}.modeling_{family}"
    return pytest.importorskip(name) if EARLIER else importlib.import_module(name)


@pytest.fixture
def table(monkeypatch):
    """Forget the layers that a test registers."""
    monkeypatch.setattr(overrides, "_REGISTERED", dict(overrides._REGISTERED))


@pytest.mark.few(8, "qwen2_vl.apply_rotary_pos_emb_vision")
@pytest.mark.parametrize(("path", "ours"), overrides._ROTARY, ids=[path for path, _ in overrides._ROTARY])
def test_rotary_rows(path, ours):
    family, name = path.split(".")
    function = getattr(modeling(family), name)
    if path == "glm4v.apply_rotary_pos_emb" and "repeat_interleave" in inspect.getsource(function):
        ours = rotary.rotate_pairs  # older transformers repeat the angles here, as GLM-4 does
    assert overrides.rope_of(function) is ours
    assert verify.rotary_difference(ours, function, []) is None


def test_learned_positions():
    """MLCD's have a gradient, which the kernel does not compute."""
    q, k, angles = torch.randn(5, 3, 16), torch.randn(5, 2, 16), torch.randn(5, 16, requires_grad=True)
    found = []
    for function in (rotary.rotate_vision, modeling("mlcd").apply_rotary_pos_emb_vision):
        rotated = function(q, k, angles.cos(), angles.sin())
        found.append((*rotated, *torch.autograd.grad(sum(y.square().sum() for y in rotated), angles)))
    for value, same in zip(*found, strict=True):
        torch.testing.assert_close(value, same)


def test_a_wrong_rotation_is_found():
    function = modeling("llama").apply_rotary_pos_emb
    assert "differ" in verify.rotary_difference(rotary.rotate_pairs, function, [])
    assert "differ" in verify.rotary_difference(rotary.rotate_halves, function, [WholeRotaryEmbedding()])


@pytest.mark.few(2)
@pytest.mark.parametrize("layer_idx", [0, 1, 2], ids=["sparse", "dense", "negative"])
def test_sparse_gates(layer_idx):
    config = transformers.Gemma3nTextConfig(
        hidden_size=16, intermediate_size=48, num_hidden_layers=3, activation_sparsity_pattern=[0.8, 0.0, -1.0],
        layer_types=["full_attention"] * 3,
    )  # fmt: skip
    torch.manual_seed(0)
    mlp = modeling("gemma3n").Gemma3nTextMLP(config, layer_idx=layer_idx)
    binding = overrides.binding_of(type(mlp))
    x = torch.randn(7, 16, requires_grad=True)
    upstream = torch.randn(7, 16)
    of = [x, *mlp.parameters()]
    expected, found = (torch.autograd.grad(y, of, upstream) for y in (mlp(x), verify.run(binding, mlp, x)))
    torch.testing.assert_close(verify.run(binding, mlp, x), mlp(x))
    for value, same in zip(found, expected, strict=True):
        torch.testing.assert_close(value, same)
    cut = (mlp._gaussian_topk(mlp.gate_proj(x)) == 0).float().mean()
    assert cut > 0.5 or layer_idx > 0, "most gates of a sparse layer are cut"


def test_every_row_is_read_and_equal():
    """Compares each row's class with its layer, on modules of default configurations."""
    begin, state = time.perf_counter(), torch.get_rng_state()
    for path, _, _ in overrides._ROWS:
        family, name = path.split(".")
        if overrides._modeling(family) is None and EARLIER:
            continue
        cls = getattr(modeling(family), name)
        binding = overrides.binding_of(cls)
        rows = {same: overrides.bound(layer, names) for same, layer, names in reversed(overrides._ROWS)}
        # An earlier version's class may be what another row serves: DeepSeek-V4's MLP had no limit in 5.8.
        every = [overrides.bound(layer, names) for _, layer, names in overrides._ROWS]
        assert binding == rows[path] or (EARLIER and binding in every), path
        verify.check_layer(binding, verify.built(binding, cls, modeling(family)), cls)
    assert time.perf_counter() - begin < 10  # on a busy machine
    assert state.equal(torch.get_rng_state())


# Code that differs from a row's, or only in names.


class Renamed(nn.Module):
    """LlamaRMSNorm in other words."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.scale, self.tiny = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kind = tokens.dtype
        tokens = tokens.to(torch.float32)
        size = tokens.pow(2).mean(-1, keepdim=True)
        tokens = tokens * torch.rsqrt(size + self.tiny)
        return self.scale * tokens.to(kind)


class Swapped(Renamed):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kind = tokens.dtype
        tokens = tokens.to(torch.float32)
        size = tokens.pow(2).mean(-1, keepdim=True)
        tokens = tokens * torch.rsqrt(size + self.scale)
        return self.tiny * tokens.to(kind)


class Other:
    rsqrt, float32 = torch.sqrt, torch.float32


class OtherGlobal(Renamed):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kind = tokens.dtype
        tokens = tokens.to(torch.float32)
        size = tokens.pow(2).mean(-1, keepdim=True)
        tokens = tokens * Other.rsqrt(size + self.tiny)
        return self.scale * tokens.to(kind)


class Decorated(Renamed):
    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kind = tokens.dtype
        tokens = tokens.to(torch.float32)
        size = tokens.pow(2).mean(-1, keepdim=True)
        tokens = tokens * torch.rsqrt(size + self.tiny)
        return self.scale * tokens.to(kind)


class OtherHelper(transformers.models.gemma.modeling_gemma.GemmaRMSNorm):
    """Inherits `forward`, which calls another `_norm`."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


def test_only_names_may_differ():
    binding = overrides.binding_of(Renamed)
    assert binding == overrides.bound(layers.RMS_NORM, {"weight": "scale", "eps": "tiny"})
    verify.check_layer(binding, Renamed(), Renamed)
    swapped = overrides.binding_of(Swapped)
    assert swapped == overrides.bound(layers.RMS_NORM, {"weight": "tiny", "eps": "scale"})
    with pytest.raises(verify.Difference):  # the attributes change places, and so do those that the kernel reads
        verify.check_layer(swapped, Swapped(), Swapped)
    for cls in (OtherGlobal, Decorated, OtherHelper):
        assert overrides.binding_of(cls) is None, cls


class Multiplied(Renamed):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(tokens)


def test_a_forgotten_factor_is_a_difference():
    """A default configuration has 1.0."""
    binding = overrides.bound(layers.RMS_NORM, {"weight": "scale", "eps": "tiny"})
    with pytest.raises(verify.Difference, match=r"results differ by up to 0\.33"):
        verify.check_layer(binding, Multiplied(), Multiplied)


class TwoStatements(nn.Module):
    one = 1; forward = lambda self, x: x * self.one  # fmt: skip  # noqa: E702, E731


def test_code_that_cannot_be_read():
    def of_empty_cell():
        class Unbound(nn.Module):
            def forward(self, x):
                return x * unbound

        if not Unbound:
            unbound = 1
        return Unbound

    class Executed(nn.Module):
        def forward(self, x):
            return x * helper(x)

    for cls in (of_empty_cell(), TwoStatements, Executed):
        assert overrides.binding_of(cls) is None, cls


exec("def helper(x):\n    return x", helpers := {})
helper = helpers["helper"]
helper.__module__ = None


def even(x, n):
    return x if n == 0 else odd(x, n - 1) + even(x, n - 2) + odd(x, 1)


def odd(x, n):
    return x if n == 1 else even(x, n - 1) + odd(x, n - 2) + even(x, 0)


class Recursive(nn.Module):
    def forward(self, x):
        return even(x, 4)


def test_functions_that_call_each_other():
    """bitsandbytes has such functions, and reading each call anew takes more steps than there are seconds."""
    assert overrides.binding_of(Recursive) is None
    text, _ = source.source_of(Recursive.forward, Recursive)
    assert text.count("function ") == 3  # `even`, and the two places where it names `odd`


def test_a_class_of_ones_own_with_stock_code():
    """Its patched forward keeps the signature, the gradient and the pickle."""
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    model.model.norm = norm = Renamed(model.config.hidden_size)
    stock = step(model, arguments)
    assert apply_liger_kernel(model).replaced["rms_norm"] == {"LlamaRMSNorm": 4, "Renamed": 1}
    assert [*inspect.signature(norm.forward).parameters] == ["tokens"]
    assert_same_step(step(model, arguments), stock)
    assert type(pickle.loads(pickle.dumps(norm))) is type(norm)
    assert norm(tokens=torch.ones(1, 32)).shape == (1, 32)
    revert_liger_kernel(model)


class OwnMLP(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))

    def forward(self, x):
        gate, up = self.a(x), self.b(x)
        return self.c(gate * gate.sigmoid() * up)


class Zoom(nn.Module):
    """A norm by its code alone."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        return self.gain * self.scaled(x)

    def scaled(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


class UnitNorm(Zoom):
    def scaled(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


class Gain(Zoom):
    def scaled(self, x):
        return x


class FrozenBatchNorm(UnitNorm):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.register_buffer("running_var", torch.ones(hidden_size))


class WholeRotaryEmbedding(nn.Module):
    """Angles that do not repeat: the kernel would not read half of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(8))

    def forward(self, x, position_ids):
        angles = position_ids[..., None] * self.inv_freq
        return angles.cos(), angles.sin()


class OwnNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class KeyedNorm(LlamaRMSNorm):
    """Its subclasses must pass a keyword."""

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()


def with_set_forward(hidden_size: int) -> nn.Module:
    norm = LlamaRMSNorm(hidden_size)
    own = norm.forward
    norm.forward = lambda hidden_states: 2 * own(hidden_states)
    return norm


def misread(hidden_size: int) -> nn.Module:
    register_layer(Renamed, layers.RMS_NORM, weight="scale", eps="epsilon")
    return Renamed(hidden_size)


# A module in the place of one of llama's, and why it is left alone: by its class, or that which it has its forward of.
UNREAD = {"Zoom": found._OTHER_CODE}
UNDERIVED = r"no subclass of it can be made \(TypeError: .*__init_subclass__\(\) missing .* 'key'\)"
LEFT = {
    "its own code": ("norm", OwnNorm, {"OwnNorm": found._OTHER_CODE}),
    "a forward set on it": ("norm", with_set_forward, {"LlamaRMSNorm": "its forward was set on the instance"}),
    "no plain subclass": ("norm", KeyedNorm, {"LlamaRMSNorm": UNDERIVED}),
    "another layout": ("norm", misread, {"Renamed": "it is laid out differently: .*no attribute 'epsilon'"}),
    "a norm by its code": ("norm", Zoom, UNREAD),
    "a norm by a root": ("norm", UnitNorm, UNREAD),
    "no norm": ("norm", Gain, {}),
    "statistics of batches": ("norm", FrozenBatchNorm, {}),
    "angles that do not repeat": (
        "rotary_emb", lambda _: WholeRotaryEmbedding(), {"apply_rotary_pos_emb": "does not give each angle twice"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_alone(case, table):
    """All else of the model is patched; its step is that of stock, and `revert` leaves it as it was."""
    place, make, left = LEFT[case]
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    setattr(model.model, place, make(model.config.hidden_size))
    stock, before = step(model, arguments), state_of(model)
    applied = apply_liger_kernel(model)
    assert applied.replaced["rms_norm"] == {"LlamaRMSNorm": 4 + (place != "norm")}
    assert ("rope" in applied.replaced) == (place == "norm")
    assert applied.left.keys() == left.keys() and all(re.search(left[name], applied.left[name]) for name in left)
    assert_same_step(step(model, arguments), stock)
    revert_liger_kernel(model)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"rms_norm": False}, {"LlamaRMSNorm": "rms_norm is off"}),
        (
            {"rope": False, "swiglu": False, "cross_entropy": False},
            {"apply_rotary_pos_emb": "rope is off", "LlamaMLP": "swiglu is off"},
        ),
        ({"cross_entropy": True}, {"LlamaForCausalLM": "fused_linear_cross_entropy is off"}),
        ({"fused_linear_cross_entropy": False}, {"LlamaForCausalLM": "fused_linear_cross_entropy is off"}),
    ],
)
def test_a_switch_that_is_off_leaves_its_layers_alone(options, left):
    assert apply_liger_kernel(BY_ID["llama"].build(), **options).left == left


def test_a_registered_class(table):
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    torch.manual_seed(0)
    model.model.layers[0].mlp = OwnMLP(model.config.hidden_size)
    stock, before = step(model, arguments), state_of(model)
    assert "register_layer serves it if" in apply_liger_kernel(model).left["OwnMLP"]
    register_layer(OwnMLP, layers.SILU_GLU, gate_proj="a", up_proj="b", down_proj="c")
    applied = apply_liger_kernel(model)
    assert applied.replaced["swiglu"] == {"OwnMLP": 1, "LlamaMLP": 1} and not applied.left
    assert_same_step(step(model, arguments), stock)
    revert_liger_kernel(model)
    assert state_of(model) == before


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        model = transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**BY_ID["llama"].config))
        assert set(apply_liger_kernel(model).replaced) == {"rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"}
        revert_liger_kernel(model)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_that_classifies():
    """It has no `lm_head`; its layers are served."""
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**BY_ID["llama"].config)).eval()
    ids = labelled(BY_ID["llama"])["input_ids"]
    stock = model(ids).logits
    applied = apply_liger_kernel(model)
    assert list(applied.replaced) == ["rms_norm", "swiglu", "rope"] and not applied.left
    # Float32 kernels in two layers.
    torch.testing.assert_close(model(ids).logits, stock, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"'fused_linear_cross_entropy'\] matches nothing in llama"):
        apply_liger_kernel(model, fused_linear_cross_entropy=True)
    revert_liger_kernel(model)


def test_nothing_to_serve():
    model = transformers.ViTModel(transformers.ViTConfig(hidden_size=16, num_hidden_layers=0, num_attention_heads=2))
    model.layernorm = nn.Identity()
    with pytest.raises(ValueError, match="our kernels serve nothing in vit"):
        apply_liger_kernel(model)


def test_a_function_named_silu():
    """Some experts hold `F.silu` itself."""
    assert layers.GLU.refusal(F.silu, None, None, None) is None
    assert "its activation is relu" in layers.GLU.refusal(F.relu, None, None, None)
    assert layers.GLU.refusal(ACT2FN["gelu_new"], None, None, None) is None


def turned(x):
    """`rotate_half` of the wrong sign."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x2, -x1), dim=-1)


def test_a_function_that_somebody_replaced_under_a_rotation(monkeypatch):
    """Only `rotate_half` of a module is another, after a first patch, and another model is still patched."""
    tiny, qwen3 = BY_ID["qwen3"], modeling("qwen3")
    stock, first, second = qwen3.apply_rotary_pos_emb, tiny.build(), tiny.build()
    exact = step(second, labelled(tiny))
    assert "rope" in apply_liger_kernel(first).replaced
    monkeypatch.setattr(qwen3, "rotate_half", turned)
    applied = apply_liger_kernel(second)
    assert "rope" not in applied.replaced
    assert applied.left["apply_rotary_pos_emb"] == "a variant that no kernel computes"
    assert qwen3.apply_rotary_pos_emb is stock
    ours = step(second, labelled(tiny))
    revert_liger_kernel(second)
    assert_same_step(ours, step(second, labelled(tiny)))
    assert abs(ours[0].loss - exact[0].loss) > 1e-3
    monkeypatch.undo()
    revert_liger_kernel(first)
    assert "rope" in apply_liger_kernel(second).replaced
    assert_same_step(step(second, labelled(tiny)), exact)
    revert_liger_kernel(second)
    assert qwen3.apply_rotary_pos_emb is stock
