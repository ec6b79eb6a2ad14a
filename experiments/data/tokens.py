"""Encodes examples for BERT, as [CLS] text [SEP] or [CLS] text [SEP] text [SEP], then [PAD]; and
makes batches of them.

The tokens 0 to 255 are bytes of text; the special tokens follow.
Shapes: B batch, S sequence.
"""

import functools
from collections.abc import Iterator

import numpy as np

from experiments.data.glue import Examples

MASK, CLS, SEP, PAD = 256, 257, 258, 259  # after the bytes
VOCAB = PAD + 1


def encode(texts: tuple[bytes, ...], sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and segments, each int32 (S,). The segment is 0 up to the first [SEP], 1 from
    there to the second [SEP], and 0 for padding.

    A text that is too long is cut at its end. Of two texts, the longer one is cut byte by byte, as
    in Devlin et al.'s code.
    """
    tokens, segments = np.full(sequence, PAD, np.int32), np.zeros(sequence, np.int32)
    tokens[0], end = CLS, 1
    for segment, text in enumerate(_shortened(texts, sequence - 1 - len(texts))):
        begin, end = end, end + len(text) + 1
        tokens[begin : end - 1], tokens[end - 1] = np.frombuffer(text, np.uint8), SEP
        segments[begin:end] = segment
    return tokens, segments


def _shortened(texts: tuple[bytes, ...], room: int) -> tuple[bytes, ...]:
    if len(texts) == 1:
        return (texts[0][:room],)
    first, second = texts
    first = first[: max(room - len(second), -(-room // 2))]
    return first, second[: room - len(first)]


def batch(examples: Examples, indices: np.ndarray, sequence: int) -> dict[str, np.ndarray]:
    """Returns tokens and segments, int32 (B, S), and labels (B,) if the examples have labels."""
    tokens, segments = zip(*(encode(examples.texts[i], sequence) for i in indices))
    made = {"tokens": np.stack(tokens), "segments": np.stack(segments)}
    return made if examples.labels is None else made | {"labels": examples.labels[indices]}


def sample(
    examples: Examples, seed: int, step: int, size: int, sequence: int, part: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Returns batch number `step`, from 1, a function of the arguments only, or the examples `part`
    of it. Each epoch has each example once.
    """
    epochs, places = np.divmod((step - 1) * size + np.arange(size), len(examples))
    chosen = [_order(seed, int(e), len(examples))[places[epochs == e]] for e in np.unique(epochs)]
    return batch(examples, np.concatenate(chosen)[part], sequence)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


def windows(examples: Examples, size: int) -> Iterator[np.ndarray]:
    """Returns the indices of the batches of all examples in order. The last batch may be short."""
    indices = np.arange(len(examples))
    return (indices[i : i + size] for i in range(0, len(examples), size))
