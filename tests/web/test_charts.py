"""Charts: zoom, logarithmic axes, colours, selected trials, readouts."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.drawings import BLUE, chart, hover, mark, near, pixels, points, rows
from tests.web.stage import LONG_STEPS, TRIALS, Stage

pytestmark = [pytest.mark.browser, pytest.mark.processes]

PART = "batches=2000-2100"


def batch_under_the_mouse(page: Page, title: str) -> int:
    """Return the batch in the readout in the middle of a chart."""
    readout = until("the readout has a batch", lambda: hover(chart(page, title)).text_content(),
                 lambda text: "batch " in (text or ""))  # fmt: skip
    match = re.search(r"batch ([\d,]+)", readout or "")
    assert match is not None
    return int(match[1].replace(",", ""))


def entry(page: Page, trial: int) -> Locator:
    """Return a trial's row of the legend."""
    link = page.get_by_role("link", name=f"trial {trial}", exact=True)
    return page.get_by_label("trials").get_by_role("listitem").filter(has=link)


def test_zoom_loads_more_points(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}")
    wave = chart(page, "training: wave")
    expect(wave).to_have_accessible_name(re.compile(rf"points to batch {LONG_STEPS}$"))
    all_points = points(wave)
    assert all_points <= 400
    mark(wave, 0.25, 0.255 + 0.02)
    reset = page.get_by_role("button", name="reset zoom")
    expect(reset).to_be_visible()
    until("more points", lambda: points(wave), lambda value: value > all_points + 200)
    first, last = map(int, re.findall(r"batches=(\d+)-(\d+)", page.url)[0])
    assert 4500 < first < last < 6000
    assert first <= batch_under_the_mouse(page, "training: wave") <= last
    reset.click()
    expect(reset).to_have_count(0)
    until("the points of the full range", lambda: points(wave), lambda value: value == all_points)
    assert "batches" not in page.url


