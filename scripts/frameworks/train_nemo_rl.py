# /// script
# requires-python = ">=3.13.14,<3.14"
# dependencies = ["torch==2.11.0", "megatron-core==0.19.2", "pydantic"]
#
# [tool.frameworks]
# # An archive, because a git checkout would fetch the submodules too.
# no-deps = ["nemo-rl @ https://github.com/NVIDIA-NeMo/RL/archive/7ea279abfbeb698b092856d0dab61e7cf39bc909.tar.gz"]
# ///
"""NeMo-RL, commit 7ea279a: policy-gradient steps of its fused path on Megatron-Core, with its function and with ours.

Environment: NeMo-RL without its dependencies, torch 2.11.0, megatron-core 0.19.2 and pydantic. What its losses import,
and do not use, is a stub: its workers, loggers, Ray, transformers. (It was run on Python 3.12 with the repository on
the path, because NeMo-RL refuses to install on a Python before 3.13.14.)

Its worker runs under Ray and starts NCCL: the steps here are those of its loss with linear cross entropy fusion,
`patch_gpt_model_forward_for_linear_ce_fusion`, the patched `GPTModel` with `return_logprobs_for_linear_ce_fusion`, a
clipped policy loss, SGD.

Runs a tiny `GPTModel` on one gloo rank, because its function needs sequence parallelism on several, whose norm needs
Apex or Transformer Engine. Compares the loss of each step from equal weights, and exits with 1 if one differs by more
than 1e-5. All is float32.

- steps 0 to 7: an own head, 8 to 15: tied embeddings
- steps 16 to 21: on-policy distillation, forward, reverse and mixed KL in turn. NeMo-RL's `DistillationLossFn` gets the
  logits of the whole vocabulary as its top-k; ours the hidden states of the student and of a teacher, which are random.
"""

from __future__ import annotations

import math
import tempfile

import torch
from common import compare, count_calls, stub
from megatron_common import LENGTH, VOCAB, build, initialize, inputs

from liger_chunked.integrations.frameworks.nemo_rl import (
    ChunkedDistributedHiddenStatesToKL,
    ChunkedDistributedHiddenStatesToLogprobs,
)

# NeMo-RL's losses import these, and their formulas do not use them. After liger_chunked, which asks for transformers'
# version.
stub("PIL", "nemo_rl.models", "nemo_rl.utils", "ray", "requests", "transformers")

from nemo_rl.algorithms.loss.loss_functions import DistillationLossConfig, DistillationLossFn  # noqa: E402
from nemo_rl.distributed import model_utils  # noqa: E402

STEPS, BATCH, H_TEACHER = 8, 4, 48


def train(tied: bool) -> list[float]:
    """Return the loss of each step, from equal random weights."""
    model = build(1, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB // 8, (BATCH, LENGTH), generator=generator)
        old = -math.log(VOCAB) + 0.1 * torch.randn(BATCH, LENGTH - 1, generator=generator)
        advantages = 1.0 + torch.randn(BATCH, 1, generator=generator)
        logps = model(ids, *inputs(BATCH), labels=ids, return_logprobs_for_linear_ce_fusion=True)
        ratio = (logps - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def distill(ours: bool) -> list[float]:
    """Return the loss of each step of on-policy distillation, from equal random weights."""
    model = build(1, tied=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, H_TEACHER, generator=generator) / 4
    losses = []
    for step in range(6):
        kl_type = ("forward", "reverse", "mixed")[step % 3]
        ids = torch.randint(VOCAB // 8, (BATCH, LENGTH), generator=generator)
        teacher = torch.randn(BATCH, LENGTH, H_TEACHER, generator=generator)
        mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.7
        if ours:

            def divergences(*, hidden_states, output_layer, kl_type=kl_type, teacher=teacher, mask=mask, **_):
                # The mask is of the token that a position predicts.
                counts = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
                return ChunkedDistributedHiddenStatesToKL.apply(
                    hidden_states, output_layer.weight, teacher, head, 0, VOCAB, 8, None, mask=counts, kl_type=kl_type
                )

            found = model(ids, *inputs(BATCH), labels=ids, output_processor=divergences)
            loss = found.sum() / mask[:, 1:].sum()
        else:
            logits = model(ids, *inputs(BATCH))[:, :-1]
            teacher_logps = (teacher @ head.T)[:, :-1].log_softmax(-1)
            config = DistillationLossConfig(kl_type=kl_type, mixed_kl_weight=0.5, zero_outside_topk=False)
            data = {"input_ids": ids, "token_mask": mask.float(), "sample_mask": torch.ones(BATCH)}
            n_tokens = mask[:, 1:].sum()
            loss, _ = DistillationLossFn(config)(
                logits.log_softmax(-1), teacher_logps, None, data, torch.tensor(BATCH), n_tokens
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        initialize(0, 1, folder)
        calls_of_kl = count_calls(ChunkedDistributedHiddenStatesToKL, "apply")
        distilled = distill(ours=False), distill(ours=True)  # before NeMo-RL replaces the model's forward
        if calls_of_kl.total() != len(distilled[1]):
            raise RuntimeError(f"each step of distillation calls this library once, got {calls_of_kl}")
        model_utils.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=8)
        stock = train(tied=False) + train(tied=True) + distilled[0]
        calls = count_calls(ChunkedDistributedHiddenStatesToLogprobs, "apply")
        ChunkedDistributedHiddenStatesToLogprobs.apply = staticmethod(ChunkedDistributedHiddenStatesToLogprobs.apply)
        model_utils.ChunkedDistributedHiddenStatesToLogprobs = ChunkedDistributedHiddenStatesToLogprobs
        ours = train(tied=False) + train(tied=True) + distilled[1]
        torch.distributed.destroy_process_group()
    compare("nemo-rl", stock, ours, 1e-5, calls)


if __name__ == "__main__":
    main()
