"""Classes of a user: a head and a layer are served with the right result, or refused in words."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
from fused import assert_fused
from model_zoo import BY_ID, HIDDEN, VOCAB
from test_forwards import assert_served, assert_trains_as_stock, batch
from test_models import labelled, step
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama

from liger_chunked import attach_head, explain, liger_rms_norm, logit_options, run_head
from liger_chunked.integrations.transformers import apply_liger_kernel, layers, overrides, register_layer
from liger_chunked.integrations.transformers.check import check_model
from liger_chunked.integrations.transformers.layers import Layer

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def table(monkeypatch):
    """Forget the layers that a test registers."""
    monkeypatch.setattr(overrides, "_REGISTERED", dict(overrides._REGISTERED))


class Own(transformers.LlamaForCausalLM):
    """A head in three steps, one of which a test replaces."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature, self.calls, self.scaler = 1.0, 0, Scaler()
        self.register_buffer("mask", torch.zeros(VOCAB), persistent=False)
        self.kept = torch.arange(VOCAB)
        self.learned, self.per_token = (nn.Parameter(torch.full(shape, 1.7)) for shape in ((), (VOCAB,)))

    def before(self, h):
        return h

    def after(self, logits, input_ids):
        return logits

    def masked(self, logits, attention_mask):
        return logits

    def loss_of(self, loss, outputs):
        return loss

    def trained(self, labels, attention_mask):
        return labels

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        self.last = outputs.last_hidden_state
        logits = self.after(self.lm_head(self.before(outputs.last_hidden_state)), input_ids)
        logits = self.masked(logits, attention_mask)
        loss = None
        if labels is not None:
            labels = self.trained(labels, attention_mask)
            loss = self.loss_of(self.loss_function(logits, labels, self.config.vocab_size, **kwargs), outputs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Scaler(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * self.factor


def own(**steps) -> Own:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**BY_ID["llama"].config, "head_divisor": 0.5, "use_softcap": True})
    model = type("Own", (Own,), steps)(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def counted(self, logits, ids):
    self.calls += 1
    return logits / self.calls


def without_gradient(self, logits, ids):
    with torch.no_grad():
        return 2 * logits


def capped_in(training):
    return lambda self, logits, ids: 30 * torch.tanh(logits / 30) if self.training == training else logits


SERVED = {
    "plain": {},
    "a number": {"after": lambda self, logits, ids: logits * 1.7},
    "a number before lm_head": {"before": lambda self, h: h * 0.5},
    "softcap": {"after": lambda self, logits, ids: 7.3 * torch.tanh(logits / 7.3)},
}

# A step is fused, and `head_fn` takes the place of its loss.
SERVED |= {
    "dropout": {"before": lambda self, h: F.dropout(h, 0.3, self.training)},
    "before lm_head": {"before": lambda self, h: h * self.learned},
    "LayerNorm": {"before": lambda self, h: F.layer_norm(h, h.shape[-1:])},
    "training": {"after": capped_in(True)},
    "mask": {"after": lambda self, logits, ids: logits + self.mask},
    "detached": {"before": lambda self, h: h.detach()},
}

# A step is fused; but what happens to the logits is not the same in each call, or no part of a `LogitOptions`.
FUSED = {
    "calls": {"after": counted},
    "grad mode": {"after": lambda self, logits, ids: logits if torch.is_grad_enabled() else logits / 2},
}

# A step needs logits, and has stock's loss and gradients.
WITH_LOGITS = {
    "parameter": {"after": lambda self, logits, ids: logits * self.learned},
    "bias": {"after": lambda self, logits, ids: logits + self.per_token},
    "learned softcap": {"after": lambda self, logits, ids: self.learned * torch.tanh(logits / self.learned)},
    "index": {"after": lambda self, logits, ids: logits[..., self.kept]},
    "own product": {
        "after": lambda self, logits, ids: F.linear(F.linear(logits, self.lm_head.weight.T), self.lm_head.weight)
    },
    "mask of a sample": {"masked": lambda self, logits, mask: logits * mask.float().mean(1)[:, None, None]},
    "shifted": {"after": lambda self, logits, ids: logits.roll(1, 1)},
    "banned": {"after": lambda self, logits, ids: logits.index_fill(-1, torch.tensor([3, 5]), -1e4)},
    "embeddings": {"after": lambda self, logits, ids: logits + self.model.embed_tokens.weight.sum()},
}

# Fused or not: what these do is theirs, and the results are stock's.
EITHER = {
    "tokens": {"after": lambda self, logits, ids: logits * (ids.float().mean() / 50)},
    "probabilities": {"after": lambda self, logits, ids: logits.log_softmax(-1)},
    "two heads": {"after": lambda self, logits, ids: logits + self.lm_head(2 * self.last)},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SERVED)
def test_head_is_served(name):
    for training in (False, True):
        assert_served(own(**SERVED[name]).train(training))
    assert_trains_as_stock(own(**SERVED[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FUSED)
def test_step_is_fused(name):
    assert_trains_as_stock(own(**FUSED[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_step_with_logits(name):
    assert_trains_as_stock(own(**WITH_LOGITS[name]), fused=False)
    model = own(**WITH_LOGITS[name])
    message = r"Own (does|needs them): a hook or the forward read the logits, \w+ at .*\.py:\d+"
    if "masked" not in WITH_LOGITS[name]:  # `logit_options` passes no mask
        with pytest.raises(ValueError, match=message):
            logit_options(model)
    attach_head(model)
    with pytest.raises(ValueError, match=message):
        model(**batch(), head_fn=lambda head, input: input.target)


@pytest.mark.parametrize("name", EITHER)
def test_step_is_that_of_stock(name):
    assert_trains_as_stock(own(**EITHER[name]), fused=None)


def test_logits_without_a_gradient():
    model = own(after=without_gradient).train()
    stock = model(**batch())
    apply_liger_kernel(model, rms_norm=False, swiglu=False, rope=False)
    output = model(**batch())
    assert not (output.loss.requires_grad or stock.loss.requires_grad)
    torch.testing.assert_close(output.loss, stock.loss, rtol=1e-5, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("trained", [True, False])
def test_a_tied_head_with_a_temperature(trained):
    def tied():
        model = own(after=lambda self, logits, ids: logits * (self.learned if trained else 0.1))
        model.lm_head.weight = model.model.embed_tokens.weight
        return model

    if not trained:
        assert_served(tied())
    assert_trains_as_stock(tied(), fused=not trained)


@pytest.mark.few(1)
@pytest.mark.parametrize("of", ["model", "config", "module"])
def test_a_number_that_changes_after_patching(of):
    steps = {
        "model": lambda self, logits, ids: logits * self.temperature,
        "config": lambda self, logits, ids: logits * self.config.head_divisor,
        "module": lambda self, logits, ids: self.scaler(logits),
    }
    model = own(after=steps[of])
    owner, name = {"model": (model, "temperature"), "config": (model.config, "head_divisor")}.get(
        of, (model.scaler, "factor")
    )
    for value in (0.25, 0.75):
        setattr(owner, name, value)
        assert logit_options(model).logit_scale == value
        assert_served(model)


def test_a_head_fn_without_a_gradient():
    model, arguments = own(after=lambda self, logits, ids: logits / 2), batch()
    attach_head(model)
    with torch.no_grad():
        loss = run_head(model, lambda head, input: head.weight.detach().sum() + input.hidden_states.sum(), **arguments)
    assert not loss.requires_grad


# The loss of a forward of one's own.


def test_a_forward_of_ones_own_is_fused():
    arguments = batch()
    model = own(after=SERVED["a number"]["after"]).train()
    stock = model(**arguments).loss
    assert apply_liger_kernel(model).replaced["fused_linear_cross_entropy"] == {"Own": 1}
    output = model(**arguments)
    assert_fused(output)
    torch.testing.assert_close(output.loss, stock, rtol=1e-5, atol=0)  # float32: sums in another order


LOSSES = {
    "plus one": lambda self, loss, outputs: loss + 1,
    "without most of its gradient": lambda self, loss, outputs: loss.detach() + 0.1 * loss,
    "the head's weight": lambda self, loss, outputs: loss + self.lm_head.weight.square().mean(),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_is_fused(name):
    model = own(loss_of=LOSSES[name])
    assert_trains_as_stock(model)
    assert_served(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("token", ["pad_token_id", "eos_token_id", "bos_token_id", "image_token_id"])
def test_a_loss_without_some_tokens(token):
    model = own(trained=lambda self, labels, mask: labels.where(labels != getattr(self.config, token), -100))
    ids = batch()["input_ids"]
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "image_token_id"):
        setattr(model.config, name, int(ids[0, 4]))
    with torch.no_grad():
        assert abs(model(**batch()).loss - own()(**batch()).loss) > 1e-3
    assert_trains_as_stock(model)
    assert_served(model)


# Layers.


class Norm(nn.Module):
    """RMSNorm with an offset of 1.5, which no stock class has."""

    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), 1e-6

    def mean(self, x):
        return x.pow(2).mean(-1, keepdim=True)

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(self.mean(y) + self.eps)).to(x.dtype) * (1.5 + self.weight)


class Louder(Norm):
    def forward(self, x):
        y = super().forward(x)
        return 1.1 * y if self.training else y


class Detached(Norm):
    def mean(self, x):
        return super().mean(x).detach()


class Frozen(Norm):
    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(self.mean(y) + self.eps)).to(x.dtype) * (1.5 + self.weight.detach())


class Second(Norm):
    """The mean is over the second dimension: the columns of tokens, but the positions of a batch."""

    def mean(self, x):
        return x.pow(2).mean(1, keepdim=True)


def norm_1_5(x, weight, eps):
    return liger_rms_norm(x, weight + 1.5, eps)


OWN_NORM = Layer(norm_1_5, "rms_norm")


def with_norm(cls) -> transformers.PreTrainedModel:
    model = BY_ID["llama"].build()
    model.model.norm = cls(HIDDEN)
    return model


def test_a_layer_of_ones_own(table):
    register_layer(Norm, OWN_NORM)
    model, arguments = with_norm(Norm), labelled(BY_ID["llama"])
    stock = step(model, arguments)
    for training in (False, True):
        assert check_model(model.train(training)).patched.replaced["rms_norm"]["Norm"] == 1
    assert apply_liger_kernel(model).replaced["rms_norm"]["Norm"] == 1
    # float32: sums in another order
    torch.testing.assert_close(step(model, arguments)[0].loss, stock[0].loss, rtol=1e-5, atol=0)


@pytest.mark.stock_layers
def test_a_registered_layer_runs_without_kernels_too(table):
    dtypes = []

    def run(x, weight, eps):
        dtypes.append(x.dtype)
        return norm_1_5(x, weight, eps)

    register_layer(Norm, Layer(run, "rms_norm"))
    model = with_norm(Norm)
    apply_liger_kernel(model)
    for dtype in (torch.float32, torch.float64):
        model.train().to(dtype)(**batch())
    assert dtypes == [torch.float32, torch.float64]
    why = "  patched layers but Norm: stock code, because no kernel computes float64"
    assert why in str(explain(model)).splitlines()


LAYERS = [
    (Louder, "loss: error"),
    (Detached, "gradient of "),
    (Frozen, r"gradient of model\.norm\.weight: "),
    (Second, "loss: error"),
]


@pytest.mark.parametrize(("cls", "reason"), LAYERS, ids=[cls.__name__ for cls, _ in LAYERS])
def test_check_model_finds_a_layer_that_differs(cls, reason, table):
    """A registered layer is taken at its word, and `check_model` compares the model that has it."""
    register_layer(cls, OWN_NORM)
    with pytest.raises(AssertionError, match=f"the patched model differs from stock:\n(.*\n)*{reason}"):
        check_model(with_norm(cls).train())


def test_check_model_runs_in_the_mode_of_the_model():
    config = {**BY_ID["llama"].config, "attention_dropout": 0.5}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    modes = []
    model.model.norm.register_forward_hook(lambda module, *args: modes.append(module.training))
    for training in (False, True):
        modes.clear()
        assert check_model(model.train(training)).failures == []
        assert set(modes) == {training} and model.training == training


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layer", "names", "message"),
    [
        (Layer(norm_1_5, "rmsnorm"), {}, r"switch of a Layer must be one of \['rms_norm', .*\], got 'rmsnorm'"),
        (Layer(norm_1_5, "rope"), {}, r"switch of a Layer must be one of \['rms_norm', .*\], got 'rope'"),
        (Layer(norm_1_5), {}, r"give the Layer a switch, one of \['rms_norm', .*it reads \['weight', 'eps'\]"),
        (Layer(layers.RELU_SQUARED.run), {}, r"give the Layer a switch, .*it reads \[\]"),
        (layers.RMS_NORM, {"epsilon": "eps"}, r"the layer reads \['weight', 'eps'\], not \['epsilon'\]"),
    ],
)
def test_a_layer_that_cannot_be_registered(layer, names, message, table):
    with pytest.raises(ValueError, match=message):
        register_layer(Norm, layer, **names)
    assert overrides.binding_of(Norm) is None


@pytest.mark.parametrize(
    ("cls", "layer", "message"),
    [
        ("LlamaMLP", layers.GLU, "cls must be a class of modules, got 'LlamaMLP'"),
        (Norm, "GLU", r"layer must be a Layer, such as layers\.RMS_NORM, got 'GLU'"),
        (modeling_llama.LlamaAttention, layers.GLU, "forward of LlamaAttention must take one tensor"),
    ],
)
def test_what_is_no_layer(cls, layer, message, table):
    with pytest.raises((TypeError, ValueError), match=message):
        register_layer(cls, layer)


class Gated(nn.Module):
    """A gated MLP whose activation no switch names, and that cannot be built without arguments."""

    def __init__(self, *, needed) -> None:
        super().__init__()
        self.act_fn = needed
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gated(x, act_fn, gate_proj, up_proj, down_proj):
    return down_proj(act_fn(gate_proj(x)) * up_proj(x))


@pytest.mark.few(2)
@pytest.mark.parametrize("needed", [nn.ReLU(), 3.0, None])
def test_an_activation_without_a_switch_is_left_alone(needed, table):
    register_layer(Gated, Layer(gated))
    model = BY_ID["llama"].build()
    model.model.layers[0].mlp = Gated(needed=needed)
    assert "its activation is" in apply_liger_kernel(model).left["Gated"]
