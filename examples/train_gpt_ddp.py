"""The same training with PyTorch's own data parallelism, to compare with: what changes is in main().

    python -m torch.distributed.run --nproc-per-node 2 examples/train_gpt_ddp.py
"""
import os

import torch
import torch.distributed as dist

from gpt import GPT, LibrarySource
from meter import Meter
from train_gpt import arguments, train
from watch import Watch


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    data = LibrarySource(rank, ranks)
    meter = Meter(args.log, rank)
    torch.manual_seed(0)

    model = GPT()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    opt.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
    train(parallel, opt, data, args.steps, meter, Watch())

    meter.finish(model)
    if rank == 0:
        meter.sample(model.eval().write("def ", 240))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
