"""The engine of pipeline stages under DeepSpeed's names."""

from typing import ClassVar

from zerotrial.compat.deepspeed.absent import methods
from zerotrial.compat.deepspeed.engine import DeepSpeedEngine
from zerotrial.engine.pipeline import engine

__all__ = ["PipelineEngine"]


class PipelineEngine(engine.PipelineEngine, DeepSpeedEngine):
    """See :class:`zerotrial.engine.pipeline.PipelineEngine`."""

    INSTEAD: ClassVar[dict[str, str]] = DeepSpeedEngine.INSTEAD | methods("PipelineEngine")
