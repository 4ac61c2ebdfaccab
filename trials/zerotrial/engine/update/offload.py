"""Offload of optimizer states and master weights: to host memory or to files.

Both are an :class:`~zerotrial.engine.protocols.Updater`, so no stage knows about them. Updates run
on the CPU, bucket by bucket, while other buckets travel::

    cpu    gradient i+1 -> host  |  update i  |  weights i-1 -> device
    nvme   states i+1 <- file    |  update i  |  states i-1 -> file

References:
    Ren et al., ZeRO-Offload, arXiv:2101.06840.
    Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857.
"""

from zerolab.errors import ConfigError
from zerotrial.engine.protocols import ENGINE_PARTS, Updater, UpdaterInputs
from zerotrial.engine.update.cpu_offload import CpuUpdater
from zerotrial.engine.update.in_memory import build_updater as build_in_memory

__all__ = ["build_updater"]


def build_updater(inputs: UpdaterInputs) -> Updater:
    """Return the updater for ``offload_optimizer.device``.

    Raises:
        ConfigError: If the device is nvme and no directory is configured.
        OffloadError: If the directory lacks room for the states.
    """
    options = inputs.config.zero_optimization.offload_optimizer
    if options.device == "nvme":
        if options.nvme_path is None:
            key = "zero_optimization.offload_optimizer.nvme_path"
            problem = f"{key}: must name a directory when device is nvme"
            raise ConfigError(inputs.config.source, [problem])
        updater: Updater = ENGINE_PARTS["nvme_optimizer"](inputs)
        return updater
    if options.device == "cpu" and inputs.device.type != "cpu":
        return CpuUpdater(inputs)
    return build_in_memory(inputs)
