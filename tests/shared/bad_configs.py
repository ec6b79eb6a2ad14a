"""Configs that must be refused. Each is a valid config with one error."""

import json
import tomllib
from collections.abc import Iterator, Mapping

from experiments import train, train_glue, train_images
from tests.shared.bad import Bad, unreadable

PROGRAMS = {"train": train, "train_glue": train_glue, "train_images": train_images}
Config = dict[str, dict[str, str]]  # section -> key -> a value as TOML writes it

NO_NUMBER = ("true", '"8"', "[8]", "{ a = 8 }", "1979-05-27", '""')
NO_WHOLE = (*NO_NUMBER, "1.5", "8.0", "nan", "inf", "-inf", "1e400")
HUGE = str(10**30)
COUNT = (*NO_WHOLE, "0", "-1", "2147483648", HUGE)
FROM_0 = (*NO_WHOLE, "-1", HUGE)
NO_FINITE = (*NO_NUMBER, "nan", "inf", "-inf", "1e400")
POSITIVE = (*NO_FINITE, "0", "0.0", "-1e-3")
NOT_NEGATIVE = (*NO_FINITE, "-1", "-1e-300")
SHARE = (*NOT_NEGATIVE, "1", "1.0", "7.5")
RATIO = (*NOT_NEGATIVE, "1.0001", "7.5")
FLAG = ("0", "1", '"true"', '"yes"', "[true]", "0.0", "{ a = true }")
NO_TEXT = ("1", "true", "1.5", "[[]]", "{ a = 1 }", '""', "1979-05-27")
CHOICE = (*NO_TEXT, '"nothing of these"', '" "', '["scan"]')
PATH = (*NO_TEXT, r'"a\u0000b"', '["a"]')
SIZE = (
    '"lots"', '""', '"-1GB"', '"0GB"', '"12 parsecs"', '"101%"', '"1e999GB"', '"１２GB"', "0", "-1",
    "0.5", "nan", "inf", "true", '["1GB"]', "{ bytes = 1 }", HUGE, '"9223372036854775808"',
)  # fmt: skip

