"""The command; docs/importing.md has its manual."""

import argparse
import signal
import sys
from pathlib import Path

from zero_c._core import CheckpointError, Error

DTYPES = ("float32", "float64", "bfloat16", "float16")


def parser():
    top = argparse.ArgumentParser(prog="python -m zero_c.convert", description="Writes a zero_c checkpoint from another package's.")
    kinds = top.add_subparsers(dest="kind", required=True)
    deepspeed = kinds.add_parser("deepspeed", help="a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3")
    dcp = kinds.add_parser("dcp", help="a folder of torch.distributed.checkpoint (FSDP2, ...)")
    for kind in (deepspeed, dcp):
        kind.add_argument("source", type=Path, metavar="SOURCE", help="folder of the checkpoint")
        kind.add_argument("dest", type=Path, metavar="DEST", help="folder to make; there must be nothing of that name")
        kind.add_argument("--strip-prefix", metavar="PREFIX", help="take this from the front of every name that has it ('' for "
                          "nothing); by default '_orig_mod.' goes wherever it is, and 'module.' where all names begin with it")
        kind.add_argument("--dtype", choices=DTYPES, help="of the target's parameters; by default as in the source")
        kind.add_argument("--buffer-dtype", choices=DTYPES, help="of the target's floating-point buffers; by default as in the source")
        kind.add_argument("--optimizer", choices=("adamw", "adam"), help="of the target, where the source does not say")
        kind.add_argument("--frozen-group", type=group, default=argparse.SUPPRESS, metavar="N", help="parameter group in which the "
                          "target's optimizer has its frozen parameters, or 'none'; by default 0 if the source has one group, else none")
    dcp.add_argument("--frozen", action="append", default=[], metavar="PATTERN", help="frozen parameters, as name or shell pattern")
    dcp.add_argument("--buffer", action="append", default=[], metavar="PATTERN", help="floating-point buffers, the same")
    dcp.add_argument("--alias", action="append", default=[], metavar="NAME=NAME", type=pair,
                     help="the first is another name of the second, a tied weight")
    return top


def group(text):
    return None if text == "none" else int(text)


def pair(text):
    first, equals, second = text.partition("=")
    if not (first and equals and second):
        raise ValueError
    return first, second


def read(converter, given):
    """The Source; what nobody foresaw in a foreign file is an error that names the folder, as all else."""
    try:
        return converter.read(given.source, given)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{given.source} is damaged, or of a layout that is not known ({type(error).__name__}: {error})") from error


def main(arguments=None):
    given = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: what is half written goes
    try:
        from . import _source, dcp, deepspeed
    except ImportError as error:
        if error.name != "torch":
            raise
        sys.exit("zero_c.convert needs torch, which is not installed here")
    try:
        source = read({"deepspeed": deepspeed, "dcp": dcp}[given.kind], given)
        _source.write(source, given.dest)
    except (Error, OSError) as error:
        print(f"zero_c.convert: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{given.dest}: {source.summary()}")


if __name__ == "__main__":
    main()
