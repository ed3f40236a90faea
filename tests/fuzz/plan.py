"""Arguments of python -m zero_c.plan, and the text that it prints.

An input is a list of arguments (without --model, which is code).

    main() prints a table or JSON and returns 0, or exits with status 2 and a sentence about what is wrong
"""

import contextlib
import io
import json
import math

from choices import Choices
from zero_c import plan

NUMBERS = ["0", "1", "2", "3", "7", "64", "1000", "65535", "65536", "1e6", "7.5e9", "1e12", "1e18", "1e19", "1e30", "1e100", "1e308",
           "1e400", "1" * 310, "9" * 5000, "-1", "-0", "+5", "0.5", "1.5", "1e-300", "nan", "inf", "-inf", "", " 8", "1_0", "x", "\u0661",
           "\u00b2", "0x10", "\udcff", "1e"]
WORDS = {"--dtype": [*plan.DTYPES, "x", "", "int8"], "--optimizer": ["adamw", "adam", "sgd", "x", ""], "--device": ["cpu", "cuda", "x"],
         "--hops": ["ring", "tree", "one", "x", ""], "--units": ["", "a", "a,b"]}
NUMERIC = ["--params", "--memory", "--largest-unit", "--root", "--ranks", "--bucket-mb", "--prefetch", "--backwards", "--link-bandwidth",
           "--link-latency", "--memory-bandwidth", "--flops", "--tokens", "--forward-seconds", "--backward-seconds"]
FLAGS = ["--amsgrad", "--momentum", "--shared-params", "--no-overlap", "--json"]
TIME = ["--link-bandwidth", "1e9", "--link-latency", "1e-6", "--memory-bandwidth", "1e10", "--flops", "1e12", "--tokens", "1000"]


def arguments_of(choices):
    arguments = []
    if choices.below(8):
        size = choices.pick(["--params", "--memory"])
        arguments += [size, choices.pick(NUMBERS[5:15]), "--ranks", choices.pick(NUMBERS[:9])]
    if choices.below(4) == 0:
        arguments += TIME
    for _ in range(choices.below(6)):
        what = choices.below(16)
        if what < 10:
            arguments += [choices.pick(NUMERIC), choices.pick(NUMBERS) if choices.below(8) else choices.text(12)]
        elif what < 13:
            name = choices.pick(sorted(WORDS))
            arguments += [name, choices.pick(WORDS[name])]
        elif what < 15:
            arguments.append(choices.pick(FLAGS))
        else:
            arguments.append(choices.text(12))
    return [argument for argument in arguments if not argument.startswith("--mo") or argument == "--momentum"]  # --model


def check_numbers(value):
    """All of JSON's numbers that a program can read."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        check_numbers(each)
    assert not isinstance(value, float) or math.isfinite(value), value


def one_input(data):
    arguments, out, err = arguments_of(Choices(data)), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            assert plan.main(arguments) == 0
        except SystemExit as end:
            asked = any(argument.startswith(("-h", "--h")) for argument in arguments)
            assert end.code == 2 or (end.code == 0 and asked), arguments
            assert asked or "error: " in err.getvalue(), (arguments, err.getvalue())
            return
    text = out.getvalue()
    assert text and not err.getvalue(), arguments
    assert "nan" not in text.lower() and "inf" not in text.lower(), (arguments, text)
    if "--json" in arguments:
        check_numbers(json.loads(text))
