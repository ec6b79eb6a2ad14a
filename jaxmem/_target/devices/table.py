"""Reads the tables of chips: a TOML file with a section for each chip."""

import pathlib
import tomllib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def read_table(make: Callable[..., T], name: str) -> dict[str, T]:
    """Returns the chips of a file, by name.

    make: takes the name of a section, and its entries as keywords, and returns a chip.
    name: the name of the file, in the folder of this module.
    """
    table = tomllib.loads(pathlib.Path(__file__).with_name(name).read_text("utf-8"))
    plain = lambda value: tuple(value) if isinstance(value, list) else value
    entries = lambda fields: {key: plain(value) for key, value in fields.items()}
    return {name: make(name=name, **entries(fields)) for name, fields in table.items()}
