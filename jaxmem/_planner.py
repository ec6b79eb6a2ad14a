"""plan(): trace, profile, solve, compile, refit, until a plan compiles within the budget."""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Sequence

import jax

from jaxmem._allowed import allowed_actions
from jaxmem._budget import parse_budget, show_bytes
from jaxmem._deviceless import Compiler
from jaxmem._errors import BudgetError, JaxmemWarning, TagError
from jaxmem._evaluate import Cost, evaluate, everything
from jaxmem._jaxpr import nbytes
from jaxmem._memory_model import MemoryModel
from jaxmem._plan import Draft, Plan, Row
from jaxmem._profile import profile as make_profile
from jaxmem._solve import Solution, least_bytes, priced, solve
from jaxmem._step import shards_of
from jaxmem._table import rows
from jaxmem._target import Target
from jaxmem._types import ALL, KEEP, RECOMPUTE, REST, Action, Actions, Profile
from jaxmem._verify import Verified, Verifier

MOST_COMPILES = 6
ENOUGH = 0.98  # of the budget: a plan that uses it is not improved on
GUESSED_HEAD = 0.15  # of the room beside the arguments: working memory, before a compile has told
DEVICELESS_MARGIN = 0.02  # autotuning on the device picks other matrix kernels: up to 1.3 % of bytes seen


def plan(
    build,
    *args,
    budget=None,
    host_budget=None,
    target: str | Target = "local",
    actions: Sequence[Action] = ALL,
    codecs=None,
) -> Plan:
    """The actions under which a training step fits a byte budget at the least cost in time, verified by a compile.

    `build(plan)` returns the step: a function of `args` (compiled with its first argument donated), or a `jax.jit` or
    `nnx.jit` function, taken as it is; `plan` is None for everything kept. `args` are arrays, modules or
    `jax.ShapeDtypeStruct`s. `budget`: bytes of the whole step on one device, "12GiB", "90%" of the usable memory, or
    None for all of it; `host_budget` likewise for tensors in host memory. `target`: "local", or a GPU such as "h200"
    or "a100-80gb:8" that need not be there. `actions`: those allowed. `codecs`: a codec or several for every tag that
    names none, or a dict by kind; None means the kind's own (Adacc §3.2).

    Raises BudgetError for a budget that cannot be read or met (with the least bytes that compiled), StepError for a
    step without a block, TargetError for a target that is unknown or cannot be compiled for, TagError for tags that
    cannot be planned.
    """
    target = Target.parse(target)
    limit = parse_budget(budget, target.usable_bytes)
    host_room = parse_budget(host_budget, target.host_bytes, "host_budget")
    allowed, notes = allowed_actions(actions, target)
    with contextlib.nullcontext() if target.local else Compiler(target) as compiler:
        search = _Search(Verifier(build, args, target, compiler), limit, host_room, allowed, codecs)
        return search.run(list(notes))


@dataclasses.dataclass
class _Point:
    """A compiled plan, and what was said of it before."""

    verified: Verified
    cost: Cost
    predicted_bytes: int

    @property
    def total(self) -> int:
        return self.verified.compiled.total_bytes


