"""Images of every library that `report_image` accepts, decoded by Pillow."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from zerolab.errors import ConfigError
from zerolab.extensions.media.images import image_items

pytestmark = pytest.mark.needs_extension("media")

RANDOM = np.random.default_rng(0)
GRAY = RANDOM.integers(0, 256, (7, 5), dtype=np.uint8)
COLOR = RANDOM.integers(0, 256, (7, 5, 3), dtype=np.uint8)
ALPHA = RANDOM.integers(0, 256, (7, 5, 4), dtype=np.uint8)


def decoded(image: Any) -> np.ndarray:
    (item,) = image_items(image)
    assert isinstance(item.content, bytes)
    assert item.suffix == ".png"
    return np.asarray(Image.open(io.BytesIO(item.content)))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param(GRAY, GRAY, id="gray"),
        pytest.param(GRAY[:, :, None], GRAY, id="one channel"),
        pytest.param(COLOR, COLOR, id="color"),
        pytest.param(COLOR[:, ::-1], COLOR[:, ::-1], id="strides"),
        pytest.param(ALPHA, ALPHA, id="alpha"),
        pytest.param(COLOR.transpose(2, 0, 1), COLOR, id="channels first"),
        pytest.param(COLOR / 255.0, COLOR, id="floats"),
        pytest.param(COLOR.astype(np.int64), COLOR, id="integers"),
        pytest.param(GRAY > 128, np.where(GRAY > 128, 255, 0), id="booleans"),
        pytest.param([[0.0, 2.0], [-1.0, float("nan")]], [[0, 255], [0, 0]], id="clipped"),
        pytest.param(torch.from_numpy(COLOR).permute(2, 0, 1), COLOR, id="torch"),
        pytest.param(torch.ones(3, 2, 3, requires_grad=True), np.full((2, 3, 3), 255), id="grad"),
        pytest.param(torch.ones(1, 2, 3).bfloat16(), np.full((2, 3), 255), id="bfloat16"),
        pytest.param(Image.fromarray(COLOR), COLOR, id="pillow"),
        pytest.param(Image.fromarray(ALPHA), ALPHA, id="pillow alpha"),
    ],
)
def test_pixels_are_encoded_exactly(image: Any, expected: Any) -> None:
    np.testing.assert_array_equal(decoded(image), np.asarray(expected))


def test_figure_of_matplotlib_is_drawn() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([0, 1])
    assert decoded(figure).shape[2] == 4
    assert decoded(axes).shape[2] == 4
    plt.close(figure)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".webp"])
def test_image_file_is_kept_as_it_is(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"image{suffix}"
    Image.fromarray(COLOR).save(path)
    (item,) = image_items(str(path), "a caption")
    assert item.content == path.read_bytes()
    assert item.suffix == suffix
    assert item.metadata == {"caption": "a caption"}


def test_batches_and_lists_have_one_item_per_image() -> None:
    batch = torch.zeros(3, 1, 4, 5)
    items = image_items(batch, ["a", "b", "c"])
    assert [item.metadata["caption"] for item in items] == ["a", "b", "c"]
    assert [item.metadata["width"] for item in items] == [5, 5, 5]
    assert len(image_items([GRAY, COLOR])) == 2


@pytest.mark.parametrize(
    ("image", "caption", "problem"),
    [
        (np.zeros((2, 3, 5)), None, r"shape: must be \(H, W\)"),
        (np.zeros((0, 3)), None, "shape: must be"),
        (object(), None, "must be an array, an image of PIL, a figure of matplotlib or a path"),
        ("missing.png", None, "missing.png: must be a file that can be read"),
        (__file__, None, "must be a PNG, JPEG, GIF or WebP file"),
        ([GRAY, GRAY], ["a"], "caption: must be one text, or 2, got 1"),
    ],
)
def test_what_is_no_image_is_named(image: Any, caption: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        image_items(image, caption)
