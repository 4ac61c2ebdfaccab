"""Commands for trials, the queue and checkpoints, on a server with simulated runs."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.end_to_end.installation import in_process
from tests.server.helpers import Server, checkpoint, validation
from tests.server.processes import played
from zerolab.client.http import Client
from zerolab.contract.spec import EXIT_PREEMPTED
from zerolab.extensions.live_progress import _ProgressPoller

pytestmark = pytest.mark.processes

SEARCH = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 3}
SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}

Zerolab = Callable[..., Any]


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with played(tmp_path_factory.mktemp("acts")) as (_, owner):
        owner.add_agent(slots=2)
        yield owner


@pytest.fixture
def zerolab(owner: Server) -> Zerolab:
    """Return a function that runs a command and returns its standard error or output."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("ZEROLAB_")
    }
    home = str(owner.directory / "home")
    url = str(owner.http.base_url)
    environment = inherited | {
        "ZEROLAB_HOME": home, "ZEROLAB_MASTER": url, "ZEROLAB_TOKEN": owner.token,
    }  # fmt: skip

    def run(*arguments: object, expect: int = 0) -> str:
        done = in_process(environment, *map(str, arguments), expect=expect)
        return (done.stderr or done.stdout).strip()

    return run


def trials(zerolab: Zerolab, number: int, *arguments: str) -> dict[int, tuple[str, bool]]:
    """Return the state of each trial in ``trial list``, and whether it is archived."""
    listed = json.loads(zerolab("trial", "list", number, "--json", *arguments))
    return {resource["id"]: (resource["state"], resource["archived"]) for resource in listed}


def test_trial_actions(owner: Server, zerolab: Zerolab) -> None:
    number = owner.submit(hyperparameters=SPACE, searcher=SEARCH, max_restarts=0)["id"]
    first, second, third = (trial["id"] for trial in owner.trials(number))
    runs = {item.spec.trial_id: item.run_id for item in owner.wait_for_runs(2)}
    for trial_id, run_id in runs.items():
        owner.post(f"/runs/{run_id}/started", {})
        saved = checkpoint(5, f"acts {trial_id}")
        owner.report(run_id, validation(5, 1 / trial_id), saved)

    message = zerolab("trial", "pause", first)
    assert message == f"trial {first} is pausing: it saves a checkpoint and releases its slots"
    assert owner.directive(runs[first]) == "preempt"
    owner.exit(runs[first], EXIT_PREEMPTED)
    assert zerolab("trial", "activate", first) == f"trial {first} is queued"
    assert owner.trial(first)["state"] == "QUEUED"

    message = zerolab("trial", "cancel", second)
    assert message == f"trial {second} is stopping: it saves a checkpoint first"
    assert owner.directive(runs[second]) == "stop"
    refused = zerolab("trial", "archive", second, expect=2)
    assert "is STOPPING and cannot be archived; wait until it has ended" in refused
    owner.exit(runs[second], EXIT_PREEMPTED)
    assert zerolab("trial", "cancel", second) == f"trial {second} has already ended: CANCELED"
    assert zerolab("trial", "kill", third) == f"trial {third} is being killed"

    refused = zerolab("trial", "delete", second, "--yes", expect=2)
    assert f"its experiment {number} is ACTIVE, and the searcher still counts on it" in refused
    for _ in range(2):
        assert zerolab("trial", "archive", second) == f"trial {second} is archived"
    assert second not in trials(zerolab, number)
    assert trials(zerolab, number, "--archived")[second] == ("CANCELED", True)
    message = zerolab("trial", "unarchive", second)
    assert message == f"trial {second} is no longer archived"
    assert trials(zerolab, number)[second] == ("CANCELED", False)
    assert (
        zerolab("trial", "continue", second)
        == f"trial {second} is queued and resumes from its checkpoint"
    )
    assert owner.trial(second)["state"] == "QUEUED"

    fork = zerolab("trial", "fork", first, "--paused", "--set", "name=forked")
    assert owner.experiment(int(fork))["name"] == "forked"
    assert owner.experiment(int(fork))["source_checkpoint"] == checkpoint(5, f"acts {first}").uuid

    (waiting,) = owner.trials(int(fork))
    assert zerolab("trial", "pause", waiting["id"]) == f"trial {waiting['id']} is paused"
    paused = owner.submit(activate=False)["id"]
    assert zerolab("experiment", "pause", paused) == f"experiment {paused} is paused"
    assert zerolab("experiment", "cancel", paused) == f"experiment {paused} is canceled"
    assert zerolab("experiment", "kill", fork) == f"experiment {fork} is killed"
    assert zerolab("experiment", "kill", number) == f"experiment {number} is being killed"
    message = zerolab("experiment", "cancel", number)
    assert message == f"experiment {number} is stopping already: STOPPING_KILLED"
    for item in owner.work():
        owner.exit(item.run_id, -9)
    assert "Aborted" in zerolab("trial", "delete", second, expect=1)
    assert zerolab("trial", "delete", second, "--yes") == f"trial {second} is deleted"
    assert set(trials(zerolab, number)) == {first, third}
    assert f"there is no trial {second}" in zerolab("trial", "delete", second, "--yes", expect=2)

    assert zerolab("experiment", "archive", fork) == f"experiment {fork} is archived"
    shown = [
        json.loads(zerolab("experiment", "list", "--json", *more)) for more in ((), ("--archived",))
    ]
    assert [
        int(fork) in [resource["id"] for resource in trials_found] for trials_found in shown
    ] == [False, True]


