"""Sign-in with a real OpenID Connect provider, node's ``oidc-provider``."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import expect, sync_playwright

from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, free_port, until
from tests.web.conftest import BROWSER_ARGUMENTS
from zerolab.errors import ConfigError, ForbiddenError
from zeroserver.extensions.oidc.settings import OidcSettings, read_oidc_settings

pytest.importorskip("joserfc")
pytestmark = [pytest.mark.processes, pytest.mark.needs_extension("oidc")]

ACCOUNTS: Mapping[str, dict[str, Any]] = {
    "1": {"preferred_username": "Ann", "email": "ann@example.org", "email_verified": True},
    "2": {"preferred_username": "ann", "email": "other@example.org", "email_verified": True},
    "3": {"preferred_username": "bob", "email": "bob@example.org", "email_verified": False},
    "4": {"preferred_username": "not a name"},
    "5": {"preferred_username": "admin"},
    "6": {"preferred_username": "old"},
    "7": {},
    "8": {"preferred_username": "cara"},
}
HOSTS = ("127.0.0.1", "localhost")
SECRET = "s3cret-of-the-client"


def oidc_file(folder: Path, **settings: Any) -> Path:
    file = folder / "oidc.yaml"
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump({"client_id": "zerolab", "client_secret": SECRET, **settings}))
    return file


class Farm:
    """A provider and a server that uses it."""

    def __init__(self, folder: Path, modules: Path) -> None:
        self.port, self.issuer_port = free_port(), free_port()
        self.issuer = f"http://127.0.0.1:{self.issuer_port}"
        script = modules / "provider.mjs"  # node finds its packages beside the script
        shutil.copy(Path(__file__).with_name("provider.mjs"), script)
        callbacks = (f"http://{host}:{self.port}/login/oidc/callback" for host in HOSTS)
        command = ["node", str(script), str(self.issuer_port), ",".join(callbacks)]
        command.append(json.dumps(ACCOUNTS))
        self.log = folder / "provider.log"
        with self.log.open("wb") as log:
            self.provider = subprocess.Popen(command, stdout=log, stderr=log)
        until(
            "the provider listens",
            lambda: "ready" in self.log.read_text(),
            details=self.log.read_text,
        )
        self.folder = folder
        self.server = self.serve(user_claim="preferred_username")

    def serve(self, **settings: Any) -> LiveServer:
        file = oidc_file(self.folder, issuer=self.issuer, label="Company", **settings)
        server = LiveServer(self.folder / "home", "--oidc", str(file))
        server.port = self.port
        server.start()
        return server

    def restart(self, **settings: Any) -> None:
        self.server.kill()
        self.server = self.serve(**settings)

    def api(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.server.token}"}
        url = f"{self.server.url}/api/v1{path}"
        response = httpx.request(method, url, headers=headers, json=body, timeout=DEADLINE_S)
        response.raise_for_status()
        return response.json()

    def sign_in(self, login: str) -> tuple[httpx.Response, dict[str, Any]]:
        """Sign in with the provider's forms; return the last page, and who the browser is then."""
        with httpx.Client(timeout=DEADLINE_S, follow_redirects=True) as browser:
            page = browser.get(f"{self.server.url}/login/oidc")
            while page.url.port == self.issuer_port:
                assert page.status_code == 200, page.text
                action = re.search(r'action="([^"]+)"', page.text)
                prompt = re.search(r'name="prompt" value="(\w+)"', page.text)
                assert action is not None, page.text
                assert prompt is not None, page.text
                answer = {"prompt": prompt[1]}
                answer |= {"login": login, "password": "x"} if prompt[1] == "login" else {}
                page = browser.post(page.url.join(action[1]), data=answer)
            return page, browser.get(f"{self.server.url}/api/v1/whoami").json()

    def refused(self, login: str) -> str:
        """Sign in, which must fail; return the page."""
        page, whoami = self.sign_in(login)
        assert page.status_code == 403, page.text
        assert whoami["error"]["type"] == "unauthorized"
        return page.text

    def close(self) -> None:
        self.server.close()
        self.provider.kill()
        self.provider.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    modules = tmp_path_factory.mktemp("modules")
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "oidc-provider@9"]
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("needs node and npm")
    if subprocess.run(npm, cwd=modules, check=False, timeout=DEADLINE_S).returncode:
        pytest.skip("npm cannot install oidc-provider")
    created = Farm(tmp_path_factory.mktemp("farm"), modules)
    try:
        yield created
    finally:
        created.close()


