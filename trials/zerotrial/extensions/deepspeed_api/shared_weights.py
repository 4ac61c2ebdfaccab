"""Parameters that the ranks of a host store once, together, until an engine shards them.

A rank without other ranks on its host stores them in files of its temporary folder. Every rank sees
full, plain parameters, and reading them is never collective. A rank that writes to one gets a
private copy, which the others do not see.
"""

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zerotrial.engine.memory.copy_on_write import is_copy_on_write, map_to_disk
from zerotrial.engine.memory.heap import trim_heap, warn_of_memory
from zerotrial.engine.mesh import new_cpu_group, new_group_by_name
from zerotrial.extensions.deepspeed_api.names.comm import init_distributed
from zerotrial.extensions.shared_memory.collectives import (
    SharedMemoryCommunicator,
    connect_shared_memory,
)
from zerotrial.extensions.shared_memory.peer_sockets import host_name

__all__ = ["HostMemory", "host_memory"]

logger = logging.getLogger(__name__)
_WHO = "zero.Init, from_pretrained"
_MUCH = 64 << 20
"""Freed bytes that the heap may keep during loading; it would not reuse them by itself."""


class HostMemory:
    """Memory that the ranks of this host have in common; of a rank alone, its disk.

    Args:
        world: All ranks.
        lender: Between those of this host; None where some ranks cannot share any memory.
        hosts: How many there are.
    """

    def __init__(
        self, world: dist.ProcessGroup, lender: SharedMemoryCommunicator | None, hosts: int
    ) -> None:
        self.world = world
        self._lender = lender
        self._hosts = hosts
        self._folder: Path | None = None
        if lender is None or lender.size == 1:
            self._folder = Path(tempfile.gettempdir())
            warn_of_memory(self._folder, _WHO)
        self._freed = 0
        self.loading = False
        """Whether from_pretrained is running, which moves the parameters that it registers."""

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move parameters to shared memory. **Collective** among the ranks of a host.

        Args:
            parameters: Equal order everywhere; the values of the first rank of each host apply, and
                must be equal. Parameters outside of plain CPU memory stay there.
        """
        for parameter in parameters:
            if _is_plain(parameter) and not is_copy_on_write(parameter):
                self._freed += parameter.nbytes
                parameter.data = self._lend(parameter)
        if self._freed > _MUCH:
            trim_heap()
            self._freed = 0

    def spread(self, parameters: Iterable[nn.Parameter], source: int = 0) -> None:
        """Broadcast parameters and share their memory where possible. **Collective**.

        Args:
            parameters: Parameters in the same order on all ranks.
            source: The rank.
        """
        on_gpu = dist.get_backend(self.world) == "nccl"
        for parameter in parameters:
            if parameter.is_meta:  # of skip_init(), which replaces it
                continue
            if self._lender is None or self._hosts > 1 or source > 0 or not _is_plain(parameter):
                value = parameter.detach().to("cuda" if on_gpu else "cpu", copy=True)
                dist.broadcast(value, src=source, group=self.world)
                if _is_plain(parameter):
                    parameter.data = value.to(parameter.device)
                else:
                    parameter.data.copy_(value)
            if _is_plain(parameter):
                parameter.data = self._lend(parameter)

    def _lend(self, parameter: nn.Parameter) -> torch.Tensor:
        if self._folder is not None:
            try:
                return map_to_disk(parameter, self._folder)
            except OSError as error:
                text = "%s: %s: must have room for the model until initialize(), got: %s; "
                text += "further weights stay in memory; set TMPDIR to another folder"
                logger.warning(text, _WHO, self._folder, error.strerror or error)
                self._folder = None
        return (
            parameter.data if self._lender is None else self._lender.share_copy_on_write(parameter)
        )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one of torch's own, on the CPU, with values."""
    kinds = type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor
    return kinds and parameter.device.type == "cpu" and parameter.layout is torch.strided


_known: HostMemory | None = None


def host_memory() -> HostMemory | None:
    """Return the memory shared by the ranks of this host. **Collective**, the first time.

    Initializes torch.distributed if the environment defines several ranks, as ``zero.Init`` does.

    Returns:
        None with a single rank.
    """
    global _known
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if _known is None or _known.world is not world:
        _known = _connect(world)
    return _known


def _connect(world: dist.ProcessGroup) -> HostMemory:
    talk = new_cpu_group()
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, host_name(), group=talk)
    lender = connect_shared_memory(new_group_by_name(names))
    exists: list[bool] = [False] * len(names)
    dist.all_gather_object(exists, lender is not None, group=talk)
    if not all(exists):
        lender = None
        if dist.get_rank() == 0:
            logger.warning(
                "%s: ranks %s cannot share memory with others of their host: until initialize(), "
                "every rank keeps the whole model in files in %s",
                _WHO,
                [rank for rank, shares in enumerate(exists) if not shares],
                tempfile.gettempdir(),
            )
    return HostMemory(world, lender, len(set(names)))
