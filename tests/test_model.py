"""The small cases of the models of the shared-memory protocol; `make model` runs all of them."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "model"))
import check  # noqa: E402

QUICK = [case for case in check.CASES if case.quick]


@pytest.mark.skipif(not shutil.which("spin"), reason="spin is not installed (Debian: apt-get install spin)")
@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
def test_model(case):
    assert check.search(case).found == case.found
