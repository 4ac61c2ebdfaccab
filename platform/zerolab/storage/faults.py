"""What goes wrong with an object store, said in one line: what, where, and what to do."""

from collections.abc import Iterator, Sequence

from zerolab.contract.storage import StorageAddress
from zerolab.errors import StorageError

__all__ = ["StorageRefusedError", "opening_error", "storage_error"]

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
_OWN_CREDENTIALS = {
    "s3": "give the machine its own (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, a role)",
    "gs": "give the machine its own (GOOGLE_APPLICATION_CREDENTIALS, or a service account)",
    "az": "give the machine its own (AZURE_STORAGE_CONNECTION_STRING)",
}
_CHECKPOINT_CREDENTIALS = {
    "s3": f"set checkpoint_storage.access_key and secret_key, or {_OWN_CREDENTIALS['s3']}",
    "gs": _OWN_CREDENTIALS["gs"],
    "az": "set checkpoint_storage.connection_string, or account_url and credential",
}


class StorageRefusedError(StorageError):
    """The store answers, and does not let us in, or has no such bucket: trying again is no help."""


def storage_error(
    address: StorageAddress, error: BaseException, doing: str, key: str = _CHECKPOINTS
) -> StorageError:
    """Turn what a library has raised into one line for the user, without any secret.

    Args:
        address: Of the storage.
        error: Anything; what an object store's library raises is often no ``OSError``.
        doing: What could not be done, e.g. ``cannot be written``.
        key: Of the experiment file, where the address comes from.
    """
    if isinstance(error, StorageError):
        return error
    chain = list(_chain(error))
    place = f"{key.replace('_', ' ')} {address.root}"
    what = address.scrub(_first_line(chain[0]))
    if not address.is_remote:
        return StorageError(f"{place}: {doing}: {what}")
    refusal = _refusal(address, chain, what, key)
    if refusal is not None:
        return StorageRefusedError(f"{place}: {refusal}")
    if _names(chain).intersection(_UNREACHABLE):
        return StorageError(
            f"{place}: {doing}: nothing answers{_at(address)} ({what}); it is tried again: see "
            f"that the machine reaches it, or mend {key}"
        )
    return StorageError(f"{place}: {doing}: {what}")


def opening_error(address: StorageAddress, error: ValueError) -> StorageRefusedError:
    """Say of an address that a library cannot make sense of what its block says.

    Args:
        address: Of a checkpoint storage.
        error: What the library has raised.
    """
    what = address.scrub(_first_line(error))
    remedy = _CHECKPOINT_CREDENTIALS.get(address.scheme, f"mend {_CHECKPOINTS}")
    return StorageRefusedError(
        f"checkpoint storage {address.root}: cannot be opened: {what}; {remedy}"
    )


def _refusal(
    address: StorageAddress, chain: Sequence[BaseException], what: str, key: str
) -> str | None:
    """Say why the store does not let us in, if that is what an error means."""
    names = _names(chain)
    text = " ".join(str(one) for one in chain)
    known = _CHECKPOINT_CREDENTIALS if key == _CHECKPOINTS else _OWN_CREDENTIALS
    remedy = known.get(address.scheme, f"mend {key}")
    if names.intersection(_NO_CREDENTIALS):
        return f"there are no credentials for it; {remedy}"
    if any(part in text for part in _NO_BUCKET_TEXTS):
        bucket = address.root.partition("://")[2].partition("/")[0]
        kind = "container" if address.scheme == "az" else "bucket"
        inside = f".{kind}" if key == _CHECKPOINTS else ""
        return f"there is no {kind} {bucket!r}{_at(address)}; create it, or mend {key}{inside}"
    if names.intersection(_REFUSED) or any(part in text for part in _REFUSED_TEXTS):
        return f"access is refused ({what}); {remedy}"
    return None


def _names(chain: Sequence[BaseException]) -> set[str]:
    return {base.__name__ for one in chain for base in type(one).__mro__}


def _at(address: StorageAddress) -> str:
    endpoint = address.options.get("endpoint_url") or address.options.get("account_url")
    return f" at {endpoint}" if endpoint else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _first_line(error: BaseException) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
