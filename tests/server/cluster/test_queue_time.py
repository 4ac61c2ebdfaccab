"""``resources.queue_time`` compared with a brute-force model after random events."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event

import pytest

from tests.server.helpers import Clock, Server, serve
from tests.waiting import DEADLINE_S
from zerolab.contract.spec import EXIT_PREEMPTED
from zeroserver.orchestrator.periodic import PeriodicService

LIMIT_S = 60
POOLS = 4
SEARCHER = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 3}
SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "double", "minval": 0, "maxval": 1},
}


@dataclass
class QueueTimeModel:
    """Expected state of an experiment with a separate pool of at most one slot."""

    number: int
    pool: str
    agent: int = 0
    quota: bool = False
    since: float | None = None
    """Time of the first tick of the current wait."""
    error: str | None = None
    """Expected error."""
    due: dict[int, float] = field(default_factory=dict)
    """Trial to the earliest time of its restart."""

    def waits(self, server: Server) -> bool:
        """Return true if it has a queued trial and no slot."""
        if self.agent and server.work(self.agent):
            return False
        rows = server.sql(f"SELECT id, state FROM trials WHERE experiment_id = {self.number}")
        now = server.clock.now
        return any(state == "QUEUED" and self.due.get(id_, 0.0) <= now for id_, state in rows)

    def check_end(self, server: Server, seen: Counter[str]) -> None:
        """Check that a tick ended the experiment only if it waited too long."""
        experiment, now = server.experiment(self.number), server.clock.now
        if self.since is None or now - self.since <= LIMIT_S:
            assert experiment["error"] == self.error
            return
        seen["ended"] += 1
        assert experiment["state"] == "ERROR"
        assert experiment["error"].startswith(
            f"it has waited for slots for more than {LIMIT_S} s (resources.queue_time): "
            + (f"it needs 1 slot, and quota pool:{self.pool} allows 0: "
               if self.agent else f"no agent of pool {self.pool} is connected")
        )  # fmt: skip
        assert {trial["state"] for trial in server.trials(self.number)} <= {"CANCELED", "COMPLETED"}
        self.since, self.error = None, experiment["error"]


@pytest.fixture
def first_tick(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Event that is set by a tick, as the one at the server's start."""
    done = Event()
    tick = PeriodicService.tick

    def tick_and_report(periodic: PeriodicService) -> None:
        tick(periodic)
        done.set()

    monkeypatch.setattr(PeriodicService, "tick", tick_and_report)
    return done


def wait_for(first_tick: Event, server: Server) -> None:
    assert first_tick.wait(DEADLINE_S)
    server.write(lambda _work: None)  # wait for earlier commits


def start(server: Server, pool: str) -> QueueTimeModel:
    resources = {"queue_time": LIMIT_S, "resource_pool": pool}
    experiment = server.submit(
        hyperparameters=SPACE, searcher=SEARCHER, max_restarts=50, resources=resources
    )
    return QueueTimeModel(experiment["id"], pool)


def random_event(server: Server, watched: QueueTimeModel, rng: Random, seen: Counter[str]) -> None:
    """Apply a random event that the experiment's state allows."""
    state = server.experiment(watched.number)["state"]
    if state in {"COMPLETED", "ERROR", "CANCELED"}:
        if state == "ERROR" and rng.random() < 0.5:
            server.act("continue", watched.number)
            watched.error, seen["continued"] = None, seen["continued"] + 1
        return
    runs = server.work(watched.agent) if watched.agent else []
    what = rng.choice(["pause", "join", "quota", *["exit"] * 3])
    if what == "pause" or state == "PAUSED":
        server.act("activate" if state == "PAUSED" else "pause", watched.number)
    elif what == "join" and not watched.agent:
        watched.agent = server.add_agent(name=watched.pool, pool=watched.pool)
    elif what == "quota":
        path, watched.quota = f"/quotas/pool/{watched.pool}", not watched.quota
        if watched.quota:
            server.request("PUT", path, json={"max_slots": 0})
        else:
            server.request("DELETE", path)
    elif what == "exit" and runs:
        code = rng.choice([0, -9, -9, EXIT_PREEMPTED, EXIT_PREEMPTED])
        trial_id = runs[0].spec.trial_id
        server.exit(runs[0].run_id, code, "boom")
        if code == -9:
            back_off = 2.0 ** (server.trial(trial_id)["restarts"] - 1)
            watched.due[trial_id] = server.clock.now + min(back_off, 60.0)
    else:
        return
    seen[what] += 1


def check_tick(
    server: Server, watched: list[QueueTimeModel], seen: Counter[str], *, ticked: bool = False
) -> None:
    """Run a tick, unless ``ticked``, and check the experiments that it ended."""
    waiting = [item.since is not None or item.waits(server) for item in watched]
    if not ticked:
        server.tick()
    for item, waits in zip(watched, waiting, strict=True):
        if not waits:
            item.since = None
        elif item.since is None:
            item.since = server.clock.now
        item.check_end(server, seen)
        if not item.waits(server):  # it has slots now
            item.since = None


@pytest.mark.needs_extension("continued_experiments", "queue")
def test_max_queue_time_ends_experiment_once(tmp_path: Path, first_tick: Event) -> None:
    clock, rng, seen = Clock(), Random(7), Counter[str]()
    watched: list[QueueTimeModel] = []
    for _ in range(3):  # the server restarts after each
        first_tick.clear()
        with serve(tmp_path, clock=clock) as server:
            wait_for(first_tick, server)
            check_tick(server, watched, seen, ticked=True)
            watched = watched or [start(server, f"p{number}") for number in range(POOLS)]
            for _ in range(45):
                clock.now += rng.choice([0.1, 1.0, 7.0, 19.0])
                chosen = rng.choice(watched)
                random_event(server, chosen, rng, seen)
                if not chosen.waits(server):
                    chosen.since = None
                if rng.random() < 0.6:
                    check_tick(server, watched, seen)
        clock.now += rng.choice([0.5, 30.0])
    assert min(seen[what] for what in ("ended", "continued", "pause", "exit")) > 3, seen


@pytest.mark.needs_extension("queue")
def test_run_or_pause_resets_queue_time(tmp_path: Path, first_tick: Event) -> None:
    with serve(tmp_path) as server:
        wait_for(first_tick, server)
        for number in (1, 2):
            server.submit(resources={"queue_time": LIMIT_S, "resource_pool": f"p{number}"})
        server.tick()
        server.tick(59)
        server.act("pause", 1)
        server.act("activate", 1)
        agent_id = server.add_agent(pool="p2")
        server.request("PUT", "/quotas/pool/p2", json={"max_slots": 0})
        server.exit(server.run_of(2, agent_id).run_id, EXIT_PREEMPTED)
        server.tick(2)  # the first that sees the second wait
        server.tick(59)
        assert [server.experiment(number)["state"] for number in (1, 2)] == ["ACTIVE", "ACTIVE"]
        server.tick(2)
        assert [server.experiment(number)["state"] for number in (1, 2)] == ["ERROR", "ERROR"]
