"""DeepSpeed's checkpoints become ours: files in its layout, and files that it wrote itself."""

import contextlib
import importlib.util
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.checkpointing import all_states, make_engine, probe, train
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import initialize
from zerotrial.engine.checkpoint.files import CheckpointError, CheckpointNotFoundError
from zerotrial.engine.checkpoint.shards import ShardReader
from zerotrial.extensions.deepspeed_api.checkpoint_import.convert import import_deepspeed, main

WORLD = 2
ORDER = ("first.weight", "first.bias", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight",
         "blocks.1.bias", "norm.weight", "norm.bias", "head.weight")  # fmt: skip
KINDS = ("exp_avg", "exp_avg_sq")


class Address:
    """As DeepSpeed's ``fragment_address``."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class Scaler:
    """As DeepSpeed's ``DynamicLossScaler``."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic, self.cur_iter, self.last_overflow_iter = 512.0, True, 9, 4
        self.cur_hysteresis = 1


@contextlib.contextmanager
def classes_named_as_deepspeeds() -> Iterator[None]:
    """Make pickle write the class names of DeepSpeed's files."""
    places = {
        "deepspeed.utils.tensor_fragment": ("fragment_address", Address),
        "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", Scaler),
    }
    before = {cls: (cls.__module__, cls.__qualname__) for _, cls in places.values()}
    parents = {name.rsplit(".", depth)[0] for name in places for depth in (1, 2, 3)}
    names = {*places, *(name for name in parents if name not in sys.modules)}
    modules = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    for name, (attribute, cls) in places.items():
        setattr(sys.modules[name], attribute, cls)
        cls.__module__, cls.__qualname__ = name, attribute
    try:
        yield
    finally:
        for cls, (module, qualname) in before.items():
            cls.__module__, cls.__qualname__ = module, qualname
        for name, old in modules.items():
            sys.modules.pop(name)
            if old is not None:
                sys.modules[name] = old


def model_file(engine: Any, **more: Any) -> dict[str, Any]:
    return {
        "module": OrderedDict(
            (k, v.detach().clone())
            for k, v in engine.module.state_dict().items()
            if "tied" not in k
        ),
        "buffer_names": ["calls"],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": WORLD,
        "mp_world_size": 1,
        "ds_config": {
            "gradient_accumulation_steps": 1,
            "scheduler": {"type": "WarmupLR", "params": {}},
        },
        "ds_version": "0.0.0",
        "mine": {"epoch": 2},
        **more,
    }


def shapes_of(engine: Any) -> "OrderedDict[str, torch.Size]":
    parameters = dict(engine.module.named_parameters())
    return OrderedDict((name, parameters[name].shape) for name in ORDER)


def options(engine: Any, **more: Any) -> list[dict[str, Any]]:
    (group,) = engine.optimizer.param_groups
    return [{**{k: v for k, v in group.items() if k != "params"}, "params": [0], **more}]


def write_stage0(path: Path, engine: Any, states: dict[str, Tensor]) -> None:
    shapes = shapes_of(engine)
    state = {
        index: {"step": torch.tensor(3.0)}
        | {kind: states[f"{name}/{kind}"].view(shapes[name]) for kind in KINDS}
        for index, name in enumerate(ORDER)
    }
    optimizer = {"state": state, "param_groups": options(engine, params=list(range(len(ORDER))))}
    torch.save(model_file(engine, optimizer=optimizer), path / "mp_rank_00_model_states.pt")


def write_stages_1_and_2(
    path: Path, engine: Any, states: dict[str, Tensor], stage: int, *, mapped: bool
) -> None:
    shapes = shapes_of(engine)
    torch.save(
        model_file(engine, param_shapes=[shapes]),
        path / "mp_rank_00_model_states.pt",
    )
    numel = sum(shape.numel() for shape in shapes.values())
    part_numel = -(-numel // WORLD)
    flat = {
        kind: torch.cat(
            [*(states[f"{n}/{kind}"] for n in ORDER), torch.zeros(part_numel * WORLD - numel)]
        )
        for kind in ("master", *KINDS)
    }
    for rank in range(WORLD):
        cut = slice(rank * part_numel, (rank + 1) * part_numel)
        padding = max(0, (rank + 1) * part_numel - numel)
        mapping, at = OrderedDict(), 0
        for name, shape in shapes.items():
            start, stop = max(at, cut.start), min(at + shape.numel(), cut.stop)
            if start < stop:
                mapping[name] = Address(stop - start, start - cut.start)
            at += shape.numel()
        base = {"step": torch.tensor(3.0)} | {kind: flat[kind][cut].clone() for kind in KINDS}
        state = {
            "loss_scaler": Scaler(),
            "zero_stage": stage,
            "base_optimizer_state": {"state": {0: base}, "param_groups": options(engine)},
            "single_partition_of_fp32_groups": [
                flat["master"][cut][: part_numel - padding].clone()
            ],
            "group_paddings": [padding],
            "partition_count": [WORLD],
            "param_slice_mappings": [mapping] if mapped else None,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}}, path / name)


