from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.config import grid_points, load_experiment, sample_hyperparameters
from zerolab.config.experiment.run_spec import run_spec_fields
from zerolab.errors import ConfigError
from zerolab.schema.hyperparameters import extremes

MINIMAL: dict[str, Any] = {
    "entrypoint": "model_def:DigitsTrial",
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 50}},
}


def with_values(**more: Any) -> dict[str, Any]:
    return {**MINIMAL, **more}


def problems(content: dict[str, Any]) -> list[str]:
    try:
        load_experiment(content)
    except ConfigError as error:
        return error.problems
    return []


def test_defaults_match_determined() -> None:
    config = load_experiment(MINIMAL)
    assert str(config.trial_class) == "model_def:DigitsTrial"
    assert config.max_restarts == 5
    assert config.scheduling_unit == 100
    assert config.checkpoint_policy == "best"
    assert config.min_validation_period.count == 0
    assert config.resources.slots_per_trial == 1
    assert config.checkpoint_storage.save_trial_latest == 1
    assert config.preemption_timeout == 3600
    assert [policy.name for policy in config.policies()] == ["CUDA OOM", "ECC Error"]


@pytest.mark.needs_extension("determined")
def test_complete_file_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(
        """
name: digits
description: null
labels: [a, b]
data: {url: "x", nothing: null}
entrypoint: [python, train.py, --lr, "1e-3"]
hyperparameters:
  deepspeed_config: ds_config.json
  overwrite_deepspeed_args:
    optimizer: {type: Adam, params: {lr: {type: log, minval: -4, maxval: -1e0}}}
  layers: [{width: {type: int, minval: 1, maxval: 3}}, 4]
  decay: 1e-3
  flag: yes
searcher: {name: random, metric: loss, smaller_is_better: false, max_trials: 4, max_length: 100}
resources: {slots_per_trial: 2, max_slots: 4, priority: 1, shm_size: null}
min_validation_period: {epochs: 2}
min_checkpoint_period: {batches: 10}
environment: {environment_variables: ["A=1", "B=x=y"]}
log_policies:
  - {name: CUDA OOM, pattern: ""}
  - {name: stuck, pattern: "watchdog", action: {type: cancel_retries}}
profiling: {enabled: true, begin_on_batch: 3, end_after_batch: 5}
reproducibility: {experiment_seed: 7}
workspace: ""
"""
    )
    config = load_experiment(file)
    assert config.trial_class is None
    assert config.searcher.max_length is not None
    assert (config.searcher.max_length.unit, config.searcher.max_length.count) == ("batches", 100)
    assert config.to_dict()["min_validation_period"] == {"epochs": 2}
    assert config.hyperparameters["decay"] == 0.001
    assert config.data == {"url": "x", "nothing": None}
    assert run_spec_fields(config)["variables"]["cuda"] == {"A": "1", "B": "x=y"}
    assert [policy.name for policy in config.policies()] == ["stuck", "ECC Error"]
    assert config.log_policies[1].action == "cancel_retries"
    assert load_experiment(config.to_dict()) == config
    assert load_experiment(config.to_dict()).to_dict() == config.to_dict()


