"""Determined's client, whose experiments, trials and models are those of ``zerolab.Client``."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zerolab
from zerolab.client.objects import Checkpoint, Experiment, Model, Trial
from zerolab.config.experiment.layers import read_experiment

__all__ = [
    "Determined",
    "create_experiment",
    "create_model",
    "get_checkpoint",
    "get_experiment",
    "get_model",
    "get_models",
    "get_trial",
    "list_experiments",
    "login",
]

logger = logging.getLogger(__name__)


class Determined:
    """Connection to a server.

    Args:
        master: Address of the server; by default ``ZEROLAB_MASTER`` or this machine's.
        user: Not used: the token names the user.
        password: Not used, with a warning: sign in with a token.
        token: Token of a user; by default ``ZEROLAB_TOKEN`` or that of this machine.
    """

    def __init__(
        self,
        master: str | None = None,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        del user, options  # certificates come from the environment
        if password is not None:
            logger.warning("the password is not used; the token of ZEROLAB_TOKEN names the user")
        arguments: dict[str, Any] = {"url": master, "token": token}
        self.client = zerolab.Client(
            **{name: value for name, value in arguments.items() if value is not None}
        )

    def create_experiment(
        self, config: str | Path | dict[str, Any], model_dir: str | Path
    ) -> Experiment:
        """Submit an experiment.

        Args:
            config: Experiment file, or its content.
            model_dir: Directory of the code.
        """
        content = config if isinstance(config, dict) else read_experiment(Path(config))
        return self.client.submit(Path(model_dir), content)

    def get_experiment(self, experiment_id: int) -> Experiment:
        """Return an experiment."""
        return self.client.experiment(experiment_id)

    def list_experiments(self) -> Sequence[Experiment]:
        """Return all experiments."""
        return self.client.experiments()

    def get_trial(self, trial_id: int) -> Trial:
        """Return a trial."""
        return self.client.trial(trial_id)

    def get_checkpoint(self, uuid: str) -> Checkpoint:
        """Return a checkpoint."""
        return self.client.checkpoint(uuid)

    def create_model(self, name: str, description: str = "") -> Model:
        """Create a registered model."""
        return self.client.create_model(name, description)

    def get_model(self, identifier: str) -> Model:
        """Return a registered model."""
        return self.client.model(identifier)

    def get_models(self) -> Sequence[Model]:
        """Return all registered models."""
        return self.client.models()


_default: Determined | None = None


def login(
    master: str | None = None,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    **options: Any,
) -> None:
    """Connect the functions of this module to a server; see :class:`Determined`."""
    global _default
    _default = Determined(master, user, password, token, **options)


def _connection() -> Determined:
    if _default is None:
        login()
    assert _default is not None
    return _default


def create_experiment(config: str | Path | dict[str, Any], model_dir: str | Path) -> Experiment:
    """Submit an experiment."""
    return _connection().create_experiment(config, model_dir)


def get_experiment(experiment_id: int) -> Experiment:
    """Return an experiment."""
    return _connection().get_experiment(experiment_id)


def list_experiments() -> Sequence[Experiment]:
    """Return all experiments."""
    return _connection().list_experiments()


def get_trial(trial_id: int) -> Trial:
    """Return a trial."""
    return _connection().get_trial(trial_id)


def get_checkpoint(uuid: str) -> Checkpoint:
    """Return a checkpoint."""
    return _connection().get_checkpoint(uuid)


def create_model(name: str, description: str = "") -> Model:
    """Create a registered model."""
    return _connection().create_model(name, description)


def get_model(identifier: str) -> Model:
    """Return a registered model."""
    return _connection().get_model(identifier)


def get_models() -> Sequence[Model]:
    """Return all registered models."""
    return _connection().get_models()
