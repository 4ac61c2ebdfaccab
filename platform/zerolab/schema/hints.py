"""Keys that are accepted but change nothing here, each with its reason."""

from typing import Any

from pydantic import Field

from zerolab.schema.section import Section, section_of

__all__ = ["HINT", "hint", "hints_of"]

HINT = "hint"


def hint(default: Any, reason: str, **constraints: Any) -> Any:
    """Declare a field that has no effect here.

    Args:
        default: Of the field.
        reason: Why it changes nothing, in the reader's words; shown when a file sets the key.
        constraints: Of its value, as for :func:`pydantic.Field`.
    """
    return Field(default=default, json_schema_extra={HINT: reason}, **constraints)


def hints_of(section: type[Section], prefix: str = "") -> dict[str, str]:
    """List the hints of a section and of those inside it.

    Returns:
        Dotted key to reason.
    """
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and HINT in extra:
            found[prefix + name] = str(extra[HINT])
        elif (inner := section_of(field.annotation)) is not None:
            found |= hints_of(inner, f"{prefix}{name}.")
    return found
