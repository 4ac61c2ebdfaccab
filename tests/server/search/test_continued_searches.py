"""Searches that are ended, grown, canceled and continued repeatedly."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.server.helpers import Clock, Server, checkpoint, serve, validation
from zerolab.contract.spec import EXIT_PREEMPTED, EXIT_REACHED
from zeroserver.orchestrator.search import search_service
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services
from zeroserver.states import EXPERIMENT_ENDED

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
HALVING = {"name": "async_halving", "num_rungs": 3, "divisor": 2, "max_length": 16, "max_trials": 4}
SEARCHERS: dict[str, dict[str, Any]] = {
    "stopping": HALVING,
    "promoting": HALVING | {"stop_once": False},
    "tpe_asha": {"name": "tpe_asha", "max_length": 27, "max_trials": 12},
    "pbt": {"name": "pbt", "population_size": 4, "num_rounds": 2, "length_per_round": 5},
}
LONGER = {
    "stopping": {"max_length": 32},
    "promoting": {"max_length": 32},
    "tpe_asha": {"max_length": 81},
    "pbt": {"num_rounds": 3},
}
MORE = {name: {"max_trials": SEARCHERS[name].get("max_trials", 0) + 4} for name in SEARCHERS}
MORE["pbt"] = {"num_rounds": 4}


class Life:
    """One search on a series of servers."""

    def __init__(self, directory: Path, name: str, **config: Any) -> None:
        self.directory, self.clock = directory, Clock()
        self._numbers: dict[int, Any] = {}
        self._running = serve(directory, clock=self.clock)
        self.server: Server = self._running.__enter__()
        searcher = SEARCHERS[name] | {"metric": "loss", "max_concurrent_trials": 2}
        self.server.submit(hyperparameters=SPACE, searcher=searcher, max_restarts=0, **config)
        self.server.add_agent(slots=2)

    def restart(self) -> None:
        numbers = dict(self.server._numbers)
        self.end()
        self._running = serve(self.directory, clock=self.clock)
        self.server = self._running.__enter__()
        self.server._numbers.update(numbers)
        self.server.add_agent(slots=2)

    def end(self) -> None:
        self._running.__exit__(None, None, None)

    def state(self) -> str:
        return str(self.server.experiment()["state"])

    def continue_search(self, **searcher: Any) -> None:
        body = {"config": {"searcher": searcher} if searcher else {}}
        response = self.server.http.post("/api/v1/experiments/1/continue", json=body)
        assert response.is_success, response.text

    def run_one(self) -> bool:
        """Train the first run; return false if there is none."""
        items = self.server.work()
        if not items:
            return False
        run_id, spec = items[0].run_id, items[0].spec
        assert spec.fit is not None
        assert spec.fit.max_length is not None
        if items[0].action == "kill":
            self.server.exit(run_id, -9)
            return True
        self.server.post(f"/runs/{run_id}/started", {})
        leaving = self.server.directive(run_id) != "train"
        until = spec.fit.until or spec.fit.max_length.count
        begin = spec.latest_checkpoint.steps_completed if spec.latest_checkpoint else 0
        for steps in sorted({*spec.fit.validate_at, until}):
            if begin < steps <= until and not leaving:
                loss = (spec.trial_id * 37 % 11) / 11 + 1 / steps
                record = checkpoint(steps, f"{spec.trial_id} {run_id}")
                self.server.report(run_id, validation(steps, loss), record)
                leaving = self.server.directive(run_id) != "train"
        done = EXIT_REACHED if spec.fit.until else 0
        self.server.exit(run_id, EXIT_PREEMPTED if leaving else done)
        return True

    def finish(self) -> None:
        """Train until the experiment ends by itself."""
        for _ in range(200):
            if self.state() in EXPERIMENT_ENDED:
                return
            if not self.run_one():
                self.server.tick(100)
                waiting = [trial["state"] for trial in self.server.trials()]
                assert self.server.work(), f"the search hangs: {waiting}"
        pytest.fail("the search never ends")

    def compare(self) -> None:
        """Check that the searcher in memory equals a replay of its events."""

        def both(work: UnitOfWork) -> tuple[Any, Any]:
            in_memory = work.orchestrator.searches.searchers.get(1)
            replay = work.searches._replay(1)
            assert replay.problem is None
            return replay.searcher, in_memory or replay.searcher

        replayed, current = self.server.write(both)
        assert search_service._view(replayed) == search_service._view(current)
        assert replayed.progress() == current.progress()


@pytest.fixture
def begin(tmp_path: Path) -> Any:
    lives = []

    def make(name: str, **config: Any) -> Life:
        lives.append(Life(tmp_path, name, **config))
        return lives[-1]

    yield make
    for life in lives:
        life.end()


@pytest.mark.needs_extension("continued_experiments")
@pytest.mark.parametrize(("canceled", "restarted"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", SEARCHERS)
def test_search_grows_twice(name: str, canceled: bool, restarted: bool, begin: Any) -> None:
    life = begin(name)
    for change in (LONGER[name], MORE[name]):
        if canceled:
            for _ in range(5):
                life.run_one()
            life.server.act("cancel")
        life.finish()
        if restarted:
            life.restart()
        trials = len(life.server.trials())
        life.continue_search(**change)
        life.server.tick(1)
        assert life.state() == "ACTIVE"
        life.compare()
        life.finish()
        assert life.state() == "COMPLETED"
        life.compare()
        assert len(life.server.trials()) >= trials
    furthest = max(trial["steps_completed"] for trial in life.server.trials())
    assert furthest == {"tpe_asha": 81, "pbt": 20}.get(name, 32)


@pytest.mark.needs_extension("continued_experiments")
@pytest.mark.parametrize("name", SEARCHERS)
def test_continue_canceled_search_that_grew(name: str, begin: Any) -> None:
    life = begin(name)
    life.finish()
    life.continue_search(**MORE[name])
    for _ in range(2):
        life.run_one()
    life.server.act("cancel")
    life.finish()
    assert life.state() == "CANCELED"
    life.continue_search()
    life.finish()
    assert life.state() == "COMPLETED"
    life.compare()


def test_continue_trial_waiting_at_rung_after_search(
    begin: Any,
) -> None:
    life = begin("promoting")
    while not any(trial["state"] == "PAUSED" for trial in life.server.trials()):
        life.run_one()
    (paused, *_) = [t["id"] for t in life.server.trials() if t["state"] == "PAUSED"]
    life.server.act("kill")
    life.finish()
    life.server.post(f"/trials/{paused}/continue")
    life.finish()
    trial = life.server.trial(paused)
    assert (trial["state"], trial["steps_completed"]) == ("COMPLETED", 16)


@pytest.mark.needs_extension("continued_experiments")
@pytest.mark.parametrize("action", ["cancel", "kill"])
def test_trials_stopped_by_searcher_survive_cancel(action: str, begin: Any) -> None:
    life = begin("stopping")
    server = life.server
    first, second = [item.spec for item in server.work()]
    for spec, loss in ((first, 0.1), (second, 0.9)):
        server.post(f"/runs/{spec.run_id}/started", {})
        server.report(spec.run_id, validation(4, loss), checkpoint(4, str(spec.run_id)))
    assert server.directive(second.run_id) == "stop"
    server.act(action)
    life.finish()
    assert [trial["state"] for trial in server.trials()] == ["CANCELED", "COMPLETED"]
    life.continue_search()
    life.finish()
    assert server.trial(second.trial_id)["steps_completed"] == 4
    life.compare()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
@pytest.mark.parametrize("name", SEARCHERS)
def test_random_requests_are_journaled_and_search_ends(name: str, seed: int, begin: Any) -> None:
    rng = Random(f"{name} {seed}")
    life = begin(name)
    grown = [LONGER[name], MORE[name]]
    for _ in range(30):
        ended = life.state() in EXPERIMENT_ENDED
        trial = rng.choice(life.server.trials())["id"]
        actions: list[Any] = [life.run_one] * 6
        actions += [
            lambda: life.server.http.post(
                f"/api/v1/experiments/1/{rng.choice(['pause', 'activate', 'cancel', 'kill'])}"
            ),
            lambda trial=trial: life.server.http.post(
                f"/api/v1/trials/{trial}/{rng.choice(['cancel', 'kill', 'continue'])}"
            ),
            life.restart,
            lambda: life.server.tick(100),
        ]
        if ended and grown:
            actions = [lambda: life.server.http.post(
                "/api/v1/experiments/1/continue", json={"config": {"searcher": grown.pop(0)}}
            )]  # fmt: skip
        response = rng.choice(actions)()
        assert getattr(response, "status_code", 200) < 500, response.text
        life.compare()
    if life.state() == "PAUSED":
        life.server.act("activate")
    life.finish()
    life.compare()


@pytest.mark.needs_extension("continued_experiments")
def test_restart_keeps_pending_growth(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_effects(_services: Services) -> None:
        pass

    life = begin("stopping")
    life.finish()
    assert life.server.experiment()["num_trials"] == 4
    with monkeypatch.context() as interrupted:  # killed after the first part of the new trials
        interrupted.setattr(Services, "execute_operations", no_effects)
        interrupted.setattr("zeroserver.orchestrator.search.operation_service._BUDGET_MS", 0.05)
        life.continue_search(max_trials=16)
        assert life.server.services.orchestrator.searches.backlog
        life.end()
        life._running = serve(life.directory, clock=life.clock)
        interrupted.undo()
        life.server = life._running.__enter__()
    life.server.add_agent(slots=2)
    life.finish()
    experiment = life.server.experiment()
    assert (experiment["state"], experiment["num_trials"]) == ("COMPLETED", 16)
