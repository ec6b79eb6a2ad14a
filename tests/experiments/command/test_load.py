"""Configs: the committed ones are valid, and every mistake is told with file, key, value and what
is allowed.
"""

import pytest

from experiments.command.load import FOLDER, load, parse_override
from experiments.errors import InputError

pytestmark = pytest.mark.core

MICRO = """
[model]
layers = 2
width = 32
heads = 2
[train]
steps = 5
batch = 4
sequence = 32
loss_chunk = 8
[optimizer]
learning_rate = 1e-3
"""


TEXT = [
    path
    for path in sorted(FOLDER.glob("*.toml"))
    if not path.stem.startswith(("resnet", "bert_glue"))
]  # see test_image_data.py


@pytest.mark.parametrize("path", TEXT, ids=lambda p: p.stem)
def test_committed_configs_are_valid_and_say_how_to_run_them(path):
    assert load(path.stem) == load(str(path))
    header = path.read_text().split("[model]")[0]
    assert f"python -m experiments.train {path.stem} --out runs/{path.stem}" in header


@pytest.fixture
def micro(tmp_path):
    path = tmp_path / "micro.toml"
    path.write_text(MICRO)
    return path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.widht=32"],
            r"model\.widht: unknown key, got 32; did you mean model\.width\?; allowed: kind, lay",
        ),
        (
            ["modle.width=32"],
            r"modle: unknown key, got \{'width': 32\}; did you mean model\?; allowed: .*model, ",
        ),
        (["steps=7"], r"steps: unknown key, got 7.*; allowed: train, optimizer, model, data, plan"),
        (
            ["optimizer.learning_rate=nan"],
            r"optimizer\.learning_rate: got nan; allowed: (more than 0|a finite number)",
        ),
        (
            ["optimizer.learning_rate=inf"],
            r"optimizer\.learning_rate: got inf; allowed: a finite number",
        ),
        (
            ["optimizer.weight_decay=-0.1"],
            r"optimizer\.weight_decay: got -0\.1; allowed: at least 0",
        ),
        (
            ["optimizer.learning_rate='fast'"],
            r"optimizer\.learning_rate: got 'fast'; allowed: a number",
        ),
        (["train.steps=5.0"], r"train\.steps: got 5\.0; allowed: a whole number"),
        (["train.steps=true"], r"train\.steps: got True; allowed: a whole number"),
        (["train.steps=0"], r"train\.steps: got 0; allowed: at least 1"),
        (["train.seed=-1"], r"train\.seed: got -1; allowed: at least 0"),
        (["model.dropout=1.0"], r"model\.dropout: got 1\.0; allowed: less than 1"),
        (
            ["model.dtype=bfloat"],
            r"model\.dtype: got 'bfloat'; did you mean bfloat16\?; allowed: one of 'float32'",
        ),
        (
            ["model.attention=flash"],
            r"model\.attention: got 'flash'; allowed: one of 'materialized' or 'fused'",
        ),
        (["model.heads=3"], r"model\.width: got 32; allowed: a multiple of model\.heads, 3"),
        (["model.vocab=100"], r"model\.vocab: got 100; allowed: at least 256"),
        (
            ["model.attention=fused", "model.attention_dropout=0.1"],
            r"model\.attention_dropout: got 0\.1; allowed .* 0\.0",
        ),
        (
            ["train.microbatches=3"],
            r"train\.microbatches: got 3; allowed: a divisor of train\.batch, 4",
        ),
        (
            ["train.loss_chunk=5"],
            r"train\.loss_chunk: got 5; allowed: a divisor of train\.sequence, 32",
        ),
        (["optimizer.warmup=6"], r"optimizer\.warmup: got 6; allowed: at most train\.steps, 5"),
        (["plan.budget=true"], r"plan\.budget: got True; allowed: a number or a text"),
        (["plan.target=''"], r"plan\.target: got ''; allowed: a text that is not empty"),
        (
            ["plan.actions=['keep','ofload']"],
            r"plan\.actions\[1\]: got 'ofload'; did you mean offload\?; allowed: one of",
        ),
        (
            ["plan.actions=loseless"],
            r"plan\.actions: got 'loseless'; did you mean lossless\?; allowed: a list of texts or",
        ),
        (
            ["plan.actions=[]"],
            r"plan\.actions: got \[\]; allowed: a list that is not empty or one of 'all'",
        ),
        (["plan=5"], r"plan: got 5; allowed: a section"),
        (
            ["train.steps.more=5"],
            r"override 'train\.steps\.more=5': steps is a value, not a section",
        ),
        (["train.steps"], r"override 'train\.steps': got no setting; allowed: section\.key=value"),
        (["=5"], r"override '=5': got no setting"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_is_told_with_file_key_value_and_what_is_allowed(micro, overrides, message):
    with pytest.raises(InputError, match=message) as caught:
        load(str(micro), overrides)
    assert "override" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("layers = 2", "layers = "), r"micro\.toml: not TOML: .*line 3"),
        (("layers = 2", "layers = 2\nlayers = 3"), r"micro\.toml: not TOML: .*line 4"),
        (("layers = 2\n", ""), r"micro\.toml: model\.layers: missing key"),
        (("[optimizer]\nlearning_rate = 1e-3\n", ""), r"micro\.toml: optimizer: missing section"),
        (
            ("heads = 2", "heads = '2'"),
            r"micro\.toml: model\.heads: got '2'; allowed: a whole number",
        ),
        (
            ("steps = 5", "stepps = 5"),
            r"micro\.toml: train\.stepps: unknown key, got 5; did you mean train\.steps\?",
        ),
        (("1e-3", "nan"), r"micro\.toml: optimizer\.learning_rate: got nan"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(micro, change, message):
    micro.write_text(MICRO.replace(*change))
    with pytest.raises(InputError, match=message):
        load(str(micro))


def test_several_mistakes_are_told_at_once(micro):
    with pytest.raises(InputError) as caught:
        load(str(micro), ["model.layers=0", "train.batch=x"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gpt_nanno",
            r"'gpt_nanno': no such config; did you mean gpt_nano\?; there are: bert_4b, .*gpt_117m",
        ),
        ("nowhere/x.toml", r"nowhere/x\.toml: no such config file"),
    ],
)
def test_a_config_that_is_not_there(name, message):
    with pytest.raises(InputError, match=message):
        load(name)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.toml: cannot be read"):
        load(str(path))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.b=5", ("a.b", 5)),
        ("a.b=1e-4", ("a.b", 1e-4)),
        ("a.b=true", ("a.b", True)),
        ("a.b=no", ("a.b", "no")),
        ("a.b='12GiB'", ("a.b", "12GiB")),
        ("a.b=12GiB", ("a.b", "12GiB")),
        ("a.b=/x/y=z.json", ("a.b", "/x/y=z.json")),
        ("a.b=['keep', 'offload']", ("a.b", ["keep", "offload"])),
        ("a.b = 5", ("a.b", 5)),
        ("a.b=1\nc=2", ("a.b", "1\nc=2")),
    ],
)
def test_overrides_are_toml_values_or_else_texts(text, parsed):
    assert parse_override(text) == parsed


def test_overrides_win_and_make_sections(micro):
    config = load(str(micro), ["train.steps=9", "plan.budget=64MiB", "optimizer.learning_rate=1"])
    assert (config.train.steps, config.plan.budget, config.optimizer.learning_rate) == (
        9,
        "64MiB",
        1.0,
    )
