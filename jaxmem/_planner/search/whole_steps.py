"""Compiles changes of a search's best plan for buffers, on a target where a compile for buffers
takes a fraction of a full compile.

If a compile for buffers takes about a second, whole steps correct the prices. A profile prices
pieces of a layer, each as a separate program, and XLA fuses across pieces. In the whole step, a
kept tensor may cost nothing to write in addition to tensors that are written in any case, and the
recomputation of a tensor may gather weights from other devices once more. For GPT-2 on a v5e, a
plan that was best by prices was slower, by the roofline of the whole step, than every tag kept.
Each compiled whole step corrects the seconds of its choices, by the model with which compiles
correct bytes (`_planner/solve/additive.py`), and the program is solved again.

The first choice was to change only single tags. This search stops if a tag can be kept only in
place of another tag, and it does not find several changes that gain only together.

The number of compiles limits the search, and not its seconds: on a busy machine a limit in seconds
ended the search before the changes that gained most, so that the plan depended on other work of the
machine.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmem._core.actions import KEEP, RECOMPUTE, UNTAGGED, Actions, Choice, is_whole
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
from jaxmem._planner.solve.problem import ActionProblem, Key
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem.errors import SolverError

MOST_BUFFER_COMPILES = 64
FASTER = 1e-4  # the share of a step's time that a change must gain
# A change that is faster by prices may be predicted to take up to this multiple of the usable
# bytes, since it may lower working memory: a kept tensor may take fewer bytes than its
# recomputation.
CHANGED_SHARE = 1.15
MOST_WAIT = 0.05  # the largest share of a step's time by which a change may wait for host memory
IN_A_ROW = 3  # the most successive solutions by corrected prices that gain nothing


def refine_by_whole_steps(search: Search) -> Mapping[Key, float]:
    """Compiles for buffers, and adds to the search, plans that may be faster than its best plan:
    policies that a user would write by hand, solutions of the program with corrected prices, and
    changes of one tag. It ends if no further plan is faster by the seconds of whole steps. Returns
    the corrections of prices, as `ActionProblem.corrections`.

    Does nothing, and returns no corrections, on a target that does not compile for buffers only.
    """
    if not search.compiler.backend.stops_at_buffers or not search.fitting:
        return {}
    LOG.info("compiling changes of the plan for buffers")
    refinement = _Refinement(search)
    refinement.compile_buffers([*hand_policies(search.profile).values(), *_without_limit(search)])
    refinement.solve()
    while not refinement.ended and (refinement.change() | refinement.solve()):
        pass
    return refinement.longer(refinement.best).by_choice


class _Refinement:
    def __init__(self, search: Search):
        self.search, self.step_time = search, search.step_time
        self.left = MOST_BUFFER_COMPILES

    @property
    def ended(self) -> bool:
        return self.left <= 0

    @property
    def best(self) -> Trial:
        return min(self.search.fitting, key=self.step_time.risk_adjusted)

    def change(self) -> bool:
        """Compiles every change of one tag of the best plan for buffers. A better plan becomes the
        best plan at once, and the next changes are made to it. Returns whether the best plan
        changed.
        """
        before, width = self.best, self.search.compiler.backend.parallel_compiles
        left = list(_changes(self.search.profile))
        while left and not self.ended:
            batch, base = [], self.best
            while left and len(batch) < width:
                actions = _changed(self.search.profile, base.actions, *left.pop(0))
                batch += [actions] if self._is_worth_it(actions, base) else []
            self.compile_buffers(batch)
        # Any new best plan counts, even if it gains little: it has other changes than `before`.
        return self.best is not before

    def solve(self) -> bool:
        """Solves the program with corrected prices, and compiles the solution for buffers, which
        corrects the prices again. Ends after `IN_A_ROW` solutions that gain nothing. Returns
        whether a solution gained.
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
        """The seconds of whole steps less the profile's seconds, by choice. The reference is
        `best`, since the corrections are valid for plans that differ little from `best`.
        """
        search = self.search
        known = [t for t in (*search.trials, *search.recalled) if t.xla_seconds is not None]
        known.sort(key=lambda t: t is not best)
        differences = [(t.actions, self.step_time.of(t) - t.cost.seconds) for t in known]
        return Additive.fit(differences, search.profile)

    def _gained(self, before: Trial) -> bool:
        gained = self.step_time.risk_adjusted(before) - self.step_time.risk_adjusted(self.best)
        return gained > FASTER * self.step_time.base

    def _by_corrected_prices(self, best: Trial) -> ActionSolution | None:
        """The fastest assignment by corrected prices that was not compiled before; None if it is
        not expected to be faster than `best`.
        """
        search, model = self.search, self.longer(best)
        problem = search.problem(search.model())
        known = (t.actions for t in (*search.trials, *search.recalled))
        problem = dataclasses.replace(
            problem,
            corrections=model.by_choice,
            excluded=(*problem.excluded, *known),
        )
        solution = _fastest(problem, "a faster plan")
        if solution is None:
            return None
        expected = solution.risk_adjusted_seconds + model.predict(solution.actions)
        worth = self.step_time.risk_adjusted(best) - FASTER * self.step_time.base
        return solution if expected < worth else None

    def _is_worth_it(self, actions: Actions, base: Trial) -> bool:
        """Whether `actions`, a change of `base`, are worth a compile. Their saved bytes, together
        with the other bytes of `base`, are at most the usable bytes; or if they are faster by
        prices, at most `CHANGED_SHARE` times the usable bytes. Their additional waits for host
        memory are at most `MOST_WAIT` of the step.
        """
        cost = candidates.price_of(self.search.profile, actions)
        if cost is None:
            return False  # `compile_buffers` compiles no assignment without a price
        if cost.host_seconds - base.cost.host_seconds > MOST_WAIT * self.step_time.base:
            return False
        faster = cost.risk_adjusted_seconds < base.cost.risk_adjusted_seconds
        most = (CHANGED_SHARE if faster else 1.0) * self.search.limits.usable_bytes
        return base.total + cost.saved_bytes - base.cost.saved_bytes <= most

    def compile_buffers(self, many: list[Actions], gap: float = 0.0) -> None:
        """Compiles for buffers the assignments that are new and have a price.

        gap: the share of their time by which the optimum may be faster (`Trial.gap`).
        """
        check_goes_on()
        known = [t.actions for t in (*self.search.trials, *self.search.recalled)]
        known += self.search.refused
        fresh: list[tuple[Actions, Cost]] = []
        for actions in many:
            if any(candidates.alike(actions, other) for other in known):
                continue
            if (cost := candidates.price_of(self.search.profile, actions)) is not None:
                fresh.append((actions, cost))
                known.append(actions)
        self.left -= len(fresh)
        results = self.search.compiler.try_compile_buffers(
            *(actions for actions, _ in fresh), counted=False
        )
        for (actions, cost), step in zip(fresh, results):
            if not isinstance(step, CompiledStep):
                self.search.refused.append(actions)
                continue
            self.search.history.remember(step)
            self.search.plan_trials.append(Trial(step, cost, step.total, gap))


