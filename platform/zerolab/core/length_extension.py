"""Going on where the searcher lets a trial, without giving its slots back in between."""

import logging

from zerolab.client.http import Client
from zerolab.contract.spec import RunSpec
from zerolab.contract.wire import Extension
from zerolab.errors import ZerolabError
from zerolab.reports.reporter import Reporter

__all__ = ["ask_to_go_on"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0


def ask_to_go_on(spec: RunSpec, reporter: Reporter, until: int) -> Extension | None:
    """Ask the server whether a run that has come to its bound may go on at once.

    What it has reported decides that, so all of it is shipped first.

    Args:
        spec: The run.
        reporter: Of the run.
        until: Its bound, in the unit of the search.

    Returns:
        The answer; None without a server, or if it cannot be asked now: the run then ends at its
        bound, and the trial is started again when it is its turn.
    """
    if not spec.master or not reporter.flush():
        return None
    try:
        with Client(spec.master, spec.token, timeout_s=_PATIENCE_S) as client:
            return client.extend(spec.run_id, until)
    except ZerolabError as error:
        logger.debug("not asked to go on: %s", error)
        return None
