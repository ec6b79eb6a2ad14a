"""Writes what the library answers: `python -m tests.golden.record`, in a quarter of an hour.

Programs and bytes of the device at hand are those of XLA's flags in tests, and of JAX as users have
it.
"""

import json
import os
import sys

from tests.conftest import set_numerics
from tests.golden import golden


def write(name: str, data) -> None:
    (golden.HERE / f"{name}.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(name, flush=True)


def main(*wanted: str) -> None:
    set_numerics(x64=False, promotion="standard")
    if wanted[:1] == ("plan",):  # one plan, printed, for `golden.planned_alone`
        print(json.dumps(golden.planned(golden.STEPS[wanted[1]])))
        return
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
        made[name] = golden.plan_of(name)
        write("plans", made)
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:  # before XLA counts the cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    main(*sys.argv[1:])
