"""Patches of Hugging Face's modules and of modules that read command lines.

They are applied when the modules are imported.
"""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from zerolab.contract.spec import ENV_RUN_SPEC, ENV_SCRIPT, EXIT_USER_ERROR
from zerotrial.extensions.after_import import patch_when_imported
from zerotrial.extensions.huggingface.user_errors import (
    as_users_mistake,
    built_likewise,
    while_building,
    while_choosing,
)

__all__ = ["install"]

_BEST = "_determine_best_metric"
"""Looks for ``metric_for_best_model`` among the metrics of an evaluation."""


@functools.cache
def install() -> None:
    """Record Trainer and Accelerate in this process; a second call does nothing.

    The names ``report_to="zerolab"`` and ``log_with="zerolab"`` become available. In a process of
    an experiment scripts need not use them: every Trainer and every Accelerator is recorded,
    resumes from the trial's checkpoint, and leaves when the trial is paused.
    """
    if ENV_RUN_SPEC in os.environ:
        os.environ.setdefault(ENV_SCRIPT, str(os.getpid()))  # unless one that started us is it
    patch_when_imported(
        {
            "transformers.integrations.integration_utils": _name_the_callback,
            "transformers.hf_argparser": _note_what_parsers_refuse,
            "transformers.training_args": _lay_over_arguments,
            "transformers.trainer": _follow_trainers,
            "accelerate.tracking": _name_the_tracker,
            "accelerate.accelerator": _follow_accelerators,
            "accelerate.utils.deepspeed": _follow_engines,
            "argparse": _note_what_argparse_refuses,
            "click.exceptions": _note_what_click_refuses,
            "typer._click.exceptions": _note_what_click_refuses,
        }
    )


def _name_the_callback(module: ModuleType) -> None:
    class Named:
        """Makes a callback when a Trainer asks for ``report_to="zerolab"``."""

        def __new__(cls) -> Any:
            from zerotrial.extensions.huggingface.trainer import ZerolabCallback

            return ZerolabCallback()

    module.INTEGRATION_TO_CALLBACK["zerolab"] = Named


def _lay_over_arguments(module: ModuleType) -> None:
    def around(checked: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(checked)
        def checked_by_us(self: Any) -> None:
            from zerotrial.extensions.huggingface.arguments import lay_over

            lay_over(self)
            checked(self)

        return while_building(checked_by_us)

    _wrap(module.TrainingArguments, "__post_init__", around)
    built_likewise(module.TrainingArguments)


def _note_what_parsers_refuse(module: ModuleType) -> None:
    for name in ("parse_args_into_dataclasses", "parse_dict", "parse_json_file", "parse_yaml_file"):
        _wrap(module.HfArgumentParser, name, while_building)


def _note_what_argparse_refuses(module: ModuleType) -> None:
    _wrap(module.ArgumentParser, "error", as_users_mistake)


def _note_what_click_refuses(module: ModuleType) -> None:
    before = module.UsageError.exit_code

    def code(self: Any) -> int:
        from zerotrial.extensions.huggingface.run import is_script

        del self
        return EXIT_USER_ERROR if is_script() else before

    module.UsageError.exit_code = property(code)


def _follow_trainers(module: ModuleType) -> None:
    from zerotrial.extensions.huggingface.trainer import around_init, around_train

    _wrap(module.Trainer, "__init__", around_init)
    _wrap(module.Trainer, "__init__", while_building)
    built_likewise(module.Trainer)
    _wrap(module.Trainer, "train", around_train)
    if hasattr(module.Trainer, _BEST):
        _wrap(module.Trainer, _BEST, while_building)
    _wrap(module.Trainer, "_evaluate", while_choosing)


def _name_the_tracker(module: ModuleType) -> None:
    from zerotrial.extensions.huggingface.tracker import ZerolabTracker

    module.LOGGER_TYPE_TO_CLASS["zerolab"] = ZerolabTracker

    def around(filtered: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @functools.wraps(filtered)
        def filtered_by_us(log_with: Any, *args: Any, **kwargs: Any) -> list[Any]:
            """Versions before 1.13 refuse names that are not their own."""
            named = log_with if isinstance(log_with, list | tuple) else [log_with]
            own_names = [name for name in named if name == "zerolab"]
            if not own_names:
                return filtered(log_with, *args, **kwargs)
            other_names = [name for name in named if name != "zerolab"]
            return [*filtered(other_names, *args, **kwargs), *own_names[:1]]

        return filtered_by_us

    _wrap(module, "filter_trackers", around)


def _follow_accelerators(module: ModuleType) -> None:
    from zerotrial.extensions.huggingface.accelerator import (
        around_init,
        around_save_state,
        around_step,
    )

    _wrap(module.Accelerator, "__init__", around_init)
    for builds in ("__init__", "prepare", "load_state"):
        _wrap(module.Accelerator, builds, while_building)
    _wrap(module.Accelerator, "save_state", around_save_state)
    _wrap(module.AcceleratedOptimizer, "step", around_step)


def _follow_engines(module: ModuleType) -> None:
    from zerotrial.extensions.huggingface.accelerator import around_backward

    _wrap(module.DeepSpeedEngineWrapper, "backward", around_backward)


def _wrap(owner: Any, name: str, decorator: Callable[[Any], Any]) -> None:
    setattr(owner, name, decorator(getattr(owner, name)))