def test_zoom_to_hundred_batches_shows_each(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?{PART}")
    wave = chart(page, "training: wave")
    (trial,) = stage.trials(stage.long)
    path = f"/trials/{trial}/metrics"
    (metric,) = stage.played.get(path, names="wave", max_points=400)["metrics"]
    outside = [step for step, _ in metric["points"] if not 2000 <= step <= 2100]
    until("every batch", lambda: points(wave), lambda value: value == len(outside) + 101)
    readout = hover(wave)
    expect(readout).to_contain_text(re.compile(r"^-?0?\S+ · batch 2,0\d\d$"))
    expect(readout).not_to_contain_text("(")  # a single batch has no band


def test_log_axis_and_zoom_survive_reload(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?{PART}")
    expect(chart(page, "training: wave")).to_be_visible()
    page.get_by_label("log scale").check()
    for _ in range(2):
        for title in ("training: falling", "training: wave", "training: depth"):
            assert 2000 <= batch_under_the_mouse(page, title) <= 2100
        expect(page.get_by_role("button", name="batches 2,000 to 2,100")).to_be_visible()
        expect(page.get_by_label("log scale")).to_be_checked()
        page.reload()


def test_log_axis_names_omitted_values(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?log=1")
    expect(chart(page, "training: wave")).to_contain_text("values ≤ 0 not shown")
    expect(chart(page, "training: depth")).to_contain_text("linear: no values above 0")
    expect(chart(page, "training: falling").locator(".warn")).to_have_count(0)


def test_log_axis_fits_the_data(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?log=1")
    falling = chart(page, "training: falling")  # from 1 to 0.2

    def share() -> float:
        counts = rows(falling, BLUE)
        drawn = [number for number, count in enumerate(counts) if count]
        return (drawn[-1] - drawn[0]) / len(counts) if drawn else 0.0

    until("the curve fills its chart", share, lambda value: value > 0.6)


NINTH = "#d6336c"


def test_trial_colour_is_stable_in_charts(stage: Stage, spectator: Watched) -> None:
    ids = stage.trials(stage.sweep)
    looks = set()
    trial = ids[8]
    for selected in ([], ids[:3], ids[4:12], ids[20:40]):
        chosen = ",".join(map(str, sorted({trial, *selected})))
        page = spectator.show(f"#/experiments/{stage.sweep}/curves/{chosen}")
        entry = (
            page.get_by_label("trials").get_by_role("listitem").filter(has_text=f"trial {trial} ")
        )
        line = entry.locator("line")
        color = line.get_attribute("stroke") or ""
        looks.add((color, line.get_attribute("stroke-dasharray")))
        loss = chart(page, "training: loss")
        until("its colour is drawn", lambda: pixels(loss, near(color)), lambda value: value > 20)  # noqa: B023 - asked at once
    assert looks == {(NINTH, "")}  # by age: later trials do not change it


def test_twelve_ticked_trials_are_twelve_curves(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/trials")
    boxes = page.get_by_role("checkbox")
    expect(boxes).to_have_count(TRIALS)
    for index in range(0, 24, 2):
        boxes.nth(index).check()
    page.get_by_role("link", name="curves of 12").click()
    expect(chart(page, "training: loss")).to_have_accessible_name(re.compile(": 12 curves, "))


def test_too_many_selected_trials_show_best(stage: Stage, spectator: Watched) -> None:
    ids = stage.trials(stage.sweep)
    page = spectator.show(f"#/experiments/{stage.sweep}/curves/{','.join(map(str, ids))}")
    expect(chart(page, "training: loss")).to_have_accessible_name(re.compile(": 50 curves, "))
    expect(page.locator(".warn")).to_contain_text(f"the best 50 of {TRIALS} selected trials")
    drawn = page.get_by_label("trials").get_by_role("link").all_inner_texts()
    assert {int(text.split()[1]) for text in drawn} == set(stage.best(50))


def test_best_ten_trials_are_drawn_by_default(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}")
    expect(chart(page, "training: loss")).to_have_accessible_name(re.compile(": 10 curves, "))
    drawn = page.get_by_label("trials").get_by_role("link").all_inner_texts()
    assert {int(text.split()[1]) for text in drawn} == set(stage.best(10))


def test_curve_label_has_trial_and_hparams(stage: Stage, spectator: Watched) -> None:
    best = stage.best(1)[0]
    rate = next(t for t in stage.played.trials(stage.sweep) if t["id"] == best)["hparams"]
    page = spectator.show(f"#/experiments/{stage.sweep}")
    expect(entry(page, best)).to_contain_text(f"lr {rate['optimizer']['lr']}")
    loss = chart(page, "training: loss")
    expect(loss).to_be_visible()
    height = "figure => figure.getBoundingClientRect().height"
    before = loss.evaluate(height)
    readout = hover(loss, 0.5, 0.98)  # the lowest is the best
    expect(readout).to_contain_text(f"trial {best} (lr {rate['optimizer']['lr']})")
    assert loss.evaluate(height) == before, "the readout moves nothing"
    expect(page.locator(".u-legend")).to_have_count(0)


def test_counters_are_collapsed(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}")
    expect(chart(page, "training: loss")).to_be_visible()
    summary = page.get_by_text("counters")
    expect(summary).to_contain_text("loss_scale 65,536")
    expect(chart(page, "training: loss_scale")).to_have_count(0)
    summary.click()
    expect(chart(page, "training: loss_scale")).to_be_visible()


def test_single_point_metric_is_a_value(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}")
    values = page.get_by_role("region", name="metrics that were reported once")
    (best,) = stage.best(1)
    row = values.get_by_role("row").filter(
        has=page.get_by_role("link", name=f"trial {best}", exact=True)
    )
    expect(row.locator("[data-name='validation: loss']")).to_contain_text("1 batch 20")
    expect(values.get_by_role("row")).to_have_count(11)
    expect(chart(page, "training: loss")).to_be_visible()
    expect(chart(page, "validation: loss")).to_have_count(0)
    spectator.show(f"#/trials/{best}")
    expect(values.get_by_role("row").nth(1)).to_have_text("validation: loss1batch 20")


def test_chart_can_be_enlarged(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}")
    wave = chart(page, "training: wave")
    expect(wave).to_be_visible()
    small = wave.bounding_box()
    page.get_by_role("button", name="enlarge training: wave").click()
    expect(wave).to_have_class(re.compile("large"))
    large = wave.bounding_box()
    assert small is not None
    assert large is not None
    assert large["width"] > 1.5 * small["width"]
    assert large["height"] > 1.5 * small["height"]


def test_smoothed_curve_shows_raw_values(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?{PART}&metric=spiky")
    spiky = chart(page, "training: spiky")
    expect(page.get_by_role("figure")).to_have_count(1)

    def height() -> int:
        drawn = [number for number, count in enumerate(rows(spiky, BLUE)) if count]
        return drawn[-1] - drawn[0] if drawn else 0

    wild = until("it goes up and down", height, lambda value: value > 100)
    page.get_by_label("smooth").select_option("0.99")
    until("it hardly moves at the end", lambda: _right_half(spiky), lambda value: value < wild / 4)
    expect(hover(spiky)).to_contain_text(re.compile(r"^[01] · batch "))
    page.reload()
    expect(page.get_by_label("smooth")).to_have_value("0.99")


def _right_half(figure: Locator) -> int:
    """Return the height of the line in the right half of the drawing, in pixels."""
    extent: int = figure.locator("canvas").evaluate(f"""(canvas) => {{
        const {{ width, height }} = canvas;
        const half = Math.floor(width / 2);
        const {{ data }} = canvas.getContext("2d").getImageData(half, 0, width - half, height);
        const passes = {BLUE};
        let [first, last] = [height, 0];
        for (let i = 0; i < data.length; i += 4) {{
            if (!passes(data.subarray(i, i + 4))) continue;
            const row = Math.floor(i / 4 / (width - half));
            first = Math.min(first, row);
            last = Math.max(last, row);
        }}
        return Math.max(0, last - first);
    }}""")
    return extent


def test_ignore_outliers_rescales_axis(stage: Stage, spectator: Watched) -> None:
    part = "batches=9900-10100"
    page = spectator.show(f"#/experiments/{stage.long}/curves?{part}&metric=spiky")
    spiky = chart(page, "training: spiky")

    def tall() -> int:
        """Return the number of rows that the line crosses often."""
        return sum(count > 40 for count in rows(spiky, BLUE))

    until("the line is flat below its spike", lambda: pixels(spiky, BLUE), lambda n: n > 100)
    flat = tall()
    page.get_by_label("ignore outliers").check()
    until("the line fills the chart", tall, lambda value: value > flat + 50)


def test_metrics_filter_by_substring(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?metric=wav")
    expect(chart(page, "training: wave")).to_be_visible()
    expect(page.get_by_role("figure")).to_have_count(1)
    page.get_by_label("search metrics").fill("nothing")
    expect(page.get_by_text("No matches.")).to_be_visible()
    page.get_by_label("search metrics").fill("")
    expect(page.get_by_role("figure")).to_have_count(4)


def test_chart_keyboard_controls(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}?metric=loss")
    curves = page.get_by_role("application", name=re.compile("^curves of training: loss: "))
    curves.focus()
    curves.press("ArrowRight")
    readout = chart(page, "training: loss").locator(".readout")
    expect(readout).to_contain_text("batch 1 ")
    curves.press("ArrowRight")
    expect(readout).to_contain_text("batch 2 ")
    first = readout.inner_text().split("trial ")[1].split()[0]
    curves.press("ArrowDown")
    expect(readout).not_to_contain_text(f"trial {first} ")
    curves.press("+")
    expect(page.get_by_role("button", name=re.compile("^batches "))).to_be_visible()
    curves.press("Escape")
    expect(page.get_by_role("button", name=re.compile("^batches "))).to_have_count(0)


def test_value_range_is_editable_and_stored(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?metric=falling")
    falling = chart(page, "training: falling")  # from 1 to 0.2
    page.get_by_role("button", name="range of values of training: falling").click()
    page.get_by_label("minimum of").fill("0.9")
    page.get_by_label("maximum of").fill("0.5")
    expect(falling).to_contain_text("less than maximum")
    page.get_by_label("minimum of").fill("0")
    page.get_by_label("maximum of").fill("10")
    falling.get_by_role("button", name="Apply").click()

    def share() -> float:
        counts = rows(falling, BLUE)
        drawn = [number for number, count in enumerate(counts) if count]
        return (drawn[-1] - drawn[0]) / len(counts) if drawn else 1.0

    until("the curve lies low in its chart", share, lambda value: value < 0.15)
    page.reload()
    until("it still does", share, lambda value: value < 0.15)
    falling.get_by_role("button", name="Auto").click()
    until("the curve fills its chart", share, lambda value: value > 0.5)


def test_curves_over_time_and_clock(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/curves?metric=falling")
    falling = chart(page, "training: falling")
    expect(falling).to_have_accessible_name(re.compile("to batch 20000"))
    page.get_by_label("x axis", exact=True).select_option("time")
    expect(falling).to_have_accessible_name(re.compile(r"to after 5 h 3\d min"))
    expect(hover(falling)).to_contain_text(re.compile(r"after .* · batch \d"))
    mark(falling, 0.3, 0.6)
    expect(page.get_by_role("button", name=re.compile("after .* to after "))).to_be_visible()
    page.get_by_label("x axis", exact=True).select_option("clock")
    expect(falling).to_have_accessible_name(re.compile(r"to 2027-01-\d\d "))
    page.reload()
    expect(page.get_by_label("x axis", exact=True)).to_have_value("clock")
    until("the curve is drawn", lambda: pixels(falling, BLUE), lambda value: value > 100)