ADAPTIVE = {"name": "adaptive_asha", "metric": "m", "max_length": 100, "max_trials": 9}
HALVING = ADAPTIVE | {"name": "async_halving"}
PBT = {"name": "pbt", "metric": "m", "population_size": 4, "num_rounds": 3}
RANDOM = {"name": "random", "metric": "m", "max_length": 1, "max_concurrent_trials": 0}
AT_ONCE = "max_concurrent_trials: must be 1 to 10,000 for this search, got 0, with which"
AT_MOST = "must be at most"
TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    (PBT | {"length_per_round": 0}, "length_per_round: must be 1 to 3002399751580330 batches or"),
    (PBT | {"length_per_round": {"epochs": 2**52}}, "length_per_round: must be 1 to 30023997515"),
    (PBT | {"num_rounds": 10**12}, f"num_rounds: {AT_MOST} 10000, got"),
    (PBT | {"population_size": 10**5, "max_concurrent_trials": 0}, f"{AT_ONCE} 100,000 trials"),
    (RANDOM | {"max_trials": 10_001}, f"{AT_ONCE} 10,001 trials would start at once"),
    (ADAPTIVE | {"divisor": 1e300}, f"divisor: {AT_MOST} 1000, got 1e+300"),
    (ADAPTIVE | {"max_rungs": 10**6}, f"max_rungs: {AT_MOST} 100, got"),
    (ADAPTIVE | {"bracket_rungs": [3, 1000]}, f"bracket_rungs[1]: {AT_MOST} 100, got 1000"),
    (ADAPTIVE | {"bracket_rungs": [1] * 101}, "bracket_rungs: must have at most 100 items"),
    (HALVING | {"num_rungs": 1000}, f"num_rungs: {AT_MOST} 100, got 1000"),
    (
        HALVING | {"num_rungs": 50, "max_trials": 20_000, "max_concurrent_trials": 0},
        f"{AT_ONCE} 20,000 trials",
    ),
    (ADAPTIVE | {"max_time": 10}, "max_time: must not be combined with max_length without time_"),
    (
        ADAPTIVE | {"max_length": None, "max_time": 1e16, "time_metric": "epochs"},
        f"max_time: {AT_MOST} 9007199254740992, got 1e+16",
    ),
    (ADAPTIVE | {"max_length": 1e16}, f"max_length.batches: {AT_MOST} 9007199254740992, got"),
    (ADAPTIVE | {"max_concurrent_trials": 1e9}, f"max_concurrent_trials: {AT_MOST} 10000, got"),
    (ADAPTIVE | {"source_trial_id": 1e30}, f"source_trial_id: {AT_MOST} 9223372036854775807, got"),
]
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_restart": 3}, "max_restart: unknown key; did you mean 'max_restarts'?"),
    ({"max_restarts": -1}, "max_restarts: must be at least 0, got -1"),
    ({"max_restarts": "3"}, "max_restarts: must be a whole number, got '3'"),
    (
        {"resources": {"slots_per_trial": 0}},
        "resources.slots_per_trial: must be at least 1, got 0; set it to 1: without a GPU",
    ),
    ({"resources": {"priority": 100}}, "resources.priority: must be at most"),
    (
        {"resources": {"slots_per_trial": 4, "max_slots": 2}},
        "resources.max_slots: must be at least slots_per_trial = 4, got 2",
    ),
    ({"entrypoint": 3}, "entrypoint: must be module:Class, or a command as text"),
    (
        {"entrypoint": "python3 -m determined.launch.deepspeed --trial model_def:CIFARTrial"},
        "entrypoint: ranks are started without Determined's launchers; write model_def:CIFARTrial",
    ),
    ({"min_validation_period": {"records": 3}}, "min_validation_period: records are not a unit"),
    (
        {"min_validation_period": {"batches": 3, "epochs": 1}},
        "min_validation_period: must have one of batches and epochs",
    ),
    ({"min_validation_period": "3"}, "min_validation_period: must be {batches: n}, {epochs: n} or"),
    (
        {"searcher": {"name": "random", "metric": "m", "max_length": 1, "max_trials": 10**6}},
        "searcher.max_trials: must be at most 100000, got 1000000",
    ),
    (
        {
            "searcher": {"name": "grid", "metric": "m", "max_length": 1},
            "hyperparameters": {
                "a": {"type": "double", "minval": 0, "maxval": 1, "count": 10**9},
                "b": {"type": "categorical", "vals": [1, 2]},
            },
        },
        "hyperparameters: a grid must have at most 100,000 points, got 2,000,000,000",
    ),
    ({"min_validation_period": {"batch": 3}}, "min_validation_period.batch: unknown key"),
    ({"min_validation_period": -1}, "min_validation_period: must be at least 0 "),
    ({"checkpoint_policy": "latest"}, "checkpoint_policy: must be 'best', 'all' or 'none'"),
    (
        {"searcher": {"name": "single", "metric": "m"}},
        "searcher.max_length: is required for a trial class, got nothing; set the length",
    ),
    ({"searcher": {"name": "grid", "max_length": 1}}, "searcher.metric: is required"),
    (
        {"searcher": {"name": "grid", "metric": None, "max_length": 1}},
        "searcher.metric: is required",
    ),
    (
        {"searcher": {"name": "single", "metric": "", "max_length": 1}},
        "searcher.metric: must have 1 to 200 characters, got ''",
    ),
    (
        {"searcher": {"name": "single", "metric": "m", "max_length": 0}},
        "searcher.max_length: must be a positive number of batches or epochs, got 0",
    ),
    (
        {"searcher": {"name": "random", "metric": "m", "max_length": 1}},
        "searcher.max_trials: is required, got nothing",
    ),
    (
        {"searcher": {"name": "single", "metric": "m", "max_length": 1, "max_trials": 2}},
        "searcher.max_trials: does not belong to the single searcher, got 2",
    ),
    (
        {"searcher": {"name": "single", "metric": "m", "max_length": 1, "source_trial_id": 0}},
        "searcher.source_trial_id: must be greater than 0, got 0",
    ),
    (
        {
            "searcher": {
                "name": "single",
                "metric": "m",
                "max_length": 1,
                "source_trial_id": 2,
                "source_checkpoint_uuid": "01234567-89ab-cdef-0123-456789abcdef",
            }
        },
        "searcher.source_checkpoint_uuid: must not be combined with source_trial_id = 2",
    ),
    (
        {
            "searcher": {
                "name": "single",
                "metric": "m",
                "max_length": 1,
                "source_checkpoint_uuid": "best",
            }
        },
        "searcher.source_checkpoint_uuid: must be the uuid of a checkpoint, or its first 4 "
        "characters or more, got 'best'",
    ),
    (
        {"hyperparameters": {"net": [{"lr": {"type": "double", "minval": 0, "maxval": 1}}]}},
        "searcher.name: must be tpe_asha (the recommended one), adaptive_asha, async_halving, pbt, "
        "random or grid where hyperparameters are searched, got 'single' with net[0].lr",
    ),
    (
        {"hyperparameters": {"lr": {"type": "int", "minval": 3, "maxval": 1}}},
        "hyperparameters.lr.minval: must be less than maxval 1, got 3",
    ),
    (
        {"hyperparameters": {"lr": {"type": "uniform", "minval": 3, "maxval": 1}}},
        "hyperparameters.lr.type: must be one of const, int, double, log, categorical",
    ),
    (
        {"hyperparameters": {"lr": {"type": "log", "minval": 0, "maxval": 400}}},
        "hyperparameters.lr.maxval: minval and maxval are powers of base",
    ),
    (
        {"hyperparameters": {"lr": {"type": "categorical", "vals": []}}},
        "hyperparameters.lr.vals: must have at least 1 item",
    ),
    (
        {"environment": {"environment_variables": ["A"]}},
        "environment.environment_variables.cpu: must be lines of the form NAME=value, got 'A'",
    ),
    (
        {"environment": {"environment_variables": {"cuda": ["ZEROLAB_HOME=/tmp"]}}},
        "environment.environment_variables.cuda: ZEROLAB_HOME is set by the platform; remove it",
    ),
    (
        {"log_policies": [{"name": "x", "pattern": "("}]},
        "log_policies[0].pattern: must be a regular expression that RE2 reads, got '('",
    ),
    (
        {"log_policies": [{"name": "x", "pattern": "(?<!not )fatal"}]},
        "log_policies[0].pattern: must be a regular expression that RE2 reads, got "
        "'(?<!not )fatal' (invalid perl operator: (?<!); lookaround, backreferences",
    ),
    (
        {"log_policies": [{"pattern": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}]},
        "log_policies[0].pattern: must be a regular expression that RE2 reads",
    ),
    (
        {"checkpoint_storage": {"type": "shared_fs"}},
        "checkpoint_storage.host_path: is required for type 'shared_fs'",
    ),
    (
        {"checkpoint_storage": {"type": "directory", "container_path": "here"}},
        "checkpoint_storage.container_path: must be an absolute path, got 'here'",
    ),
    (
        {"checkpoint_storage": {"type": "s3"}},
        "checkpoint_storage.bucket: is required for type 's3', got nothing; name the bucket",
    ),
    pytest.param(
        {"checkpoint_storage": {"bucket": "b"}},
        "checkpoint_storage.type: is required with bucket, got nothing; set it to s3 or gcs",
        marks=pytest.mark.needs_extension("s3", "gcs"),
    ),
    (
        {"checkpoint_storage": {"type": "gcs", "bucket": "b", "host_path": "/x"}},
        "checkpoint_storage.host_path: does not belong to the type gcs; remove it or set "
        "checkpoint_storage.type to shared_fs",
    ),
    (
        {"checkpoint_storage": {"type": "s3", "bucket": "b", "prefix": "a/../b"}},
        "checkpoint_storage.prefix: must not contain '..', got 'a/../b'",
    ),
    (
        {"checkpoint_storage": {"type": "s3", "bucket": "b/c"}},
        "checkpoint_storage.bucket: must be a name without '/', got 'b/c'",
    ),
    (
        {"checkpoint_storage": {"type": "s3", "bucket": "b", "access_key": "k"}},
        "checkpoint_storage.secret_key: is required with access_key, got nothing; give both",
    ),
    (
        {"checkpoint_storage": {"type": "s3", "bucket": "b", "endpoint_url": "minio:9000"}},
        "checkpoint_storage.endpoint_url: must look like https://host:port, got 'minio:9000'",
    ),
    (
        {"checkpoint_storage": {"type": "s3", "bucket": "b", "endpoint_url": "http://u:p@m"}},
        "checkpoint_storage.endpoint_url: must not hold a name and a password",
    ),
    (
        {"checkpoint_storage": {"type": "azure", "container": "c"}},
        "checkpoint_storage: exactly one of connection_string and account_url must be given for "
        "type 'azure', got none",
    ),
    (
        {
            "checkpoint_storage": {
                "type": "s3",
                "bucket": "b",
                "access_key": "********",
                "secret_key": "********",
            }
        },
        "checkpoint_storage.secret_key: must be the key itself, got the mask that responses show",
    ),
    (
        {"checkpoint_storage": {"type": "shared_fs", "host_path": "/a", "storage_path": "../b"}},
        "checkpoint_storage.storage_path: must be a path inside host_path",
    ),
    (
        {"profiling": {"begin_on_batch": 5, "end_after_batch": 3}},
        "profiling.end_after_batch: must not be less than begin_on_batch = 5, got 3",
    ),
    (
        {"resources": {"slots_per_trial": 1e6}},
        "resources.slots_per_trial: must be at most 16384, got 1000000",
    ),
    *(
        (
            {"resources": {key: 2**31}},
            f"resources.{key}: must be at most 2147483647, got 2147483648",
        )
        for key in ("max_slots", "queue_time", "max_nodes")
    ),
    (
        {"preemption_timeout": 1e30},
        "preemption_timeout: must be at most 2147483647, got 1e+30",
    ),
    *(({"searcher": searcher}, f"searcher.{problem}") for searcher, problem in TOO_MUCH),
]


