"""Entry point of the dialect."""

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from zerolab.config.engine.dialect import Dialect, ResolvedAuto
from zerolab.extensions.deepspeed_config.auto_values import fill_auto, trial_auto_values
from zerolab.extensions.deepspeed_config.normalization import drop_unsharded_offload, normalize
from zerolab.extensions.deepspeed_config.unsupported_keys import UNSUPPORTED_KEYS, without_aliases
from zerolab.extensions.unsupported import remove_unsupported

if TYPE_CHECKING:
    from zerolab.config.experiment.model_files import ModelFiles

__all__ = ["DeepSpeedDialect"]


class DeepSpeedDialect(Dialect):
    """Engine files as DeepSpeed and Hugging Face's libraries read them."""

    unsupported = UNSUPPORTED_KEYS

    def read_text(self, text: bytes | str, source: str) -> dict[str, Any] | None:
        """Read hjson, as DeepSpeed does."""
        from zerolab.extensions.deepspeed_config.hjson_text import parse_hjson

        return parse_hjson(text, source)

    def normalize(
        self, content: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[str]]:
        """Convert a file of DeepSpeed."""
        return normalize(content, source)

    def without_aliases(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Replace second names of keys."""
        return without_aliases(content)

    def fill_auto(
        self,
        content: Mapping[str, Any],
        hyperparameters: Mapping[str, Any] | None,
        batches: int | None,
        idle: Collection[str],
    ) -> ResolvedAuto:
        """Replace each ``"auto"`` from hyperparameters and rules."""
        return fill_auto(content, hyperparameters, batches, idle)

    def trial_values(
        self, hyperparameters: Mapping[str, Any], batches: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Resolve ``"auto"`` in this process from a trial's hyperparameters."""
        return trial_auto_values(hyperparameters, batches)

    def remove_unsupported(
        self, content: Mapping[str, Any], opaque: Collection[str]
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Remove keys of DeepSpeed without counterpart."""
        return remove_unsupported(content, self.unsupported, opaque)

    def drop_idle(self, content: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        """Drop ``offload_param`` if parameters are not sharded."""
        return drop_unsharded_offload(content)

    def argument_problems(self, space: Mapping[str, Any], model: "ModelFiles") -> list[str]:
        """Check ``training_arguments`` against the class of transformers."""
        from zerolab.extensions.deepspeed_config.training_arguments import (
            training_argument_problems,
        )

        return training_argument_problems(space, model)
