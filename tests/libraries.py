"""Libraries that must not be in the environment: pip installs each into a separate folder.

Only the processes that a test starts import from there. Sources of a library can be downloaded
without installing it.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

__all__ = ["folder_with", "sources_of"]

INSTALL_S = 120.0
"""Timeout of pip, which takes seconds with a cache and up to 30 s without."""


def folder_with(
    tmp_path_factory: pytest.TempPathFactory,
    packages: Sequence[str],
    find_problem: Callable[[str], str] = lambda _: "",
    *,
    is_installed: Callable[[], bool] = lambda: False,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Install packages without dependencies into a folder; skip the test if pip fails.

    Args:
        tmp_path_factory: Fixture of pytest; all workers share one folder.
        packages: Requirements for pip, the tested package first.
        find_problem: Returns why the packages in a folder are unusable; empty if usable.
        is_installed: Returns whether the environment has the packages; then none is installed.
        options: More options of pip.
        environment: More environment variables of pip.

    Returns:
        The folder; empty if the environment has the packages.
    """

    def install(parent: Path) -> tuple[str, str]:
        if is_installed():
            return "", find_problem("")
        # dill, which datasets uses, recognizes libraries by this name
        path = str(parent / "site-packages")
        command = ["install", "--target", path, *options, *packages]
        return path, _pip(parent, command, environment or {}) or find_problem(path)

    return _once(tmp_path_factory, packages[0], install)


def sources_of(tmp_path_factory: pytest.TempPathFactory, package: str) -> Path:
    """Download and unpack the sources of a package without installing it.

    Skips the test if pip fails.

    Args:
        tmp_path_factory: As for :func:`folder_with`.
        package: ``name==version``.
    """

    def unpack(parent: Path) -> tuple[str, str]:
        problem = _pip(parent, ["download", "--no-binary", ":all:", "--dest", ".", package], {})
        for archive in () if problem else parent.glob("*.tar.gz"):
            with tarfile.open(archive) as packed:
                packed.extractall(parent, filter="data")
        return str(parent / package.replace("==", "-")), problem

    return Path(_once(tmp_path_factory, f"sources-of-{package}", unpack))


def _once(
    tmp_path_factory: pytest.TempPathFactory,
    package: str,
    make: Callable[[Path], tuple[str, str]],
) -> str:
    """Return a path made once for all workers; skip the test with the problem."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # one for all workers
    name = package.partition("=")[0]
    result_file = base / f"{name}.json"
    with FileLock(base / f"{name}.lock"):
        if not result_file.exists():
            (base / name).mkdir()
            result_file.write_text(json.dumps(make(base / name)))
    path, problem = json.loads(result_file.read_text())
    if problem:
        pytest.skip(f"{package} is not available: {problem}")
    return str(path)


def _pip(parent: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run pip in a folder without dependencies; return its error, or an empty string."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps"]
    command += ["--quiet", "--no-input", "--retries", "1"]
    with (
        tempfile.TemporaryFile("w+") as error_file,
        subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(parent), **environment},
            cwd=parent,  # keeps the checkout clean
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error_file,
            start_new_session=True,
        ) as pip,
    ):
        try:
            code = pip.wait(INSTALL_S)
        except subprocess.TimeoutExpired:
            os.killpg(pip.pid, signal.SIGKILL)  # with its children
            return f"pip: no answer within {INSTALL_S:.0f} s"
        error_file.seek(0)
        return "" if code == 0 else f"pip: {error_file.read().strip()[-500:] or 'no reason given'}"
