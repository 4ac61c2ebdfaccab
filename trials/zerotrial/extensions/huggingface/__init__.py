"""Scripts written for Hugging Face's Trainer or Accelerate, unchanged, as trials of an experiment.

:func:`install` waits for their modules; it imports neither of them, nor torch. Every Python
process of a command that is an experiment's entrypoint calls it at its start. A script on its own
that calls it may say ``report_to="zerolab"``, or ``log_with="zerolab"`` with Accelerate.
"""

from typing import TYPE_CHECKING, Any

from zerotrial.extensions.huggingface.hooks import install

if TYPE_CHECKING:
    from zerotrial.extensions.huggingface.tracker import ZerolabTracker
    from zerotrial.extensions.huggingface.trainer import ZerolabCallback

__all__ = ["ZerolabCallback", "ZerolabTracker", "install"]


def __getattr__(name: str) -> Any:
    if name == "ZerolabCallback":
        from zerotrial.extensions.huggingface.trainer import ZerolabCallback

        return ZerolabCallback
    if name == "ZerolabTracker":
        from zerotrial.extensions.huggingface.tracker import ZerolabTracker

        return ZerolabTracker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
