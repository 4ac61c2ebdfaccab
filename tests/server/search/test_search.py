"""Searchers replay their event log: a restart at any event gives the same trials."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, serve, validation
from zerolab.contract.spec import EXIT_INVALID_HP, EXIT_PREEMPTED
from zerolab.searcher import Continue, Operation, Stop

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "net": {"width": {"type": "int", "minval": 8, "maxval": 64}},
}
SEARCHER = {
    "name": "random", "metric": "loss", "max_length": 20, "max_trials": 5,
    "max_concurrent_trials": 2,
}  # fmt: skip


def random_event(server: Server, chance: random.Random) -> bool:
    """Apply a random event to a random run; return false if there is no run."""
    server.tick(100)
    items = server.work()
    if not items:
        return False
    item = chance.choice(items)
    trial = item.spec.trial_id
    server.post(f"/runs/{item.run_id}/started", {})
    happens = chance.choice(["validate", "validate", "exit", "fail", "invalid", "preempted"])
    if happens == "validate":
        steps = server.trial(trial)["steps_completed"] + 5
        stored = server.sql(f"SELECT last_seq FROM runs WHERE id = {item.run_id}")[0][0]
        records = [validation(steps, 1 / (trial + steps)), checkpoint(steps, str(trial))]
        assert server.send(item.run_id, stored + 1, list(records)).is_success
    else:
        codes = {"exit": 0, "fail": 1, "invalid": EXIT_INVALID_HP, "preempted": EXIT_PREEMPTED}
        server.exit(item.run_id, codes[happens], "so chance has it")
    return True


def outcome(server: Server) -> Any:
    """Return the trials and states of the finished search."""
    names = ("state", "hparams", "seed", "restarts", "best_validation", "steps_completed")
    trials = [{name: trial[name] for name in names} for trial in server.trials()]
    events = server.sql("SELECT kind, request_id, value, length, reason FROM searcher_events")
    experiment = server.experiment()
    return trials, events, experiment["state"], experiment["progress"]


def search(directory: Path, dies: bool, searcher: dict[str, Any]) -> Any:
    """Run a search to its end; with ``dies``, restart the server after every event."""
    chance = random.Random(7)
    with serve(directory) as server:
        server.submit(
            hyperparameters=SPACE, searcher=searcher, max_restarts=0,
            reproducibility={"experiment_seed": 3},
        )  # fmt: skip
        server.add_agent(slots=2)
        now = server.clock.now
        while not dies and random_event(server, chance):
            pass
        if not dies:
            return outcome(server)
    for _ in range(200):
        with serve(directory) as server:
            server.clock.now = now
            if not random_event(server, chance):
                return outcome(server)
            now = server.clock.now
    pytest.fail("the search does not end")


HALVING = {
    "name": "async_halving", "metric": "loss", "num_rungs": 3, "divisor": 2, "max_trials": 6,
    "max_concurrent_trials": 2, "max_length": 20,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "searcher",
    [  # test_restarts.py has stopping searches, and deaths before and after each event
        pytest.param(SEARCHER, marks=pytest.mark.soak),
        pytest.param(HALVING, marks=pytest.mark.soak),
        {**HALVING, "stop_once": False},
    ],
    ids=["random", "stop", "pause"],
)
def test_restart_after_each_event_gives_same_end(tmp_path: Path, searcher: dict[str, Any]) -> None:
    plain = search(tmp_path / "plain", False, searcher)
    assert len(plain[0]) >= 5
    assert plain[2] == "COMPLETED"
    assert {trial["state"] for trial in plain[0]} >= {"COMPLETED", "ERROR"}
    assert search(tmp_path / "dying", True, searcher) == plain


def test_same_seed_gives_same_trials(sqlite_server: Server) -> None:
    for seed in (3, 3, 4):
        reproducibility = {"experiment_seed": seed}
        sqlite_server.submit(
            hyperparameters=SPACE, searcher=SEARCHER, reproducibility=reproducibility
        )
    first, second, third = (
        [(trial["hparams"], trial["seed"]) for trial in sqlite_server.trials(number)]
        for number in (1, 2, 3)
    )
    assert first == second
    assert first != third
    assert 1e-4 <= first[0][0]["lr"] <= 1e-1


def test_missing_seed_is_generated_and_stored(sqlite_server: Server) -> None:
    config = sqlite_server.submit()["config"]
    assert 0 <= config["reproducibility"]["experiment_seed"] < 2**31


def test_failed_transaction_restores_searcher(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(hyperparameters=SPACE, searcher=SEARCHER)
    server.add_agent()
    spec = server.begin()
    bad = validation(10, 0.5, other="no number")
    assert server.send(spec.run_id, 1, [validation(5, 0.5), bad]).status_code == 422
    assert server.sql("SELECT count(*) FROM searcher_events WHERE kind = 'validated'") == [(0,)]
    server.report(spec.run_id, validation(5, 0.5))
    assert server.sql("SELECT count(*) FROM searcher_events WHERE kind = 'validated'") == [(1,)]


def test_stopped_trial_creates_no_trials(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.act("cancel")
    server.report(spec.run_id, validation(5, 0.5))
    assert server.sql("SELECT kind FROM searcher_events") == [("created",)]


class Rungs:
    """Searcher that promotes the better of two trials."""

    def __init__(self) -> None:
        self.reported: dict[int, float] = {}

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        self.reported[trial_id] = metric
        if length < 10 or len(self.reported) < 2:
            return []
        best = min(self.reported, key=lambda number: self.reported[number])
        return [Continue(best, 20), *(Stop(number) for number in self.reported if number != best)]

    def trial_exited(self, trial_id: int) -> list[Operation]:
        del trial_id
        return []

    def progress(self) -> float:
        return 0.5


def test_trial_waits_at_rung_for_promotion(server: Server) -> None:
    searcher = {**SEARCHER, "max_trials": 2, "max_concurrent_trials": 2}
    server.submit(hyperparameters=SPACE, searcher=searcher)
    server.services.orchestrator.searches.searchers[1] = Rungs()  # type: ignore[assignment]
    server.write(lambda work: work.operations.execute(1, [Continue(1, 10), Continue(2, 10)]))
    server.add_agent(slots=1)
    first = server.begin(1)
    server.report(first.run_id, validation(5, 0.2))
    assert server.directive(first.run_id) == "train"
    server.report(first.run_id, validation(10, 0.1), checkpoint(10, "1"))
    assert server.directive(first.run_id) == "preempt"
    server.exit(first.run_id, EXIT_PREEMPTED)
    assert server.trial(1)["state"] == "PAUSED"

    second = server.begin(2)
    server.report(second.run_id, validation(10, 0.3), checkpoint(10, "2"))
    assert server.directive(second.run_id) == "stop"
    assert (server.trial(1)["state"], server.trial(2)["state"]) == ("QUEUED", "STOPPING")
    server.exit(second.run_id, EXIT_PREEMPTED)
    assert server.trial(2)["state"] == "COMPLETED"
    again = server.begin(1)
    assert again.latest_checkpoint is not None
    assert again.latest_checkpoint.steps_completed == 10
    server.report(again.run_id, validation(15, 0.1))
    assert server.directive(again.run_id) == "train"
