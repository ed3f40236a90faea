"""Trains a byte-level GPT with sharded training state, on the CPUs of one host:

    python -m zero_c.launch -n 2 examples/train_gpt.py --stage 2
"""
import argparse
import os

import torch

import zero_c
from zero_c.torch import ShardedOptimizer

from gpt import GPT, LibrarySource
from meter import Meter
from timeline import STEPS
from watch import Watch


def arguments(closer=False):
    """closer: also the options for a closer look at single steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2,
                        help="0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--log", help="write one JSON line a step to LOG.<rank>.jsonl instead of printing")
    if closer:
        parser.add_argument("--profile", metavar="FILE",
                            help="write when each rank computed, reduced, gathered and updated in three steps, for "
                                 "chrome://tracing or Perfetto")
        parser.add_argument("--watch-memory", action="store_true", help="with --log: also the memory over one step")
    args = parser.parse_args()
    if not closer:
        return args
    if (args.profile or args.watch_memory) and args.steps < STEPS:
        parser.error(f"--steps is {args.steps}; --profile and --watch-memory look at steps up to number {STEPS}")
    if args.watch_memory and not args.log:
        parser.error("--watch-memory writes to the log; give --log too")
    return args


def train(model, opt, data, steps, meter, watch):
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=3e-3, total_steps=steps, pct_start=0.15,
                                                   cycle_momentum=False)
    for number in range(steps):
        ids, targets = data.next()
        with watch.step(number):
            with watch.phase("forward"):
                loss = model(ids, targets)
            with watch.phase("backward"):
                loss.backward()
            with watch.phase("step"):
                opt.step()
                opt.zero_grad()
        schedule.step()
        meter.step(loss, ids.numel())


def main():
    args = arguments(closer=True)
    comm = zero_c.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.world_size))
    data = LibrarySource(comm.rank, comm.world_size)
    meter = Meter(args.log, comm.rank)
    torch.manual_seed(0)

    model = GPT()
    opt = ShardedOptimizer(model, stage=args.stage, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    watch = Watch(opt.profile() if args.profile else None, meter.base if args.watch_memory else None)
    train(model, opt, data, args.steps, meter, watch)
    if args.profile:
        watch.profile.save(args.profile)
    if args.watch_memory:
        meter.write(memory_over_step=watch.memory)

    # A stage-3 backward finds there what it needs first: what is in no block, and one block for each of two slots.
    there = list(model.blocks[-2:]) + [module for module in model.children() if module is not model.blocks]
    meter.finish(model, opt.gathered, memory=opt.memory(), traffic=opt.traffic(),
                 there=sum(p.numel() for module in there for p in module.parameters()))
    if comm.rank == 0:  # alone: at stage 3 each block comes from the other ranks' memory, which stays there to be read
        meter.sample(model.eval().write("def ", 240))


if __name__ == "__main__":
    main()
