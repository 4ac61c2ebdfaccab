"""``zerolab plan``: profile of a trial's model without training, and its memory."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.waiting import DEADLINE_S
from zerolab.config.engine.reader import load_engine_config
from zerolab.config.engine.zero import ZeroConfig
from zerotrial.engine.builder.build import initialize
from zerotrial.engine.builder.environment import planning
from zerotrial.engine.engine import Engine
from zerotrial.engine.flat.layout import choose_bucket_numel
from zerotrial.extensions.pipeline import PipelineModule
from zerotrial.extensions.planner.formulas import MemoryEstimate, estimate
from zerotrial.extensions.planner.model_profile import ModelProfile, profile_model, profile_trial
from zerotrial.extensions.planner.plan import (
    Devices,
    bucket_of,
    estimates,
    find_devices,
    fits,
    main,
    make_plan,
)

TRIAL = '''
import torch
from torch import nn
import zerotrial
from zerotrial import initialize

class Big(zerotrial.ZeroTrial):
    """More memory than any machine has."""
    def __init__(self, context):
        model = nn.Sequential(*(nn.Linear(20_000, 20_000, bias=False) for _ in range(10)))
        model[0].requires_grad_(False)
        engine, optimizer, *_ = zerotrial.initialize(
            model=model, config=context.get_hparam("deepspeed_config"))
        self.engine = context.wrap_model_engine(engine)
        assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
        assert engine.zero_optimization() and engine.get_batch_info()[1] == 2
        assert context.get_train_micro_batch_size_per_gpu() == 2

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx): ...
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...

class NeedsValues(Big):
    """Reads numbers while it is built, and makes two engines."""
    def __init__(self, context):
        for width in (4, 8):
            model = nn.Linear(width, width, bias=False)
            assert float(model.weight.sum()) == float(model.weight.sum())
            model.weight.numpy(force=True)
            engine, *_ = initialize(model=model, config=context.get_hparam("deepspeed_config"),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            context.wrap_model_engine(engine)
        raise RuntimeError("after the engines nothing matters")

class Empty(Big):
    def __init__(self, context): ...

class SixSamples(Big):
    """Has its batch in code, for the second of two engines."""
    def __init__(self, context):
        for samples in (8, 6):
            initialize(model=nn.Linear(4, 4), config={"train_batch_size": samples})

class BatchOfSize(Big):
    """Computes its batch from the number of ranks, and exchanges values while it is built."""
    def __init__(self, context):
        ranks = context.distributed
        assert (ranks.rank, ranks.local_rank, ranks.local_size) == (0, 0, ranks.size)
        assert ranks.allgather(3) == ranks.gather(3) == [3] * ranks.size
        assert ranks.broadcast("a") == "a"
        ranks.barrier()
        assert context.mpu.data_parallel_world_size == ranks.size
        config = {"train_batch_size": 6 * ranks.size, "optimizer": {"type": "AdamW"}}
        initialize(model=nn.Linear(4, 4), config=config)

class PipelineFirst(Big):
    """Engines whose models are divided over different numbers of ranks."""
    order = 1
    def __init__(self, context):
        layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
        pipeline = zerotrial.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        plain = nn.Linear(4, 4, bias=False)
        for model in (pipeline, plain)[::self.order]:
            initialize(model=model, config={"train_batch_size": 12, "optimizer": {"type": "AdamW"}})

class PlainFirst(PipelineFirst):
    order = -1

class PlannedPipeline(Big):
    def __init__(self, context):
        layers = (nn.Linear(4, 4, bias=False) for _ in range(10))
        model = zerotrial.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        assert model.layers["0"].weight.is_meta
        initialize(model=model, config=context.get_hparam("deepspeed_config"))

class TwoOptimizers(Big):
    """LAMB has no shards in files."""
    def __init__(self, context):
        for name in ("AdamW", "LAMB"):
            initialize(model=nn.Linear(4, 4),
                config={"train_batch_size": 4, "optimizer": {"type": name}})
'''


@pytest.fixture(autouse=True)
def own_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])


def experiment(directory: Path, entrypoint: str, **engine: Any) -> Path:
    module = entrypoint.partition(":")[0]
    (directory / f"{module}.py").write_text(TRIAL)
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        **engine,
    }
    (directory / "ds_config.json").write_text(json.dumps(content))
    file = directory / "experiment.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "planned",
                "entrypoint": entrypoint,
                "hyperparameters": {
                    "deepspeed_config": "ds_config.json",
                    "width": {"type": "categorical", "vals": [1, 2]},
                },
                "searcher": {
                    "name": "random",
                    "metric": "loss",
                    "max_trials": 2,
                    "max_length": {"batches": 1},
                },
                "resources": {"slots_per_trial": 2},
            }
        )
    )
    return file


@pytest.mark.processes
def test_plan_of_huge_model(tmp_path: Path) -> None:
    file = experiment(tmp_path, "model_def:Big", zero_optimization={"stage": 2})
    rank_result = subprocess.run(
        [sys.executable, "-P", "-m", "zerotrial.plan", file, "--json", "--world-size", "64"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert rank_result.returncode == 0, rank_result.stderr
    result = json.loads(rank_result.stdout)
    assert result["world_size"] == 64
    (engine,) = result["engines"]
    width = 20_000 * 20_000
    assert engine["parameters"] == 9 * width
    assert engine["frozen"] == width
    assert engine["largest_block"] == width
    assert engine["precision"] == "bf16"
    assert result["configured"]["stage"] == 2
    by_stage = {c["stage"]: c for c in result["choices"] if not c["host"] and not c["disk"]}
    for stage, choice in by_stage.items():
        frozen = 2 * width // (64 if stage == 3 else 1)
        assert choice["device"] == estimate(9 * width, width, 64, stage).device + frozen
    assert not by_stage[0]["fits"]


def test_plan_adds_up_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = experiment(tmp_path, "planned_values:NeedsValues", zero_optimization={"stage": 1})
    assert main([str(file)]) == 0
    text = capsys.readouterr().out
    assert "model: 16 parameters, largest block 16; bf16, optimizer momentum" in text
    assert "model: 64 parameters" in text
    assert "bytes of each of 2 rank(s)" in text
    first, *_, last = (line for line in text.splitlines() if line[:1].isdigit())
    assert "recommended" in first
    assert f"{12 * (16 + 64)} B" in first
    assert last.startswith("3")
    assert next(line for line in text.splitlines() if "as configured" in line).startswith("1")
    assert text.splitlines()[-1].startswith("recommended: stage 0")


@pytest.mark.slow
def test_fp32_gradients_and_nvme_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(module: str, *options: str, **engine: Any) -> str:
        """Run the planner for a module with a unique name: imports are cached."""
        file = experiment(tmp_path, f"{module}:NeedsValues", **engine)
        assert main([str(file), *options]) == 0
        return capsys.readouterr().out

    two = {"gradient_accumulation_steps": 2}
    choices = json.loads(plan("planned_json", "--json", **two))["choices"]
    assert [choice["accumulation"] for choice in choices[:4]] == [160, 160, 80, 0]
    text = plan("planned_text", **two)
    assert "incl. sums: additional bytes of 16-bit gradients that are summed in fp32" in text
    in_place = "files contain only the moments if the weights are the master"
    assert (in_place in text) == (find_devices(1, tmp_path).kind == "cpu")
    narrow = plan("planned_narrow", **two, data_types={"grad_accum_dtype": "bf16"})
    assert "incl. sums: additional" not in narrow


def test_errors_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(experiment(tmp_path, "planned_empty:Empty"))]) == 2
    assert "builds no engine by zerotrial.initialize" in capsys.readouterr().err
    assert main([str(experiment(tmp_path, "planned_empty:Empti"))]) == 2
    assert "did you mean 'Empty'?" in capsys.readouterr().err
    assert main([str(experiment(tmp_path, "planned_empty:Empty", nonsense=1))]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing.yaml")]) == 2
    assert "nothing.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("states", ["none", "cpu", "nvme"])
def test_configured_choice_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], states: str
) -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": states, "nvme_path": str(tmp_path)},
    }
    file = experiment(tmp_path, f"planned_{states}:NeedsValues", zero_optimization=zero)
    assert main([str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["configured"]
    assert (result["stage"], result["offload_param"]) == (3, "cpu")
    assert (result["disk"] > 0) == (states == "nvme")


def test_fit_reserves_memory_for_activations() -> None:
    needs = estimate(1000, 0, 1, 1, offload_optimizer="cpu", precision="bf16")
    device, host = needs.peak_device, needs.peak_host
    cpu = Devices("cpu", "CPU", 4, 2 * (device + host), 0, 0)
    assert fits(needs, cpu)
    assert not fits(needs, replace(cpu, device_bytes=device + host))
    gpu = Devices("cuda", "GPU", 1, 2 * device, 2 * host, 0)
    assert fits(needs, gpu)
    assert not fits(needs, replace(gpu, device_bytes=device))
    assert not fits(needs, replace(gpu, host_bytes=host))
    assert not fits(replace(needs, host_working=2 * host), gpu)
    in_files = estimate(1000, 0, 1, 1, offload_optimizer="nvme")
    assert not fits(in_files, gpu)
    assert fits(in_files, replace(gpu, disk_bytes=in_files.disk))


@pytest.mark.parametrize(
    ("numel", "stage", "states", "device", "expected"),
    [
        (7_000_000_000, 2, "none", "cuda", 1 << 27),
        (7_000_000_000, 2, "cpu", "cuda", 1 << 24),
        (7_000_000_000, 2, "none", "cpu", 1 << 24),
        (100_000_000, 1, "none", "cuda", 12_500_000),
        (3_000_000, 0, "none", "cpu", 1 << 20),
        (1000, 0, "none", "cpu", 1000),
    ],
)
def test_default_bucket_is_part_of_model(
    numel: int, stage: int, states: Any, device: str, expected: int
) -> None:
    result = choose_bucket_numel(
        ZeroConfig(), numel, stage=stage, offload_optimizer=states, device=device
    )
    assert result == expected
    config = ZeroConfig(reduce_bucket_size=500, allgather_bucket_size=300)
    for at, limit in ((0, 500), (1, 300)):
        chosen = choose_bucket_numel(
            config, numel, stage=at, offload_optimizer="none", device=device
        )
        assert chosen == limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "groups"),
    [({}, 1), ({}, 2), ({"reduce_bucket_size": 3000}, 2), ({"overlap_comm": False}, 1)],
)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
def test_planned_buckets_match_engine(
    stage: int, zero: dict[str, Any], groups: int, optimizer: str
) -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": optimizer},
        "zero_optimization": {"stage": stage, **zero},
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 50 - 10 * i) for i in range(3)))
    model.append(torch.nn.Linear(1500, 1500))
    read = load_engine_config(config)
    trained = list(model.parameters())
    parted = [{"params": trained[index::groups]} for index in range(groups)]
    profile = profile_model(model, read, None, parted)
    engine, *_ = initialize(model=model, model_parameters=parted, config=config)
    cut = max(bucket.numel for bucket in engine.stage.buckets)
    engine.close()
    assert bucket_of(profile, 1, "cpu", stage, "none") == cut
    if not zero and optimizer == "AdamW":  # too large for training in a test
        large = replace(profile, parameters=1 << 31, sizes=((1 << 22,) * 512,))
        assert bucket_of(large, 1, "cuda", stage, "none") == 1 << 27


def test_parameters_without_group_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    config = load_engine_config({"train_batch_size": 1})
    groups = [{"params": model[2].parameters()}, {"params": [model[0].bias], "lr": 0.1}]
    profile = profile_model(model, config, None, groups)
    assert profile.sizes == ((20, 5), (3,))
    assert (profile.parameters, profile.frozen) == (28, 6 + 16)
    second = profile_model(
        model, config, lambda ps: torch.optim.SGD(ps, 0.1, 0.9), [model[0].weight]
    )
    assert (second.sizes, second.optimizer) == (((6,),), "momentum")


def test_profile_finds_aliased_initialize() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}

    def build_trial() -> object:
        return initialize(model=nn.Linear(2, 3), config_params=config)[0]

    (profile,) = profile_trial(build_trial)
    assert (profile.parameters, profile.config.train_micro_batch_size_per_gpu) == (9, 2)
    assert isinstance(build_trial(), Engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_divided_by_shard_ranks(stage: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))

    def planned(ranks: int, **zero: Any) -> MemoryEstimate:
        content = {"train_batch_size": 8, "zero_optimization": {"stage": 3, **zero}}
        profile = profile_model(model, load_engine_config(content), None, None)
        return next(e for e in estimates(profile, ranks, "cpu") if e.stage == stage)

    assert planned(8, mics_shard_size=2) == replace(planned(2), world_size=8)
    assert planned(8, mics_shard_size=-1) == planned(8)


def test_persistent_blocks_are_profiled() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(4)))

    def persistent_elements(**zero: Any) -> int:
        content = {"train_batch_size": 2, "zero_optimization": {"stage": 3, **zero}}
        return profile_model(model, load_engine_config(content), None, None).kept_gathered

    assert persistent_elements() == 0
    assert persistent_elements(stage3_max_live_parameters=1e9) == 4 * 110
    assert persistent_elements(stage3_max_live_parameters=250) == 2 * 110


def test_small_parameters_are_planned_whole() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(4)))
    model[0].requires_grad_(requires_grad=False)

    def planned(**zero: Any) -> tuple[ModelProfile, MemoryEstimate]:
        content = {"train_batch_size": 4, "zero_optimization": {"stage": 3, **zero}}
        profile = profile_model(model, load_engine_config(content), None, None)
        return profile, next(e for e in estimates(profile, 4, "cuda") if e.stage == 3)

    before = planned()[1]
    for threshold, trained, frozen in ((100, 30, 10), (101, 330, 110)):
        profile, choice = planned(stage3_param_persistence_threshold=threshold)
        assert (profile.replicated, profile.replicated_frozen) == (trained, frozen)
        more = choice.device - before.device
        assert more == 4 * trained + 4 * frozen - 4 * frozen // 4


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the ``model_def`` of each example again."""
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    yield
    sys.modules.pop("model_def", None)


