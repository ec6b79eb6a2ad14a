"""plan(): trace, profile, solve, compile, refit, until a plan compiles within the budget."""

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Sequence

from jaxmem._core.actions import ALL, KEEP, RECOMPUTE, REST, Action, Actions
from jaxmem._core.bytes import parse_budget, show_bytes
from jaxmem._core.progress import LOG
from jaxmem._device.support import allowed_actions
from jaxmem._device.target import Target
from jaxmem._jax.donation import warn_of_copies
from jaxmem._jax.jaxpr import nbytes
from jaxmem._jax.step import shards_of
from jaxmem._plan.plan import Draft, Plan
from jaxmem._planner.compile import Verified, Verifier
from jaxmem._planner.divide import Division, best_division
from jaxmem._planner.history import History
from jaxmem._planner.microbatches import checked, fastest, with_microbatches
from jaxmem._planner.outcome import Spent, infeasible, outcome
from jaxmem._planner.trials import Evidence, Tried, repeated_bytes
from jaxmem._profile.profile import profile as make_profile
from jaxmem._solver.cost import Cost, evaluate, everything
from jaxmem._solver.solve import Solution, fits, least_bytes, open_choices, priced, solve
from jaxmem._xla.deviceless import Compiler
from jaxmem.errors import BudgetError, JaxmemWarning, TagError

MOST_COMPILES = 6
ENOUGH = 0.98  # of the budget: a plan that uses it is not improved on
WORTH = 0.002  # of a step: what dividing the layers must gain
GUESSED_HEAD = 0.15  # of the room beside the arguments: working memory, before a compile has told
DEVICELESS_MARGIN = (
    0.02  # autotuning on the device picks other matrix kernels: up to 1.3 % of bytes seen
)


def plan(
    build,
    *args,
    budget=None,
    host_budget=None,
    target: str | Target = "local",
    actions: Sequence[Action] = ALL,
    codecs=None,
    microbatches: Sequence[int] | None = None,
) -> Plan:
    """The actions under which a training step fits a byte budget at the least cost in time,
    verified by a compile.

    `build(plan)` returns the step: a function of `args` (compiled with its first argument donated),
    or a `jax.jit` or
    `nnx.jit` function, taken as it is; `plan` is None for everything kept. `args` are arrays,
    modules or
    `jax.ShapeDtypeStruct`s. `budget`: bytes of the whole step on one device, "12GiB", "90%" of the
    usable memory, or None for all of it; `host_budget` likewise for tensors in host memory.
    `target`: "local", or a GPU such as "h200" or "a100-80gb:8" that need not be there. `actions`:
    those allowed. `codecs`: a codec or several for every tag that names none, or a dict by kind;
    None means the kind's own (Adacc §3.2). `microbatches`: numbers to choose from, each planned for
    with `build(plan, microbatches=n)`; the fastest that fits is taken, and is the plan's
    `microbatches`.

    Raises BudgetError for a budget that cannot be read or met (with the least bytes that compiled),
    StepError for a step without a block, TargetError for a target that is unknown or cannot be
    compiled for, TagError for tags that cannot be planned.
    """
    target = Target.parse(target)
    limit = parse_budget(budget, target.usable_bytes)
    host_room = parse_budget(host_budget, target.host_bytes, "host_budget")
    allowed, notes = allowed_actions(actions, target)
    with contextlib.nullcontext() if target.local else Compiler(target) as compiler:

        def search(number: int | None) -> Plan:
            verifier = Verifier(with_microbatches(build, number), args, target, compiler)
            return _Search(verifier, limit, host_room, allowed, codecs).run(list(notes))

        return search(None) if microbatches is None else fastest(checked(microbatches), search)


