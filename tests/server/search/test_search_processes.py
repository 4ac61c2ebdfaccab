"""Custom searcher classes run with their own token, with limits, and leave nothing behind."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.processes import LiveServer
from tests.waiting import until
from zerolab.client import archive
from zerolab.errors import ConfigError

pytestmark = pytest.mark.processes

CLASS = """
import json, os, pathlib, resource, time
from zerolab.client.http import Client
from zerolab.errors import ForbiddenError
from zerolab.searcher import Shutdown

class MySearch:
    def __init__(self, block, hyperparameters, seed):
        INIT

    def initial_operations(self):
        return [Shutdown()]

    def progress(self):
        return 1.0
"""
INSPECT = """
        found = {"environment": dict(os.environ), "forbidden": [], "options": block["options"],
                 "cores": len(os.sched_getaffinity(0)), "seed": seed,
                 "memory": resource.getrlimit(resource.RLIMIT_DATA)[1]}
        with Client() as client:
            for path in ("/experiments", "/experiments/1", "/experiments/2/searcher", "/info"):
                try:
                    client.get(path)
                except ForbiddenError:
                    found["forbidden"].append(path)
            client.searcher(1)
        pathlib.Path(block["options"]["found"]).write_text(json.dumps(found))
"""
WAIT = """
        pathlib.Path("begun").touch()
        while True:
            time.sleep(1)
"""


@contextmanager
def served(folder: Path, *options: str) -> Iterator[LiveServer]:
    server = LiveServer(folder / "server", *options)
    server.start()
    try:
        yield server
    finally:
        server.close()


def submit(server: LiveServer, folder: Path, init: str, **options: Any) -> int:
    model = folder / "model"
    model.mkdir()
    (model / "my_search.py").write_text(CLASS.replace("INIT", init.strip()))
    config = {
        "entrypoint": "true",
        "hyperparameters": {"x": 1},
        "searcher": {
            "name": "custom", "metric": "loss", "entrypoint": "my_search:MySearch",
            "options": options,
        },
        "reproducibility": {"experiment_seed": 5},
    }  # fmt: skip
    return int(server.client().create_experiment(config, archive.pack(model))["id"])


def ended(server: LiveServer, experiment_id: int) -> dict[str, Any]:
    client = server.client()
    return until(
        "the experiment has ended",
        lambda: client.experiment(experiment_id),
        lambda row: row["state"] in {"COMPLETED", "ERROR"},
        details=server.log.read_text,
    )


def test_searcher_process_has_no_server_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-server")
    with served(tmp_path, "--searcher-memory-megabytes", "1000") as server:
        file = tmp_path / "found.json"
        experiment = ended(server, submit(server, tmp_path, INSPECT, found=str(file)))
        assert experiment["state"] == "COMPLETED", experiment["error"]
        text = file.read_text()
        assert server.token not in text
        assert server.agent_token not in text
        assert "of-the-server" not in text
        variables = json.loads(text)
        assert variables["forbidden"] == [
            "/experiments", "/experiments/1", "/experiments/2/searcher", "/info",
        ]  # fmt: skip
        assert variables["options"] == {"found": str(file)}
        assert (variables["cores"], variables["seed"], variables["memory"]) == (1, 5, 1000 << 20)
        until("its directory is gone", lambda: not any((server.home / "searchers").iterdir()))


@pytest.mark.parametrize(
    ("init", "error"),
    [
        ("self.held = bytearray(2 << 30)", "its class failed: MemoryError"),
        ("while True: pass", "used more than 3 s of processor time"),
    ],
    ids=["memory", "cpu"],
)
def test_searcher_process_is_limited(tmp_path: Path, init: str, error: str) -> None:
    options = ("--searcher-memory-megabytes", "1000", "--searcher-cpu-seconds", "3")
    with served(tmp_path, *options) as server:
        experiment = ended(server, submit(server, tmp_path, init))
        assert experiment["state"] == "ERROR"
        assert error in experiment["error"]


def test_killed_server_leaves_no_searcher_directory(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        experiment_id = submit(server, tmp_path, WAIT)
        folder = server.home / "searchers"
        until("the searcher runs", lambda: any(folder.glob("*/model/begun")))
        (process,) = psutil.Process(server.pid).children()
        server.kill()
        process.wait(60)
        assert any(folder.iterdir())
    with served(tmp_path, "--no-custom-searchers") as server:
        experiment = ended(server, experiment_id)
        assert "--no-custom-searchers" in experiment["error"]
        assert not folder.exists()


def test_disabled_custom_searchers_are_rejected(tmp_path: Path) -> None:
    with served(tmp_path, "--no-custom-searchers") as server:
        with pytest.raises(ConfigError, match="this server was started with --no-custom-searchers"):
            submit(server, tmp_path, WAIT)
        assert server.client().experiments() == []
