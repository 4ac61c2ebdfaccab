"""Strict parsers of JSON and YAML, which reject duplicate keys."""

import json
import re
from collections.abc import Hashable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.errors import ConfigError
from zerolab.registry import PARTS
from zerolab.schema.section import suggest

if TYPE_CHECKING:
    import yaml

__all__ = [
    "experiment_file",
    "parse_json",
    "parse_yaml",
    "parse_yaml_value",
    "read_bytes",
    "read_json",
    "read_yaml",
]


def experiment_file(path: Path) -> Path:
    """Return the experiment file: ``experiment.yaml`` of a folder, else the file itself.

    Raises:
        ConfigError: If the folder has no such file, or the file is a program.
    """
    if not path.is_dir():
        if path.suffix.lower() in _PROGRAMS and path.is_file():
            raise ConfigError(str(path), [_program_problem(path)])
        return path
    candidates = [path / name for name in ("experiment.yaml", "experiment.yml")]
    for file in candidates:
        if file.is_file():
            return file
    yaml_files = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))
    has = "it has no YAML file; write one, or create a project with `zerolab init`"
    if yaml_files:
        has = f"its YAML files are: {', '.join(yaml_files[:20])}; give one of them"
    raise ConfigError(str(path), [f"folder: must have an experiment.yaml, got none; {has}"])


_PROGRAMS = {".py": "a Python file", ".ipynb": "a notebook", ".sh": "a shell script"}


def _program_problem(path: Path) -> str:
    """Return the error text for a program that was given as an experiment file."""
    near = [path.parent / name for name in ("experiment.yaml", "experiment.yml")]
    file = next((str(file) for file in near if file.is_file()), None)
    advice = f"use {file}" if file else "write one, and name the program in its `entrypoint`"
    runner = {".py": "python ", ".sh": "sh "}.get(path.suffix.lower())
    run_hint = f", or run it alone: `zerolab task run --name {path.stem} -- {runner}{path.name}`"
    got = f"got {_PROGRAMS[path.suffix.lower()]}"
    return f"file: must be an experiment file (YAML), {got}; {advice}{run_hint if runner else ''}"


def decode_text(text: bytes | str, source: str) -> str:
    """Decode UTF-8, or the encoding that a byte order mark names.

    Raises:
        ConfigError: If the bytes are invalid, with the position of the first one.
    """
    if isinstance(text, str):
        return text
    try:
        return text.decode(json.detect_encoding(text))
    except UnicodeDecodeError as error:
        before = text[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        byte = text[error.start]
        problem = (
            f"line {line}, column {column}: must be text in UTF-8, got the byte 0x{byte:02x} "
            f"({chr(byte)!r} in Latin-1); save the file as UTF-8"
        )
        raise ConfigError(source, [problem]) from None


def read_bytes(path: str | PathLike[str]) -> bytes:
    """Read a file.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(str(path), [_missing_file(Path(path))]) from None
    except OSError as error:
        problem = f"file: must be readable, got {error.strerror or error}"
        raise ConfigError(str(path), [problem]) from None


def _missing_file(path: Path) -> str:
    """Return the error text for a missing file, with the files of its kind in the folder."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"file: must exist, got a path in the folder {folder}, which does not exist"
    kinds = {".yaml", ".yml"} if path.suffix.lower() in {".yaml", ".yml", ""} else {path.suffix}
    names = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in kinds)
    kind = (" and " if names else " or ").join(sorted(kinds))
    has = f"its {kind} files are: {', '.join(names[:10])}" if names else f"it has no {kind} file"
    problem = f"file: must exist, got {path.name!r}, which is not in {folder}"
    return f"{problem}; {has}{suggest(path.name, names)}"


