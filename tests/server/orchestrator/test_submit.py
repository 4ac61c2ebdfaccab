"""Submission of experiments with all errors at once, and lists of experiments and trials."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, experiment_config, model_archive
from zerolab.config import check_experiment
from zerolab.errors import ConfigError
from zeroserver.store.archives import reader


def send(server: Server, config: Any, archive: bytes) -> Any:
    text = config if isinstance(config, str) else json.dumps(config)
    files = {"archive": ("model.tar.gz", archive)}
    return server.http.post("/api/v1/experiments", data={"config": text}, files=files)


def test_engine_file_errors_are_reported_together(
    sqlite_server: Server,
) -> None:
    engine = {"train_batch_size": 7, "zero_optimization": {"stge": 1}, "steps_per_print": "x"}
    archive = model_archive(sqlite_server.directory / "model", engine)
    config = experiment_config(resources={"slots_per_trial": 2})
    response = send(sqlite_server, config, archive)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["type"] == "config"
    with pytest.raises(ConfigError) as caught:
        check_experiment(config, reader(archive))
    assert error["problems"] == caught.value.problems
    assert error["message"] == str(caught.value)
    text = error["message"]
    for word in ("stge", "did you mean 'stage'", "steps_per_print", "train_batch_size"):
        assert word in text
    assert sqlite_server.get("/experiments")["experiments"] == []


def test_errors_of_both_files_are_reported_together(sqlite_server: Server) -> None:
    archive = model_archive(sqlite_server.directory / "model", {"trian_batch_size": 4})
    config = experiment_config(sercher={}, max_restarts=-1)
    problems = send(sqlite_server, config, archive).json()["error"]["problems"]
    text = "\n".join(problems)
    for word in ("sercher", "max_restarts", "trian_batch_size"):
        assert word in text


@pytest.mark.parametrize("config", ["{", "[]", "null", '"x"', "[" * 100_000])
def test_config_must_be_json_object(sqlite_server: Server, config: str) -> None:
    archive = model_archive(sqlite_server.directory / "model")
    response = send(sqlite_server, config, archive)
    assert response.status_code == 422
    assert response.json()["error"]["problems"]


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


BAD_ARCHIVES = {
    "no archive": b"hello",
    "cut": packed((member("a.py"), b"x" * 1000))[:-20],
    "traversal": packed((member("../evil.py"), b"x")),
    "absolute": packed((member("/etc/evil"), b"x")),
    "link": packed((member("a", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "hard link": packed((member("a", tarfile.LNKTYPE, "/etc/passwd"), b"")),
    "device": packed((member("a", tarfile.CHRTYPE), b"")),
    "bomb": gzip.compress(b"\0" * 200_000_000, 1),
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_invalid_archive_is_rejected(sqlite_server: Server, name: str) -> None:
    response = send(sqlite_server, experiment_config(), BAD_ARCHIVES[name])
    assert (response.status_code, response.json()["error"]["type"]) == (422, "config")
    home = sqlite_server.services.orchestrator.home
    assert list(home.archives.iterdir()) == []


def test_agent_downloads_archive_unchanged(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    content = server.http.get(server.run_of().archive).content
    assert content == model_archive(server.directory / "again")


def test_lists_are_paged_by_cursor(server: Server) -> None:
    for number in range(5):
        server.submit(name=f"n{number % 3}", labels=["odd"] if number % 2 else ["even"])

    def ids(limit: int, **params: Any) -> list[int]:
        numbers: list[int] = []
        after = None
        while True:
            extra = {} if after is None else {"after": after}
            page = server.get("/experiments", limit=limit, **params, **extra)
            assert len(page["experiments"]) <= limit
            numbers += [row["id"] for row in page["experiments"]]
            after = page["next_after"]
            if after is None:
                return numbers

    for limit in (1, 2, 5):
        assert ids(limit) == [5, 4, 3, 2, 1]
        assert ids(limit, sort="id") == [1, 2, 3, 4, 5]
        assert ids(limit, sort="name") == [1, 4, 2, 5, 3]
        assert ids(limit, sort="-name") == [3, 5, 2, 4, 1]
        assert ids(limit, sort="best_validation") == [1, 2, 3, 4, 5]
    assert ids(10, name="N1") == [5, 2]
    assert ids(10, name="%") == []
    assert ids(10, label="odd") == [4, 2]
    assert ids(10, state="COMPLETED") == []
    bad = server.http.get("/api/v1/experiments", params={"after": "x"})
    assert bad.status_code == 422


def test_trials_sort_by_best_missing_last(server: Server) -> None:
    from tests.server.helpers import validation

    space = {"deepspeed_config": "ds_config.json", "n": {"type": "categorical", "vals": [0, 1, 2]}}
    server.submit(
        hyperparameters=space, searcher={"name": "grid", "metric": "loss", "max_length": 9}
    )
    server.add_agent(slots=3)
    for trial_id, loss in ((1, 0.5), (3, 0.25)):
        server.report(server.begin(trial_id).run_id, validation(1, loss))

    def ids(sort: str) -> list[int]:
        numbers: list[int] = []
        after = ""
        for _ in range(3):
            extra = {"after": after} if after else {}
            page = server.get("/experiments/1/trials", sort=sort, limit=1, **extra)
            numbers += [trial["id"] for trial in page["trials"]]
            after = page["next_after"]
        assert after is None
        return numbers

    assert ids("best_validation") == [3, 1, 2]
    assert ids("-best_validation") == [1, 3, 2]
    running = server.get("/experiments/1/trials", state="RUNNING")["trials"]
    assert [trial["id"] for trial in running] == [1, 3]


def test_edit_experiment_name_and_notes(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    changes = {
        "name": "<b>x</b>", "description": "d", "labels": ["a", "b"], "notes": "n\n\N{SNOWMAN}"
    }  # fmt: skip
    changed = server.request("PATCH", "/experiments/1", json=changes)["experiment"]
    assert {key: changed[key] for key in changes} == changes
    assert server.http.patch("/api/v1/experiments/1", json={"nmae": "x"}).status_code == 422
    assert server.http.patch("/api/v1/experiments/1", json={"name": ""}).status_code == 422


def test_logs_filter_by_cursor_level_and_rank(server: Server) -> None:
    server.submit()
    server.add_agent()
    run_id = server.begin().run_id
    assert server.log(run_id, 0, "a", "b") == 2
    assert server.log(run_id, 0, "a", "b") == 2
    assert server.log(run_id, 1, "b", "c", rank=1) == 3
    assert server.log(run_id, 9, "z") == 3
    body = {
        "first": 3,
        "entries": [
            {"text": "bad \0 news", "time": 2.0, "stream": "stderr", "level": "ERROR"},
            {"text": "\x1b[31mred", "time": 0, "level": "DEBUG"},
        ],
    }
    assert server.post(f"/runs/{run_id}/logs", body) == {"stored": 5}

    def texts(path: str = "/trials/1/logs", **params: Any) -> list[str]:
        return [line["text"] for line in server.get(path, **params)["logs"]]

    every = ["a", "b", "c", "bad \N{REPLACEMENT CHARACTER} news", "\x1b[31mred"]
    assert texts() == texts("/experiments/1/logs") == every
    page = server.get("/trials/1/logs", limit=2)
    assert texts(after=page["next_after"]) == every[2:]
    assert texts(tail=2) == every[3:]
    assert texts(level="ERROR") == every[3:4]
    assert texts(level="INFO") == every[:4]
    assert texts(rank=1) == ["c"]
    last_line = server.get("/trials/1/logs", level="ERROR")["logs"][0]
    assert (last_line["time"], last_line["rank"]) == ("1970-01-01T00:00:02.000Z", None)
    server.exit(run_id, 0)
    assert server.log(run_id, 5, "after the end") == 6


@pytest.mark.needs_extension("prometheus", "queue")
def test_server_info_lists_capabilities(server: Server, tmp_path: Path) -> None:
    server.add_agent(slots=3)
    server.submit()
    info = server.get("/info")
    assert info["cluster"] == {"agents": 1, "slots": 3, "free_slots": 2}
    assert info["home"] == str(tmp_path / "home")
    (job,) = server.get("/jobs")["jobs"]
    assert (job["held_slots"], job["slots_per_trial"]) == (1, 1)
    numbers = server.http.get("/metrics").text
    assert 'zerolab_experiments{state="ACTIVE"} 1' in numbers
    assert server.http.get("/healthz").json() == {"status": "ok"}


def test_slurm_request_over_node_size_is_rejected(sqlite_server: Server) -> None:
    def message_for(**resources: object) -> str:
        requested = {"resource_pool": "cluster", **resources}
        response = sqlite_server.try_submit(
            entrypoint="python model_def.py", hyperparameters={}, resources=requested
        )
        return "" if response.is_success else f"{response.status_code} {response.text}"

    too_many = {"slots_per_trial": 6, "slots_per_rank": 3}
    assert message_for(**too_many) == ""  # the pool has no agent: it waits
    sqlite_server.add_agent(10, "slurm", pool="cluster", per_node=5)
    assert "2 rank(s) of 6 slot(s) must fit on the 2 node(s)" in message_for(
        slots_per_trial=12, slots_per_rank=6
    )
    refused = message_for(slots_per_trial=11)
    assert refused.startswith("422 ")
    assert "resources.slots_per_trial: 11 rank(s) of 1 slot(s) must fit" in refused
    assert message_for(slots_per_trial=11, elastic={"min_slots": 10}) == ""
    assert message_for(slots_per_trial=10) == ""
    sqlite_server.add_agent(1, "plain", pool="cluster")  # more nodes may be added
    assert message_for(slots_per_trial=11) == ""


@pytest.mark.needs_extension("search_preview")
def test_submit_warns_about_log_bounds_as_values(sqlite_server: Server) -> None:
    server = sqlite_server
    spec = {"type": "log", "base": 10, "minval": 0.0001, "maxval": 0.1}
    changes = {
        "searcher": {"name": "random", "metric": "loss", "max_length": 10, "max_trials": 2},
        "hyperparameters": {"deepspeed_config": "ds_config.json", "lr": spec},
    }
    response = server.try_submit(**changes)
    assert "powers of base 10: the values are 1.00023 to 1.25893" in response.text
    fork = server.post("/experiments/1/fork", {})
    assert any("hyperparameters.lr" in line for line in fork["warnings"])
    config = experiment_config(**changes)
    preview = server.post("/experiments/preview", {"config": config, "seconds_per_batch": 1})
    assert "hyperparameters.lr" in preview["preview"]["warnings"][0]
