"""A searcher's class in the model directory, run by a real server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.installation import Installation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experiment_config.md"
TRAIN = """
import zerolab.core

with zerolab.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": context.train.get_hparams()["x"]})
"""


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with Installation.running(tmp_path / "home", slots=1) as made:
        yield made


def submit(installation: Installation, folder: Path, code: str) -> int:
    folder.mkdir()
    (folder / "my_search.py").write_text(code)
    (folder / "train.py").write_text(TRAIN)
    content = {
        "entrypoint": "python train.py",
        "hyperparameters": {"x": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "custom", "entrypoint": "my_search:MySearch", "metric": "loss",
            "options": {"goal": 0.5},
        },
        "reproducibility": {"experiment_seed": 5},
    }  # fmt: skip
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    return int(installation.cli("submit", folder / "experiment.yaml").stdout)


@pytest.mark.processes
def test_the_class_of_the_documents_searches_and_one_that_fails_ends_the_experiment(
    installation: Installation, tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    experiment_id = submit(installation, tmp_path / "good", code)
    ended = installation.wait_for(experiment_id)
    assert ended["state"] == "COMPLETED", ended["error"]
    losses = [trial["best_validation"] for trial in installation.client.trials(experiment_id)]
    assert losses
    assert losses[-1] <= 0.5
    assert all(loss > 0.5 for loss in losses[:-1])

    wrong = code.replace('block["options"]["goal"]', 'block["goal"]')
    ended = installation.wait_for(submit(installation, tmp_path / "bad", wrong))
    assert ended["state"] == "ERROR"
    assert ended["error"] == "searcher.entrypoint: its class failed: KeyError: 'goal'"
