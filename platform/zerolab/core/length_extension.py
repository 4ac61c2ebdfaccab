"""Extension of a run at its bound, without releasing its slots."""

import logging

from zerolab.client.http import Client
from zerolab.contract.messages import Extension
from zerolab.contract.spec import RunSpec
from zerolab.errors import ZerolabError
from zerolab.reports.reporter import Reporter

__all__ = ["request_extension"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


def request_extension(spec: RunSpec, reporter: Reporter, until: int) -> Extension | None:
    """Ask the server whether a run at its bound may continue immediately.

    The decision depends on its reports, so all of them are uploaded first.

    Args:
        spec: The run.
        reporter: Reporter of the run.
        until: Its bound, in the unit of the search.

    Returns:
        The response; None without a server, or if it is unreachable. The run then ends at its
        bound, and the trial is restarted later if the searcher continues it.
    """
    if not spec.master or not reporter.flush():
        return None
    try:
        with Client(spec.master, spec.token, timeout_s=_TIMEOUT_S) as client:
            return client.extend(spec.run_id, until)
    except ZerolabError as error:
        logger.debug("could not request an extension: %s", error)
        return None
