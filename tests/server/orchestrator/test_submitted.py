"""What was submitted can be read again: the file, the model directory, the engine's values."""

import json
from typing import Any

import pytest

from tests.server.helpers import ENGINE, Server


def test_submitted_files_download_unchanged(server: Server) -> None:
    server.submit(name="mine", labels=["a"])
    config = server.get("/experiments/1/submitted")["config"]
    assert (config["name"], config["labels"]) == ("mine", ["a"])
    assert "scheduling_unit" not in config, "a default is in it"
    files = server.get("/experiments/1/files")["files"]
    assert [each["path"] for each in files] == ["ds_config.json", "model_def.py"]
    for each in files:
        answer = server.http.get("/api/v1/experiments/1/file", params={"name": each["path"]})
        assert answer.content == (server.directory / "model" / each["path"]).read_bytes()
        assert len(answer.content) == each["size_bytes"]
        assert answer.headers["content-type"] == "application/octet-stream"
    for name in ("model.py", "../token", "/etc/passwd", "."):
        answer = server.http.get("/api/v1/experiments/1/file", params={"name": name})
        assert answer.status_code == 404
        assert f"has no file {name!r}" in answer.json()["error"]["message"]


def test_engine_config_of_trial_applies_its_hparams(sqlite_server: Server) -> None:
    rates = {"type": "categorical", "vals": [0.25, 0.5]}
    own = {"optimizer": {"params": {"lr": rates}}}
    sqlite_server.submit(
        searcher={"name": "grid", "metric": "loss", "max_length": 20, "max_concurrent_trials": 2},
        hyperparameters={"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": own},
    )
    sqlite_server.add_agent(2)
    for trial in sqlite_server.trials():
        found = sqlite_server.get(f"/trials/{trial['id']}/engine")
        assert (found["file"], found["problems"]) == ("ds_config.json", [])
        values = {each["key"]: (each["value"], each["origin"]) for each in found["entries"]}
        rate = trial["hparams"]["overwrite_deepspeed_args"]["optimizer"]["params"]["lr"]
        assert values["optimizer.params.lr"] == (rate, "override")
        assert values["train_batch_size"] == (ENGINE["train_batch_size"], "file")
        assert values["gradient_accumulation_steps"][1] == "derived"


@pytest.mark.parametrize(
    ("hparams", "told"),
    [({}, "deepspeed_config: is not given"), ({"deepspeed_config": {"train_batch_size": 4}}, None)],
)
def test_engine_config_without_file_is_shown(
    sqlite_server: Server, hparams: dict[str, Any], told: str | None
) -> None:
    sqlite_server.submit(hyperparameters=hparams)
    sqlite_server.add_agent()
    found = sqlite_server.get("/trials/1/engine")
    assert found["file"] is None
    if told is None:
        assert found["problems"] == []
        assert {"key": "train_batch_size", "value": 4, "origin": "file"} in found["entries"]
    else:
        assert told in found["problems"][0]
        assert found["entries"] == []


def test_stored_backend_of_older_version_is_readable(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    config = json.loads(server.sql("SELECT config FROM experiments")[0][0])
    server.execute(
        "UPDATE experiments SET config = :config",
        config=json.dumps(config | {"backend": "deepspeed"}),
    )
    server.services.orchestrator.configs.clear()
    server.add_agent()
    assert server.get("/trials/1/engine")["problems"] == []
    assert server.begin().config["backend"] == "deepspeed"  # the trial refuses it when it starts


def test_fork_replaces_config_file(sqlite_server: Server) -> None:
    sqlite_server.submit(name="first", labels=["a"])
    text = """
name: second  # a comment
entrypoint: model_def:Trial
hyperparameters: {deepspeed_config: ds_config.json}
searcher: {name: single, metric: loss, max_length: 7}
"""
    made = sqlite_server.post("/experiments/1/fork", {"yaml": text, "activate": False})
    found = made["experiment"]
    assert (found["name"], found["labels"], found["state"]) == ("second", [], "PAUSED")
    assert found["forked_from"] == 1
    for mistaken, told in (
        ("name: [", "line"),
        ("name: second\nname: third\n", "name"),
        (text.replace("max_length", "max_lenght"), "did you mean 'max_length'"),
        ("- a list", "mapping"),
    ):
        answer = sqlite_server.http.post("/api/v1/experiments/1/fork", json={"yaml": mistaken})
        assert answer.status_code == 422
        assert told in answer.json()["error"]["message"]
    assert len(sqlite_server.get("/experiments")["experiments"]) == 2
