"""Trial classes and the engine on two agents: paused, resumed, and with a lost agent.

All runs have the same losses as a single rank, so the batch and its samples are the same.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_two_agents import Farm
from tests.waiting import until
from zerolab.client import archive

pytestmark = pytest.mark.processes

BATCHES = 10
GATE_AT = 5
"""Before this batch the ranks wait until the test releases them."""
LATE_AT = 7
"""Before this batch the ranks wait for a preemption, if the test requests it."""

MODEL = """
import pathlib, time
import torch
import zerotrial
from zerolab.core.preemption import DirectivePoller

class Poller(DirectivePoller):
    made = []
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made.append(self)

import zerotrial.loop.session
zerotrial.loop.session.DirectivePoller = Poller

GATE = pathlib.Path(GATE_PATH)

class Line(zerotrial.ZeroTrial):
    def __init__(self, context):
        self.context = context
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        given = context.get_hparams()
        config = zerotrial.overwrite_deepspeed_config(
            given["deepspeed_config"], given["overwrite_deepspeed_args"]
        )
        engine, *_ = zerotrial.initialize(model=model, config=config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        rank = self.context.distributed.get_rank()
        if batch_idx == GATE_BATCH:
            (GATE / f"waits_{rank}_of_{self.context.distributed.get_size()}").touch()
            while not (GATE / "go").exists():
                time.sleep(0.02)
            while (GATE / "leave").exists() and not all(p.should_preempt for p in Poller.made):
                time.sleep(0.02)  # the chief is preempted before this batch ends
        few = self.context.distributed.get_size() < 4  # it may have grown before this batch
        if batch_idx == LATE_BATCH and few and (GATE / "late").exists():
            while not all(p.should_preempt for p in Poller.made):
                time.sleep(0.02)
        if (GATE / "slow").exists():  # ranks agree on a preemption after each long batch
            time.sleep(0.3)
        inputs, wanted = next(dataloader_iter)
        loss = torch.nn.functional.mse_loss(self.engine(inputs), wanted)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter):
        inputs, wanted = next(dataloader_iter)
        return {"validation_loss": torch.nn.functional.mse_loss(self.engine(inputs), wanted)}

    def data(self):
        inputs = torch.randn(52, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def build_training_data_loader(self):
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(self.data(), batch_size=size, shuffle=True)

    def build_validation_data_loader(self):
        return zerotrial.DataLoader(self.data(), batch_size=13)
"""


def config(slots: int, stage: int, accumulation: int = 1, **resources: object) -> dict[str, Any]:
    """An experiment whose batch is ``2 x accumulation x slots`` samples."""
    engine = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    }
    return {
        "entrypoint": "model:Line",
        "hyperparameters": {
            "deepspeed_config": engine,
            "overwrite_deepspeed_args": {"zero_optimization": {"stage": stage}},
        },
        "searcher": {
            "name": "single", "metric": "validation_loss", "max_length": {"batches": BATCHES},
        },
        "min_checkpoint_period": {"batches": 2},
        "scheduling_unit": 1,
        "reproducibility": {"experiment_seed": 7},
        "resources": {"slots_per_trial": slots, "max_nodes": 2, **resources},
        "max_restarts": 0,
    }  # fmt: skip


class Classes(Farm):
    """A farm that runs a trial class."""

    def train(self, values: dict[str, Any]) -> int:
        model = self.path / "model"
        model.mkdir(exist_ok=True)
        text = MODEL.replace("GATE_PATH", repr(str(self.gate)))
        text = text.replace("GATE_BATCH", str(GATE_AT)).replace("LATE_BATCH", str(LATE_AT))
        (model / "model.py").write_text(text)
        return int(self.client.create_experiment(values, archive.pack(model))["id"])

    def runs(self, trial_id: int) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.client.get(f"/trials/{trial_id}/runs")["runs"]
        return result

    def await_ranks(self, number: int) -> None:
        """Wait until N ranks of a run wait at the gate."""
        until(
            f"{number} ranks wait",
            lambda: sorted(entry.name for entry in self.gate.glob(f"waits_*_of_{number}")),
            lambda names: len(names) == number,
            details=self.all_logs,
        )

    def all_logs(self) -> str:
        result = [log.read_text()[-3000:] for log in self.path.glob("*.log")]
        result += [log.read_text()[-3000:] for log in self.path.glob("*/runs/*/logs/*")]
        return "\n".join(result)

    def losses(self, experiment_id: int) -> dict[int, float]:
        """End an experiment and return its losses by step."""
        trial = self.finish(experiment_id)
        (curve,) = self.client.metrics(trial["id"], "training", ["loss"])
        (self.gate / "go").unlink()
        for entry in self.gate.iterdir():
            entry.unlink()
        return {int(step): float(value) for step, value in curve["points"]}


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Classes]:
    farm = Classes(tmp_path, 20.0, "--grow-after", "1")
    try:
        farm.join("large", "--slots", "2")
        farm.join("small", "--slots", "2")
        yield farm
    finally:
        farm.close()


@pytest.mark.soak  # test_several_nodes.py loses an agent, launcher_ssh/test_launch.py is elastic
def test_elastic_class_over_two_agents(
    farm: Classes,
) -> None:
    reference = farm.losses(farm.train(config(1, 0, accumulation=4)))
    assert sorted(reference) == list(range(1, BATCHES + 1))

    (farm.gate / "slow").touch()
    paused = farm.train(config(4, 1))
    farm.await_ranks(4)
    farm.client.experiment_action(paused, "pause")
    (farm.gate / "leave").touch()
    (farm.gate / "go").touch()
    until("it has paused", lambda: farm.client.experiment(paused)["state"], lambda s: s == "PAUSED")
    until(
        "its slots are free",
        lambda: [slot["run_id"] for entry in farm.client.agents() for slot in entry["slots"]],
        lambda runs: runs == [None] * 4,
    )
    (trial,) = farm.client.trials(paused)
    assert 0 < trial["steps_completed"] < BATCHES
    (farm.gate / "leave").unlink()
    (farm.gate / "slow").unlink()
    farm.client.experiment_action(paused, "activate")
    assert farm.losses(paused) == pytest.approx(reference, abs=1e-5)

    elastic = farm.train(config(4, 3, elastic={"min_slots": 2}))
    farm.await_ranks(4)
    farm.signal("small", signal.SIGKILL)
    farm.agents["small"].wait()
    farm.await_state("small", "gone")
    farm.await_ranks(2)
    begun = time.monotonic()
    farm.join("small", "--slots", "2")
    (trial,) = farm.client.trials(elastic)
    (shrunk,) = [entry for entry in farm.runs(trial["id"]) if entry["ended_at"] is None]
    until("it has run for longer than it must", time.monotonic, lambda now: now > begun + 2)
    (farm.gate / "late").touch()
    assert farm.losses(elastic) == pytest.approx(reference, abs=1e-5)
    (trial,) = farm.client.trials(elastic)
    assert trial["restarts"] == 0
    reasons = {entry["id"]: entry["reason"] for entry in farm.runs(trial["id"])}
    assert reasons[shrunk["id"]] == "it left for more slots: 4 were free for its trial"
