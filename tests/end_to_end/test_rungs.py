"""A promoting search on real images: trials pause at rungs and go on from their checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.installation import Installation

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "asha_search"


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with Installation.running(tmp_path / "home", slots=2) as made:
        yield made


@pytest.mark.processes
def test_the_best_trials_go_on_from_where_they_paused(
    installation: Installation, tmp_path: Path
) -> None:
    content = yaml.safe_load((EXAMPLE / "smoke.yaml").read_text())
    content["searcher"] |= {"max_trials": 9, "num_rungs": 3, "max_length": {"batches": 18}}
    content["scheduling_unit"] = 1
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model_def.py", "ds_config.json"):
        (folder / name).write_text((EXAMPLE / name).read_text())
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    experiment_id = int(installation.cli("submit", folder / "experiment.yaml").stdout)
    ended = installation.wait_for(experiment_id)
    assert ended["state"] == "COMPLETED", installation.lines(experiment_id)[-30:]

    state = installation.client.searcher(experiment_id)
    (bracket,) = state["brackets"]
    assert [rung["length"] for rung in bracket["rungs"]] == [2, 6, 18]
    low, middle, top = (
        [entry["trial_id"] for entry in rung["entries"]] for rung in bracket["rungs"]
    )
    assert len(low) == 9
    assert len(middle) >= 3
    assert len(top) >= 1
    assert set(top) < set(middle) < set(low)

    log = installation.lines(experiment_id)
    for trial in installation.client.trials(experiment_id):
        trial_id = trial["id"]
        length = 18 if trial_id in top else 6 if trial_id in middle else 2
        assert trial["state"] == "COMPLETED"
        assert trial["steps_completed"] == length
        validations = points(installation, trial_id, "validation_loss")
        assert [step for step, _ in validations] == [at for at in (2, 6, 18) if at <= length]
    check_curves(installation, experiment_id)
    for at, further, those in ((2, 6, middle), (6, 18, top)):
        again = sum(f"resumed after batch {at}" in line for line in log)
        at_once = sum(f"extended the run to batch {further}" in line for line in log)
        assert again + at_once == len(those)

    content["searcher"]["max_trials"] = 1  # nobody else wants its slots: it need never leave
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    alone = int(installation.cli("submit", folder / "experiment.yaml").stdout)
    assert installation.wait_for(alone)["state"] == "COMPLETED"
    log = installation.lines(alone)
    at_once = sum("extended the run to batch" in line for line in log)
    again = sum("resumed after batch" in line for line in log)
    assert (at_once > 0, at_once + again) == (True, 2), log[-30:]  # one asks for so long only
    (trial,) = installation.client.trials(alone)
    assert trial["steps_completed"] == 18

    # More of it, as a user asks for it: another trial, and a rung above.
    more = ("--set", "searcher.max_trials=2", "--set", "searcher.max_length.batches=54")
    told = installation.quick("experiment", "continue", str(alone), *more)
    assert f"experiment {alone} goes on" in told.stderr
    assert installation.wait_for(alone)["state"] == "COMPLETED", installation.lines(alone)[-30:]
    (bracket,) = installation.client.searcher(alone)["brackets"]
    assert [rung["length"] for rung in bracket["rungs"]] == [2, 6, 18, 54]
    ended = installation.client.trials(alone)
    assert [trial["state"] for trial in ended] == ["COMPLETED"] * 2
    assert max(trial["steps_completed"] for trial in ended) == 54
    check_curves(installation, alone)

    # The same class as a population, whose copies begin with weights of others.
    content["searcher"] = {
        "name": "pbt", "metric": content["searcher"]["metric"], "population_size": 3,
        "num_rounds": 2, "length_per_round": {"batches": 2},
        "replace_function": {"truncate_fraction": 0.34},
    }  # fmt: skip
    content["hyperparameters"]["hidden"] = 16  # weights fit only what has their shape
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    population = int(installation.quick("submit", folder / "experiment.yaml").stdout)
    ended = installation.wait_for(population)
    assert ended["state"] == "COMPLETED", installation.lines(population)[-30:]
    *members, copy = installation.client.trials(population)
    judged = {}
    for member in members:
        ((_, judged[member["id"]]), *_) = points(installation, member["id"], "validation_loss")
    best = min(judged, key=lambda trial_id: (judged[trial_id], trial_id))
    worst = max(judged, key=lambda trial_id: (judged[trial_id], trial_id))
    assert {member["id"]: member["steps_completed"] for member in members} == {
        member["id"]: 2 if member["id"] == worst else 4 for member in members
    }
    assert (copy["source_trial_id"], copy["steps_completed"]) == (best, 2)
    kept = {each["uuid"]: each for each in installation.client.trial_checkpoints(best)}
    assert kept[copy["source_checkpoint"]]["steps_completed"] == 2
    check_curves(installation, population)


def points(
    installation: Installation, trial_id: int, name: str, group: str = "validation"
) -> list[list[float]]:
    """The points of a metric of a trial: (batch, value)."""
    (found,) = (
        curve["points"]
        for curve in installation.client.metrics(trial_id, group)
        if curve["name"] == name
    )
    return list(found)


def check_curves(installation: Installation, experiment_id: int) -> None:
    """Neither a gap nor a batch that was trained twice: each run began where the last ended."""
    for trial in installation.client.trials(experiment_id):
        steps = [step for step, _ in points(installation, trial["id"], "loss", "training")]
        assert steps == list(range(1, trial["steps_completed"] + 1))
