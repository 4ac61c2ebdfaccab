"""User errors: one message, before a run starts."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.end_to_end.installation import Installation
from tests.waiting import DEADLINE_S
from zerolab.client import archive

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(
        tmp_path_factory.mktemp("mistakes") / "home", slots=2
    ) as installation:
        yield installation


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a copy of the example that a test may break."""
    return Path(
        shutil.copytree(EXAMPLE, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__"))
    )


def config(**changes: Any) -> dict[str, Any]:
    """Return the example's experiment configuration with changes."""
    return yaml.safe_load((EXAMPLE / "smoke.yaml").read_text()) | changes


@pytest.mark.processes
def test_config_problems_are_listed_together(installation: Installation, model: Path) -> None:
    (model / "ds_config.json").write_text(
        """{
        "train_batch_size": 30, "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3, "gradient_clipping": "much",
        "zero_optimization": {"stge": 1}
        }"""
    )
    experiments = installation.json("experiment", "list")
    (model / "experiment.yaml").write_text(yaml.safe_dump(config()))
    rejection = installation.cli("submit", model / "experiment.yaml", expect=2)
    assert rejection.stdout == ""
    assert "Traceback" not in rejection.stderr
    for fragment in ("3 problem(s)", "did you mean 'stage'?", "'much'", "4 x 3 x 1 = 12, got 30"):
        assert rejection.stderr.count(fragment) == 1, rejection.stderr
    run_rejection = installation.quick("run", model / "experiment.yaml", expect=2)
    assert "3 problem(s)" in run_rejection.stderr
    assert installation.json("experiment", "list") == experiments

    response = httpx.post(
        f"{installation.client.url}/api/v1/experiments",
        headers={"Authorization": f"Bearer {installation.home.ensure_token()}"},
        data={"config": json.dumps(config())},
        files={"archive": pack_model(model)},
        timeout=DEADLINE_S,
    )
    assert response.status_code == 422
    problems = response.json()["error"]["problems"]
    assert len(problems) == 3
    assert all(problem in rejection.stderr for problem in problems)


def pack_model(model: Path) -> bytes:
    """Pack a model directory as the CLI does."""
    content = archive.pack(model)
    return content if isinstance(content, bytes) else Path(content).read_bytes()


BROKEN = {
    "a missing class": (
        "broken:NoSuchTrial", "from model_def import *\n", "has no class 'NoSuchTrial'"
    ),
    "a class that is no ZeroTrial": (
        "broken:Plain", "class Plain(object):\n    pass\n", "broken:Plain"
    ),
    "an import that fails": ("broken:Trial", "import no_such_module\nTrial = no_such_module.A\n",
                             "import no_such_module"),
    "a model that raises": (
        "broken:Trial",
        "import zerotrial\n\n\nclass Trial(zerotrial.ZeroTrial):\n"
        "    def __init__(self, context):\n        self.model = undefined_model(3)\n\n"
        "    build_training_data_loader = build_validation_data_loader = None\n"
        "    train_batch = evaluate_batch = None\n",
        "self.model = undefined_model(3)",
    ),
}  # fmt: skip


@pytest.mark.processes
def test_missing_trial_class_is_rejected_at_submit(installation: Installation, model: Path) -> None:
    experiments = installation.json("experiment", "list")
    bad_config = config(entrypoint="model_def:DigitTrial")
    (model / "experiment.yaml").write_text(yaml.safe_dump(bad_config))
    message = "its classes are: DigitsTrial; did you mean 'DigitsTrial'?"
    assert message in installation.quick("submit", model, expect=2).stderr
    response = httpx.post(
        f"{installation.client.url}/api/v1/experiments",
        headers={"Authorization": f"Bearer {installation.home.ensure_token()}"},
        data={"config": json.dumps(bad_config)},
        files={"archive": pack_model(model)},
        timeout=DEADLINE_S,
    )
    assert response.status_code == 422
    assert message in response.json()["error"]["message"]
    bad_config["entrypoint"] = "model_deff:DigitsTrial"
    (model / "experiment.yaml").write_text(yaml.safe_dump(bad_config))
    assert "did you mean 'model_def'?" in installation.quick("run", model, expect=2).stderr
    assert installation.json("experiment", "list") == experiments


@pytest.mark.processes
def test_broken_trial_ends_in_error_without_restart(
    installation: Installation, tmp_path: Path
) -> None:
    experiment_ids = {}
    for number, (mistake, (entrypoint, code, _)) in enumerate(BROKEN.items()):
        folder = tmp_path / str(number)
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        files = {"broken.py": code} if code else {}
        experiment_ids[mistake] = installation.submit(folder, config(entrypoint=entrypoint), files)
    for mistake, experiment_id in experiment_ids.items():
        experiment = installation.wait_for(experiment_id)
        assert experiment["state"] == "ERROR", mistake
        line = BROKEN[mistake][2]
        assert line in experiment["error"], (mistake, experiment["error"])
        assert experiment["error"].count(line) == 1, (mistake, experiment["error"])
        assert "Traceback" not in experiment["error"]
        (trial,) = installation.client.trials(experiment_id)
        assert trial["restarts"] == 0, mistake  # it would fail the same way again
        logs = "\n".join(installation.lines(experiment_id))
        assert line in logs
        if "import" in mistake or "raises" in mistake:
            assert "Traceback" in logs
