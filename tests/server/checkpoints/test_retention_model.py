"""Random test of checkpoint retention: required checkpoints are never removed."""

import random
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, validation
from zerolab.contract.spec import EXIT_PREEMPTED

GRID: dict[str, Any] = {
    "hyperparameters": {
        "deepspeed_config": "ds_config.json",
        "n": {"type": "categorical", "vals": [1, 2, 3]},
    },
    "searcher": {"name": "grid", "metric": "loss", "max_length": 1000},
}
KEYS = ("save_experiment_best", "save_trial_best", "save_trial_latest")
ENDED = {"COMPLETED", "CANCELED", "ERROR"}


class Model:
    """Model of the documented retention rules, with one experiment of three trials."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.chance = random.Random(seed)
        self.saved: dict[str, tuple[int, int, float]] = {}  # uuid to trial, steps, loss
        self.registered: list[str] = []
        self.sources: dict[int, str] = {}  # experiment to the checkpoint that it begins with
        self.root = server.services.orchestrator.home.checkpoints
        server.submit(checkpoint_storage=dict.fromkeys(KEYS, 2), **GRID)
        server.add_agent(slots=3)

    # -- actions ---------------------------------------------------------------------------------

    def save(self) -> None:
        items = [item for item in self.server.work() if item.spec.experiment_id == 1]
        if not items:
            return
        item = self.chance.choice(items)
        trial_id = item.spec.trial_id
        saved_steps = [steps for trial, steps, _ in self.saved.values() if trial == trial_id]
        steps, loss = max(saved_steps, default=0) + 1, self.chance.random()
        record = checkpoint(steps, f"trial {trial_id}")
        (self.root / record.uuid).mkdir()
        self.server.report(item.run_id, validation(steps, loss), record)
        self.saved[record.uuid] = (trial_id, steps, loss)

    def pause_or_activate(self) -> None:
        trial_id = self.chance.choice([1, 2, 3])
        action = self.chance.choice(["pause", "activate"])
        if self.server.http.post(f"/api/v1/trials/{trial_id}/{action}").is_success:
            for item in self.server.work():
                if item.spec.trial_id == trial_id and action == "pause":
                    self.server.exit(item.run_id, EXIT_PREEMPTED)

    def end(self) -> None:
        items = [item for item in self.server.work() if item.spec.experiment_id == 1]
        if len(items) > 1:  # one of them trains to the end of the test
            self.server.exit(self.chance.choice(items).run_id, 0)

    def register(self) -> None:
        available = sorted(self.available())
        if available and len(self.registered) < 2:
            self.server.http.post("/api/v1/models", json={"name": "m"})
            chosen = self.chance.choice(available)
            self.server.post("/models/m/versions", {"checkpoint": chosen})
            self.registered.append(chosen)

    def fork(self) -> None:
        available = sorted(self.available())
        if available and not self.sources:
            chosen = self.chance.choice(available)
            searcher = {**GRID["searcher"], "name": "single", "source_checkpoint_uuid": chosen}
            fork = self.server.submit(activate=False, searcher=searcher)
            self.sources[fork["id"]] = chosen
        elif self.sources:
            self.server.act("kill", self.sources.popitem()[0])

    def remove(self) -> None:
        if not self.saved:
            return
        chosen = self.chance.sample(sorted(self.saved), min(2, len(self.saved)))
        full = self.chance.random() < 0.7
        body = {"uuids": chosen} if full else {"uuids": chosen, "globs": ["*"]}
        before = self.available()
        response = self.server.http.post("/api/v1/checkpoints/remove", json=body)
        if self.needed() & set(chosen) & before:
            assert response.status_code == 409, response.text
            assert self.available() == before
        else:
            assert response.is_success, response.text
            assert not self.available() & set(chosen)

    def collect(self) -> None:
        policy = {key: self.chance.choice([0, 0, 1, 2]) for key in KEYS}
        before, needed = self.available(), self.needed()
        plan = self.server.post("/experiments/1/gc", policy | {"dry_run": True})
        assert self.available() == before
        done = self.server.post("/experiments/1/gc", policy)
        assert done["checkpoints"] == plan["checkpoints"]
        assert done["size_bytes"] == plan["size_bytes"] == 10 * len(plan["checkpoints"])
        assert self.available() == needed | self.retained(before, **policy)
        assert self.server.post("/experiments/1/gc", policy)["checkpoints"] == []

    # -- expected state --------------------------------------------------------------------------

    def available(self) -> set[str]:
        """Return the uuids of complete checkpoints."""
        page = self.server.get("/experiments/1/checkpoints", state="COMPLETED", limit=1000)
        return {row["uuid"] for row in page["checkpoints"]}

    def needed(self) -> set[str]:
        uuids = {*self.registered, *self.sources.values()}
        available = self.available()
        for trial in self.server.trials():
            candidates = [(s, uuid) for uuid, (t, s, _) in self.saved.items() if t == trial["id"]]
            candidates = [candidate for candidate in candidates if candidate[1] in available]
            if trial["state"] not in ENDED and candidates:
                uuids.add(max(candidates)[1])
        return uuids

    def retained(
        self, available: set[str], save_experiment_best: int, save_trial_best: int,
        save_trial_latest: int,
    ) -> set[str]:  # fmt: skip
        """Return the checkpoints that a policy keeps, by the documented rules."""
        by_loss = sorted(available, key=lambda uuid: self.saved[uuid][2])
        uuids = set(by_loss[:save_experiment_best])
        for trial_id in (1, 2, 3):
            of_trial = [uuid for uuid in by_loss if self.saved[uuid][0] == trial_id]
            newest = sorted(of_trial, key=lambda uuid: -self.saved[uuid][1])
            uuids.update(of_trial[:save_trial_best], newest[:save_trial_latest])
        return uuids


@pytest.mark.needs_extension("checkpoint_removal")
def test_required_checkpoints_are_never_removed(server: Server) -> None:
    model = Model(server, 2)
    steps = [model.save] * 6 + [model.pause_or_activate] * 2 + [model.collect] * 2
    steps += [model.end, model.register, model.fork, model.remove]
    for _ in range(50):
        needed = model.needed()
        model.chance.choice(steps)()
        removed = needed - model.available()
        assert not removed & model.needed(), "what is still needed was removed"
        assert not removed & set(model.registered)
    model.collect()
    page = server.get("/experiments/1/checkpoints", state="COMPLETED")
    assert page["size_bytes"] >= 10 * len(model.available())
    response = server.http.delete("/api/v1/experiments/1")
    assert response.status_code == 409  # a trial of it trains, or one is registered
    marked = model.available() | {
        uuid for (uuid,) in server.sql("SELECT uuid FROM checkpoints WHERE state = 'PARTIAL'")
    }
    server.services.orchestrator.janitor.close()  # waits for pending removals
    assert {path.name for path in model.root.iterdir()} == marked
