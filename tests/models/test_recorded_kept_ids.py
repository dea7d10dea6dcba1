"""What `generate` kept of each token: the softmax over it is the sampler's distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    WatermarkingConfig,
)

from liger_chunked import KeptIds, linear_token_stats
from liger_chunked.integrations.transformers import KeptIdsRecorder, record_kept_ids

EOS, PAD, V = [*range(20, 28)], 0, 40  # several ids, so that sequences end soon
PROMPTS = [[5, 6, 7, 8], [9, 4], [11, 12, 13]]
TOP_4 = TopKLogitsWarper(4, filter_value=torch.finfo(torch.float32).min)
FILTERS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    "none": {"temperature": 1.3},
}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def prompts() -> dict[str, Tensor]:
    """Return prompts with padding on the left."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[PAD] * (width - len(x)) + x for x in PROMPTS])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in PROMPTS])
    return {"input_ids": ids, "attention_mask": mask}


OPTIONS = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, "return_dict_in_generate": True, "output_scores": True}


def generate(model: LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**prompts(), **{**OPTIONS, **options})


def completions(sequences: Tensor, prompt_length: int) -> Tensor:
    """Return targets (B, T): each completion until its first EOS, then -100."""
    found = sequences[:, prompt_length:].clone()
    is_eos = torch.isin(found, torch.tensor(EOS)).long()
    ended = is_eos.cumsum(1) - is_eos > 0
    return found.masked_fill(ended, -100)


def hidden_states(model: LlamaForCausalLM, sequences: Tensor) -> Tensor:
    mask = torch.cat([prompts()["attention_mask"], torch.ones_like(sequences[:, max(map(len, PROMPTS)) :])], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model.model(input_ids=sequences, attention_mask=mask, position_ids=positions).last_hidden_state


@pytest.mark.few(1, "top_k")
@pytest.mark.parametrize("case", FILTERS)
def test_log_probabilities_are_the_samplers(case: str) -> None:
    policy, options = model(), FILTERS[case]
    with record_kept_ids(policy) as recorder:
        output = generate(policy, **options)
    n = recorder.prompt_length
    target = completions(output.sequences, n)
    valid = target != -100
    assert not valid.all() and valid.sum() > 6, "sequences must end at different tokens, and not all at once"
    kept = recorder.kept_ids(target)
    sizes = kept.offsets.diff().view(target.shape)
    assert (sizes[~valid] == 0).all()
    if case == "none":
        assert (sizes == 0).all()
    else:
        assert (sizes[valid] > 0).all() and (sizes < V).all() and (sizes[valid] > 1).any()
    sampled = torch.stack([scores.log_softmax(-1) for scores in output.scores], 1)
    sampled = sampled.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    states = hidden_states(policy, output.sequences)[:, n - 1 : -1]
    temperature = options.get("temperature", 1.0)
    logps = linear_token_stats(policy.lm_head.weight, states, target, temperature=temperature, kept=kept).logps
    assert logps is not None
    torch.testing.assert_close((logps - sampled)[valid].exp(), torch.ones(int(valid.sum())), rtol=0, atol=2e-5)
    whole = linear_token_stats(policy.lm_head.weight, states.detach(), target, temperature=temperature).logps
    assert whole is not None
    if case != "none":
        assert float((whole.detach() - sampled)[valid].exp().min()) < 0.95


def test_targets_of_whole_sequences() -> None:
    """Prompts are ignored, or have the whole vocabulary; the ids of completions are the same."""
    policy = model()
    with record_kept_ids(policy) as recorder:
        sequences = generate(policy, top_p=0.8).sequences
    n = recorder.prompt_length
    alone = recorder.kept_ids(completions(sequences, n))
    target = torch.cat([sequences[:, 1:n], completions(sequences, n), torch.full((3, 1), -100)], 1)
    for with_prompts in (False, True):
        if not with_prompts:
            target[:, : n - 1] = -100
        kept = recorder.kept_ids(target, n - 1)
        sizes = kept.offsets.diff().view(target.shape)
        assert (sizes[:, : n - 1] == 0).all() and (sizes[:, -1] == 0).all()
        assert torch.equal(kept.ids, alone.ids) and torch.equal(sizes[:, n - 1 : -1].flatten(), alone.offsets.diff())


def test_generate_is_unchanged() -> None:
    policy = model()
    expected = generate(policy, top_p=0.8).sequences
    with record_kept_ids(policy) as recorder:
        assert torch.equal(generate(policy, top_p=0.8).sequences, expected)
        first = recorder.kept_ids(completions(expected, recorder.prompt_length))
        other = generate(policy, top_k=1).sequences  # replaces the first
        kept = recorder.kept_ids(completions(other, recorder.prompt_length))
    assert torch.equal(generate(policy, top_p=0.8).sequences, expected)
    assert "_get_logits_processor" not in vars(policy)
    sizes = kept.offsets.diff()
    assert sizes.max() == 1 and first.ids.numel() > kept.ids.numel()


def test_several_sequences_of_a_prompt() -> None:
    policy = model()
    with record_kept_ids(policy) as recorder:
        sequences = generate(policy, top_p=0.8, num_return_sequences=2).sequences
    assert recorder.kept_ids(completions(sequences, recorder.prompt_length)).positions == 6 * (
        sequences.shape[1] - recorder.prompt_length
    )


def test_as_the_last_of_a_callers_list() -> None:
    policy, recorder = model(), KeptIdsRecorder()
    processors = LogitsProcessorList([TopKLogitsWarper(4), recorder])
    sequences = generate(policy, logits_processor=processors).sequences
    target = completions(sequences, recorder.prompt_length)
    sizes = recorder.kept_ids(target).offsets.diff().view(target.shape)
    assert (sizes[target != -100] == 4).all()


def test_errors() -> None:
    policy, recorder = model(), KeptIdsRecorder()
    with pytest.raises(ValueError, match="no token was recorded"):
        recorder.kept_ids(torch.tensor([[1]]))
    with record_kept_ids(policy), pytest.raises(ValueError, match="num_beams must be 1"):
        generate(policy, num_beams=2)
    assert "_get_logits_processor" not in vars(policy)
    with pytest.raises(ValueError, match="keeps no id at position 1"):
        recorder(torch.ones(2, 3, dtype=torch.long), torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]]))
    recorder(torch.ones(2, 3, dtype=torch.long), torch.tensor([[0.0, 1.0], [-math.inf, 1.0]]))
    with pytest.raises(ValueError, match="the 2 sequences"):
        recorder.kept_ids(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="a token beyond them"):
        recorder.kept_ids(torch.tensor([[1, 1], [1, -100]]))
    with pytest.raises(TypeError, match="integers"):
        recorder.kept_ids(torch.ones(2, 1))
    recorder(torch.ones(2, 5, dtype=torch.long), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"got tokens at \[3, 5\]"):
        recorder.kept_ids(torch.tensor([[1], [1]]))
    with pytest.raises(TypeError, match="PreTrainedModel"), record_kept_ids(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("repetition_penalty", 1.3),
        ("sequence_bias", {(5,): 2.0}),
        ("exponential_decay_length_penalty", (2, 1.5)),
        ("guidance_scale", 2.0),
        ("watermarking_config", WatermarkingConfig()),
    ],
)
@pytest.mark.parametrize("of_model", [False, True])
def test_what_changes_logits_is_refused(option: str, value: Any, of_model: bool) -> None:
    """Kept ids say which logits are in the softmax, and not that they were changed."""
    policy, options = model(), {option: value}
    if of_model:
        setattr(policy.generation_config, option, value)
        options = {}
    with record_kept_ids(policy) as recorder:
        with pytest.raises(ValueError, match=rf"got {option}=.*Either sample with {option}=(None|1\.0),"):
            generate(policy, top_p=0.8, **options)
        with pytest.raises(ValueError, match="no token was recorded"):
            recorder.kept_ids(torch.tensor([[1]]))
    generate(policy, top_p=0.8, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.3])
