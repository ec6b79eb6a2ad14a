"""Configs with one mistake each, made of shipped ones: every mistake is told with the file and the
key, before anything is compiled or written.
"""

import pathlib

import pytest

from experiments import plan, train, train_glue, train_images
from experiments.command.load import FOLDER, load
from tests.shared import bad_configs as bad
from tests.shared.bad import mistakes, no_files, refusal

FILE = "mine.toml"
SCHEMAS = dict(zip(bad.PROGRAMS, (train.Config, train_glue.GlueConfig, train_images.ImageConfig)))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Every so many of them, which are all of some kind; benchmarks/faults.py tries all.
@pytest.mark.parametrize(
    ("name", "trainer", "every"),
    [
        ("gpt_nano", "train", 3),
        ("gpt_10b", "train", 7),
        ("llama_nano", "train", 7),
        ("bert_base", "train", 7),
        ("bert_glue", "train_glue", 5),
        ("resnet50_digits", "train_images", 5),
    ],
)
def test_bad_configs_are_refused(name, trainer, every):
    kinds = set()
    text = (FOLDER / f"{name}.toml").read_text("utf-8")
    chosen = list(bad.bad_configs(text, trainer))[::every]
    assert len({one.content for one in chosen}) >= 100
    for one in chosen:
        line = [FILE, "--out", "new/out"]
        assert refusal(one, bad.PROGRAMS[trainer].main, line, FILE) == [], one
        kinds.add(one.kind)
    assert len(kinds) >= 10


@pytest.mark.parametrize("program", [train, train_glue, train_images, plan])
def test_what_is_no_file_is_refused(program, tmp_path):
    for what, path in no_files(tmp_path, ".toml").items():
        assert mistakes(program.main, [path, "--out", "new/out"], path) == [], what


def test_a_setting_on_top_is_named_beside_the_file():
    """Whether the config's own checks refuse it, or the data or the device that it names."""
    for setting in ("train.steps=0", "plan.budget=lots", "plan.path=absent", "data.path=absent"):
        line = ["gpt_nano", setting, "--out", "new"]
        assert mistakes(train.main, line, "gpt_nano.toml", f"'{setting}'") == [], setting


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_are_taken_as_they_are_written_here(path):
    """So that a refused one is refused for its one mistake. Each says how to run it."""
    text = path.read_text("utf-8")
    trainer = bad.trainer_of(text)
    config, schema = bad.parsed(text), SCHEMAS[trainer]
    pathlib.Path(FILE).write_bytes(bad.written(config))
    want = load(str(path), (), schema)
    assert load(FILE, (), schema) == load(path.stem, (), schema) == want
    header = text.partition("[model]")[0]
    assert f"python -m experiments.{trainer} {path.stem} " in header
    assert f"--out runs/{path.stem}" in header
    assert want.model_dump().keys() >= {name.partition(".")[0] for name in bad.leaves(trainer)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.seed", "4294967295"),
        ("train.save_every", "0"),
        ("train.steps", "2147483647"),
        ("model.dropout", "0"),
        ("optimizer.learning_rate", "1"),
        ("optimizer.warmup", "0"),
        ("optimizer.final_ratio", "1"),
        ("optimizer.weight_decay", "0"),
        ("plan.budget", '"none"'),
        ("plan.budget", "1"),
        ("plan.budget", "1.5e9"),
        ("plan.budget", '"9223372036854775807"'),
        ("plan.target", '"h200:8"'),
        ("plan.codecs", '{ norm = ["bit_mask", "grouped_symmetric(group=64)"] }'),
        ("plan.actions", '"lossless"'),
    ],
)
def test_what_is_at_the_edge_is_taken(name, value):
    config = bad.parsed((FOLDER / "gpt_nano.toml").read_text("utf-8"))
    pathlib.Path(FILE).write_bytes(bad.with_value(config, name, value))
    train.TEXT.check(load(FILE))
