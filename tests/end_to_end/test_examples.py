"""Examples run to completion as a user would run them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.installation import Installation

EXAMPLES = sorted(path.parent for path in Path("examples").resolve().glob("*/smoke.yaml"))
FEWER = {"asha_search": ("--set", "searcher.max_trials=3")}
"""Options for less than the smallest file: tests/end_to_end/test_rungs.py promotes such trials."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(
        tmp_path_factory.mktemp("examples") / "home", slots=4
    ) as installation:
        yield installation


@pytest.mark.processes
def test_examples_complete_with_metrics_and_checkpoint(
    installation: Installation,
) -> None:
    assert len(EXAMPLES) >= 6
    experiment_ids = {
        example.name: int(
            installation.quick(
                "submit", example / "smoke.yaml", *FEWER.get(example.name, ())
            ).stdout
        )
        for example in EXAMPLES
    }
    for name, experiment_id in experiment_ids.items():
        experiment = installation.wait_for(experiment_id)
        assert experiment["state"] == "COMPLETED", (name, installation.lines(experiment_id)[-30:])
        assert experiment["best_validation"] is not None, name
        for trial in installation.client.trials(experiment_id):
            assert trial["latest_checkpoint"], name
            curves = installation.client.metrics(trial["id"], "training")
            assert any(curve["points"] for curve in curves), name


LAUNCHED = {
    "hf_trainer": "--num_gpus 2 train.py --deepspeed ds_config.json --max_steps 4 --output_dir",
    "accelerate": "--config_file launch.yaml train.py --windows 64 --out",
    "lora": "--num_gpus 1 train.py --steps 4 --output_dir",
}
"""Options of ``zerolab launch --as-deepspeed --cpu``; the output folder follows."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        pytest.param("hf_trainer", "model.safetensors", "eval_loss", marks=pytest.mark.soak),
        ("accelerate", "model/model.safetensors", "held out: loss"),
        pytest.param("lora", "adapter_model.safetensors", "eval_loss", marks=pytest.mark.soak),
    ],
)
def test_hugging_face_examples_run_as_documented(
    name: str, file: str, text: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    if name == "lora":
        pytest.importorskip("peft")
    command = [sys.executable, "-m", "zerolab", "launch", "--as-deepspeed", "--cpu"]
    completed = subprocess.run(
        [*command, *LAUNCHED[name].split(), str(tmp_path / "out")],
        cwd=Path("examples").resolve() / name,
        env={**os.environ, "ZEROLAB_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert text in completed.stdout
    assert (tmp_path / "out" / file).is_file()


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["digits", pytest.param("hf_trainer", marks=pytest.mark.soak), "pipeline_gpt"]
)
def test_run_test_mode(installation: Installation, name: str) -> None:
    if name == "hf_trainer":
        pytest.importorskip("accelerate")
    completed = installation.cli("run", Path("examples").resolve() / name, "--test")
    assert "COMPLETED" in completed.stdout
    # Test mode cannot limit other training loops to one batch and warns about it.
    warned = "any other training loop runs in full" in completed.stderr
    assert warned == (name == "hf_trainer")
    newest = max(row["id"] for row in installation.json("experiment", "list"))
    (trial,) = installation.client.trials(newest)
    assert trial["steps_completed"] == 1
    assert len(installation.client.trial_checkpoints(trial["id"])) == 1
