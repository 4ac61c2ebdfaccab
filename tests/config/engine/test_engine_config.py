import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.key_tables import rows
from zerolab.config import (
    BatchSizes,
    check_file,
    load_engine_config,
    overwrite_deepspeed_config,
    resolve,
)
from zerolab.config.engine.dialect import dialect
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.optimizers import AdamParams
from zerolab.config.engine.reader import parse_engine_config
from zerolab.errors import ConfigError
from zerolab.schema.section import hints_of

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def problems(content: dict[str, Any], **more: Any) -> list[str]:
    """Return the problems of the strict reader, without normalization."""
    return parse_engine_config(content, "file", strict=True, **more).problems


@pytest.mark.needs_extension("cpu_optimizer")
def test_attributes_have_names_of_keys() -> None:
    config = load_engine_config(
        {
            "train_batch_size": 32,
            "gradient_clipping": 1,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 5e8,
                "offload_optimizer": {"device": "cpu"},
            },
            "fp16": {"enabled": True, "hysteresis": 3},
            **ADAM,
        }
    )
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.gradient_clipping == 1.0
    assert config.fp16.hysteresis == 3
    assert config.dtype == "fp16"
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3}
    assert pickle.loads(pickle.dumps(config)) == config


def test_all_errors_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    zero = {"stge": 2, "reduce_bucket_size": -1}
    file.write_text(json.dumps({"train_batch_size": "many", "zero_optimization": zero}))
    with pytest.raises(ConfigError) as caught:
        load_engine_config(file)
    assert str(caught.value) == (
        f"{file}: 3 problem(s)\n"
        "  train_batch_size: must be a whole number, got 'many'\n"
        "  zero_optimization.reduce_bucket_size: must be greater than 0, got -1\n"
        "  zero_optimization.stge: unknown key; did you mean 'stage'?"
    )
    assert isinstance(caught.value, ValueError)


PRUNING = {
    on: {"sparse_pruning": {"shared_parameters": {"enabled": on}, "different_groups": {}}}
    for on in (False, True)
}

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"train_batch_size": 1.5}, "train_batch_size: must be a whole number, got 1.5"),
    ({"train_batch_size": True}, "train_batch_size: must be a whole number, got True"),
    ({"train_batch_size": 0}, "train_batch_size: must be greater than 0, got 0"),
    ({"gradient_clipping": -0.5}, "gradient_clipping: must be at least 0"),
    ({"compile": {"backend": "auto"}}, "compile.backend: must be a value, got 'auto'"),
    ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op: must be 'mean' or 'sum'"),
    ({"communication_data_type": "int8"}, "communication_data_type: must be 'fp32'"),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis: must be "),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: must be at least 0"),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled: must be false where bf16.enabled is true",
    ),
    ({"bfloat16": {"enabled": True}}, "bfloat16: unknown key"),
    ({"zero_optimization": True}, "zero_optimization: must be a mapping of keys to values"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: must be 0, 1, 2 or 3"),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [1, 0.9]}}},
        "optimizer.params.betas[0]: must be less than 1, got 1",
    ),
    ({1: 2}, "[1]: keys must be strings, got 1"),  # type: ignore[dict-item]
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device: must be 'none' at stage 0",
    ),
    (
        {"zero_optimization": {"mics_shard_size": 2}},
        "zero_optimization.mics_shard_size: must be -1 at stage 0, which shards nothing, got 2",
    ),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": -2}},
        "zero_optimization.mics_shard_size: must be at least -1, got -2",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device: must be 'none' at stage 2, got 'cpu'; "
        "set zero_optimization.stage to 3",
    ),
    ({"reduce_scatter": True}, "reduce_scatter: unknown key; it belongs in zero_optimization"),
    (
        {"zero_optimization": {"zero_allow_untested_optimizer": True}},
        "zero_optimization.zero_allow_untested_optimizer: unknown key; it belongs at the top of",
    ),
    (
        {"optimizer": {"type": "Adam", "eps": 1e-8}},
        "optimizer.eps: unknown key; arguments go in 'params'",
    ),
    ({"max_grad_norm": 0.5}, "max_grad_norm: is not supported; set gradient_clipping"),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        "zero_optimization.offload_optimizer.nvme_path: is required for device 'nvme'",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}}},
        "zero_optimization.offload_optimizer.ratio: must be 1",
    ),
    (
        {"zero_optimization": {"cpu_offload": True}},
        "zero_optimization.cpu_offload: is not supported; set zero_optimization.offload_optimizer",
    ),
    ({"elasticity": {"enabled": True}}, "elasticity: is not supported; checkpoints load at any"),
    ({"amp": {"enabled": True}}, "amp: is not supported; set bf16.enabled"),
    ({"optimizer": "Adam"}, "optimizer: must be a mapping of keys to values, got 'Adam'"),
    ({"optimizer": {"params": {}}}, "optimizer.type: is required, got nothing"),
    ({"optimizer": {"type": "AdamZ"}}, "did you mean 'Adam'?"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: compressed communication"),
    (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm: is not an optimizer's parameter; set gradient_clipping",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"weight_dcay": 1.0}}},
        "optimizer.params.weight_dcay: unknown key; did you mean 'weight_decay'?",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
        "optimizer.params.betas: must have at least 2 items",
    ),
    ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, "optimizer.params.lr: must be"),
    ({"scheduler": {"type": "Nope"}}, "scheduler.type: must be one of WarmupLR"),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "scheduler.params.total_num_steps: is required, got nothing",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}},
        "scheduler.params.warmup_num_steps: must be a whole number",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
        "scheduler.params.warmup_type: must be 'log' or 'linear', got 'cubic'",
    ),
    (
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor: must be 1 where prescale_gradients divides",
    ),
    (
        {"prescale_gradients": True, "gradient_allreduce_op": "sum"},
        "gradient_allreduce_op: must be 'mean' where",
    ),
    (
        {"scheduler": {"type": "LinearWarmupLR", "params": {"warmup_type": "log"}}},
        "scheduler.params.warmup_type: unknown key",
    ),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype: must be 'fp32'"),
    ({"checkpoint": {"tag_validation": "MAYBE"}}, "checkpoint.tag_validation: must be"),
    (
        {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
        "zero_optimization.prefetch_bucket_size: is an alias of",
    ),
]


