import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

import zerolab.core
from tests.client.helpers import make_spec
from zerolab.contract.spec import (
    ENV_RUN_SPEC,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_STALE,
    FitSpec,
    LengthSpec,
    write_run_spec,
)
from zerolab.errors import ConfigError, NotFoundError
from zerolab.storage.store import CheckpointStore


@pytest.fixture(autouse=True)
def _no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_RUN_SPEC, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_standalone_run_reports_saves_and_resumes(tmp_path: Path) -> None:
    with zerolab.core.init(directory=tmp_path, hparams={"lr": 0.1}) as context:
        assert context.train.get_hparams() == {"lr": 0.1}
        assert context.train.latest_checkpoint is None
        context.train.report_training_metrics(5, {"loss": 0.5})
        context.train.report_validation_metrics(5, {"accuracy": 0.9})
        context.train.report_progress(0.5)
        with context.checkpoint.store_path({"steps_completed": 5, "note": "x"}) as (path, uuid):
            (path / "weights").write_text("w")
        assert not context.preempt.should_preempt()
    header, training, validation, progress, checkpoint = lines(tmp_path)
    assert header["hparams"] == {"lr": 0.1}
    assert (training["group"], training["values"]) == ("training", {"loss": 0.5})
    assert (validation["group"], validation["values"]) == ("validation", {"accuracy": 0.9})
    assert progress["value"] == 0.5
    assert (checkpoint["uuid"], checkpoint["resources"]) == (uuid, {"weights": 1})

    with zerolab.core.init(directory=tmp_path) as again:
        latest = again.train.latest_checkpoint
        assert latest is not None
        assert (latest.uuid, latest.steps_completed) == (uuid, 5)
        with again.checkpoint.restore_path(latest.uuid) as path:
            assert (path / "weights").read_text() == "w"
        with pytest.raises(NotFoundError), again.checkpoint.restore_path(uuid[:-4] + "0000"):
            pass


def test_alert_of_any_values_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ValueError("no text")

    zerolab.core.alert("no channel")
    assert "no channel" in caplog.text
    with zerolab.core.init(directory=tmp_path) as context:
        context.alert("Loss\nspike", "8.1\x1b[0m\nat step 3")
        zerolab.core.alert("t" * 300, Unprintable())  # type: ignore[arg-type]
    first, second = lines(tmp_path)[1:]
    assert (first["kind"], first["title"]) == ("alert", "Loss spike")
    assert first["text"] == "8.1[0m\nat step 3"
    assert (len(second["title"]), second["text"]) == (
        200, "Unprintable whose str() raises ValueError: no text",
    )  # fmt: skip


def test_standalone_run_creates_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with zerolab.core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        assert context.train.latest_checkpoint is None
    (run,) = (tmp_path / ".zerolab" / "runs").iterdir()
    assert len(lines(run)) == 2


@pytest.mark.parametrize("metadata", [{}, {"steps_completed": -1}, {"steps_completed": "5"}])
def test_checkpoint_requires_steps_completed(metadata: dict[str, Any], tmp_path: Path) -> None:
    with (
        zerolab.core.init(directory=tmp_path) as context,
        pytest.raises(ConfigError, match="steps_completed: must hold the batches"),
        context.checkpoint.store_path(metadata),
    ):
        pass
    assert CheckpointStore(tmp_path / "checkpoints").list() == []


def test_sigterm_handler_is_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with zerolab.core.init(directory=tmp_path):
        pass
    assert signal.getsignal(signal.SIGTERM) == before


SCRIPT = """
import os, signal, sys
import zerolab.core
from zerolab.errors import InvalidHyperparametersError
with zerolab.core.init() as context:
    ending = sys.argv[1]
    if ending == "preempted":
        os.kill(os.getpid(), signal.SIGTERM)
        assert context.preempt.should_preempt()
    elif ending == "invalid":
        raise InvalidHyperparametersError("too wide")
    elif ending == "stale":
        context.checkpoint._reporter.stale.set()
        with context.checkpoint.store_path({"steps_completed": 1}):
            pass
    elif ending == "crash":
        raise RuntimeError("boom")
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("preempted", EXIT_PREEMPTED),
        ("invalid", EXIT_INVALID_HP),
        ("stale", EXIT_STALE),
        ("crash", 1),
        ("done", 0),
    ],
)
def test_exit_code_shows_how_run_ended(ending: str, code: int, tmp_path: Path) -> None:
    spec = tmp_path / "run.json"
    write_run_spec(make_spec(tmp_path), spec)
    environment = os.environ | {ENV_RUN_SPEC: str(spec)}
    command = [sys.executable, "-c", SCRIPT, ending]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    reason = tmp_path / "reason.json"
    assert reason.exists() == (code not in {0, 1})
    if reason.exists():
        assert json.loads(reason.read_text())["exit_code"] == code
    assert not list((tmp_path / "checkpoints").glob("*-*")) or ending != "stale"


OVERRUNNING_SCRIPT = """
import sys, zerolab.core
with zerolab.core.init() as context:
    for step in range(1, 11):
        if "loss" in sys.argv:
            context.train.report_training_metrics(step, {"loss": 1.0})
        context.train.report_validation_metrics(step, {"loss": 1.0, "epochs": step / 2})
        if "asks" in sys.argv:
            context.preempt.should_preempt()
        if "obeys" in sys.argv and step == context.train.until:
            break
