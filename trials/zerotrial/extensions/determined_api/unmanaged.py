"""Determined's Core API for scripts that report to a server which does not start them."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerolab import core
from zerolab.contract.spec import ENV_MASTER
from zerolab.core.context import Context
from zerotrial.extensions.determined_api.cluster_info import TrialInfo
from zerotrial.extensions.determined_api.core_api import DistributedContext

__all__ = [
    "Config",
    "Info",
    "close",
    "context_of",
    "init",
    "init_context",
    "url_reverse_webui_exp_view",
]


@dataclass
class Config:
    """Description of the experiment that :func:`init` makes."""

    name: str | None = None
    hparams: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    description: str | None = None
    labels: Sequence[str] | None = None
    workspace: str | None = None
    project: str | None = None
    checkpoint_storage: str | dict[str, Any] | None = None
    searcher: dict[str, Any] | None = None
    external_experiment_id: str | None = None
    external_trial_id: str | None = None


@dataclass
class Info:
    """Run of the script."""

    latest_checkpoint: str | None
    _trial_info: TrialInfo

    @property
    def trial(self) -> TrialInfo:
        """Trial of the run."""
        return self._trial_info


_context: Context | None = None


def init(
    *,
    config: Config | None = None,
    distributed: DistributedContext | None = None,
    client: Any = None,
    **options: Any,
) -> None:
    """Begin a run; it reports to the server of ``ZEROLAB_MASTER``.

    Without it, the reports stay in ``.zerolab/live`` for ``zerolab sync``.

    Args:
        config: Name, labels and ids of the run; ignored in an experiment.
        distributed: Ignored: the ranks come from torchrun's variables.
        client: Ignored.
        options: Ignored.
    """
    global _context
    _context = init_context(config=config, distributed=distributed, client=client, **options)
    _context.__enter__()
    atexit.register(close)


def init_context(
    *,
    config: Config | None = None,
    distributed: DistributedContext | None = None,
    client: Any = None,
    **options: Any,
) -> Context:
    """Return the context of a new run, for a ``with`` block; see :func:`init`.

    Args:
        config: Name, labels and ids of the run; ignored in an experiment.
        distributed: Ignored: the ranks come from torchrun's variables.
        client: Ignored.
        options: Ignored.
    """
    del distributed, client, options
    config = config or Config()
    # Reports of a script go to a server only if one is named: there may be none.
    master = os.environ.get(ENV_MASTER, "")
    identity = config.external_trial_id or config.external_experiment_id or ""
    context = core.init(
        hparams=config.hparams,
        checkpoint_storage=config.checkpoint_storage,
        server=master,
        name=config.name or "",
        id=identity,
        labels=list(config.labels or ()),
    )
    if hasattr(context, "connect"):  # scripts print the ids
        context.connect()
    return context


def close() -> None:
    """End the run; a second call does nothing."""
    global _context
    context, _context = _context, None
    if context is not None:
        context.__exit__(None, None, None)


def context_of(name: str) -> Any:
    """Return a part of the current context: train, checkpoint, preempt, distributed or info.

    Raises:
        RuntimeError: Before :func:`init`.
    """
    if _context is None:
        raise RuntimeError(f"core_v2.{name}: call core_v2.init() first")
    if name != "info":
        return getattr(_context, name)
    spec = _context.train.info
    checkpoint = _context.train.latest_checkpoint
    experiment_id, trial_id = getattr(_context, "server_ids", (spec.experiment_id, spec.trial_id))
    trial = TrialInfo(
        trial_id, experiment_id, spec.trial_seed, spec.hparams, spec.config, spec.run_id
    )
    return Info(None if checkpoint is None else checkpoint.uuid, trial)


def url_reverse_webui_exp_view() -> str:
    """Return the address of the experiment in the web page; empty without a server."""
    master = os.environ.get(ENV_MASTER)
    info: Info = context_of("info")
    return f"{master}/#/experiments/{info._trial_info.experiment_id}" if master else ""  # noqa: SLF001 - Determined's name