@pytest.mark.parametrize(("content", "problem"), REFUSALS, ids=lambda value: str(value)[:60])
@pytest.mark.needs_extension("deepspeed_config")
def test_error_is_one_line(content: dict[str, Any], problem: str) -> None:
    (line,) = problems(content)
    assert problem in line


def file_with(key: str, value: Any) -> dict[str, Any]:
    """Return a file with one dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("key", sorted(dialect().unsupported))
def test_unsupported_key_is_rejected_unless_off(key: str) -> None:
    (line,) = problems(file_with(key, {"enabled": True, "autotp_size": 2}))
    assert line.startswith(f"{key}: is not supported; ")
    assert load_engine_config(file_with(key, None)).off == (key,)


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("amp", [False, {}, {"enabled": False}, {"opt_level": "O1"}], [True, {"enabled": True}]),
        ("autotuning", [{"enabled": False}, {"fast": True}], [{"enabled": True}]),
        ("compression_training", [{}, PRUNING[False]], [PRUNING[True]]),
        ("zero_optimization.zenflow", [False], [{}, {"topk_ratio": 0.1}, True]),
        ("sparse_attention", [False], [{}, {"mode": "fixed"}]),
        ("datastates_ckpt", [False], [{}, True]),
        ("tensor_parallel.autotp_size", [0, 1], [2, False]),
        ("tensor_parallel.tp", [{}, {"tp_size": 1}], [{"tp_size": 2}]),
        ("zero_optimization.zero_hpz_partition_size", [0, 1], [2, False, True]),
        ("zero_optimization.zeropp_loco_param", [False], [{}, {"err_beta": 0.8}]),
        ("zero_optimization.cpu_offload", [False], [True, 0, {}]),
        ("zero_optimization.grad_hooks", [True], [False]),
        ("data_parallel_size", [], [1, 2, False]),
        ("seq_parallel_communication_data_type", ["fp32"], ["bf16"]),
        ("data_types.buffer_dtype", [], ["bf16", False]),
        ("data_types.keep_in_fp32_modules", [[]], [["norm"]]),
        ("compile.double_buffer", [True, False], [2]),
        ("compile.free_activation_threshold", [10_485_760], [0]),
        ("compile.deepcompile", [False], [True, {}]),
        ("sparse_gradients", [False], [True, 1]),
    ],
)
@pytest.mark.needs_extension("deepspeed_config")
def test_off_values_of_unsupported_keys(key: str, off: list[Any], on: list[Any]) -> None:
    for value in off:
        assert problems(file_with(key, value)) == [], value
        assert load_engine_config(file_with(key, value)).off == (key,)
    for value in on:
        (line,) = problems(file_with(key, value))
        assert line == f"{key}: is not supported; {dialect().unsupported[key].instead}", value


def test_managed_gradient_accumulation() -> None:
    file = {"train_batch_size": 8, "managed_gradient_accumulation": False}
    config = load_engine_config(file)
    assert config.managed_gradient_accumulation is False
    assert config.off == ()


@pytest.mark.parametrize(
    ("specified", "ranks", "sizes"),
    [
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 2, (32, 4, 4)),
        ((32, None, 4), 2, (32, 4, 4)),
        ((None, 4, 3), 2, (24, 4, 3)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 4, None), 2, (8, 4, 1)),
    ],
)
def test_missing_batch_sizes_are_derived(
    specified: tuple[int | None, ...], ranks: int, sizes: tuple[int, int, int]
) -> None:
    config = load_engine_config(_batch(*specified))
    assert config.batch_sizes(ranks) == BatchSizes(*sizes, ranks)


@pytest.mark.parametrize(
    ("specified", "ranks", "problem"),
    [
        ((None, None, None), 2, "both are missing"),
        ((None, None, 4), 2, "both are missing"),
        ((30, 4, 3), 2, "= 4 x 3 x 2 = 24, got 30; leave one of the three out"),
        ((32, 5, None), 2, "must be a multiple of micro-batch x data-parallel ranks = 5 x 2 = 10"),
        ((32, None, 3), 2, "= 3 x 2 = 6, got 32; the nearest is 30 or 36"),
        ((1, None, None), 2, "= 1 x 2 = 2, got 1; the nearest is 2"),
    ],
)
def test_inconsistent_batch_sizes_are_rejected(
    specified: tuple[int | None, ...], ranks: int, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(_batch(*specified)).batch_sizes(ranks)
    (line,) = caught.value.problems
    assert problem in line


def _batch(train: int | None, micro: int | None, steps: int | None) -> dict[str, Any]:
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }


sizes = st.one_of(st.none(), st.integers(1, 64))


@settings(max_examples=100, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 8))
def test_resolved_batch_sizes_are_consistent(
    train: int | None, micro: int | None, steps: int | None, ranks: int
) -> None:
    config = load_engine_config(_batch(train, micro, steps))
    if config.batch_problem(ranks):
        return
    resolved = config.batch_sizes(ranks)
    assert resolved.train == resolved.micro * resolved.accumulation_steps * ranks
    assert train in (None, resolved.train)
    assert micro in (None, resolved.micro)
    assert steps in (None, resolved.accumulation_steps)


@pytest.mark.needs_extension("deepspeed_config")
def test_aliases_of_keys() -> None:
    zero = {"gather_16bit_weights_on_model_save": True}
    config = load_engine_config({"zero_optimization": zero})
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save is True


@pytest.mark.parametrize(
    ("written", "usual"), [("adam", "Adam"), ("Lamb", "LAMB"), ("MUON", "Muon"), ("sgd", "SGD")]
)
def test_optimizer_names_ignore_case(written: str, usual: str) -> None:
    optimizer = load_engine_config({"optimizer": {"type": written}}).optimizer
    assert optimizer is not None
    assert optimizer.type == usual


def test_hints_have_reasons() -> None:
    hints = hints_of(EngineConfig)
    assert "zero_optimization.contiguous_gradients" in hints
    assert all(len(reason.split()) > 3 for reason in hints.values())


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested blocks."""
    content: dict[str, Any] = {}
    for key, value in values.items():
        *blocks, last = key.split(".")
        parent = content
        for block in blocks:
            parent = parent.setdefault(block, {})
        parent[last] = value
    return content


