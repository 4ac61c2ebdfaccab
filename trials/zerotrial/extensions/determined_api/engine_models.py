"""Model and optimizer of a PyTorchTrial on the ZeRO engine, as ``deepspeed_config`` asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerolab.errors import TrialError
from zerotrial.engine.builder.build import initialize

__all__ = ["EngineModels"]


class _EngineModel(torch.nn.Module):
    """Model that calls the engine once there is one; other attributes are those of the model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.engines: list[Any] = []  # in a list, so that the engine is no part of this module

    def forward(self, *args: Any, **options: Any) -> Any:
        target = self.engines[0] if self.engines else self.module
        return target(*args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class EngineModels:
    """The one model and the one optimizer of a trial that trains with the ZeRO engine.

    Args:
        config: Engine file, or its content.
        device: Device of this rank.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        self.device = device
        self.models: list[torch.nn.Module] = []
        self.schedules: list[Any] = []
        self.batch_size: int | None = None
        self.aggregation_frequency = 1
        self._config = config
        self._micro_batch = 0

    def add_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that runs on the engine.

        Raises:
            TrialError: For a second model.
        """
        if self.models:
            raise TrialError("wrap_model: must be called once with deepspeed_config, got two")
        self.models.append(_EngineModel(model))
        return self.models[0]

    def add_optimizer(self, optimizer: Any) -> Any:
        """Build the engine, and return it.

        Raises:
            TrialError: Without a model, or for a second optimizer.
        """
        if not self.models:
            raise TrialError("wrap_optimizer: must follow wrap_model with deepspeed_config")
        (model,) = self.models
        assert isinstance(model, _EngineModel)
        if model.engines:
            problem = "wrap_optimizer: must be called once with deepspeed_config"
            raise TrialError(f"{problem}, got two optimizers")
        engine, *_ = initialize(model=model.module, optimizer=optimizer, config=self._config)
        model.engines.append(engine)
        return engine

    @property
    def engine(self) -> Any:
        """Engine of the model.

        Raises:
            TrialError: Before :meth:`add_optimizer`.
        """
        engines: Any = self.models[0].engines if self.models else []
        if not engines:
            raise TrialError("wrap_optimizer: must be called in __init__ with deepspeed_config")
        return engines[0]

    def completes_batch(self) -> bool:
        """Count a micro-batch; return whether it was the last one of a batch."""
        self._micro_batch += 1
        return self._micro_batch % int(self.engine.batch.accumulation_steps) == 0

    def updates(self, batch: int) -> bool:
        """Return True: each batch ends with an optimizer step."""
        del batch
        return True

    @contextmanager
    def training_batch(self, batch: int) -> Iterator[None]:
        """Run a micro-batch."""
        del batch
        yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run a forward pass; the engine file chooses its type."""
        yield

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients."""
        self.engine.backward(loss, *args, **options)

    def step(self, clip_grads: Any, scaler: Any, closure: Any) -> None:
        """Step the engine.

        Raises:
            TrialError: If an argument replaces a key of the engine file.
        """
        for name, value, instead in (
            ("clip_grads", clip_grads, "gradient_clipping"),
            ("scaler", scaler, "fp16"),
            ("closure", closure, "an optimizer without a closure"),
        ):
            if value is not None:
                problem = f"step_optimizer: {name}: must be None with deepspeed_config"
                raise TrialError(f"{problem}; use {instead} of the engine file")
        self.engine.step()
