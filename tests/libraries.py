"""Libraries that must not lie in the environment: pip puts each into a folder of its own.

Only the processes that a test starts look there. Of a library that cannot be used here at all, the
files can be had.
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
"""For pip, which takes seconds with a cache, and up to half a minute without one."""


def folder_with(
    tmp_path_factory: pytest.TempPathFactory,
    packages: Sequence[str],
    try_it: Callable[[str], str] = lambda _: "",
    *,
    here: Callable[[], bool] = lambda: False,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """A folder with packages in it, without what they depend on; skips where pip has none.

    Args:
        tmp_path_factory: pytest's; the folder is one for all its workers.
        packages: As pip reads them, the one that is tested first.
        try_it: Gets the folder, and says why what is in it cannot be used, or nothing.
        here: Whether the environment has them already: nothing is installed then.
        options: For pip.
        environment: For pip, over this process's.

    Returns:
        The folder; nothing where the environment has them.
    """

    def install(parent: Path) -> tuple[str, str]:
        if here():
            return "", try_it("")
        # what dill, which datasets uses, takes for a library's place
        place = str(parent / "site-packages")
        command = ["install", "--target", place, *options, *packages]
        return place, _pip(parent, command, environment or {}) or try_it(place)

    return _once(tmp_path_factory, packages[0], install)


def sources_of(tmp_path_factory: pytest.TempPathFactory, package: str) -> Path:
    """A folder with the files that a package is published with, unpacked; nothing is installed.

    Skips where pip cannot have them.

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
    """The place that is made in an empty folder, once for all workers; skips with the problem."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # one for all workers
    name = package.partition("=")[0]
    said = base / f"{name}.json"
    with FileLock(base / f"{name}.lock"):
        if not said.exists():
            (base / name).mkdir()
            said.write_text(json.dumps(make(base / name)))
    place, problem = json.loads(said.read_text())
    if problem:
        pytest.skip(f"{package} cannot be had here: {problem}")
    return str(place)


def _pip(parent: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Have pip work in a folder, without dependencies; returns what was wrong, or nothing."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps"]
    command += ["--quiet", "--no-input", "--retries", "1"]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(parent), **environment},
            cwd=parent,  # nothing lands in the checkout
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        ) as pip,
    ):
        try:
            code = pip.wait(INSTALL_S)
        except subprocess.TimeoutExpired:
            os.killpg(pip.pid, signal.SIGKILL)  # with what it has started
            return f"pip: no answer within {INSTALL_S:.0f} s"
        said.seek(0)
        return "" if code == 0 else f"pip: {said.read().strip()[-500:] or 'no reason given'}"
