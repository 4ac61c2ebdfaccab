"""Files and processes of an installation: atomic, private, and owned."""

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.launcher.helpers import wait_for_exit
from tests.waiting import DEADLINE_S, until
from zerolab.errors import ConfigError
from zerolab.files import read_json, write_json
from zerolab.linux import kill_tree, our_process
from zerolab.paths import Home


def test_data_directory_is_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "a" / "b").create().create()
    for path in (home.path, home.runs, home.checkpoints, home.archives, home.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert home.run(7) == home.runs / "7"


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="ZEROLAB_HOME"):
        Home(tmp_path / "file" / "home").create()


def test_concurrent_starts_share_token(tmp_path: Path) -> None:
    home = Home(tmp_path).create()
    assert home.read_token() is None
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: Home(tmp_path).ensure_token(), range(32)))
    assert tokens == {home.read_token()}
    assert stat.S_IMODE(home.token_file.stat().st_mode) == 0o600
    home.token_file.write_text("")
    assert len(home.ensure_token()) > 30


def test_data_directory_of_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROLAB_HOME", str(tmp_path))
    assert Home.default() == Home(tmp_path)
    monkeypatch.delenv("ZEROLAB_HOME")
    assert Home.default().path == Path.home() / ".zerolab"


def test_json_file_is_atomic(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    assert read_json(file) is None
    write_json(file, {"pid": 1})
    assert read_json(file) == {"pid": 1}
    file.write_text('{"pid": ')
    assert read_json(file) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_our_process_checks_command_and_age() -> None:
    me, now = os.getpid(), time.time()
    assert our_process(me, "py", now) == psutil.Process(me)
    assert our_process(me, "no such word", now) is None
    assert our_process(me, "py", psutil.Process(me).create_time() - 60) is None
    assert our_process(2**22 - 1, "py", now) is None


@pytest.mark.processes
def test_kill_tree_includes_leaves() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as root:
        leaves = until("it has a leaf", lambda: psutil.Process(root.pid).children(recursive=True))
        kill_tree(root.pid)
        assert root.wait(DEADLINE_S) == -9
    wait_for_exit(*(leaf.pid for leaf in leaves))
