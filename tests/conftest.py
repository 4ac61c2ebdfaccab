"""What every test of the suite shares: bounded hypothesis, and one thread a process."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests import guardian

hypothesis.settings.register_profile(
    "suite",
    deadline=None,  # machines differ in speed
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    derandomize=True,  # a failure is there again at the next run
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
# Hypothesis tries constants of those of our modules that are imported: what a test tries would
# depend on the tests that its worker has run before it.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants  # there is no setting


def pytest_configure(config: pytest.Config) -> None:
    """Have what the tests start end with them."""
    config.add_cleanup(guardian.watch())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests that start processes and machines wait more than they compute."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait the longest, for machines, one after the other."""
    items.sort(key=lambda item: item.get_closest_marker("machines") is None)
