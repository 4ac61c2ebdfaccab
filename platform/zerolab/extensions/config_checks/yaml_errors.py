"""Messages for YAML syntax errors: the line at fault and what to change."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml

__all__ = ["explain_plain_key", "explain_yaml_error"]

_KEY = r"[A-Za-z_][\w.-]*"
_KEY_LINE = re.compile(rf"(\s*)(- +)?({_KEY}|'[^']*'|\"[^\"]*\")\s*:(?:\s+(.*))?$")
"""Indentation, list marker, key and value of a line of a block mapping."""
_CLOSING = {"[": "]", "{": "}"}


def explain_yaml_error(text: str, error: "yaml.MarkedYAMLError") -> str:
    """Describe a YAML syntax error: its position, the problem, and the correction.

    Args:
        text: The content of the file.
        error: As PyYAML raised it.
    """
    mark = error.problem_mark or error.context_mark
    problem = error.problem or str(error)
    if mark is None:
        return f"file: must be YAML, got an error: {problem}"
    lines = text.splitlines()
    number = min(mark.line, max(len(lines) - 1, 0))
    line = lines[number] if lines else ""
    position = f"line {mark.line + 1}, column {mark.column + 1}"
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"{position}: must be indented with spaces, got a tab; use spaces"
    description = _unclosed(lines, error) or _structure_error(lines, number, mark.column, problem)
    return description or f"{position}: {_reserved(problem, line, mark.column)}"


def explain_plain_key(key: str, *, has_value: bool) -> str | None:
    """Describe a key that is a mistyped ``key: value``; None for any other key.

    Args:
        key: As it is in the file, without quotes.
        has_value: Whether a value follows it.
    """
    bracket = re.fullmatch(rf"({_KEY})\s*([\[{{])\s*(.*)", key)
    if bracket:
        name, opening, remaining = bracket.groups()
        if remaining and remaining[-1] not in "]}":  # a colon in the brackets ended the key
            remaining += ": ..."
        return f"{name} must be followed by a colon; write `{name}: {opening}{remaining}`"
    joined = None if has_value else re.fullmatch(rf"({_KEY}):(\S.*)", key)
    if joined:
        return _missing_space(*joined.groups())
    return None


def _missing_space(name: str, value: str) -> str:
    got = f"{name} must be followed by a colon and a space, got '{name}:{value}'"
    return f"{got}; write `{name}: {value}`"


def _unclosed(lines: list[str], error: "yaml.MarkedYAMLError") -> str | None:
    """Describe a bracket or a quote that is opened and never closed."""
    context, opened = error.context or "", error.context_mark
    if opened is None:
        return None
    if "flow" in context:
        opening = "{" if "mapping" in context else "["
        if opened.line >= len(lines) or lines[opened.line][opened.column :][:1] != opening:
            return None
        problem = f"must close the {opening!r} with {_CLOSING[opening]!r}"
        last = error.problem_mark
        stop = (
            f"; YAML could not go past line {last.line + 1}, column {last.column + 1}"
            if last
            else ""
        )
        remedy = f"add the {_CLOSING[opening]!r}, or the comma that is missing between two entries"
        return f"line {opened.line + 1}, column {opened.column + 1}: {problem}{stop}; {remedy}"
    if "simple key" in context and (missing := _missing_colon(lines, opened.line)):
        return missing
    if "quoted scalar" in context:
        problem = "must close the quote that begins here, got the end of the file"
        return (
            f"line {opened.line + 1}, column {opened.column + 1}: {problem}; add the closing quote"
        )
    return None


def _structure_error(lines: list[str], number: int, column: int, problem: str) -> str | None:
    """Describe a missing colon, a missing space or an indentation that fits no other line."""
    if "mapping values are not allowed" in problem:
        return _second_colon(lines, number, column)
    line = lines[number] if number < len(lines) else ""
    problem_text = ""
    if line[column : column + 1] in {"]", "}"}:
        problem_text = f"{line[column]!r} closes nothing; remove it"
    elif "but found '<scalar>'" in problem:
        problem_text = (
            f"nothing can follow a closing quote, got {line[column:].strip()!r}; put the whole "
        )
        problem_text += "value in quotes, and double a quote inside it"
    elif "sequence entries are not allowed" in problem:
        problem_text = (
            f"a list must begin on a separate line, got {line.strip()!r}; or write it as "
        )
        problem_text += "[1, 2]"
    elif "expected <block end>" in problem or "expected '<document start>'" in problem:
        return _missing_colon(lines, number) or _unmatched_indentation(lines, number)
    return f"line {number + 1}, column {column + 1}: {problem_text}" if problem_text else None


def _second_colon(lines: list[str], number: int, column: int) -> str | None:
    """Describe a colon at a position without a key."""
    line = lines[number] if number < len(lines) else ""
    if re.search(r":\s", line[:column].lstrip()):
        problem = f"a value with a colon and a space must be in quotes, got {line.strip()!r}"
        key, _, value = line.strip().partition(":")
        return f"line {number + 1}: {problem}; write `{key}: '{value.strip()}'`"
    above = _line_above(lines, number)
    if above is None:
        return None
    if lines[above].lstrip().startswith("- "):
        return _mixed_indentation(lines, number)
    return _missing_colon(lines, above) or _indented_below_value(lines, above, number)


def _line_above(lines: list[str], number: int) -> int | None:
    for i in range(number - 1, -1, -1):
        if lines[i].strip() and not lines[i].lstrip().startswith("#"):
            return i
    return None


def _missing_colon(lines: list[str], above: int) -> str | None:
    """Describe a line without a colon, or without a space after it."""
    content = lines[above].split(" #")[0].strip()
    if not content or content.startswith(("-", "#")) or _KEY_LINE.match(lines[above]):
        return None
    joined = re.fullmatch(rf"({_KEY}):(\S.*)", content)
    if joined:
        return f"line {above + 1}: {_missing_space(joined[1], joined[2])}"
    word = re.match(rf"({_KEY})(?:\s+(.*))?$", content)
    if word is None:
        return None
    value = f" {word[2]}" if word[2] else ""
    problem = f"must be `key: value`, got {content!r} without a colon"
    return f"line {above + 1}: {problem}; write `{word[1]}:{value}`"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _indented_below_value(lines: list[str], above: int, number: int) -> str | None:
    """Describe a line that is indented below a line that already has a value."""
    indent, indent_above = _indent(lines[number]), _indent(lines[above])
    key_line = _KEY_LINE.match(lines[above])
    if indent <= indent_above or key_line is None:
        return None
    got = f"must be indented by {indent_above} spaces as line {above + 1}, got {indent}"
    key, value = key_line[3], key_line[4] or ""
    remedy = f"align it with `{key}`"
    if value:
        remedy += f", or remove the value {value.strip()!r} of `{key}` to nest lines below it"
    return f"line {number + 1}: {got}; {remedy}"


def _unmatched_indentation(lines: list[str], number: int) -> str | None:
    """Describe an indentation that matches none of the lines above."""
    indent = _indent(lines[number]) if number < len(lines) else 0
    levels = sorted({_indent(line) for line in lines[:number] if line.strip()})
    if number >= len(lines) or not levels:
        return None
    content = lines[number].strip()
    above = _line_above(lines, number)
    if above is not None and content.startswith("-") != lines[above].lstrip().startswith("-"):
        return _mixed_indentation(lines, number)
    if above is None:
        above = number - 1
    expected = f"like line {above + 1} ({_indent(lines[above])} spaces)"
    others = [str(level) for level in levels if level not in {indent, _indent(lines[above])}]
    expected += f", or by {' or '.join(others)} spaces" if others else ""
    return (
        f"line {number + 1}: must be indented {expected}, got {indent}; indent all keys of a block "
        "equally"
    )


def _mixed_indentation(lines: list[str], number: int) -> str:
    return (
        f"line {number + 1}: a list and `key: value` lines cannot be mixed at one level, got "
        f"{lines[number].strip()!r}; indent the list below its key, and begin each of its entries "
        "with `- `"
    )


def _reserved(problem: str, line: str, column: int) -> str:
    """Describe a character or a word that YAML reserves."""
    start = line[column:].split()
    word = start[0] if start else ""
    if "cannot start any token" in problem:
        return f"text cannot begin with {line[column : column + 1]!r}; put the value in quotes"
    if "undefined alias" in problem:
        return f"{word} is read as a YAML alias that is not defined; put the value in quotes"
    if "could not determine a constructor" in problem:
        return f"tags such as {word} are not supported; put the value in quotes"
    if problem.startswith("keys must be text") or " must be " in problem:
        return problem
    return f"must be YAML, got an error: {problem}"
