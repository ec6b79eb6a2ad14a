"""Files appear whole or not at all, whatever interrupts their writing."""

import json
import os
import subprocess
import sys

import pytest

from jaxmem._core.files import check_writable, read_json, write_json, write_whole

FAULTS = ("os.replace", "os.fsync")


def test_text_and_bytes_are_written_as_they_are(tmp_path):
    write_whole(tmp_path / "new" / "text", "ü\n")
    write_whole(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "new" / "text").read_bytes() == b"\xc3\xbc\n"
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"
    assert not os.stat(tmp_path / "bytes").st_mode & 0o111


@pytest.mark.parametrize("path", [".", "", "/", "folder"])
def test_a_folder_is_not_written_to(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for check in (check_writable, lambda path: write_whole(path, "text")):
        with pytest.raises(OSError, match="is a folder"):
            check(path)
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, fault):
    write_whole(tmp_path / "file", "before")

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(fault, fails)
    with pytest.raises(OSError, match="no space left"):
        write_whole(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    """kill -9 while a process rewrites a file over and over: it holds one content or the other."""
    path = tmp_path / "file"
    script = (
        "import sys; from jaxmem._core.files import write_whole\n"
        "while True:\n"
        "    for letter in 'ab':\n"
        "        write_whole(sys.argv[1], letter * 200_000)\n"
        "        print(flush=True)"
    )
    line = [sys.executable, "-c", script, str(path)]
    for rounds in (1, 2, 5):
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            for _ in range(rounds):
                process.stdout.readline()
            process.kill()
        assert path.read_text() in ("a" * 200_000, "b" * 200_000)


def test_json_holds_no_nan_and_is_read_with_an_error_that_can_be_told(tmp_path):
    write_json(tmp_path / "data", {"a": [1, 2.5, None]})
    assert read_json(tmp_path / "data") == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "data", {"a": float("nan")})
    assert read_json(tmp_path / "data") == {"a": [1, 2.5, None]}
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply|recursion|Expecting"):
        read_json(tmp_path / "deep")
    (tmp_path / "latin").write_bytes(json.dumps("ü", ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match="utf-8"):
        read_json(tmp_path / "latin")


def test_a_place_is_tried_before_it_is_needed(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "folder" / "file")
    check_writable(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"], "nothing is left behind"
    with pytest.raises(OSError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(OSError, match="is a file; expected a folder"):
        check_writable(tmp_path / "file" / "below")


def test_a_read_only_place_is_refused():
    with pytest.raises(OSError, match="denied|Read-only|No such file|not permitted"):
        check_writable("/proc/file")
