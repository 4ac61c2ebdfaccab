"""What users get wrong, and what they are told: one message, before anything starts."""

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
    with Installation.running(tmp_path_factory.mktemp("mistakes") / "home", slots=2) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a copy of the example, to be broken."""
    return Path(
        shutil.copytree(EXAMPLE, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__"))
    )


def config(**changes: Any) -> dict[str, Any]:
    """Return the example's experiment, changed."""
    return yaml.safe_load((EXAMPLE / "smoke.yaml").read_text()) | changes


@pytest.mark.processes
def test_three_mistakes_are_named_in_one_message_by_the_command_and_by_rest(
    installation: Installation, model: Path
) -> None:
    (model / "ds_config.json").write_text(
        """{
        "train_batch_size": 30, "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3, "gradient_clipping": "much",
        "zero_optimization": {"stge": 1}
        }"""
    )
    before = installation.json("experiment", "list")
    (model / "experiment.yaml").write_text(yaml.safe_dump(config()))
    refused = installation.cli("submit", model / "experiment.yaml", expect=2)
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    for part in ("3 problem(s)", "did you mean 'stage'?", "'much'", "4 x 3 x 1 = 12, got 30"):
        assert refused.stderr.count(part) == 1, refused.stderr
    also = installation.cli("run", model / "experiment.yaml", expect=2)
    assert "3 problem(s)" in also.stderr
    assert installation.json("experiment", "list") == before

    answer = httpx.post(
        f"{installation.client.url}/api/v1/experiments",
        headers={"Authorization": f"Bearer {installation.home.ensure_token()}"},
        data={"config": json.dumps(config())},
        files={"archive": packed(model)},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 422
    problems = answer.json()["error"]["problems"]
    assert len(problems) == 3
    assert all(problem in refused.stderr for problem in problems)


def packed(model: Path) -> bytes:
    """Pack a model directory as the command line does."""
    found = archive.pack(model)
    return found if isinstance(found, bytes) else Path(found).read_bytes()


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
def test_a_class_that_is_not_there_is_found_before_anything_starts_by_the_command_and_by_rest(
    installation: Installation, model: Path
) -> None:
    before = installation.json("experiment", "list")
    wrong = config(entrypoint="model_def:DigitTrial")
    (model / "experiment.yaml").write_text(yaml.safe_dump(wrong))
    told = "model_def.py has no class 'DigitTrial'; did you mean 'DigitsTrial'?"
    assert told in installation.cli("submit", model, expect=2).stderr
    answer = httpx.post(
        f"{installation.client.url}/api/v1/experiments",
        headers={"Authorization": f"Bearer {installation.home.ensure_token()}"},
        data={"config": json.dumps(wrong)},
        files={"archive": packed(model)},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 422
    assert told in answer.json()["error"]["message"]
    wrong["entrypoint"] = "model_deff:DigitsTrial"
    (model / "experiment.yaml").write_text(yaml.safe_dump(wrong))
    assert "did you mean 'model_def'?" in installation.cli("run", model, expect=2).stderr
    assert installation.json("experiment", "list") == before


@pytest.mark.processes
def test_a_trial_that_can_never_work_ends_in_error_with_one_clear_message(
    installation: Installation, tmp_path: Path
) -> None:
    started = {}
    for number, (mistake, (entrypoint, code, _)) in enumerate(BROKEN.items()):
        folder = tmp_path / str(number)
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        files = {"broken.py": code} if code else {}
        started[mistake] = installation.submit(folder, config(entrypoint=entrypoint), files)
    for mistake, experiment_id in started.items():
        ended = installation.wait_for(experiment_id)
        assert ended["state"] == "ERROR", mistake
        line = BROKEN[mistake][2]
        assert line in ended["error"], (mistake, ended["error"])
        assert ended["error"].count(line) == 1, (mistake, ended["error"])
        assert "Traceback" not in ended["error"]
        (trial,) = installation.client.trials(experiment_id)
        assert trial["restarts"] == 0, mistake  # it would fail the same way again
        logs = "\n".join(installation.lines(experiment_id))
        assert line in logs
        if "import" in mistake or "raises" in mistake:
            assert "Traceback" in logs
