"""Exceptions that Zerolab raises on purpose.

A command turns a :class:`ZerolabError` into one message and exit code 2, a route into the HTTP
status of its class. Any other exception is a bug of Zerolab and keeps its traceback.
"""

import errno
from collections.abc import Sequence

__all__ = [
    "CertificateError",
    "ConfigError",
    "ConflictError",
    "EngineError",
    "ForbiddenError",
    "InvalidHyperparametersError",
    "NotFoundError",
    "PeerFailedError",
    "StaleRunError",
    "StorageError",
    "TrialError",
    "UnreachableError",
    "WaitTimeoutError",
    "ZerolabError",
    "is_storage_failure",
    "one_line",
]

_STORAGE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG}
)


class ZerolabError(Exception):
    """Base class of errors that the user can fix.

    The message contains the remedy.

    Example:
        >>> try:
        ...     zerolab.config.load_engine_config({"train_batch_size": 0})
        ... except zerolab.errors.ZerolabError as error:
        ...     print(error)
        engine config: 1 problem(s)
          train_batch_size: ...
    """


class ConfigError(ZerolabError, ValueError):
    """Invalid content of a file, a mapping or an argument.

    Args:
        source: Source of the problems, e.g. ``ds_config.json``.
        problems: One line each: ``key: what must hold, got value; what to do``.

    Example:
        >>> try:
        ...     zerolab.config.load_engine_config({"train_batch_size": 0})
        ... except zerolab.errors.ConfigError as error:
        ...     print(len(error.problems), error.source)
        1 engine config
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{source}: {len(self.problems)} problem(s){lines}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, list[str]]]:
        """Pickle both parts."""
        return type(self), (self.source, self.problems)


class NotFoundError(ZerolabError, LookupError):
    """Unknown experiment, trial, checkpoint or file.

    Example:
        >>> with zerolab.core.init() as context:
        ...     try:
        ...         context.checkpoint.get_metadata("00000000-0000-0000-0000-000000000000")
        ...     except zerolab.errors.NotFoundError:
        ...         print("no such checkpoint")
        no such checkpoint
    """


class ConflictError(ZerolabError):
    """The current state does not allow the operation.

    Example:
        >>> try:
        ...     raise zerolab.errors.ConflictError("experiment 7 has ended")
        ... except zerolab.errors.ZerolabError as error:
        ...     print(error)
        experiment 7 has ended
    """


class StaleRunError(ConflictError):
    """Another run has taken this trial over.

    This process must stop and report nothing more. Do not catch it: the context exits with the
    right exit code.

    Example:
        >>> issubclass(zerolab.errors.StaleRunError, zerolab.errors.ConflictError)
        True
    """


class ForbiddenError(ZerolabError):
    """The token is missing, unknown, or does not allow the request.

    Example:
        >>> issubclass(zerolab.errors.ForbiddenError, zerolab.errors.ZerolabError)
        True
    """


class UnreachableError(ZerolabError):
    """The server does not respond at its address.

    Example:
        >>> try:
        ...     zerolab.Client("http://127.0.0.1:1").info()
        ... except zerolab.errors.UnreachableError:
        ...     print("start one with `zerolab up`")
        start one with `zerolab up`
    """


class CertificateError(UnreachableError):
    """The server's certificate is not valid here: retrying does not help.

    Example:
        >>> issubclass(zerolab.errors.CertificateError, zerolab.errors.UnreachableError)
        True
    """


class WaitTimeoutError(ZerolabError, TimeoutError):
    """An experiment has not ended within the time that a client waits.

    Example:
        >>> issubclass(zerolab.errors.WaitTimeoutError, TimeoutError)
        True
    """


class TrialError(ZerolabError):
    """The user's trial class violates the trial API.

    Example:
        >>> with zerotrial.init(hparams={"lr": 0.1}) as context:
        ...     try:
        ...         context.get_hparam("width")
        ...     except zerolab.errors.TrialError as error:
        ...         print(error)
        unknown hyperparameter 'width'; there are: lr
    """


class EngineError(ZerolabError):
    """The engine does not support the training loop or the model.

    Example:
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
        >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
        >>> try:
        ...     engine.step()
        ... except zerolab.errors.EngineError as error:
        ...     print(error)
        step() without backward(): there is no gradient; ...
    """


class InvalidHyperparametersError(ZerolabError):
    """A trial declared its hyperparameters invalid; it ends and is not restarted.

    Example:
        >>> hparams = {"heads": 3, "width": 64}
        >>> if hparams["width"] % hparams["heads"]:
        ...     raise zerotrial.InvalidHP("width must be a multiple of heads")
        Traceback (most recent call last):
        zerolab.errors.InvalidHyperparametersError: width must be a multiple of heads
    """


class StorageError(ZerolabError):
    """The storage is full, read-only or unavailable.

    It is not the trial's fault and perhaps temporary: the run waits for its storage and restarts.

    Example:
        >>> zerolab.errors.is_storage_failure(zerolab.errors.StorageError("bucket not available"))
        True
    """


class PeerFailedError(ZerolabError):
    """Another rank has failed, and this one with it.

    Example:
        >>> issubclass(zerolab.errors.PeerFailedError, zerolab.errors.ZerolabError)
        True
    """


def is_storage_failure(error: BaseException) -> bool:
    """Return whether an error comes from a full, read-only or broken disk.

    Args:
        error: The exception; its causes are examined, too.

    Returns:
        True for a :class:`StorageError`, and an ``OSError`` such as "no space left on device".

    Example:
        >>> import errno
        >>> zerolab.errors.is_storage_failure(OSError(errno.ENOSPC, "no space left on device"))
        True
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StorageError):
            return True
        if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRORS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def one_line(error: BaseException) -> str:
    r"""Describe an exception of other code in one line.

    Args:
        error: The exception.

    Returns:
        Its class, and the first line of its message.

    Example:
        >>> zerolab.errors.one_line(ValueError("no such label\nmore lines"))
        'ValueError: no such label'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
