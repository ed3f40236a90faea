"""One test for each (row, number of ranks, stage); the cases are in area_*.py, see rows.py."""

import re
from pathlib import Path

import pytest
from ranks import rank_groups

from cases import areas, rows  # noqa: F401


@pytest.fixture(scope="module")
def groups():
    """Rank processes that have torch loaded, one group for each size."""
    yield from rank_groups()


def _combinations():
    cases = [(case, n, stage) for case in rows.all_cases() for n in case.ranks for stage in case.stages]
    for case, n, stage in sorted(cases, key=lambda combination: combination[1]):
        yield pytest.param(case, n, stage, id=f"{case.name}-N{n}-stage{stage}",
                           marks=[pytest.mark.row(number) for number in case.numbers])


@pytest.mark.parametrize("case, n, stage", list(_combinations()))
def test_row(groups, case, n, stage):
    groups(n).run(rows.on_rank, case.function.__module__, case.function.__name__, stage, deadline=case.deadline)


def test_the_table_lists_every_case():
    """README.md and the code name the same functions for the same rows."""
    table = {}
    for line in Path(__file__).with_name("README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 2 and cells[0].isdigit():
            for name in re.findall(r"`([a-z_0-9]+)`", cells[1]):
                table.setdefault(int(cells[0]), set()).add(name)
    coded = {}
    for case in rows.all_cases():
        for number in case.numbers:
            coded.setdefault(number, set()).add(case.function.__name__)
    from cases import test_faults

    for function in vars(test_faults).values():
        for mark in getattr(function, "pytestmark", []):
            if mark.name == "row":
                coded.setdefault(mark.args[0], set()).add(function.__name__)
    assert table == coded
