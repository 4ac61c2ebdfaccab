"""Runs with staged data: access by ranks, visible progress, preemption."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agent.test_two_agents import CONFIG, Farm
from tests.launcher.helpers import end_of, make_run
from tests.waiting import until
from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import ENV_STAGED, EXIT_PREEMPTED, EXIT_USER_ERROR, read_run_spec
from zerolab.extensions.staging.copying import StagedCopy
from zerolab.extensions.staging.launcher_hooks import staged
from zerolab.launcher.process import start_launcher

pytestmark = pytest.mark.processes

READ = "raise SystemExit('these ranks are never started')"
SERVED = """
import os, pathlib
import zerolab.core
with zerolab.core.init() as context:
    data = pathlib.Path(os.environ["ZEROLAB_STAGED_DATA"])
    context.train.report_validation_metrics(1, {"loss": float((data / "loss").read_text())})
"""


@contextmanager
def copying(to: Path) -> Iterator[None]:
    """Hold the copy lock of a target, like a slow copy."""
    StagedCopy(to).open_use().close()
    with (to.parent / ".zerolab-stage" / f"{to.name}.copying").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "loss").write_text("0.25")
    return folder


def test_per_trial_copy_is_removed_after_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_STAGED, "")
    to = tmp_path / "scratch" / "data"
    stage = {"from": str(source), "to": str(to), "once_per": "trial"}
    folder = make_run(tmp_path / "run", READ, data={"stage": stage})
    with staged(read_run_spec(folder.spec), folder.spec) as refused:
        assert refused is None
        assert os.environ[ENV_STAGED] == f"{to}/trial-1"
        assert (to / "trial-1" / "loss").read_text() == "0.25"
    assert not (to / "trial-1").exists()
    assert "is copied to" in folder.agent_log.read_text()


def test_run_preempted_during_staging(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "scratch" / "data"
    stage = {"from": str(source), "to": str(to)}
    folder = make_run(tmp_path / "run", READ, data={"stage": stage})
    with copying(to):
        process = start_launcher(folder, {})
        until("it waits", folder.agent_log.exists, details=folder.launcher_log.read_text)
        os.kill(process.pid, signal.SIGTERM)
        end = end_of(process, folder)
    assert end.exit_code == EXIT_PREEMPTED, end
    assert "preempted" in str(end.reason)
    assert not folder.rank_pids()


def test_unwritable_target_and_missing_source_fail(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_STAGED, "")
    (tmp_path / "file").touch()

    def end(name: str, stage: dict[str, str]) -> Outcome:
        folder = make_run(tmp_path / name, READ, data={"stage": stage})
        with staged(read_run_spec(folder.spec), folder.spec) as refused:
            assert refused is not None
            return refused

    outcome = end("one", {"from": str(source), "to": str(tmp_path / "file" / "data")})
    assert outcome.exit_code == EXIT_USER_ERROR
    assert f"data.stage.to: {tmp_path}/file cannot be written" in str(outcome.reason)
    outcome = end("other", {"from": str(tmp_path / "none"), "to": str(tmp_path / "data")})
    assert outcome.exit_code == EXIT_USER_ERROR
    assert f"data.stage.from: there is no {tmp_path}/none on this machine" in str(outcome.reason)


def test_waiting_trials_can_pause_and_copy_once(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "scratch" / "data"
    (tmp_path / "farm").mkdir()
    farm = Farm(tmp_path / "farm", 300.0)
    farm.script = SERVED
    try:
        farm.join("one", "--slots", "2")
        with copying(to):
            experiment_id = farm.submit(
                searcher={**CONFIG["searcher"], "name": "random", "max_trials": 2},
                data={"stage": {"from": str(source), "to": str(to)}},
            )
            waits = "waits for data that another trial stages"

            def activities() -> list[str]:
                return [str(trial["activity"]) for trial in farm.client.trials(experiment_id)]

            until("both trials wait", activities, lambda shown: shown == [waits, waits])
            farm.client.post(f"/experiments/{experiment_id}/pause")
            until(
                "they leave", activities, lambda shown: shown == ["None", "None"],
                details=lambda: farm.log("one").read_text(),
            )  # fmt: skip
            assert all(trial["state"] == "PAUSED" for trial in farm.client.trials(experiment_id))
            farm.client.post(f"/experiments/{experiment_id}/activate")
            until("both trials wait", activities, lambda shown: shown == [waits, waits])
        until(
            "the experiment has ended",
            lambda: farm.client.experiment(experiment_id)["state"],
            lambda state: state == "COMPLETED",
            details=lambda: farm.log("one").read_text(),
        )
        page = farm.client.experiment_logs(experiment_id, limit=1000)
        texts = [line["text"] for line in page["logs"]]
        assert sum(f"is copied to {to}" in text for text in texts) == 1, texts
        assert sum("holds a copy of" in text for text in texts) == 1, texts
        values = [trial["best_validation"] for trial in farm.client.trials(experiment_id)]
        assert values == [0.25, 0.25]
        assert [trial["restarts"] for trial in farm.client.trials(experiment_id)] == [0, 0]
    finally:
        farm.close()
