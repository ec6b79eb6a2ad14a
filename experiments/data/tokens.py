"""Examples as BERT reads them: [CLS] text [SEP], or [CLS] text [SEP] text [SEP], then [PAD]; and
batches of them.

Text is bytes, 0 to 255; the other tokens follow.
Shapes: B batch, S sequence.
"""

import functools
from collections.abc import Iterator

import numpy as np

from experiments.data.glue import Examples

MASK, CLS, SEP, PAD = 256, 257, 258, 259  # after the bytes
VOCAB = PAD + 1


def encode(texts: tuple[bytes, ...], sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 (S,), and segments: 0 to the first [SEP], 1 after it to the second, 0 of
    padding.

    What is too long loses its end, of two texts the longer one's, a byte at a time, as in Devlin et
    al.'s code.
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
    """tokens and segments, int32 (B, S); labels (B,), if the examples have them."""
    tokens, segments = zip(*(encode(examples.texts[i], sequence) for i in indices))
    made = {"tokens": np.stack(tokens), "segments": np.stack(segments)}
    return made if examples.labels is None else made | {"labels": examples.labels[indices]}


def sample(
    examples: Examples, seed: int, step: int, size: int, sequence: int
) -> dict[str, np.ndarray]:
    """Batch number `step`, from 1: the same whatever was drawn before; an epoch has each example
    once.
    """
    epochs, places = np.divmod((step - 1) * size + np.arange(size), len(examples))
    chosen = [_order(seed, int(e), len(examples))[places[epochs == e]] for e in np.unique(epochs)]
    return batch(examples, np.concatenate(chosen), sequence)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


def batches(examples: Examples, size: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    """All examples in their order; the last batch may be short."""
    indices = np.arange(len(examples))
    return (batch(examples, indices[i : i + size], sequence) for i in range(0, len(examples), size))
