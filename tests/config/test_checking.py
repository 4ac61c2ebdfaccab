import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_experiment, check_file, load_engine_config, resolve
from zerolab.config.engine.resolved_config import format_entries
from zerolab.errors import ConfigError

EXPERIMENT: dict[str, Any] = {
    "entrypoint": "model_def:T",
    "hyperparameters": {
        "deepspeed_config": "conf/ds.json",
        "overwrite_deepspeed_args": {"optimizer": {"params": {"lr": 0.5}}},
    },
    "searcher": {"name": "single", "metric": "loss", "max_length": 10},
    "resources": {"slots_per_trial": 2},
}
SLOPE = {"type": "double", "minval": 0, "maxval": 1}
ENGINE: dict[str, Any] = {"train_batch_size": 32, "optimizer": {"type": "AdamW"}}


def check(experiment: dict[str, Any], engine: Any) -> list[str]:
    content = engine if isinstance(engine, bytes) else json.dumps(engine).encode()
    files = MemoryFiles({"conf/ds.json": content, "model_def.py": b"class T(ZeroTrial): ..."})
    try:
        check_experiment(experiment, files)
    except ConfigError as error:
        return error.problems
    return []


def changed(**hyperparameters: Any) -> dict[str, Any]:
    return {**EXPERIMENT, "hyperparameters": EXPERIMENT["hyperparameters"] | hyperparameters}


def test_valid_files_pass() -> None:
    assert check(EXPERIMENT, ENGINE) == []


def test_problems_of_both_files_are_reported() -> None:
    engine = {"train_batch_size": 33, "zero_optimization": {"stge": 1}, "gradient_clipping": "x"}
    assert check({**EXPERIMENT, "max_restarts": -1}, engine) == [
        "max_restarts: must be at least 0, got -1",
        "conf/ds.json: gradient_clipping: must be a number, got 'x'",
        "conf/ds.json: optimizer.type: is required, got nothing",
        "conf/ds.json: zero_optimization.stge: unknown key; did you mean 'stage'?",
        "conf/ds.json: train_batch_size: must be a multiple of accumulation steps x "
        "data-parallel ranks = 1 x 2 = 2, got 33; the nearest is 32 or 34",
    ]


@pytest.mark.parametrize(
    ("hyperparameters", "problem"),
    [
        ({"deepspeed_config": "ds.json"}, "hyperparameters.deepspeed_config: must name a file"),
        ({"deepspeed_config": "../ds.json"}, "must be a path inside the model directory"),
        ({"deepspeed_config": "/etc/passwd"}, "must be a path inside the model directory"),
        ({"deepspeed_config": 3}, "must be the path of a JSON file or its content, got 3"),
        (
            {"deepspeed_config": {"train_batch_size": 3}, "overwrite_deepspeed_args": {}},
            "hyperparameters.deepspeed_config.train_batch_size: must be a multiple of",
        ),
        ({"overwrite_deepspeed_args": 3}, "overwrite_deepspeed_args: must be a mapping of keys"),
        (
            {"overwrite_deepspeed_args": {"train_batch_size": 3}},
            "conf/ds.json: train_batch_size: must be a multiple of",
        ),
        (
            {"overwrite_deepspeed_args": {"train_batch_size": "auto"}},
            "conf/ds.json: train_batch_size: must be a value, got 'auto'",
        ),
        (
            {"net": {"act": {"type": "categorical", "vals": ["relu", {"slope": [SLOPE]}]}}},
            "hyperparameters.net.act.vals[1].slope[0]: must be a value, because vals are not "
            "sampled, got a spec of type 'double'; give it a separate key next to "
            "'net.act', with when: {net.act: ...}",
        ),
    ],
)
def test_hyperparameters_of_engine_are_checked(
    hyperparameters: dict[str, Any], problem: str
) -> None:
    lines = check(changed(**hyperparameters), ENGINE)
    assert any(problem in line for line in lines), lines


def test_engine_file_in_trial_code_is_allowed() -> None:
    assert check(changed(deepspeed_config=None), ENGINE) == []


def test_searched_values_are_checked_at_bounds() -> None:
    searched = changed(
        overwrite_deepspeed_args={
            "gradient_clipping": {"type": "double", "minval": -1, "maxval": 1},
            "train_batch_size": {"type": "categorical", "vals": [32, 7, 64]},
        }
    )
    searched["searcher"] = {**EXPERIMENT["searcher"], "name": "random", "max_trials": 2}
    lines = check(searched, ENGINE)
    assert len(lines) == 2
    assert "gradient_clipping: must be at least 0, got -1" in lines[0]
    assert "= 1 x 2 = 2, got 7" in lines[1]


def test_report_names_searched_values(tmp_path: Path) -> None:
    searched = changed(
        deepspeed_config={"train_batch_size": 8, "optimizer": {"type": "Adam"}},
        overwrite_deepspeed_args={
            "optimizer": {"params": {"lr": {"type": "log", "min": 0.001, "max": 0.1}}},
            "zero_optimization": {"stage": {"type": "categorical", "vals": [2, 1]}},
        },
    )
    searched["searcher"] = {**EXPERIMENT["searcher"], "name": "random", "max_trials": 2}
    (tmp_path / "search.yaml").write_text(json.dumps(searched))
    (tmp_path / "model_def.py").write_text("class T(ZeroTrial): ...")
    report = " ".join(check_file(tmp_path / "search.yaml").split())
    assert "optimizer.params.lr = 0.001 (override: lowest of the searched values)" in report
    assert "zero_optimization.stage = 2 (override: first of the searched values)" in report


