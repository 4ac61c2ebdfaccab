"""Settings of all tests: hypothesis profile, and one thread per process."""

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
    derandomize=True,  # failures are reproducible
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
# Hypothesis tries constants of the imported modules. Examples would then depend on the tests that
# the worker has run before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants  # there is no setting


def pytest_configure(config: pytest.Config) -> None:
    """End all processes of the tests with pytest."""
    config.add_cleanup(guardian.watch())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: tests with processes wait more than they compute."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of machines first, since they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("machines") is None)
