"""What every test of the suite shares: bounded hypothesis, one thread a process, a second try."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import hypothesis
import pytest

from tests import guardian

hypothesis.settings.register_profile(
    "suite",
    deadline=None,  # machines differ in speed
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    derandomize=True,  # a failure is there again at the next run
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_configure(config: pytest.Config) -> None:
    """Have what the tests start end with them."""
    config.add_cleanup(guardian.watch())


WARNINGS_ARE_TOLD = {"agent", "cli", "end_to_end", "engine", "faults", "trial", "web"}
"""Folders in which a warning is not an error yet: what they warn of has not been gone through."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests that start processes one more try; the report says when it was needed."""
    for item in items:
        if item.path.parent.name in WARNINGS_ARE_TOLD:
            item.add_marker(pytest.mark.filterwarnings("default"))
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return  # -p no:rerunfailures: to find out which ones need it
    for item in items:
        if item.get_closest_marker("processes") or item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))
