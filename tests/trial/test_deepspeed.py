"""The engine of a real DeepSpeed in our loop, beside ours, with checkpoints both ways.

DeepSpeed must not lie in the environment itself, where ours stands in for it: where it does not,
pip puts it into a folder of its own, which only the processes started here look into.
"""

import importlib.metadata
import importlib.util
import io
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerotrial
from tests.engine.checkpointing import SAMPLES, Net, make_engine, probe, train
from tests.engine.ranks import RankError, run_on_ranks
from tests.libraries import folder_with
from tests.trial.helpers import (
    LineTrial,
    fit,
    last_checkpoint,
    make_settings,
    make_spec,
    metrics,
    records,
)
from zerolab.contract.spec import (
    ENV_AS_DEEPSPEED,
    ENV_RUN_SPEC,
    CheckpointRef,
    RunSpec,
    write_run_spec,
)
from zerolab.errors import ConfigError
from zerolab.storage.store import CheckpointStore
from zerotrial.compat.into_deepspeed import take_our_checkpoints
from zerotrial.compat.real_deepspeed import initialize
from zerotrial.engine.checkpoint.deepspeed.convert import import_deepspeed
from zerotrial.engine.checkpoint.files import CheckpointError

pytestmark = [pytest.mark.processes, pytest.mark.slow]

VERSION = "0.19.8"
WITH_IT = ("hjson", "einops", "ninja", "py-cpuinfo", "msgpack")
"""What it imports; the rest is here, and another torch must not come."""


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with DeepSpeed in it; nothing where this Python has it. Else skips."""
    return folder_with(
        tmp_path_factory,
        [f"deepspeed=={VERSION}", *WITH_IT],
        _problem,
        here=lambda: importlib.util.find_spec("deepspeed") is not None,
        options=["--no-build-isolation"],  # it is built, which compiles nothing
        environment={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    )


def _problem(place: str) -> str:
    """Why what is there cannot be used, or nothing."""
    if not place and (found := importlib.metadata.version("deepspeed")) != VERSION:
        return f"{found} is installed"
    try:
        run_on_ranks(try_theirs, 1, place)
    except RankError as error:
        return f"it does not train: {str(error)[-500:]}"
    return ""


def load_deepspeed(folder: str) -> Any:
    """Import it in a process of its own; its kernels, which compile for minutes, are left out."""
    sys.path[:0] = [folder] if folder else []
    os.environ.pop(ENV_AS_DEEPSPEED, None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[name] = str(value)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def try_theirs(folder: str) -> None:
    """One step, with nothing of ours in it: what fails here fails for a reason of this machine."""
    deepspeed = load_deepspeed(folder)
    model = nn.Linear(1, 1)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[
        0
    ]
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()


# -- stages, on two ranks --------------------------------------------------------------------------

ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 10},
}


def engine_of_theirs(stage: int, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {**ADAM, "params": {**ADAM["params"], "torch_adam": True}},
        "scheduler": WARMUP,
        **more,
    }
    engine = initialize(model=Net(), config=config)[0]
    take_our_checkpoints(engine)
    return engine


def steps_of_theirs(engine: Any, count: int) -> list[list[float]]:
    """As ``checkpointing.train`` does it; of each step this rank's loss, the norm and the rate."""
    found = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        batch = torch.randn(SAMPLES, 6, generator=generator)[dist.get_rank() :: 2]
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        found.append([loss.item(), float("nan" if norm is None else norm), engine.get_lr()[0]])
    return found


