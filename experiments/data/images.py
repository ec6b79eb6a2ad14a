"""Images with one class each: scikit-learn's digits, or a folder of CIFAR or ImageNet in its
standard layout.

Shapes: N images, B images of a batch, H height, W width; three channels, equal for gray images.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from experiments.data.cifar import cifar_10, cifar_100
from experiments.errors import InputError

VALIDATION = 0.2  # share of the digits
SUFFIXES = {".jpg", ".jpeg", ".png"}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUTS = (
    "a folder with CIFAR-10's data_batch_1 to 5, test_batch and batches.meta, CIFAR-100's train,"
    " test and meta, or"
    " ImageNet's train/<class>/ and val/<class>/"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Images that are read on access: `split[indices]` is a batch."""

    labels: np.ndarray  # int32 (N,)
    pixels: Callable[[np.ndarray], np.ndarray]  # indices (B,) -> float32 (B, H, W, 3), from 0 to 1
    mean: np.ndarray  # float32 (3,), over the training images
    std: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "images": (self.pixels(indices) - self.mean) / self.std,
            "labels": self.labels[indices],
        }


@dataclasses.dataclass(frozen=True)
class Images:
    """`shape`: the shape of one image, (H, W, 3). `source`: a description of the data."""

    train: Split
    validation: Split
    classes: int
    shape: tuple[int, int, int]
    source: str


def read(path: str | None, size: int | None = None) -> Images:
    """Returns the images of `path` (None: scikit-learn's digits, shuffled, the last 20 % for
    validation).

    `size`: height and width; only ImageNet allows a choice (default: 224). Each image is resized
    until its shorter side is 8/7 of `size`, and cropped to the centre.
    """
    if path is None:
        return _sized(_digits(), size)
    folder = pathlib.Path(path)
    if not os.path.isdir(path):
        raise InputError(f"data.path: got {path!r}, which is no folder; allowed: {LAYOUTS}")
    if (folder / "data_batch_1").is_file() or (folder / "batches.meta").is_file():
        return _sized(_in_memory(*cifar_10(folder), f"CIFAR-10 ({path})"), size)
    if (folder / "meta").is_file():
        return _sized(_in_memory(*cifar_100(folder), f"CIFAR-100 ({path})"), size)
    if (folder / "train").is_dir():
        return _imagenet(folder, size or 224)
    names = ", ".join(sorted(p.name for p in folder.iterdir())[:5])
    raise InputError(
        f"data.path: got {path!r}, a folder with {names or 'nothing'}; allowed: {LAYOUTS}"
    )


def sample(
    split: Split, seed: int, step: int, batch: int, part: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Returns batch number `step`, a function of the arguments only, or the images `part` of it.
    Each epoch has each image once.

    images, float32 (B, H, W, 3), standardized by the training images; labels, int32 (B,).
    """
    epochs, places = np.divmod(step * batch + np.arange(batch), len(split))
    chosen = [_order(seed, int(e), len(split))[places[epochs == e]] for e in np.unique(epochs)]
    return split[np.concatenate(chosen)[part]]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


def windows(split: Split, batches: int, batch: int) -> Iterator[np.ndarray]:
    """Returns the indices of up to `batches` batches for evaluation: distinct images, spread evenly
    over `split`. The last batch may be short.
    """
    chosen = np.linspace(0, len(split) - 1, min(batches * batch, len(split))).round().astype(int)
    return (chosen[i : i + batch] for i in range(0, len(chosen), batch))


def _sized(images: Images, size: int | None) -> Images:
    if size not in (None, images.shape[0]):
        raise InputError(
            f"data.size: got {size}; allowed for {images.source}: {images.shape[0]}, or leave it"
            " out"
        )
    return images


def _digits() -> Images:
    from sklearn.datasets import load_digits  # takes a second

    flat, labels = load_digits(return_X_y=True)
    gray = np.asarray(flat, np.float32).reshape(-1, 8, 8, 1).repeat(3, -1) * np.float32(255 / 16)
    order = np.random.default_rng(0).permutation(
        len(gray)
    )  # one split for all experiments, whatever their seeds
    train, validation = np.split(order, [round((1 - VALIDATION) * len(gray))])
    of = lambda side: (gray[side], np.asarray(labels, np.int32)[side])
    return _in_memory(
        of(train), of(validation), 10, "scikit-learn's digits (data.path is left out)"
    )


def _in_memory(train, validation, classes: int, source: str) -> Images:
    """Makes Images from two pairs of images (N, H, W, 3), from 0 to 255, and labels (N,)."""
    mean = train[0].mean((0, 1, 2), dtype=np.float64).astype(np.float32) / 255
    std = np.maximum(
        train[0].std((0, 1, 2), dtype=np.float64).astype(np.float32) / 255, 1e-3
    )  # the deviation is 0 if all images have one colour

    def split(images: np.ndarray, labels: np.ndarray) -> Split:
        return Split(labels, lambda indices: images[indices].astype(np.float32) / 255, mean, std)

    return Images(split(*train), split(*validation), classes, train[0].shape[1:], source)


def _imagenet(folder: pathlib.Path, size: int) -> Images:
    found = {side: _classes(folder / side) for side in ("train", "val")}
    names = sorted(found["train"])
    if strange := sorted(set(found["val"]) - set(names)):
        raise InputError(
            f"data.path: got {folder / 'val' / strange[0]}, a class that is not in"
            f" {folder / 'train'}; allowed: classes"
            f" to train on, such as {names[0]}"
        )

    def split(side: str) -> Split:
        pairs = [
            (path, label) for label, name in enumerate(names) for path in found[side].get(name, [])
        ]
        files, labels = zip(*pairs)
        return Split(
            np.array(labels, np.int32),
            lambda indices: _decoded([files[i] for i in indices], size),
            np.array(IMAGENET_MEAN, np.float32),
            np.array(IMAGENET_STD, np.float32),
        )

    return Images(
        split("train"), split("val"), len(names), (size, size, 3), f"ImageNet's layout ({folder})"
    )


def _classes(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    folders = [p for p in sorted(folder.glob("*")) if p.is_dir() and not p.name.startswith(".")]
    if not folders:
        raise InputError(
            f"data.path: {folder} has no folders; allowed: one for each class, with its images"
        )
    found = {}
    for one in folders:
        found[one.name] = sorted(p for p in one.iterdir() if p.suffix.lower() in SUFFIXES)
        if not found[one.name]:
            raise InputError(
                f"data.path: {one} has no images; allowed: at least one of"
                f" {', '.join(sorted(SUFFIXES))}"
            )
    return found


def _decoded(paths: Sequence[pathlib.Path], size: int) -> np.ndarray:
    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(functools.partial(_image, size=size), paths)))


def _image(path: pathlib.Path, size: int) -> np.ndarray:
    """Returns the image as float32 (size, size, 3), from 0 to 1."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except Exception as error:  # Pillow raises any error of its decoders
        raise InputError(
            f"data.path: cannot read {path}: {error}; allowed: a JPEG or PNG image"
        ) from error
    scale = size * 8 / 7 / min(image.size)
    wide, high = (max(size, round(side * scale)) for side in image.size)
    left, top = (wide - size) // 2, (high - size) // 2
    image = image.resize((wide, high), Image.Resampling.BILINEAR).crop(
        (left, top, left + size, top + size)
    )
    return np.asarray(image, np.float32) / 255
