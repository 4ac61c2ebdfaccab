"""Runner of a user's external searcher: it polls for events and sends operations.

``python -m zerolab.client.search EXPERIMENT_ID module:Class`` runs a class of the working
directory; the server starts it for ``searcher.entrypoint``. The class gets the searcher's block of
the experiment file, the hyperparameters and the seed, and has the methods of
:class:`zerolab.searcher.Searcher`. When the process restarts, the class receives all events again:
it must make the same decisions from the same events.
"""

import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from zerolab.client.http import Client
from zerolab.client.transport import Backoff
from zerolab.contract.messages import plain_number
from zerolab.contract.spec import ENV_MASTER, ENV_TOKEN, EXIT_USER_ERROR
from zerolab.errors import ConfigError, ConflictError, UnreachableError
from zerolab.files import read_json
from zerolab.linux import die_with_parent
from zerolab.searcher import (
    Continue,
    Create,
    Operation,
    Reopen,
    Searcher,
    Shutdown,
    Stop,
    compute_deferred,
)
from zerolab.searcher.operations import ComputedOperation

__all__ = ["MakeSearcher", "main", "serve"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MakeSearcher = Callable[[Mapping[str, Any], Mapping[str, Any], int], Searcher]
"""Factory of a searcher from its block, the hyperparameters and the seed."""

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
    """Run a searcher of your own until its experiment has ended.

    After the first response it waits for a server that is not reachable, which may be restarting.

    Args:
        client: Client of the server.
        experiment_id: Experiment with ``searcher.name: custom``.
        make: Factory of the searcher.
        wait_s: Maximum wait of a request for events, in seconds.
        config: The experiment's configuration; read from the server if None.

    Raises:
        ConflictError: If the experiment has another searcher, or another process serves it.
        UnreachableError: If no server responds to the first request.

    Example:
        >>> from zerolab.client.search import serve
        >>> from zerolab.searcher import Shutdown
        >>> class Nothing:
        ...     def initial_operations(self):
        ...         return [Shutdown()]
        ...     def progress(self):
        ...         return 1.0
        >>> def make(config, hyperparameters, seed):
        ...     return Nothing()
        >>> client = zerolab.Client()
        >>> config = {"entrypoint": "python train.py", "hyperparameters": {"lr": 0.1},
        ...           "searcher": {"name": "custom", "metric": "loss", "max_length": 10}}
        >>> experiment = client.create_experiment(config, "model")
        >>> serve(client, experiment["id"], make)
        >>> client.experiment(experiment["id"])["num_trials"]
        0
    """
    if config is None:
        config = client.experiment(experiment_id)["config"]
    seed = config["reproducibility"]["experiment_seed"]
    searcher = make(config["searcher"], config["hyperparameters"], seed)
    waiting = compute_deferred(searcher.initial_operations())
    last_id, handled = 0, -1
    update = client.search_events(experiment_id, after=0, wait_s=0)
    handled = update["handled"]
    if handled < 0:
        body = _body(handled, 0, waiting, searcher)
        handled = _retry_until_response(_send, client, experiment_id, body)
    while not update["over"]:
        waiting = []
        for event in update["events"]:
            last_id = event["id"]
            operations = compute_deferred(_dispatch_event(searcher, event))
            # After a restart all events come again: the server already has these operations.
            if last_id > handled:
                waiting += operations
        if last_id > handled:
            body = _body(handled, last_id, waiting, searcher)
            handled = _retry_until_response(_send, client, experiment_id, body)
        update = _retry_until_response(
            client.search_events, experiment_id, after=last_id, wait_s=wait_s
        )


def _retry_until_response(request: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeat an idempotent request until the server responds."""
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            return request(*args, **kwargs)
        except UnreachableError as error:
            logger.warning("%s; retrying", error)
        time.sleep(backoff.pause_s())


def _dispatch_event(searcher: Searcher, event: Mapping[str, Any]) -> list[Operation]:
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
    after: int, handled: int, operations: Sequence[ComputedOperation], searcher: Searcher
) -> dict[str, Any]:
    return {
        "after": after,
        "handled": handled,
        "operations": [_plain(operation) for operation in operations],
        "progress": min(max(searcher.progress(), 0.0), 1.0),
    }


def _send(client: Client, experiment_id: int, body: Mapping[str, Any]) -> int:
    handled = int(client.search_operations(experiment_id, body)["handled"])
    if handled < body["handled"]:  # the experiment is ending and accepts no operations
        return int(body["handled"])
    if handled > body["handled"]:
        msg = f"experiment {experiment_id}: another process runs its searcher; this process stops"
        raise ConflictError(msg)
    return handled


def _plain(operation: ComputedOperation) -> dict[str, Any]:
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
        The exit code: 64 if the class cannot be loaded or fails.
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
            raise  # a server error: retried
        except Exception as error:
            if isinstance(error, ConflictError) or _is_client_error(error):
                raise
            traceback.print_exc()
            return EXIT_USER_ERROR
    return 0


def _is_client_error(error: BaseException) -> bool:
    """Return whether a request to the server failed, not the user's class."""
    from zerolab.errors import ZerolabError

    return isinstance(error, ZerolabError)
