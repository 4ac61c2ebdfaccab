"""An agent that has not the package for a run's storage says so, and starts nothing."""

import sys
import threading
from pathlib import Path

import pytest

from tests.client.helpers import closed_port, make_spec
from tests.waiting import DEADLINE_S
from zerolab.agent.run import Run
from zerolab.client.http import Client
from zerolab.contract.outcome import read_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import EXIT_USER_ERROR
from zerolab.contract.wire import WorkItem
from zerolab.launcher.local import LocalLauncher
from zerolab.paths import Home


def test_a_missing_package_is_told_with_what_to_do_and_is_no_failure_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    home = Home(tmp_path / "home").create()
    folder = RunFolder(home.run(1))
    spec = make_spec(tmp_path, checkpoint_dir="s3://bucket/prefix", storage_options={})
    closing = threading.Event()
    closing.set()  # no server answers, and none is waited for
    with Client(closed_port()) as client:
        run = Run(
            WorkItem(1, "run", spec, "/nowhere", [0]),
            folder,
            client,
            token="",
            environment={},
            launcher=LocalLauncher(home, []),
            closing=closing,
            cache=home.cache,
        )
        run.start()
        assert run.join(DEADLINE_S)
    outcome = read_outcome(folder.path)
    assert outcome is not None
    assert outcome.exit_code == EXIT_USER_ERROR
    assert "s3://bucket/prefix needs the package s3fs" in str(outcome.reason)
    assert "pip install 'zerolab[s3]'" in str(outcome.reason)