def steps_of_ours(engine: Any, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        (loss,) = train(engine, 1)
        found.append([loss, engine.get_global_grad_norm(), engine.get_lr()[0]])
    return found


def beside_theirs(folder: str, place: str) -> dict[str, Any]:
    """On each of two ranks: ours; theirs from the start, and from ours in between."""
    load_deepspeed(folder)
    ours = make_engine(2, optimizer=ADAM, scheduler=WARMUP)
    expected = steps_of_ours(ours, 3)
    ours.save_checkpoint(f"{place}/ours", client_state={"mine": 5})
    expected += steps_of_ours(ours, 2)
    calls = int(ours.module.calls)
    found: dict[str, Any] = {"expected": expected, "calls": calls}
    for stage in (0, 1, 2, 3):
        found[f"start {stage}"] = steps_of_theirs(engine_of_theirs(stage), 5)
    hpz = {"stage": 3, "zero_hpz_partition_size": 2}  # ZeRO++: a second copy in each node
    found["start hpz"] = steps_of_theirs(engine_of_theirs(3, zero_optimization=hpz), 5)
    for stage in (0, 1, 2, 3):
        engine = engine_of_theirs(stage, seed=9)
        with torch.no_grad():
            engine.module.calls.fill_(77)
        path, client = engine.load_checkpoint(f"{place}/ours")
        told = (Path(path).name, client, engine.global_steps)
        steps = steps_of_theirs(engine, 2)
        found[f"from ours {stage}"] = (told, steps, int(engine.module.calls))
        engine.save_checkpoint(f"{place}/theirs{stage}")
        found[f"probe {stage}"] = probe(engine)
    try:
        engine_of_theirs(0, seed=9, bf16={"enabled": True}).load_checkpoint(f"{place}/ours")
    except CheckpointError as error:
        found["refused"] = str(error)
    engine = engine_of_theirs(0, seed=9)
    engine.load_checkpoint(f"{place}/ours", load_module_only=True)
    engine.eval()
    found["weights"] = probe(engine)
    found["words"] = words_of_theirs()
    return found


def probed(place: Path) -> float:
    """What ours is on the weights that were saved."""
    engine = make_engine(0, seed=9, optimizer=ADAM, scheduler=WARMUP)
    engine.load_checkpoint(str(place / "ours"), load_module_only=True)
    return probe(engine)


def words_of_theirs() -> dict[str, Any]:
    """What is said of what this DeepSpeed lacks, and of what it takes by itself."""
    lacking: dict[str, Any] = {
        "one bit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}}},
        "zero++": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    }
    said = {}
    for name, more in lacking.items():
        try:
            engine_of_theirs(0, **more)
        except ConfigError as error:
            said[name] = error.problems
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("zerotrial").addHandler(handler)
    config = {"train_batch_size": SAMPLES, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = initialize(model=nn.Linear(1, 1), config=config)[0]
    said["clipping"] = (engine.gradient_clipping(), log.getvalue())
    return said


def test_theirs_and_ours_train_alike_and_theirs_goes_on_from_ours(
    theirs: str, tmp_path: Path
) -> None:
    for rank, found in enumerate(run_on_ranks(beside_theirs, 2, theirs, str(tmp_path))):
        expected = torch.tensor(found["expected"])
        for stage in (0, 1, 2, 3, "hpz"):
            columns = [0, 2] if stage == 0 else [0, 1, 2]  # at stage 0 it tells no norm
            got = torch.tensor(found[f"start {stage}"])
            torch.testing.assert_close(got[:, columns], expected[:, columns], rtol=2e-5, atol=1e-6)
        for stage in (0, 1, 2, 3):
            told, steps, calls = found[f"from ours {stage}"]
            assert told == ("global_step3", {"mine": 5}, 3)
            columns = [0, 2] if stage == 0 else [0, 1, 2]
            got, wanted = torch.tensor(steps)[:, columns], expected[3:, columns]
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-6)
            assert calls == found["calls"]  # a buffer, which their format leaves out
        assert "stage: must be 1, 2 or 3" in found["refused"]
        assert found["weights"] == pytest.approx(probed(tmp_path), rel=2e-5)
        words = found["words"]
        assert "1-bit optimizers since 0.19.7" in words["one bit"][0]
        assert words["zero++"][0].startswith("zero_optimization.zero_quantized_weights: must be")
        limit, log = words["clipping"]
        assert limit == 1.0
        assert ("DeepSpeed then clips at 1.0" in log) == (rank == 0)
    for stage in (0, 1, 2, 3):  # and back again
        import_deepspeed(tmp_path / f"theirs{stage}", tmp_path / f"back{stage}")
        engine = make_engine(0, seed=9, optimizer=ADAM, scheduler=WARMUP)
        engine.load_checkpoint(str(tmp_path / f"back{stage}"))
        assert engine.global_steps == 5
        assert found[f"probe {stage}"] == pytest.approx(probe(engine), rel=2e-5)


# -- in a trial -----------------------------------------------------------------------------------


class HandMadeTrial(LineTrial):
    """An engine that the trial itself has from ``deepspeed.initialize``."""

    def __init__(self, context: Any) -> None:
        import deepspeed

        self.context = context
        self.samples, self.seen = 22, []
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        }
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def loss(self, batches: Iterator[Any]) -> Any:
        x, y, _ = next(batches)
        return (self.engine(x.bfloat16()).float() - y).square().mean()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter):
        return {"validation_loss": self.loss(dataloader_iter)}


