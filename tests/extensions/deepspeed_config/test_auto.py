"""Resolution of ``"auto"`` values, their origins, and rejected ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.config.memory_files import MemoryFiles
from zerolab import core
from zerolab.cli.main import app
from zerolab.config import check_experiment, load_engine_config, resolve
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.reader import parse_engine_config
from zerolab.config.engine.trial_values import trial_values
from zerolab.errors import ConfigError

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": "auto", "auto_cast": "auto"},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": "auto",
        "contiguous_gradients": "auto",
        "reduce_bucket_size": "auto",
        "prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "sub_group_size": "auto",
    },
}
"""All that says ``"auto"`` in public files."""

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "max_steps": 200,
    "warmup_steps": 0,
    "warmup_ratio": 0.03,
    "bf16": True,
    "fp16": False,
}
"""Training arguments as Hugging Face's users give them."""


def entries_of(config: EngineConfig, ranks: int = 2) -> dict[str, tuple[Any, str]]:
    return {key: (value, origin) for key, value, origin in resolve(config, ranks)}


def problems(content: dict[str, Any], hyperparameters: dict[str, Any]) -> list[str]:
    return parse_engine_config(content, "file", hyperparameters=hyperparameters).problems


def test_auto_is_filled_from_training_arguments() -> None:
    config = load_engine_config(AUTO, hyperparameters={"training_arguments": ARGUMENTS})
    values = entries_of(config)
    prefix = "auto: hyperparameters.training_arguments"
    expected = {
        "train_batch_size": (16, "derived: the file says auto"),
        "train_micro_batch_size_per_gpu": (4, f"{prefix}.per_device_train_batch_size"),
        "gradient_accumulation_steps": (2, f"{prefix}.gradient_accumulation_steps"),
        "gradient_clipping": (0.5, f"{prefix}.max_grad_norm"),
        "optimizer.params.lr": (2e-3, f"{prefix}.learning_rate"),
        "optimizer.params.betas": (
            [0.8, 0.95],
            f"{prefix}.adam_beta1 and hyperparameters.training_arguments.adam_beta2",
        ),
        "optimizer.params.eps": (1e-6, f"{prefix}.adam_epsilon"),
        "optimizer.params.weight_decay": (0.1, f"{prefix}.weight_decay"),
        "scheduler.params.warmup_min_lr": (0.0, "auto: the default, 0"),
        "scheduler.params.warmup_max_lr": (2e-3, "auto: optimizer.params.lr"),
        "scheduler.params.total_num_steps": (200, f"{prefix}.max_steps"),
        "scheduler.params.warmup_num_steps": (
            6,
            f"{prefix}.warmup_ratio x scheduler.params.total_num_steps",
        ),
        "bf16.enabled": (True, f"{prefix}.bf16"),
        "fp16.enabled": (False, f"{prefix}.fp16"),
        "fp16.loss_scale": (0.0, "auto: as if absent"),
        "zero_optimization.stage3_prefetch_bucket_size": (None, "auto: as if absent"),
        "zero_optimization.sub_group_size": (None, "auto: as if absent"),
        "amp": (None, "hint: does not exist here, and is off"),
    }
    assert {key: values[key] for key in expected} == expected
    assert (
        config.zero_optimization
        == load_engine_config({"zero_optimization": {"stage": 3}}).zero_optimization
    )


def test_auto_with_few_hyperparameters() -> None:
    config = load_engine_config(
        AUTO,
        hyperparameters={"lr": 1e-3, "micro_batch_size": 2, "warmup_steps": 0, "max_steps": 10},
    )
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params == {"lr": 1e-3}
    assert config.scheduler.params["warmup_num_steps"] == 1
    assert config.gradient_clipping == 1.0
    assert config.dtype == "fp32"
    assert config.batch_sizes(4).train == 8
    values = entries_of(config)
    assert values["optimizer.params.betas"] == ([0.9, 0.999], "auto: the optimizer's default")


def test_undetermined_auto_is_rejected_once() -> None:
    assert [line.partition(": ") for line in problems(AUTO, {})] == [
        (
            "optimizer.params.lr",
            ": ",
            "must be a value, got 'auto', which nothing determines; give one, or set "
            "hyperparameters.lr or hyperparameters.learning_rate",
        ),
        (
            "scheduler.params.total_num_steps",
            ": ",
            "must be a value, got 'auto', which nothing determines; give one, or set "
            "hyperparameters.total_num_steps or hyperparameters.max_steps or "
            "searcher.max_length in batches",
        ),
        (
            "scheduler.params.warmup_max_lr",
            ": ",
            "must be a value, got 'auto', which nothing determines; give one, or set "
            "hyperparameters.warmup_max_lr or hyperparameters.learning_rate or hyperparameters.lr",
        ),
        (
            "scheduler.params.warmup_num_steps",
            ": ",
            "must be a value, got 'auto', which nothing determines; give one, or set "
            "hyperparameters.warmup_num_steps or hyperparameters.warmup_steps or "
            "hyperparameters.warmup_ratio",
        ),
        (
            "train_micro_batch_size_per_gpu",
            ": ",
            "must be a value, got 'auto', which nothing determines; give one, or set "
            "hyperparameters.train_micro_batch_size_per_gpu or "
            "hyperparameters.per_device_train_batch_size or hyperparameters.micro_batch_size",
        ),
    ]


@pytest.mark.parametrize(
    ("hyperparameters", "expected"),
    [
        ({}, "fp32"),
        ({"bf16": True}, "bf16"),
        ({"fp16": True, "bf16": False}, "fp16"),
        ({"mixed_precision": "bf16"}, "bf16"),
        ({"mixed_precision": "fp16", "fp16": False, "bf16": False}, "fp16"),
        ({"mixed_precision": "no"}, "fp32"),
        ({"mixed_precision": False}, "fp32"),
        ({"mixed_precision": "bf16", "bf16": True}, "bf16"),
    ],
)
def test_auto_precision(hyperparameters: dict[str, Any], expected: str) -> None:
    content = {"bf16": {"enabled": "auto"}, "fp16": "auto"}
    assert load_engine_config(content, hyperparameters=hyperparameters).dtype == expected


@pytest.mark.parametrize(
    ("content", "hyperparameters", "problem"),
    [
        ({}, {"bf16": True, "fp16": True}, "fp16.enabled: must be false where bf16.enabled"),
        ({}, {"bf16": True, "mixed_precision": "fp16"}, "fp16.enabled: must be false where"),
        ({"bf16": {"enabled": True}}, {"fp16": True}, "fp16.enabled: must be false where"),
        ({}, {"mixed_precision": "fp8"}, "hyperparameters.mixed_precision: must be no, fp16 or"),
        ({}, {"bf16": "yes"}, "bf16.enabled: must be true or false, got 'yes'"),
    ],
)
def test_conflicting_precisions_are_rejected(
    content: dict[str, Any], hyperparameters: dict[str, Any], problem: str
) -> None:
    autos = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    (line,) = problems(autos | content, hyperparameters)
    assert line.startswith(problem)


@pytest.mark.parametrize(
    ("hyperparameters", "steps"),
    [
        ({"warmup_steps": 7}, 7),
        ({"warmup_num_steps": 9, "warmup_steps": 7}, 9),
        ({"warmup_steps": 7, "warmup_ratio": 0.5}, 7),
        ({"warmup_steps": 0.1}, 5),
        ({"warmup_ratio": 0.011}, 1),
        ({"warmup_ratio": 0.03}, 2),
        ({"warmup_ratio": 0.0}, 1),
        ({"warmup_steps": 0}, 1),
    ],
)
def test_auto_warmup_steps(hyperparameters: dict[str, Any], steps: int) -> None:
    params = {"warmup_num_steps": "auto", "total_num_steps": 50}
    content = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    config = load_engine_config(content, hyperparameters=hyperparameters)
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_num_steps"] == steps


def test_invalid_hyperparameters_are_rejected() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    (line,) = problems({"scheduler": scheduler}, {"warmup_steps": -5})
    command = "must be at least 0, got -5"
    assert line == f"scheduler.params.warmup_num_steps: {command}"
    (line,) = problems({"scheduler": scheduler}, {"warmup_ratio": 0.5})
    assert line.startswith("scheduler.params.warmup_num_steps: must be a value, got 'auto'")
    with pytest.raises(ConfigError, match="hyperparameters: must be a mapping, got a list"):
        load_engine_config({}, hyperparameters=[1])  # type: ignore[arg-type]
    hyperparameters: dict[str, Any] = {"training_arguments": None, "warmup_steps": None, 3: 4}  # type: ignore[dict-item]
    assert len(problems({"scheduler": scheduler}, hyperparameters)) == 1


def test_auto_total_steps() -> None:
    params = {"total_num_steps": "auto"}
    content = {"scheduler": {"type": "WarmupDecayLR", "params": params}}

    def total(hyperparameters: dict[str, Any], batches: int | None) -> Any:
        config = parse_engine_config(content, "f", None, hyperparameters, batches).config
        assert config is not None
        assert config.scheduler is not None
        return config.scheduler.params.get("total_num_steps")

    assert total({"max_steps": 10}, 30) == 30
    assert total({"max_steps": 10, "total_num_steps": 20}, 30) == 20
    assert total({"max_steps": 10}, None) == 10
    (line,) = problems(content, {"max_steps": -1})
    assert line.startswith("scheduler.params.total_num_steps: must be a value, got 'auto'")


