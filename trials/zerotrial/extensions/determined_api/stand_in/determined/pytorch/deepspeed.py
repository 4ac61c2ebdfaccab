"""Determined's DeepSpeed trials."""

from zerotrial import ModelParallelUnit, Trainer, init, overwrite_deepspeed_config
from zerotrial import ZeroTrial as DeepSpeedTrial
from zerotrial import ZeroTrialContext as DeepSpeedTrialContext
from zerotrial.extensions.deepspeed_api.foreign_engine import (
    make_pipeline_mpu as make_deepspeed_mpu,
)
from zerotrial.extensions.determined_api.missing import missing_name

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "ModelParallelUnit",
    "Trainer",
    "init",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]

__getattr__ = missing_name("determined.pytorch.deepspeed")
