"""Training that goes on where it was, however it was ended: every few steps it saves, and at its start it loads.

    python -m zero_c.launch -n 2 --max-restarts 3 examples/restart.py --folder run/last

Kill a rank (or the launcher, and start again, with any -n): the losses are those of a run that nobody ended. That takes
three things: what the optimizer saves; data that follow from the number of the step, of which each rank takes its
rows; and a rank that never starts from nothing where a checkpoint is.
"""
import argparse
import os
import pathlib

import numpy

import zero_c
from numpy_digits import gradients, start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="of the checkpoint; one that all ranks see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--stage", type=int, default=2, help="0 shards nothing, 1 optimizer state, 2 gradients too")
    args = parser.parse_args()
    comm = zero_c.init()
    stored = numpy.load(pathlib.Path(__file__).with_name("digits.npz"))
    images, labels = stored["images"].reshape(-1, 64).astype(numpy.float32) / 8 - 1, stored["labels"]

    arrays = start(32, numpy.random.default_rng(0))
    opt = zero_c.ShardedOptimizer(arrays, "adamw", lr=1e-2, stage=args.stage)
    if zero_c.has_checkpoint(args.folder):
        opt.load(args.folder)
    if comm.rank == 0:
        print(f"start {os.environ.get('ZERO_C_RESTART', '0')}: {comm.world_size} ranks, from step {opt.last_step.steps}", flush=True)
    for step in range(opt.last_step.steps, args.steps):
        batch = numpy.random.default_rng([1, step]).integers(1500, size=48)     # the same on all ranks, and after a restart
        mine = batch[comm.rank::comm.world_size]
        loss, found = gradients(arrays, images[mine], labels[mine])
        for i, gradient in enumerate(found):
            opt.add_grad(i, gradient)
        opt.step()
        loss = comm.all_reduce(numpy.array([loss]), "sum")[0] / comm.world_size
        if comm.rank == 0:
            print(f"step {step + 1}  loss {loss:.17g}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            opt.save(args.folder)


if __name__ == "__main__":
    main()