def write_stage3(path: Path, engine: Any, states: dict[str, Tensor]) -> None:
    shapes = shapes_of(engine)
    frozen = engine.module.frozen.detach()
    for rank in range(WORLD):
        flat: dict[str, list[Tensor]] = {kind: [] for kind in ("master", *KINDS)}
        for name, shape in shapes.items():
            part = math.ceil(shape.numel() / WORLD)
            for kind, tensors in flat.items():
                padded = torch.cat([states[f"{name}/{kind}"], torch.zeros(part * WORLD)])
                tensors.append(padded[rank * part : (rank + 1) * part])
        half = 4  # sub-groups
        subgroups = [slice(0, half), slice(half, None)]
        state = {
            "zero_stage": 3,
            "partition_count": WORLD,
            "fp32_flat_groups": [torch.cat(flat["master"][cut]) for cut in subgroups],
            "optimizer_state_dict": {
                "state": {
                    index: {kind: torch.cat(flat[kind][cut]) for kind in KINDS}
                    for index, cut in enumerate(subgroups)
                },
                "param_groups": options(engine, step=3),
            },
        }
        torch.save(
            {"optimizer_state_dict": state},
            path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        share = math.ceil(frozen.numel() / WORLD)
        module = {k: torch.empty(0) for k in shapes} | {"calls": engine.module.calls.clone()}
        torch.save(
            model_file(
                engine,
                module=module,
                param_shapes=[shapes],
                frozen_param_shapes=OrderedDict(frozen=frozen.shape),
                frozen_param_fragments={
                    "frozen": frozen[rank * share : (rank + 1) * share].clone()
                },
            ),
            path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )


def write_as_deepspeed(directory: Path, layout: str, engine: Any) -> None:
    path = directory / "global_step3"
    path.mkdir(parents=True)
    (directory / "latest").write_text("global_step3")
    states = all_states(engine)
    with classes_named_as_deepspeeds():
        if layout == "stage 0":
            write_stage0(path, engine, states)
        elif layout == "stage 3":
            write_stage3(path, engine, states)
        else:
            stage, mapped = int(layout[6]), "mapped" in layout
            write_stages_1_and_2(path, engine, states, stage, mapped=mapped)


def name_as_compiled(directory: Path) -> None:
    """Put into the files the names that a model in a wrapper of ``torch.compile`` has."""
    parameter_names = {*ORDER, "frozen", "calls"}

    def rename(value: Any) -> Any:
        if isinstance(value, list):
            return [rename(item) for item in value]
        if isinstance(value, dict):
            return type(value)((rename(k), rename(v)) for k, v in value.items())
        return (
            f"_orig_mod.{value}" if isinstance(value, str) and value in parameter_names else value
        )

    with classes_named_as_deepspeeds():
        for file in directory.glob("*/*.pt"):
            torch.save(rename(torch.load(file, weights_only=False)), file)


LAYOUTS = ("stage 0", "stage 1 mapped", "stage 2", "stage 3")


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_resumes_from_deepspeed_files(
    tmp_path: Path, layout: str, *, compiled: bool
) -> None:
    engine = make_engine(1)
    train(engine, 3)
    with torch.no_grad():
        engine.module.frozen.mul_(1.25)
    write_as_deepspeed(tmp_path / "theirs", layout, engine)
    if compiled:
        name_as_compiled(tmp_path / "theirs")
    path = import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    again = make_engine(2, seed=4)
    assert again.load_checkpoint(tmp_path / "ours") == (path, {"mine": {"epoch": 2}})
    assert again.progress.counters() == engine.progress.counters()
    assert int(again.module.calls) == 3
    states = all_states(engine)
    for key, state in all_states(again).items():
        assert torch.equal(state, states[key]), key
    assert train(again, 3) == train(engine, 3)
    assert probe(again) == probe(engine)


def test_loss_scale_is_imported(tmp_path: Path) -> None:
    engine = make_engine(1, fp16={"enabled": True, "initial_scale_power": 4})
    train(engine, 3)
    write_as_deepspeed(tmp_path / "theirs", "stage 2", engine)
    import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    engine.load_checkpoint(tmp_path / "ours")
    assert engine.scaler.state_dict() == {
        "scale": 512.0,
        "tolerance": 1,
        "step": 9,
        "last_overflow": 4,
    }


class Trap:
    """Would run a command if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo unpickled > trap",)


def test_file_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make_engine(1)
    train(engine, 3)
    write_as_deepspeed(tmp_path / "theirs", "stage 2", engine)
    file = tmp_path / "theirs" / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), "extra": Trap()}, file)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.*(posix|os)\.system"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "trap").exists()
    assert not (tmp_path / "ours").exists()


def test_missing_or_unsupported_content_is_named(tmp_path: Path) -> None:
    engine = make_engine(1)
    train(engine, 3)
    with pytest.raises(CheckpointNotFoundError, match="latest: No such file"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    write_as_deepspeed(tmp_path / "theirs", "stage 3", engine)
    with pytest.raises(CheckpointError, match=r"was saved by DeepSpeed.*import_deepspeed"):
        engine.load_checkpoint(tmp_path / "theirs")
    with pytest.raises(CheckpointNotFoundError, match="global_step9: no such DeepSpeed"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours", tag="global_step9")
    path = tmp_path / "theirs" / "global_step3"
    file = path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    file.unlink()
    with pytest.raises(CheckpointError, match="must have the files of 2 ranks"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    file.write_bytes(content)
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="rank 0 is missing"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    (path / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tensor and expert parallel.*mp_rank_01"):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")


def test_ambiguous_shapes_at_stage_0_need_names(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])
    model[1].weight.requires_grad_(False)
    model.forward = lambda x: model[2](model[1](model[0](x))).square().mean()  # type: ignore[method-assign]
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(2, 3)))
    engine.step()
    path = tmp_path / "theirs" / "t"
    path.mkdir(parents=True)
    states = all_states(engine)
    trained = ["0.weight", "2.weight"]
    state = {
        index: {kind: states[f"{name}/{kind}"].view(3, 3) for kind in KINDS}
        for index, name in enumerate(trained)
    }
    file = {
        "module": engine.module.state_dict(),
        "buffer_names": [],
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1], "step": 1}]},
        "dp_world_size": 1,
        "global_steps": 1,
        "skipped_steps": 0,
    }
    torch.save(file, path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="in 3 ways; pass parameters="):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours", tag="t")
    import_deepspeed(tmp_path / "theirs", tmp_path / "ours", tag="t", parameters=[trained])
    engine.load_checkpoint(tmp_path / "ours")
    for key, value in all_states(engine).items():
        assert torch.equal(value, states[key])
    assert engine.stage.updater.scalars() == {"group0.step": 1.0}


def test_universal_and_zerolab_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "universal" / "t" / "zero").mkdir(parents=True)
    (tmp_path / "universal" / "t" / "zero" / "optimizer_state.pt").touch()
    with pytest.raises(CheckpointError, match="universal checkpoint; import the ZeRO checkpoint"):
        import_deepspeed(tmp_path / "universal", tmp_path / "ours", tag="t")
    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"already a Zerolab checkpoint; load it with"):
        import_deepspeed(tmp_path / "own", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_command_refuses_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), str(tmp_path / "a"), "--export"])
    assert main() == 2
    problem = capsys.readouterr().err
    assert problem.startswith("--export: was removed")
    assert "read_weights" in problem
    assert list(tmp_path.iterdir()) == []


def train_with_deepspeed(directory: str) -> dict[str, Any]:
    """At every stage: 3 steps, a checkpoint, and the loss of step 4."""
    import torch.distributed as dist

    name = f"zerolab-{os.getppid()}"  # of a file in shared memory that DeepSpeed leaves behind
    os.environ |= {"LOCAL_SIZE": str(WORLD), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"MASTER_ADDR": name, "MASTER_PORT": "0"}
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo")
    result: dict[str, Any] = {}
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        engine = deepspeed.initialize(
            model=model,
            config={
                "train_batch_size": 4,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            },
        )[0]
        losses = []
        for step in range(4):
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            if step == 3:
                engine.save_checkpoint(f"{directory}/{stage}", client_state={"step": step})
                result[f"{stage}"] = {
                    f"{name}/{kind}": safe_get_full_optimizer_state(parameter, kind)
                    for name, parameter in model.named_parameters()
                    for kind in KINDS
                    if stage > 0
                } | {
                    f"{name}/master": safe_get_full_fp32_param(parameter)
                    for name, parameter in model.named_parameters()
                    if stage > 0
                }
            loss = engine(batch[dist.get_rank() :: WORLD]).square().mean()
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / WORLD)
        result[f"{stage}/loss"] = losses[3]
    for file in Path("/dev/shm").glob(f"deepspeed_*_{name}_*"):
        file.unlink(missing_ok=True)
    return result


@pytest.mark.processes
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed (extra `bench`); its layout is tested above all the same",
)
def test_deepspeed_checkpoints_load_bitwise(tmp_path: Path) -> None:
    result = run_on_ranks(train_with_deepspeed, WORLD, str(tmp_path))[0]
    for stage in range(4):
        path = import_deepspeed(tmp_path / f"{stage}", tmp_path / f"ours{stage}")
        with ShardReader(Path(path).glob("rank-*.safetensors")) as reader:
            for key, value in result[f"{stage}"].items():
                name, _, kind = key.partition("/")
                actual = torch.empty(value.numel())
                reader.read_into(name, kind, 0, actual)
                assert torch.equal(actual, value.reshape(-1).float()), key
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
        engine = initialize(model=model, config=config)[0]
        assert engine.load_checkpoint(tmp_path / f"ours{stage}")[1] == {"step": 3}
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
        loss = float(engine(batch).detach().square().mean())
        assert loss == pytest.approx(result[f"{stage}/loss"], rel=1e-6)
        assert engine.global_steps == 3
