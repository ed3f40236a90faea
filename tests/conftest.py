"""Settings of all tests: the same hypothesis examples everywhere, and no launcher variables from outside."""

import os

import pytest
from hypothesis import HealthCheck, settings

from ranks import RANK_VARIABLES

settings.register_profile("fixed", derandomize=True, deadline=None, database=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", derandomize=False, deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Tests start from a process that nobody launched as a rank."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