def test_queue_order_and_quotas(owner: Server, zerolab: Zerolab) -> None:
    jobs = [owner.submit(resources={"slots_per_trial": 4}, labels=["acts"])["id"] for _ in range(3)]
    first, second, third = jobs

    def queue() -> list[int]:
        listed = json.loads(zerolab("job", "list", "--json"))
        return [job["experiment_id"] for job in listed if job["experiment_id"] in jobs]

    assert queue() == jobs
    message = zerolab("job", "move", third, "--ahead-of", first)
    assert message == f"experiment {third} is at position 1 of pool default, with priority 42"
    assert queue() == [third, first, second]
    message = zerolab("job", "move", third, "--behind", first)
    assert message == f"experiment {third} is at position 2 of pool default, with priority 42"
    assert queue() == [first, third, second]
    for wrong in ((), ("--ahead-of", first, "--behind", second)):
        refused = zerolab("job", "move", third, *wrong, expect=2)
        assert "give either --ahead-of ID or --behind ID" in refused

    for group, most in (("label:acts", 3), ("pool:default", 9), ("label:acts", 4)):
        message = zerolab("quota", "set", group, most)
        assert message == f"{group} has a limit of {most} slot(s); 0 in use"
    listed = json.loads(zerolab("quota", "list", "--json"))
    assert {resource["group"]: resource["max_slots"] for resource in listed} == {
        "label:acts": 4, "pool:default": 9,
    }  # fmt: skip
    assert ["label:acts", "4"] in [
        line.split()[:2] for line in zerolab("quota", "list").splitlines()
    ]
    for group in ("label:acts", "pool:default"):
        assert group in zerolab("quota", "delete", group)
    assert json.loads(zerolab("quota", "list", "--json")) == []
    zerolab("quota", "set", "user:*", 3, "--request-limit", 9)
    assert zerolab("quota", "list").split()[-2:] == ["from", "user:*"]
    assert "waits for an administrator" in zerolab("quota", "request", 6, "--reason", "larger")
    (request,) = json.loads(zerolab("quota", "requests", "--state", "open", "--json"))
    message = zerolab("quota", "approve", request["id"])
    assert message == "user:admin has a limit of 6 slot(s)"
    second = json.loads(zerolab("quota", "request", 9, "--reason", "x", "--json"))["id"]
    message = zerolab("quota", "decline", second, "--reason", "too many")
    assert message == f"request {second} of user admin is declined"
    assert "too many" in zerolab("quota", "requests")
    for group in ("user:*", "user:admin"):
        zerolab("quota", "delete", group)
    assert "must be pool:NAME, label:NAME, user:NAME or project:NAME" in zerolab(
        "quota", "set", "acts", 3, expect=2
    )
    assert "user: must be one of admin, got 'ann'" in zerolab(
        "quota", "set", "user:ann", 3, expect=2
    )
    message = zerolab("quota", "set", "label:acts", -1, expect=2)
    assert "MAX_SLOTS" in message
    assert "at least 0" in message
    for what in ("priority", "weight", "max-slots"):
        assert "No such option" not in zerolab("job", "set", what, first, -1, expect=2)
    for resource in jobs:
        zerolab("experiment", "kill", resource)