def reported_hints(values: dict[str, Any], file: Path) -> dict[str, str]:
    """Return the reasons that ``zerolab config check`` prints for keys without effect."""
    file.write_text(json.dumps(nested({"train_batch_size": 4, **values})))
    lines = re.findall(r"^ *(\S+) = .*\(hint: (.*)\)$", check_file(file, 2), re.MULTILINE)
    return dict(lines)


def test_check_explains_hints(
    tmp_path: Path,
) -> None:
    hints = hints_of(EngineConfig)
    defaults = {key: value for key, _, value, _ in rows(EngineConfig, "DeepSpeed")}
    values = {key: yaml.safe_load(defaults[key].strip("`")) for key in hints}
    values = {key: "x" if value is None else value for key, value in values.items()}
    values["vocabulary_size"] = values["activation_checkpointing.number_checkpoints"] = 8
    values["checkpoint.writer.data_parallel"] = "replica"
    of_optimizer = hints_of(AdamParams, "optimizer.params.")
    values |= {"optimizer.type": "Adam", **dict.fromkeys(of_optimizer, True)}
    assert reported_hints(values, tmp_path / "ds_config.json") == hints | of_optimizer


@pytest.mark.needs_extension("all_reduce")
def test_check_reports_keys_without_effect_at_stage(tmp_path: Path) -> None:
    zero = {
        "reduce_bucket_size": 8,
        "allgather_bucket_size": 8,
        "overlap_comm": False,
        "reduce_scatter": False,
        "sub_group_size": 8,
        "stage3_prefetch_bucket_size": 8,
        "stage3_param_persistence_threshold": 8,
        "stage3_model_persistence_threshold": 8,
        "stage3_max_live_parameters": 8,
        "stage3_max_reuse_distance": 8,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    for stage in range(4):
        values = {f"zero_optimization.{key}": value for key, value in zero.items()}
        values["zero_optimization.stage"] = stage
        hints = reported_hints(values, tmp_path / "ds_config.json")
        resolved = {key.rpartition(".")[2] for key in hints}
        flat = {"reduce_bucket_size", "overlap_comm"}
        sharded = {"allgather_bucket_size", "reduce_scatter"}
        of_3 = set(zero) - flat - sharded
        without = {0: of_3 | sharded, 1: of_3, 2: of_3, 3: flat | sharded}
        assert resolved == without[stage]
        assert all(re.fullmatch(r"has an effect at stage [\d, ]+ only", r) for r in hints.values())


@pytest.mark.needs_extension("deepspeed_config")
def test_stage_3_limits_are_unset_by_default() -> None:
    live, reuse = "stage3_max_live_parameters", "stage3_max_reuse_distance"

    def limits(zero: dict[str, Any]) -> list[tuple[Any, str]]:
        content = {"train_batch_size": 4, "zero_optimization": zero}
        entries = resolve(load_engine_config(content), 2)
        resolved = {key.rpartition(".")[2]: (value, origin) for key, value, origin in entries}
        return [resolved[key] for key in (live, reuse) if key in resolved]

    assert limits({"stage": 3}) == [(None, "default"), (None, "default")]
    assert limits({"stage": 3, live: 5}) == [(5, "file"), (10**9, "derived")]
    assert limits({"stage": 3, "max_reuse_distance": 5}) == [(10**9, "derived"), (5, "file")]
    assert limits({"stage": 2}) == []
    assert limits({"stage": 2, live: 5}) == [(5, "hint: has an effect at stage 3 only")]


def test_null_means_the_default() -> None:
    nulls = {"fp16": None, "steps_per_print": None, "zero_optimization": {"stage": None}}
    assert load_engine_config(nulls) == load_engine_config({"zero_optimization": {}})


@pytest.mark.needs_extension("deepspeed_config")
def test_deepspeed_file_is_accepted_with_hints() -> None:
    config = load_engine_config(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 2000,
            "prescale_gradients": False,
            "zero_allow_untested_optimizer": True,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_min_lr": 0, "warmup_num_steps": 500, "total_num_steps": 1e4},
            },
            "fp16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "min_loss_scale": 1},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": 1e6,
                "stage3_prefetch_bucket_size": 1e6,
                "stage3_param_persistence_threshold": 1e5,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "activation_checkpointing": {"partition_activations": False, "profile": False},
            "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
            "flops_profiler": {"enabled": False, "profile_step": 1},
            "comms_logger": {"enabled": False},
            "tensorboard": {"enabled": True, "output_path": "logs"},
            "wandb": {"enabled": False},
            "elasticity": {"enabled": False},
            "wall_clock_breakdown": False,
        }
    )
    hints = {key for key, _, origin in resolve(config, 2) if origin.startswith("hint")}
    assert "zero_optimization.contiguous_gradients" in hints
    assert "tensorboard.enabled" not in hints  # it is written
    assert "wandb" in hints
    assert "zero_optimization.stage" not in hints
    assert config.batch_sizes(2).accumulation_steps == 8


