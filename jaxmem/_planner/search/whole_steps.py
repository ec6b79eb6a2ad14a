"""Compiles changes of a search's best plan for their buffers, where that takes a part of a full
compile.

Where a compile for buffers takes a second, prices are corrected by whole steps. A profile prices
pieces of a layer, each as a program of its own, and XLA fuses across pieces. In the whole step, a
kept tensor may cost nothing to write in addition to tensors that are written in any case, and a
recomputed tensor may have its weights gathered from other devices once more. For GPT-2 on a v5e, a
plan that was best by prices was slower, by the roofline of the whole step, than every tag kept.
Each whole step that was compiled corrects the seconds of its choices, by the fit with which
compiles correct bytes (`_planner/solve/additive.py`), and the program is solved again.

Changes of single tags alone were the first choice. They stop where one tag could only be kept in
the place of another, and they do not know what several changes gain together.

The number of compiles limits the search, and not its seconds: on a busy machine a limit in seconds
ended the search before the changes that gained most, so that the plan depended on what else ran.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions, Choice
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.times import check_goes_on
from jaxmem._planner.search import candidates
from jaxmem._planner.search.candidates import hand_policies
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import Cost
from jaxmem._planner.solve.problem import Key, Problem
from jaxmem._planner.solve.solution import Solution
from jaxmem.errors import SolverError

MOST = 64  # compiles for buffers
FASTER = 1e-4  # the share of a step's time by which a change must gain
NEARLY = 1.02  # of the room: working memory may be less under the change
IN_A_ROW = 3  # answers by corrected prices that gain nothing


def refine_by_whole_steps(search: Search) -> Mapping[Key, float]:
    """Adds to the search what is faster than the best of them, by the clock, and fits: policies
    that one would try by hand, what the program answers to corrected prices, and changes of one
    tag to keep or to recompute, until none gains. Returns the corrections, as `Problem` has them.

    Does nothing, and corrects nothing, where a step's costs are known from a whole compile alone.
    """
    if not search.steps.backend.assigns or not search.fitting:
        return {}
    LOG.info("weighing changes by the whole step")
    refinement = _Refinement(search)
    refinement.compile_buffers([*hand_policies(search.profile).values(), *_without_limit(search)])
    refinement.solve()
    while not refinement.ended and (refinement.change() | refinement.solve()):
        pass
    return refinement.longer(refinement.best).by_choice


class _Refinement:
    def __init__(self, search: Search):
        self.search, self.step_time = search, search.step_time
        self.left = MOST

    @property
    def ended(self) -> bool:
        return self.left <= 0

    @property
    def best(self) -> Trial:
        return min(self.search.fitting, key=self.step_time.cautious)

    def change(self) -> bool:
        """Weighs every change of one tag, of whatever is the best by then; whether another is."""
        before, width = self.best, self.search.steps.backend.width
        left = list(_changes(self.search.profile))
        while left and not self.ended:
            now, base = [], self.best
            while left and len(now) < width:
                actions = _changed(self.search.profile, base.actions, *left.pop(0))
                now += [actions] if self._may_fit(actions, base) else []
            self.compile_buffers(now)
        return self.best is not before  # be it by a hair: then it has neighbours of its own

    def solve(self) -> bool:
        """Weighs what the program answers to corrected prices, which each answer corrects again;
        whether one gained.
        """
        before, missed = self.best, 0
        while missed < IN_A_ROW and not self.ended:
            best = self.best
            if (solution := self._by_corrected_prices(best)) is None:
                break
            self.compile_buffers([solution.actions], solution.gap)
            missed = 0 if self._gained(best) else missed + 1
        return self._gained(before)

    def longer(self, best: Trial) -> Additive:
        """By how many seconds whole steps take longer than the profile says, by choice: counted
        from `best`, since they hold nearby.
        """
        search = self.search
        known = [t for t in (*search.compiled, *search.recalled) if t.xla_seconds is not None]
        known.sort(key=lambda t: t is not best)
        told = [(t.actions, self.step_time.of(t) - t.cost.seconds) for t in known]
        return Additive.fit(told, search.profile)

    def _gained(self, before: Trial) -> bool:
        gained = self.step_time.cautious(before) - self.step_time.cautious(self.best)
        return gained > FASTER * self.step_time.base

    def _by_corrected_prices(self, best: Trial) -> Solution | None:
        """The fastest assignment that nobody weighed, by the profile's prices and what whole steps
        were longer; None where it is not expected to be faster than `best`.
        """
        search, model = self.search, self.longer(best)
        problem = search.problem(search.model())
        known = (t.actions for t in (*search.compiled, *search.recalled))
        problem = dataclasses.replace(
            problem,
            corrections=model.by_choice,
            excluded=(*problem.excluded, *known),
        )
        try:
            solution = candidates.fastest(problem)
        except SolverError as error:  # something that fits is found already
            LOG.info("no better plan is looked for: %s", error)
            return None
        if solution is None:
            return None
        expected = solution.cautious_seconds + model.predict(solution.actions)
        worth = self.step_time.cautious(best) - FASTER * self.step_time.base
        return solution if expected < worth else None

    def _may_fit(self, actions: Actions, base: Trial) -> bool:
        """Whether what is saved, beside the rest of `base`, is about as much as there is room for:
        a compile is worth no more where it plainly is not.
        """
        cost = candidates.price_of(self.search.profile, actions)
        more = 0 if cost is None else cost.saved_bytes - base.cost.saved_bytes
        return base.total + more <= NEARLY * self.search.limits.usable_bytes

    def compile_buffers(self, many: list[Actions], gap: float = 0.0) -> None:
        """Weighs assignments that are new and have a price; what they may be off is `gap`."""
        check_goes_on()
        known = [t.actions for t in (*self.search.compiled, *self.search.recalled)]
        known += self.search.refused
        fresh: list[tuple[Actions, Cost]] = []
        for actions in many:
            if any(candidates.alike(actions, other) for other in known):
                continue
            if (cost := candidates.price_of(self.search.profile, actions)) is not None:
                fresh.append((actions, cost))
                known.append(actions)
        self.left -= len(fresh)
        found = self.search.steps.compile_buffers(*(actions for actions, _ in fresh))
        for (actions, cost), step in zip(fresh, found):
            if not isinstance(step, CompiledStep):
                self.search.refused.append(actions)
                continue
            self.search.history.remember(step)
            total = step.total
            self.search.tried.append(Trial(step, cost, total, gap))


def _without_limit(search: Search) -> list[Actions]:
    """The fastest assignment by prices without a limit on device bytes. Its compiled bytes may fit,
    and changes of tags reach other plans from it than from one that fills the budget.
    """
    problem = Problem(
        search.profile, None, search.limits.host_bytes, excluded=tuple(search.refused)
    )
    try:
        best = candidates.fastest(problem)
    except SolverError as error:  # something that fits is found already
        LOG.info("no plan without a limit is looked for: %s", error)
        return []
    return [] if best is None else [best.actions]


def _changes(profile: Profile) -> Iterator[tuple[str, str, Choice]]:
    """Blocks, tags and choices to take for them, the tags with the most bytes first."""
    size = lambda tag: max((o.device_bytes for o in tag.options), default=0)
    tags = {(b.name, t.name): b.layers * size(t) for b in profile.blocks for t in b.tags}
    for key in sorted(tags, key=lambda key: -tags[key]):
        yield from ((*key, choice) for choice in (KEEP, RECOMPUTE))


def _changed(profile: Profile, actions: Actions, block: str, tag: str, choice: Choice) -> Actions:
    """The same with another choice for one tag; where everything is kept, every other tag is kept
    and the rest recomputed.
    """
    found = {label: dict(choices) for label, choices in actions.items()}
    own = found.setdefault(block, {})
    if own.pop(REST, None) == KEEP:
        own |= {t.name: KEEP for b in profile.blocks if b.name == block for t in b.tags}
    own[tag] = choice
    return found