class _Search:
    """One search: its evidence grows by compiles, and what is compiled next is solved for what it
    tells.
    """

    def __init__(self, verifier: Verifier, limit: int, host_room: int, allowed, codecs):
        self.verifier, self.limit, self.host_room = verifier, limit, host_room
        self.allowed, self.codecs = allowed, codecs
        self.room = int(limit * (1 if verifier.target.local else 1 - DEVICELESS_MARGIN))
        self.solve_seconds = 0.0

    def run(self, notes: list[str]) -> Plan:
        verifier, target = self.verifier, self.verifier.target
        start = time.perf_counter()
        LOG.info("tracing the step, and timing its pieces")
        traced = verifier.trace(Draft())
        shards = shards_of(traced, target.devices)
        self.profile = make_profile(
            traced.jaxpr, target, actions=self.allowed, codecs=self.codecs, shards=shards, compiler=verifier.compiler,
        )  # fmt: skip
        profile_seconds = time.perf_counter() - start
        warn_of_copies(traced, "plan")
        self._warn_of_waste()
        self.evidence = Evidence(self.profile, self.limit, self.room, self.host_room)
        self.history = History(verifier.database, target, traced.jaxpr)
        self._begin(sum(nbytes(a) for a in traced.jaxpr.in_avals) // shards)
        best, division = self.evidence.baseline, None
        if best.total > self.room:
            self._refine()
            if not self.evidence.fitting:
                raise infeasible(self.evidence, target)
            best = min(self.evidence.fitting, key=lambda t: (t.cost.seconds, t.total))
            best, division = self._divide(best)
        spent = Spent(profile_seconds, self.solve_seconds, verifier.seconds, verifier.compiles)
        return outcome(self.evidence, best, division, target, spent, tuple(notes))

    def _begin(self, arguments: int) -> None:
        """The step with everything kept and, unless that fits, a first guess, which knows bytes of
        arguments.
        """
        evidence, local = self.evidence, self.verifier.target.local
        keep_all = {
            b.name: {t.name: KEEP for t in b.tags} | {REST: KEEP} for b in self.profile.blocks
        }
        whole = lambda v: Tried(
            dataclasses.replace(v, actions=keep_all),
            everything(self.profile),
            v.compiled.total_bytes,
        )
        known = self._recall(whole)
        guess = guessed = None
        if (
            known is not None and local and known.total > self.room
        ):  # what does not fit need not be compiled again
            evidence.tried.append(known)
        elif local:
            evidence.tried += map(whole, self._compile(None))
        else:  # side by side with the guess
            guess = self._first_guess(arguments, int(GUESSED_HEAD * max(0, self.room - arguments)))
            kept, guessed = self._compile(None, guess.actions)
            evidence.tried.append(whole(kept))
        if evidence.baseline.total <= self.room:
            return
        if guess is None or guessed is None:
            guess = self._first_guess(evidence.static, 0)
            (guessed,) = self._compile(guess.actions)
        predicted = int(
            evidence.static + guess.saved_bytes + evidence.model().predict(guess.actions)
        )
        evidence.tried.append(Tried(guessed, guess.cost, predicted))

    def _recall(self, whole) -> Tried | None:
        """Fills the evidence with earlier searches' compiles; the one with everything kept is
        returned.
        """
        baseline = None
        for actions, compiled in self.history.recall():
            if actions is None:
                baseline = whole(Verified({}, compiled))
            elif (cost := self._evaluate(actions)) is not None:
                self.evidence.recalled.append(
                    Tried(Verified(actions, compiled), cost, compiled.total_bytes)
                )
        return baseline

    def _compile(self, *many: Actions | None) -> list[Verified]:
        done = self.verifier.compiles
        numbers = " and ".join(str(done + i + 1) for i in range(len(many)))
        best = min((t.total for t in self.evidence.tried), default=None)
        so_far = (
            f"; least so far {show_bytes(best)}, the budget is {show_bytes(self.limit)}"
            if best
            else ""
        )
        LOG.info(
            "compile %s of at most %d%s",
            numbers,
            MOST_COMPILES,
            so_far,
            extra={"done": done, "of": MOST_COMPILES},
        )
        found = self.verifier.compile(*many)
        for actions, verified in zip(many, found):
            self.history.remember(actions, verified.compiled)
        return found

    def _warn_of_waste(self) -> None:
        tags = {b.name: {t.name: KEEP for t in b.tags} for b in self.profile.blocks}
        cost = self._evaluate(tags)
        for message in cost.warnings if cost else ():
            warnings.warn(f"jaxmem: {message}", JaxmemWarning, stacklevel=4)

    def _first_guess(self, static: int, head: int) -> Solution:
        """A plan for what is left of the budget beside arguments and working memory, or the one of
        least saved bytes.

        `head`: bytes of working memory to reckon with where no compile has told yet.
        """
        transients = repeated_bytes(self.profile)
        if self.evidence.tried or self.evidence.recalled:
            model = self.evidence.model()
            head, transients = int(model.reference), model.transients
        solution = self._solve(transients, self.room - static - head)
        if solution is None:
            solution = least_bytes(self.profile, transients, self.host_room)
        if solution is None:
            raise BudgetError(
                f"plan: `host_budget` is {show_bytes(self.host_room)}, and no assignment of the"
                " actions allowed needs so little"
            )
        return solution

    def _refine(self) -> None:
        """Solves for the room left by what was learned, compiles, and learns, until nothing is left
        to gain.
        """
        evidence, width = self.evidence, 1 if self.verifier.compiler is None else 2
        best = self._solve({}, None)  # whatever it takes
        fastest = best.seconds if best else 0.0
        while self.verifier.compiles < MOST_COMPILES:
            within = evidence.within_budget
            model = evidence.model()
            picks = self._recalled_plans(within, model.transients)
            if not picks and any(
                t.total >= ENOUGH * self.room or t.cost.seconds <= fastest for t in within
            ):
                return
            for share in (1.0, 0.985, 0.96)[: width + 1]:
                room = int(self.room * share) - evidence.static - int(model.reference)
                picks.append(self._solve(model.transients, room))
            if not within:
                picks.insert(width - 1, least_bytes(self.profile, model.transients, self.host_room))
                picks.append(
                    priced(
                        self.profile, {b.name: {} for b in self.profile.blocks}, model.transients
                    )
                )
                picks += self._neighbours(model.transients)
            fresh: list[Solution] = []
            for pick in picks:
                if pick is not None and not self._known(pick.actions, fresh):
                    fresh.append(pick)
            fresh = fresh[: min(width, MOST_COMPILES - self.verifier.compiles)]
            if not fresh:
                return
            for verified, pick in zip(self._compile(*(p.actions for p in fresh)), fresh):
                predicted = int(evidence.static + pick.saved_bytes + model.predict(pick.actions))
                evidence.tried.append(Tried(verified, pick.cost, predicted))

    def _recalled_plans(self, within: list[Tried], transients) -> list[Solution | None]:
        """The fastest plan that an earlier search saw compile within this budget, if none so fast
        is `within` yet.
        """
        best = min((t.cost.seconds for t in within), default=math.inf)
        fits = [
            t
            for t in self.evidence.recalled
            if t.total <= self.room and t.host_bytes <= self.host_room
        ]
        faster = [t for t in fits if t.cost.seconds < best and not self._known(t.actions, [])]
        return (
            [priced(self.profile, min(faster, key=lambda t: t.cost.seconds).actions, transients)]
            if faster
            else []
        )

    def _divide(self, best: Tried) -> tuple[Tried, Division | None]:
        """The best plan that decides two groups of layers apart, if it is faster than `best` and
        compiles within.
        """
        chosen, short, seen = None, 0, []
        while self.verifier.compiles < MOST_COMPILES:
            model = self.evidence.model()
            base = self.evidence.static + int(model.reference)
            start = time.perf_counter()
            division = best_division(self.profile, model, self.room - base - short, self.host_room)
            self.solve_seconds += time.perf_counter() - start
            worth = best.cost.seconds - WORTH * self.profile.step_seconds
            if (
                division is None
                or division.solution.seconds > worth
                or division.solution.actions in seen
            ):
                break
            seen.append(division.solution.actions)
            predicted = base + short + division.bytes
            (verified,) = self._compile(division.solution.actions)
            tried = Tried(verified, division.solution.cost, predicted)
            short += tried.total - predicted
            if tried.total <= self.room and tried.host_bytes <= self.host_room:
                best, chosen = tried, division
        return best, chosen

    def _neighbours(self, transients) -> list[Solution]:
        """The plans one choice away from the least that compiled, least first: the model may be
        wrong about one.
        """
        least = min(self.evidence.tried, key=lambda t: t.total).actions
        found = []
        for (block, tag), choices in open_choices(self.profile).items():
            for choice in choices:
                found.append(
                    priced(self.profile, least | {block: least[block] | {tag: choice}}, transients)
                )
        return sorted(
            (s for s in found if fits(s, None, self.host_room)), key=lambda s: (s.bytes, s.seconds)
        )

    def _solve(self, transients, room: int | None) -> Solution | None:
        start = time.perf_counter()
        solution = solve(self.profile, room=room, transients=transients, host_room=self.host_room)
        self.solve_seconds += time.perf_counter() - start
        return (
            None
            if solution is None
            else dataclasses.replace(solution, actions=self._settled(solution))
        )

    def _settled(self, solution: Solution) -> Actions:
        """The same program, with a tag called kept where its tensor is the block's input, which is
        kept anyway.
        """
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
        return any(
            _same(actions, a)
            for a in [t.actions for t in self.evidence.tried] + [s.actions for s in fresh]
        )


def _demanded(cost: Cost, label: str, tag: str) -> bool:
    return any(b.name == label and tag in dict(b.saved) for b in cost.blocks)


def _same(a: Actions, b: Actions) -> bool:
    strip = lambda x: {
        k: {t: c for t, c in v.items() if c.action is not Action.RECOMPUTE} for k, v in x.items()
    }
    return strip(a) == strip(b)