LEAVES: dict[str, tuple[str, ...]] = {
    "model.layers": COUNT,
    "model.width": COUNT,
    "model.heads": COUNT,
    "model.vocab": (*COUNT, "255"),
    "model.dropout": SHARE,
    "model.attention_dropout": SHARE,
    "model.kind": CHOICE,
    "model.activation": CHOICE,
    "model.attention": CHOICE,
    "model.dtype": (*CHOICE, '"float16"', '"fp32"'),
    "model.loop": CHOICE,
    "model.kv_heads": COUNT,
    "model.hidden": COUNT,
    "model.rope_base": POSITIVE,
    "model.tied": FLAG,
    "data.path": PATH,
    "train.steps": COUNT,
    "train.batch": COUNT,
    "train.microbatches": COUNT,
    "train.sequence": COUNT,
    "train.loss_chunk": COUNT,
    "train.seed": (*FROM_0, "4294967296"),
    "train.log_every": COUNT,
    "train.eval_batches": COUNT,
    "train.save_every": NOT_NEGATIVE,
    "optimizer.name": CHOICE,
    "optimizer.accumulation": CHOICE,
    "optimizer.learning_rate": POSITIVE,
    "optimizer.warmup": (*FROM_0, "2147483647"),
    "optimizer.final_ratio": RATIO,
    "optimizer.beta1": SHARE,
    "optimizer.beta2": SHARE,
    "optimizer.epsilon": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.second_moment": CHOICE,
    "optimizer.clip": CHOICE,
    "optimizer.clip_at": POSITIVE,
    "plan.budget": SIZE,
    "plan.host_budget": SIZE,
    "plan.target": (*NO_TEXT, '"h2000"', '"h200:0"', '"h200:-1"', '"h200:x"', '"v100"', '"gpu"'),
    "plan.actions": (
        "[]", '["ofload"]', '"al"', '""', "5", "[5]", "true", '["keep", "all"]', "{ a = 1 }",
    ),
    "plan.codecs": (
        '"int5"', "[]", "5", '[""]', '{ norms = "bit_mask" }', "{ norm = 5 }", "true",
        '{ norm = "bit_mask(x=1)" }', '"grouped_symmetric(group=63)"', '["bit_mask", 3]',
        '"grouped_symmetric(group=64"', '"outlier_separated(capacity=-1)"',
    ),
    "plan.path": (*PATH, '"nowhere/plan.json"', '"."'),
    "plan.explain": FLAG,
    "plan.decide": (
        '["states"]', "[]", '["actions", "places"]', '"actions"', "5", "[true]",
        '["actions", "sharding"]',
    ),
    "plan.batch": (*CHOICE, '"largest"', "8"),
    "plan.sizes": ("[]", "[0]", "8", '["8"]', "[true]", "[8]"),
    "remat.policy": (*CHOICE, '"nothing_savable"'),
    "remat.every_k": COUNT,
    "states.persist": FROM_0,
    "states.copies": FROM_0,
    "states.buffers": FROM_0,
    "states.outer_moments": (*CHOICE, '"host"'),
}  # fmt: skip
GLUE: dict[str, tuple[str, ...] | None] = {
    "data.task": (*CHOICE, '"RTT"', '"rte"'),
    "train.sequence": (*COUNT, "7"),
    "model.vocab": (*COUNT, "259"),
    "model.kind": (*CHOICE, '"gpt"'),
} | dict.fromkeys(
    ("train.loss_chunk", "train.eval_batches", "states.persist", "states.copies", "states.buffers",
     "states.outer_moments")
)  # fmt: skip
IMAGES: dict[str, tuple[str, ...]] = {
    name: values
    for name, values in LEAVES.items()
    if name.partition(".")[0] in ("train", "optimizer")
    and not name.endswith((".sequence", ".loss_chunk", ".clip", ".clip_at"))
} | {
    "model.depth": (*COUNT, "15", "51"),
    "model.width": COUNT,
    "model.classes": (*COUNT, "1"),
    "model.stem": CHOICE,
    "model.dtype": CHOICE,
    "data.path": PATH,
    "data.size": COUNT,
}


_SHARED = ("train.steps", "train.batch", "optimizer.learning_rate")
_TEXT = ("model.layers", "model.width", "model.heads", "train.sequence", *_SHARED)
NEEDED = {  # keys that have no default
    "train": (*_TEXT, "train.loss_chunk"),
    "train_glue": (*_TEXT, "data.task", "data.path"),
    "train_images": ("model.depth", "model.classes", "model.stem", *_SHARED),
}


def trainer_of(text: str) -> str:
    """The program of `PROGRAMS` that a shipped config is for, by its header."""
    return next(name for name in reversed(PROGRAMS) if f"experiments.{name} " in text)


def leaves(trainer: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the keys of a kind of config, each with values that it must not have."""
    if trainer == "train_images":
        return IMAGES
    found = LEAVES | (GLUE if trainer == "train_glue" else {})
    return {name: values for name, values in found.items() if values is not None}


def parsed(text: str) -> Config:
    """Returns a config's values in TOML. The values of shipped configs are valid JSON too."""
    return {
        section: {key: json.dumps(value) for key, value in keys.items()}
        for section, keys in tomllib.loads(text).items()
    }


def written(config: Config) -> bytes:
    lines = []
    for section, keys in config.items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in keys.items()), ""]
    return "\n".join(lines).encode()


def with_value(config: Config, name: str, value: str) -> bytes:
    section, key = name.split(".")
    return written(config | {section: config.get(section, {}) | {key: value}})


