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
        (loss,) = (
            curve["points"]
            for curve in installation.client.metrics(trial_id, "training")
            if curve["name"] == "loss"
        )
        # Neither a gap nor a batch that was trained twice: each run began where the last one ended.
        assert [step for step, _ in loss] == list(range(1, length + 1))
        (validations,) = (
            curve["points"]
            for curve in installation.client.metrics(trial_id, "validation")
            if curve["name"] == "validation_loss"
        )
        assert [step for step, _ in validations] == [at for at in (2, 6, 18) if at <= length]
    for at, further, those in ((2, 6, middle), (6, 18, top)):
        again = sum(f"going on after batch {at}" in line for line in log)
        at_once = sum(f"go on at once, to batch {further}" in line for line in log)
        assert again + at_once == len(those)

    content["searcher"]["max_trials"] = 1  # nobody else wants its slots: it need never leave
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    alone = int(installation.cli("submit", folder / "experiment.yaml").stdout)
    assert installation.wait_for(alone)["state"] == "COMPLETED"
    log = installation.lines(alone)
    assert sum("go on at once, to batch" in line for line in log) == 2, log[-30:]
    assert not any("going on after batch" in line for line in log)
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
    for trial in ended:
        curves = installation.client.metrics(trial["id"], "training")
        (points,) = (curve["points"] for curve in curves if curve["name"] == "loss")
        assert [step for step, _ in points] == list(range(1, trial["steps_completed"] + 1))
