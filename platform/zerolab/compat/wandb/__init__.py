"""Calls of wandb that report to Zerolab: ``import zerolab.compat.wandb as wandb``."""

from typing import Any

from zerolab.extensions import wandb_api
from zerolab.extensions.wandb_api import *  # noqa: F403 - the same names

__all__ = wandb_api.__all__


def __getattr__(name: str) -> Any:
    """Return a name that changes, such as ``run``, or fail with the replacement of a name."""
    return getattr(wandb_api, name)
