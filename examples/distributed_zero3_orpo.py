"""ORPO under DeepSpeed's ZeRO-3: a rank has some pairs of each batch, and a shard of every weight.

torchrun --nproc-per-node 2 examples/distributed_zero3_orpo.py    needs `pip install deepspeed`
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import torch
import torch.distributed as dist
from distributed_common import Log, batches, process_group, tokens
from torch import Tensor
from toy import sums, tiny_model

from liger_chunked import LigerFusedLinearORPOLoss
from liger_chunked.integrations.transformers import HeadInput, attach_head
from liger_chunked.types import Head

STEPS, PAIRS = 20, 8  # pairs of all ranks in a step


def main(device: torch.device) -> Log:
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read by the import
    import deepspeed

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny_model().to(device).train()  # the same weights on all ranks, from the same seed
    attach_head(model)
    config = {
        "train_micro_batch_size_per_gpu": PAIRS // ranks,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    orpo = LigerFusedLinearORPOLoss(beta=0.1)

    def head_fn(head: Head, input: HeadInput) -> Tensor:
        # This runs inside the forward of lm_head, where ZeRO-3 has gathered its weight.
        loss, _ = input.loss(orpo, head)
        return loss

    # The NLL term is a mean over the chosen tokens of a rank, and the engine averages over ranks. Ranks whose answers
    # have more tokens in total would weigh each of them less. These answers have two digits each.
    log, data = Log(), batches([row for row in sums() if len(row["chosen"]) == 3][:16], PAIRS)
    for _ in range(STEPS):
        batch = tokens(next(data)[rank::ranks], ("chosen", "rejected"), device)
        loss = engine(**batch, head_fn=head_fn)  # the engine, not the model, whose weights are shards
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        log.step(mean, float(engine.get_global_grad_norm()))
    engine.destroy()
    return log


if __name__ == "__main__":
    # DeepSpeed calls torch's collectives by their former names.
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit("this example needs DeepSpeed: pip install deepspeed")
    with process_group() as device:
        log = main(device)
