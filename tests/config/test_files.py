"""Unreadable files: position, content and remedy in the error."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_file
from zerolab.config.engine.reader import parse_engine_config
from zerolab.config.files import experiment_file, parse_json, parse_yaml
from zerolab.config.validation import check_experiment
from zerolab.errors import ConfigError

LATIN_1 = "name: x\ndescription: caf\u00e9\n".encode("latin-1")


def problem_of(parse: object, text: bytes | str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "file")  # type: ignore[operator]
    (line,) = caught.value.problems
    return line


def test_invalid_utf8_is_rejected_with_position() -> None:
    problem = problem_of(parse_yaml, LATIN_1)
    assert problem.startswith(
        "line 2, column 17: must be text in UTF-8, got the byte 0xe9 ('\u00e9'"
    )
    assert problem.endswith("save the file as UTF-8")
    assert "got the byte 0xe9" in problem_of(parse_json, b'{"a": "caf\xe9"}')


def test_byte_order_mark_is_accepted() -> None:
    assert parse_yaml("a: caf\u00e9".encode("utf-8-sig"), "file") == {"a": "caf\u00e9"}
    assert parse_json('{"a": "caf\u00e9"}'.encode("utf-16"), "file") == {"a": "caf\u00e9"}


def test_control_character_is_rejected_with_line() -> None:
    problem = problem_of(parse_yaml, "a: 1\nb: \x00\n")
    assert problem == "line 2: must be text, got the character '\\x00'"


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b: 1\n\tc: 2\n", "a:\n  - x\n \t- y\n"])
@pytest.mark.needs_extension("yaml_errors")
def test_tab_indentation_is_rejected(text: str) -> None:
    assert problem_of(parse_yaml, text).endswith(
        "must be indented with spaces, got a tab; use spaces"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,}', "column 9: must be JSON, got a comma before '}'; remove the comma"),
        ('{"a": [1, 2,]}', "column 13: must be JSON, got a comma before ']'"),
        ('{"a": 1 // x\n}', "column 9: must be JSON without comments, got a comment"),
        ('{"a": 1, # c\n"b": 2}', "column 10: must be JSON without comments"),
        ("{'a': 1}", 'got text in single quotes; use "double quotes"'),
        ('{"a": True}', "got True; write true"),
        ('{"a": 1', "got the end of the file before everything is closed"),
        ('{"a": 1 "b": 2}', "must be JSON, got an error: Expecting ',' delimiter"),
    ],
)
def test_json_error_describes_syntax(text: str, problem: str) -> None:
    assert problem in problem_of(parse_json, text)


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_too_deep_nesting_is_rejected(
    parse: Callable[[str, str], object],
) -> None:
    text = '{"x": ' + "[" * 20_000 + "]" * 20_000 + "}"
    with pytest.raises(ConfigError, match="file: must be nested at most 64 deep, got far more"):
        parse(text, "deep")


def test_dotted_key_is_rejected() -> None:
    content = {"train_batch_size": 8, "zero_optimization.stage": 1}
    assert parse_engine_config(content, "file", strict=True).problems == [
        "zero_optimization.stage: unknown key; a dot does not nest; "
        "write zero_optimization: {stage: ...}"
    ]


def test_engine_file_as_experiment_is_one_error() -> None:
    engine = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError) as caught:
        check_experiment(engine, MemoryFiles({}), "conf/ds_config.json")
    assert caught.value.problems == [
        "file: must be an experiment file, got an engine file (it has train_batch_size, "
        "zero_optimization); name it in an experiment file: "
        "hyperparameters: {deepspeed_config: ds_config.json}"
    ]


def test_folder_means_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"an experiment\.yaml, got none; .* are: smoke\.yaml"):
        experiment_file(tmp_path)
    file = tmp_path / "experiment.yaml"
    file.write_text("entrypoint: python train.py\nsearcher: {name: single, metric: m}\n")
    (tmp_path / "train.py").touch()
    assert experiment_file(tmp_path) == experiment_file(file) == file
    assert check_file(tmp_path).startswith(f"{file}: ok")