@pytest.mark.parametrize(
    ("content", "hyperparameters", "micro"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}, {}, 16),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, {}, 3),
        ({"train_batch_size": "auto"}, {"train_batch_size": 32}, 16),
        (
            {"train_batch_size": 32, "gradient_accumulation_steps": "auto"},
            {"gradient_accumulation_steps": 4},
            4,
        ),
    ],
)
def test_one_batch_size_is_sufficient(
    content: dict[str, Any], hyperparameters: dict[str, Any], micro: int
) -> None:
    assert (
        load_engine_config(content, hyperparameters=hyperparameters).batch_sizes(2).micro == micro
    )


def test_auto_stage_and_device_are_rejected() -> None:
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto", "pin_memory": "auto"}}
    lines = problems({"zero_optimization": zero}, {"device": "cpu"})
    assert [line.partition(":")[0] for line in lines] == [
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
    ]
    hyperparameters = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    config = load_engine_config({"zero_optimization": zero}, hyperparameters=hyperparameters)
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.offload_optimizer.device == "cpu"


def test_auto_uses_trial_of_process(
    tmp_path: Path,
) -> None:
    content = {"train_micro_batch_size_per_gpu": "auto"}
    with trial_values({"micro_batch_size": 3}):
        assert load_engine_config(content).train_micro_batch_size_per_gpu == 3
        with pytest.raises(ConfigError):
            load_engine_config(content, hyperparameters={})
    with pytest.raises(ConfigError):
        load_engine_config(content)
    with core.init(hparams={"micro_batch_size": 5}, directory=tmp_path):
        assert load_engine_config(content).train_micro_batch_size_per_gpu == 5
    with pytest.raises(ConfigError):
        load_engine_config(content)


def test_experiment_fills_auto() -> None:
    hyperparameters = {
        "deepspeed_config": "ds.json",
        "lr": {"type": "log", "minval": -4, "maxval": -2},
        "training_arguments": {"per_device_train_batch_size": 4, "warmup_ratio": 0.1},
    }
    experiment = {
        "entrypoint": "model_def:T",
        "hyperparameters": hyperparameters,
        "searcher": {"name": "random", "metric": "m", "max_trials": 2, "max_length": 40},
    }
    engine = json.dumps(AUTO).encode()
    files = MemoryFiles({"ds.json": engine, "model_def.py": b"class T(ZeroTrial): ..."})
    check_experiment(experiment, files)
    experiment["searcher"]["max_length"] = {"epochs": 2}  # type: ignore[index]
    experiment["records_per_epoch"] = 100
    with pytest.raises(ConfigError) as caught:
        check_experiment(experiment, files)
    assert [line.split(": ")[1] for line in caught.value.problems] == [
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
    ]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_check_command_fills_auto_from_file(nested: bool, suffix: str, tmp_path: Path) -> None:
    engine, arguments = tmp_path / "ds_config.json", tmp_path / f"arguments.{suffix}"
    engine.write_text(json.dumps(AUTO))
    arguments.write_text(json.dumps({"hyperparameters": ARGUMENTS} if nested else ARGUMENTS))
    command = ["config", "check", str(engine), "--hyperparameters", str(arguments)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "optimizer.params.lr = 0.002 (auto: hyperparameters.learning_rate)" in lines
    assert "train_batch_size = 8 (derived: the file says auto)" in lines
    missing = CliRunner().invoke(app, command[:3])
    assert missing.exit_code == 0, missing.output
    assert "ok; 'auto' of optimizer.params.lr, " in missing.output
    assert "is filled in by the script's arguments" in missing.output
    arguments.write_text("{}")
    missing = CliRunner().invoke(app, command)
    assert isinstance(missing.exception, ConfigError)
    assert len(missing.exception.problems) == 5


def test_check_command_rejects_hyperparameters_option(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text("entrypoint: python train.py\nsearcher: {name: single, metric: m}\n")
    command = ["config", "check", str(file), "--hyperparameters", str(file)]
    values = CliRunner().invoke(app, command).exception
    assert isinstance(values, ConfigError)
    assert values.problems == [
        "hyperparameters: must be given only with an engine file; an experiment has its own"
    ]


def test_default_rate_of_schedule_that_replaces_the_optimizer_rate_is_pointed_out() -> None:
    schedule: dict[str, Any] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.05}}
    content = {"train_batch_size": 2, "optimizer": optimizer, "scheduler": schedule}
    key = "scheduler.params.warmup_max_lr"
    value, origin = entries_of(load_engine_config(content))[key]
    assert value == 0.001
    assert origin.startswith("default: replaces optimizer.params.lr 0.05; set warmup_max_lr")
    schedule["params"]["warmup_max_lr"] = "auto"
    assert entries_of(load_engine_config(content))[key][0] == 0.05
    schedule["type"] = "WarmupLR"
    del schedule["params"]["warmup_max_lr"], schedule["params"]["total_num_steps"]
    assert entries_of(load_engine_config(content))[key] == (None, "default")
