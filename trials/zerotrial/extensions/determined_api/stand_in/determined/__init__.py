"""Names of Determined on Zerolab."""

from zerolab.errors import InvalidHyperparametersError as InvalidHP
from zerotrial.extensions.determined_api.cluster_info import (
    ClusterInfo,
    TrialInfo,
    get_cluster_info,
)
from zerotrial.extensions.determined_api.missing import missing_name

from . import core, experimental, pytorch

__all__ = [
    "LOG_FORMAT",
    "ClusterInfo",
    "InvalidHP",
    "TrialInfo",
    "core",
    "experimental",
    "get_cluster_info",
    "pytorch",
]

__version__ = "0.38.1"
LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
__getattr__ = missing_name("determined")
