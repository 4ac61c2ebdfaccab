"""Settings of all tests: hypothesis profile, one thread per process, missing extensions."""

import functools
import gc
import importlib.util
import os
import re
import signal
import sys
import tomllib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("ZEROLAB_PRELOAD", "0")  # most agents of the tests run commands without torch
# Without bytecode files, each of thousands of processes compiles Zerolab again: 0.2 to 0.4 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell's background job ignores SIGINT, and would pass that on to every command under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


sys.dont_write_bytecode = False

_ROOT = Path(__file__).parents[1]

# Imports and collection create many objects that live until the end, and little garbage. Garbage
# collection would traverse them repeatedly, which takes a third of the time.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """End all processes of the tests with pytest."""
    config.add_cleanup(guardian.watch())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: tests with processes wait more than they compute."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of machines first, since they take longest; skip those without extension."""
    items.sort(key=lambda item: item.get_closest_marker("machines") is None)
    missing = _missing_extensions()
    for item in items if missing else ():
        unavailable = sorted(missing & set(_needed_names(item)))
        if unavailable:
            item.add_marker(pytest.mark.skip(f"needs the extension {', '.join(unavailable)}"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that import a missing extension: they are tests of it."""
    if collection_path.suffix == ".py" and _missing_extensions():
        return _imports_missing_extension(collection_path) or None
    return None


def pytest_collection_finish() -> None:
    """Collect garbage from now on, without the objects of the collection."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # the default took a tenth of the time of tests in process
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of live servers to the report of a failure."""
    report = yield
    servers = sys.modules.get("tests.server.processes")
    if report.failed and servers is not None and (text := servers.report_started_servers()):
        report.sections.append((f"servers at {call.when}", text))
    return report


@functools.cache
def _imports_missing_extension(path: Path) -> bool:
    """Return whether a test file, or another test file that it imports, imports one."""
    for module in re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE):
        if ".extensions." in module and not _module_exists(module):
            return True
        file = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
        is_other = module.startswith("tests.") and file != path and file.is_file()
        if is_other and _imports_missing_extension(file):
            return True
    return False


@functools.cache
def _missing_extensions() -> set[str]:
    """Return the names of our entry points whose modules have been removed."""
    text = _ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    return {
        name
        for points in tomllib.loads(text)["project"]["entry-points"].values()
        for name, value in points.items()
        if not _module_exists(value.partition(":")[0])
    }


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _needed_names(item: pytest.Item) -> Iterator[str]:
    """Yield the arguments of ``needs_extension``, and all texts in the test's parameters."""
    for marker in item.iter_markers("needs_extension"):
        yield from marker.args
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        yield from _texts(item.callspec.params)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        if isinstance(value, Mapping):  # these blocks have the names of their extensions
            yield from {"tensor_parallel", "pipeline"} & value.keys()
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
