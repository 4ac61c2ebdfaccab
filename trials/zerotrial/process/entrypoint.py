"""Import of the trial class that an experiment's entrypoint names."""

import difflib
import importlib
import sys
from pathlib import Path

from zerolab.contract.spec import TrialClass
from zerolab.errors import TrialError
from zerolab.syntax import module_paths
from zerotrial.trial import ZeroTrial, check_trial_class

__all__ = ["load_trial_class"]


def load_trial_class(
    entrypoint: TrialClass, model_dir: Path, *, check_methods: bool = True
) -> type[ZeroTrial]:
    """Import a trial class from the model directory.

    Args:
        entrypoint: Module and name of the class.
        model_dir: Directory to put first in the module search path.
        check_methods: Whether the class must have all methods that the loop calls.

    Raises:
        TrialError: If there is no such module or class, it is not a :class:`ZeroTrial`, or the
            loop cannot call its methods.
        Exception: Any error that the user's module raises at import.
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
            raise  # a module that the user's module imports is missing
        files = sorted(path.stem for path in model_dir.glob("*.py"))
        raise TrialError(
            f"{named}: there is no module {module_name!r} in the model directory; its modules are: "
            f"{', '.join(files) or 'none'}{_suggest(module_name, files)}"
        ) from None
    trial_class = getattr(module, class_name, None)
    file = _file(module_name, model_dir)
    trials = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, ZeroTrial) and value is not ZeroTrial
    ]
    if trial_class is None:
        raise TrialError(
            f"{named}: {file} has no class {class_name!r}"
            f"{_suggest(class_name, list(vars(module)))}; its trial classes are: "
            f"{', '.join(trials) or 'none'}"
        )
    if not (isinstance(trial_class, type) and issubclass(trial_class, ZeroTrial)):
        raise TrialError(
            f"{named}: {class_name} in {file} is not a ZeroTrial; "
            f"derive it: class {class_name}(zerotrial.ZeroTrial)"
        )
    if check_methods:
        check_trial_class(trial_class)
    return trial_class


def _file(module_name: str, model_dir: Path) -> str:
    """Return the module's path in the model directory; its name if it is elsewhere."""
    paths = module_paths(module_name)
    return next((path for path in paths if (model_dir / path).is_file()), module_name)


def _suggest(name: str, names: list[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
