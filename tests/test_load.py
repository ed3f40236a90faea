"""Many operations, many ranks, many beginnings and ends: results stay exact and nothing grows (tests/c/load/load.c)."""

import os

import pytest

from test_c import BUILD, CC, CSRC, FLAVOURS, ROOT, compile_object, core_objects, flags_for, link, run

SOURCE = ROOT / "tests" / "c" / "load" / "load.c"


def program(flavour):
    headers = {*CSRC.rglob("*.h"), *SOURCE.parent.parent.glob("*.h")}
    own = compile_object(SOURCE, BUILD / flavour, [CC, *flags_for(SOURCE, flavour), f"-I{SOURCE.parent.parent}"], headers)
    return link(BUILD / flavour / "load", [CC, *FLAVOURS[flavour], "-pthread"], [own, *core_objects(flavour), "-lm"])


def cases(*rows):
    """(how, ranks, operations or cycles, flavour); those of more than a few seconds are long."""
    return [pytest.param(*row, id="-".join(map(str, row)), marks=[pytest.mark.long] if long else []) for long, *row in rows]


@pytest.mark.parametrize(("how", "ranks", "count", "flavour"), cases(
    (False, "processes", 2, 50_000, "plain"), (False, "processes", 4, 20_000, "plain"), (False, "processes", 8, 20_000, "plain"),
    (False, "threads", 64, 1_000, "plain"), (False, "threads", 8, 300, "thread"), (False, "cycles", 2, 500, "plain"),
    (True, "processes", 2, 1_000_000, "plain"), (True, "processes", 4, 1_000_000, "plain"), (True, "processes", 8, 1_000_000, "plain"),
    (True, "threads", 64, 10_000, "plain"), (True, "threads", 64, 300, "thread"), (True, "threads", 16, 3_000, "address"),
    (True, "cycles", 2, 10_000, "plain")))  # not under a sanitizer, which keeps what is freed
def test_load(how, ranks, count, flavour):
    before = sorted(os.listdir("/dev/shm"))
    status, output = run([program(flavour), how, str(ranks), str(count), "1"], 900)
    assert status == 0, output
    assert sorted(os.listdir("/dev/shm")) == before
