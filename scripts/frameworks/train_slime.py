# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "transformers==5.15.0", "megatron-core==0.19.2"]
#
# [tool.frameworks]
# no-deps = ["slime @ https://github.com/THUDM/slime/archive/624b824a898ab0ec1fcb4d373004c7f3852bf515.tar.gz"]
# ///
"""slime 0.3.1 (commit 624b824): steps of its policy loss on Megatron-Core, stock and after our `install`.

Environment: slime without its dependencies, torch 2.11.0 and megatron-core 0.19.2. Stubs: Ray, torch_memory_saver,
`megatron.training`, Megatron-Bridge, mbridge, SGLang and its router, and wandb. Its actor runs under Ray and
starts NCCL: the steps here are those of its loss, `GPTModel` on concatenated sequences, then slime's
`policy_loss_function` with an entropy bonus, a KL term and a temperature, SGD. Megatron's local attention has no packed
sequences, so the samples of a row attend to each other, in both runs.

Runs a tiny `GPTModel` on two gloo ranks with tensor parallelism. Compares the loss of each step from equal weights (0
to 7 an own head, 8 to 15 tied embeddings), and exits with 1 if one differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import compare, count_calls, stub
from megatron_common import LENGTH, VOCAB, build, initialize, inputs

RANKS, STEPS = 2, 8
TOTAL, RESPONSE = [9, 7], [5, 4]  # the tokens of two samples, which fill a row of LENGTH

ARGS = SimpleNamespace(
    rollout_temperature=0.7,
    log_probs_chunk_size=-1,
    allgather_cp=False,
    entropy_coef=0.01,
    eps_clip=0.2,
    eps_clip_high=0.2,
    eps_clip_c=None,
    advantage_estimator="grpo",
    use_rollout_logprobs=False,
    use_opsm=False,
    use_tis=False,
    get_mismatch_metrics=False,
    use_kl_loss=True,
    use_unbiased_kl=False,
    kl_loss_type="low_var_kl",
    kl_loss_coef=0.1,
    qkv_format="thd",
    calculate_per_token_loss=False,
    use_rollout_top_p_replay=False,
    rollout_top_p=1.0,
    enable_mtp_training=False,
)


def train(tied: bool) -> list[float]:
    """Return the loss of each step, from equal random weights."""
    from slime.backends.megatron_utils.loss import policy_loss_function

    model = build(RANKS, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB // 8, (1, LENGTH), generator=generator)
        old = [-math.log(VOCAB) + 0.1 * torch.randn(n, generator=generator) for n in RESPONSE]
        batch = {
            "advantages": [1.0 + torch.randn(n, generator=generator) for n in RESPONSE],
            "log_probs": old,
            "ref_log_probs": old,
            "unconcat_tokens": list(ids[0].split(TOTAL)),
            "total_lengths": TOTAL,
            "response_lengths": RESPONSE,
            "loss_masks": [torch.ones(n) for n in RESPONSE],
        }
        loss, _ = policy_loss_function(ARGS, batch, model(ids, *inputs(1)), torch.mean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, folder: str) -> None:
    initialize(rank, RANKS, folder)
    stub("ray", "torch_memory_saver", "megatron.training", "megatron.bridge", "mbridge", "sglang", "sglang_router")
    stub("wandb")
    from liger_chunked.integrations.frameworks import slime as adapter

    stock = train(tied=False) + train(tied=True)
    calls = count_calls(adapter, "linear_token_stats")
    adapter.install(ARGS)
    ours = train(tied=False) + train(tied=True)
    if rank == 0:
        torch.save((stock, ours, dict(calls)), f"{folder}/losses")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), RANKS)
        stock, ours, calls = torch.load(f"{folder}/losses")
    compare("slime", stock, ours, 1e-5, Counter(calls))


if __name__ == "__main__":
    main()
