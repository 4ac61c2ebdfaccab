"""Outcomes of runs that an agent does not start."""

import sys
import threading
from pathlib import Path

import pytest

from tests.client.helpers import closed_port, make_spec
from tests.waiting import DEADLINE_S
from zerolab.agent.run import Run
from zerolab.client.http import Client
from zerolab.contract.messages import WorkItem
from zerolab.contract.outcome import Outcome, read_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, Nodes, RunSpec
from zerolab.launcher.local import LocalLauncher
from zerolab.paths import Home


def end_of(spec: RunSpec, directory: Path, *, stopped: bool = False) -> Outcome:
    """Return the outcome of a run from an agent without a server."""
    home = Home(directory / "home").create()
    folder = RunFolder(home.run(1))
    closing = threading.Event()
    closing.set()  # no server responds, and the agent does not wait
    with Client(closed_port()) as client:
        run = Run(
            WorkItem(1, "run", spec, "/nowhere", [0]),
            folder,
            client,
            environment={},
            launcher=LocalLauncher(home, []),
            closing=closing,
            cache=home.cache,
        )
        if stopped:
            run.stop(0.0)
        run.start()
        assert run.join(DEADLINE_S)
    outcome = read_outcome(folder.path)
    assert outcome is not None
    return outcome


def test_missing_package_fails_without_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    spec = make_spec(tmp_path, checkpoint_dir="s3://bucket/prefix", storage_options={})
    outcome = end_of(spec, tmp_path)
    assert outcome.exit_code == EXIT_USER_ERROR
    assert "s3://bucket/prefix needs the package s3fs" in str(outcome.reason)
    assert "pip install 'zerolab[s3]'" in str(outcome.reason)


@pytest.mark.parametrize("nodes", [None, *(Nodes((1, 1), rank, "127.0.0.1", 1) for rank in (0, 1))])
def test_run_stopped_before_start_is_no_failure(tmp_path: Path, nodes: Nodes | None) -> None:
    outcome = end_of(make_spec(tmp_path, nodes=nodes), tmp_path, stopped=True)
    assert outcome == Outcome(EXIT_INFRASTRUCTURE, "the run was stopped before it started")
