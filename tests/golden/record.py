"""Writes what the library answers: `python -m tests.golden.record`, in a quarter of an hour.

Programs and bytes of the device at hand are those of XLA's flags in tests, and of JAX as users have
it.
"""

import json
import sys

from tests.conftest import set_numerics
from tests.golden import golden


def write(name: str, data) -> None:
    (golden.HERE / f"{name}.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(name, flush=True)


def main(*wanted: str) -> None:
    set_numerics(x64=False, promotion="standard")
    parts = {"profiles": profiles, "plans": plans, "public": golden.public}
    for name in wanted or parts:
        write(name, parts[name]())
        if name == "profiles":
            made = json.loads((golden.HERE / "profiles.json").read_text())
            write("solved", {each: golden.solved(data) for each, data in made.items()})


def profiles() -> dict:
    return {name: golden.profiled(golden.STEPS[name]) for name in golden.PROFILED}


def plans() -> dict:
    path = golden.HERE / "plans.json"
    made = json.loads(path.read_text()) if path.exists() else {}
    for name in [name for name in golden.STEPS if name not in made]:  # goes on where it was stopped
        made[name] = golden.planned(golden.STEPS[name])
        write("plans", made)
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
