"""Images: batches are a function of seed and step. Digits, CIFAR's pickles, which are read without
a lookup, and ImageNet's folders, which are read on demand; mistakes are told.
"""

import contextlib
import struct

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from experiments.data import cifar
from experiments.data import images as image_data
from experiments.errors import InputError


def test_digits_are_the_default():
    images = image_data.read(None)
    assert (len(images.train), len(images.validation)) == (1438, 359)
    assert (images.classes, images.shape) == (10, (8, 8, 3))
    everything = images.train[np.arange(1438)]
    assert (everything["images"].dtype, everything["labels"].dtype) == (np.float32, np.int32)
    np.testing.assert_allclose(everything["images"].mean((0, 1, 2)), 0, atol=1e-3)
    np.testing.assert_allclose(everything["images"].std((0, 1, 2)), 1, atol=1e-3)
    assert set(images.validation.labels) == set(range(10))


def numbered(n):
    """Images whose first value is their number."""
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    pixels = lambda indices: np.float32(indices)[:, None, None, None] * np.full((2, 2, 3), one)
    return image_data.Split(np.arange(n, dtype=np.int32), pixels, zero, one)


def labels(n, seed, step, size):
    return image_data.sample(numbered(n), seed, step, size)["labels"]


def test_a_batch_is_a_function_of_seed_and_step():
    one = image_data.sample(numbered(100), 1, 7, 16)
    assert (one["images"].shape, one["images"].dtype) == ((16, 2, 2, 3), np.float32)
    np.testing.assert_array_equal(one["images"][:, 0, 0, 0], one["labels"])
    np.testing.assert_array_equal(one["labels"], labels(100, 1, 7, 16))
    for seed, step in ((1, 8), (2, 7)):
        assert (one["labels"] != labels(100, seed, step, 16)).any()


def test_an_epoch_has_each_image_once():
    drawn = np.concatenate([labels(10, 0, step, 4) for step in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert (drawn[:10] != drawn[10:]).any()
    assert len(labels(10, 0, 0, 25)) == 25


def test_evaluation_has_no_image_twice_and_both_ends():
    drawn = lambda n, *sizes: [
        numbered(n)[indices]["labels"] for indices in image_data.windows(numbered(n), *sizes)
    ]
    batches = drawn(100, 3, 4)
    assert list(map(len, batches)) == [4, 4, 4]
    assert (batches[0][0], batches[-1][-1]) == (0, 99)
    short = [batch.tolist() for batch in drawn(5, 9, 2)]
    assert short == [[0, 1], [2, 3], [4]]


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


class Names:
    """A function that a pickle names, and calls."""

    def __init__(self, module: str, name: str, *arguments):
        self.module, self.name, self.arguments = module, name, arguments


class State:
    """The state of a pickled array: the shape and the dtype by which NumPy reads its bytes."""

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
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
    empty = [array, pickled((0,)), pickled(b"b"), b"tR"]
    flags = pickled((3, b"|", None, None, None, -1, -1, x.flags))
    dtype = [pickled(Names("numpy", "dtype", x.dtype, 0, 1)), flags, b"b"]
    rest = [pickled(0), pickled(x.data), b"tb"]
    return b"".join([*empty, b"(", pickled(1), pickled(x.shape), *dtype, *rest])


def write(path, data):
    path.write_bytes(b"\x80\x02" + pickled(data) + b".")


def side(n, seed, classes, key=b"labels"):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n).tolist()
    pixels = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
    return {b"data": pixels, key: labels, b"batch_label": b"of tests"}


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
    want = second[b"data"][1].reshape(3, 32, 32)
    np.testing.assert_allclose(pixels[0, 3, 7], want[:, 3, 7], atol=1e-3)


def test_cifar_100_has_fine_labels(tmp_path):
    names = {b"fine_label_names": [b"class"] * 100, b"coarse_label_names": [b"class"] * 20}
    write(tmp_path / "meta", names)
    for name, n in (("train", 6), ("test", 2)):
        write(tmp_path / name, side(n, n, 100, b"fine_labels") | {b"coarse_labels": [0] * n})
    images = image_data.read(str(tmp_path))
    assert (len(images.train), len(images.validation), images.classes) == (6, 2, 100)
    assert images.train.labels.tolist() == side(6, 6, 100, b"fine_labels")[b"fine_labels"]


def put(**values):
    """Writes the third file with other values."""
    values = {name.encode(): value for name, value in values.items()}
    return lambda path: write(path, side(4, 3, 10) | values)


def zeros(values, dtype):
    return put(data=np.zeros((4, values), dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.unlink(), "cannot read .*data_batch_3: No such file"),
        (lambda p: p.write_bytes(p.read_bytes()[:5000]), "data_batch_3 is not CIFAR's"),
        (lambda p: p.write_bytes(b""), "data_batch_3 is not CIFAR's"),
        (lambda p: write(p, [1]), "data_batch_3 holds a list; allowed: a dict"),
        (lambda p: write(p, {b"labels": [1]}), "data_batch_3 has NoneType for data"),
        (zeros(3000, np.uint8), r"uint8 \(4, 3000\) .*allowed: uint8 \(N, 3072\)"),
        (zeros(3072, np.int32), "an array of i4, and only u1 is allowed"),
        (put(labels=[0, 1, 10, 2]), "has a label 10; allowed: 0 to 9"),
        (put(labels=[0, 1]), "has 2 of them for labels; allowed: 4 whole"),
        (put(labels=[b"a"] * 4), "for labels; allowed: 4 whole numbers"),
        (lambda p: write(p.with_name("batches.meta"), {}), "batches.meta has None for label_names"),
    ],
)
def test_a_broken_cifar_is_told(cifar_10, change, message):
    change(cifar_10 / "data_batch_3")
    with pytest.raises(InputError, match=message):
        image_data.read(str(cifar_10))


def test_a_pickle_cannot_run_code(cifar_10, tmp_path):
    calls = Names("posix", "mkdir", str(tmp_path / "made").encode())
    write(cifar_10 / "data_batch_1", {b"data": calls})
    message = r"data_batch_1 is not CIFAR's: it names posix\.mkdir, and only arrays"
    with pytest.raises(InputError, match=message):
        image_data.read(str(cifar_10))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (State((1,), b"O8", 0, b"\1" * 8), "an array of O8"),  # bytes as pointers, by the flags
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
