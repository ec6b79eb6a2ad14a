"""ImageNet's folders: read as they are asked for, and mistakes are told."""

import numpy as np
import pytest
from PIL import Image

from experiments.data import images as image_data
from experiments.errors import InputError


@pytest.fixture
def imagenet(tmp_path):
    colours = {"train/b/1.JPEG": 0, "train/a/1.png": 100, "train/a/2.jpg": 50, "val/b/1.jpeg": 200}
    for place, colour in colours.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        mode, filled = ("RGB", (colour, 0, 0)) if colour else ("L", 0)
        Image.new(mode, (40, 20 + colour // 10), filled).save(tmp_path / place)
    (tmp_path / "train/a/notes.txt").write_text("no image")
    return tmp_path


def test_imagenet(imagenet):
    images = image_data.read(str(imagenet), 16)
    assert (images.classes, images.shape) == (2, (16, 16, 3))
    assert images.train.labels.tolist() == [0, 0, 1]
    assert images.validation.labels.tolist() == [1]  # "b", though the only class of val
    got = images.train[np.array([2, 0])]
    assert got["images"].shape == (2, 16, 16, 3)
    pixels = got["images"] * images.train.std + images.train.mean
    np.testing.assert_allclose(pixels[0], 0, atol=1e-6)
    np.testing.assert_allclose(pixels[1], np.full((16, 16, 3), [100 / 255, 0, 0]), atol=1e-6)


def test_an_image_is_cropped_in_the_centre(tmp_path):
    columns = np.zeros((64, 256, 3), np.uint8)
    columns[:, 96:160] = 255  # a square in the middle
    Image.fromarray(columns).save(tmp_path / "wide.png")
    got = image_data._image(tmp_path / "wide.png", 56)  # the shorter side is 64 already
    np.testing.assert_array_equal(got, np.ones((56, 56, 3), np.float32))


def renamed(old, new):
    return lambda f: (f / old).rename(f / new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "val/c").mkdir(), "val/c has no images; allowed: at least one of .*png"),
        (renamed("val/b", "val/c"), "got .*val/c, a class that is not in .*train"),
        (renamed("val", "test"), "val has no folders"),
        (renamed("train", "training"), "a folder with training, val; allowed:"),
    ],
)
def test_a_broken_imagenet_is_told(imagenet, change, message):
    change(imagenet)
    with pytest.raises(InputError, match=message):
        image_data.read(str(imagenet))


@pytest.mark.parametrize("content", [b"", b"text", b"\xff\xd8\xff\xe0 cut"])
def test_an_unreadable_image_is_told_when_it_is_asked_for(imagenet, content):
    (imagenet / "train/b/1.JPEG").write_bytes(content)
    images = image_data.read(str(imagenet), 16)
    message = r"data\.path: cannot read .*train/b/1\.JPEG: .*; allowed: a JPEG or PNG"
    with pytest.raises(InputError, match=message):
        images.train[np.array([2])]