def test_users_sign_in(farm: Farm) -> None:
    assert httpx.get(f"{farm.server.url}/login/methods").json() == {"oidc": "Company"}
    missing = "there is no user ann; ask an administrator for `zerolab user create ann`"
    assert missing in farm.refused("1")
    for name, role in (("ann", "member"), ("old", "viewer")):
        farm.api("POST", "/users", {"name": name, "role": role})
    farm.api("PATCH", "/users/old", {"active": False})
    _, whoami = farm.sign_in("1")
    assert (whoami["user"], whoami["role"], whoami["kind"]) == ("ann", "member", "browser")
    assert farm.sign_in("1")[1]["user"] == "ann"
    (entry, *_) = farm.api("GET", "/audit?user=ann")["changes"]
    assert entry["action"] == "GET /login/oidc/callback"

    for login, message in (
        ("2", "user ann belongs to somebody else"),
        ("4", "the provider names you &#x27;not a name&#x27;"),
        ("5", "user admin belongs to somebody else"),
        ("6", "user old is not active"),
        ("7", "the provider sends no preferred_username"),
    ):
        assert message in farm.refused(login)
    log = farm.server.log.read_text()
    assert "user ann belongs to somebody else" in log
    assert SECRET not in log


@pytest.mark.browser
def test_page_opens_after_sign_in(farm: Farm) -> None:
    """The page and the provider are different sites, and the session's cookie is strict."""
    farm.restart(user_claim="preferred_username", new_users="member")
    expect.set_options(timeout=1000 * DEADLINE_S)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(1000 * DEADLINE_S)
        page.goto(f"http://localhost:{farm.port}/")
        page.get_by_role("link", name="Sign in with Company").click()
        page.locator("input[name=login]").fill("8")
        page.locator("input[name=password]").fill("x")
        page.locator("button[type=submit]").click()
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("cara", exact=True)).to_be_visible()
        assert page.url.startswith(f"http://localhost:{farm.port}/")
        browser.close()


def test_callback_is_valid_once_and_in_one_browser(farm: Farm) -> None:
    with httpx.Client(timeout=DEADLINE_S) as browser:
        begun = browser.get(f"{farm.server.url}/login/oidc")
        assert begun.status_code == 303
        assert begun.headers["location"].startswith(farm.issuer)
        assert "code_challenge_method=S256" in begun.headers["location"]
        assert "samesite=lax" in begun.headers["set-cookie"].lower()
        state = httpx.URL(begun.headers["location"]).params["state"]
    callback = f"{farm.server.url}/login/oidc/callback"
    other = httpx.get(callback, params={"state": state, "code": "x"})
    assert other.status_code == 403
    assert "this browser has not begun the sign-in" in other.text
    cookies = {"zerolab-oidc": state}
    invalid = httpx.get(callback, params={"state": state, "code": "x"}, cookies=cookies)
    assert invalid.status_code == 403
    assert "response is not valid (invalid_grant)" in invalid.text
    again = httpx.get(callback, params={"state": state, "code": "x"}, cookies=cookies)
    assert "was not begun here" in again.text
    denied = httpx.get(callback, params={"state": state, "error": "<b>n\no"}, cookies=cookies)
    assert "refused the sign-in: &lt;b&gt;no" in denied.text
    assert "refused the sign-in: <b>no\n" in farm.server.log.read_text()


def test_new_users_and_verified_addresses(farm: Farm) -> None:
    farm.restart(new_users="viewer")
    _, whoami = farm.sign_in("2")
    assert (whoami["user"], whoami["role"]) == ("other@example.org", "viewer")
    assert "has not verified the address bob@example.org" in farm.refused("3")
    assert "bob@example.org" not in {user["name"] for user in farm.api("GET", "/users")["users"]}


