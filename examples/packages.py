"""What the example scripts that use other packages have in common: made-up data, and the report."""
import json

import torch


def made_up_tokens(count, vocabulary, length=16):
    """Sequences that can be learned: each counts on from a random start, in random steps."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(vocabulary, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + stride * torch.arange(length)) % vocabulary


def report(args, comm, losses, extra=None):
    """What this rank has seen: returned, and to LOG.<rank>.json or printed."""
    if args.log:
        with open(f"{args.log}.{comm.rank}.json", "w") as log:
            json.dump({"losses": losses, "extra": extra}, log)
    elif comm.rank == 0:
        print(f"loss of rank 0: {losses[0]:.4f} at first, {losses[-1]:.4f} at last; {extra if extra is not None else ''}")
    return {"losses": losses, "extra": extra}