@pytest.mark.parametrize(("content", "problem"), REFUSALS, ids=lambda value: str(value)[:60])
def test_error_is_one_line(content: dict[str, Any], problem: str) -> None:
    lines = problems(with_values(**content))
    assert any(line.startswith(problem) for line in lines), lines


@pytest.mark.needs_extension("tpe_asha")
def test_missing_length_is_reported_once() -> None:
    searcher = {"name": "tpe_asha", "metric": "loss", "max_trials": 3}
    (line,) = problems(with_values(searcher=searcher))
    assert line.startswith("searcher.max_length: is required by the tpe_asha searcher")


def test_variables_by_kind_of_slot() -> None:
    both = {"environment_variables": {"cpu": ["A=1"], "cuda": ["A=2", "B="]}}
    config = load_experiment(with_values(environment=both))
    assert run_spec_fields(config)["variables"] == {"cpu": {"A": "1"}, "cuda": {"A": "2", "B": ""}}
    loaded = load_experiment(with_values(environment={"environment_variables": ["A=3"]}))
    assert run_spec_fields(loaded)["variables"] == {"cpu": {"A": "3"}, "cuda": {"A": "3"}}
    assert run_spec_fields(load_experiment(with_values()))["variables"] == {"cpu": {}, "cuda": {}}


