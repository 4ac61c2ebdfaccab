"""Libraries that must not lie in the environment: pip puts each into a folder of its own.

Only the processes that a test starts look there.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

__all__ = ["folder_with"]

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
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # one for all workers
    name = packages[0].partition("=")[0]
    said = base / f"{name}.json"
    with FileLock(base / f"{name}.lock"):
        if not said.exists():
            # what dill, which datasets uses, takes for a library's place
            place = "" if here() else str(base / name / "site-packages")
            problem = _install(place, packages, options, environment or {}) if place else ""
            said.write_text(json.dumps([place, problem or try_it(place)]))
    place, problem = json.loads(said.read_text())
    if problem:
        pytest.skip(f"{packages[0]} cannot be had here: {problem}")
    return str(place)


def _install(
    folder: str, packages: Sequence[str], options: Sequence[str], environment: Mapping[str, str]
) -> str:
    """Have pip put packages there, and nothing else; returns what was wrong, or nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--retries", "1"]
    command += ["--no-deps", "--target", folder, *options, *packages]
    parent = Path(folder).parent
    parent.mkdir()
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