@pytest.mark.usefixtures("example_modules")
def test_plan_for_other_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(EXAMPLES / "stdlib_gpt" / "smoke.yaml"), "--gpu-memory"]
    assert main([*command, "80", "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert "8 x GPU (given); a rank may use 80.0 GB, and 80.0 GB of the host" in text
    assert text.splitlines()[-1].startswith("recommended: stage 0")
    assert main([*command, "80", "--host-memory", "20"]) == 0
    assert "and 20.0 GB of the host" in capsys.readouterr().out
    assert main([*command, "0.0001"]) == 0
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.usefixtures("example_modules")
def test_plan_divides_model_over_pipeline_stages(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "pipeline_gpt" / "experiment.yaml")
    assert main([file, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (engine,), now = plan["engines"], plan["configured"]
    assert engine["largest_block"] == 12 * 64 * 64 + 9 * 64  # of a transformer
    width = 4 if engine["precision"] == "fp32" else 2
    assert now["parameters"] == width * engine["parameters"] // 4
    assert {choice["stage"] for choice in plan["choices"]} == {0, 1, 2}
    assert main([file, "--world-size", "2"]) == 2
    assert "world size: must be a multiple of 4" in capsys.readouterr().err


@pytest.mark.usefixtures("example_modules")
def test_plan_refuses_unshareable_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(EXAMPLES / "stdlib_gpt" / "smoke.yaml"), "--world-size", "17"]) == 2
    (head, problem) = capsys.readouterr().err.splitlines()
    assert head.endswith("smoke.yaml: 1 problem(s)")
    assert problem.startswith("  ds_config.json: train_batch_size: must be a multiple of ")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tokens", "512"], "--tokens: was removed"),
        (["--gpu-memory", "nan"], "--gpu-memory: must be a number of GB above 0, got 'nan'"),
        (["--gpu-memory", "-5"], "--gpu-memory: must be a number of GB above 0, got '-5'"),
        (["--gpu-memory", "inf"], "--gpu-memory: must be a number of GB above 0, got 'inf'"),
        (["--host-memory", "8"], "--host-memory: needs --gpu-memory"),
    ],
)
def test_invalid_options(
    capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["experiment.yaml", *options])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plan_divides_model_over_tensor_ranks(stage: int) -> None:
    def planned(size: int, ranks: int) -> MemoryEstimate:
        config = {"train_batch_size": 8, "tensor_parallel": {"size": size}}
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
        profile = profile_model(model, load_engine_config(config), None, None)
        return next(e for e in estimates(profile, ranks, "cpu") if e.stage == stage)

    assert planned(2, 4).device == planned(1, 2).device / 2


