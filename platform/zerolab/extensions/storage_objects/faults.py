"""Conversion of storage errors into one-line messages with the remedy."""

from collections.abc import Iterator, Sequence

from zerolab.contract.storage import StorageAddress
from zerolab.errors import StorageError
from zerolab.storage.objects import StorageRefusedError

__all__ = ["opening_error", "storage_error"]

_CHECKPOINTS = "checkpoint_storage"
_UNREACHABLE = (
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError",
    "ClientConnectorError", "ClientConnectionError", "ServerDisconnectedError",
    "ServerTimeoutError", "ServiceRequestError", "ServiceResponseError", "ConnectionError",
    "ConnectionRefusedError", "ConnectionResetError", "TimeoutError", "FSTimeoutError",
    "HTTPClientError", "ProxyConnectionError",
)  # fmt: skip
_NO_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError",
    "CredentialRetrievalError", "TokenRetrievalError", "UnauthorizedSSOTokenError",
)  # fmt: skip
_REFUSED = ("PermissionError", "ClientAuthenticationError", "RefreshError")
_REFUSED_TEXTS = (
    "AccessDenied", "Access Denied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden",
    "ExpiredToken", "InvalidToken", "AuthenticationFailed", "AuthorizationFailure",
)  # fmt: skip
_NO_BUCKET_TEXTS = ("bucket does not exist", "NoSuchBucket", "ContainerNotFound", "No such bucket")
_MACHINE_CREDENTIALS = {
    "s3": "give the machine its own (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, a role)",
    "gs": "give the machine its own (GOOGLE_APPLICATION_CREDENTIALS, or a service account)",
    "az": "give the machine its own (AZURE_STORAGE_CONNECTION_STRING)",
}
_CHECKPOINT_CREDENTIALS = {
    "s3": f"set checkpoint_storage.access_key and secret_key, or {_MACHINE_CREDENTIALS['s3']}",
    "gs": _MACHINE_CREDENTIALS["gs"],
    "az": "set checkpoint_storage.connection_string, or account_url and credential",
}


def storage_error(
    address: StorageAddress, error: BaseException, doing: str, key: str = _CHECKPOINTS
) -> StorageError:
    """Convert an error of a storage library into one line for the user, without secrets.

    Args:
        address: Address of the storage.
        error: Any exception; object-store libraries rarely raise an ``OSError``.
        doing: Failed operation, e.g. ``cannot be written``.
        key: Key of the experiment file that holds the address.
    """
    if isinstance(error, StorageError):
        return error
    chain = list(_chain(error))
    prefix = f"{key.replace('_', ' ')} {address.root}"
    detail = address.scrub(_first_line(chain[0]))
    if not address.is_remote:
        return StorageError(f"{prefix}: {doing}: {detail}")
    refusal = _access_error(address, chain, detail, key)
    if refusal is not None:
        return StorageRefusedError(f"{prefix}: {refusal}")
    if _class_names(chain).intersection(_UNREACHABLE):
        return StorageError(
            f"{prefix}: {doing}: nothing answers{_at(address)} ({detail}); check that the machine "
            f"reaches it, or fix {key} (the operation is retried)"
        )
    return StorageError(f"{prefix}: {doing}: {detail}")


def opening_error(address: StorageAddress, error: ValueError) -> StorageRefusedError:
    """Return the error for storage options that the library rejects.

    Args:
        address: Address of a checkpoint storage.
        error: Exception of the library.
    """
    detail = address.scrub(_first_line(error))
    remedy = _CHECKPOINT_CREDENTIALS.get(address.scheme, f"fix {_CHECKPOINTS}")
    return StorageRefusedError(
        f"checkpoint storage {address.root}: cannot be opened: {detail}; {remedy}"
    )


def _access_error(
    address: StorageAddress, chain: Sequence[BaseException], detail: str, key: str
) -> str | None:
    """Return why the store denies access, or None if the error means something else."""
    names = _class_names(chain)
    text = " ".join(str(error) for error in chain)
    remedies = _CHECKPOINT_CREDENTIALS if key == _CHECKPOINTS else _MACHINE_CREDENTIALS
    remedy = remedies.get(address.scheme, f"fix {key}")
    if names.intersection(_NO_CREDENTIALS):
        return f"no credentials found; {remedy}"
    if any(part in text for part in _NO_BUCKET_TEXTS):
        bucket = address.root.partition("://")[2].partition("/")[0]
        kind = "container" if address.scheme == "az" else "bucket"
        subkey = f".{kind}" if key == _CHECKPOINTS else ""
        return f"there is no {kind} {bucket!r}{_at(address)}; create it, or fix {key}{subkey}"
    if names.intersection(_REFUSED) or any(part in text for part in _REFUSED_TEXTS):
        return f"access is refused ({detail}); {remedy}"
    return None


def _class_names(chain: Sequence[BaseException]) -> set[str]:
    return {base.__name__ for error in chain for base in type(error).__mro__}


def _at(address: StorageAddress) -> str:
    endpoint = address.options.get("endpoint_url") or address.options.get("account_url")
    return f" at {endpoint}" if endpoint else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
