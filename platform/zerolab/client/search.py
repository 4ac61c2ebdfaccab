"""Runs a searcher of the user's own: asks for events, and sends the operations that follow.

``python -m zerolab.client.search EXPERIMENT_ID module:Class`` does so for a class of the working
directory; the server starts it for ``searcher.entrypoint``. The class is made with the searcher's
block of the experiment file, the hyperparameters and the seed, and has the methods of
:class:`zerolab.searcher.Searcher`. When the process ends and is started again, the class is told
all events anew: it must decide the same from the same events.
"""

import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from zerolab.client.backoff import Backoff
from zerolab.client.http import Client
from zerolab.contract.messages import plain_number
from zerolab.contract.spec import ENV_MASTER, ENV_TOKEN, EXIT_USER_ERROR
from zerolab.errors import ConfigError, ConflictError, UnreachableError
from zerolab.files import read_json
from zerolab.linux import die_with_parent
from zerolab.searcher import Continue, Create, Operation, Reopen, Searcher, Shutdown, Stop

__all__ = ["MakeSearcher", "main", "serve"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MakeSearcher = Callable[[Mapping[str, Any], Mapping[str, Any], int], Searcher]
"""From the searcher's block, the hyperparameters and the seed."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


def serve(
    client: Client,
    experiment_id: int,
    make: MakeSearcher,
    *,
    wait_s: float = 30.0,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Run a searcher until its experiment has ended.

    Once the server has answered, one that is away is waited for: it may be started again.

    Args:
        client: Of the server.
        experiment_id: Whose ``searcher.name`` is ``custom``.
        make: Makes the searcher.
        wait_s: Longest wait of one question for events, in seconds.
        config: Of the experiment; read from the server when None.

    Raises:
        ConflictError: If the experiment's searcher is another one, or somebody else serves it.
        UnreachableError: If no server answers at the first question.
    """
    if config is None:
        config = client.experiment(experiment_id)["config"]
    seed = config["reproducibility"]["experiment_seed"]
    searcher = make(config["searcher"], config["hyperparameters"], seed)
    waiting = searcher.initial_operations()
    seen, handled = 0, -1
    found = client.search_events(experiment_id, after=0, wait_s=0)
    handled = found["handled"]
    if handled < 0:
        body = _body(handled, 0, waiting, searcher)
        handled = _answered(_send, client, experiment_id, body)
    while not found["over"]:
        waiting = []
        for event in found["events"]:
            seen = event["id"]
            operations = _tell(searcher, event)
            if seen > handled:
                waiting += operations
        if seen > handled:
            body = _body(handled, seen, waiting, searcher)
            handled = _answered(_send, client, experiment_id, body)
        found = _answered(client.search_events, experiment_id, after=seen, wait_s=wait_s)


def _answered(ask: Callable[P, T], *what: P.args, **how: P.kwargs) -> T:
    """Ask until a server answers; to ask again changes nothing."""
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            return ask(*what, **how)
        except UnreachableError as error:
            logger.warning("%s; asking goes on", error)
        time.sleep(backoff.pause_s())


def _tell(searcher: Searcher, event: Mapping[str, Any]) -> list[Operation]:
    kind, trial_id = event["kind"], event["trial_id"]
    if kind == "created":
        return searcher.trial_created(trial_id)
    if kind == "validated":
        return searcher.validation_completed(
            trial_id, plain_number(event["metric"]), event["length"]
        )
    if kind == "exited":
        return searcher.trial_exited(trial_id)
    return searcher.trial_exited_early(trial_id, event["reason"])


def _body(
    after: int, handled: int, operations: list[Operation], searcher: Searcher
) -> dict[str, Any]:
    return {
        "after": after,
        "handled": handled,
        "operations": [_plain(operation) for operation in operations],
        "progress": min(max(searcher.progress(), 0.0), 1.0),
    }


def _send(client: Client, experiment_id: int, body: Mapping[str, Any]) -> int:
    found = int(client.search_operations(experiment_id, body)["handled"])
    if found < body["handled"]:  # the experiment is ending: nothing is wanted any more
        return int(body["handled"])
    if found > body["handled"]:
        msg = f"experiment {experiment_id}: another process serves its searcher; this one stops"
        raise ConflictError(msg)
    return found


def _plain(operation: Operation) -> dict[str, Any]:
    match operation:
        case Create():
            return {
                "kind": "create",
                "trial_id": operation.trial_id,
                "hparams": operation.hparams,
                "trial_seed": operation.trial_seed,
                "source": operation.source,
            }
        case Continue():
            return {
                "kind": "continue", "trial_id": operation.trial_id, "until": operation.until,
            }  # fmt: skip
        case Stop():
            return {"kind": "stop", "trial_id": operation.trial_id}
        case Shutdown():
            return {"kind": "shutdown"}
        case Reopen():
            msg = f"Reopen({operation.trial_id}): must not come from a custom searcher"
            raise ConfigError("operations", [msg])


def main() -> int:
    """Run a class of the working directory as an experiment's searcher.

    Returns:
        The exit code: 64 when the class cannot be loaded or fails.
    """
    experiment_id, entrypoint, *started_by_server = sys.argv[1:]
    config = None
    if started_by_server:
        parent, config_file = started_by_server
        die_with_parent(int(parent))
        config = read_json(Path(config_file))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.path.insert(0, str(Path.cwd()))
    module, _, name = entrypoint.partition(":")
    with Client(os.environ[ENV_MASTER], os.environ.get(ENV_TOKEN, "")) as client:
        try:
            make = getattr(importlib.import_module(module), name)
            serve(client, int(experiment_id), make, config=config)
        except (OSError, ConnectionError):
            raise  # the server: it is tried again
        except Exception as error:
            if isinstance(error, ConflictError) or _is_ours(error):
                raise
            traceback.print_exc()
            return EXIT_USER_ERROR
    return 0


def _is_ours(error: BaseException) -> bool:
    """Whether the conversation with the server failed, and not the user's class."""
    from zerolab.errors import ZerolabError

    return isinstance(error, ZerolabError)


if __name__ == "__main__":
    sys.exit(main())
