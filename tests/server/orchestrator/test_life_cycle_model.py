"""Whatever users ask for, runs do and machines suffer, in any order: what must hold, holds.

What a step should come to is written down again here, from the documents.
"""

import json
import random
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.server.helpers import Server, checkpoint, serve, validation
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_INVALID_HP, EXIT_PREEMPTED

ENDED = {"COMPLETED", "CANCELED", "ERROR"}
OPEN = {"ACTIVE", "PAUSED"}
LENGTH = 20
CONCURRENT = 2

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "double", "minval": 0, "maxval": 1},
}

# Written down again, by hand, from the documents: not the server's own table.
EXPERIMENT_ALLOWED: Mapping[str, set[str]] = {
    "pause": OPEN,
    "activate": OPEN,
    "archive": ENDED,
    "continue": ENDED | {"ACTIVE"},
}
TRIAL_ALLOWED: Mapping[str, set[str]] = {
    "pause": {"QUEUED", "RUNNING", "PAUSED"},
    "activate": {"QUEUED", "RUNNING", "PAUSED"},
    "continue": {"QUEUED", "RUNNING"} | ENDED,
    "archive": ENDED,
}
"""Actions to the states in which they may pass; those that are not here pass in every state."""

_HALVING = {
    "name": "async_halving", "num_rungs": 3, "divisor": 2, "max_length": LENGTH, "max_trials": 5,
}  # fmt: skip
COMPARING: Mapping[str, dict[str, Any]] = {
    "stopping": _HALVING | {"stop_once": True},
    "promoting": _HALVING | {"stop_once": False},
    "tpe_asha": {"name": "tpe_asha", "max_length": LENGTH, "max_trials": 5},
    "pbt": {
        "name": "pbt", "population_size": 3, "num_rounds": 2, "length_per_round": 10,
        "replace_function": {"truncate_fraction": 0.4},
    },
}  # fmt: skip
"""Searchers that compare trials, and decide by that which go on."""

MAX_RESTARTS = 1
EXITS = [0, 0, 1, EXIT_PREEMPTED, EXIT_PREEMPTED, EXIT_INVALID_HP, EXIT_INFRASTRUCTURE]


