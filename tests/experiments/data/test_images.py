"""Images: digits, CIFAR's pickles and ImageNet's folders; batches are a function of seed and step;
mistakes are told.
"""

import contextlib
import pickletools
import struct

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from experiments.command.load import FOLDER, load
from experiments.config.images import ImageConfig
from experiments.data import cifar
from experiments.data import images as image_data
from experiments.errors import InputError

pytestmark = pytest.mark.jax_defaults


@pytest.mark.parametrize("path", sorted(FOLDER.glob("resnet*.toml")), ids=lambda p: p.stem)
def test_committed_configs_are_valid_and_say_how_to_run_them(path):
    assert load(path.stem, (), ImageConfig) == load(str(path), (), ImageConfig)
    header = path.read_text().split("[model]")[0]
    assert f"python -m experiments.train_images {path.stem}" in header
    assert f"--out runs/{path.stem}" in header


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.depth=18"], r"model\.depth: got 18; allowed: one of 14, 26 or 50"),
        (
            ["model.widht=8"],
            r"model\.widht: unknown key, got 8; did you mean model\.width\?; allowed: depth, width",
        ),
        (
            ["plan.budget=1"],
            r"plan: unknown key, got \{'budget': 1\}.*; allowed: train, optimizer, model, data",
        ),
        (
            ["train.microbatches=5"],
            r"train\.microbatches: got 5; allowed: a divisor of train\.batch, 64",
        ),
        (
            ["train.microbatches=64"],
            r"train\.microbatches: got 64; allowed: at most half of train\.batch, 64",
        ),
        (["optimizer.accumulation=none"], r"train\.microbatches: got 4; allowed with .* 'none': 1"),
        (
            ["optimizer.final_ratio=1.5"],
            r"optimizer\.final_ratio: got 1\.5; allowed: at most 1",
        ),
        (
            ["optimizer.warmup=999"],
            r"optimizer\.warmup: got 999; allowed: at most train\.steps, 300",
        ),
    ],
)
def test_a_mistake_in_the_settings_is_told(overrides, message):
    with pytest.raises(InputError, match=message):
        load("resnet50_digits", overrides, ImageConfig)


def test_digits_are_the_default():
    images = image_data.read(None)
    assert (len(images.train), len(images.validation)) == (1438, 359)
    assert (images.classes, images.shape) == (10, (8, 8, 3))
    everything = images.train[np.arange(1438)]
    assert (everything["images"].dtype, everything["labels"].dtype) == (np.float32, np.int32)
    np.testing.assert_allclose(everything["images"].mean((0, 1, 2)), 0, atol=1e-3)
    np.testing.assert_allclose(everything["images"].std((0, 1, 2)), 1, atol=1e-3)
    assert set(images.validation.labels) == set(range(10))
    with pytest.raises(
        InputError, match=r"data\.size: got 224; allowed for scikit-learn's digits .*: 8, or leave"
    ):
        image_data.read(None, 224)


def numbered(n):
    """Images whose first value is their number."""
    pixels = lambda indices: (
        np.float32(indices)[:, None, None, None] * np.ones((1, 2, 2, 3), np.float32)
    )
    return image_data.Split(
        np.arange(n, dtype=np.int32), pixels, np.zeros(3, np.float32), np.ones(3, np.float32)
    )


def test_a_batch_is_a_function_of_seed_and_step():
    split = numbered(100)
    one = image_data.sample(split, 1, 7, 16)
    assert (one["images"].shape, one["images"].dtype) == ((16, 2, 2, 3), np.float32)
    np.testing.assert_array_equal(one["images"][:, 0, 0, 0], one["labels"])
    np.testing.assert_array_equal(one["labels"], image_data.sample(split, 1, 7, 16)["labels"])
    assert (one["labels"] != image_data.sample(split, 1, 8, 16)["labels"]).any()
    assert (one["labels"] != image_data.sample(split, 2, 7, 16)["labels"]).any()


def test_an_epoch_has_each_image_once():
    drawn = np.concatenate(
        [image_data.sample(numbered(10), 0, step, 4)["labels"] for step in range(5)]
    )
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert (drawn[:10] != drawn[10:]).any()
    assert len(image_data.sample(numbered(10), 0, 0, 25)["labels"]) == 25


def test_evaluation_has_no_image_twice_and_both_ends():
    batches = [batch["labels"] for batch in image_data.windows(numbered(100), 3, 4)]
    assert [len(labels) for labels in batches] == [4, 4, 4]
    assert (batches[0][0], batches[-1][-1]) == (0, 99)
    short = [batch["labels"].tolist() for batch in image_data.windows(numbered(5), 9, 2)]
    assert short == [[0, 1], [2, 3], [4]]


class Names:
    """A function that a pickle names, and calls."""

    def __init__(self, module: str, name: str, *arguments):
        self.module, self.name, self.arguments = module, name, arguments


