"""Import of runs that the real libraries have written; they are not dependencies of the tests."""

import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerolab
from tests.end_to_end.installation import in_process
from tests.faults.helpers import KillableServer
from zerolab.client import Client
from zerolab.client.imports import SOURCES, ImportedRun
from zerolab.contract.spec import ENV_HOME, ENV_MASTER, ENV_TOKEN
from zerolab.errors import ConfigError, NotFoundError
from zerolab.reports.media_files import MediaItem

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
        writer.add_image("picture", np.full((3, 4, 5), 0.5), 2)
        writer.add_histogram("weights", np.arange(100.0), 3, bins=10)
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
    assert "first: 5 points, 3 media, 0 hyperparameters, would be imported" in dry.stderr
    assert "left out" not in dry.stderr
    assert (dry.stdout, client.experiments()) == ("", [])

    assert run().stdout.split() == ["1", "2"]
    assert stored_points(client, 1) == {
        ("training", "train/loss"): [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, ANY_NAN)],
        ("validation", "val/accuracy"): [(3, 0.5)],
    }
    assert sorted(times(client, 1))[-1] == 1_700_000_004
    (note,), (picture,), (weights,) = (
        client.media(1, name=name) for name in ("note", "picture", "weights")
    )
    assert b"".join(client.media_file(1, note["digest"])) == b"text"
    assert (picture["step"], picture["type"], picture["file_name"]) == (2, "image", "picture-2.png")
    assert b"".join(client.media_file(1, picture["digest"])).startswith(b"\x89PNG")
    assert sum(weights["metadata"]["counts"]) == 100
    assert weights["metadata"]["edges"][0] == 0.0
    assert weights["metadata"]["edges"][-1] == 99.0
    second = client.experiment(2)
    assert second.name == "second"
    assert second.trials()[0].hparams == {"lr": 0.1, "name": "a"}
    assert stored_points(client, 2)["training", "loss"] == [(0, 0.25)]

    again = run()
    assert again.stdout.split() == ["1", "2"]
    assert (
        "first: 5 points, 3 media, 0 hyperparameters, already imported as experiment 1"
        in again.stderr
    )
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
    file.write_bytes(file.read_bytes()[:-500])
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
    artifacts = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    artifacts.mkdir(parents=True)
    (artifacts / "notes.txt").write_text("hello")
    client.set_terminated(run_id)
    deleted = client.create_run(experiment).info.run_id
    client.delete_run(deleted)

    run = only("mlflow", path)
    assert (run.name, run.created_at) == ("first", 1_700_000_000.5)
    assert run.hparams == {"lr": 0.1, "name": "net", "amp": True, "l": "[1]"}
    assert run.labels == ["digits", "team=vision"]
    assert run.description == f"MLflow run {run_id}, FINISHED"
    assert [(medium.name, medium.type, medium.size) for medium in run.media] == [
        ("notes.txt", "file", 5)
    ]
    (artifacts / "link.txt").symlink_to("/etc/hostname")
    assert len(only("mlflow", path).media) == 1
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
import numpy as np
import wandb
config = {"lr": 0.1, "model": {"width": 8}, "text": "0.5"}
options = {"project": "digits", "name": "first", "tags": ["a"], "notes": "n"}
run = wandb.init(mode="offline", config=config, **options)
for step in range(3):
    run.log({"loss": 1 / (step + 1), "eval": {"accuracy": 0.5}, "word": "x"})
run.log({"loss": float("nan")})
run.log({"table": wandb.Table(columns=["a"], data=[[1]]), "long": "y" * 100_000})
run.log({"picture": wandb.Image(np.zeros((4, 5, 3), np.uint8), caption="black")})
run.log({"weights": wandb.Histogram([1, 2, 3], num_bins=3), "page": wandb.Html("<p>x")})
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
    assert {(medium.name, medium.type, medium.steps) for medium in run.media} == {
        ("table", "table", 4),
        ("picture", "image", 5),
        ("weights", "histogram", 6),
        ("page", "file", 6),
    }
    table = next(medium for medium in run.media if medium.name == "table")
    assert run.contents[table.digest] == b'{"columns":["a"],"rows":[[1]]}'


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


def test_media_of_run_without_server(
    client: Client, server: KillableServer, tmp_path: Path
) -> None:
    with zerolab.core.init(directory=tmp_path / "run") as context:
        context.train.report_text("note", "hello")
        context.train.report_validation_metrics(1, {"loss": 0.5})
    environment = {ENV_MASTER: server.url, ENV_TOKEN: server.home.ensure_token(), ENV_HOME: "home"}
    imported = in_process(environment, "import", tmp_path / "run" / "metrics.jsonl")
    assert "1 points, 1 media" in imported.stderr
    trial_id = client.trials(int(imported.stdout))[0].id
    (note,) = client.media(trial_id)
    assert b"".join(client.media_file(trial_id, note["digest"])) == b"hello"
    (stored,) = server.home.path.glob(f"checkpoints/media/*/{note['digest']}")
    stored.unlink()  # as if the first import had been interrupted
    again = in_process(environment, "import", tmp_path / "run" / "metrics.jsonl")
    assert "already imported" in again.stderr
    assert b"".join(client.media_file(trial_id, note["digest"])) == b"hello"


def test_content_of_imported_medium_is_checked(client: Client) -> None:
    run = ImportedRun("test", "1", "run")
    run.add("loss", 1, 0.5, 1.0)
    run.add_medium("note", 1, [MediaItem("text", b"hello", ".txt")], 1.0)
    experiment = client.import_metrics(run.content())
    (digest,) = run.contents
    with pytest.raises(ConfigError, match="digest: must be the SHA-256 of the content"):
        client.import_medium(experiment.id, digest, b"other")
    with pytest.raises(NotFoundError, match="has no imported medium"):
        client.import_medium(experiment.id, "0" * 64, b"other")
    client.import_medium(experiment.id, digest, b"hello")
    client.import_medium(experiment.id, digest, b"hello")