def test_checkpoint_files_are_deleted_by_name(owner: Server, zerolab: Zerolab) -> None:
    number = owner.submit(max_restarts=0)["id"]
    (item,) = owner.wait_for_runs(1)
    owner.post(f"/runs/{item.run_id}/started", {})
    saved = checkpoint(100, "globbed")
    saved = type(saved)(
        saved.uuid, 100, {"rank-0.pt": 10, "rank-1.pt": 20, "notes": 5}, {}, saved.time
    )
    owner.report(item.run_id, validation(100, 0.1), saved)
    owner.exit(item.run_id, 0)
    files = ("checkpoint", "delete", saved.uuid, "--glob", "rank-*")
    plan = json.loads(zerolab(*files, "--dry-run", "--json"))
    assert plan["size_bytes"] == 30
    assert "Aborted" in zerolab(*files, expect=1)
    zerolab(*files, "--yes")
    trials_found = owner.get(f"/checkpoints/{saved.uuid}")["checkpoint"]
    assert (trials_found["state"], trials_found["resources"]) == ("PARTIAL", {"notes": 5})
    assert owner.experiment(number)["state"] == "COMPLETED"


def test_progress_omits_trial_paused_within_search(owner: Server, zerolab: Zerolab) -> None:
    number = owner.submit(searcher={"name": "single", "metric": "loss", "max_length": 20})["id"]
    (trial,) = owner.trials(number)
    (run_id,) = (item.run_id for item in owner.wait_for_runs(1))
    owner.post(f"/runs/{run_id}/started", {})
    owner.report(run_id, validation(5, 0.5), checkpoint(5, "progress"))
    with Client(str(owner.http.base_url), owner.token) as client:
        poller = _ProgressPoller(client, number)
        assert [shown.state for shown in poller.poll()[1]] == ["RUNNING"]
        zerolab("trial", "pause", trial["id"])
        owner.exit(run_id, EXIT_PREEMPTED)
        assert owner.trial(trial["id"])["state"] == "PAUSED"
        assert poller.poll()[1] == []
        zerolab("experiment", "pause", number)
        assert [(shown.state, shown.remaining_s) for shown in poller.poll()[1]] == [
            ("PAUSED", None)
        ]


def test_projects(owner: Server, zerolab: Zerolab) -> None:
    number = owner.submit(hyperparameters=SPACE, searcher=SEARCH, activate=False)["id"]
    assert zerolab("project", "create", "vision", "--description", "Images") == "vision"
    message = zerolab("project", "move", number, "vision")
    assert message == f"experiment {number} belongs to project vision"
    listed = zerolab("experiment", "list", "--project", "vision")
    assert listed.split()[:4] == ["id", "name", "project", "state"]
    assert "default" not in listed
    assert json.loads(zerolab("project", "describe", "vision", "--json"))["experiments"] == 1
    assert "updated notes" in zerolab("project", "change", "vision", "--notes", "baselines")
    assert "baselines" in zerolab("project", "describe", "vision")
    assert "--description, --notes" in zerolab("project", "change", "vision", expect=2)
    assert zerolab("project", "archive", "vision") == "project vision is archived"
    assert "vision" not in zerolab("project", "list")
    assert "vision" in zerolab("project", "list", "--archived")
    refused = zerolab("experiment", "fork", number, expect=2)
    assert "`zerolab project unarchive vision`" in refused
    assert "no longer archived" in zerolab("project", "unarchive", "vision")
    assert "cannot be archived" in zerolab("project", "archive", "default", expect=2)
    owner.post("/users", {"name": "ann", "role": "member"})
    assert "ann is a member" in zerolab("project", "add-member", "vision", "ann")
    assert "members (admin, ann)" in zerolab("project", "restrict", "vision")
    assert zerolab("project", "members", "vision").split()[-4:] == [
        "admin", "owner", "ann", "member",
    ]  # fmt: skip
    assert "visible to" in zerolab("project", "list")
    assert "no longer a member" in zerolab("project", "remove-member", "vision", "ann")
    assert "everybody sees" in zerolab("project", "unrestrict", "vision")
