"""Searches on servers that die at each event give the same result as without deaths.

The first server dies before the commit of an event, the next one after it, and a third one
continues. Each has only the database.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import PREFIX, Clock, Server, checkpoint, serve, validation
from zerolab.contract.messages import Record
from zerolab.contract.spec import EXIT_REACHED, RunSpec
from zerolab.searcher import Operation
from zeroserver.orchestrator.search.search_service import SearchService

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
SEARCHERS: dict[str, dict[str, Any]] = {
    "async_halving": {  # stopping; the promoting variant is in tests/faults/test_server_deaths.py
        "name": "async_halving", "metric": "loss", "num_rungs": 3, "divisor": 2, "max_trials": 5,
        "max_concurrent_trials": 2, "max_time": 8, "time_metric": "batches",
    },
    "adaptive_asha": {
        "name": "adaptive_asha", "metric": "loss", "mode": "standard", "divisor": 2, "max_rungs": 3,
        "max_trials": 4, "max_concurrent_trials": 2, "max_time": 8, "time_metric": "batches",
    },
    "pbt": {
        "name": "pbt", "metric": "loss", "population_size": 3, "num_rounds": 2,
        "length_per_round": 5, "replace_function": {"truncate_fraction": 0.4},
        "max_concurrent_trials": 2,
    },
    "tpe_asha": {  # enough trials that the last are proposed by the model
        "name": "tpe_asha", "metric": "loss", "max_length": 3, "max_trials": 12,
        "max_concurrent_trials": 2,
    },
    "optuna": {
        "name": "optuna", "metric": "loss", "max_length": 3, "max_trials": 12,
        "sampler_args": {"n_startup_trials": 3}, "max_concurrent_trials": 2,
    },
    "custom": {"name": "custom", "metric": "loss", "max_length": 8},
}  # fmt: skip


class Lives:
    """Servers of one data directory, one after another."""

    def __init__(self, directory: Path, *, dies: bool) -> None:
        self._directory = directory
        self._dies = dies
        self._clock = Clock()
        self._numbers: dict[int, int] = {}
        self._running = ExitStack()
        self.deaths = 0
        self.server: Server
        self.begin()

    def begin(self) -> None:
        """Start the next server."""
        self._running.close()
        self.server = self._running.enter_context(serve(self._directory, clock=self._clock))

    def end(self) -> None:
        self._running.close()

    def do(self, ask: Callable[[], int]) -> None:
        """Send an idempotent request to one server after another."""
        if self._dies:
            with lost_events():
                status = ask()
            self.deaths += status == 500
            self.begin()
        assert ask() == 200
        if self._dies:
            self.begin()

    def report(self, spec: RunSpec, steps: int) -> None:
        """Report a validation and a checkpoint, in one batch."""
        first = self._numbers.get(spec.run_id, 0) + 1
        self._numbers[spec.run_id] = first + 1
        loss = (spec.trial_id * 7 % 5 + 1) / steps
        records: list[Record] = [validation(steps, loss), checkpoint(steps, str(spec.trial_id))]
        self.do(lambda: int(self.server.send(spec.run_id, first, records).status_code))

    def exit(self, spec: RunSpec, code: int) -> None:
        body = {"exit_code": code, "reason": None, "log_tail": ""}
        path = f"{PREFIX}/runs/{spec.run_id}/exited"
        self.do(lambda: int(self.server.http.post(path, json=body).status_code))


@contextmanager
def lost_events() -> Iterator[None]:
    """Let the transaction of every event fail just before its commit."""
    original = SearchService.add_event

    def add_and_fail(*arguments: Any) -> list[Operation]:
        original(*arguments)
        raise MemoryError("the server dies")

    SearchService.add_event = add_and_fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        SearchService.add_event = original  # type: ignore[method-assign]


def create(trial_id: int) -> dict[str, Any]:
    return {"kind": "create", "trial_id": trial_id, "hparams": {"lr": trial_id}}


def answer_events(lives: Lives) -> None:
    """Act as a custom search program: three trials, each stopped after two reports."""
    path = "/experiments/1/searcher"
    page = lives.server.get(f"{path}/events")
    handled = page["handled"]
    events = [event for event in page["events"] if event["id"] > handled]
    if page["over"] or (not events and handled >= 0):
        return
    batch = [create(1), create(2)] if handled < 0 else []
    for event in events:
        number = event["trial_id"]
        if event["kind"] == "validated" and number == 2:
            batch.append({"kind": "stop", "trial_id": 2})
        elif event["kind"] == "exited" and number == 2:
            batch.append(create(3))
        elif event["kind"] == "exited" and number == 3:
            batch.append({"kind": "shutdown"})
    body = {
        "after": handled,
        "handled": events[-1]["id"] if events else 0,
        "operations": batch,
        "progress": 0.5,
    }
    operations = f"{PREFIX}{path}/operations"
    lives.do(lambda: int(lives.server.http.post(operations, json=body).status_code))


def search(directory: Path, name: str, *, dies: bool) -> dict[str, Any]:
    """Run a search, one run after another; return its rows."""
    lives = Lives(directory, dies=dies)
    try:
        seed = {"experiment_seed": 7}
        lives.server.submit(hyperparameters=SPACE, searcher=SEARCHERS[name], reproducibility=seed)
        lives.server.add_agent(slots=2)
        for _ in range(60):
            if name == "custom":
                answer_events(lives)
            items = lives.server.work()
            if not items:
                break
            train(lives, lives.server.begin(items[0].spec.trial_id))
        rows = lives.server.sql(
            "SELECT hparams, seed, state, steps_completed, best_validation, restarts FROM trials "
            "ORDER BY id"
        )
        return {
            "experiment": lives.server.experiment()["state"],
            "best": lives.server.experiment()["best_trial_id"],
            "trials": rows,
            "runs": lives.server.sql("SELECT trial_id, exit_code FROM runs ORDER BY id"),
            "events": lives.server.sql(
                "SELECT kind, request_id, value, length, reason FROM searcher_events ORDER BY id"
            ),
            "deaths": lives.deaths,
        }
    finally:
        lives.end()


def train(lives: Lives, spec: RunSpec) -> None:
    """Train a run: validate at each rung and exit."""
    assert spec.fit is not None
    assert spec.fit.max_length is not None
    begin = spec.latest_checkpoint.steps_completed if spec.latest_checkpoint else 0
    bound = spec.fit.until or spec.fit.max_length.count
    for steps in sorted({*spec.fit.validate_at, bound}):
        if begin < steps <= bound:
            lives.report(spec, steps)
            if lives.server.directive(spec.run_id) == "stop":
                break
    lives.exit(spec, EXIT_REACHED if spec.fit.until else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHERS)
def test_search_is_equal_after_death_at_any_event(tmp_path: Path, name: str) -> None:
    if name == "optuna":
        pytest.importorskip("optuna")
    plain = search(tmp_path / "plain", name, dies=False)
    assert plain["experiment"] == "COMPLETED"
    assert len(plain["trials"]) >= 3
    disturbed = search(tmp_path / "disturbed", name, dies=True)
    assert disturbed.pop("deaths") >= len(plain["runs"]) > plain.pop("deaths")
    assert disturbed == plain
