"""Checkpoints of a trial: files of the engines, state of the loop, and state of the user.

::

    <uuid>/model0/...             written by the first engine, and so on
    <uuid>/trial/rank_0.pt        counters, data position, random state, unreported metrics
    <uuid>/user/rank_0.pt         state of callbacks and reducers
    <uuid>/checkpoint.json        names and sizes of all files; written last

All ``.pt`` files load under ``torch.load(..., weights_only=True)``.
"""

import fcntl
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from zerolab.contract.spec import CheckpointRef
from zerolab.core.checkpoint_writer import CheckpointSaver, Draft, PendingUpload
from zerolab.errors import TrialError, one_line
from zerolab.reports.reporter import Reporter
from zerolab.storage.store import CheckpointStore
from zerotrial.callbacks import Callback, CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.loop.fit_result import SavedCheckpoint
from zerotrial.loop.run_directories import LOCK_FILE
from zerotrial.trial import ZeroTrial

__all__ = ["CheckpointManager", "SavedState"]

logger = logging.getLogger(__name__)

_TRIAL, _USER = "trial", "user"


class SavedState:
    """State of the loop read from a checkpoint.

    Args:
        path: The checkpoint's directory.
        rank: Global rank of this process; its state is read.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.shared: dict[str, Any] = _read(path / _TRIAL / "rank_0.pt")
        """Rank 0's state: counters, and what else is the same on every rank."""
        self.world_size: int = self.shared["world_size"]
        self.rank_state: dict[str, Any] | None = None
        """This rank's state; ``None`` when fewer ranks saved."""
        if rank < self.world_size:
            self.rank_state = _read(path / _TRIAL / f"rank_{rank}.pt")
        source = rank if rank < self.world_size else 0
        self.user: dict[str, Any] = _read(path / _USER / f"rank_{source}.pt")
        """State of callbacks and reducers."""

    def load_removed_ranks(self, world_size: int) -> list[dict[str, Any]]:
        """Read the states of ranks that saved but no longer exist."""
        removed = range(world_size, self.world_size)
        return [_read(self.path / _TRIAL / f"rank_{rank}.pt") for rank in removed]