def test_plan_refuses_unshareable_batch_of_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiment(tmp_path, "planned_batch:SixSamples")
    assert main([str(file), "--world-size", "2"]) == 0
    assert "recommended: stage 0" in capsys.readouterr().out
    assert main([str(file), "--world-size", "4"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "train_batch_size: must be a multiple of" in output.err
    assert "= 4, got 6" in output.err


@pytest.mark.parametrize("ranks", [1, 4])
def test_plan_gives_code_the_planned_ranks(tmp_path: Path, ranks: int) -> None:
    plan = make_plan(experiment(tmp_path, "planned_ranks:BatchOfSize"), ranks)
    assert plan.engines[0].config.train_batch_size == 6 * ranks


@pytest.mark.parametrize("name", ["PipelineFirst", "PlainFirst"])
def test_plan_of_pipeline_and_plain_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = experiment(tmp_path, f"planned_mixed_{name}:{name}")
    assert main([str(file), "--world-size", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {choice["stage"] for choice in plan["choices"]} == {0, 1, 2}
    assert plan["configured"]["parameters"] == 4 * (4 * 16 // 2 + 16)
    assert main([str(file), "--world-size", "4"]) == 0
    text = capsys.readouterr().out
    assert text.count("the model is divided evenly over 2 ranks") == 1
    assert main([str(file), "--world-size", "3"]) == 2
    assert "world size: must be a multiple of 2" in capsys.readouterr().err


def test_plan_builds_pipeline_without_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiment(tmp_path, "planned_pipeline:PlannedPipeline")
    assert main([str(file), "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["parameters"] == 10 * 16


def test_plan_of_different_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = experiment(tmp_path, "planned_optimizers:TwoOptimizers")
    assert main([str(file), "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert {choice["stage"] for choice in choices} == {0, 1, 2, 3}
    assert {choice["offload_param"] for choice in choices} == {"none", "cpu"}


@pytest.mark.parametrize("zero", [{}, {"reduce_bucket_size": 3_000_000}])
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_plan_divides_buckets_over_pipeline_stages(
    stage: int, optimizer: str, zero: dict[str, Any]
) -> None:
    """The buckets of a stage equal those of a plain model of its size."""
    content = {"train_batch_size": 8, "optimizer": {"type": optimizer}, "zero_optimization": zero}
    config = load_engine_config(content)

    def layers(count: int) -> list[nn.Module]:
        return [nn.Linear(1024, 1024, bias=False) for _ in range(count)]

    with planning(lambda *_: None), torch.device("meta"):
        pipeline = PipelineModule(layers(32), num_stages=2, loss_fn=nn.functional.mse_loss)
        plain = nn.Sequential(*layers(16))
    profile = profile_model(pipeline, config, None, None)
    half = profile_model(plain, config, None, None)
    assert profile.stages == 2
    expected = bucket_of(half, 4, "cuda", stage, "none")
    assert bucket_of(profile, 4, "cuda", stage, "none") == expected
    divided, single = (
        next(e for e in estimates(model, ranks, "cuda") if e.stage == stage)
        for model, ranks in ((profile, 8), (half, 4))
    )
    assert divided.working == single.working


@pytest.mark.parametrize("zero", [{}, {"reduce_bucket_size": 3_000_000}])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_plan_divides_buckets_over_tensor_ranks(stage: int, zero: dict[str, Any]) -> None:
    def bucket(size: int, width: int) -> int:
        content = {
            "train_batch_size": 8,
            "tensor_parallel": {"size": size},
            "zero_optimization": zero,
        }
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, width, bias=False) for _ in range(32)))
        profile = profile_model(model, load_engine_config(content), None, None)
        return bucket_of(profile, 4, "cuda", stage, "none")

    assert bucket(2, 1024) == bucket(1, 512)