def test_invalid_engine_file_is_named() -> None:
    (line,) = check(EXPERIMENT, b"{")
    assert line.startswith("conf/ds.json: line 1, column 2: must be JSON")
    (line,) = check(EXPERIMENT, b"\xff\xff")
    assert line.startswith("conf/ds.json: line 1, column 1: must be text in UTF-8")


@pytest.mark.needs_extension("deepspeed_config")
def test_auto_from_hyperparameters() -> None:
    engine = {"train_batch_size": "auto", "optimizer": {"type": "Adam"}}
    assert check(changed(global_batch_size=32), engine) == []
    (line,) = check(changed(global_batch_size=31), engine)
    assert "got 31" in line


@pytest.mark.needs_extension("deepspeed_config")
def test_open_auto_is_allowed_for_scripts(
    tmp_path: Path,
) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    engine = {**ENGINE, "scheduler": warmup}
    (line,) = check(EXPERIMENT, engine)
    assert line.startswith("conf/ds.json: scheduler.params.warmup_num_steps: ")
    command = {**EXPERIMENT, "entrypoint": "python3 model_def.py"}
    assert check(command, engine) == []
    (line,) = check(command, engine | {"gradient_clipping": "x"})
    assert line.startswith("conf/ds.json: gradient_clipping: ")
    sizes = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "auto",
    )
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text(json.dumps(engine | sizes))
    (tmp_path / "model_def.py").write_text("")
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(command))
    assert "conf/ds.json: ok; each 'auto' without a value" in check_file(tmp_path / "e.yaml")


def test_experiment_report_shows_engine(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text(json.dumps(ENGINE))
    file = tmp_path / "experiment.yaml"
    (tmp_path / "model_def.py").write_text("class T(ZeroTrial): ...")
    retention = {"retention_policy": {"log_retention_days": 3}}
    resources = {"resources": {**EXPERIMENT.get("resources", {}), "queue_time": 9}}
    file.write_text(yaml.safe_dump({**EXPERIMENT, **retention, **resources}))
    report = check_file(file)
    assert "(hint" not in report  # queue_time and log_retention_days have effects
    assert report.startswith(f"{file}: ok\n  experiment: 1 trial, 10 batches each, 2 slot(s)")
    assert "conf/ds.json: ok for 2 data-parallel rank(s)" in report
    assert "optimizer.params.lr = 0.5" in report
    with pytest.raises(ConfigError, match=r"ds\.json: train_batch_size: must be a multiple"):
        check_file(file, world_size=5)


@pytest.mark.needs_extension("tensor_parallel", "pipeline")
def test_engine_report_shows_origins(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 32, "wandb": {"enabled": False}}))
    lines = [" ".join(line.split()) for line in check_file(file, 4).splitlines()]
    assert lines[0] == f"{file}: ok for 4 data-parallel rank(s)"
    assert "train_batch_size = 32 (file)" in lines
    assert "train_micro_batch_size_per_gpu = 8 (derived)" in lines
    assert "gradient_clipping = 0.0 (default)" in lines
    assert "wandb = null (hint: does not exist here, and is off)" in lines
    with pytest.raises(ConfigError, match="train_batch_size: must be a multiple"):
        check_file(file, 5)
    cut = {"train_batch_size": 32, "tensor_parallel": {"size": 2}, "pipeline": {"stages": 2}}
    file.write_text(json.dumps(cut))  # the ranks that share one model
    assert "ok for 1 data-parallel rank(s) x 2 tensor-parallel" in check_file(file)


def test_resolved_values_have_origins() -> None:
    config = load_engine_config(
        {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": 2, "contiguous_gradients": True},
        },
        {"optimizer": {"params": {"lr": 0.5}}, "zero_optimization": {"sub_group_size": 7}},
    )
    values = {key: (value, origin) for key, value, origin in resolve(config, 2, 1000)}
    assert values["zero_optimization.stage"] == (2, "file")
    assert values["optimizer.params.lr"] == (0.5, "override")
    assert values["optimizer.params.momentum"] == (0.9, "file")
    assert values["train_batch_size"] == (8, "derived")
    assert values["zero_optimization.reduce_bucket_size"][1].startswith("derived: the engine")
    assert values["zero_optimization.allgather_bucket_size"] == (1000, "derived")
    assert values["gradient_clipping"] == (0.0, "default")
    assert values["zero_optimization.overlap_comm"] == (True, "derived")
    assert values["zero_optimization.contiguous_gradients"][1].startswith("hint: ")
    assert values["zero_optimization.sub_group_size"][0] == 7
    assert values["zero_optimization.sub_group_size"][1].startswith("hint: ")
    assert "zero_optimization.round_robin_gradients" not in values  # a hint that is not set
    assert format_entries(resolve(config, 2), ["override"]).startswith("optimizer.params.lr = 0.5")


def test_key_without_effect_is_hint() -> None:
    config = load_engine_config(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 3, "overlap_comm": False},
        }
    )
    origins = {key: origin for key, _, origin in resolve(config, 2)}
    assert origins["optimizer.params.torch_adam"].startswith("hint: it is always torch's")
    assert origins["zero_optimization.overlap_comm"].startswith("hint: has an effect at stage 0, 1")
    assert "zero_optimization.reduce_bucket_size" not in origins


def test_large_bucket_is_clamped_to_model() -> None:
    config = load_engine_config(
        {"train_batch_size": 2, "zero_optimization": {"reduce_bucket_size": 2000}}
    )
    values = {key: (value, origin) for key, value, origin in resolve(config, 2, 1000)}
    assert values["zero_optimization.reduce_bucket_size"] == (1000, "derived: file says 2000")
