"""Models, optimizers and schedules of a PyTorchTrial, which the training loop sees as an engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zerolab.errors import TrialError
from zerotrial.extensions.determined_api.lr_scheduler import LRScheduler
from zerotrial.ranks import Distributed

__all__ = ["TrialModels"]

_FILE = "state.pt"


class _Parallel(DistributedDataParallel):
    """Model with averaged gradients; other attributes are those of the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class TrialModels:
    """State of a PyTorchTrial with the methods that the loop calls on an engine.

    Args:
        distributed: Ranks of the trial.
        device: Device of this rank.
        batch_size: Samples of a batch on this rank; None to use that of the training loader.
        aggregation_frequency: Batches whose gradients one optimizer step uses.
    """

    def __init__(
        self,
        distributed: Distributed,
        device: torch.device,
        batch_size: int | None,
        aggregation_frequency: int,
    ) -> None:
        self._distributed = distributed
        self.device = device
        self.batch_size = batch_size
        self.aggregation_frequency = aggregation_frequency
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules: list[LRScheduler] = []
        self.scaler: Any = None
        self.autocast_type: torch.dtype | None = None

    # Names that the loop calls

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a batch on this rank.

        Raises:
            TrialError: If it is unknown before the training loader is built.
        """
        if self.batch_size is None:
            raise TrialError(
                "hyperparameters.global_batch_size: must be set for get_per_slot_batch_size() and "
                "get_global_batch_size(), got none"
            )
        return self.batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return 1: each call of ``train_batch`` is a batch."""
        return 1

    def train(self) -> None:
        """Put the models into training mode."""
        for model in self.models:
            model.train()

    def eval(self) -> None:
        """Put the models into evaluation mode."""
        for model in self.models:
            model.eval()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the first optimizer."""
        groups = self.optimizers[0].param_groups if self.optimizers else []
        return [float(group["lr"]) for group in groups]

    def save_checkpoint(self, directory: str, tag: str) -> None:
        """Write a checkpoint on the first rank."""
        if not self._distributed.is_chief:
            return
        path = Path(directory) / tag
        path.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "models": [_module_of(model).state_dict() for model in self.models],
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "schedules": [schedule.state_dict() for schedule in self.schedules],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
            },
            path / _FILE,
        )

    def load_checkpoint(
        self,
        directory: str,
        tag: str,
        load_module_only: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint on every rank."""
        file = Path(directory) / tag / _FILE
        if not file.is_file():
            return None, {}
        state = torch.load(file, map_location=self.device, weights_only=True)
        for model, content in zip(self.models, state["models"], strict=True):
            _module_of(model).load_state_dict(content)
        if not load_module_only:
            for name, targets in (("optimizers", self.optimizers), ("schedules", self.schedules)):
                for target, content in zip(targets, state[name], strict=True):
                    target.load_state_dict(content)  # type: ignore[attr-defined]
            if self.scaler is not None and state["scaler"] is not None:
                self.scaler.load_state_dict(state["scaler"])
        return str(file), {}

    # What the context of the trial calls

    def add_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device; let several ranks average its gradients."""
        model.to(self.device)
        if self._distributed.size > 1 and any(p.requires_grad for p in model.parameters()):
            model = _Parallel(model)
        self.models.append(model)
        return model

    def updates(self, batch: int) -> bool:
        """Return whether the optimizers step in a batch."""
        return (batch + 1) % self.aggregation_frequency == 0

    @contextmanager
    def training_batch(self, batch: int) -> Iterator[None]:
        """Run a batch: autocast, and no exchange of gradients in a batch without a step."""
        with ExitStack() as stack:
            if not self.updates(batch):
                for model in self.models:
                    stack.enter_context(
                        model.no_sync() if isinstance(model, _Parallel) else nullcontext()
                    )
            stack.enter_context(self.autocast())
            yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the forward pass in the type of automatic mixed precision, if there is one."""
        enabled = self.autocast_type is not None
        with torch.autocast(self.device.type, dtype=self.autocast_type, enabled=enabled):
            yield

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients; those of several batches are averaged."""
        if self.scaler is not None and self.autocast_type is not None:
            loss = self.scaler.scale(loss)
        (loss / self.aggregation_frequency).backward(*args, **options)  # type: ignore[no-untyped-call]


def _module_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, _Parallel) else model
