"""Images: their configs, and batches, which are a function of seed and step; digits."""

import numpy as np

from experiments.data import images as image_data


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
    batches = [batch["labels"] for batch in image_data.windows(numbered(100), 3, 4)]
    assert list(map(len, batches)) == [4, 4, 4]
    assert (batches[0][0], batches[-1][-1]) == (0, 99)
    short = [batch["labels"].tolist() for batch in image_data.windows(numbered(5), 9, 2)]
    assert short == [[0, 1], [2, 3], [4]]