class State:
    """An array's: what NumPy is told to make of bytes."""

    def __init__(self, shape: tuple, dtype: bytes, flags: int, data):
        self.shape, self.dtype, self.flags, self.data = shape, dtype, flags, data


def pickled(x) -> bytes:
    """As Python 2 and its NumPy wrote it, by protocol 2: texts are byte strings, flags numbers."""
    if x is None:
        return b"N"
    if isinstance(x, int):
        return b"J" + struct.pack("<i", x)
    if isinstance(x, bytes):
        return b"T" + struct.pack("<i", len(x)) + x
    if isinstance(x, tuple):
        return b"(" + b"".join(map(pickled, x)) + b"t"
    if isinstance(x, list):
        return b"](" + b"".join(map(pickled, x)) + b"e"
    if isinstance(x, dict):
        return b"}(" + b"".join(pickled(k) + pickled(v) for k, v in x.items()) + b"u"
    if isinstance(x, Names):
        return f"c{x.module}\n{x.name}\n".encode() + pickled(x.arguments) + b"R"
    if isinstance(x, np.ndarray):
        return pickled(State(x.shape, x.dtype.str[1:].encode(), 0, x.tobytes()))
    dtype = (
        pickled(Names("numpy", "dtype", x.dtype, 0, 1))
        + pickled((3, b"|", None, None, None, -1, -1, x.flags))
        + b"b"
    )
    empty = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
        + pickled((0,))
        + pickled(b"b")
        + b"tR"
    )
    return (
        empty + b"(" + pickled(1) + pickled(x.shape) + dtype + pickled(0) + pickled(x.data) + b"tb"
    )


def write(path, data):
    path.write_bytes(b"\x80\x02" + pickled(data) + b".")


def side(n, seed, classes, key=b"labels"):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n).tolist()
    return {
        b"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8),
        key: labels,
        b"batch_label": b"of tests",
    }


@pytest.fixture
def cifar_10(tmp_path):
    write(tmp_path / "batches.meta", {b"label_names": [b"class"] * 10})
    for i in range(1, 6):
        write(tmp_path / f"data_batch_{i}", side(4, i, 10))
    write(tmp_path / "test_batch", side(3, 9, 10))
    return tmp_path


def test_cifar_10(cifar_10):
    images = image_data.read(str(cifar_10), 32)
    assert (len(images.train), len(images.validation), images.classes) == (20, 3, 10)
    assert images.shape == (32, 32, 3)
    second = side(4, 2, 10)
    got = images.train[np.array([5])]  # the second file's second image
    assert got["labels"] == second[b"labels"][1]
    pixels = (got["images"] * images.train.std + images.train.mean) * 255
    np.testing.assert_allclose(
        pixels[0, 3, 7], second[b"data"][1].reshape(3, 32, 32)[:, 3, 7], atol=1e-3
    )


def test_cifar_100_has_fine_labels(tmp_path):
    write(
        tmp_path / "meta",
        {b"fine_label_names": [b"class"] * 100, b"coarse_label_names": [b"class"] * 20},
    )
    for name, n in (("train", 6), ("test", 2)):
        write(tmp_path / name, side(n, n, 100, b"fine_labels") | {b"coarse_labels": [0] * n})
    images = image_data.read(str(tmp_path))
    assert (len(images.train), len(images.validation), images.classes) == (6, 2, 100)
    assert images.train.labels.tolist() == side(6, 6, 100, b"fine_labels")[b"fine_labels"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p.unlink(),
            r"data\.path: cannot read .*data_batch_3: No such file.*; allowed: a folder with all",
        ),
        (
            lambda p: p.write_bytes(p.read_bytes()[:5000]),
            r"data_batch_3 is not CIFAR's: .*; allowed: a pickle of",
        ),
        (lambda p: p.write_bytes(b""), r"data_batch_3 is not CIFAR's: .*; allowed: a pickle of"),
        (lambda p: write(p, [1]), r"data_batch_3 holds a list; allowed: a dict"),
        (
            lambda p: write(p, {b"labels": [1]}),
            r"data_batch_3 has NoneType for data; allowed: uint8 \(N, 3072\)",
        ),
        (
            lambda p: write(p, side(4, 3, 10) | {b"data": np.zeros((4, 3000), np.uint8)}),
            r"data_batch_3 has uint8 \(4, 3000\) for data; allowed: uint8 \(N, 3072\)",
        ),
        (
            lambda p: write(p, side(4, 3, 10) | {b"data": np.zeros((4, 3072), np.int32)}),
            r"data_batch_3 is not CIFAR's: an array of i4, and only u1 is allowed",
        ),
        (
            lambda p: write(p, side(4, 3, 10) | {b"labels": [0, 1, 10, 2]}),
            r"has a label 10; allowed: 0 to 9",
        ),
        (
            lambda p: write(p, side(4, 3, 10) | {b"labels": [0, 1]}),
            r"has 2 of them for labels; allowed: 4 whole",
        ),
        (
            lambda p: write(p, side(4, 3, 10) | {b"labels": [b"a"] * 4}),
            r"for labels; allowed: 4 whole numbers",
        ),
        (
            lambda p: write(p.with_name("batches.meta"), {}),
            r"batches\.meta has None for label_names; allowed: a list",
        ),
    ],
)
def test_a_broken_cifar_is_told(cifar_10, change, message):
    change(cifar_10 / "data_batch_3")
    with pytest.raises(InputError, match=message):
        image_data.read(str(cifar_10))


