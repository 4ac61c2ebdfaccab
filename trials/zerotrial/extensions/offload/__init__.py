"""Offload to host memory or files: optimizer states, and parameters and gradients of stage 3.

Each is an :class:`~zerotrial.engine.protocols.Updater`, so no stage knows about them. Updates run
on the CPU, bucket by bucket, while other buckets travel::

    cpu    gradient i+1 -> host  |  update i  |  weights i-1 -> device
    nvme   states i+1 <- file    |  update i  |  states i-1 -> file

References:
    Ren et al., ZeRO-Offload, arXiv:2101.06840.
    Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857.
"""
