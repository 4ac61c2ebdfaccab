"""How many ranks there are along each axis, under DeepSpeed's names."""

from collections.abc import Sequence

from zerolab.errors import ConfigError

__all__ = ["PipeDataParallelTopology", "ProcessTopology"]

_AXES = ("pipe", "data", "model")


class ProcessTopology:
    """Axes and their sizes; the last axis has ranks next to each other.

    Args:
        axes: Of ``pipe``, ``data`` and ``model`` (tensor parallel), in this order.
        dims: Ranks along each.

    Raises:
        ConfigError: For other axes or another order.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        ordered = [axis for axis in _AXES if axis in axes]
        if list(axes) != ordered or len(axes) != len(dims) or any(dim < 1 for dim in dims):
            problem = (
                f"axes, dims: must be some of {', '.join(_AXES)} in this order, each with a "
                f"positive number of ranks, got {list(axes)} and {list(dims)}"
            )
            raise ConfigError("ProcessTopology()", [problem])
        self.axes = list(axes)
        self.dims = list(dims)

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 1 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 1

    def world_size(self) -> int:
        """All ranks."""
        size = 1
        for dim in self.dims:
            size *= dim
        return size


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, and replicas of the whole pipeline.

    Args:
        num_pp: Pipeline stages.
        num_dp: Replicas.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])
