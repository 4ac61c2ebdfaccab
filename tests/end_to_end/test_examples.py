"""Every example runs to its end, as a user would run it."""

import os
import subprocess
import sys
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


LAUNCHED = {
    "hf_trainer": "--num_gpus 2 train.py --deepspeed ds_config.json --max_steps 4 --output_dir",
    "accelerate": "--config_file launch.yaml train.py --windows 64 --out",
    "lora": "--num_gpus 1 train.py --steps 4 --output_dir",
}
"""Options of ``zerolab launch --as-deepspeed --cpu``; a folder follows."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept", "told"),
    [
        ("hf_trainer", "model.safetensors", "eval_loss"),
        ("accelerate", "model/model.safetensors", "held out: loss"),
        ("lora", "adapter_model.safetensors", "eval_loss"),
    ],
)
def test_the_examples_of_hugging_face_run_as_their_pages_say(
    name: str, kept: str, told: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    if name == "lora":
        pytest.importorskip("peft")
    words = [sys.executable, "-m", "zerolab", "launch", "--as-deepspeed", "--cpu"]
    done = subprocess.run(
        [*words, *LAUNCHED[name].split(), str(tmp_path / "out")],
        cwd=Path("examples").resolve() / name,
        env={**os.environ, "ZEROLAB_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout
    assert (tmp_path / "out" / kept).is_file()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["digits", "hf_trainer", "pipeline_gpt"])
def test_test_mode_trains_one_batch_validates_once_and_saves_once(
    installation: Installation, name: str
) -> None:
    if name == "hf_trainer":
        pytest.importorskip("accelerate")
    done = installation.cli("run", Path("examples").resolve() / name, "--test")
    assert "COMPLETED" in done.stdout
    # A program that is no Trainer is not cut to one batch, which is said before it starts.
    said = "any other loop trains as far as it says itself" in done.stderr
    assert said == (name == "hf_trainer")
    newest = max(row["id"] for row in installation.json("experiment", "list"))
    (trial,) = installation.client.trials(newest)
    assert trial["steps_completed"] == 1
    assert len(installation.client.trial_checkpoints(trial["id"])) == 1