class CheckpointManager:
    """Saves and loads the checkpoints of one run.

    Args:
        trial: The user's trial.
        context: Its context.
        callbacks: Called at each step, and saved.
        reporter: Reports each checkpoint; ``None`` on all ranks but the chief.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        callbacks: CallbackList,
        reporter: Reporter | None,
    ) -> None:
        spec = context.spec
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._store = CheckpointStore.of_run(spec)
        self._saver = CheckpointSaver(self._store, context.distributed, reporter)
        # A checkpoint passes through both, each with the batches completed at its save.
        self._pending_write: tuple[Draft, int] | None = None
        self._pending_upload: tuple[PendingUpload, int] | None = None
        self.saved: list[SavedCheckpoint] = []
        """Checkpoints that this run has loaded or saved, oldest first."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a checkpoint. **Collective**.

        If an engine writes in the background, the checkpoint is complete only after :meth:`finish`.

        Args:
            state: This rank's state of the loop; plain data with ``steps_completed``.

        Raises:
            StaleRunError: If another run has superseded this one; the checkpoint is discarded.
            StorageError: On all ranks, if the storage rejects the files.
            TrialError: If a callback's state cannot be loaded safely.
        """
        self.finish()
        draft = self._saver.begin()
        steps = state["steps_completed"]
        self._callbacks.call("on_checkpoint_save_start", dict(state))
        # Engines fail on all ranks or on none. If a user's save() fails on one rank, the others may
        # still be writing. The files stay there until the trial's next run sweeps the storage.
        with self._saver.storage_errors():
            self._trial.save(self._context, draft.path)
        try:
            with self._context.distributed.together("checkpoint: not stored"):
                self._write(draft.path, state)
        except BaseException:
            self._saver.abandon(draft)
            raise
        self._pending_write = draft, steps
        if not any(engine.saves_in_background for engine in self._context.engines):
            self.finish()

    @property
    def ready(self) -> bool:
        """Return whether :meth:`advance` can proceed without waiting for this rank."""
        if self._pending_upload is not None:
            return self._pending_upload[0].done
        written = all(engine.checkpoint_written for engine in self._context.engines)
        return self._pending_write is not None and written

    def advance(self) -> None:
        """Move the pending checkpoint one step on: written, then uploaded. **Collective**.

        Raises:
            StaleRunError: If another run has superseded this one; the checkpoint is discarded.
            StorageError: On all ranks, if the storage rejects the files.
        """
        # Both phases run in the background. Each ends with a collective, so the ranks advance
        # together at one of their agreements instead of whenever a rank is done.
        if self._pending_write is not None:
            (draft, steps), self._pending_write = self._pending_write, None
            for engine in self._context.engines:
                engine.wait_for_checkpoint()
            self._callbacks.call("on_checkpoint_write_end", str(draft.path))
            self._pending_upload = self._saver.send(draft, self._metadata(steps)), steps
            if self._store.is_remote:
                return
        if self._pending_upload is not None:
            (sending, steps), self._pending_upload = self._pending_upload, None
            self._saver.complete(sending, steps)
            uuid = sending.draft.uuid
            self.saved.append(SavedCheckpoint(uuid, self._store.address.at(uuid), steps))
            self._callbacks.call("on_checkpoint_upload_end", sending.draft.uuid)

    def finish(self) -> None:
        """Wait until the pending checkpoint is written, and publish it. **Collective**.

        Raises:
            StaleRunError: If another run has superseded this one; the checkpoint is discarded.
            StorageError: On all ranks, if the storage rejects the files.
        """
        while self._pending_write is not None or self._pending_upload is not None:
            self.advance()

    def _metadata(self, steps: int) -> dict[str, Any]:
        spec = self._context.spec
        return {
            "steps_completed": steps,
            "trial_id": spec.trial_id,
            "run_id": spec.run_id,
            "world_size": self._context.distributed.size,
            "hparams": spec.hparams,
        }

    def load(self, ref: CheckpointRef) -> SavedState:
        """Restore the engines and the user's state. **Collective**.

        Returns:
            The loop's state, which the controller restores.

        Raises:
            NotFoundError: If the checkpoint is missing or damaged.
        """
        store = CheckpointStore.of_run(self._context.spec, ref.storage)
        self.saved.append(
            SavedCheckpoint(ref.uuid, store.address.at(ref.uuid), ref.steps_completed)
        )
        with store.restore_path(ref.uuid) as local_path:
            return self._load_from(local_path, warm_start=ref.warm_start)

    def _load_from(self, path: Path, *, warm_start: bool) -> SavedState:
        if not (path / _TRIAL / "rank_0.pt").is_file():
            raise TrialError(f"{path}: is no checkpoint of a trial (trial/rank_0.pt is missing)")
        context = self._context
        saved = SavedState(path, context.distributed.rank)
        context.warm_start = warm_start or saved.shared["trial_id"] != context.spec.trial_id
        self._callbacks.call("on_checkpoint_load_start", dict(saved.shared))
        self._trial.load(context, path)
        if context.warm_start:
            return saved
        if saved.rank_state is not None:
            context.reducers.load_state_dict(saved.user["reducers"])
        for name, callback in self._callbacks.by_name.items():
            if name in saved.user["callbacks"]:
                callback.load_state_dict(saved.user["callbacks"][name])
            elif type(callback).load_state_dict is not Callback.load_state_dict:
                logger.warning("callback %r: the checkpoint has no state of it", name)
        return saved

    @contextmanager
    def sweep_unfinished(self) -> Iterator[None]:
        """Remove unfinished checkpoints of earlier runs, then yield.

        A run without a platform locks its directory for the length of the block. A second process
        in the same directory does not sweep, since the first may be writing.
        """
        if not self._context.distributed.is_chief:
            yield
        elif self._context.spec.trial_id:
            self._store.sweep()
            yield
        else:
            with _directory_lock(Path(self._context.spec.run_dir)) as acquired:
                if acquired:
                    self._store.sweep()
                else:
                    logger.warning(
                        "another process saves checkpoints in %s; use a separate run_dir for each",
                        self._context.spec.run_dir,
                    )
                yield

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        context = self._context
        rank = context.distributed.rank
        _write(path / _TRIAL / f"rank_{rank}.pt", dict(state))
        user = {
            "callbacks": {
                name: _check_loadable(callback.state_dict(), f"callback {name!r}")
                for name, callback in self._callbacks.by_name.items()
            },
            "reducers": _check_loadable(context.reducers.state_dict(), "reducers"),
        }
        _write(path / _USER / f"rank_{rank}.pt", user)


def _check_loadable(state: Any, owner: str) -> Any:
    """Raise at save time for a state that ``weights_only=True`` could not load.

    Raises:
        TrialError: If loading would need to run code.
    """
    if not state:
        return state
    try:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise TrialError(
            f"{owner}: state_dict must hold tensors, numbers, strings, and lists and dicts of "
            f"them, which load without running code: {one_line(error)}"
        ) from error
    return state


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())  # a full disk is then an OSError with its cause


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrialError(f"checkpoint: {path} is missing; resume from an earlier one") from None
    except Exception as error:
        raise TrialError(
            f"checkpoint: {path} is damaged ({error}); resume from an earlier one"
        ) from error
    return content


@contextmanager
def _directory_lock(directory: Path) -> Iterator[bool]:
    """Try to lock a directory for the length of the block; yield whether it succeeded."""
    with ExitStack() as closing:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context((directory / LOCK_FILE).open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            acquired = False
        else:
            acquired = True
        yield acquired
