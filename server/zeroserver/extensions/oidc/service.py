"""Users of the provider."""

from sqlalchemy import select, update

from zerolab.errors import ForbiddenError
from zeroserver.access.routes import Role
from zeroserver.extensions.users.service import UserService
from zeroserver.extensions.users.user_names import is_user_name
from zeroserver.store.rows import UserRow, read_row
from zeroserver.store.schema import users
from zeroserver.store.user_directory import ADMIN

__all__ = ["OidcUsers"]


class OidcUsers(UserService):
    """Finds, links and creates the users that sign in with the provider."""

    def sign_in(self, subject: str, name: str, new_users: Role | None) -> UserRow:
        """Return the user of an identity.

        The first sign-in links the user of that name to the identity for good: somebody to whom
        the provider gives the same name later is refused.

        Args:
            subject: Id that the provider never changes.
            name: Name of the user, as the provider sends it.
            new_users: Role of a user that is created; None to create none.

        Raises:
            ForbiddenError: If the user may not sign in.
        """
        linked = select(users).where(users.c.oidc_subject == subject)
        user = read_row(self.work.connection, UserRow, linked)
        if user is None:
            user = self._link(subject, name, new_users)
        if not user.active:
            raise ForbiddenError(f"user {user.name} is not active; ask an administrator")
        return user

    def _link(self, subject: str, name: str, new_users: Role | None) -> UserRow:
        if not is_user_name(name):
            msg = (
                f"the provider names you {name[:80]!r}, which cannot be the name of a user; an "
                "administrator can set another user_claim"
            )
            raise ForbiddenError(msg)
        user = self._read(name)
        if user is None and new_users is None:
            msg = f"there is no user {name}; ask an administrator for `zerolab user create {name}`"
            raise ForbiddenError(msg)
        if user is None and new_users is not None:
            self.create(name, new_users)
            user = self.find(name)
        assert user is not None
        if user.id == ADMIN.id or user.oidc_subject is not None:
            msg = f"user {name} belongs to somebody else; ask an administrator for another name"
            raise ForbiddenError(msg)
        query = update(users).where(users.c.id == user.id).values(oidc_subject=subject)
        self.work.connection.execute(query)
        self._publish(name)
        return self.find(name)