@pytest.mark.parametrize(
    ("path", "good"),
    [("/a/b", True), ("b", True), ("/ab", False), ("/a/../c", False), ("/", False)],
)
def test_absolute_storage_path_inside_host_path(path: str, good: bool) -> None:
    storage = {"type": "shared_fs", "host_path": "/a", "storage_path": path}
    reported = problems(with_values(checkpoint_storage=storage))
    assert (reported == []) is good
    assert good or "must be a path inside host_path, relative to it or whole, got" in reported[0]


def test_gpu_variables_are_cuda_and_rocm_is_rejected() -> None:
    def variables(**lists: Any) -> dict[str, Any]:
        return with_values(environment={"environment_variables": lists})

    config = load_experiment(variables(cpu=["A=1"], gpu=["A=2"], rocm=[]))
    assert run_spec_fields(config)["variables"] == {"cpu": {"A": "1"}, "cuda": {"A": "2"}}
    (line,) = problems(variables(cuda=["A=1"], gpu=["A=2"]))
    assert "gpu is another name for cuda, got both" in line
    (line,) = problems(variables(rocm=["A=1"]))
    assert "got one under rocm; ROCm GPUs are not supported: remove it" in line


@pytest.mark.needs_extension("determined")
def test_all_problems_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text("entrypoint: a:B\nsearcher: {name: grid}\nresources: {slots: 2, gpus: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_experiment(file)
    assert str(caught.value) == (
        f"{file}: 3 problem(s)\n"
        "  resources.slots: is not supported; set resources.slots_per_trial\n"
        "  resources.gpus: is not supported; set resources.slots_per_trial\n"
        "  searcher.metric: is required, got nothing"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2", "line 2, column 1: a: must be given once, got it more than once"),
        ("a: {b: 1, b: 2}", "line 1, column 11: b: must be given once"),
        ("1: 2", "line 1, column 1: keys must be text, got 1; put it in quotes"),
        ("a: [1", "line 1, column 4: must close the '['"),
        ("- 1", "file: must be a mapping of keys to values, got list"),
        ("a: !!python/object:os.system x", "line 1, column 4: tags such as"),
    ],
)
@pytest.mark.needs_extension("yaml_errors")
def test_yaml_error_has_position(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_experiment(file)
    assert problem in caught.value.problems[0]


def test_yaml_merge_keys_are_overridable(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "entrypoint: a:B\n"
        "searcher: {name: single, metric: m, max_length: 1}\n"
        "hyperparameters: {base: &base {x: 1, y: 2}, more: {<<: *base, y: 3}}\n"
    )
    assert load_experiment(file).hyperparameters["more"] == {"x": 1, "y": 3}


SPACE: dict[str, Any] = {
    "plain": 3,
    "none": None,
    "const": {"type": "const", "val": {"a": 1}},
    "int": {"type": "int", "minval": -2, "maxval": 2},
    "nested": {"deep": [{"log": {"type": "log", "base": 2, "minval": -3, "maxval": 3}}]},
    "optimizer": {"type": "Adam", "params": {"lr": {"type": "double", "minval": 0, "maxval": 1}}},
    "choice": {"type": "categorical", "vals": [1, "two", None]},
}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_sample_is_in_space_and_reproducible(seed: int) -> None:
    sample = sample_hyperparameters(SPACE, Random(seed))
    assert list(sample) == list(SPACE)
    assert (sample["plain"], sample["none"], sample["const"]) == (3, None, {"a": 1})
    assert sample["int"] in range(-2, 3)
    assert 2**-3 <= sample["nested"]["deep"][0]["log"] <= 2**3
    assert sample["optimizer"]["type"] == "Adam"
    assert 0 <= sample["optimizer"]["params"]["lr"] <= 1
    assert sample["choice"] in [1, "two", None]
    turned = {key: SPACE[key] for key in reversed(SPACE)}
    assert sample_hyperparameters(turned, Random(seed)) == sample


def test_extreme_samples_reach_all_bounds() -> None:
    samples = extremes(SPACE)
    assert {sample["int"] for sample in samples} == {-2, 2}
    assert [sample["choice"] for sample in samples] == [1, "two", None]


@pytest.mark.parametrize(
    ("spec", "points"),
    [
        ({"type": "int", "minval": 0, "maxval": 10, "count": 3}, [0, 5, 10]),
        ({"type": "int", "minval": 0, "maxval": 2, "count": 9}, [0, 1, 2]),
        ({"type": "int", "minval": -5, "maxval": 0, "count": 3}, [-5, -3, 0]),
        ({"type": "int", "minval": 0, "maxval": 5, "count": 1}, [3]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 3}, [0, 0.5, 1]),
        ({"type": "log", "base": 10, "minval": 0, "maxval": 2, "count": 3}, [1, 10, 100]),
        ({"type": "categorical", "vals": ["a", "b"]}, ["a", "b"]),
        ({"type": "const", "val": 4}, [4]),
    ],
)
def test_grid_points_of_axis(spec: dict[str, Any], points: list[Any]) -> None:
    assert grid_points({"x": spec}) == [{"x": point} for point in points]