def test_what_is_written_is_what_python_reads(tmp_path):
    write(tmp_path / "one", data := side(3, 0, 10))
    operations = pickletools.genops((tmp_path / "one").read_bytes())
    names = [name for operation, name, _ in operations if operation.name == "GLOBAL"]
    assert names == ["numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"]
    found = cifar._load(tmp_path / "one")
    assert found.keys() == data.keys()
    np.testing.assert_array_equal(found[b"data"], data[b"data"])


def test_a_pickle_cannot_run_code(cifar_10, tmp_path):
    write(
        cifar_10 / "data_batch_1",
        {b"data": Names("posix", "mkdir", str(tmp_path / "made").encode())},
    )
    with pytest.raises(
        InputError, match=r"data_batch_1 is not CIFAR's: it names posix\.mkdir, and only arrays"
    ):
        image_data.read(str(cifar_10))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            State((1,), b"O8", 0, b"\1" * 8),
            "an array of O8, and only u1 is allowed",
        ),  # bytes as pointers, by the flags
        (State((1,), b"O8", 63, [3]), "an array of O8"),
        (State((4, 3072), b"u1", 0, b"short"), "cannot reshape"),
        (State((4, 3072), b"u1", 0, [1, 2]), "an array whose values are a list"),
        (State((2**30, 2**30), b"u1", 0, b""), "is not CIFAR's"),
        (Names("numpy", "ndarray", (4, 3072)), "an array without its values"),
    ],
)
def test_an_array_that_numpy_should_not_make_is_refused(state, message, cifar_10):
    write(cifar_10 / "data_batch_1", side(4, 1, 10) | {b"data": state})
    with pytest.raises(InputError, match=rf"data_batch_1 .*{message}"):
        image_data.read(str(cifar_10))


@hypothesis.settings(
    max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(st.data())
def test_damaged_bytes_are_an_error_or_still_cifar(cifar_10, data):
    path = cifar_10 / "batches.meta"
    write(path, {b"label_names": [b"class"] * 3, b"data": np.zeros((1, 2), np.uint8)})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(whole[: data.draw(st.integers(1, len(whole)))]))
    with contextlib.suppress(InputError):  # and nothing else
        assert isinstance(cifar._load(path), dict)


@pytest.fixture
def imagenet(tmp_path):
    for place, colour in (
        ("train/b/1.JPEG", 0),
        ("train/a/1.png", 100),
        ("train/a/2.jpg", 50),
        ("val/b/1.jpeg", 200),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new(
            "RGB" if colour else "L", (40, 20 + colour // 10), colour and (colour, 0, 0)
        ).save(tmp_path / place)
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
    np.testing.assert_allclose(
        pixels[1], np.broadcast_to([100 / 255, 0, 0], (16, 16, 3)), atol=1e-6
    )


def test_an_image_is_cropped_in_the_centre(tmp_path):
    columns = np.zeros((64, 256, 3), np.uint8)
    columns[:, 96:160] = 255  # a square in the middle
    Image.fromarray(columns).save(tmp_path / "wide.png")
    got = image_data._image(tmp_path / "wide.png", 56)  # the shorter side is 64 already
    np.testing.assert_array_equal(got, np.ones((56, 56, 3), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: (f / "val/c").mkdir(),
            r"val/c has no images; allowed: at least one of \.jpeg, \.jpg, \.png",
        ),
        (lambda f: (f / "train/c").mkdir(), r"train/c has no images"),
        (
            lambda f: (f / "val/b").rename(f / "val/c"),
            r"got .*val/c, a class that is not in .*train; allowed: classes",
        ),
        (
            lambda f: (f / "val").rename(f / "test"),
            r"val has no folders; allowed: one for each class",
        ),
        (
            lambda f: (f / "train").rename(f / "training"),
            r"a folder with training, val; allowed: a folder with CIFAR",
        ),
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
    with pytest.raises(
        InputError, match=r"data\.path: cannot read .*train/b/1\.JPEG: .*; allowed: a JPEG or PNG"
    ):
        images.train[np.array([2])]


def test_a_folder_that_is_not_there():
    with pytest.raises(
        InputError, match=r"data\.path: got '/nowhere', which is no folder; allowed: a folder with"
    ):
        image_data.read("/nowhere")
