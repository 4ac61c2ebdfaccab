"""The engine of pipeline stages under DeepSpeed's names."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.engine import EngineParts
from zerotrial.extensions.deepspeed_api.engine import DeepSpeedEngine
from zerotrial.extensions.deepspeed_api.methods import PipelineMethods
from zerotrial.extensions.deepspeed_api.unsupported import methods
from zerotrial.extensions.pipeline import engine
from zerotrial.extensions.pipeline.micro_batches import MicroBatches

__all__ = ["PipelineEngine"]


class PipelineEngine(engine.PipelineEngine, PipelineMethods, DeepSpeedEngine):  # type: ignore[misc]  # train() is ours
    """See :class:`zerotrial.extensions.pipeline.PipelineEngine`."""

    REPLACEMENTS: ClassVar[dict[str, str]] = DeepSpeedEngine.REPLACEMENTS | methods(
        "PipelineEngine"
    )

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._batch_fn: Callable[[Any], Any] | None = None
        self._data_iterator: Iterator[Any] | None = None

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set the function that converts each data item to ``(inputs, labels)``.

        Args:
            fn: Called with the iterator's items.
        """
        self._batch_fn = fn

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the default data of :meth:`train_batch`."""
        self._data_iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Set the data of :meth:`train_batch` to one pass of a loader."""
        if self.module.reads_data:
            self._data_iterator = iter(loader)

    def set_has_attention_mask(self, value: bool) -> None:  # noqa: FBT001 - DeepSpeed's
        """Do nothing: tensors of every type pass between stages."""

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may change from batch to batch."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train a batch, in training mode whatever the module was in before. **Collective**.

        See :meth:`zerotrial.extensions.pipeline.PipelineEngine.train_batch`.
        """
        self.module.train()
        return super().train_batch(self._data_iterator if data_iter is None else data_iter)

    def _draw(self, data: Iterator[Any] | None, *args: Any, **kwargs: Any) -> MicroBatches:
        if data is not None and self._batch_fn is not None:
            data = map(self._batch_fn, data)
        return super()._draw(data, *args, **kwargs)

    def eval_batch(  # noqa: PLR0917 - DeepSpeed's order
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
        compute_loss: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate micro-batches, without gradients. **Collective**.

        Args:
            data_iter: As for :meth:`train_batch`.
            return_logits: Return the outputs of the last micro-batch too, which the last stage has;
                others get None.
            compute_loss: False, with ``reduce_output=None``: return the outputs of each micro-batch
                in the loss's place, a list, on the last stage; others get None.
            reduce_output: "avg", the mean of the losses; None, with ``compute_loss=False``.
            bcast_loss: False: stages other than the last get None for the loss.
            num_micro_batches: How many; as many as a training batch has by default.

        Returns:
            Mean loss over micro-batches and replicas, or outputs; with ``return_logits`` a pair.

        Raises:
            EngineError: On another reduction; then no data is read.
            Exception: As :meth:`zerotrial.extensions.pipeline.PipelineEngine.eval_batch`.
        """
        if reduce_output is not None and reduce_output.lower() != "avg":
            raise EngineError(
                f'eval_batch(): reduce_output must be "avg" or None, got {reduce_output!r}'
            )
        if compute_loss and reduce_output is None:
            raise EngineError(
                "eval_batch(): reduce_output=None requires compute_loss=False; for the loss "
                "of each micro-batch call eval_batch(data_iter, num_micro_batches=1) as often"
            )
        if not compute_loss and reduce_output is not None:
            raise EngineError(
                "eval_batch(): compute_loss=False requires reduce_output=None, got "
                f"{reduce_output!r}: outputs of different samples are not averaged; pass "
                "reduce_output=None, which gives those of each micro-batch on the last stage"
            )
        if compute_loss:
            loss, outputs = super().eval_batch(
                data_iter, return_logits=True, num_micro_batches=num_micro_batches
            )
            if loss is outputs:  # without loss_fn, None on other stages
                return (loss, outputs[-1] if outputs else None) if return_logits else loss
            if not bcast_loss and not self.is_last_stage():
                loss = None
        else:
            loss = outputs = super().eval_batch(
                data_iter, compute_loss=False, num_micro_batches=num_micro_batches
            )
        return (loss, outputs[-1] if outputs else None) if return_logits else loss
