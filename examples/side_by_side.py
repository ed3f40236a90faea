"""What the example scripts have in common: arguments, ranks, and a log of the losses, so that the same script can be
compared at every stage and under PyTorch's own data parallelism (--ddp)."""
import argparse
import json
import os

import torch


def arguments(doc, steps, argv=None, **more):
    """--stage or --ddp, --steps, --log; more: options of one script, name=help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stage", type=int, default=2,
                     help="0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too")
    how.add_argument("--ddp", action="store_true", help="DistributedDataParallel and torch's optimizer instead")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--log", help="write losses and results to LOG.<rank>.json instead of printing")
    for name, text in more.items():
        parser.add_argument(f"--{name}", help=text)
    return parser.parse_args(argv)


class Ranks:
    """This rank's number, how many there are, and the losses that it saw."""

    def __init__(self, args):
        self.args, self.losses = args, []
        self.joins = args.ddp and not torch.distributed.is_initialized()
        if self.joins:
            torch.distributed.init_process_group("gloo")
        if args.ddp:
            self.rank, self.count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            import zero_c
            comm = zero_c.init()
            self.rank, self.count = comm.rank, comm.world_size
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.count))

    def loss(self, value):
        self.losses.append(float(value))
        if not self.args.log and self.rank == 0 and len(self.losses) % 10 == 0:
            print(f"step {len(self.losses)}  loss {self.losses[-1]:.4f}", flush=True)

    def finish(self, **results):
        """After the last step; results: what the runs may be compared by."""
        if self.args.log:
            with open(f"{self.args.log}.{self.rank}.json", "w") as log:
                json.dump({"losses": self.losses, **results}, log)
        elif self.rank == 0 and results:
            print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in results.items()))
        if self.joins:
            torch.distributed.destroy_process_group()
