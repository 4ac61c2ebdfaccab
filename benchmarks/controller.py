"""Cost of the trial loop: microseconds of CPU time per batch over a bare torch loop.

All sides train the same model on the same batches, taking turns; the cost is the median of the
differences between turns that stand side by side. A busy machine disturbs it, but less than it
would a clock on the wall:

    python benchmarks/controller.py [--batches 200] [--rounds 60]

Goals: 15 us a batch when metrics are reported every 100 batches, 30 us when they are reported
every batch (Determined 0.38.1: 50 us and 170 us, on a batch of 181 us).
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrial
from zerolab.contract.spec import RunSpec
from zerotrial.context import ZeroTrialContext
from zerotrial.loop.session import Session
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.units import TrainUnit
from zerotrial.ranks import Distributed


class Samples(torch.utils.data.Dataset[Any]):
    """Ready-made batches, so that the loader itself costs little."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.x[indices[0] : indices[0] + len(indices)]


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


class Engine:
    """The least that a trial needs of an engine."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4)
        self.micro_steps = 0
        self.skipped_steps = 0
        self.loss_scale = 1.0

    def train_one(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.module(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.micro_steps += 1
        return loss

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def get_lr(self) -> list[float]:
        return [1e-4]

    def get_global_grad_norm(self) -> float:
        return 1.0

    def train_micro_batch_size_per_gpu(self) -> int:
        return 16

    def gradient_accumulation_steps(self) -> int:
        return 1

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...

    def load_checkpoint(self, *_: Any, **__: Any) -> tuple[str, dict[str, Any]]:
        return "", {}


class Trial(zerotrial.ZeroTrial):
    data = Samples(16 * 512)

    def __init__(self, context: ZeroTrialContext) -> None:
        self.engine = context.wrap_model_engine(Engine())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        return self.engine.train_one(next(dataloader_iter))

    def evaluate_batch(self, dataloader_iter: Any) -> dict[str, float]:
        next(dataloader_iter)
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> zerotrial.DataLoader:
        return zerotrial.DataLoader(self.data, batch_size=16, collate_fn=as_it_is)

    def build_validation_data_loader(self) -> zerotrial.DataLoader:
        return zerotrial.DataLoader(Samples(16), batch_size=16, collate_fn=as_it_is)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Bare:
    """A plain loop."""

    def __init__(self) -> None:
        self.engine = Engine()
        loader = torch.utils.data.DataLoader(Trial.data, batch_size=16, collate_fn=as_it_is)
        self.feed = endless(loader)

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.engine.train_one(next(self.feed))


class Controlled:
    """The controller's training loop, reports included."""

    def __init__(self, directory: str, report_period: TrainUnit) -> None:
        spec = RunSpec(
            experiment_id=1,
            trial_id=1,
            run_id=1,
            config={},
            hparams={},
            trial_seed=1,
            slots=1,
            model_dir=directory,
            run_dir=directory,
            checkpoint_dir=str(Path(directory) / "checkpoints"),
        )
        self.session = Session(ZeroTrialContext(spec, Distributed()))
        settings = FitSettings(max_length=zerotrial.Batch(10**9), report_period=report_period)
        self.controller = self.session.build_controller(Trial, settings)

    def run(self, batches: int) -> None:
        controller = self.controller
        schedule, end = controller._schedule, controller.steps + batches
        while controller.steps < end:
            controller._train_until(
                min(schedule.next_pause(controller.steps), controller._next_agreement, end)
            )
            controller._report_if_due()
            if controller.steps >= controller._next_agreement:
                controller._agree()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200, help="batches in a turn")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        sides: dict[str, Bare | Controlled] = {
            "bare": Bare(),
            "every 100 batches": Controlled(f"{directory}/100", zerotrial.Batch(100)),
            "every batch": Controlled(f"{directory}/1", zerotrial.Batch(1)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():  # the first batches import and allocate
            side.run(300)
        gc.collect()
        gc.disable()
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                started = time.process_time()
                side.run(arguments.batches)
                seconds[name].append(time.process_time() - started)
        for side in sides.values():
            if isinstance(side, Controlled):
                side.session.close(None)
    per_batch = 1e6 / arguments.batches
    medians = {name: statistics.median(found) * per_batch for name, found in seconds.items()}
    print(f"bare loop: {medians['bare']:.1f} us a batch")
    for name, goal in (("every 100 batches", 15), ("every batch", 30)):
        pairs = zip(seconds[name], seconds["bare"], strict=True)
        cost = statistics.median(ours - bare for ours, bare in pairs) * per_batch
        print(f"reporting {name}: {cost:+.1f} us a batch (goal {goal})")
    print(json.dumps({name: round(value, 2) for name, value in medians.items()}))


if __name__ == "__main__":
    main()
