"""MkDocs hooks: pages from files outside docs/, and scripts that the server's policy permits.

- The README of each example becomes a page that ends with the files of the example. The changelog
  and CONTRIBUTING.md become pages, too, and so do notebooks in docs/notebooks with their outputs.
- Links to other files of the repository lead to ``ZEROLAB_REPOSITORY`` if it is set; otherwise they
  become plain text.
- Inline scripts move to files: the server forbids them (``Content-Security-Policy``).
"""

import base64
import hashlib
import inspect
import json
import logging
import os
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

logger = logging.getLogger("mkdocs.hooks")

ROOT = Path(__file__).resolve().parent
COPIES = {
    "changelog.md": "CHANGELOG.md",
    "contribute/contributing.md": "CONTRIBUTING.md",
    "images/icon.svg": "server/web/src/icon.svg",
}
"""Files of the site that are elsewhere in the repository."""
LANGUAGES = {".json": "json", ".py": "python", ".sh": "sh", ".yaml": "yaml"}

_FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_STYLE = re.compile(r"<style|<[^<>]* style=[^<>]*>")
_FOREIGN = re.compile(r"<(?:script|img|iframe)[^<>]* src=\"(?:https?:)?//[^<>]*>")
_SCRIPT = re.compile(r"<script>(.+?)</script>", re.DOTALL)


class DocstringMarkdown(griffe.Extension):
    """Rewrites Sphinx markup of docstrings as Markdown and names the section of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is None:
            return
        text = inspect.cleandoc(obj.docstring.value)
        text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
        text = re.sub(r"^( *)Example::?$", r"\1Examples:", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def on_config(config: Any) -> Any:
    """Add the examples to the navigation and the version to the footer."""
    (version,) = re.findall(
        r'^__version__ = "(.+)"', (ROOT / "platform/zerolab/__init__.py").read_text("utf-8"), re.M
    )
    config.copyright = f"Zerolab {version}"
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # the anchors of GitHub
    for section in config.nav:
        if "Examples" in section:
            section["Examples"] = list(_example_pages())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the examples, the changelog and the icon."""
    for uri, folder in _example_pages().items():
        files.append(File.generated(config, uri, content=_example(folder)))
    for uri, source in COPIES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        text, pictures = _notebook(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files that are not pages of the site."""
    uri = page.file.src_uri
    if uri == "changelog.md":
        page.meta["search"] = {"exclude": True}
    origin = _repository_path(uri)

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target or ":" in target:
            return match[0]
        if target == posixpath.basename(uri).replace(".md", ".ipynb"):
            return match[0]  # the download of a notebook
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        linked = _page_of(path)
        if linked:
            return f"[{text}]({posixpath.relpath(linked, posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # MkDocs reports it
        repository = os.environ.get("ZEROLAB_REPOSITORY", "").rstrip("/")
        return f"[{text}]({repository}/blob/main/{path}{anchor})" if repository else text

    parts = _FENCE.split(markdown)
    return "".join(
        part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts)
    )


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Move inline scripts to files; warn of other content that the server forbids."""
    if found := _STYLE.search(output) or _FOREIGN.search(output):
        logger.warning("%s: the server's policy forbids %s", page.file.src_uri, found[0])
    up = posixpath.relpath(".", posixpath.dirname(page.url) or ".")
    return _without_inline_scripts(output, up, Path(config.site_dir))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Prepare 404.html, which the server sends for any address below /docs."""
    if template_name != "404.html":
        return output_content
    html = output_content.replace('"base": "/"', '"base": "/docs/"')
    html = html.replace('"search": "/', '"search": "/docs/')
    html = re.sub(r'((?:href|src)=)"/(?!/)', r'\1"/docs/', html)
    return _without_inline_scripts(html, "/docs", Path(config.site_dir))


def on_post_build(config: Any) -> None:
    """Remove what the site does not use: source maps, sitemap and search in other languages."""
    site = Path(config.site_dir)
    for file in (*site.rglob("*.map"), *site.glob("sitemap.xml*")):
        file.unlink()
    shutil.rmtree(site / "assets/javascripts/lunr", ignore_errors=True)


def _example_pages() -> dict[str, Path]:
    """Return the folder of each page of an example."""
    readmes = sorted((ROOT / "examples").glob("*/README.md"))
    pages = {f"examples/{readme.parent.name}.md": readme.parent for readme in readmes}
    if (ROOT / "examples/README.md").is_file():
        pages = {"examples/index.md": ROOT / "examples", **pages}
    return pages


def _example(folder: Path) -> str:
    parts = [(folder / "README.md").read_text("utf-8")]
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name != "README.md":
            parts.append(f"## {file.name}\n\n```{LANGUAGES.get(file.suffix, '')}")
            parts[-1] += f"\n{file.read_text('utf-8').rstrip()}\n```\n"
    return "\n".join(parts)


def _notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown of a notebook, and its pictures by file name."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            text = "".join(output.get("text", [])) or data.get("text/plain", "")
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![plot]({name})")
            elif data.get("text/html", "").startswith(("<table>", "<div><progress")):
                parts.append(data["text/html"].replace(' style="text-align: left"', ""))
            else:
                parts.append(f"```text\n{text.rstrip()}\n```")
    title, *others = parts
    link = f"[Download this notebook]({path.name}), or read it here with its outputs."
    first, *rest = title.split("\n")
    return "\n\n".join([f"{first}\n\n{link}\n" + "\n".join(rest), *others]), pictures


def _repository_path(uri: str) -> str:
    """Return the file of the repository that a page is made of."""
    if uri in COPIES:
        return COPIES[uri]
    if uri == "examples/index.md":
        return "examples/README.md"
    if uri.startswith("examples/"):
        return uri.removesuffix(".md") + "/README.md"
    return f"docs/{uri}"


def _page_of(path: str) -> str | None:
    """Return the page that a file or folder of the repository becomes, None if there is none."""
    pages = {"README.md": "index.md", **{source: uri for uri, source in COPIES.items()}}
    for uri, folder in _example_pages().items():
        name = str(folder.relative_to(ROOT))
        pages |= {name: uri, f"{name}/README.md": uri}
    if path.endswith(".ipynb"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if path.startswith("docs/") and not path.endswith("/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return pages.get(path)


def _without_inline_scripts(html: str, root: str, site: Path) -> str:
    def move(match: re.Match[str]) -> str:
        name = f"inline.{hashlib.sha256(match[1].encode()).hexdigest()[:8]}.min.js"
        file = site / "assets/javascripts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(match[1], encoding="utf-8")
        return f'<script src="{root}/assets/javascripts/{name}"></script>'

    return _SCRIPT.sub(move, html)
