import io
import math
import tarfile
import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.helpers import closed_port
from tests.faults.helpers import KillableServer, make_runs
from tests.waiting import until
from zerolab.client import Client, archive
from zerolab.contract.messages import LogEntry, RunExit
from zerolab.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    UnreachableError,
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = tmp_path_factory.mktemp("model")
    (model / "model_def.py").write_text("x = 1\n")
    return archive.pack(model)


def config(**changes: Any) -> dict[str, Any]:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 10}}
    fields = {"name": "http", "entrypoint": "python model_def.py", "searcher": searcher}
    return fields | changes


def test_experiment_life_cycle(client: Client, packed: bytes) -> None:
    created = client.create_experiment(config(labels=["a"]), packed, activate=False)
    number = created["id"]
    assert (created["name"], created["state"]) == ("http", "PAUSED")
    assert client.experiment(number)["labels"] == ["a"]
    assert number in [entry["id"] for entry in client.experiments()]
    assert client.experiments(name="http", state="COMPLETED") == []
    assert client.patch_experiment(number, notes="n", name="new")["name"] == "new"
    assert client.experiment_action(number, "activate")["state"] == "ACTIVE"
    fork = client.experiment_action(number, "fork")
    assert fork["id"] != number
    (trial,) = client.trials(number)
    assert client.trial(trial["id"])["experiment_id"] == number
    assert client.metrics(trial["id"]) == []
    assert client.metric_names(trial["id"]) == []
    assert client.trial_checkpoints(trial["id"]) == []
    assert client.experiment_checkpoints(number) == []
    assert client.trial_logs(trial["id"])["logs"] == []
    assert client.experiment_logs(number)["logs"] == []
    unpacked = client.download_archive(f"/api/v1/experiments/{number}/archive")
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as resource:
        assert resource.getnames() == ["model_def.py"]
    assert number in [job["experiment_id"] for job in client.jobs()]
    with pytest.raises(ConflictError):
        client.delete_experiment(number)
    client.kill_trial(trial["id"])
    client.experiment_action(fork["id"], "kill")
    until(
        "it has ended",
        lambda: client.experiment(number),
        lambda experiment: experiment["state"] == "CANCELED",
    )
    client.delete_experiment(number)
    with pytest.raises(NotFoundError):
        client.experiment(number)


def test_lists_have_all_pages(client: Client, packed: bytes) -> None:
    created = {
        client.create_experiment(config(name="many"), packed, activate=False)["id"]
        for _ in range(7)
    }
    assert {experiment["id"] for experiment in client.experiments(name="many")} == created
    pages = client._list("/experiments", "experiments", {"name": "many", "limit": 3})
    assert len(pages) == 3


def test_run_reports_logs_and_exit(client: Client, server: KillableServer, tmp_path: Path) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    run_client = Client(server.url, spec.token)
    assert client.ship_logs(spec.run_id, 0, [LogEntry("a", 1.0), LogEntry("b", 2.0)]) == 2
    assert client.ship_logs(spec.run_id, 0, [LogEntry("a", 1.0), LogEntry("b", 2.0)]) == 2
    logs = [line["text"] for line in client.trial_logs(spec.trial_id)["logs"]]
    assert [text for text in logs if text in {"a", "b"}] == ["a", "b"]
    directive = run_client.directive(spec.run_id, wait_s=0)
    assert directive.action == "train"
    assert run_client.directive(spec.run_id, directive.version, wait_s=0) == directive
    assert spec.run_id in [slot["run_id"] for agent in client.agents() for slot in agent["slots"]]
    client.run_exited(spec.run_id, RunExit(0))
    client.run_exited(spec.run_id, RunExit(0))
    with pytest.raises(StaleRunError, match=f"run {spec.run_id}"):
        run_client.directive(spec.run_id, wait_s=0)
    with pytest.raises(ForbiddenError):
        run_client.experiments()
    run_client.close()