def bad_configs(text: str, trainer: str) -> Iterator[Bad]:
    """Yields bad configs made from `text`, a config for the command `trainer`."""
    config = parsed(text)
    for name, values in leaves(trainer).items():
        # A mesh of more devices than this machine has is refused before the file of a plan is read.
        sections = {k: v for k, v in config.items() if (k, name) != ("mesh", "plan.path")}
        for value in values:
            yield Bad("a value", with_value(sections, name, value), name)
    yield from _misplaced(config)
    yield from _missing(config, trainer)
    yield from _not_toml(config)
    yield from unreadable(text)


def _misplaced(config: Config) -> Iterator[Bad]:
    for section, keys in config.items():
        rest = {name: values for name, values in config.items() if name != section}
        other = next(iter(rest))
        for wrong in (section[:-1], f"{section}s", section.upper()):
            yield Bad("a misspelt section", written(rest | {wrong: keys}), wrong)
        for value in ("5", '""', "[]", "true", "[{}]"):
            made = f"{section} = {value}\n".encode() + written(rest)
            yield Bad("a section's value", made, section)
        yield Bad("a section's value", written(rest | {f"[{section}]": keys}), section)
        yield Bad("a key elsewhere", written(rest | {f"{other}.{section}": keys}), section)
        for key, value in keys.items():
            less = {k: v for k, v in keys.items() if k != key}
            for wrong in (key[:-1], f"{key}s", key.upper(), f"_{key}"):
                made = written(config | {section: less | {wrong: value}})
                yield Bad("a misspelt key", made, f"{section}.{wrong}")
            above = f"{key} = {value}\n".encode() + written(config | {section: less})
            yield Bad("a key elsewhere", above, key)
            deeper = config | {section: less | {key: f"{{ {key} = {value} }}"}}
            yield Bad("a key elsewhere", written(deeper), f"{section}.{key}")
            if key not in config[other]:
                moved = config | {section: less, other: config[other] | {key: value}}
                yield Bad("a key elsewhere", written(moved), key)
    yield Bad("a section more", written(config | {"extra": {"a": "1"}}), "extra")
    yield Bad("a section more", b"extra = 1\n" + written(config), "extra")


def _missing(config: Config, trainer: str) -> Iterator[Bad]:
    needed = NEEDED[trainer]
    for name in needed:
        section, key = name.split(".")
        less = {k: v for k, v in config[section].items() if k != key}
        yield Bad("a missing key", written(config | {section: less}), name)
    for section in dict.fromkeys(name.split(".")[0] for name in needed):
        less = {name: keys for name, keys in config.items() if name != section}
        yield Bad("a missing section", written(less), section)
    yield Bad("empty", b"")
    yield Bad("empty", b"\n# nothing\n")
    # Cut off before the value of the last key that has no default.
    data = written(config)
    end = max(data.index(f"\n{name.split('.')[1]} =".encode()) for name in needed)
    for at in range(1, end, max(1, end // 24)):
        yield Bad("cut off", data[:at])


def _not_toml(config: Config) -> Iterator[Bad]:
    data = written(config)
    for section, keys in config.items():
        yield Bad("a section twice", data + f"[{section}]\n".encode())
        for key, value in keys.items():
            twice = config | {section: keys | {f"{key} = {value}\n{key}": value}}
            yield Bad("a key twice", written(twice))
    for value in ("", "=", "1 2", "[1", '"1', "{a = 1", "0x", "1_", "01", "tru", "9" * 5000, "'''"):
        yield Bad("no TOML", with_value(config, "train.steps", value))
    for depth in (500, 5000, 100_000):
        yield Bad("deep", with_value(config, "train.steps", "[" * depth + "]" * depth))
        yield Bad("deep", with_value(config, "train.steps", "{a=" * depth + "1" + "}" * depth))
    yield Bad("deep", data + ("[" + "a." * 2000 + "a]\n").encode())
    yield Bad("no TOML", json.dumps(config).encode())
    yield Bad("no TOML", b"\x1b[31m" + data)
