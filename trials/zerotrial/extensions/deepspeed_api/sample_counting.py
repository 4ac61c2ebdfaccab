"""Evaluation of a model sharded over ranks: each sample counts once.

Accelerate gives the ranks of one model the same batches and gathers the outputs of all ranks.
Predictions would come once per rank, and the last batch would weigh too much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zerotrial.extensions import after_import

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["patch_when_imported"]


def patch_when_imported() -> None:
    """Have ``Accelerator.gather_for_metrics`` take the first rank's of each model."""
    after_import.patch_when_imported({"accelerate.accelerator": _patch})


def _patch(module: ModuleType) -> None:
    module.Accelerator.gather_for_metrics = _around(module.Accelerator.gather_for_metrics)


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_for_metrics(
        self: Any,
        input_data: Any,
        use_gather_object: bool = False,  # noqa: FBT001, FBT002 - Accelerate's interface
    ) -> Any:
        size = _cut_over(self)
        if size == 1:
            return original(self, input_data, use_gather_object)
        if use_gather_object or not _are_tensors(input_data):
            first = self.process_index % size == 0
            return original(self, input_data if first else [], use_gather_object=True)
        gather = self.gather

        def gather_once(data: Any) -> Any:
            from accelerate.utils.operations import recursively_apply

            return recursively_apply(once, gather(data))

        def once(gathered: Tensor) -> Tensor:
            ranks = self.num_processes
            by_rank = gathered.view(ranks, len(gathered) // ranks, *gathered.shape[1:])
            return by_rank[::size].flatten(0, 1)

        self.gather = gather_once  # cut to the data set's length after it
        try:
            return original(self, input_data)
        finally:
            del self.gather

    return gather_for_metrics


def _cut_over(accelerator: Any) -> int:
    """Over how many ranks a model is cut, by the key that Accelerate gives out batches by."""
    plugin = accelerator.deepspeed_plugin
    block = {} if plugin is None else plugin.deepspeed_config.get("tensor_parallel") or {}
    return int(block.get("autotp_size") or 1)


def _are_tensors(data: Any) -> bool:
    from accelerate.utils.operations import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
