"""Training lengths: a number of batches or of epochs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from zerolab.schema.section import NonNegativeInt, Section

__all__ = ["LONGEST", "Length", "PositiveLength"]

LONGEST = 2**53
"""Maximum number of batches or epochs: floating-point numbers, and thus JavaScript, are exact up
to here."""


class Length(Section):
    """Number of batches (optimizer steps) or epochs; a bare number means batches."""

    batches: Annotated[NonNegativeInt, Field(le=LONGEST)] | None = None
    """Optimizer steps."""

    epochs: Annotated[NonNegativeInt, Field(le=LONGEST)] | None = None
    """Passes over the training data."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = {"batches": value}
        if isinstance(value, Length):
            return value
        if not isinstance(value, Mapping):
            text = "must be {batches: n}, {epochs: n} or a number of batches"
            raise ValueError(f"{text}, got {value!r}")
        if "records" in value:
            text = "records are not a unit here; divide by train_batch_size and give batches"
            raise ValueError(text)
        value = {key: count for key, count in value.items() if count is not None}
        if set(value) <= {"batches", "epochs"} and len(value) != 1:
            raise ValueError(f"must have one of batches and epochs, got {dict(value)!r}")
        for count in value.values():
            if isinstance(count, int | float) and count < 0:
                raise ValueError(f"must be at least 0 batches or epochs, got {count}")
        return value

    @model_serializer
    def _write(self) -> dict[str, int]:
        return {self.unit: self.count}

    @property
    def unit(self) -> Literal["batches", "epochs"]:
        """Unit of the length."""
        return "batches" if self.batches is not None else "epochs"

    @property
    def count(self) -> int:
        """Number of units."""
        return (self.batches if self.batches is not None else self.epochs) or 0


def _check_positive(value: Any) -> Any:
    counts = value.values() if isinstance(value, Mapping) else [value]
    for count in counts:
        if isinstance(count, int | float) and count <= 0:
            raise ValueError(f"must be a positive number of batches or epochs, got {count}")
    return value


PositiveLength = Annotated[Length | None, BeforeValidator(_check_positive)]
"""Length of at least one batch or epoch, or None."""
