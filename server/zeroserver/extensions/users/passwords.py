"""Passwords: argon2id hashes, with limits on attempts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING

from zeroserver.errors import BusyError

if TYPE_CHECKING:  # imported with the first password
    from argon2 import PasswordHasher

__all__ = ["PasswordCheck"]

_CONCURRENT = 2
"""Maximum number of concurrent checks; each takes 64 MiB and 50 ms of a core."""

_FREE_ATTEMPTS = 5
"""Wrong passwords for a name before each further attempt must wait."""

_MAX_WAIT_S = 60.0
_MAX_NAMES = 10_000


class PasswordCheck:
    """Hashes and checks passwords; used in threads."""

    def __init__(self) -> None:
        self._slots = BoundedSemaphore(_CONCURRENT)
        self._counting = Lock()
        self._failures: dict[str, tuple[int, float]] = {}
        """Number of failures in a row and the time of the last one, by name, latest last."""

    @cached_property
    def _hasher(self) -> "PasswordHasher":
        from argon2 import PasswordHasher

        return PasswordHasher()

    @cached_property
    def _dummy(self) -> str:
        return self._hasher.hash("no user has this password")

    def hash(self, password: str) -> str:
        """Return the stored form of a password.

        Raises:
            BusyError: If too many checks run.
        """
        with self._slot():
            return self._hasher.hash(password)

    def verify(self, name: str, stored: str | None, password: str) -> bool:
        """Check a password; an unknown user takes as long as a wrong password.

        Args:
            name: Name of the user, for the limit on attempts.
            stored: Hash of the user's password; None without a user or a password.
            password: Password to check.

        Raises:
            BusyError: If the name had too many wrong passwords, or too many checks run.
        """
        from argon2.exceptions import InvalidHashError, VerificationError

        with self._slot():  # first: attempts that are not checked do not count
            self._count_attempt(name)
            try:
                valid = self._hasher.verify(stored or self._dummy, password) and stored is not None
            except (VerificationError, InvalidHashError):
                valid = False
        with self._counting:
            if valid:
                self._failures.pop(name, None)
            elif name in self._failures:  # the wait begins now: the check takes a while
                self._failures[name] = (self._failures[name][0], time.monotonic())
        return valid

    def _count_attempt(self, name: str) -> None:
        """Count an attempt as a failure until it succeeds, so that parallel ones are limited, too.

        Raises:
            BusyError: If the name had too many wrong passwords.
        """
        with self._counting:
            now = time.monotonic()
            count, last = self._failures.get(name, (0, 0.0))
            wait_s = 0.0
            if count >= _FREE_ATTEMPTS:
                wait_s = min(2.0 ** (count - _FREE_ATTEMPTS + 1), _MAX_WAIT_S)
            if now < last + wait_s:
                msg = (
                    f"too many wrong passwords; try again in {wait_s:.0f} s, or use `zerolab open`"
                )
                raise BusyError(msg)
            self._failures.pop(name, None)
            if len(self._failures) >= _MAX_NAMES:
                self._failures.pop(next(iter(self._failures)))
            self._failures[name] = (count + 1, now)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._slots.acquire(timeout=1.0):
            msg = "too many sign-ins at once; try again"
            raise BusyError(msg)
        try:
            yield
        finally:
            self._slots.release()
