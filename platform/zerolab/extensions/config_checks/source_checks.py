"""Checks of an entrypoint in a model's source, which is read as text and never imported.

Only certain errors are reported. A class that another module provides, or that is created while
the module runs, is checked by the run, which imports the module.
"""

import ast
import importlib.util
import posixpath
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolab.config.experiment.model_files import FolderFiles, ModelFiles
from zerolab.config.experiment.resources import ResourcesConfig
from zerolab.contract.spec import ENV_AS_DETERMINED, Command, TrialClass
from zerolab.extensions.config_checks.rank_launchers import (
    launcher_of,
    launcher_problem,
    parse_python_command,
)
from zerolab.extensions.config_checks.syntax import (
    imported_files,
    parsed,
    relative_import_problem,
    syntax_problem,
)
from zerolab.replacements import scan_script
from zerolab.schema.section import suggest
from zerolab.syntax import module_paths

__all__ = [
    "entrypoint_problem",
    "problems_of_source",
    "source_problems",
]


def problems_of_source(
    entrypoint: object,
    parsed_entrypoint: TrialClass | Command | None,
    model: ModelFiles,
    environment: Mapping[str, str],
    *,
    resources: ResourcesConfig | None,
    same_python: bool,
) -> list[str]:
    """Find the problems of an entrypoint that are certain from the model's source.

    Args:
        entrypoint: As in the experiment file, valid or not.
        parsed_entrypoint: The same; None if it is not valid.
        model: The model directory.
        environment: The trial's environment variables.
        resources: The block, if it is valid, with the slots of a hostfile.
        same_python: Whether this Python runs the trial; another one has another syntax.
    """
    problem = parsed_entrypoint and entrypoint_problem(parsed_entrypoint, model, environment)
    problems = [problem] if problem else []
    if isinstance(parsed_entrypoint, Command) and resources is not None:
        launcher = launcher_of(parsed_entrypoint)
        conflict = launcher and launcher_problem(launcher, resources)
        problems += [conflict] if conflict else []
    path = _entry_file(entrypoint, model)
    if path is not None and ENV_AS_DETERMINED not in environment:
        search_path = environment.get("PYTHONPATH", "").split(":")
        problems += scan_script(path, model.read, search_path)
    problems = [f"entrypoint: {problem}" for problem in problems]
    # Not on a server: its Python may be older than the one that runs the trial.
    if isinstance(model, FolderFiles) and same_python:
        problems += source_problems(entrypoint, model)
    return problems


def entrypoint_problem(
    entrypoint: TrialClass | Command, model: ModelFiles, environment: Mapping[str, str]
) -> str | None:
    """Return why an entrypoint cannot work, if that is certain from the model's source.

    Args:
        entrypoint: As in the experiment file.
        model: The model directory.
        environment: The trial's environment variables.
    """
    if isinstance(entrypoint, Command):
        return _command_problem(entrypoint, model)
    source = _source_of(entrypoint.module, model)
    if source is None:
        return _module_problem(entrypoint, model, environment)
    path, text = source
    tree = parsed(text)
    return None if tree is None else _class_problem(entrypoint, path, tree)


def source_problems(entrypoint: object, model: ModelFiles) -> list[str]:
    """Find syntax errors, and relative imports outside of packages, in the files that are run.

    The entrypoint's own file is read, and those of the model directory that it imports at its top.

    Args:
        entrypoint: As in the experiment file.
        model: The model directory.
    """
    path = _entry_file(entrypoint, model)
    arguments = _words(entrypoint)
    if path is None or arguments[0].startswith("/"):  # another Python version has another syntax
        return []
    is_module = path not in arguments
    problems = []
    folder = "" if is_module else posixpath.dirname(path)
    for file, source in imported_files(path, model.read, (folder,)):
        problem = syntax_problem(source, file)
        if problem is not None:
            version = ".".join(map(str, sys.version_info[:2]))
            remedy = "correct it, or name the Python that can read it in environment.python"
            problems.append(f"entrypoint: {problem}; Python {version} cannot read it; {remedy}")
        elif posixpath.dirname(file) == folder and not file.endswith("__init__.py"):
            relative = relative_import_problem(source, file)
            problems += [f"entrypoint: {relative}"] if relative else []
    return problems


def _words(entrypoint: object) -> list[str]:
    text = " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint)
    return text.split()


def _entry_file(entrypoint: object, model: ModelFiles) -> str | None:
    """Return the Python file of the model directory that an entrypoint runs first, if any."""
    before = ""
    for word in _words(entrypoint):
        module = word.partition(":")[0] if ":" in word or before == "-m" else ""
        source = _source_of(module, model) if module else None
        path = source[0] if source else word
        if path.endswith(".py") and model.read(path) is not None:
            return path
        before = word
    return None


def _command_problem(command: Command, model: ModelFiles) -> str | None:
    word = command.words[0]
    ran = parse_python_command(command.words)
    if ran is not None:
        kind, script, _ = ran
        return None if kind or script == "-" else _script_problem(script, model)
    if "/" in word:
        return _path_problem(word, model) if len(command.words) == 1 else None
    if model.read(word) is not None:
        correction = f"python {word}" if word.endswith(".py") else f"./{word}"
        correction = " ".join([correction, *command.words[1:]])
        return (
            f"must be a program, got a file of the model directory, {word!r}; write {correction!r}"
        )
    named = len(command.words) == 1 and all(part.isidentifier() for part in word.split("."))
    return _name_problem(word, model) if named else None