@pytest.mark.needs_extension("deepspeed_config")
def test_ambiguous_hyperparameter_fills_no_auto() -> None:
    content = {"train_batch_size": 8, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    both = {"bf16": True, "fp16": False, "enabled": True}
    config = load_engine_config(content, hyperparameters=both)
    assert (config.bf16.enabled, config.fp16.enabled) == (True, False)
    assert load_engine_config(content, hyperparameters={"enabled": True}).dtype == "fp32"


@pytest.mark.needs_extension("deepspeed_config")
def test_missing_auto_batch_size_is_reported_once(tmp_path: Path) -> None:
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(sizes))
    with pytest.raises(ConfigError) as caught:
        check_file(file, hyperparameters={})
    (line,) = caught.value.problems
    assert line.startswith("train_micro_batch_size_per_gpu: must be a value, got 'auto'")


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ((32, 2, 4), "4 ("),
        ((32, 2, None), "1, 2, 4, 8, 16 ("),
        ((None, 2, 4), "any ("),
        ((12, None, None), "1, 2, 3, 4, 6, 12 ("),
    ],
)
def test_check_lists_possible_world_sizes(
    tmp_path: Path, sizes: tuple[int | None, ...], fits: str
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    specified = {key: size for key, size in zip(keys, sizes, strict=True) if size}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(specified))
    assert f"world sizes that fit: {fits}" in check_file(file)
    assert "world sizes" not in check_file(file, 4)
    file.write_text(
        json.dumps(specified | {"train_batch_size": 7, "gradient_accumulation_steps": 5})
    )
    if sizes[1]:
        with pytest.raises(ConfigError, match="train_batch_size"):
            check_file(file)


