"""Engine files in public forms: normalization and its messages."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.config.memory_files import MemoryFiles
from zerolab.cli.main import app
from zerolab.config import (
    check_experiment,
    check_file,
    load_engine_config,
    overwrite_deepspeed_config,
)
from zerolab.config.engine.reader import parse_engine_config
from zerolab.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}

CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"steps_per_print": float("inf")}, {}, "steps_per_print: inf means never"),
    ({"steps_per_print": "Infinity"}, {}, "steps_per_print: Infinity means never"),
    ({"_comment": "for 8 GPUs"}, {}, "_comment: is a comment"),
    ({"fp16": {"//": ["a", "b"]}}, {"fp16": {}}, "fp16.//: is a comment"),
    (
        {"zero_optimization.stage": 3, "zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"zero_optimization": {"stage": 3, "overlap_comm": True}},
        "zero_optimization.stage: a dotted key; read as 'stage' inside 'zero_optimization', "
        "instead of 2",
    ),
    (
        {"zero_optimization.offload_param.device": "cpu", "zero_optimization.stage": 3},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device: a dotted key; read as 'device' inside "
        "'zero_optimization.offload_param'",
    ),
    (
        {
            "gradient_clipping": "1.0",
            "steps_per_print": "10",
            "zero_optimization": {"stage": "2", "reduce_bucket_size": "5e8"},
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": ["0.9", "0.95"]}},
            "csv_monitor": {"enabled": True, "job_name": "2024"},
        },
        {
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
            "csv_monitor": {"enabled": True, "job_name": "2024"},
        },
        "optimizer.params.lr: the text '1e-4' is read as 0.0001",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2}},
        "zero_optimization.offload_param: device 'cpu' is left out; it has an effect at stage 3",
    ),
    (
        {"fp16": {"enabled": "true"}},
        {"fp16": {"enabled": True}},
        "fp16.enabled: the text 'true' is read as true",
    ),
    (
        {"zero_optimization": True},
        {"zero_optimization": {"stage": 1}},
        "zero_optimization: True is read as stage 1, as in DeepSpeed",
    ),
    (
        {"zero_optimization": {"stage": 3, "sub_group_size": 0}},
        {"zero_optimization": {"stage": 3}},
        "zero_optimization.sub_group_size: 0 is no size",
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 230.4}},
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 230}},
        "zero_optimization.stage3_prefetch_bucket_size: 230.4 elements are read as 230",
    ),
    (
        {"compile": {"disable": False, "backend": "inductor"}},
        {"compile": {"backend": "inductor"}},
        "compile.disable: false turns nothing on",
    ),
    (
        {"compile": {"disable": True, "enabled": True}},
        {"compile": {"enabled": False}},
        "compile.disable: true is read as compile.enabled: false",
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.cpu_offload: an old name; read as "
        'zero_optimization.offload_optimizer: {"device": "cpu"}',
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.cpu_offload_params: an old name",
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": True}},
        {"zero_optimization": {"stage": 2}},
        "zero_optimization.cpu_offload_use_pin_memory: true is the default of pin_memory",
    ),
    (
        {"tensor_parallel": {"autotp_size": 2}},
        {"tensor_parallel": {"size": 2}},
        "tensor_parallel.autotp_size: DeepSpeed's name; read as tensor_parallel.size: 2",
    ),
    (
        {"tensor_parallel": {"enabled": True, "tp": {"tp_size": 4}}},
        {"tensor_parallel": {"size": 4, "tp": {}}},
        "tensor_parallel.tp.tp_size: DeepSpeed's name; read as tensor_parallel.size: 4",
    ),
    ({"data_parallel_size": 2}, {}, "data_parallel_size: 2 is left out; it follows from"),
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}, "bfloat16: an old name of bf16"),
    (
        {"communication_data_type": "bfloat16"},
        {"communication_data_type": "bf16"},
        "communication_data_type: 'bfloat16' is read as 'bf16'",
    ),
    (
        {"data_types": {"grad_accum_dtype": "torch.float32"}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype: 'torch.float32' is read as 'fp32'",
    ),
    (
        {"gradient_allreduce_op": "SUM"},
        {"gradient_allreduce_op": "sum"},
        "gradient_allreduce_op: 'SUM' is read as 'sum'",
    ),
    ({"disable_allgather": True}, {}, "disable_allgather: left out; updated weights must reach"),
    (
        {"comms_config": {"comms_logger": {"enabled": False}}},
        {},
        "comms_config: turns nothing on, and DeepSpeed reads no such key",
    ),
    ({"monitor_config": {"tag": "x"}}, {}, "monitor_config: turns nothing on"),
]


@pytest.mark.parametrize(
    ("written", "normalized", "line"), CHANGES, ids=lambda value: str(value)[:50]
)
def test_public_forms_are_normalized_unless_strict(
    written: dict[str, Any],
    normalized: dict[str, Any],
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = json.dumps(written)
    config = load_engine_config(BATCH | written)
    assert config == load_engine_config(BATCH | normalized)
    messages = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith(f"engine config: {line}") for text in messages) == 1
    assert json.dumps(written) == before
    assert not parse_engine_config(BATCH | normalized, "file").changes
    assert parse_engine_config(BATCH | written, "file", strict=True).problems


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"bf16": {}, "bfloat16": {"enabled": True}}, "bfloat16: unknown key"),
        ({"comms_config": {"enabled": True}}, "comms_config: is not supported; set comms_logger"),
        ({"tensor_parallel": {"autotp_size": "two"}}, "tensor_parallel.size: must be a"),
        (
            {"tensor_parallel": {"autotp_size": 2, "size": 4}},
            "tensor_parallel.autotp_size: is not supported; set tensor_parallel.size alone",
        ),
        (
            {"monitor_config": {"csv_monitor": {"enabled": True}}},
            "monitor_config: is not supported; set tensorboard or csv_monitor",
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {}}},
            "zero_optimization.cpu_offload: is not supported",
        ),
        ({"zero_optimisation.stage": 2}, "zero_optimisation.stage: unknown key"),
        ({"zero_optimization": 3, "zero_optimization.stage": 2}, "must be a mapping of keys"),
        (
            {"zero_optimization": {"offload_param": 3}, "zero_optimization.offload_param.a": 1},
            "zero_optimization.offload_param: must be a mapping of keys to values, got 3",
        ),
        ({"zero_optimization..stage": 2}, "zero_optimization..stage: unknown key"),
        ({"_stage": 2}, "_stage: unknown key"),
        ({"steps_per_print": float("nan")}, "steps_per_print: must be a finite number, got nan"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping: must be a finite number"),
        ({"fp8": {"enabled": True}}, "fp8: is not supported; the engine computes in fp32"),
    ],
)
def test_ambiguous_values_are_rejected(content: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(BATCH | content)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


WITH_COMMENTS = """{
  // the batch
  "train_batch_size": 8, # of all ranks
  /* how it is sharded */
  "zero_optimization": {"stage": 2,},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e2,},},
  "steps_per_print": Infinity,
}"""


def test_comments_and_trailing_commas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(WITH_COMMENTS)
    config = load_engine_config(file)
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 2)
    assert config.scheduler is not None
    assert config.scheduler.params == {"warmup_num_steps": 100}
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: line 2, column 3: is no plain JSON without comments, got a comment; "
        "read as hjson, as DeepSpeed does",
        f"{file}: steps_per_print: inf means never; left out, and no line of progress is printed",
    ]
    merged = overwrite_deepspeed_config(file, {"zero_optimization": {"stage": 1}})
    assert merged["zero_optimization"] == {"stage": 1}
    with pytest.raises(ConfigError, match="line 2, column 3: must be JSON without comments"):
        check_file(file, strict=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"fp16": {"enabled": True,\n}}', "fp16.enabled: must be JSON, got True; write true"),
        ('{"a": one, \n"b": 2 }', 'a: must be in "double quotes" or be JSON, got one'),
        ('{"a": 1, "a": 2,}', "a: must be given once"),
        ('{"a": [1, 2}', "line 1, column 12: must be JSON"),
        ("train_batch_size: 8", "line 1, column 1: must be JSON"),
        ("", "got the end of the file before everything is closed"),
        ('{"a": 1e999,}', "got a comma before '}'"),
        ('{"a":' * 2000, "file: must be nested at most 64 deep"),
        ('{"a":' * 400, "got the end of the file"),
    ],
)
def test_hjson_error_describes_syntax(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_engine_config(file)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_changes_are_logged_by_one_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    load_engine_config(BATCH | {"_comment": "x"})
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    load_engine_config(BATCH | {"_comment": "x"})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_override_precedes_dotted_and_old_keys() -> None:
    base = {"zero_optimization.stage": 2, "zero_optimization": {"cpu_offload": True}}
    zero = {"stage": 3, "offload_optimizer": {"device": "none"}}
    merged = overwrite_deepspeed_config(base, {"zero_optimization": zero})
    assert merged == {"zero_optimization": zero}
    dotted = overwrite_deepspeed_config({"zero_optimization": zero}, {"zero_optimization.stage": 1})
    assert dotted["zero_optimization"] == zero | {"stage": 1}


def test_check_command_shows_changes(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(BATCH | {"_comment": "x", "gradient_allreduce_op": "SUM"}))
    shown = CliRunner().invoke(app, ["config", "check", str(file)])
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert lines[1:3] == [
        "changed: _comment: is a comment, and left out",
        "changed: gradient_allreduce_op: 'SUM' is read as 'sum'",
    ]
    assert "gradient_allreduce_op = sum (file)" in lines
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["config", "check", "--strict", str(file)], catch_exceptions=False)
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "_comment",
        "gradient_allreduce_op",
    ]


def test_engine_file_of_experiment_is_normalized() -> None:
    experiment = {
        "entrypoint": "model_def:T",
        "hyperparameters": {"deepspeed_config": "ds.json"},
        "searcher": {"name": "single", "metric": "loss", "max_length": 10},
    }
    engine = b'{"train_batch_size": 8, "steps_per_print": Infinity\n, } // end'
    files = MemoryFiles({"ds.json": engine, "model_def.py": b"class T(ZeroTrial): ..."})
    check_experiment(experiment, files)
    with pytest.raises(ConfigError, match=r"ds\.json: file: .* got Infinity"):
        check_experiment(experiment, files, strict=True)
