"""An engine's checkpoints: what of it is saved, and DeepSpeed's two calls."""

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from zerotrial.engine.checkpoint.checkpointer import Checkpointer, TrainingState
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.load import Selection
from zerotrial.engine.checkpoint.window import WindowState
from zerotrial.engine.comm.ranks import Ranks

if TYPE_CHECKING:
    from zerotrial.engine.engine import Engine

__all__ = ["load_checkpoint", "make_checkpointer", "save_checkpoint"]


class _Counters:
    """The engine's counters at the last boundary, as something that is saved and loaded."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        counters = self._engine.counters()
        counters["micro_steps"] -= self._engine.window[0]
        return {**counters, "accumulation_steps": self._accumulation_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counters = dict(state_dict)
        if counters.pop("accumulation_steps") != self._accumulation_steps:
            # Boundaries are where micro_steps is a multiple of the accumulation steps, which may
            # be others now.
            counters["micro_steps"] = counters["global_steps"] * self._accumulation_steps
        self._engine.set_counters(counters)

    @property
    def _accumulation_steps(self) -> int:
        return self._engine.gradient_accumulation_steps()


class _Window:
    """The engine's accumulation window, as something that is saved and loaded."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def recover(self) -> None:
        self._engine.recover()

    def state(self) -> WindowState:
        engine = self._engine
        return WindowState(*engine.window, engine.gradient_accumulation_steps(), engine.loss_scale)

    def resume(self, state: WindowState) -> None:
        ended = state.ended_at(self._engine.gradient_accumulation_steps())
        assert ended is not None
        self._engine.resume_window(ended, state.backwards)

    def forget(self) -> None:
        self._engine.forget_micro_batches()


def make_checkpointer(engine: "Engine") -> Checkpointer:
    """Build the part that saves and loads an engine. **Collective**."""
    trainable: dict[str, torch.Size] = {}
    for names in Ranks(engine.group).gather(
        {piece.name: piece.shape for piece in engine.stage.pieces()}
    ):
        trainable |= names  # a rank may own no element of some parameter
    stateful = {
        "counters": _Counters(engine),
        "loss_scaler": engine.scaler,
        "lr_scheduler": engine.lr_scheduler,
        "loader": engine.training_dataloader,
    }
    state = TrainingState(
        module=engine.module,
        stage=engine.stage,
        zero_stage=engine.zero_optimization_stage(),
        trainable={name: trainable[name] for name in sorted(trainable)},
        group=engine.group,
        model_group=engine.model_group,
        stateful={name: part for name, part in stateful.items() if hasattr(part, "state_dict")},
        window=_Window(engine),
    )
    options = engine.config.checkpoint
    return Checkpointer(
        state, tag_validation=options.tag_validation, in_background=options.writer.decoupled
    )


def save_checkpoint(  # noqa: PLR0917 - DeepSpeed's signature
    engine: "Engine",
    save_dir: str | PathLike[str],
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
    *,
    async_save: bool | None = None,
) -> str:
    """Write everything that training needs to go on. **Collective**.

    Args:
        engine: Whose state. Between two accumulation boundaries the gradients gathered so far are
            a part of it.
        save_dir: Holds the checkpoints of one engine.
        tag: Folder name; ``global_step<N>`` by default. An older one of the same tag is replaced.
        client_state: The user's own: tensors, numbers, strings and containers of them.
        save_latest: Whether ``latest`` is to name this checkpoint.
        exclude_frozen_parameters: Leave out parameters that are not trained.
        async_save: Copy the state and write it while training goes on; None does what
            ``checkpoint.writer.decoupled`` says. See :meth:`Engine.wait_for_checkpoint`.

    Returns:
        Where the checkpoint is; when asynchronous, where it will be.

    Raises:
        CheckpointError: On all ranks, if it could not be written.
    """
    return engine.checkpointer.save(
        _given("save_dir", save_dir),
        f"global_step{engine.global_steps}" if tag is None else str(tag),
        client_state,
        save_latest=save_latest,
        exclude_frozen_parameters=exclude_frozen_parameters,
        in_background=async_save,
    )


def load_checkpoint(  # noqa: PLR0917 - DeepSpeed's signature
    engine: "Engine",
    load_dir: str | PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
    load_optimizer_states: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
    load_lr_scheduler_states: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
    load_module_only: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
) -> tuple[str, dict[str, Any]]:
    """Go on from a checkpoint of any stage and number of ranks. **Collective**.

    Args:
        engine: Whose state is replaced, with gradients that wait for a boundary. Those that the
            checkpoint has are dropped unless optimizer states are loaded: the next micro-batch
            then begins an accumulation window.
        load_dir: As it was passed to :func:`save_checkpoint`.
        tag: Folder name; the one that ``latest`` names by default.
        load_module_strict: Whether parameters and buffers must have the same names.
        load_optimizer_states: False starts the optimizer afresh.
        load_lr_scheduler_states: False keeps the schedule as it is.
        load_module_only: Only parameters and buffers; counters, random state and all else stay.

    Returns:
        The checkpoint's directory, and the client state that was saved with it.

    Raises:
        CheckpointNotFoundError: If there is none; training never starts afresh silently.
        CheckpointError: On all ranks, if a file is missing or damaged, or does not fit.
    """
    selection = Selection(
        optimizer_states=load_optimizer_states,
        lr_scheduler=load_lr_scheduler_states,
        module_only=load_module_only,
        strict=load_module_strict,
    )
    tag = None if tag is None else str(tag)
    return engine.checkpointer.load(_given("load_dir", load_dir), tag, selection)


def _given(name: str, directory: str | PathLike[str]) -> str | PathLike[str]:
    """Refuse what would silently mean the working directory."""
    if not isinstance(directory, str | PathLike) or not str(directory):
        raise CheckpointError(f"{name}: must be the name of a directory, got {directory!r}")
    return directory