@pytest.mark.needs_extension("deepspeed_config")
def test_check_leaves_auto_of_launched_scripts_open(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto"}))
    file = tmp_path / "experiment.yaml"
    launcher = "python3 -m determined.launch.deepspeed"
    searcher = {"name": "single", "metric": "loss", "max_length": 10}
    for entrypoint in (f"{launcher} train.py", [*launcher.split(), "train.py"]):
        config = {
            "entrypoint": entrypoint,
            "searcher": searcher,
            "hyperparameters": {"deepspeed_config": "ds.json"},
        }
        file.write_text(json.dumps(config))
        with pytest.raises(ConfigError) as caught:
            check_file(file)
        assert [line.partition(":")[0] for line in caught.value.problems] == ["entrypoint"]


@pytest.mark.needs_extension("Muon")
def test_muon_and_one_cycle_keys(tmp_path: Path) -> None:
    muon = {"lr": 1e-3, "muon_lr": 2e-2, "adam_lr": 1e-4, "ns_method": "gram"}
    cycle = {
        "cycle_min_lr": [1e-4, 1e-3],
        "cycle_max_lr": [1e-3, 1e-2],
        "cycle_min_mom": [0.8, 0.85],
        "cycle_max_mom": [0.9, 0.95],
    }
    content = {
        "train_batch_size": 4,
        "optimizer": {"type": "Muon", "torch_adam": True, "legacy_fusion": False, "params": muon},
        "scheduler": {"type": "OneCycle", "params": cycle},
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(content))
    shown = check_file(file)
    assert "ns_method = gram" in shown
    assert "(hint: torch.optim.Muon has one" in shown
    assert "optimizer.torch_adam = true" in shown
    content["optimizer"]["params"]["ns_method"] = "other"  # type: ignore[index]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="ns_method"):
        check_file(file)


def test_duplicate_keys_and_infinity_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 4, "fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match="enabled: must be given once"):
        load_engine_config(file)
    file.write_text('{"gradient_clipping": NaN}')
    with pytest.raises(ConfigError, match="gradient_clipping: must be a finite number, got nan"):
        load_engine_config(file)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="must be a mapping of keys to values, got list"):
        load_engine_config(file)
    with pytest.raises(ConfigError, match="file: must exist"):
        load_engine_config(tmp_path / "absent.json")


