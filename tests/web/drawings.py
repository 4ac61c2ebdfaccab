"""Pixels and readouts of charts in a browser."""

import re
from collections.abc import Callable

from playwright.sync_api import Locator, Page

BLUE = "([r, g, b, a]) => a > 200 && b > 150 && b - r > 80"
"""The line of the first curve."""

BAND = "([r, g, b, a]) => a > 20 && a < 120 && b - r > 80"
"""The band around it: the same colour, nearly transparent."""


def chart(page: Page, title: str) -> Locator:
    """Find the chart of a metric."""
    escaped = re.escape(title).replace("/", r"\/")  # Playwright writes it as /.../
    return page.get_by_role("figure", name=re.compile(f"^{escaped}: "))


def rows(figure: Locator, test: str) -> list[int]:
    """Count the pixels that pass a test in each row of a drawing."""
    count = """(canvas) => {
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        const passes = TEST;
        const found = new Array(height).fill(0);
        for (let i = 0; i < data.length; i += 4) {
            found[Math.floor(i / 4 / width)] += Number(passes(data.subarray(i, i + 4)));
        }
        return found;
    }"""
    counts: list[int] = figure.locator("canvas").first.evaluate(count.replace("TEST", test))
    return counts


def pixels(figure: Locator, test: str) -> int:
    """Count the pixels of a drawing that pass a test."""
    return sum(rows(figure, test))


def near(color: str) -> str:
    """Return the JavaScript test for pixels of a colour ``#rrggbb``."""
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    close = " && ".join(
        f"Math.abs({name} - {part}) < 12" for name, part in zip("rgb", parts, strict=True)
    )
    return f"([r, g, b, a]) => a > 200 && {close}"


def points(figure: Locator) -> int:
    """Return the number of points in a chart's label."""
    name = figure.get_attribute("aria-label") or ""
    match = re.search(r"(\d+) points", name)
    assert match is not None, name
    return int(match[1])


def hover(figure: Locator, across: float = 0.5, down: float = 0.5) -> Locator:
    """Move the mouse over a part of the drawing; return the readout."""
    at = _place(figure)
    figure.page.mouse.move(*at(across, down))
    return figure.locator(".readout")


def mark(figure: Locator, start: float, end: float) -> None:
    """Zoom by dragging the mouse over a part of the drawing."""
    at = _place(figure)
    mouse = figure.page.mouse
    mouse.move(*at(start, 0.4))
    mouse.down()
    mouse.move(*at(end, 0.6), steps=5)
    mouse.up()


def _place(figure: Locator) -> Callable[[float, float], tuple[float, float]]:
    over = figure.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    return lambda x, y: (box["x"] + x * box["width"], box["y"] + y * box["height"])
