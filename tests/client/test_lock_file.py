"""A lock file, also on a file system without locks."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.files import lock_file

HOLDS = """
import sys
from pathlib import Path
from zerolab.files import lock_file
with lock_file(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    command = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match="another process holds"):
            lock_file(path)
        holder.communicate()
    with lock_file(path):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def missing(*_arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", missing)
    path = tmp_path / "x.lock"
    with (
        pytest.warns(UserWarning, match="flock"),
        lock_file(path),
        pytest.raises(BlockingIOError),
    ):
        lock_file(path)
    with pytest.warns(UserWarning, match="flock"), lock_file(path):
        pass
