"""Files and configuration of an experiment that calls a Python function."""

import ast
import builtins
import inspect
import linecache
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from zerolab.client.archive import package_files
from zerolab.errors import ConfigError

__all__ = ["function_config", "function_files"]

CELL_MODULE = "notebook_cell"


def function_config(function: Callable[..., Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an experiment that calls a function.

    The defaults of the function's parameters become hyperparameters.

    Args:
        function: Function with a name in a module or a notebook.
        config: Content of the experiment file, without an entrypoint.

    Raises:
        ConfigError: If the function cannot run in another process, or its parameters and the
            hyperparameters differ.
    """
    problem = _function_problem(function)
    if problem:
        raise ConfigError("submit", [f"source: must be a function of a module, {problem}"])
    name = function.__name__
    hparams = config.get("hyperparameters") or {}
    parameters = inspect.signature(function).parameters.values()
    problems = [] if not isinstance(hparams, Mapping) else _parameter_problems(function, hparams)
    if "entrypoint" in config:
        problems.append(f"entrypoint: must be left out; the experiment calls {name}()")
    if problems:
        raise ConfigError("submit", problems)
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if isinstance(parameter.default, bool | int | float | str)
    }
    entrypoint = ["python", "-m", "zerolab.core.function", _module_name(function), name]
    merged = defaults | dict(hparams) if isinstance(hparams, Mapping) else hparams
    return {"name": name, **config, "entrypoint": entrypoint, "hyperparameters": merged}


def function_files(function: Callable[..., Any]) -> dict[str, str | bytes]:
    """Return the source of a function's module by file name.

    A module of a package brings the Python files of the package that ``.zerolabignore`` and
    ``.gitignore`` do not exclude. A function of a notebook brings
    the definitions of its cell that it needs.

    Args:
        function: Function that :func:`function_config` accepts.

    Raises:
        ConfigError: If the source cannot be read, or a notebook's function needs other cells.
    """
    name = _module_name(function)
    if getattr(sys.modules["__main__"], "importing", None) == name:
        problem = f"must not be called while a run imports {name}"
        raise ConfigError("submit", [f"{problem}; move it below `if __name__ == '__main__':`"])
    path = _module_file(function)
    if path is None:
        return {f"{CELL_MODULE}.py": _cell_module(function)}
    if "." not in name:
        return {f"{name}.py": path.read_bytes()}
    is_package = path.name == "__init__.py"
    package = path.parents[name.count(".") - (not is_package)]
    files = package_files(package)
    if path not in files:
        problem = f"source: must not be excluded by .zerolabignore or .gitignore, got {path.name}"
        raise ConfigError("submit", [f"{problem}; include it with a line `!{path.name}`"])
    return {file.relative_to(package.parent).as_posix(): file.read_bytes() for file in files}


def _function_problem(function: Callable[..., Any]) -> str | None:
    if not isinstance(inspect.unwrap(function), FunctionType) or inspect.isclass(function):
        kind = type(function).__name__
        return f"got {kind}; write `def train(...)` and call it there"
    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        return "got a lambda; write it as `def`"
    if "<locals>" in function.__qualname__:
        return (
            f"got {name}(), which is defined in a function; define it at the top of the "
            "module (a decorator of it must use functools.wraps)"
        )
    if "." in function.__qualname__:
        return f"got the method {function.__qualname__}(); write a function that calls it"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return f"got {name}(), a coroutine or generator; write a plain function that runs it"
    return None


def _parameter_problems(function: Callable[..., Any], hparams: Mapping[str, Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter
    problems = [
        f"{function.__name__}(): parameter {parameter.name!r} must accept a keyword"
        for parameter in parameters
        if parameter.kind is kinds.POSITIONAL_ONLY
    ]
    named = [
        item
        for item in parameters
        if item.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    problems += [
        f"hyperparameters.{item.name}: must be set; {function.__name__}() requires it"
        for item in named
        if item.default is kinds.empty and item.name not in hparams
    ]
    if not any(item.kind is kinds.VAR_KEYWORD for item in parameters):
        names = [item.name for item in named]
        problems += [
            f"hyperparameters.{name}: must be a parameter of {function.__name__}(), which has "
            f"{', '.join(names) or 'none'}; add it or remove it"
            for name in hparams
            if name not in names
        ]
    return problems


def _module_name(function: Callable[..., Any]) -> str:
    if function.__module__ != "__main__":
        return function.__module__
    path = _module_file(function)
    if path is None:
        return CELL_MODULE
    if "." in path.stem:
        problem = f"must be a module that can be imported, got {path.name}; rename it"
        raise ConfigError("submit", [f"source: {problem}"])
    return path.stem


def _module_file(function: Callable[..., Any]) -> Path | None:
    """Return the file of a function's module; None for a notebook or an interactive session."""
    if function.__module__ == "__main__":
        path = Path(inspect.unwrap(function).__code__.co_filename)
        return path.absolute() if path.suffix == ".py" and path.is_file() else None
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    if not file.endswith(".py"):
        problem = f"must have Python source, got the module {function.__module__}"
        raise ConfigError("submit", [f"source: {problem}"])
    return Path(file).absolute()


def _cell_module(function: Callable[..., Any]) -> str:
    """Return the statements of a function's cell that it needs, as a module."""
    function = inspect.unwrap(function)
    lines = linecache.getlines(function.__code__.co_filename)
    source = "".join(lines)
    statements = ast.parse(source).body
    definitions = {name: node for node in statements for name in _bound_names(node)}
    if function.__name__ not in definitions:
        problem = f"must be in a file or a cell, the source of {function.__name__}() is unknown"
        raise ConfigError("submit", [f"source: {problem}; write it to a module"])
    needed, pending, missing, imports = set[ast.stmt](), [function.__name__], set[str](), set[str]()
    visited = set[str]()
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        if name in definitions:
            node = definitions[name]
            needed.add(node)
            pending += _global_names(ast.unparse(node))
        elif statement := _import_of(name, function.__globals__.get(name)):
            imports.add(statement)
        elif not hasattr(builtins, name) and name not in ("__name__", "__file__"):
            missing.add(name)
    if missing:
        names = ", ".join(sorted(missing))
        problem = f"{function.__name__}() uses {names} of other cells"
        raise ConfigError("submit", [f"source: {problem}; define them in the function's cell"])
    parts = [ast.unparse(node) for node in statements if node in needed]
    return "\n\n\n".join(["\n".join(sorted(imports)), *parts]).strip() + "\n"


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = (item for target in targets for item in ast.walk(target))
        yield from (item.id for item in names if isinstance(item, ast.Name))


def _global_names(source: str) -> list[str]:
    """Return the global names that a statement reads."""
    tables = [symtable.symtable(source, CELL_MODULE, "exec")]
    names: list[str] = []
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_top = table.get_type() == "module"
        names += [
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (is_top or symbol.is_global())
        ]
    return names


def _import_of(name: str, value: object) -> str | None:
    """Return an import of what another cell has imported; None if it is something else."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == "__main__":
        return None
    original = getattr(value, "__name__", name)
    if getattr(sys.modules.get(module), original, None) is not value:
        return None
    return f"from {module} import {original} as {name}"
