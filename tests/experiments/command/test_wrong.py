"""Everything that can be wrong with a command line or a config: exit code 2, a sentence that helps,
no traceback, nothing written, and nothing compiled on the way.
"""

import jax
import pytest

from experiments import plan, train, train_glue, train_images
from experiments.gpu_check import __main__ as gpu_check
from jaxmem import runs

FILES = {
    "binary.toml": b"\xff\xfe\x00",
    "empty.toml": b"",
    "unfinished.toml": b"\n[model]\nlayers =\n",
    "twice.toml": b"[model]\nlayers = 2\nlayers = 3",
    "digits.toml": f"[model]\nlayers = {'1' * 5000}".encode(),
    "deep.toml": f"model = {'[' * 5000}".encode(),
    "text.txt": b"to be or not to be " * 100,
    "short.txt": b"to be",
    "binary.bin": b"\x7fELF\x02\x00\x00" * 100,
    "utf16.txt": ("to be " * 100).encode("utf-16"),
    "plan.json": b'{"schema": 99}',
    "binaries/one.bin": b"\0" * 100,
    "finished/summary.json": b"{}",
    "MNLI/train.tsv": b"a\tb\n",
}
LONG = "x" * 300

CONFIGS = [
    ("gpt_nanno", "no such config; did you mean gpt_nano?"),
    ("nowhere/x.toml", "nowhere/x.toml: no such config file; give a TOML file, or a name"),
    (f"{LONG}.toml", "no such config file"),
    (".", "'.': no such config"),
    ("binary.toml", "binary.toml: cannot be read"),
    ("unfinished.toml", "unfinished.toml: not TOML: Invalid value (at line 3"),
    ("twice.toml", "twice.toml: not TOML: Cannot overwrite a value"),
    ("digits.toml", "digits.toml: not TOML: Exceeds the limit"),
    ("deep.toml", "deep.toml: not TOML"),
    ("empty.toml", "empty.toml: model: missing section; it has no default"),
]
OTHERS = [
    (train, "resnet50_digits", "`python -m experiments.train_images resnet50_digits`"),
    (plan, "resnet50_imagenet", "`python -m experiments.train_images resnet50_imagenet`"),
    (train_glue, "gpt_nano", "`python -m experiments.train gpt_nano`"),
    (train_images, "bert_glue", "`python -m experiments.train_glue bert_glue`"),
]
TEXT = [
    ("steps", "override 'steps': got no setting; allowed: section.key=value"),
    ("train.steps.more=5", "steps is a value, not a section"),
    ("steps=7", "steps: unknown key, got 7"),
    ("modle.width=32", "modle: unknown key, got {'width': 32}; did you mean model?"),
    ("train.stepps=5", "train.stepps: unknown key, got 5; did you mean train.steps?"),
    ("train.steps=0", "train.steps: got 0; allowed: at least 1"),
    ("train.steps=1e3", "train.steps: got 1000.0; allowed: a whole number, such as 1000"),
    (f"train.steps={10**30}", "train.steps: got 1000000000000000000000000000000; allowed: at most"),
    (f"train.steps={'9' * 5000}", "train.steps: got '9999999"),
    ("train.microbatches=3", "train.microbatches: got 3; allowed: a divisor of train.batch, 8"),
    ("train.loss_chunk=7", "train.loss_chunk: got 7; allowed: a divisor of train.sequence, 256"),
    ("mesh.data=0", "mesh.data: got 0; allowed: at least 1, or -1 for the devices that remain"),
    ("mesh.data=-2", "mesh.data: got -2; allowed: at least -1"),
    ("mesh.data=3", "mesh: got data = 3 * fsdp = 1 * tensor = 1 * expert = 1; allowed: a product,"),
    ("mesh.sequence=true", "mesh.sequence: got true beside mesh.tensor = 1; allowed beside"),
    ("mesh.axes=both", "mesh.axes: got 'both'; allowed: one of 'auto' or 'explicit'"),
    ("model=5", "model: got 5; allowed: a section"),
    ("model.heads=3", "model.width: got 128; allowed: a multiple of model.heads, 3"),
    ("model.attention=flash", "model.attention: got 'flash'; allowed: one of 'materialized'"),
    ("model.kind=bert", "model.vocab: got 256; allowed for a BERT: at least 257"),
    ("model.kind=llama", "model.dropout: got 0.1; allowed with model.kind = 'gpt' or 'bert' only"),
    ("model.kv_heads=2", "model.kv_heads: got 2; allowed with model.kind = 'llama' only, and it"),
    ("optimizer.name=adam", "optimizer.name: got 'adam'; did you mean adamw?"),
    ("optimizer.warmup=301", "optimizer.warmup: got 301; allowed: at most train.steps, 300"),
    ("optimizer.clip=component", "optimizer.clip: got 'component'; allowed with"),
    ("optimizer.accumulation=released", "model.loop: got 'scan'; allowed with"),
    ("states.persist=1", "optimizer.accumulation: got 'scan' beside states.persist; allowed"),
    ("states.persist=99", "states.persist: got 99; allowed: at most model.layers, "),
    ("states.copies=1", "states.copies: got 1 without states.persist; allowed beside"),
    (
        'plan.decide=["states"]',
        "plan.decide: got ['states']; allowed: ['actions'], ['actions', 'states'], or",
    ),
    ('plan.decide=["actions", "places"]', "plan.decide[1]: got 'places'"),
    ('plan.decide=["actions", "sharding"]', "plan.decide: got ['actions', 'sharding']; allowed"),
    ("plan.sizes=[8]", "plan.sizes: got [8] without plan.batch; allowed beside"),
    (
        'plan.decide=["actions", "states"]',
        "optimizer.accumulation: got 'scan' beside plan.decide = ['actions', 'states']; allowed",
    ),
    ("plan.budget=lots", "plan.budget: `budget` is 'lots'; expected"),
    ("plan.target=h2000", "plan.target: `target` 'h2000' is not known; did you mean 'h200'"),
    ("plan.actions=['ofload']", "plan.actions[0]: got 'ofload'; did you mean offload?"),
    ("plan.actions=['keep','offload']", "plan.actions: got 'offload'; allowed for plan.target"),
    ("plan.codecs=int5", "plan.codecs: `codec` is 'int5': no codec 'int5'; expected one of"),
    ("plan.codecs.norms=bit_mask", "plan.codecs.norms: no kind of tensor; did you mean norm?"),
    ("plan.path=/nowhere.json", "plan.path: "),
    ("plan.path=plan.json", "plan.path: "),
    ("remat.every_k=2", "remat.every_k: got 2; allowed with remat.policy = 'every_k' only"),
    ("train.steps=true", "train.steps: got True; allowed: a whole number"),
    ("train.steps=", "train.steps: got ''; allowed: a whole number"),
    ("model.dropout=1.0", "model.dropout: got 1.0; allowed: less than 1"),
    ("model.dropout=nan", "model.dropout: got nan; allowed: "),
    ("optimizer.learning_rate=0", "optimizer.learning_rate: got 0; allowed: more than 0"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate: got 'fast'; allowed: a number"),
    ("optimizer.final_ratio=1.5", "optimizer.final_ratio: got 1.5; allowed: at most 1"),
    ("plan.budget=true", "plan.budget: got True; allowed: a number or a text"),
    ("plan.host_budget=much", "plan.host_budget: `host_budget` is 'much'"),
    ("plan.target=8", "plan.target: got 8; allowed: a text"),
    ("plan.actions=[]", "plan.actions: got []; allowed: a list that is not empty"),
    ("plan.codecs=5", "plan.codecs: got 5; allowed: a text or a list of texts or a section"),
]
PAIRS = [
    ("model.kind=bert", "model.vocab=260", "sample.length=5", "sample.length: got 5; allowed with"),
    ("model.attention=fused", "model.attention_dropout=0.1", "model.attention_dropout: got 0.1"),
    ("optimizer.name=lion", "optimizer.accumulation=adama", "optimizer.name: got 'lion'; allowed"),
    ("remat.policy=every_k", "remat.every_k=9", "got 9; allowed: at most model.layers, "),
    ("remat.policy=minimal", "plan.path=plan.json", "got 'minimal' beside plan.path"),
    ("remat.policy=minimal", "model.loop=stack", "got 'stack' beside remat.policy"),
    ("remat.policy=estimator", "plan.budget=none", "plan.budget: got 'none'; allowed with"),
]
LLAMA = [
    ("model.kind=gpt", "model.kv_heads: got 2; allowed with model.kind = 'llama' only, and it is"),
    ("model.activation=relu", "model.activation: got 'relu'; allowed with model.kind = 'gpt' only"),
    ("model.kv_heads=3", "model.kv_heads: got 3; allowed: a divisor of model.heads, 4, since as"),
    ("model.width=36", "model.heads: got 4, of 9 features each; allowed for a Llama: heads of an"),
    ("model.dropout=0.0", "model.dropout: got 0.0; allowed with model.kind = 'gpt' or 'bert'"),
]
DATA = [
    ("/nowhere", "data.path: got '/nowhere', which does not exist; allowed: a text file or a fold"),
    ("binary.bin", "data.path: got 'binary.bin', which is no text: byte 5 of it is 0"),
    ("utf16.txt", "data.path: got 'utf16.txt', which is no text: byte 3 of it is 0"),
    ("short.txt", "data.path: short.txt is too short: got 4 bytes for train"),
    (LONG, "which does not exist"),
    ('"a\\u0000b"', "data.path: got 'a\\x00b'; allowed: a path, which has no NUL character"),
    ("/dev/zero", "data.path: got '/dev/zero', which is neither a file nor a folder"),
    ("binaries", "data.path: binaries is too short: got 0 bytes for train"),
]
GLUE = [
    ("data.task=RTT", "data.task: got 'RTT'; did you mean RTE?"),
    ("data.path=/nowhere", "data.path: got '/nowhere', which is no folder; allowed: the folder of"),
    ("data.task=MNLI", "MNLI/train.tsv, line 1: got 0 columns 'sentence1'"),
    ("model.kind=gpt", "model.kind: got 'gpt'"),
    ("data.path=.", "data.path: got '.', which has no folder RTE, but MNLI"),
    ("train.sequence=7", "train.sequence: got 7; allowed: at least 8"),
    ("train.loss_chunk=4", "train.loss_chunk: unknown key"),
]
IMAGES = [
    ("mesh.expert=2", "mesh.expert: got 2; allowed for a ResNet: 1, since mesh.data and mesh.fsdp"),
    ("mesh.tensor=2", "mesh.tensor: got 2; allowed for a ResNet: 1, since mesh.data and mesh.fsdp"),
    ("mesh.fsdp=2", "mesh: got data = 1 * fsdp = 2 * tensor = 1 * expert = 1; allowed: a product,"),
    ("model.classes=100", "model.classes: got 100; allowed for scikit-learn's digits"),
    ("train.microbatches=64", "train.microbatches: got 64; allowed: at most half of train.batch"),
    ("optimizer.accumulation=none", "train.microbatches: got 4; allowed with"),
    ("data.path=/nowhere", "data.path: got '/nowhere', which is no folder"),
    ("data.path=binaries", "data.path: got 'binaries', a folder with one.bin; allowed: a folder"),
    ("plan.budget=1GB", "plan: unknown key, got {'budget': '1GB'}"),
    ("model.depth=15", "model.depth: got 15; allowed: one of 14, 26 or 50"),
    ("data.size=9", "data.size: got 9; allowed for scikit-learn's digits"),
]
PLANS = [
    (["--budget", "lots"], "plan.budget: `budget` is 'lots'"),
    (["--budget", "none"], "plan.budget: got 'none'; allowed here: bytes, or a text"),
    (["--target", "h2000"], "plan.target: `target` 'h2000' is not known"),
    (["remat.policy=minimal"], "remat.policy: got 'minimal'; allowed here: 'plan'"),
]
OPTIONS = [
    ([], "the following arguments are required: config"),
    (["gpt_nano", "--outt", "x"], "unrecognized arguments: --outt"),
    (["gpt_nano", "--out"], "argument --out: expected one argument"),
]
PLACES = [
    ("text.txt", "cannot write to 'text.txt': "),
    ("text.txt/out", "cannot write to 'text.txt/out': "),
    (LONG, f"cannot write to '{LONG}': "),
    ("finished", "'finished' holds the results of a run (summary.json)"),
]
CHECKS = [
    (["--part", "codex"], "--part: got 'codex'; did you mean codecs?; allowed: ceilings, codecs"),
    (["--data", "/nowhere"], "--data: got '/nowhere', which is no file"),
    (["--limit", "0"], "--limit: got 0.0; allowed: more than 0"),
    (["--limit", "nan"], "--limit: got nan; allowed: more than 0"),
    (["--out", "text.txt"], "--out: got 'text.txt', and"),
]
CASES = [
    *[(train, [name], message) for name, message in CONFIGS],
    *[(program, [name], message) for program, name, message in OTHERS],
    *[(train, ["gpt_nano", setting], message) for setting, message in TEXT],
    *[(train, ["gpt_nano", *settings], message) for *settings, message in PAIRS],
    *[(train, ["llama_nano", setting], message) for setting, message in LLAMA],
    *[(train, ["gpt_nano", f"data.path={path}"], message) for path, message in DATA],
    *[(train_glue, ["bert_glue", "data.path=.", setting], message) for setting, message in GLUE],
    *[(train_images, ["resnet50_digits", setting], message) for setting, message in IMAGES],
    *[(plan, ["gpt_nano", *arguments], message) for arguments, message in PLANS],
    *[(train, arguments, message) for arguments, message in OPTIONS],
    *[(train, ["gpt_nano", "--out", out], message) for out, message in PLACES],
    *[(plan, ["gpt_nano", "--out", out], message) for out, message in PLACES],
    *[(gpu_check, arguments, message) for arguments, message in CHECKS],
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with `FILES` in it; where something is compiled, the test fails."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("it was compiled"))
    return tmp_path


def state(place):
    """Every file and folder, with what files hold."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(place.rglob("*"))}


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    CASES,
    ids=[f"{program.__name__}-{' '.join(a)[:60]}" for program, a, _ in CASES],
)
def test_what_is_wrong_is_told_and_changes_nothing(program, arguments, message, place, capsys):
    before = state(place)
    if not any(option.startswith("--out") for option in arguments):
        arguments = [*arguments, "--out", "new/out"]
    try:
        code = program.main(arguments)
    except SystemExit as stop:  # of argparse
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert "error: " in err
    assert "Traceback" not in err
    assert state(place) == before


def test_a_finished_run_is_replaced_when_that_is_asked_for(place):
    with runs.record("finished", overwrite=True) as run:
        run.row(1, loss=1.0)
    assert runs.read("finished").losses == ((1.0, 1.0),)
