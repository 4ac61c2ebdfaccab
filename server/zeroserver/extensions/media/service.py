"""Deletion of media by users."""

from sqlalchemy import ColumnElement, delete, func, select

from zerolab.errors import ConflictError
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import owner_of
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.janitor import Chore
from zeroserver.store.rows import TrialRow
from zeroserver.store.schema import media

__all__ = ["MediaRemoval"]


class MediaRemoval(Service):
    """Deletes media of an ended trial; a running one may report the same content again."""

    def remove(self, trial_id: int, condition: ColumnElement[bool]) -> tuple[int, int]:
        """Delete selected media; their files are deleted after the commit.

        Returns:
            Number and bytes of the deleted media.

        Raises:
            NotFoundError: If there is no such trial.
            ConflictError: If the trial has not ended.
        """
        trial = self.work.find(TrialRow, trial_id)
        if trial.state not in TRIAL_ENDED:
            msg = f"trial {trial_id} is {trial.state}; delete its media when it has ended"
            raise ConflictError(msg)
        columns, connection = media.c, self.work.connection
        of_trial = columns.trial_id == trial_id
        selected = (of_trial, condition)
        totals = select(func.count(), func.coalesce(func.sum(columns.size), 0)).where(*selected)
        count, size = connection.execute(totals).one()
        digests = set(connection.scalars(select(columns.digest).where(*selected).distinct()))
        connection.execute(delete(media).where(*selected))
        still_used = set(connection.scalars(select(columns.digest).where(of_trial).distinct()))
        unused = sorted(digests - still_used - {""})
        if unused:
            chore = Chore(
                storage=self.work.storage_of(trial.experiment_id),
                owner=owner_of(self.work.orchestrator, trial_id),
                files=unused,
                media=True,
            )
            self.work.orchestrator.janitor.discard(self.work, chore)
        self.work.touch("trial", trial.experiment_id, trial_id)
        return int(count), int(size)
