"""Reading the submitted configuration, model directory and engine configuration."""

import json
from typing import Any

import pytest

from tests.server.helpers import ENGINE, Server


@pytest.mark.needs_extension("submitted_files")
def test_submitted_files_download_unchanged(server: Server) -> None:
    server.submit(name="mine", labels=["a"])
    config = server.get("/experiments/1/submitted")["config"]
    assert (config["name"], config["labels"]) == ("mine", ["a"])
    assert "scheduling_unit" not in config, "a default is in it"
    files = server.get("/experiments/1/files")["files"]
    assert [row["path"] for row in files] == ["ds_config.json", "model_def.py"]
    for row in files:
        response = server.http.get("/api/v1/experiments/1/file", params={"name": row["path"]})
        assert response.content == (server.directory / "model" / row["path"]).read_bytes()
        assert len(response.content) == row["size_bytes"]
        assert response.headers["content-type"] == "application/octet-stream"
    for name in ("model.py", "../token", "/etc/passwd", "."):
        response = server.http.get("/api/v1/experiments/1/file", params={"name": name})
        assert response.status_code == 404
        assert f"has no file {name!r}" in response.json()["error"]["message"]


@pytest.mark.needs_extension("submitted_files")
def test_engine_config_of_trial_applies_its_hparams(sqlite_server: Server) -> None:
    rates = {"type": "categorical", "vals": [0.25, 0.5]}
    overrides = {"optimizer": {"params": {"lr": rates}}}
    sqlite_server.submit(
        searcher={"name": "grid", "metric": "loss", "max_length": 20, "max_concurrent_trials": 2},
        hyperparameters={
            "deepspeed_config": "ds_config.json",
            "overwrite_deepspeed_args": overrides,
        },
    )
    sqlite_server.add_agent(2)
    for trial in sqlite_server.trials():
        engine = sqlite_server.get(f"/trials/{trial['id']}/engine")
        assert (engine["file"], engine["problems"]) == ("ds_config.json", [])
        values = {entry["key"]: (entry["value"], entry["origin"]) for entry in engine["entries"]}
        rate = trial["hparams"]["overwrite_deepspeed_args"]["optimizer"]["params"]["lr"]
        assert values["optimizer.params.lr"] == (rate, "override")
        assert values["train_batch_size"] == (ENGINE["train_batch_size"], "file")
        assert values["gradient_accumulation_steps"][1] == "derived"


@pytest.mark.needs_extension("submitted_files")
@pytest.mark.parametrize(
    ("hparams", "problem"),
    [({}, "deepspeed_config: is not given"), ({"deepspeed_config": {"train_batch_size": 4}}, None)],
)
def test_engine_config_without_file_is_shown(
    sqlite_server: Server, hparams: dict[str, Any], problem: str | None
) -> None:
    sqlite_server.submit(hyperparameters=hparams)
    sqlite_server.add_agent()
    engine = sqlite_server.get("/trials/1/engine")
    assert engine["file"] is None
    if problem is None:
        assert engine["problems"] == []
        assert {"key": "train_batch_size", "value": 4, "origin": "file"} in engine["entries"]
    else:
        assert problem in engine["problems"][0]
        assert engine["entries"] == []


@pytest.mark.needs_extension("submitted_files")
def test_stored_backend_of_older_version_is_readable(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    config = json.loads(server.sql("SELECT config FROM experiments")[0][0])
    server.execute(
        "UPDATE experiments SET config = :config",
        config=json.dumps(config | {"backend": "deepspeed"}),
    )
    server.services.orchestrator.configs.configs.clear()
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
    response = sqlite_server.post("/experiments/1/fork", {"yaml": text, "activate": False})
    fork = response["experiment"]
    assert (fork["name"], fork["labels"], fork["state"]) == ("second", [], "PAUSED")
    assert fork["forked_from"] == 1
    for mistaken, message in (
        ("name: [", "line"),
        ("name: second\nname: third\n", "name"),
        (text.replace("max_length", "max_lenght"), "did you mean 'max_length'"),
        ("- a list", "mapping"),
    ):
        answer = sqlite_server.http.post("/api/v1/experiments/1/fork", json={"yaml": mistaken})
        assert answer.status_code == 422
        assert message in answer.json()["error"]["message"]
    assert len(sqlite_server.get("/experiments")["experiments"]) == 2