def read_json(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        ConfigError: If it is missing, is not JSON, or names a key twice.
    """
    return parse_json(read_bytes(path), str(path))


def read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: If it is missing, is not YAML, or names a key twice.
    """
    return parse_yaml(read_bytes(path), str(path))


def parse_json(text: bytes | str, source: str, *, finite: bool = True) -> dict[str, Any]:
    """Read JSON text that holds one object.

    Args:
        text: The content of a file.
        source: Its name, for messages.
        finite: Reject ``Infinity`` and ``NaN``.

    Raises:
        ConfigError: If it is not JSON, or names a key twice.
    """
    collect = KeyCollector()

    def read_constant(name: str) -> float:
        if finite:
            raise ValueError(f"numbers must be finite, got {name}")
        return float(name)

    text = decode_text(text, source)
    try:
        content = json.loads(text, object_pairs_hook=collect, parse_constant=read_constant)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(source, [f"{position}: {_json_problem(text, error)}"]) from None
    except RecursionError:
        raise _depth_error(source) from None
    except ValueError as error:
        raise ConfigError(source, [f"file: must be JSON, got an error: {error}"]) from None
    collect.refuse(source)
    return _require_mapping(content, source)


class KeyCollector:
    """Collector of a mapping's pairs that records duplicate keys."""

    def __init__(self) -> None:
        self._twice: list[str] = []

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        self._twice.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return dict(pairs)

    def refuse(self, source: str) -> None:
        """Raise an error if there are duplicate keys.

        Raises:
            ConfigError: With one line for each key.
        """
        if self._twice:
            problems = [f"{key}: must be given once, got it more than once" for key in self._twice]
            raise ConfigError(source, problems)


PLAIN_WORDS = {"True": "true", "False": "false", "None": "null"}


def _json_problem(text: str, error: json.JSONDecodeError) -> str:
    """Describe a syntax error by the text at its position."""
    remaining, before = text[error.pos :], text[: error.pos].rstrip()
    if not remaining.strip():
        return "must be JSON, got the end of the file before everything is closed"
    if remaining[0] in "}]" and before.endswith(","):
        return f"must be JSON, got a comma before {remaining[0]!r}; remove the comma"
    if remaining.startswith(("//", "/*", "#")):
        return "must be JSON without comments, got a comment; remove it"
    if remaining[0] == "'":
        return 'must be JSON, got text in single quotes; use "double quotes"'
    word = re.match(r"True|False|None", remaining)
    if word:
        return f"must be JSON, got {word[0]}; write {PLAIN_WORDS[word[0]]}"
    return f"must be JSON, got an error: {error.msg}"


def parse_yaml(text: bytes | str, source: str) -> dict[str, Any]:
    """Read YAML text that holds one mapping.

    Numbers such as ``1e-3`` are numbers, as in YAML 1.2 and JSON.

    Args:
        text: The content of a file.
        source: Its name, for messages.

    Raises:
        ConfigError: If it is not YAML, or names a key twice.
    """
    import yaml

    text = decode_text(text, source)
    try:
        loader = _loader()(text)
        try:
            content = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        explanation = PARTS.find("yaml_errors")
        problem = f"file: must be YAML, got an error: {error}"
        if explanation is not None:
            problem = explanation.explain_yaml_error(text, error)
        raise ConfigError(source, [problem]) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        code = error.character
        character = chr(code) if isinstance(code, int) else code
        problem = f"line {line}: must be text, got the character {character!r}"
        raise ConfigError(source, [problem]) from None
    except RecursionError:
        raise _depth_error(source) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(source, [f"file: must be YAML, got an error: {error}"]) from None
    return _require_mapping(content if content is not None else {}, source)


def parse_yaml_value(text: str) -> Any:
    """Parse a single value with the rules of :func:`parse_yaml`.

    Raises:
        ValueError: If it is not YAML, with the problem.

    Example:
        >>> from zerolab.config.files import parse_yaml_value
        >>> parse_yaml_value("1e-3"), parse_yaml_value("[a, b]")
        (0.001, ['a', 'b'])
    """
    import yaml

    try:
        loader = _loader()(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _depth_error(source: str) -> ConfigError:
    from zerolab.schema.json_values import MAX_DEPTH

    problem = f"file: must be nested at most {MAX_DEPTH} deep, got far more; flatten it"
    return ConfigError(source, [problem])


def _require_mapping(content: object, source: str) -> dict[str, Any]:
    if isinstance(content, str):
        got = f"got the text {content[:60]!r}"
        problem = f"file: must be a mapping of keys to values, {got}; write `key: value`"
        raise ConfigError(source, [problem])
    if not isinstance(content, dict):
        problem = f"file: must be a mapping of keys to values, got {type(content).__name__}"
        raise ConfigError(source, [problem])
    return content


def _loader() -> "type[yaml.SafeLoader]":
    """Return a safe YAML loader with YAML 1.2 floats, string keys and unique keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(
            self,
            node: yaml.MappingNode,
            deep: bool = False,  # noqa: FBT001, FBT002 - its base's
        ) -> dict[Hashable, Any]:
            seen: set[Hashable] = set()
            for key_node, value_node in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                mark = key_node.start_mark
                if not isinstance(key, str):
                    text = f"keys must be text, got {key!r}; put it in quotes"
                    raise yaml.constructor.ConstructorError(None, None, text, mark)
                has_value = value_node.start_mark.index < value_node.end_mark.index
                plain = not key_node.style and not key.isidentifier()
                explanation = PARTS.find("yaml_errors") if plain else None
                mistyped = explanation and explanation.explain_plain_key(key, has_value=has_value)
                if mistyped is not None:
                    raise yaml.constructor.ConstructorError(None, None, mistyped, mark)
                if key in seen:
                    text = f"{key}: must be given once, got it more than once"
                    raise yaml.constructor.ConstructorError(None, None, text, mark)
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # Dates stay text: no field wants a date object, and JSON has none.
    for first in "0123456789":
        Loader.yaml_implicit_resolvers[first] = [
            pair
            for pair in Loader.yaml_implicit_resolvers.get(first, [])
            if pair[0] != "tag:yaml.org,2002:timestamp"
        ]
    number = re.compile(
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    )
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader
