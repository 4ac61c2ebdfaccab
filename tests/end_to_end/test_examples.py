"""Every example runs to its end, as a user would run it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.installation import Installation

EXAMPLES = sorted(path.parent for path in Path("examples").resolve().glob("*/smoke.yaml"))


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(tmp_path_factory.mktemp("examples") / "home", slots=4) as made:
        yield made


@pytest.mark.processes
def test_every_example_completes_and_leaves_metrics_and_a_checkpoint(
    installation: Installation,
) -> None:
    assert len(EXAMPLES) >= 6
    started = {
        example.name: int(installation.cli("submit", example / "smoke.yaml").stdout)
        for example in EXAMPLES
    }
    for name, experiment_id in started.items():
        ended = installation.wait_for(experiment_id)
        assert ended["state"] == "COMPLETED", (name, installation.lines(experiment_id)[-30:])
        assert ended["best_validation"] is not None, name
        for trial in installation.client.trials(experiment_id):
            assert trial["latest_checkpoint"], name
            curves = installation.client.metrics(trial["id"], "training")
            assert any(curve["points"] for curve in curves), name


@pytest.mark.processes
def test_test_mode_trains_one_batch_validates_once_and_saves_once(
    installation: Installation,
) -> None:
    example = next(path for path in EXAMPLES if path.name == "digits")
    done = installation.cli("run", example / "experiment.yaml", "--test")
    assert "COMPLETED" in done.stdout
    newest = max(row["id"] for row in installation.json("experiment", "list"))
    (trial,) = installation.client.trials(newest)
    assert trial["steps_completed"] == 1
    assert len(installation.client.trial_checkpoints(trial["id"])) == 1
