"""Settings that no model of several stages supports are reported for the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_experiment, check_file
from zerolab.config.engine.reader import load_engine_config
from zerolab.errors import ConfigError

STAGES = {"train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stage 3": (
        {**STAGES, "zero_optimization": {"stage": 3}},
        "zero_optimization.stage: must be 0, 1 or 2 with 2 pipeline stages, got 3: ",
    ),
    "own accumulation": (
        {**STAGES, "managed_gradient_accumulation": False},
        "managed_gradient_accumulation: must be true for a PipelineModule, whose train_batch() ",
    ),
    "compiled": (
        {
            **STAGES,
            "pipeline": {"stages": 2, "schedule": "zero-bubble"},
            "compile": {"enabled": True},
        },
        "compile.enabled: must be false with pipeline.schedule zero-bubble, which splits ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused(tmp_path: Path, name: str) -> None:
    content, expected = REFUSED[name]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        check_file(file)
    (problem,) = caught.value.problems
    assert problem.startswith(expected)


def test_unsupported_settings_work_on_one_stage() -> None:
    for content, _ in REFUSED.values():
        pipeline = {**content.get("pipeline", {}), "stages": 1}
        load_engine_config({**content, "pipeline": pipeline})


def test_all_problems_are_reported() -> None:
    content = {**STAGES, "managed_gradient_accumulation": False, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError) as caught:
        load_engine_config({**content, "gradient_clipping": -1})
    assert len(caught.value.problems) == 3


def _experiment(slots: int, **engine: Any) -> dict[str, Any]:
    return {
        "name": "stages",
        "entrypoint": "model_def:Trial",
        "hyperparameters": {
            "deepspeed_config": {
                "train_batch_size": 20,
                "train_micro_batch_size_per_gpu": 2,
                "pipeline": {"stages": 2, "schedule": "zero-bubble"},
                **engine,
            }
        },
        "resources": {"slots_per_trial": slots},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
    }


MODEL = MemoryFiles({"model_def.py": b"class Trial(DeepSpeedTrial): ...\n"})


def test_invalid_micro_batches_are_refused_by_ranks() -> None:
    check_experiment(_experiment(2), MODEL)  # 10 micro-batches, in 5 rounds
    with pytest.raises(ConfigError) as caught:
        check_experiment(_experiment(4), MODEL)  # 5, in 2
    (problem,) = caught.value.problems
    assert problem == (
        "hyperparameters.deepspeed_config.gradient_accumulation_steps: must be a multiple of 2 "
        "(accumulation steps // pipeline stages) for zero-bubble, got 5; a multiple of the 2 "
        "pipeline stages always is"
    )


def test_elastic_trial_keeps_a_valid_number_of_ranks() -> None:
    content = _experiment(10)
    content["resources"]["elastic"] = {"min_slots": 2}
    elastic = check_experiment(content, MODEL).resources.elastic
    assert elastic is not None
    assert elastic.counts == [2, 10]  # 4 ranks could share the batch
