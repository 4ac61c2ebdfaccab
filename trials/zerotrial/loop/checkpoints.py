"""A trial's checkpoints: the engines' files, the loop's own state, and the user's, kept apart.

::

    <uuid>/model0/...             written by the first engine, and so on
    <uuid>/trial/rank_0.pt        counters, place in the data, random state, metrics to report
    <uuid>/user/rank_0.pt         what callbacks and reducers asked to keep
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
from zerolab.core.checkpoint_writer import CheckpointSaver, Draft, Sending
from zerolab.errors import TrialError, one_line
from zerolab.reports.reporter import Reporter
from zerolab.storage.store import CheckpointStore
from zerotrial.callbacks import Callback, CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.loop.run_directories import WRITING
from zerotrial.trial import ZeroTrial

__all__ = ["CheckpointKeeper", "SavedState"]

logger = logging.getLogger(__name__)

_TRIAL, _USER = "trial", "user"


class SavedState:
    """What a checkpoint says about the loop.

    Args:
        path: The checkpoint's directory.
        rank: Whose state is read first.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.shared: dict[str, Any] = _read(path / _TRIAL / "rank_0.pt")
        """Counters and what else is the same on every rank."""
        self.world_size: int = self.shared["world_size"]
        self.mine: dict[str, Any] | None = None
        """This rank's own part; ``None`` when fewer ranks saved."""
        if rank < self.world_size:
            self.mine = _read(path / _TRIAL / f"rank_{rank}.pt")
        source = rank if rank < self.world_size else 0
        self.user: dict[str, Any] = _read(path / _USER / f"rank_{source}.pt")
        """State of callbacks and reducers."""

    def of_lost_ranks(self, world_size: int) -> list[dict[str, Any]]:
        """Parts of ranks that there were when it was saved and are no more."""
        lost = range(world_size, self.world_size)
        return [_read(self.path / _TRIAL / f"rank_{rank}.pt") for rank in lost]