def train_by_hand(folder: str, place: str) -> tuple[dict[int, Any], dict[int, Any]]:
    """Metrics by batch of a whole run, and of one that was cut after the third."""
    load_deepspeed(folder)
    whole, cut = Path(place) / "whole", Path(place) / "cut"
    fit(make_spec(whole), HandMadeTrial, make_settings(6))
    fit(make_spec(cut), HandMadeTrial, make_settings(3))
    fit(make_spec(cut, latest=last_checkpoint(cut)), HandMadeTrial, make_settings(6))
    return metrics(whole, "training"), metrics(cut, "training")


def test_an_engine_that_a_trial_has_made_is_recorded_and_goes_on(
    theirs: str, tmp_path: Path
) -> None:
    ((whole, cut),) = run_on_ranks(train_by_hand, 1, theirs, str(tmp_path))
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm", "loss_scale"} <= set(whole[6])
    assert [cut[n]["loss"] for n in cut] == [whole[n]["loss"] for n in whole]


MODEL = """
    import os, torch, zerotrial
    from torch import nn

    if os.environ["ENGINE_OF"] == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # no kernel is compiled

    class MyTrial(zerotrial.ZeroTrial):
        def __init__(self, context):
            self.context = context
            hparams = context.get_hparams()
            config = zerotrial.overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            )
            model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
            self.engine = context.wrap_model_engine(
                zerotrial.initialize(model=model, config=config)[0]
            )

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            x = next(dataloader_iter)
            loss = (self.engine(x) - 3 * x).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            return loss

        def evaluate_batch(self, dataloader_iter):
            x = next(dataloader_iter)
            return {"validation_loss": (self.engine(x) - 3 * x).square().mean()}

        def build_training_data_loader(self):
            points = torch.arange(22.0)[:, None] / 22
            return zerotrial.DataLoader(points, batch_size=2, shuffle=True)

        build_validation_data_loader = build_training_data_loader
"""
ENGINE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
}
ONLY_THEIRS = {"zero_optimization": {"zero_hpz_partition_size": 1}}


def rank(
    path: Path, backend: str, folder: str, latest: CheckpointRef | None = None, **more: Any
) -> RunSpec:
    """Run a rank in a process of its own."""
    config = {
        "entrypoint": "model:MyTrial",
        "searcher": {"metric": "validation_loss", "max_length": {"batches": 6}},
        "scheduling_unit": 1,
        "min_checkpoint_period": {"batches": 3},
    }
    spec = make_spec(path, {"deepspeed_config": ENGINE, **more}, latest, config=config)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    spec = RunSpec(**{**fields, "backend": backend})
    (Path(spec.model_dir) / "model.py").write_text(textwrap.dedent(MODEL))
    write_run_spec(spec, path / "spec.json")
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {ENV_RUN_SPEC: str(path / "spec.json"), "ENGINE_OF": backend}
    environment |= {"DS_ACCELERATOR": "cpu"}
    if folder:
        environment["PYTHONPATH"] = folder
    ended = subprocess.run(
        [sys.executable, "-m", "zerotrial.process.harness"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return spec


def losses(path: Path) -> dict[int, float]:
    return {steps: values["loss"] for steps, values in metrics(path, "training").items()}


def test_a_trial_of_backend_deepspeed_goes_on_from_ours_and_ours_from_its(
    theirs: str, tmp_path: Path
) -> None:
    rank(tmp_path, "zerolab", "")
    ours = losses(tmp_path)
    (middle,) = (r for r in records(tmp_path, "checkpoint") if r["steps_completed"] == 3)
    latest = CheckpointRef(middle["uuid"], 3)
    spec = rank(tmp_path, "deepspeed", theirs, latest, overwrite_deepspeed_args=ONLY_THEIRS)
    found = losses(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    # Dropout, order of the data, moments and clipping are those of the run that was not moved.
    assert [found[n] for n in (4, 5, 6)] == pytest.approx([ours[n] for n in (4, 5, 6)], rel=2e-5)

    final = last_checkpoint(tmp_path)
    assert final is not None
    with CheckpointStore.of_run(spec).restore_path(final.uuid) as path:
        import_deepspeed(path, tmp_path / "imported", tag="model0")
        saved = torch.load(path / "model0" / "mp_rank_00_model_states.pt", weights_only=False)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    engine = zerotrial.initialize(model=model, config=ENGINE)[0]
    engine.load_checkpoint(str(tmp_path / "imported"), tag="model0")
    for name, weight in saved["module"].items():
        assert torch.equal(engine.full(name), weight)
    assert engine.global_steps == 6
