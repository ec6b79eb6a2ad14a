"""What the planning benchmarks share: a config's step, its profile on a target, and results that
appear whole.
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

import jax

from experiments.command.load import load
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import ALL, KEEP, REST, Actions
from jaxmem._core.database import Database
from jaxmem._core.profile import Profile
from jaxmem._device.support import allowed_actions
from jaxmem._device.target import Target
from jaxmem._plan.plan import Draft
from jaxmem._planner.compile import Verifier
from jaxmem._profile.profile import profile

jax.config.update(
    "jax_traceback_in_locations_limit", 0
)  # so that a compiled program is remembered whoever traced it

RESULTS = pathlib.Path(__file__).parent / "results"


class Case:
    """A config's training step, as `jaxmem.plan` gets it, for one target. `compiler`: None profiles
    by a roofline.
    """

    def __init__(
        self, config: str, target: str, compiler=None, database=None, overrides: Sequence[str] = ()
    ):
        self.config, self.target = load(config, overrides), Target.parse(target)
        self.build, self.args = functools.partial(make_step, self.config), abstract(self.config)
        self.verifier = Verifier(self.build, self.args, self.target, compiler)
        self.compiler, self.database = compiler, database

    @functools.cached_property
    def profile(self) -> Profile:
        allowed, _ = allowed_actions(ALL, self.target)
        jaxpr = self.verifier.trace(Draft()).jaxpr
        return profile(
            jaxpr, self.target, actions=allowed, compiler=self.compiler, database=self.database
        )

    @property
    def keep_tags(self) -> Actions:
        """Every tag kept, all else recomputed."""
        return {b.name: {t.name: KEEP for t in b.tags} for b in self.profile.blocks}

    @property
    def keep_everything(self) -> Actions:
        """What `build(None)` does."""
        return {b.name: {t.name: KEEP for t in b.tags} | {REST: KEEP} for b in self.profile.blocks}

    def trace(self, actions: Actions | None):
        return self.verifier.trace(None if actions is None else Draft(actions))


class OtherTimes(Database):
    """Times of another target where they are known, for profiles of which only bytes and counts are
    looked at.
    """

    def __init__(self, target: str):
        super().__init__()
        self.device = f"{target} {Target.parse(target).kind}"

    def read_times(self, device: str, source: str, texts: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(texts, 1e-5) | super().read_times(self.device, "xla", texts)


class Report:
    """Results that are written after each one, and read again by a run that goes on where another
    stopped.
    """

    def __init__(self, module: str, argv: Sequence[str] | None = None):
        parser = argparse.ArgumentParser(
            f"python -m benchmarks.{module}", description=sys.modules["__main__"].__doc__
        )
        parser.add_argument("--out", type=pathlib.Path, default=RESULTS / f"{module}.json")
        parser.add_argument(
            "--fresh", action="store_true", help="forget the results that are there"
        )
        self.path = parser.parse_args(argv).out
        self.data = {
            "command": f"python -m benchmarks.{module}",
            "versions": versions(),
            "results": {},
        }
        if self.path.exists() and not parser.parse_args(argv).fresh:
            old = json.loads(self.path.read_text())
            if old.get("versions") == self.data["versions"]:
                self.data["results"] = old["results"]

    def has(self, key: str) -> bool:
        return key in self.data["results"]

    def __getitem__(self, key: str):
        return self.data["results"][key]

    def add(self, key: str, value) -> None:
        self.data["results"][key] = value
        self.write()
        print(f"{key}: {json.dumps(value)}", flush=True)

    def summarise(self, summary: dict) -> None:
        self.data = {k: self.data[k] for k in ("command", "versions")} | {
            "summary": summary,
            "results": self.data["results"],
        }
        self.write()
        print(json.dumps(summary, indent=1))

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(part, self.path)


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "jax-cuda13-pjrt", "flax", "optax", "pulp", "highspy")
    return {"python": platform.python_version()} | {n: version(n) for n in names}


def show(actions: Actions) -> dict[str, dict[str, str]]:
    return {b: {t: str(c) for t, c in tags.items()} for b, tags in actions.items()}