def _fastest(problem: ActionProblem, what: str) -> ActionSolution | None:
    """The fastest assignment by prices; None if no assignment fits, or if the solver's time runs
    out.

    what: the phrase that names the assignment in the log.
    """
    try:
        return candidates.solve_fastest(problem)
    except SolverError as error:  # the search has a plan that fits already
        LOG.info("the search for %s ends: %s", what, error)
        return None


def _without_limit(search: Search) -> list[Actions]:
    """The fastest assignment by prices without a limit on device bytes. Its compiled bytes may fit.
    Changes of its tags reach other plans than changes of a plan that fills the budget.
    """
    problem = ActionProblem(
        search.profile, None, search.limits.host_bytes, excluded=tuple(search.refused)
    )
    best = _fastest(problem, "a plan without a limit")
    return [] if best is None else [best.actions]


def _changes(profile: Profile) -> Iterator[tuple[str, str, Choice]]:
    """Changes (block, tag, choice) of every tag to recompute it, or to store it without a codec.
    The tags with the most bytes are first.
    """
    size = lambda block, tag: block.layers * max((o.device_bytes for o in tag.options), default=0)
    tags = [(block, tag) for block in profile.blocks for tag in block.tags]
    for block, tag in sorted(tags, key=lambda each: -size(*each)):
        stored = [o.choice for o in tag.options if not o.choice.action.encodes]
        yield from ((block.name, tag.name, choice) for choice in (*stored, RECOMPUTE))


def _changed(profile: Profile, actions: Actions, block: str, tag: str, choice: Choice) -> Actions:
    """The actions with another choice for one tag. If the block keeps everything, its other tags
    are kept, and its untagged tensors are recomputed.
    """
    changed = {label: dict(choices) for label, choices in actions.items()}
    of_block = changed.setdefault(block, {})
    if is_whole(of_block):
        del of_block[UNTAGGED]
        of_block |= {t.name: KEEP for b in profile.blocks if b.name == block for t in b.tags}
    of_block[tag] = choice
    return changed
