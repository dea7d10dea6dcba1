# /// script
# requires-python = ">=3.13.14,<3.14"
# dependencies = ["torch==2.11.0", "megatron-core==0.19.2"]
#
# [tool.frameworks]
# # An archive, because a git checkout would fetch the submodules too.
# no-deps = ["nemo-rl @ https://github.com/NVIDIA-NeMo/RL/archive/7ea279abfbeb698b092856d0dab61e7cf39bc909.tar.gz"]
# ///
"""NeMo-RL, commit 7ea279a: policy-gradient steps of its fused path on Megatron-Core, with its function and with ours.

Environment: NeMo-RL without its dependencies, torch 2.11.0 and megatron-core 0.19.2. No package is a stub. (It was run
on Python 3.12 with the repository on the path, because NeMo-RL refuses to install on a Python before 3.13.14.)

Its worker runs under Ray and starts NCCL: the steps here are those of its loss with linear cross entropy fusion,
`patch_gpt_model_forward_for_linear_ce_fusion`, the patched `GPTModel` with `return_logprobs_for_linear_ce_fusion`, a
clipped policy loss, SGD.

Runs a tiny `GPTModel` on one gloo rank, because its function needs sequence parallelism on several, whose norm needs
Apex or Transformer Engine. Compares the loss of each step from equal weights (0 to 7 an own head, 8 to 15 tied
embeddings), and exits with 1 if one differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import math
import tempfile

import torch
from common import compare, count_calls
from megatron_common import LENGTH, VOCAB, build, initialize, inputs
from nemo_rl.distributed import model_utils

from liger_chunked.integrations.nemo_rl import ChunkedDistributedHiddenStatesToLogprobs

STEPS, BATCH = 8, 4


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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        initialize(0, 1, folder)
        model_utils.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=8)
        stock = train(tied=False) + train(tied=True)
        calls = count_calls(ChunkedDistributedHiddenStatesToLogprobs, "apply")
        ChunkedDistributedHiddenStatesToLogprobs.apply = staticmethod(ChunkedDistributedHiddenStatesToLogprobs.apply)
        model_utils.ChunkedDistributedHiddenStatesToLogprobs = ChunkedDistributedHiddenStatesToLogprobs
        ours = train(tied=False) + train(tied=True)
        torch.distributed.destroy_process_group()
    compare("nemo-rl", stock, ours, 1e-5, calls)


if __name__ == "__main__":
    main()
