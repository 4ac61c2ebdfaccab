"""Test engine with DeepSpeed's interface on plain torch, and trials that use it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerotrial
from tests.specs import sections
from zerolab.contract.spec import CheckpointRef, RunSpec
from zerotrial.context import ZeroTrialContext
from zerotrial.loop.controller import Controller
from zerotrial.loop.session import Session
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import StopReason
from zerotrial.ranks import Distributed


class PlainEngine:
    """Engine with the part of DeepSpeed's interface that a trial loop needs."""

    def __init__(self, module: nn.Module, micro: int = 2, accumulation: int = 1) -> None:
        self.module = module
        self.optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        self.micro = micro
        self.accumulation = accumulation
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.loss_scale = 1.0

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        return float(self.global_steps)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.micro

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation

    def zero_optimization_stage(self) -> int:
        return 0

    def save_checkpoint(self, directory: str, tag: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            state = {
                "module": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "counters": [self.micro_steps, self.global_steps],
            }
            torch.save(state, Path(directory) / f"{tag}.pt")

    def load_checkpoint(
        self, directory: str, tag: str, load_module_only: bool = False
    ) -> tuple[str, dict[str, Any]]:
        path = Path(directory) / f"{tag}.pt"
        state = torch.load(path, weights_only=True)
        self.module.load_state_dict(state["module"])
        if not load_module_only:
            self.optimizer.load_state_dict(state["optimizer"])
            self.micro_steps, self.global_steps = state["counters"]
        return str(path), {}


class Line(torch.utils.data.Dataset):
    """Data set of ``n`` points of a line; a sample includes its index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.tensor([index / self.n])
        return x, 3 * x + 1, index


class LineTrial(zerotrial.ZeroTrial):
    """Trial of a small network with dropout, so that the random state matters."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.samples = hparams.get("samples", 22)
        self.seen: list[list[int]] = []
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        micro, accumulation = hparams.get("micro", 2), hparams.get("accumulation", 1)
        if "stage" in hparams:
            config = {
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
                "zero_optimization": {"stage": hparams["stage"]},
                "bf16": {"enabled": hparams.get("bf16", False)},
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
                "checkpoint": {"writer": {"decoupled": hparams.get("background", False)}},
            }
            engine: Any = zerotrial.initialize(model=model, config=config)[0]
        else:
            engine = PlainEngine(model, micro, accumulation)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int) -> Any:
        x, y, index = next(dataloader_iter)
        self.seen.append(index.tolist())
        loss = (self.engine(x) - y.to(x.dtype)).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss, "first_index": float(index[0])}

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        x, y, _ = next(dataloader_iter)
        return {"validation_loss": (self.engine(x) - y).float().square().mean()}

    def build_training_data_loader(self) -> Any:
        size = self.context.get_train_micro_batch_size_per_gpu()
        return zerotrial.DataLoader(Line(self.samples), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return zerotrial.DataLoader(Line(6), batch_size=2)


def make_spec(
    path: Path,
    hparams: dict[str, Any] | None = None,
    latest: CheckpointRef | None = None,
    **fields: Any,
) -> RunSpec:
    """Make the specification of a run without a server, in ``path``."""
    model = path / "model"
    model.mkdir(parents=True, exist_ok=True)
    return RunSpec(
        **{
            **sections(fields.pop("config", {})),
            "experiment_id": 1,
            "trial_id": 1,
            "run_id": 1,
            "hparams": hparams or {},
            "trial_seed": 7,
            "slots": 1,
            "model_dir": str(model),
            "run_dir": str(path),
            "checkpoint_dir": str(path / "checkpoints"),
            "latest_checkpoint": latest,
            **fields,
        }
    )


def make_settings(batches: int = 10, **fields: Any) -> FitSettings:
    """Make settings with a length in batches and a report after each."""
    defaults: dict[str, Any] = {
        "max_length": zerotrial.Batch(batches),
        "report_period": zerotrial.Batch(1),
        "metric": "validation_loss",
    }
    return FitSettings(**(defaults | fields))


def fit(
    spec: RunSpec,
    trial_class: Callable[[ZeroTrialContext], Any] = LineTrial,
    settings: FitSettings | None = None,
    distributed: Distributed | None = None,
) -> tuple[StopReason, Any]:
    """Run a trial in this process; return the stop reason and the trial."""
    controller, session = build(spec, trial_class, settings, distributed)
    stop_reason = None
    try:
        stop_reason = controller.run()
    finally:
        session.close(stop_reason)
    return stop_reason, controller._trial


def build(
    spec: RunSpec,
    trial_class: Callable[[ZeroTrialContext], Any] = LineTrial,
    settings: FitSettings | None = None,
    distributed: Distributed | None = None,
) -> tuple[Controller, Session]:
    """Make a trial's controller, and its session, which the caller must close."""
    session = Session(ZeroTrialContext(spec, distributed or Distributed()))
    try:
        return session.build_controller(trial_class, settings or make_settings()), session
    except BaseException:
        session.close(None)
        raise


def records(path: Path, kind: str = "metrics") -> list[dict[str, Any]]:
    """Return the records that a run without a server has written."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [record for record in entries if record["kind"] == kind]


def metrics(path: Path, group: str) -> dict[int, dict[str, Any]]:
    """Return the metrics of a group by batch; the later report of a batch applies."""
    return {r["steps"]: r["values"] for r in records(path) if r["group"] == group}


def last_checkpoint(path: Path) -> CheckpointRef | None:
    """Return the checkpoint that was reported last."""
    entries = records(path, "checkpoint")
    if not entries:
        return None
    return CheckpointRef(entries[-1]["uuid"], entries[-1]["steps_completed"])
