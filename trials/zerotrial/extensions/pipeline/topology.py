"""Coordinates of ranks in a grid of named axes, with DeepSpeed's names."""

import math
from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from zerolab.errors import ConfigError

__all__ = ["PipeDataParallelTopology", "ProcessTopology"]


def _coordinate_class(axes: list[str]) -> Any:
    """Return DeepSpeed's named tuple, whose fields are the axes."""
    return namedtuple("ProcessCoord", axes)


class ProcessTopology:
    """Grid of ranks; ranks along the last axis are adjacent.

    Args:
        axes: Names, such as ``pipe``, ``data`` and ``model`` (tensor parallel).
        dims: Number of ranks along each axis.

    Raises:
        ConfigError: For repeated axes, or a number of ranks below 1.

    Example:
        >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
        >>> topology.get_rank(pipe=1, data=0)
        3
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        sizes = len(axes) == len(dims) and all(type(dim) is int and dim > 0 for dim in dims)
        if not sizes or len(set(axes)) < len(axes):
            problem = (
                "axes, dims: must be different names, each with a positive number of ranks, got "
                f"{list(axes)} and {list(dims)}"
            )
            raise ConfigError("ProcessTopology()", [problem])
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = _coordinate_class(self.axes)
        coordinates = product(*(range(dim) for dim in dims))
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*coordinate): rank for rank, coordinate in enumerate(coordinates)
        }
        """Coordinates to ranks."""

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate.

        Args:
            coord_kwargs: Index along each axis.

        Raises:
            ValueError: If an axis is missing or unknown, or an index is outside of the grid.
        """
        if coord_kwargs.keys() != set(self.axes):
            text = f"get_rank(): must get an index along each of {self.axes}, got {coord_kwargs}"
            raise ValueError(f"{text}; filter_match() takes some of them")
        rank = self.mapping.get(self.ProcessCoord(**coord_kwargs))
        if rank is None:
            raise ValueError(f"get_rank(): must be inside of {self.dims}, got {coord_kwargs}")
        return rank

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, in their order."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinate of a rank as text, such as ``model_00``.

        Args:
            rank: A rank of the grid.
            omit_axes: Axes to leave out.
            inner_sep: Separator between an axis and its index.
            outer_sep: Separator between axes.
        """
        coordinate = self.get_coord(rank)._asdict()
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{coordinate[axis]:02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank, a named tuple.

        Raises:
            ValueError: If the rank is not in the grid.
        """
        if not 0 <= rank < self.world_size():
            raise ValueError(f"get_coord(): must be a rank below {self.world_size()}, got {rank}")
        return list(self.mapping)[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ along one axis only; empty for an unknown axis."""
        if axis not in self.axes:
            return []
        axis_index = self.axes.index(axis)
        groups: dict[Any, list[int]] = {}
        for coord, rank in self.mapping.items():
            groups.setdefault((*coord[:axis_index], *coord[axis_index + 1 :]), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with given indices along some axes.

        Raises:
            AttributeError: For an unknown axis.
        """
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one index along an axis.

        Raises:
            ValueError: For an unknown axis.
        """
        axis_index = self.axes.index(axis)
        return [rank for coord, rank in self.mapping.items() if coord[axis_index] == idx]

    def world_size(self) -> int:
        """Return the number of all ranks."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Grid of pipeline stages, and replicas of the entire pipeline.

    Args:
        num_pp: Number of pipeline stages.
        num_dp: Number of replicas.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])