class _Search:
    """One search: its points grow by compiles, and its memory model is refitted to them."""

    def __init__(self, verifier: Verifier, limit: int, host_room: int, allowed, codecs):
        self.verifier, self.limit, self.host_room = verifier, limit, host_room
        self.allowed, self.codecs = allowed, codecs
        self.room = int(limit * (1 if verifier.target.local else 1 - DEVICELESS_MARGIN))
        self.points: list[_Point] = []
        self.solve_seconds = 0.0

    def run(self, notes: list[str]) -> Plan:
        verifier, target = self.verifier, self.verifier.target
        start = time.perf_counter()
        traced = verifier.trace(Draft())
        shards = shards_of(traced, target.devices)
        self.profile = make_profile(
            traced.jaxpr, target, actions=self.allowed, codecs=self.codecs, shards=shards, compiler=verifier.compiler,
        )  # fmt: skip
        profile_seconds = time.perf_counter() - start
        self._warn_of_waste()
        keep_all = {b.name: {t.name: KEEP for t in b.tags} | {REST: KEEP} for b in self.profile.blocks}
        size = sum(nbytes(a) for a in traced.jaxpr.in_avals) // shards
        if target.local:
            (baseline,) = verifier.compile(None)
        else:  # side by side with the first guess
            guess = self._first_guess(size, int(GUESSED_HEAD * max(0, self.room - size)))
            baseline, guessed = verifier.compile(None, guess.actions)
        self.baseline = dataclasses.replace(baseline, actions=keep_all)
        total = self.baseline.compiled.total_bytes
        everything_kept = _Point(self.baseline, everything(self.profile), total)
        if total <= self.room:
            return self._finish(everything_kept, profile_seconds, notes)
        self.points.append(everything_kept)
        head = total - self._static - everything_kept.cost.saved_bytes
        if target.local:
            guess = self._first_guess(self._static, max(0, head))
            (guessed,) = verifier.compile(guess.actions)
        self._add(guessed, guess.cost, self._static + guess.saved_bytes + max(0, head))
        self._refine()
        fitting = [p for p in self.points if p.total <= self.room and p.verified.compiled.host_bytes <= self.host_room]
        if not fitting:
            raise self._infeasible()
        best = min(fitting, key=lambda p: (p.cost.seconds, p.total))
        return self._finish(best, profile_seconds, notes)

    def _warn_of_waste(self) -> None:
        tags = {b.name: {t.name: KEEP for t in b.tags} for b in self.profile.blocks}
        cost = self._evaluate(tags)
        for message in cost.warnings if cost else ():
            warnings.warn(f"jaxmem: {message}", JaxmemWarning, stacklevel=4)

    def _first_guess(self, static: int, head: int) -> Solution:
        """A plan for what is left of the budget beside arguments and working memory, or the one of least saved bytes."""
        solution = self._solve({}, self.room - static - head)
        if solution is None:
            solution = least_bytes(self.profile, {}, self.host_room)
        if solution is None:
            raise BudgetError(
                f"plan: `host_budget` is {show_bytes(self.host_room)}, and no assignment of the actions allowed needs so little"
            )
        return solution

    def _add(self, verified: Verified, cost: Cost, predicted: int) -> None:
        self.points.append(_Point(verified, cost, predicted))

    def _model(self) -> MemoryModel:
        history = [(p.verified.actions, p.total - self._static - p.cost.saved_bytes) for p in self.points]
        return MemoryModel.fit(history, self.profile)

    @property
    def _static(self) -> int:
        return self.baseline.compiled.argument_bytes

    def _refine(self) -> None:
        """Solves for the room left by what was learned, compiles, and learns, until nothing is left to gain."""
        width = 1 if self.verifier.compiler is None else 2
        best = self._solve({}, None)  # whatever it takes
        fastest = best.seconds if best else 0.0
        while self.verifier.compiles < MOST_COMPILES:
            fitting = [p for p in self.points if p.total <= self.room]
            if any(p.total >= ENOUGH * self.room or p.cost.seconds <= fastest for p in fitting):
                return
            model = self._model()
            picks: list[Solution | None] = []
            for share in (1.0, 0.985, 0.96)[: width + 1]:
                room = int(self.room * share) - self._static - int(model.reference)
                picks.append(self._solve(model.transients, room))
            if not fitting:
                picks.insert(width - 1, least_bytes(self.profile, model.transients, self.host_room))
                picks.append(self._recompute_all(model))
            fresh: list[Solution] = []
            for pick in picks:
                if pick is not None and not self._known(pick.actions, fresh):
                    fresh.append(pick)
            fresh = fresh[: min(width, MOST_COMPILES - self.verifier.compiles)]
            if not fresh:
                return
            for verified, pick in zip(self.verifier.compile(*(p.actions for p in fresh)), fresh):
                self._add(verified, pick.cost, int(self._static + pick.saved_bytes + model.predict(pick.actions)))

    def _recompute_all(self, model: MemoryModel) -> Solution:
        return priced(self.profile, {b.name: {} for b in self.profile.blocks}, model.transients)

    def _solve(self, transients, room: int | None) -> Solution | None:
        start = time.perf_counter()
        solution = solve(self.profile, room=room, transients=transients, host_room=self.host_room)
        self.solve_seconds += time.perf_counter() - start
        return None if solution is None else dataclasses.replace(solution, actions=self._settled(solution))

    def _settled(self, solution: Solution) -> Actions:
        """The same program, with a tag called kept where its tensor is the block's input, which is kept anyway."""
        actions = solution.actions
        for label, choices in solution.actions.items():
            for tag, choice in choices.items():
                if choice == RECOMPUTE:
                    other = actions | {label: actions[label] | {tag: KEEP}}
                    cost = self._evaluate(other)
                    if cost is not None and (cost.saved_bytes, cost.seconds) == (
                        solution.saved_bytes,
                        solution.seconds,
                    ):
                        actions = other if _demanded(cost, label, tag) else actions
        return actions

    def _evaluate(self, actions: Actions) -> Cost | None:
        try:
            return evaluate(self.profile, actions)
        except TagError:  # keep is not among the actions allowed
            return None

    def _known(self, actions: Actions, fresh: list[Solution]) -> bool:
        return any(_same(actions, a) for a in [p.verified.actions for p in self.points] + [s.actions for s in fresh])

    def _infeasible(self) -> BudgetError:
        least = min(self.points, key=lambda p: p.total)
        compiled, saved = least.verified.compiled, least.cost.saved_bytes
        other = least.total - self._static - saved
        parts = {
            "arguments and model states": self._static,
            "tensors saved for the backward": saved,
            "working memory of the head and one block": other,
        }
        holder = max(parts, key=lambda k: parts[k])
        advice = {
            "arguments and model states": "use a smaller model, lower-precision states, or more devices",
            "tensors saved for the backward": "allow more actions, or tag more tensors",
            "working memory of the head and one block": "chunk the loss, or use a smaller batch: no action in a block makes it smaller",
        }[holder]
        return BudgetError(
            f"plan: `budget` is {show_bytes(self.limit)}, and the least that compiled is {show_bytes(least.total)}"
            f" ({least.total} bytes) for target {str(self.verifier.target)!r}: "
            + ", ".join(f"{show_bytes(v)} {k}" for k, v in parts.items())
            + f"; the largest part is {holder}: {advice}"
            + (
                ""
                if self.verifier.target.local
                else f"; {DEVICELESS_MARGIN:.0%} of the budget is left for autotuning on the device"
            )
            + (f"; host memory needed: {show_bytes(compiled.host_bytes)}" if compiled.host_bytes else ""),
            least_bytes=least.total,
        )

    def _rows(self, actions: Actions) -> tuple[Row, ...]:
        if len(self.points) < 2:  # everything is kept: nothing was solved for
            return rows(self.profile, actions, 0, {}, self.host_room)
        model = self._model()
        room = self.room - self._static - int(model.reference)
        return rows(self.profile, actions, room, model.transients, self.host_room)

    def _finish(self, best: _Point, profile_seconds: float, notes: list[str]) -> Plan:
        compiled = best.verified.compiled
        base = _step_seconds(self.profile, self.baseline)
        more = best.cost.seconds - everything(self.profile).seconds
        actions = {b: dict(best.verified.actions.get(b, {})) for b in {b.name: None for b in self.profile.blocks}}
        for block in self.profile.blocks:
            for tag in block.tags:
                actions[block.name].setdefault(tag.name, RECOMPUTE)
        return Plan(
            actions=actions,
            budget_bytes=self.limit,
            predicted_bytes=best.predicted_bytes,
            compiled_bytes=compiled.total_bytes,
            baseline_bytes=self.baseline.compiled.total_bytes,
            host_bytes=compiled.host_bytes,
            predicted_seconds=base + max(0.0, more),  # never claimed to be faster than the step without a plan
            baseline_seconds=base,
            profile_seconds=profile_seconds,
            solve_seconds=self.solve_seconds,
            compile_seconds=self.verifier.seconds,
            compiles=self.verifier.compiles,
            time_source=self.profile.time_source,
            target=str(self.verifier.target),
            fingerprint=self.profile.fingerprint,
            jax_version=jax.__version__,
            rows=self._rows(actions),
            notes=tuple(notes),
            _step=best.verified.executable,
        )


def _demanded(cost: Cost, label: str, tag: str) -> bool:
    return any(b.name == label and tag in dict(b.saved) for b in cost.blocks)


def _same(a: Actions, b: Actions) -> bool:
    strip = lambda x: {k: {t: c for t, c in v.items() if c.action is not Action.RECOMPUTE} for k, v in x.items()}
    return strip(a) == strip(b)


def _step_seconds(profile: Profile, baseline: Verified) -> float:
    """A step with everything kept: the blocks' time, and the rest in proportion to its matrix FLOPs."""
    blocks = sum(3 * b.runs * sum(e.flops for e in b.equations) for b in profile.blocks)
    return profile.step_seconds * max(1.0, baseline.compiled.matmul_flops / blocks if blocks else 1.0)
