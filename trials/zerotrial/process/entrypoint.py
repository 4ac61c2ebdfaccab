"""Finding the trial class that an experiment's entrypoint names."""

import difflib
import importlib
import sys
from pathlib import Path

from zerolab.contract.spec import TrialClass
from zerolab.errors import TrialError
from zerolab.syntax import module_paths
from zerotrial.trial import ZeroTrial

__all__ = ["load_trial_class"]


def load_trial_class(entrypoint: TrialClass, model_dir: Path) -> type[ZeroTrial]:
    """Import a trial class from the model directory.

    Args:
        entrypoint: Its module and name.
        model_dir: Put in front of the module search path.

    Raises:
        TrialError: If there is no such module or class, or it is not a :class:`ZeroTrial`.
        Exception: Whatever the user's module raises while it is imported.
    """
    module_name, class_name = entrypoint.module, entrypoint.name
    named = f"entrypoint {str(entrypoint)!r}"
    if str(model_dir) not in sys.path:
        sys.path.insert(0, str(model_dir))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise  # something that the user's module imports
        files = sorted(path.stem for path in model_dir.glob("*.py"))
        raise TrialError(
            f"{named}: there is no module {module_name!r} in the model directory"
            f"{_suggest(module_name, files)}; its modules are: {', '.join(files) or 'none'}"
        ) from None
    found = getattr(module, class_name, None)
    file = _file(module_name, model_dir)
    trials = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, ZeroTrial) and value is not ZeroTrial
    ]
    if found is None:
        raise TrialError(
            f"{named}: {file} has no class {class_name!r}"
            f"{_suggest(class_name, list(vars(module)))}; its trial classes are: "
            f"{', '.join(trials) or 'none'}"
        )
    if not (isinstance(found, type) and issubclass(found, ZeroTrial)):
        raise TrialError(
            f"{named}: {class_name} in {file} is not a ZeroTrial; "
            f"derive it: class {class_name}(zerotrial.ZeroTrial)"
        )
    missing_methods = sorted(getattr(found, "__abstractmethods__", ()))
    if missing_methods:
        raise TrialError(f"{named}: {class_name} must also define {', '.join(missing_methods)}")
    return found


def _file(module_name: str, model_dir: Path) -> str:
    """Its path in the model directory, or the module's name where it comes from elsewhere."""
    paths = module_paths(module_name)
    return next((path for path in paths if (model_dir / path).is_file()), module_name)


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