class CheckpointKeeper:
    """Saves and loads the checkpoints of one run.

    Args:
        trial: The user's.
        context: Its context.
        callbacks: Told of each moment, and saved.
        reporter: Told of each checkpoint; ``None`` on all ranks but the chief.
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
        self._writing: tuple[Draft, int] | None = None  # with its batches
        self._sending: tuple[Sending, int] | None = None
        self.last: str | None = None
        """Where the last checkpoint lies that was saved or loaded."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a checkpoint. **Collective**.

        Where an engine writes in the background, it is complete after :meth:`finish` alone.

        Args:
            state: This rank's part of the loop's state; plain data with ``steps_completed``.

        Raises:
            StaleRunError: If another run has taken the trial over meanwhile; nothing is kept.
            StorageError: On all ranks, if the storage cannot take it.
            TrialError: If a callback's state cannot be loaded safely.
        """
        self.finish()
        draft = self._saver.begin()
        steps = state["steps_completed"]
        self._callbacks.call("on_checkpoint_save_start", dict(state))
        # Engines fail on all ranks or on none. Where a trial's own save() fails on one, the others
        # may still be writing: what is there is left to the sweep of the trial's next run.
        with self._saver.blaming_storage():
            self._trial.save(self._context, draft.path)
        try:
            with self._context.distributed.together("checkpoint: not stored"):
                self._write(draft.path, state)
        except BaseException:
            self._saver.abandon(draft)
            raise
        self._writing = draft, steps
        if not any(engine.saves_in_background for engine in self._context.engines):
            self.finish()

    @property
    def ready(self) -> bool:
        """Whether :meth:`advance` has something to do, and need not wait for this rank."""
        if self._sending is not None:
            return self._sending[0].done
        written = all(engine.checkpoint_written for engine in self._context.engines)
        return self._writing is not None and written

    def advance(self) -> None:
        """Take what :meth:`save` began a step further: written, brought up. **Collective**.

        Raises:
            StaleRunError: If another run has taken the trial over meanwhile; nothing is kept.
            StorageError: On all ranks, if the storage cannot take it.
        """
        if self._writing is not None:
            (draft, steps), self._writing = self._writing, None
            for engine in self._context.engines:
                engine.wait_for_checkpoint()
            self._callbacks.call("on_checkpoint_write_end", str(draft.path))
            self._sending = self._saver.send(draft, self._metadata(steps)), steps
            if self._store.is_remote:
                return
        if self._sending is not None:
            (sending, steps), self._sending = self._sending, None
            self._saver.complete(sending, steps)
            self.last = self._store.address.at(sending.draft.uuid)
            self._callbacks.call("on_checkpoint_upload_end", sending.draft.uuid)

    def finish(self) -> None:
        """Wait until what :meth:`save` began is written, and publish it. **Collective**.

        Raises:
            StaleRunError: If another run has taken the trial over meanwhile; nothing is kept.
            StorageError: On all ranks, if the storage cannot take it.
        """
        while self._writing is not None or self._sending is not None:
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
        """Put back the engines and the user's state. **Collective**.

        Returns:
            The loop's state, for the controller to put back.

        Raises:
            NotFoundError: If there is no such checkpoint, or it is damaged.
        """
        store = CheckpointStore.of_run(self._context.spec, ref.storage)
        self.last = store.address.at(ref.uuid)
        with store.restore_path(ref.uuid) as path:
            return self._load_from(path, warm_start=ref.warm_start)

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
        if saved.mine is not None:
            context.reducers.load_state_dict(saved.user["reducers"])
        for name, callback in self._callbacks.by_name.items():
            if name in saved.user["callbacks"]:
                callback.load_state_dict(saved.user["callbacks"][name])
            elif type(callback).load_state_dict is not Callback.load_state_dict:
                logger.warning("callback %r: the checkpoint holds no state of it", name)
        return saved

    @contextmanager
    def swept(self) -> Iterator[None]:
        """Remove what an earlier run of this trial began to write and never finished.

        A run without a platform holds a lock meanwhile: of two in one directory, the second leaves
        alone what the first is writing.
        """
        if not self._context.distributed.is_chief:
            yield
        elif self._context.spec.trial_id:
            self._store.sweep()
            yield
        else:
            with _only_writer(Path(self._context.spec.run_dir)) as alone:
                if alone:
                    self._store.sweep()
                else:
                    logger.warning(
                        "another process saves checkpoints in %s; give each a run_dir of its own",
                        self._context.spec.run_dir,
                    )
                yield

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        context = self._context
        rank = context.distributed.rank
        _write(path / _TRIAL / f"rank_{rank}.pt", dict(state))
        user = {
            "callbacks": {
                name: _checked(callback.state_dict(), f"callback {name!r}")
                for name, callback in self._callbacks.by_name.items()
            },
            "reducers": _checked(context.reducers.state_dict(), "reducers"),
        }
        _write(path / _USER / f"rank_{rank}.pt", user)


def _checked(state: Any, whose: str) -> Any:
    """Refuse, while it is still there, what could not be loaded later."""
    if not state:
        return state
    try:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise TrialError(
            f"{whose}: state_dict must hold tensors, numbers, strings, and lists and dicts of "
            f"them, which load without running code: {one_line(error)}"
        ) from error
    return state


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())  # a full disk is then an OSError that says so


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrialError(f"checkpoint: {path} is missing; go on from an earlier one") from None
    except Exception as error:
        raise TrialError(
            f"checkpoint: {path} is damaged ({error}); go on from an earlier one"
        ) from error
    return content


@contextmanager
def _only_writer(directory: Path) -> Iterator[bool]:
    """Hold a lock on a directory until the block ends, or the process does, if nobody has it."""
    with ExitStack() as closing:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context((directory / WRITING).open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alone = False
        else:
            alone = True
        yield alone