class LifeCycle(RuleBasedStateMachine):
    """One server, two machines with two slots each, up to three experiments."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = ExitStack()
        self.directory = Path(self.closing.enter_context(tempfile.TemporaryDirectory()))
        self.running = self.closing.enter_context(ExitStack())
        self.server: Server = self.running.enter_context(serve(self.directory))
        self.sent: dict[int, int] = {}
        self.ended: dict[int, str] = {}  # trial to the state in which it ended
        self.asked_to_go_on: set[int] = set()  # trials that a user let go on since the last look
        self.experiments = 0
        self.wanted: dict[int, int] = {}  # experiment to its max_trials
        self.invalid: dict[int, int] = {}  # experiment to trials with impossible hyperparameters
        self.stopped: set[int] = set()  # experiments that a user has ended
        self.meddled: set[int] = set()  # experiments that went on after an end
        self.saved: dict[int, int] = {}  # trial to the length of its newest checkpoint
        self.comparing: set[int] = set()  # experiments whose searcher decides how far trials go
        self.thinned: set[int] = set()  # experiments of which a trial was deleted

    def teardown(self) -> None:
        self.closing.close()

    @initialize()
    def machines(self) -> None:
        for name in ("one", "two"):
            self.server.add_agent(slots=2, name=name)

    # -- users ---------------------------------------------------------------------------------

    @precondition(lambda self: self.experiments < 3)
    @rule(slots=st.sampled_from([1, 1, 2]), activate=st.booleans(), trials=st.integers(1, 4))
    def submit(self, slots: int, activate: bool, trials: int) -> None:
        searcher = {"name": "random", "max_length": LENGTH, "max_trials": trials}
        self.search(searcher, slots, activate=activate)
        self.wanted[self.experiments] = trials

    def search(self, searcher: dict[str, Any], slots: int, *, activate: bool) -> None:
        """Submit an experiment with a searcher."""
        searcher |= {"metric": "loss", "max_concurrent_trials": CONCURRENT}
        self.server.submit(
            activate=activate, hyperparameters=SPACE, searcher=searcher,
            max_restarts=MAX_RESTARTS,
            resources={"slots_per_trial": slots}, reproducibility={"experiment_seed": 1},
        )  # fmt: skip
        self.experiments += 1

    @precondition(lambda self: self.experiments)
    @rule(
        pick=st.integers(0, 99),
        action=st.sampled_from(
            ["pause", "pause", "activate", "activate", "cancel", "kill", "archive", "unarchive"]
        ),
    )
    def act_on_experiment(self, pick: int, action: str) -> None:
        number = 1 + pick % self.experiments
        before = self.server.experiment(number)
        path = f"/api/v1/experiments/{number}/{action}"
        if action in {"cancel", "kill"} and before["state"] not in ENDED:
            self.stopped.add(number)
        self._ask(path, "experiment", before, EXPERIMENT_ALLOWED.get(action))

    @precondition(lambda self: self.experiments)
    @rule(pick=st.integers(0, 99), longer=st.booleans(), activate=st.booleans())
    def continue_experiment(self, pick: int, longer: bool, activate: bool) -> None:
        number = 1 + pick % self.experiments
        before = self.server.experiment(number)
        changes = {}
        if longer:
            length = before["config"]["searcher"]["max_length"]["batches"] + LENGTH
            changes = {"searcher": {"max_length": length}}
        body = {"config": changes, "activate": activate}
        path = f"/api/v1/experiments/{number}/continue"
        self.asked_to_go_on |= {trial["id"] for trial in self.server.trials(number)}
        self._goes_on(number)
        self._ask(path, "experiment", before, EXPERIMENT_ALLOWED["continue"], body, may_refuse=True)

    @precondition(lambda self: self.experiments)
    @rule(
        pick=st.integers(0, 99),
        action=st.sampled_from(
            ["pause", "activate", "activate", "cancel", "kill", "continue", "archive", "unarchive"]
        ),
    )
    def act_on_trial(self, pick: int, action: str) -> None:
        ids = [row[0] for row in self.server.sql("SELECT id FROM trials ORDER BY id")]
        if not ids:  # all were deleted
            return
        before = self.server.trial(ids[pick % len(ids)])
        path = f"/api/v1/trials/{before['id']}/{action}"
        if action == "continue":
            self.asked_to_go_on.add(before["id"])
            self._goes_on(before["experiment_id"])
            if before["state"] in ENDED:  # one more than the search would have at a time
                self.meddled.add(before["experiment_id"])
        may_refuse = action in {"activate", "continue"}  # by more than the state
        self._ask(path, "trial", before, TRIAL_ALLOWED.get(action), may_refuse=may_refuse)

    @precondition(lambda self: self.experiments)
    @rule(pick=st.integers(0, 99))
    def delete_trial(self, pick: int) -> None:
        ids = [row[0] for row in self.server.sql("SELECT id FROM trials ORDER BY id")]
        if not ids:
            return
        trial = self.server.trial(ids[pick % len(ids)])
        number, home = trial["id"], trial["experiment_id"]
        may_go = trial["state"] in ENDED and self.server.experiment(home)["state"] in ENDED
        answer = self.server.http.delete(f"/api/v1/trials/{number}")
        assert answer.status_code == (204 if may_go else 409), answer.text
        if not may_go:
            message = answer.json()["error"]["message"]
            assert message.startswith(f"trial {number}: ")
            assert any(word in message for word in ("`zerolab ", "wait until")), message
            assert self.server.trial(number) == trial
            return
        assert self.server.http.delete(f"/api/v1/trials/{number}").status_code == 404
        self.thinned.add(home)
        self.meddled.add(home)
        for table in ("runs", "points", "logs", "checkpoints"):
            assert not self.server.sql(f"SELECT 1 FROM {table} WHERE trial_id = {number}"), table

    def _ask(
        self,
        path: str,
        kind: str,
        before: dict[str, Any],
        allowed: set[str] | None,
        body: Any = None,
        *,
        may_refuse: bool = False,
    ) -> None:
        """Ask twice: a refusal changes nothing and says what to do, a repetition neither."""
        answer = self.server.http.post(path, json=body or {})
        passes = allowed is None or before["state"] in allowed
        assert answer.status_code in ({200, 409} if may_refuse and passes else {
            200 if passes else 409
        }), answer.text  # fmt: skip
        resource = f"/{kind}s/{before['id']}"
        found = self.server.get(resource)[kind]
        if answer.status_code == 409:
            message = answer.json()["error"]["message"]
            of_its_trials = kind == "experiment" and message.startswith("trial ")
            assert of_its_trials or message.startswith(f"{kind} {before['id']}: ")
            assert any(word in message for word in ("`zerolab ", "wait until", "fork")), message
            assert found == before
            return
        again = self.server.http.post(path, json=body or {})
        if may_refuse and again.status_code == 409:  # it has ended meanwhile, or waits
            assert "continue" in path or "waits for the searcher" in again.text
            return
        assert again.status_code == 200, again.text
        assert self.server.get(resource)[kind] == found

    def _goes_on(self, number: int) -> None:
        if self.server.experiment(number)["state"] in ENDED:
            self.stopped.discard(number)
            self.meddled.add(number)

    # -- runs and machines ---------------------------------------------------------------------

    def _pick_run(self, pick: int) -> tuple[int, int, str] | None:
        rows = self.server.sql(
            "SELECT id, trial_id, state FROM runs WHERE state <> 'EXITED' ORDER BY id"
        )
        return tuple(rows[pick % len(rows)]) if rows else None  # type: ignore[return-value]

    @rule(pick=st.integers(0, 99))
    def a_run_starts(self, pick: int) -> None:
        found = self._pick_run(pick)
        if found is not None:
            self.server.post(f"/runs/{found[0]}/started", {})

    @rule(pick=st.integers(0, 99), validates=st.booleans(), saves=st.booleans())
    def a_run_reports(self, pick: int, validates: bool, saves: bool) -> None:
        found = self._pick_run(pick)
        if found is None or found[2] == "ASSIGNED":
            return
        run_id, trial_id, _ = found
        steps = self.server.trial(trial_id)["steps_completed"] + 5
        records: list[Any] = [validation(steps, 1 / (steps + trial_id))] if validates else []
        if saves:
            records.append(checkpoint(steps, f"{trial_id} {run_id}"))
        first = self.sent.get(run_id, 0) + 1
        if records:
            assert self.server.send(run_id, first, records).is_success
            self.sent[run_id] = first + len(records) - 1
        if saves:
            self.saved[trial_id] = steps

    @rule(pick=st.integers(0, 99), code=st.sampled_from(EXITS), twice=st.booleans())
    def a_run_ends(self, pick: int, code: int, twice: bool) -> None:
        found = self._pick_run(pick)
        if found is None:
            return
        expected = self._what_follows(*found[:2], code)
        for _ in range(1 + twice):
            self.server.exit(found[0], code, "so chance has it")
        ((state, restarts, delayed, home),) = self.server.sql(
            "SELECT state, restarts, restart_at IS NOT NULL, experiment_id FROM trials "
            f"WHERE id = {found[1]}"
        )
        if home not in self.comparing:  # else the searcher may have decided meanwhile
            assert (state, restarts, bool(delayed)) == expected

    def _what_follows(self, run_id: int, trial_id: int, code: int) -> tuple[str, int, bool]:
        """What a trial comes to when its run ends so: state, restarts, whether it must wait."""
        ((stop, held, restarts, number, state, directive, killed),) = self.server.sql(
            "SELECT t.stop, t.held, t.restarts, e.id, e.state, r.directive, r.killed FROM trials t "
            f"JOIN experiments e ON e.id = t.experiment_id JOIN runs r ON r.id = {run_id} "
            f"WHERE t.id = {trial_id}"
        )
        rests = "QUEUED" if state == "ACTIVE" and not held else "PAUSED"
        if stop is not None:
            return "CANCELED", restarts, False
        if code == EXIT_PREEMPTED or (killed and directive == "preempt" and code != 0):
            return rests, restarts, False
        if code == EXIT_INVALID_HP:
            self.invalid[number] = self.invalid.get(number, 0) + 1
        if code in {0, EXIT_INVALID_HP}:
            return "COMPLETED", restarts, False
        if code == EXIT_INFRASTRUCTURE:
            return rests, restarts, True
        if restarts < MAX_RESTARTS and (restarts or self._has_reported(trial_id)):
            return rests, restarts + 1, True
        return "ERROR", restarts, False

    def _has_reported(self, trial_id: int) -> bool:
        """Whether a trial has a checkpoint or a metric: without them an error is final."""
        ((checkpoint, points),) = self.server.sql(
            "SELECT latest_checkpoint IS NOT NULL, "
            "(SELECT count(*) FROM points p JOIN metric_keys k ON k.id = p.key_id "
            "WHERE p.trial_id = trials.id AND k.group_name <> 'system') "
            f"FROM trials WHERE id = {trial_id}"
        )
        return bool(checkpoint or points)

    @rule(agent=st.sampled_from([1, 2]))
    def a_machine_dies(self, agent: int) -> None:
        self.server.services.orchestrator.seen[agent] = -1e9
        self.server.tick(2)

    @rule(agent=st.sampled_from([1, 2]))
    def a_machine_asks_for_work(self, agent: int) -> None:
        self.server.work(agent)

    @rule(seconds=st.sampled_from([0, 2, 100, 4000]))
    def time_passes(self, seconds: int) -> None:
        for agent in (1, 2):
            self.server.work(agent)
        self.server.tick(seconds)

    @rule()
    def the_server_begins_anew(self) -> None:
        clock = self.server.clock
        self.running.close()
        self.server = self.running.enter_context(serve(self.directory, clock=clock))

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def no_slot_is_used_twice_and_each_run_is_its_trials(self) -> None:
        rows = self.server.sql(
            "SELECT r.id, r.agent_id, r.slot_ids, t.run_id, t.state, a.alive FROM runs r "
            "JOIN trials t ON t.id = r.trial_id JOIN agents a ON a.id = r.agent_id "
            "WHERE r.state <> 'EXITED'"
        )
        slots = [(agent, slot) for _, agent, text, *_ in rows for slot in json.loads(text)]
        assert len(slots) == len(set(slots))
        for run_id, _, _, of_trial, state, alive in rows:
            assert of_trial == run_id
            assert state in {"QUEUED", "RUNNING", "STOPPING"}
            assert alive, "a run holds slots of a machine that is gone"

    @invariant()
    def each_run_is_told_what_its_user_wants(self) -> None:
        rows = self.server.sql(
            "SELECT r.directive, r.killed, r.deadline_at, t.stop, t.held, e.state FROM runs r "
            "JOIN trials t ON t.id = r.trial_id JOIN experiments e ON e.id = r.experiment_id "
            "WHERE r.state <> 'EXITED'"
        )
        for directive, killed, deadline, stop, held, state in rows:
            if stop in {"kill", "error"}:
                assert killed
            elif stop is not None:
                assert directive == "stop"
            elif state == "PAUSED" or held:
                assert directive == "preempt"
            else:
                assert directive in {"train", "preempt"}  # a pause may have been taken back
                assert state == "ACTIVE"
            if directive == "train" and stop is None:
                assert not killed
            if deadline is not None:
                assert killed or deadline >= self.server.clock.now

    @invariant()
    def counts_are_those_of_the_trials(self) -> None:
        rows = self.server.sql(
            "SELECT e.failed_trials, e.canceled_trials, count(CASE t.state WHEN 'ERROR' THEN 1 "
            "END), count(CASE t.state WHEN 'CANCELED' THEN 1 END) FROM experiments e "
            "LEFT JOIN trials t ON t.experiment_id = e.id GROUP BY e.id"
        )
        for *stored, failed, canceled in rows:
            assert stored == [failed, canceled]

    @invariant()
    def each_run_begins_where_its_trial_saved_last(self) -> None:
        rows = self.server.sql("SELECT trial_id, spec FROM runs WHERE state = 'ASSIGNED'")
        for trial_id, text in rows:
            begins = json.loads(text)["latest_checkpoint"]
            if begins is not None and begins.get("warm_start"):
                begins = None  # of another trial
            assert (begins or {}).get("steps_completed") == self.saved.get(trial_id)

    @invariant()
    def what_has_ended_stays_so_unless_it_is_continued(self) -> None:
        trials = self.server.sql("SELECT id, state, run_id, ended_at, stop FROM trials")
        for trial_id, state, run_id, ended_at, stop in trials:
            if trial_id in self.ended and trial_id not in self.asked_to_go_on:
                assert state == self.ended[trial_id]
            assert (state in ENDED) == (ended_at is not None)
            if state in ENDED:
                assert run_id is None
                self.ended[trial_id] = state
            else:
                self.ended.pop(trial_id, None)
                assert (stop is not None) == (state == "STOPPING")
        self.asked_to_go_on.clear()

    @invariant()
    def an_experiment_stands_where_its_trials_do(self) -> None:
        for number, state, done in self.server.sql(
            "SELECT id, state, searcher_done FROM experiments"
        ):
            mine = self.server.sql(
                f"SELECT state, run_id, held, waits FROM trials WHERE experiment_id = {number}"
            )
            states = [row[0] for row in mine]
            open_trials = [row for row in mine if row[0] not in ENDED]
            if state in ENDED:
                assert not open_trials
                if number not in self.thinned:
                    assert state == self._end_of(number, {row[0] for row in mine})
                if number not in self.stopped | self.meddled | self.comparing:
                    again = min(self.invalid.get(number, 0), self.wanted[number])
                    assert len(mine) == self.wanted[number] + again
            else:
                assert open_trials, "nothing of it will ever happen"
                assert state in OPEN or number in self.stopped
            if number in self.comparing:
                assert sum(row[1] is not None for row in mine) <= CONCURRENT
            elif state == "ACTIVE" and number not in self.meddled:
                assert len(open_trials) <= CONCURRENT
                assert len(open_trials) == CONCURRENT or done or len(mine) >= self.wanted[number]
            for trial_state, run_id, held, waits in open_trials:
                if run_id is None:
                    queued = state == "ACTIVE" and not held and not waits
                    assert trial_state == ("QUEUED" if queued else "PAUSED"), (state, states)
            if state not in OPEN:
                assert "QUEUED" not in [row[0] for row in mine if row[1] is None]

    def _end_of(self, number: int, states: set[str]) -> str:
        """How an experiment ends whose trials have ended so."""
        if number in self.stopped or states == {"CANCELED"}:
            return "CANCELED"
        return "ERROR" if states == {"ERROR"} else "COMPLETED"

    @invariant()
    def nothing_waits_while_a_slot_is_free_for_it(self) -> None:
        self.server.tick()
        ((free,),) = self.server.sql(
            "SELECT (SELECT 2 * count(*) FROM agents WHERE alive = 1) "
            "- coalesce((SELECT sum(json_array_length(slot_ids)) FROM runs r "
            "JOIN agents a ON a.id = r.agent_id AND a.alive = 1 WHERE r.state <> 'EXITED'), 0)"
        )
        waiting = self.server.sql(
            "SELECT t.id FROM trials t JOIN experiments e ON e.id = t.experiment_id "
            "WHERE t.state = 'QUEUED' AND t.run_id IS NULL AND e.slots = 1 "
            "AND (t.source_trial_id IS NULL OR t.source_checkpoint IS NOT NULL) "
            "AND (SELECT count(*) FROM trials o WHERE o.experiment_id = e.id "
            f"AND o.run_id IS NOT NULL) < {CONCURRENT} "
            f"AND (t.restart_at IS NULL OR t.restart_at <= {self.server.clock.now})"
        )
        bigger = self.server.sql(
            "SELECT t.id FROM trials t JOIN experiments e ON e.id = t.experiment_id "
            "WHERE t.state = 'QUEUED' AND t.run_id IS NULL AND e.slots = 2"
        )
        if not bigger:  # for which slots may be kept free
            assert free <= 0 or not waiting, (free, waiting)


LifeCycle.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,  # the same lives in every run
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLifeCycle = pytest.mark.slow(LifeCycle.TestCase)


@pytest.mark.slow
@pytest.mark.parametrize("searchers", [[], ["stopping", "pbt"], ["promoting", "tpe_asha"]])
def test_invariants_hold_in_long_random_walk(searchers: list[str]) -> None:
    """Long walks, for what shows only after hundreds of events, and with searchers that compare."""
    chance = random.Random(5)
    walk = LifeCycle()
    try:
        walk.machines()
        for _ in range(120 if searchers else 300):
            pick = chance.randrange(100)
            step = chance.randrange(10 if searchers else 9)
            if step in {0, 1} and walk.experiments < len(searchers):
                walk.comparing.add(walk.experiments + 1)
                walk.search({**COMPARING[searchers[walk.experiments]]}, 1, activate=True)
            elif step == 0 and walk.experiments < 3:
                walk.submit(chance.choice([1, 2]), chance.random() < 0.8, 4)
            elif walk.experiments == 0:
                continue
            elif step == 1:
                walk.act_on_experiment(pick, chance.choice(["pause", "activate", "activate"]))
            elif step == 2:
                walk.act_on_trial(pick, chance.choice(["pause", "activate", "continue", "cancel"]))
            elif step == 3:
                walk.continue_experiment(pick, not searchers and chance.random() < 0.5, True)
            elif step in {4, 5}:
                walk.a_run_starts(pick)
                walk.a_run_reports(pick, chance.random() < 0.5, chance.random() < 0.5)
            elif step == 6:
                walk.a_run_ends(pick, chance.choice(EXITS), chance.random() < 0.2)
            elif step == 7:
                walk.time_passes(chance.choice([0, 2, 100]))
            elif step == 9:
                walk.delete_trial(pick)
            else:
                walk.a_machine_dies(chance.choice([1, 2]))
            walk.no_slot_is_used_twice_and_each_run_is_its_trials()
            walk.what_has_ended_stays_so_unless_it_is_continued()
            walk.an_experiment_stands_where_its_trials_do()
            walk.each_run_is_told_what_its_user_wants()
            walk.each_run_begins_where_its_trial_saved_last()
            walk.nothing_waits_while_a_slot_is_free_for_it()
    finally:
        walk.teardown()