@pytest.mark.parametrize(
    "more", [{"top_p": 0.9}, {"remove_invalid_values": True}, {"logits_processor": LogitsProcessorList([TOP_4])}]
)
def test_what_only_drops_ids_is_recorded(more: dict[str, Any], temperature: float) -> None:
    """The softmax over what is left is the sampler's, also where a dropped id has a finite score."""
    policy = model()
    options = {"bad_words_ids": [[7], [9, 11]], "suppress_tokens": [12], "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    with record_kept_ids(policy) as recorder:
        output = generate(policy, temperature=temperature, **options, **more)
    n = recorder.prompt_length
    target = completions(output.sequences, n)
    states = hidden_states(policy, output.sequences)[:, n - 1 : -1]
    kept = recorder.kept_ids(target)
    logps = linear_token_stats(policy.lm_head.weight, states, target, temperature=temperature, kept=kept).logps
    sampled = torch.stack([scores.log_softmax(-1) for scores in output.scores], 1)
    sampled = sampled.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    assert logps is not None
    torch.testing.assert_close(logps, torch.where(target == -100, 0.0, sampled), rtol=0, atol=2e-5)


def test_a_callers_penalty_is_refused() -> None:
    policy, processors = model(), LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    with record_kept_ids(policy), pytest.raises(ValueError, match=r"acts as repetition_penalty.*leave the"):
        generate(policy, top_p=0.8, logits_processor=processors)


def test_positions_are_taken() -> None:
    kept = KeptIds.from_lists([[1], [2, 3], [], [4, 5, 6]])
    taken = kept.take(torch.tensor([3, -1, 0, 3, 2]))
    expected = KeptIds.from_lists([[4, 5, 6], [], [1], [4, 5, 6], []])
    assert torch.equal(taken.ids, expected.ids) and torch.equal(taken.offsets, expected.offsets)
    both = KeptIds.cat([kept, expected])
    assert both.positions == 9 and torch.equal(both.take(torch.arange(4, 9)).ids, expected.ids)
    assert kept.take(torch.tensor([], dtype=torch.long)).positions == 0
    for wrong in ([4], [-2]):
        with pytest.raises(ValueError, match="positions must be -1, or 0 to 3"):
            kept.take(torch.tensor(wrong))
    with pytest.raises(TypeError, match="integers"):
        kept.take(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="one or more"):
        KeptIds.cat([])
