"""The engine under the names that only DeepSpeed's own libraries and Hugging Face's call."""

import inspect
import logging
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.engine.checkpoint.files import NothingSavedError
from zerotrial.engine.engine import Engine, EngineParts
from zerotrial.engine.protocols import StepResult
from zerotrial.extensions.deepspeed_api.methods import DeepSpeedMethods
from zerotrial.extensions.deepspeed_api.unsupported import methods

__all__ = ["SAVING_TIMEOUT_S", "DeepSpeedEngine"]

logger = logging.getLogger(__name__)

SAVING_TIMEOUT_S = 300.0
"""Seconds that a call which gathers weights waits for the other ranks."""

_SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}

_ZERO_TO_FP32 = '''\
#!/usr/bin/env python3
"""Writes whole weights: python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER."""

from zerotrial.extensions.deepspeed_api.names.zero_to_fp32 import main

main()
'''


class _Config(dict[str, Any]):
    """A configuration that answers as the file's dict and as our object."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.model_dump(mode="json"))
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


class _LossScale(float):
    """The loss scale, which DeepSpeed has as a method: calls return the configured one."""

    in_file: float

    def __new__(cls, now: float = 0.0, in_file: float = 0.0) -> "_LossScale":
        loss_scale = super().__new__(cls, now)
        loss_scale.in_file = in_file
        return loss_scale

    def __call__(self) -> float:
        return self.in_file


class _ThroughputTimer:
    """``engine.tput_timer``, which scripts notify of epochs; the step line has the throughput."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """An epoch has ended."""
        self.epoch_count += 1

    def start(self) -> None:
        """Do nothing: the engine times its steps."""

    def stop(self, *args: Any, **options: Any) -> None:
        """Do nothing."""


class _AsModule(nn.Module):
    """Makes an engine an ``nn.Module``, as DeepSpeed's is; its parts are those of ``module``.

    Nothing of ``nn.Module`` is kept for the engine itself: each method is the model's, so that
    names have no ``module.`` before them, and an outer module sees the model in the engine's place.
    """

    module: Any

    __setattr__ = object.__setattr__  # type: ignore[assignment]
    __delattr__ = object.__delattr__


def _of_the_model(name: str) -> Any:
    def method(self: _AsModule, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, "The model's."
    return method


_OWN_METHODS = ("_get_name",)
for _name, _method in vars(nn.Module).items():
    if inspect.isfunction(_method) and not _name.startswith("__") and _name not in _OWN_METHODS:
        setattr(_AsModule, _name, _of_the_model(_name))


class DeepSpeedEngine(Engine, DeepSpeedMethods, _AsModule):  # type: ignore[misc]  # train() is ours
    """An :class:`~zerotrial.engine.engine.Engine` that scripts written for DeepSpeed know."""

    REPLACEMENTS: ClassVar[dict[str, str]] = DeepSpeedMethods.REPLACEMENTS | methods(
        "DeepSpeedEngine"
    )

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self.config: Any = _Config(parts.config)
        self.tput_timer = _ThroughputTimer()
        self._tell_optimizer(overflow=False)
        self._gathered_at = -1  # the step at which the script has gathered whole weights

    def _tell_optimizer(self, *, overflow: bool) -> None:
        """Have the optimizer, which is torch's own, answer what scripts ask DeepSpeed's of fp16."""
        optimizer: Any = self.optimizer
        optimizer.overflow = overflow
        optimizer.cur_scale = optimizer.loss_scale = self.scaler.scale

    @property
    def loss_scale(self) -> float:
        """Factor of losses; when called, ``fp16.loss_scale`` of the file, where 0 is dynamic."""
        return _LossScale(self.scaler.scale, self.config.fp16.loss_scale)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> str:
        """See :meth:`~zerotrial.engine.engine.Engine.save_checkpoint`. **Collective**.

        The folder gets ``zero_to_fp32.py`` beside the checkpoints, as from DeepSpeed.
        """
        saved = super().save_checkpoint(*args, **kwargs)
        script = Path(saved).parent / "zero_to_fp32.py"
        if self.global_rank == 0 and not script.exists():
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(_ZERO_TO_FP32, encoding="utf-8")
        return saved

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See :meth:`~zerotrial.engine.engine.Engine.load_checkpoint`. **Collective**.

        Returns:
            As there; a pair of None, with a warning, where no tag was given and nothing has been
            saved: by that scripts know that they begin.
        """
        try:
            loaded = super().load_checkpoint(*args, **kwargs)
        except NothingSavedError as error:
            if self.global_rank == 0:
                logger.warning("load_checkpoint(): %s; nothing is loaded, as in DeepSpeed", error)
            return None, None
        self._tell_optimizer(overflow=False)
        return loaded

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepResult:
        """See :meth:`~zerotrial.engine.engine.Engine.step`; within ``no_sync`` nothing is updated.

        Accelerate calls it there after each backward; the next step outside is the update.
        """
        return super().step(lr_kwargs) if self._syncing else self._end_without_update()

    def _update(self, lr_kwargs: dict[str, Any]) -> StepResult:
        result = super()._update(lr_kwargs)  # of a pipeline's train_batch() too
        self._tell_optimizer(overflow=not result.updated)
        return result

    def _end_without_update(self) -> StepResult:
        """End a micro-batch whose gradients wait for the next."""
        by_hand, self.progress.manual_boundary = self.progress.manual_boundary, False
        self._syncing = True
        try:
            return super().step()
        finally:
            self._syncing = False
            self.progress.manual_boundary = by_hand

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are freed as soon as they have been used."""

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether whole weights may be gathered at stage 3."""
        return bool(self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save)

    def _zero3_consolidated_16bit_state_dict(
        self,
        exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
    ) -> dict[str, Tensor] | None:
        """Gather all weights on rank 0, in the type that the model computes in. **Collective**.

        Returns:
            On rank 0 weights and buffers by name; on the others None, as in DeepSpeed.
        """
        state = self.full_state_dict(
            _SIXTEEN_BITS[self.config.dtype], exclude_frozen_parameters=exclude_frozen_parameters
        )
        return state if self.global_rank == 0 else None

    def full_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """See :meth:`~zerotrial.engine.engine.Engine.full_state_dict`. **Collective**."""
        self._gathered_at = self.global_steps
        return super().full_state_dict(*args, **kwargs)

    def state_for_saving(self, call: str, *, is_main_process: bool) -> dict[str, Tensor]:
        """Gather weights for a call that saves them. **Collective**.

        A rank that does not save returns at once if the script has gathered the weights of this
        step before: rank 0 then has them already, and passes them to the call.

        Args:
            call: Name of the script's call.
            is_main_process: Whether the script wants this rank to save.

        Returns:
            On rank 0 weights and buffers by name; on the others nothing.

        Raises:
            ConfigError: If not all ranks make the call.
        """
        if not is_main_process and self._gathered_at == self.global_steps:
            return {}
        if missing := self.watchdog.wait_for_ranks(call, SAVING_TIMEOUT_S):
            raise ConfigError(
                f"{call}()",
                [
                    "state_dict: must be given at stage 3 where not all ranks make the call, which "
                    f"gathers the weights; rank(s) {', '.join(map(str, missing))} did not within "
                    f"{SAVING_TIMEOUT_S:g} s; call it on every rank with is_main_process=..., or "
                    "call accelerator.get_state_dict(model) on every rank and pass the result"
                ],
            )
        state = self._zero3_consolidated_16bit_state_dict() or {}
        self._gathered_at = -1  # the script has not seen these
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # Lightning's Fabric steps an engine that looks like an optimizer, and else the optimizer, past
    # the engine.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        """The optimizer's."""
        return self.optimizer.state

    def compile(self, backend: Any = None, compile_kwargs: Any = None, **unused: Any) -> None:
        """Compile the module in place."""
        del unused
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)
