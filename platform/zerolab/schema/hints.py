"""Hints: keys that are accepted but have no effect, each with its reason."""

from typing import Any

from pydantic import Field

from zerolab.schema.section import Section, section_of

__all__ = ["HINT", "hint", "hints_of"]

HINT = "hint"


def hint(default: Any, reason: str, **constraints: Any) -> Any:
    """Declare a field that has no effect.

    Args:
        default: Default of the field.
        reason: Why it has no effect; shown when a file sets the key.
        constraints: Constraints of its value, as for :func:`pydantic.Field`.
    """
    return Field(default=default, json_schema_extra={HINT: reason}, **constraints)


def hints_of(section: type[Section], prefix: str = "") -> dict[str, str]:
    """List the hints of a section and its nested sections.

    Returns:
        Dotted key to reason.
    """
    hints: dict[str, str] = {}
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and HINT in extra:
            hints[prefix + name] = str(extra[HINT])
        elif (inner := section_of(field.annotation)) is not None:
            hints |= hints_of(inner, f"{prefix}{name}.")
    return hints