def test_merge_requires_mappings() -> None:
    with pytest.raises(ConfigError) as caught:
        overwrite_deepspeed_config([{"a": 1}], None)  # type: ignore[arg-type]
    assert caught.value.problems == [
        "base: must be the path of a JSON file or a mapping, got a list",
        "overrides: must be a mapping, got a NoneType",
    ]


@pytest.mark.parametrize(
    ("base", "overrides", "merged"),
    [
        ({"o": {"t": "Adam", "p": {"lr": 1}}}, {"o": {"p": {"lr": 2}}}, {"lr": 2}),
        ({"o": "auto"}, {"o": {"p": {"lr": 2}}}, {"lr": 2}),
        ({"o": None}, {"o": {"p": {"lr": 2}}}, {"lr": 2}),
        ({"o": [1]}, {"o": {"p": {"lr": 2}}}, {"lr": 2}),
        ({"o": {"p": 3}}, {"o": {"p": {"lr": 2}}}, {"lr": 2}),
        ({"o": {"p": {"lr": [0.9, 0.99]}}}, {"o": {"p": {"lr": [0.8]}}}, {"lr": [0.8]}),
        ({"o": {"p": {"lr": 1}}}, {"o": {"p": None}}, None),
        ({"o": {"p": {"lr": 1}}}, {"o": {}}, {"lr": 1}),
    ],
)
def test_overrides_merge_mappings(
    base: dict[str, Any], overrides: dict[str, Any], merged: Any
) -> None:
    before = json.dumps([base, overrides])
    result = overwrite_deepspeed_config(base, overrides)
    assert result["o"]["p"] == merged
    if isinstance(result["o"].get("p"), dict):
        result["o"]["p"]["lr"] = "changed"
    assert json.dumps([base, overrides]) == before


def test_overrides_of_file(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 8, **ADAM}))
    merged = overwrite_deepspeed_config(str(file), {"train_batch_size": 16})
    assert merged == {"train_batch_size": 16, **ADAM}
    config = load_engine_config(file, {"optimizer": {"params": {"lr": 0.5}}})
    assert config.overridden == {"optimizer.params.lr"}
    assert config.source == str(file)


def test_null_parameter_means_default() -> None:
    config = load_engine_config(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": None}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": None}},
        }
    )
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params == {"lr": 0.5}
    assert config.scheduler.params == {}


@pytest.mark.parametrize("off", [-1, 0])
def test_shard_size_off_means_all_ranks(off: int) -> None:
    config = load_engine_config({"zero_optimization": {"mics_shard_size": off}})
    assert config.zero_optimization.shard_ranks is None
    assert config.layout_problem(3) is None


@pytest.mark.needs_extension("tensor_parallel", "pipeline")
def test_shard_size_divides_data_parallel_size() -> None:
    zero = {"stage": 3, "mics_shard_size": 2}
    config = load_engine_config({"zero_optimization": zero, "tensor_parallel": {"size": 2}})
    assert config.layout_problem(8) is None
    assert config.layout_problem(3) == (
        "tensor_parallel.size: must divide the number of ranks, 3, got 2"
    )
    assert config.layout_problem(6) == (
        "zero_optimization.mics_shard_size: must divide the number of data-parallel ranks, 3, got 2"
    )


@pytest.mark.needs_extension("tensor_parallel", "pipeline")
def test_pipeline_stages_are_not_replicas() -> None:
    both = load_engine_config({"tensor_parallel": {"size": 2}, "pipeline": {"stages": 4}})
    assert both.data_parallel_size(16) == 2
    assert both.layout_problem(12) == (
        "pipeline.stages x tensor_parallel.size: must divide the number of ranks, 12, got 4 x 2"
    )
    stages = load_engine_config({"pipeline": {"stages": 4}})
    assert stages.layout_problem(6) == "pipeline.stages: must divide the number of ranks, 6, got 4"