_BESIDE_PYTHON = str(Path(sys.executable).parent)
"""Directory of the packages' programs; ranks search it first, activated or not."""


def _script_problem(script: str, model: ModelFiles) -> str | None:
    """Return the problem of a script that is missing in the model directory."""
    path = posixpath.normpath(script)
    files = model.names()
    exists = any(model.read(name) is not None for name in (path, f"{path}/__main__.py"))
    exists |= any(name.startswith(f"{path}/") for name in files)
    if exists or path.startswith((".", "/")):  # the directory itself, or a path outside of it
        return None
    scripts = sorted(name for name in files if name.endswith(".py"))
    near = suggest(path, scripts) or suggest(posixpath.basename(path), scripts)
    problem = f"there is no file {script!r} in the model directory"
    return f"{problem}; its Python files are: {', '.join(scripts[:20]) or 'none'}{near}"


def _name_problem(word: str, model: ModelFiles) -> str | None:
    """Return the problem of a class without module, or a module without class."""
    module, _, name = word.rpartition(".")
    if module:
        is_class = name[:1].isupper() or (name != "py" and _source_of(module, model) is not None)
        problem = f"must be module:Class, got {word!r}; did you mean {f'{module}:{name}'!r}?"
        return problem if is_class else None
    if shutil.which(word) is not None or shutil.which(word, path=_BESIDE_PYTHON) is not None:
        return None
    for module in _modules(model):
        source = _source_of(module, model)
        if source is not None and word in _classes(source[1]):
            return f"must be module:Class, got {word!r}; did you mean {f'{module}:{word}'!r}?"
    if _source_of(word, model) is None:
        return None
    return f"must be module:Class or a program, got a module, {word!r}; write '{word}:Class'"


def _path_problem(word: str, model: ModelFiles) -> str | None:
    """Return the problem of a class after a slash, if no program has that path."""
    path = posixpath.normpath(word)
    folders, _, name = path.rpartition("/")
    module = folders.removesuffix(".py").replace("/", ".")
    if not name.isidentifier() or _source_of(module, model) is None:
        return None
    if model.read(path) is not None:
        return None
    dotted_name = f"{module}.{name}"
    correction = (
        f"{module}:{name}" if _source_of(dotted_name, model) is None else f"{dotted_name}:Class"
    )
    text = (
        f"must be module:Class or a program, got {word!r}, which is no file of the model directory"
    )
    return f"{text}; did you mean {correction!r}?"


def _classes(source: bytes) -> list[str]:
    """Return the names of a module's classes; empty if it cannot be read."""
    tree = parsed(source)
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)] if tree else []


def _source_of(module: str, model: ModelFiles) -> tuple[str, bytes] | None:
    for path in module_paths(module):
        text = model.read(path)
        if text is not None:
            return path, text
    return None


def _module_problem(
    trial: TrialClass, model: ModelFiles, environment: Mapping[str, str]
) -> str | None:
    names = model.names()
    top = trial.module.partition(".")[0]
    inside = any(name.startswith((f"{top}/", f"{top}.")) for name in names)
    if not inside and ("PYTHONPATH" in environment or _installed(top)):
        return None
    compiled = any(Path(name).suffix in (".so", ".pyd") for name in names)
    if inside and compiled:
        return None
    modules = _modules(model)
    return (
        f"there is no module {trial.module!r} in the model directory; its modules are: "
        f"{', '.join(modules[:20]) or 'none'}{suggest(trial.module, modules)}"
    )


def _modules(model: ModelFiles) -> list[str]:
    return sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in model.names()
        if name.endswith(".py") and name != "__init__.py"
    )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError, AttributeError):
        return False


_MAKERS = frozenset({"exec", "eval", "globals", "vars", "locals", "setattr", "__getattr__"})
"""Names whose use may put a class into a module that its source does not name."""


def _class_problem(trial: TrialClass, path: str, tree: ast.Module) -> str | None:
    nodes = list(ast.walk(tree))
    if any(name in _MAKERS for node in nodes for name in _used(node)) or any(
        alias.name == "*" for node in nodes if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ):  # fmt: skip
        return None
    bound = [(name, node) for node in nodes for name in _bound(node)]
    definitions = [node for name, node in bound if name == trial.name]
    if not definitions:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        return (
            f"{path} has no class {trial.name!r}; its classes are: "
            f"{', '.join(classes[:20]) or 'none'}{suggest(trial.name, classes)}"
        )
    plain = len(definitions) == 1 and definitions[0] in tree.body
    return _kind_problem(trial, path, definitions[0]) if plain else None


def _kind_problem(trial: TrialClass, path: str, definition: ast.AST) -> str | None:
    """Return the problem of a name that is certainly not a trial class."""
    if isinstance(definition, ast.ClassDef):
        if definition.bases or definition.keywords or definition.decorator_list:
            return None
        return (
            f"{trial.name} in {path} is not a ZeroTrial; "
            f"derive it: class {trial.name}(zerotrial.ZeroTrial)"
        )
    if isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        return f"{trial.name} in {path} is a function, not a class"
    return None


def _used(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield "globals" if node.attr == "modules" else node.attr  # sys.modules
    elif isinstance(node, ast.FunctionDef):
        yield node.name


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield names that a statement binds, at any depth; too many rather than too few."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        name: Any = getattr(node, "name", None)  # except ... as name, case name
        if isinstance(name, str):
            yield name
