"""Twenty kinds of public engine files, accepted or rejected."""

from pathlib import Path

import pytest

from zerolab.config.validation import check_file
from zerolab.errors import ConfigError

FILES = Path(__file__).parent / "public"

ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "warmup_steps": 10,
    "max_steps": 100,
    "bf16": True,
    "fp16": False,
    "offload_optimizer_device": "cpu",
}
"""Values that a Trainer or a launcher provides."""

ACCEPTED: dict[str, list[str]] = {
    "accelerate_zero2": [
        "changed: steps_per_print: inf means never",
        "zero_optimization.offload_optimizer.device = cpu  (auto: hyperparameters.offload",
    ],
    "axolotl_zero1": ["bf16.enabled = true  (auto: hyperparameters.bf16)"],
    "axolotl_zero1_compile": [
        "changed: compile.disable: false turns nothing on",
        "compile.enabled = false  (default)",
    ],
    "axolotl_zero3": [
        "changed: zero_optimization.sub_group_size: 0 is no size",
        "zero_optimization.stage3_prefetch_bucket_size = null  (auto: as if absent)",
    ],
    "factory_zero0": [
        "zero_optimization.stage = 0  (file)",
        "zero_allow_untested_optimizer = true  (hint: any optimizer may be used",
    ],
    "factory_zero3": ["zero_optimization.stage3_max_live_parameters = 1_000_000_000  (file)"],
    "lightning_zero2": ["aio.block_size = 1_048_576  (hint: files are read and written"],
    "old_bfloat16": [
        "changed: bfloat16: an old name of bf16",
        "changed: communication_data_type: 'bfloat16' is read as 'bf16'",
        "gradient_allreduce_op = sum  (file)",
    ],
    "old_zero2_offload": [
        "changed: disable_allgather: left out",
        "changed: zero_optimization.cpu_offload_use_pin_memory: true is the default",
        "zero_optimization.offload_optimizer.device = cpu  (file)",
    ],
    "parameters_in_files": [
        "zero_optimization.offload_param.device = nvme  (file)",
        "zero_optimization.offload_param.max_in_cpu = 1_000_000_000  (hint: the system keeps",
    ],
    "factory_tensor_parallel": [
        "changed: tensor_parallel.autotp_size: DeepSpeed's name; read as tensor_parallel.size: 2",
        "tensor_parallel.size = 2",
    ],
    "profiled": ["wandb = null  (hint: does not exist here, and is off)"],
    "trainer_zero2_offload": [
        "scheduler.params.warmup_max_lr = 0.001  (auto: optimizer.params.lr)",
        "train_batch_size = 16  (derived: the file says auto)",
    ],
    "trainer_zero3_offload": [
        "scheduler.params.total_num_steps = 100  (auto: hyperparameters.max_steps)",
        "optimizer.params.eps = 1e-08  (auto: the optimizer's default)",
    ],
    "trl_zero3": [
        "changed: zero_optimization.reduce_bucket_size: a dotted key; read as",
        "zero_optimization.stage3_param_persistence_threshold = 640  (file)",
    ],
    "with_comments": ["changed: line 2, column 3: is no plain JSON without comments"],
}
"""Lines of the report."""

UNSUPPORTED_KEYS: dict[str, list[str]] = {
    "bert_max_grad_norm": [
        "optimizer.params.max_grad_norm: is not an optimizer's parameter; set gradient_clipping",
    ],
    "factory_fp8": ["fp8: is not supported; the engine computes in fp32, fp16 or bf16"],
    "one_bit_adam": ["optimizer.type: compressed communication is not supported; use 'Adam'"],
    "zero_plus_plus": [
        "zero_optimization.zero_quantized_weights: is not supported; communication is not",
        "zero_optimization.zero_hpz_partition_size: is not supported; there is no second",
        "zero_optimization.zero_quantized_gradients: is not supported; communication is not",
    ],
}
"""All reported problems."""


def test_all_public_files_are_listed() -> None:
    names = sorted(file.stem for file in FILES.iterdir())
    assert len(names) == 20
    assert names == sorted([*ACCEPTED, *UNSUPPORTED_KEYS])


_TENSOR = pytest.mark.needs_extension("tensor_parallel")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=_TENSOR) if "tensor" in name else name for name in ACCEPTED],
)
def test_accepted_file_report(name: str) -> None:
    report = check_file(FILES / f"{name}.json", 2, ARGUMENTS)
    lines = [line.strip() for line in report.splitlines()]
    lines = ["  (".join(part.strip() for part in line.split("  (", 1)) for line in lines]
    for expected in ACCEPTED[name]:
        assert any(line.startswith(expected) for line in lines), report


@pytest.mark.parametrize("name", UNSUPPORTED_KEYS)
def test_rejected_file_reasons(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_file(FILES / f"{name}.json", 2, ARGUMENTS)
    reported = caught.value.problems
    assert len(reported) == len(UNSUPPORTED_KEYS[name]), reported
    for line, expected in zip(reported, UNSUPPORTED_KEYS[name], strict=True):
        assert line.startswith(expected), reported