def test_events_from_cursor(server: KillableServer, client: Client, packed: bytes) -> None:
    number = client.create_experiment(config(), packed, activate=False)["id"]
    with server.client as other:
        events = other.events(number)
        first = next(events)
        assert first.name == "experiment"
        assert first.data["id"] == number
        change = threading.Thread(target=client.patch_experiment, args=(number,),
                                  kwargs={"notes": "seen"})  # fmt: skip
        change.start()
        while first.data.get("notes") != "seen":
            first = next(events)
        change.join()
        events.close()


def test_server_info_and_login_link(client: Client) -> None:
    assert client.info()["version"]
    assert client.login_link().startswith(f"{client.url}/login?code=")


def test_all_config_problems_are_reported(client: Client, packed: bytes) -> None:
    wrong = config(max_restarts="many", sercher={}, resources={"slots_per_trial": -1})
    with pytest.raises(ConfigError) as caught:
        client.create_experiment(wrong, packed)
    assert len(caught.value.problems) == 3
    text = str(caught.value)
    assert "max_restarts" in text
    assert "slots_per_trial" in text
    assert "did you mean 'searcher'" in text


def test_misspelt_filter_is_rejected(client: Client) -> None:
    with pytest.raises(ConfigError) as caught:
        client.experiments(stat="ERROR")
    message = "request: 1 problem(s)\n  stat: unknown parameter; did you mean 'state'?"
    assert str(caught.value) == message


def test_damaged_archive_is_rejected(client: Client) -> None:
    with pytest.raises(ConfigError, match="archive"):
        client.create_experiment(config(), b"nothing of the kind")


def test_missing_resource_is_not_found(client: Client) -> None:
    for call in (client.experiment, client.trial):
        with pytest.raises(NotFoundError):
            call(10**6)
    with pytest.raises(NotFoundError):
        client.checkpoint("00000000-0000-0000-0000-000000000000")
    with pytest.raises(NotFoundError):
        client.directive(10**6, wait_s=0)


@pytest.mark.parametrize("token", ["", "wrong"])
def test_wrong_token_has_remedy(token: str, client: Client) -> None:
    with Client(client.url, token) as stranger, pytest.raises(ForbiddenError) as caught:
        stranger.experiments()
    assert "ZEROLAB_TOKEN" in str(caught.value)


def test_unreachable_server_has_remedy() -> None:
    with Client(closed_port()) as client, pytest.raises(UnreachableError) as caught:
        client.info()
    assert "zerolab up" in str(caught.value)
    assert closed_port() in str(caught.value)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://x", "http://"])
def test_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like http://"):
        Client(url)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../.."])
def test_path_as_name_is_rejected(client: Client, name: str) -> None:
    for ask in (client.model, client.checkpoint, lambda pool: client.put_pool(pool, "fifo")):
        with pytest.raises(ConfigError, match="must be neither empty nor a path, got") as caught:
            ask(name)
        assert repr(name) in str(caught.value)


def test_non_json_values_are_reported_with_paths(client: Client) -> None:
    with pytest.raises(ConfigError) as caught:
        client.post("/jobs/1/move", {"a": [1, math.nan], "b": {"c": -math.inf}, "d": "x\udcff"})
    assert caught.value.problems == [
        "a[1]: must be a finite number, got nan",
        "b.c: must be a finite number, got -inf",
        "d: must be text of whole characters (UTF-8), got 'x\\udcff'",
    ]


def test_config_converts_python_values(client: Client, packed: bytes) -> None:
    values = {"lr": np.float32(0.5), "sizes": np.array([1, 2]), "data": Path("/data"), "n": (3,)}
    submitted = UserDict(config(labels=("a",), hyperparameters=values))
    client.preview(submitted)
    number = client.create_experiment(submitted, packed, activate=False)["id"]
    resource = client.experiment(number)
    assert resource["labels"] == ["a"]
    expected = {"lr": 0.5, "sizes": [1, 2], "data": "/data", "n": [3]}
    assert resource["config"]["hyperparameters"] == expected
    with pytest.raises(ConfigError, match=r"config: must hold text, numbers, .* got object"):
        client.create_experiment(config(hyperparameters={"x": object()}), packed)
