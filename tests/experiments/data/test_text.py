"""Text: split by file, the same everywhere; batches are a function of seed and step; bad paths are
told.
"""

import sysconfig

import numpy as np
import pytest

from experiments.data import text as data
from experiments.errors import InputError

pytestmark = pytest.mark.core


def test_the_standard_library_is_the_default_and_splits_by_file():
    text = data.read(None, 256)
    total = len(text.train) + len(text.validation)
    assert total > 5_000_000
    assert 0.03 < len(text.validation) / total < 0.2
    assert sysconfig.get_path("stdlib") in text.source
    assert b"def " in text.train[:100_000].tobytes()


def test_a_folder_is_split_by_file_and_adding_files_moves_none(tmp_path):
    names = [f"part{i % 3}/file{i}.txt" for i in range(200)]
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{i}>" * 20)
    before = data.read(str(tmp_path), 32)
    inside = [data.in_validation(name) for name in names]
    assert 4 <= sum(inside) <= 30
    for i in range(200):
        mark = f"<{i}>".encode()
        assert (mark in before.validation.tobytes()) == inside[i]
        assert (mark in before.train.tobytes()) != inside[i]
    (tmp_path / "more.txt").write_text("more" * 20)
    total = lambda text: len(text.train) + len(text.validation)
    assert total(data.read(str(tmp_path), 32)) == total(before) + 81


def test_binary_and_hidden_files_and_tests_are_left_out(tmp_path):
    for name in ("a.txt", ".git/b.txt", "tests/c.txt", "d.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 50 + (b"\0" if name == "d.bin" else b""))
    with pytest.raises(InputError, match="too short: got 0 bytes for"):
        data.read(str(tmp_path), 32)  # one file is left, on one side of the split
    sides = data._folder(tmp_path, "here", "*")
    assert sides.train.tobytes() + sides.validation.tobytes() == b"a.txt" * 50


def test_a_file_is_split_at_nine_tenths(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 101)) * 10)
    text = data.read(str(path), 32)
    assert text.train.tobytes() + text.validation.tobytes() == path.read_bytes()
    assert len(text.train) == 900


def test_a_batch_is_a_function_of_seed_and_step():
    text = (np.arange(1000) % 251).astype(np.uint8)
    one = data.sample(text, 1, 7, 4, 32)
    assert (one.shape, one.dtype) == ((4, 33), np.int32)
    np.testing.assert_array_equal(one, data.sample(text, 1, 7, 4, 32))
    assert (one != data.sample(text, 1, 8, 4, 32)).any()
    assert (one != data.sample(text, 2, 7, 4, 32)).any()
    assert ((one[:, 1:] - one[:, :-1]) % 251 == 1).all()  # contiguous text


def test_the_shortest_text_has_one_window():
    text = np.arange(33, dtype=np.uint8)
    np.testing.assert_array_equal(data.sample(text, 0, 0, 2, 32), np.stack([np.arange(33)] * 2))
    (batch,) = data.windows(text, 1, 2, 32)
    np.testing.assert_array_equal(batch, np.stack([np.arange(33)] * 2))


def test_evaluation_windows_reach_both_ends():
    text = (np.arange(1000) % 251).astype(np.uint8)
    batches = data.windows(text, 3, 2, 32)
    assert [b.shape for b in batches] == [(2, 33)] * 3
    assert batches[0][0, 0] == text[0]
    assert batches[-1][-1, -1] == text[-1]
