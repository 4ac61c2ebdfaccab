"""Names of the environment variables of the command line, agents and runs."""

__all__ = [
    "ENV_AS_DEEPSPEED",
    "ENV_AS_DETERMINED",
    "ENV_AS_WANDB",
    "ENV_COLLECTIVE_TIMEOUT",
    "ENV_DATABASE",
    "ENV_HOME",
    "ENV_HOSTS",
    "ENV_MASTER",
    "ENV_PRELOAD",
    "ENV_RUN_SPEC",
    "ENV_SCRIPT",
    "ENV_STAGED",
    "ENV_TOKEN",
]

ENV_HOME = "ZEROLAB_HOME"
"""Directory of an installation's data; ``~/.zerolab`` when unset."""

ENV_MASTER = "ZEROLAB_MASTER"
"""Address of the server for the command line, e.g. ``http://127.0.0.1:8080``."""

ENV_TOKEN = "ZEROLAB_TOKEN"  # noqa: S105 - the name of a variable, not a secret
"""Token for the command line; the installation's own token file when unset."""

ENV_DATABASE = "ZEROLAB_DATABASE"
"""Address of the server's database, e.g. ``postgresql://USER:PASSWORD@HOST/NAME``; the SQLite file
of the data directory when unset. Agents and trials do not get it."""

ENV_RUN_SPEC = "ZEROLAB_RUN_SPEC"
"""Path of the JSON file with the :class:`~zerolab.contract.spec.RunSpec` of this process."""

ENV_SCRIPT = "ZEROLAB_SCRIPT_PROCESS"
"""Process id of the Python that a command runs in a rank; its child processes differ from it."""
ENV_HOSTS = "ALL_WORKERS"
"""Hosts of a run, separated by commas, the chief's first; set for the ranks of a command.

Platforms for deep learning set it for their jobs."""

ENV_STAGED = "ZEROLAB_STAGED_DATA"
"""Directory of the data staged on this machine; unset if none was staged."""

ENV_AS_DETERMINED = "ZEROLAB_AS_DETERMINED"
"""1: the ranks of a run import Zerolab's replacement of determined."""
ENV_AS_DEEPSPEED = "ZEROLAB_AS_DEEPSPEED"
"""1: ``import deepspeed`` imports this engine if DeepSpeed is not installed; ``force``: always."""

ENV_AS_WANDB = "ZEROLAB_AS_WANDB"
"""1: ``import wandb`` in a run imports :mod:`zerolab.compat.wandb`."""

ENV_PRELOAD = "ZEROLAB_PRELOAD"
"""0: an agent imports torch with its first trial class instead of at its start."""

ENV_COLLECTIVE_TIMEOUT = "ZEROLAB_COLLECTIVE_TIMEOUT"
"""Seconds that a rank waits for the others in a collective before it gives up; 600 when unset."""
