"""Requests to the provider: discovery, authorization code with PKCE, and checks of the ID token."""

import base64
import hashlib
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus, urlsplit

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from zerolab.errors import ForbiddenError
from zeroserver.errors import BusyError
from zeroserver.extensions.oidc.settings import SIGN_IN_S, OidcSettings

__all__ = ["Identity", "OidcProvider", "PendingSignIn"]

_MAX_PENDING = 10_000
"""Maximum number of sign-ins that have begun; the oldest one is dropped, since anybody may begin
one, and nobody must prevent others from signing in."""
_METADATA_S = 3600.0
_TIMEOUT_S = 10.0
_LEEWAY_S = 60
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]


class PendingSignIn(msgspec.Struct, frozen=True):
    """Sign-in that has begun at the provider."""

    nonce: str
    verifier: str
    callback: str
    expires_at: float


class Identity(msgspec.Struct, frozen=True):
    """User as the provider names it."""

    subject: str
    """Id that the provider never changes or uses again."""
    name: str
    """Value of the claim ``user_claim``, in lower case."""


class OidcProvider:
    """Client of the provider; used on the event loop's thread.

    Args:
        settings: Settings from ``--oidc``.
    """

    def __init__(self, settings: OidcSettings) -> None:
        self.settings = settings
        self._metadata: dict[str, Any] = {}
        self._keys: Any = {}
        self._read_at = float("-inf")
        self._pending: dict[str, PendingSignIn] = {}

    async def begin(self, callback: str) -> tuple[str, str]:
        """Begin a sign-in.

        Args:
            callback: URL to which the provider sends the browser back.

        Returns:
            URL of the provider's page, and the state for the browser's cookie.

        Raises:
            BusyError: If the provider does not respond.
        """
        metadata = await self._discover()
        now = time.monotonic()
        self._pending = {k: one for k, one in self._pending.items() if one.expires_at > now}
        if len(self._pending) >= _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        state, nonce = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        verifier = secrets.token_urlsafe(48)
        self._pending[state] = PendingSignIn(nonce, verifier, callback, now + SIGN_IN_S)
        challenge = hashlib.sha256(verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": callback,
            "scope": " ".join(self.settings.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": base64.urlsafe_b64encode(challenge).decode().rstrip("="),
            "code_challenge_method": "S256",
        }
        return str(httpx.URL(metadata["authorization_endpoint"]).copy_merge_params(query)), state

    async def finish(self, state: str, code: str) -> Identity:
        """Exchange the code of a sign-in for the identity of the user.

        Raises:
            ForbiddenError: If the sign-in is unknown or too old, or the provider's response is
                not valid.
            BusyError: If the provider does not respond.
        """
        pending = self._pending.pop(state, None)
        if pending is None or pending.expires_at <= time.monotonic():
            raise ForbiddenError("the sign-in is too old or was not begun here; sign in again")
        await self._discover()
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                token = await self._redeem(client, pending, code)
                try:
                    claims = self._check(token["id_token"], pending.nonce)
                except JoseError:  # the provider may have new keys
                    self._read_at = float("-inf")
                    await self._discover()
                    claims = self._check(token["id_token"], pending.nonce)
                if not claims.keys() >= set(self._needed_claims):
                    claims = {**await self._user_info(client, token, claims["sub"]), **claims}
        except httpx.HTTPError as error:
            raise BusyError(f"the provider {self.settings.issuer} does not respond") from error
        except (JoseError, ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"the provider's response is not valid ({_reason(error)}); sign in again"
            raise ForbiddenError(msg) from error
        return self._identity(claims)

    @property
    def _needed_claims(self) -> tuple[str, ...]:
        name = self.settings.user_claim
        return (name, "email_verified") if name == "email" else (name,)

    async def _redeem(
        self, client: httpx.AsyncClient, pending: PendingSignIn, code: str
    ) -> dict[str, Any]:
        """Exchange the code for tokens."""
        body = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": pending.callback,
            "code_verifier": pending.verifier,
        }
        own, secret = self.settings.client_id, self.settings.client_secret
        methods = self._metadata.get("token_endpoint_auth_methods_supported")
        credentials: httpx.BasicAuth | None = None
        if not methods or "client_secret_basic" in methods:  # the default of the standard
            credentials = httpx.BasicAuth(quote_plus(own), quote_plus(secret))
        else:
            body |= {"client_id": own, "client_secret": secret}
        url = self._metadata["token_endpoint"]
        response = await client.post(url, data=body, auth=credentials or httpx.USE_CLIENT_DEFAULT)
        token: dict[str, Any] = response.json()
        if response.is_error:
            raise ValueError(str(token.get("error", response.status_code))[:100])
        return token

    async def _user_info(
        self, client: httpx.AsyncClient, token: Mapping[str, Any], subject: str
    ) -> dict[str, Any]:
        """Read the claims that are not in the ID token."""
        if "userinfo_endpoint" not in self._metadata:
            return {}
        headers = {"Authorization": f"Bearer {token['access_token']}"}
        response = await client.get(self._metadata["userinfo_endpoint"], headers=headers)
        claims: dict[str, Any] = response.json() if response.is_success else {}
        return claims if claims.get("sub") == subject else {}

    def _check(self, id_token: str, nonce: str) -> dict[str, Any]:
        """Check signature and claims of an ID token; return the claims."""
        claims = jwt.decode(id_token, self._keys, algorithms=_ALGORITHMS).claims
        own = self.settings.client_id
        rules = jwt.JWTClaimsRegistry(
            leeway=_LEEWAY_S,
            iss={"essential": True, "value": self._metadata["issuer"]},
            aud={"essential": True, "value": own},
            sub={"essential": True},
            exp={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        rules.validate(claims)
        if claims.get("azp", own) != own:
            raise ValueError("azp")
        return dict(claims)

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        name = claims.get(self.settings.user_claim)
        if not isinstance(name, str) or not name:
            msg = (
                f"the provider sends no {self.settings.user_claim}; an administrator can set "
                "user_claim and scopes in the file of --oidc"
            )
            raise ForbiddenError(msg)
        if self.settings.user_claim == "email" and claims.get("email_verified") is not True:
            raise ForbiddenError(f"the provider has not verified the address {name[:200]}")
        return Identity(str(claims["sub"]), name.lower())

    async def _discover(self) -> dict[str, Any]:
        """Read the provider's endpoints and keys, at most once an hour.

        Raises:
            BusyError: If they cannot be read.
        """
        if time.monotonic() - self._read_at < _METADATA_S:
            return self._metadata
        issuer = self.settings.issuer.rstrip("/")
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                response = await client.get(f"{issuer}/.well-known/openid-configuration")
                metadata = response.raise_for_status().json()
                if metadata["issuer"].rstrip("/") != issuer:
                    msg = f"it names itself {str(metadata['issuer'])[:200]}"
                    raise ValueError(msg)
                for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                    _check_scheme(metadata[name], issuer)
                _check_scheme(metadata.get("userinfo_endpoint", issuer), issuer)
                keys = (await client.get(metadata["jwks_uri"])).raise_for_status().json()
            key_set = KeySet.import_key_set(keys)
        except (
            httpx.HTTPError,
            JoseError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            msg = f"the provider {issuer} cannot be used: {str(error) or type(error).__name__}"
            raise BusyError(msg) from error
        self._metadata, self._keys, self._read_at = metadata, key_set, time.monotonic()
        return self._metadata


def _reason(error: Exception) -> str:
    """Return the reason without values of the response, such as the token."""
    if isinstance(error, JoseError):
        return str(error.error)
    return str(error) if type(error) is ValueError else type(error).__name__


def _check_scheme(url: str, issuer: str) -> None:
    if urlsplit(url).scheme != urlsplit(issuer).scheme:
        msg = f"its endpoint {url[:200]} does not use {urlsplit(issuer).scheme}"
        raise ValueError(msg)
