"""What the example scripts that use other packages have in common: arguments, made-up data, the report."""
import argparse
import json

import torch


def arguments(description, argv, **more):
    """--stage or --plain, --steps, --log; more: of one script, name=help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="of ZeRO")
    parser.add_argument("--plain", action="store_true", help="DDP and torch's AdamW instead, to compare with")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--log", help="write the rank's losses to LOG.<rank>.json")
    for name, text in more.items():
        parser.add_argument(f"--{name}", help=text)
    return parser.parse_args(argv)


def made_up_tokens(count, vocabulary, length=16):
    """Sequences that can be learned: each counts on from a random start, in random steps."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(vocabulary, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + stride * torch.arange(length)) % vocabulary


def report(args, comm, losses, extra=None):
    """What this rank has seen, for people and for --log."""
    if comm.rank == 0:
        print(f"loss of rank 0: {losses[0]:.4f} at first, {losses[-1]:.4f} at last; {extra if extra is not None else ''}")
    if args.log:
        with open(f"{args.log}.{comm.rank}.json", "w") as file:
            json.dump({"losses": losses, "extra": extra}, file)
    return {"losses": losses, "extra": extra}
