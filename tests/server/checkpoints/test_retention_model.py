"""Whatever is saved, registered, forked, removed and collected: what something needs stays."""

import random
from typing import Any

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
    """One experiment of three trials, and what the documents say of its checkpoints."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.chance = random.Random(seed)
        self.saved: dict[str, tuple[int, int, float]] = {}  # uuid to trial, steps, loss
        self.registered: list[str] = []
        self.sources: dict[int, str] = {}  # experiment to the checkpoint that it begins with
        self.root = server.services.orchestrator.home.checkpoints
        server.submit(checkpoint_storage=dict.fromkeys(KEYS, 2), **GRID)
        server.add_agent(slots=3)

    # -- what happens ----------------------------------------------------------------------------

    def save(self) -> None:
        items = [item for item in self.server.work() if item.spec.experiment_id == 1]
        if not items:
            return
        item = self.chance.choice(items)
        trial_id = item.spec.trial_id
        mine = [steps for trial, steps, _ in self.saved.values() if trial == trial_id]
        steps, loss = max(mine, default=0) + 1, self.chance.random()
        made = checkpoint(steps, f"trial {trial_id}")
        (self.root / made.uuid).mkdir()
        self.server.report(item.run_id, validation(steps, loss), made)
        self.saved[made.uuid] = (trial_id, steps, loss)

    def pause_or_go_on(self) -> None:
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
        there = sorted(self.there())
        if there and len(self.registered) < 2:
            self.server.http.post("/api/v1/models", json={"name": "m"})
            chosen = self.chance.choice(there)
            self.server.post("/models/m/versions", {"checkpoint": chosen})
            self.registered.append(chosen)

    def fork(self) -> None:
        there = sorted(self.there())
        if there and not self.sources:
            chosen = self.chance.choice(there)
            searcher = {**GRID["searcher"], "name": "single", "source_checkpoint_uuid": chosen}
            made = self.server.submit(activate=False, searcher=searcher)
            self.sources[made["id"]] = chosen
        elif self.sources:
            self.server.act("kill", self.sources.popitem()[0])

    def remove(self) -> None:
        if not self.saved:
            return
        chosen = self.chance.sample(sorted(self.saved), min(2, len(self.saved)))
        whole = self.chance.random() < 0.7
        body = {"uuids": chosen} if whole else {"uuids": chosen, "globs": ["*"]}
        before = self.there()
        answer = self.server.http.post("/api/v1/checkpoints/remove", json=body)
        if self.needed() & set(chosen) & before:
            assert answer.status_code == 409, answer.text
            assert self.there() == before
        else:
            assert answer.is_success, answer.text
            assert not self.there() & set(chosen)

    def collect(self) -> None:
        policy = {key: self.chance.choice([0, 0, 1, 2]) for key in KEYS}
        before, needed = self.there(), self.needed()
        plan = self.server.post("/experiments/1/gc", policy | {"dry_run": True})
        assert self.there() == before
        done = self.server.post("/experiments/1/gc", policy)
        assert done["checkpoints"] == plan["checkpoints"]
        assert done["size_bytes"] == plan["size_bytes"] == 10 * len(plan["checkpoints"])
        assert self.there() == needed | self.kept(before, **policy)
        assert self.server.post("/experiments/1/gc", policy)["checkpoints"] == []

    # -- what must hold --------------------------------------------------------------------------

    def there(self) -> set[str]:
        """What can be gone on from."""
        page = self.server.get("/experiments/1/checkpoints", state="COMPLETED", limit=1000)
        return {each["uuid"] for each in page["checkpoints"]}

    def needed(self) -> set[str]:
        found = {*self.registered, *self.sources.values()}
        there = self.there()
        for trial in self.server.trials():
            mine = [(s, uuid) for uuid, (t, s, _) in self.saved.items() if t == trial["id"]]
            mine = [each for each in mine if each[1] in there]
            if trial["state"] not in ENDED and mine:
                found.add(max(mine)[1])
        return found

    def kept(
        self, there: set[str], save_experiment_best: int, save_trial_best: int,
        save_trial_latest: int,
    ) -> set[str]:  # fmt: skip
        """What a policy keeps of those that are there, by the words of the documents."""
        by_loss = sorted(there, key=lambda uuid: self.saved[uuid][2])
        found = set(by_loss[:save_experiment_best])
        for trial_id in (1, 2, 3):
            mine = [uuid for uuid in by_loss if self.saved[uuid][0] == trial_id]
            newest = sorted(mine, key=lambda uuid: -self.saved[uuid][1])
            found.update(mine[:save_trial_best], newest[:save_trial_latest])
        return found


def test_required_checkpoints_are_never_removed(server: Server) -> None:
    model = Model(server, 2)
    steps = [model.save] * 6 + [model.pause_or_go_on] * 2 + [model.collect] * 2
    steps += [model.end, model.register, model.fork, model.remove]
    for _ in range(50):
        needed = model.needed()
        model.chance.choice(steps)()
        gone = needed - model.there()
        assert not gone & model.needed(), "what is still needed was removed"
        assert not gone & set(model.registered)
    model.collect()
    page = server.get("/experiments/1/checkpoints", state="COMPLETED")
    assert page["size_bytes"] >= 10 * len(model.there())
    answer = server.http.delete("/api/v1/experiments/1")
    assert answer.status_code == 409  # a trial of it trains, or one is registered
    marked = model.there() | {
        uuid for (uuid,) in server.sql("SELECT uuid FROM checkpoints WHERE state = 'PARTIAL'")
    }
    server.services.orchestrator.janitor.close()  # which ends what it has begun
    assert {path.name for path in model.root.iterdir()} == marked
