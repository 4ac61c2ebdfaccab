"""Import of runs that the real libraries have written; they are not dependencies of the tests."""

import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.installation import in_process
from tests.faults.helpers import KillableServer
from zerolab.client import Client
from zerolab.client.imports import SOURCES, ImportedRun
from zerolab.contract.spec import ENV_HOME, ENV_MASTER, ENV_TOKEN
from zerolab.errors import ConfigError

Points = dict[tuple[str, str], list[tuple[int, float]]]


def only(source: str, path: Path) -> ImportedRun:
    (location,) = SOURCES[source].locate(path)
    run: ImportedRun = SOURCES[source].read(location, path)
    return run


def stored_points(client: Client, experiment_id: int) -> Points:
    return {
        (str(part.group), str(part.name)): list(
            zip(part.steps, map(float, part.values), strict=True)
        )
        for part in client.metric_series(experiment_id)
    }


def times(client: Client, experiment_id: int) -> list[float]:
    return [float(time) for part in client.metric_series(experiment_id) for time in part.times]


def write_tensorboard(folder: Path) -> None:
    """Write two runs: scalars with NaN, hyperparameters, an image and a text."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "first")) as writer:
        for step in range(1, 4):
            writer.add_scalar("train/loss", 1 / step, step, walltime=1_700_000_000 + step)
        writer.add_scalar("val/accuracy", 0.5, 3, walltime=1_700_000_003.5)
        writer.add_scalar("train/loss", math.nan, 4, walltime=1_700_000_004)
        writer.add_text("note", "text")
    with SummaryWriter(str(folder / "second")) as writer:
        writer.add_scalar("loss", 0.25, 0, new_style=True, walltime=1_700_000_005)
        writer.add_hparams({"lr": 0.1, "name": "a"}, {"hparam/loss": 0.25}, run_name=".")


@pytest.mark.processes
def test_tensorboard(client: Client, server: KillableServer, tmp_path: Path) -> None:
    """The command imports each run once, and reports what it leaves out."""
    folder = tmp_path / "logs"
    write_tensorboard(folder)
    environment = {ENV_MASTER: server.url, ENV_TOKEN: server.home.ensure_token(), ENV_HOME: "home"}

    def run(*arguments: str | Path) -> Any:
        return in_process(environment, "import", folder, *arguments)

    dry = run("--dry-run")
    assert "first: 5 points, 0 hyperparameters, would be imported" in dry.stderr
    assert "left out: 1 text" in dry.stderr
    assert (dry.stdout, client.experiments()) == ("", [])

    assert run().stdout.split() == ["1", "2"]
    assert stored_points(client, 1) == {
        ("training", "train/loss"): [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, ANY_NAN)],
        ("validation", "val/accuracy"): [(3, 0.5)],
    }
    assert sorted(times(client, 1))[-1] == 1_700_000_004
    second = client.experiment(2)
    assert second.name == "second"
    assert second.trials()[0].hparams == {"lr": 0.1, "name": "a"}
    assert stored_points(client, 2)["training", "loss"] == [(0, 0.25)]

    again = run()
    assert again.stdout.split() == ["1", "2"]
    assert "first: 5 points, 0 hyperparameters, already imported as experiment 1" in again.stderr
    assert len(client.experiments()) == 2


class _AnyNan:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isnan(other)

    def __hash__(self) -> int:
        return 0


ANY_NAN: Any = _AnyNan()


def test_truncated_tensorboard_file(tmp_path: Path) -> None:
    write_tensorboard(tmp_path)
    (file,) = (tmp_path / "first").iterdir()
    file.write_bytes(file.read_bytes()[:-200])
    run = only("tensorboard", tmp_path / "first")
    assert 0 < run.points < 5
    assert run.omitted["incomplete records at the end of a file"] == 1


@pytest.mark.parametrize("store", ["files", "sqlite"])
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    path = tmp_path / ("mlruns" if store == "files" else "mlflow.db")
    client = MlflowClient(f"file://{path}" if store == "files" else f"sqlite:///{path}")
    experiment = client.create_experiment("digits", artifact_location=str(tmp_path / "artifacts"))
    run_id = client.create_run(
        experiment, run_name="first", start_time=1_700_000_000_500
    ).info.run_id
    values = [(1, 0.5), (2, math.nan), (3, math.inf)]
    metrics = [Metric("val/loss", value, 1_700_000_001_000 + s, s) for s, value in values]
    params = [Param("lr", "0.1"), Param("name", "net"), Param("amp", "True"), Param("l", "[1]")]
    client.log_batch(run_id, metrics, params, [RunTag("team", "vision")])
    client.set_terminated(run_id)
    deleted = client.create_run(experiment).info.run_id
    client.delete_run(deleted)

    run = only("mlflow", path)
    assert (run.name, run.created_at) == ("first", 1_700_000_000.5)
    assert run.hparams == {"lr": 0.1, "name": "net", "amp": True, "l": "[1]"}
    assert run.labels == ["digits", "team=vision"]
    assert run.description == f"MLflow run {run_id}, FINISHED"
    content = run.content()
    assert b'"group":"validation","name":"val/loss","steps":[1,2,3]' in content
    assert b'"values":[0.5,"NaN","Infinity"]' in content
    assert b'"times":[1700000001.001,1700000001.002,1700000001.003]' in content


def test_other_sqlite_files_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (id)")
    connection.close()
    assert SOURCES["mlflow"].locate(path) == []


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    import subprocess

    script = """
import wandb
config = {"lr": 0.1, "model": {"width": 8}, "text": "0.5"}
options = {"project": "digits", "name": "first", "tags": ["a"], "notes": "n"}
run = wandb.init(mode="offline", config=config, **options)
for step in range(3):
    run.log({"loss": 1 / (step + 1), "eval": {"accuracy": 0.5}, "word": "x"})
run.log({"loss": float("nan")})
run.log({"table": wandb.Table(columns=["a"], data=[[1]]), "long": "y" * 100_000})
run.finish()
"""
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    run = only("wandb", tmp_path)
    assert (run.name, run.labels, run.description) == ("first", ["digits", "a"], "n")
    assert run.hparams == {"lr": 0.1, "model": {"width": 8}, "text": "0.5"}
    assert run.created_at is not None
    assert run.names == ["training/loss", "validation/eval.accuracy"]
    content = run.content()
    assert b'"name":"loss","steps":[0,1,2,3],"values":[1.0,0.5,0.3333333333333333,"NaN"]' in content
    assert b'"name":"eval.accuracy","steps":[0,1,2],"values":[0.5,0.5,0.5]' in content
    assert run.omitted["values of type str"] == 4
    assert run.omitted["values of type table-file"] == 1


def test_invalid_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match="line 1: must be the header of a metrics file"):
        only("metrics", tmp_path)
    (tmp_path / "run-1.wandb").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"run-1\.wandb: must be a file of wandb"):
        only("wandb", tmp_path)


def test_negative_steps_are_left_out() -> None:
    run = ImportedRun("test", "1", "run")
    run.add("loss", -1, 0.5, 1.0)
    run.add("system/cpu", 2, 0.5, 1e18)
    assert run.omitted == {"points with a negative step": 1}
    assert b'{"kind":"series","group":"system","name":"cpu","steps":[2]' in run.content()