"""


@pytest.mark.parametrize(
    ("arguments", "unit", "searcher", "bound"),
    [
        (["loss"], "batches", "async_halving", "5 batches"),
        ([], "epochs", "tpe_asha", "4 epochs"),
        (["asks"], "batches", "async_halving", ""),
        (["obeys"], "batches", "async_halving", ""),
        ([], "batches", "single", ""),
    ],
)
def test_script_that_trains_beyond_until_is_warned(
    arguments: list[str],
    unit: Literal["batches", "epochs"],
    searcher: str,
    bound: str,
    tmp_path: Path,
) -> None:
    until = 4 if unit == "epochs" else 5
    fit = FitSpec(max_length=LengthSpec(unit, 20), until=until, metric="loss")
    spec = make_spec(tmp_path, config={"searcher": {"name": searcher}}, fit=fit)
    write_run_spec(spec, tmp_path / "run.json")
    environment = os.environ | {ENV_RUN_SPEC: str(tmp_path / "run.json")}
    command = [sys.executable, "-c", OVERRUNNING_SCRIPT, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    text = f"the script trains beyond {bound}"
    assert done.stderr.count(text) == (1 if bound else 0)
    if bound or "obeys" in arguments:
        reason = json.loads((tmp_path / "reason.json").read_text())["reason"]
        assert (text if bound else "trained up to its rung") in reason


def test_standalone_run_prints_where_its_results_are(tmp_path: Path) -> None:
    script = """
import zerolab.core
with zerolab.core.init() as context:
    context.train.report_training_metrics(1, {"loss": 1.0})
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
        (path / "weights").write_text("w")
print("output of the script")
"""
    environment = {key: value for key, value in os.environ.items() if key != ENV_RUN_SPEC}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (run,) = (tmp_path / ".zerolab" / "runs").iterdir()
    (checkpoint,) = (run / "checkpoints").glob("*-*")
    assert done.stdout == "output of the script\n"
    assert f"metrics and checkpoints go to {run}" in done.stderr
    assert f"metrics     {run}/metrics.jsonl" in done.stderr
    assert f"checkpoint  {checkpoint}" in done.stderr
    assert f"zerolab up && zerolab import {run}/metrics.jsonl" in done.stderr


def test_unreadable_run_spec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_RUN_SPEC, str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"ZEROLAB_RUN_SPEC.*none\.json"):
        zerolab.core.init()


def torchrun(tmp_path: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("ranks_script.py")
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.processes
def test_torchrun_ranks_share_checkpoints_and_preemption(tmp_path: Path) -> None:
    first = torchrun(tmp_path)
    assert [rank_result["start"] for rank_result in first] == [0, 0]
    assert first[0]["uuid"] == first[1]["uuid"]
    assert first[0]["failed"] == (
        "PeerFailedError: checkpoint: not stored, because of rank 1: RuntimeError: no memory"
    )
    assert first[1]["failed"] == "RuntimeError: no memory"
    assert "only the chief stores one without shard=True, this is rank 1" in first[1]["refused"]
    assert [rank_result["before"] for rank_result in first] == [False, False]
    assert [rank_result["torch"] for rank_result in first] == [False, False]
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    (stored,) = store.list()
    assert stored.resources == {"rank_0": 11, "rank_1": 11}
    assert stored.metadata == {"steps_completed": 3, "lr": 0.5}

    second = torchrun(tmp_path)
    assert [rank_result["start"] for rank_result in second] == [3, 3]
    assert [rank_result["restored"] for rank_result in second] == ["3 of rank 0", "3 of rank 1"]
    records = [line for line in lines(tmp_path / "run") if line.get("group") == "training"]
    assert [line["steps"] for line in records] == [1, 2, 3, 4, 5, 6]
    assert {line["values"]["rank"] for line in records} == {0}
    assert [rank_result.steps_completed for rank_result in store.list()] == [3, 6]