def test_provider_does_not_respond(farm: Farm) -> None:
    farm.restart()
    farm.provider.kill()
    farm.provider.wait(DEADLINE_S)
    page = httpx.get(f"{farm.server.url}/login/oidc", timeout=DEADLINE_S)
    assert page.status_code == 429
    assert f"the provider {farm.issuer} cannot be used" in page.text
    assert httpx.get(f"{farm.server.url}/healthz").status_code == 200


def test_server_without_provider(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "home")
    server.start()
    try:
        assert httpx.get(f"{server.url}/login/methods").json() == {"oidc": None}
        page = httpx.get(f"{server.url}/login/oidc")
        assert (page.status_code, "see its option --oidc" in page.text) == (404, True)
    finally:
        server.close()


def test_settings_report_all_problems(tmp_path: Path) -> None:
    file = oidc_file(tmp_path, issuer="http://login.example.org", new_users="owner", scops=[])
    with pytest.raises(ConfigError) as caught:
        read_oidc_settings(file)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "scops", "issuer", "new_users",
    ]  # fmt: skip
    assert SECRET not in str(caught.value)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="do `chmod 600` on it"):
        read_oidc_settings(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_oidc_settings(tmp_path / "missing.yaml")
    file.chmod(0o600)
    file.write_text(f"client_secret: {SECRET}\n  x: [")
    with pytest.raises(ConfigError, match="the mistake is in line 2") as caught:
        read_oidc_settings(file)
    assert SECRET not in str(caught.value)


def test_oldest_sign_in_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may begin sign-ins, which must not prevent others from signing in."""
    from zeroserver.extensions.oidc import provider as module

    monkeypatch.setattr(module, "_MAX_PENDING", 2)
    settings = OidcSettings(issuer="https://id.example.org", client_id="zerolab", client_secret="s")
    provider = module.OidcProvider(settings)
    provider._metadata = {"authorization_endpoint": "https://id.example.org/auth"}
    provider._read_at = time.monotonic()
    first, second, third = (
        asyncio.run(provider.begin("https://zerolab.example.org/login/oidc/callback"))[1]
        for _ in range(3)
    )
    assert list(provider._pending) == [second, third]
    with pytest.raises(ForbiddenError, match="was not begun here"):
        asyncio.run(provider.finish(first, "code"))


def test_forged_tokens_are_refused() -> None:
    from joserfc import jwt
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet, OctKey, RSAKey

    from zeroserver.extensions.oidc.provider import OidcProvider

    key = RSAKey.generate_key(2048, {"kid": "1", "alg": "RS256", "use": "sig"})
    other = RSAKey.generate_key(2048, {"kid": "1", "alg": "RS256", "use": "sig"})
    settings = OidcSettings(issuer="https://id.example.org", client_id="zerolab", client_secret="s")
    provider = OidcProvider(settings)
    provider._metadata = {"issuer": settings.issuer}
    provider._keys = KeySet([key])
    now = int(time.time())
    valid = {"iss": settings.issuer, "aud": "zerolab", "sub": "1", "nonce": "n", "iat": now}
    valid["exp"] = now + 60

    def check(changes: Mapping[str, Any], signer: Any = key, algorithm: str = "RS256") -> Any:
        claims = {name: value for name, value in {**valid, **changes}.items() if value is not None}
        header = {"alg": algorithm, "kid": "1"}
        token = jwt.encode(header, claims, signer, algorithms=[algorithm])
        return provider._check(token, "n")

    assert check({})["sub"] == "1"
    for changes in (
        {"iss": "https://evil.example.org"},
        {"aud": "other"},
        {"azp": "other"},
        {"nonce": "m"},
        {"nonce": None},
        {"exp": now - 3600},
        {"exp": None},
        {"sub": None},
    ):
        with pytest.raises((JoseError, ValueError)):
            check(changes)
    with pytest.raises(JoseError):
        check({}, other)
    with pytest.raises(JoseError):
        check({}, OctKey.import_key(b"k" * 32, {"kid": "1"}), "HS256")
    with pytest.raises(ForbiddenError, match="has not verified"):
        provider._identity({"sub": "1", "email": "a@b.c"})
