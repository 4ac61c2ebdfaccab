"""Promoting searches on real images: trials pause at rungs and resume from checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.digits_model import copy_example
from tests.end_to_end.installation import Installation

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "asha_search"


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with Installation.running(tmp_path / "home", slots=2) as installation:
        yield installation


@pytest.mark.processes
def test_promoted_trials_resume_from_their_checkpoints(
    installation: Installation, tmp_path: Path
) -> None:
    content = yaml.safe_load((EXAMPLE / "smoke.yaml").read_text())
    content["searcher"] |= {"max_trials": 9, "num_rungs": 3, "max_length": {"batches": 18}}
    content["scheduling_unit"] = 1
    folder = copy_example(EXAMPLE, tmp_path / "model")
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    experiment_id = int(installation.quick("submit", folder / "experiment.yaml").stdout)
    experiment = installation.wait_for(experiment_id)
    assert experiment["state"] == "COMPLETED", installation.lines(experiment_id)[-30:]

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
        assert [step for step, _ in validations] == [rung for rung in (2, 6, 18) if rung <= length]
    check_curves(installation, experiment_id)
    for rung, next_rung, promoted in ((2, 6, middle), (6, 18, top)):
        resumed = sum(f"resumed after batch {rung}" in line for line in log)
        extended = sum(f"extended the run to batch {next_rung}" in line for line in log)
        assert resumed + extended == len(promoted)

    content["searcher"]["max_trials"] = 1  # no other trial needs its slots, so it need not pause
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    single = int(installation.quick("submit", folder / "experiment.yaml").stdout)
    assert installation.wait_for(single)["state"] == "COMPLETED"
    log = installation.lines(single)
    extended = sum("extended the run to batch" in line for line in log)
    resumed = sum("resumed after batch" in line for line in log)
    # A run waits for an extension for a limited time only.
    assert (extended > 0, extended + resumed) == (True, 2), log[-30:]
    (trial,) = installation.client.trials(single)
    assert trial["steps_completed"] == 18

    # Continue the experiment with another trial and a higher rung.
    changes = ("--set", "searcher.max_trials=2", "--set", "searcher.max_length.batches=54")
    output = installation.quick("experiment", "continue", str(single), *changes)
    assert f"experiment {single} continues" in output.stderr
    assert installation.wait_for(single)["state"] == "COMPLETED", installation.lines(single)[-30:]
    (bracket,) = installation.client.searcher(single)["brackets"]
    assert [rung["length"] for rung in bracket["rungs"]] == [2, 6, 18, 54]
    trials = installation.client.trials(single)
    assert [trial["state"] for trial in trials] == ["COMPLETED"] * 2
    assert max(trial["steps_completed"] for trial in trials) == 54
    check_curves(installation, single)

    # The same class in a population-based search, whose copies start from others' weights.
    content["searcher"] = {
        "name": "pbt", "metric": content["searcher"]["metric"], "population_size": 3,
        "num_rounds": 2, "length_per_round": {"batches": 2},
        "replace_function": {"truncate_fraction": 0.34},
    }  # fmt: skip
    content["hyperparameters"]["hidden"] = 16  # copied weights need equal shapes
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    population = int(installation.quick("submit", folder / "experiment.yaml").stdout)
    experiment = installation.wait_for(population)
    assert experiment["state"] == "COMPLETED", installation.lines(population)[-30:]
    *members, copy = installation.client.trials(population)
    metrics = {}
    for member in members:
        ((_, metrics[member["id"]]), *_) = points(installation, member["id"], "validation_loss")
    best = min(metrics, key=lambda trial_id: (metrics[trial_id], trial_id))
    worst = max(metrics, key=lambda trial_id: (metrics[trial_id], trial_id))
    assert {member["id"]: member["steps_completed"] for member in members} == {
        member["id"]: 2 if member["id"] == worst else 4 for member in members
    }
    assert (copy["source_trial_id"], copy["steps_completed"]) == (best, 2)
    checkpoints = {
        checkpoint["uuid"]: checkpoint for checkpoint in installation.client.trial_checkpoints(best)
    }
    assert checkpoints[copy["source_checkpoint"]]["steps_completed"] == 2
    check_curves(installation, population)


def points(
    installation: Installation, trial_id: int, name: str, group: str = "validation"
) -> list[list[float]]:
    """Return the points of a trial's metric: (batch, value)."""
    (values,) = (
        curve["points"]
        for curve in installation.client.metrics(trial_id, group)
        if curve["name"] == name
    )
    return list(values)


def check_curves(installation: Installation, experiment_id: int) -> None:
    """Check that each batch was trained exactly once, across runs."""
    for trial in installation.client.trials(experiment_id):
        steps = [step for step, _ in points(installation, trial["id"], "loss", "training")]
        assert steps == list(range(1, trial["steps_completed"] + 1))
