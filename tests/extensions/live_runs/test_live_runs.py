"""Scripts that report to a server without being started by it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.client.http import Client

pytestmark = pytest.mark.processes

SCRIPT = """
import sys

import zerolab.core

server, kind = sys.argv[1:]
context = zerolab.core.init(
    server=server, name="mine", id=f"run-{kind}", labels=["x"], hparams={"lr": 0.1}
)
with context:
    for step in range(1, 4):
        context.train.report_training_metrics(step, {"loss": 1 / step})
    context.train.report_text("note", "hello", 3)
    print("a line of output")
    if kind == "fails":
        raise ValueError("bad value")
"""

WAITING = """
import logging
import sys
import time

import zerolab.core

logging.basicConfig()
with zerolab.core.init(server=sys.argv[1], id="run-waits", project="vision") as context:
    for step in range(1, 10_000):
        context.train.report_training_metrics(step, {"loss": 1 / step})
        if context.preempt.should_preempt():
            break
        time.sleep(0.1)
    else:
        sys.exit("not asked to stop")
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path_factory.mktemp("live") / "home")
    server.start()
    yield server
    server.close()


def run(directory: Path, live: LiveServer, server: str, kind: str) -> str:
    """Run the script; return its standard error."""
    (directory / "train.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "train.py", server, kind],
        cwd=directory, env=environment(live), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == (1 if kind == "fails" else 0), result.stderr
    assert result.stdout == "a line of output\n"
    return result.stderr


def environment(live: LiveServer) -> dict[str, str]:
    return {**os.environ, "ZEROLAB_TOKEN": live.token, "ZEROLAB_MASTER": live.url}


def experiment_of(client: Client, kind: str) -> Any:
    for experiment in client.experiments():
        config = client.get(f"/experiments/{experiment.id}/submitted")["config"]
        if config["data"] == {"external_run": f"run-{kind}"}:
            return client.experiment(experiment.id)
    raise AssertionError(f"no experiment of run-{kind}")


def check_results(client: Client, kind: str) -> None:
    """Check that everything that the script reported is there, once."""
    experiment = experiment_of(client, kind)
    assert (experiment["name"], experiment["labels"]) == ("mine", ["x"])
    (trial,) = client.trials(experiment.id)
    assert trial["hparams"] == {"lr": 0.1}
    path = f"/trials/{trial.id}/metrics"
    (curve,) = client.get(path, group="training", names="loss")["metrics"]
    assert curve["points"] == [[1, 1.0], [2, 0.5], [3, pytest.approx(1 / 3)]]
    (media,) = client.get(f"/trials/{trial.id}/media")["media"]
    assert b"".join(client.media_file(trial.id, media["digest"])) == b"hello"
    lines = [line["text"] for line in client.get(f"/trials/{trial.id}/logs")["logs"]]
    assert lines.count("a line of output") == 1
    if kind == "fails":
        assert experiment["state"] == "ERROR"
        assert trial["error"] == "ValueError: bad value"
    else:
        assert experiment["state"] == "COMPLETED"


@pytest.mark.parametrize("kind", ["works", "fails"])
def test_script_reports_live(tmp_path: Path, live: LiveServer, kind: str) -> None:
    errors = run(tmp_path, live, live.url, kind)
    assert f"zerolab: reported to {live.url}/#/experiments/" in errors
    check_results(live.client(), kind)


def test_canceled_script_is_asked_to_stop(tmp_path: Path, live: LiveServer) -> None:
    client = live.client()
    client.create_project("vision")
    (tmp_path / "wait.py").write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "wait.py", live.url],
        cwd=tmp_path, env=environment(live), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    experiment = until("it runs", lambda: experiment_of(client, "waits"), not_yet=AssertionError)
    assert experiment["project"] == "vision"
    client.post(f"/experiments/{experiment.id}/cancel")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert "the server asks this script to stop" in errors
    assert client.experiment(experiment.id).state == "CANCELED"


def test_offline_script_is_sent_once(tmp_path: Path, live: LiveServer) -> None:
    errors = run(tmp_path, live, "", "offline")
    assert "run `zerolab sync " in errors
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-m", "zerolab", "sync", "--json"],
            cwd=tmp_path, env=environment(live), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        (report,) = json.loads(result.stdout)
        assert report["state"] == "sent"
        assert report["experiment_id"] == experiment_of(live.client(), "offline").id
        check_results(live.client(), "offline")
        for marker in tmp_path.glob(".zerolab/live/*/delivered"):
            marker.unlink()  # the second time everything is sent again


def test_sync_of_canceled_experiment_sends_the_others(tmp_path: Path, live: LiveServer) -> None:
    run(tmp_path, live, "", "canceled")
    client = live.client()
    (first,) = (path.parent for path in tmp_path.glob(".zerolab/live/*/external.json"))
    session = json.loads((first / "external.json").read_text())["session"]
    body = {"id": "run-canceled", "session": session, "name": "mine"}
    opened = client.post("/external-runs", body)
    client.post(f"/experiments/{opened['experiment_id']}/cancel")
    client.post(f"/external-runs/{opened['run_id']}/end", {})
    run(tmp_path, live, "", "later")
    result = subprocess.run(
        [sys.executable, "-m", "zerolab", "sync"],
        cwd=tmp_path, env=environment(live), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert f"experiment {opened['experiment_id']} was canceled" in result.stderr
    assert result.stdout.split() == [str(experiment_of(client, "later").id)]
