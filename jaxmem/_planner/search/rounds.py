"""The rounds of a search: each solves for what may fit, compiles it, and learns from its bytes."""

import dataclasses
import math
import time

from jaxmem._core.actions import Actions
from jaxmem._planner.search import candidates
from jaxmem._planner.search.divide import Division, best_division
from jaxmem._planner.search.least import corrected, least
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution
from jaxmem._planner.trials.clock import Clock, clock_of
from jaxmem._planner.trials.setting import Setting
from jaxmem._planner.trials.trial import Trial
from jaxmem._planner.trials.trials import Trials
from jaxmem._planner.trials.walks import MOST_WALKS
from jaxmem.errors import StepError

ENOUGH = 0.98  # the share of the room of which a plan that uses it is not improved on
# A budget is refused once the two assignments of least bytes exceed it by this share of the room
# beside arguments.
HOPELESS = 0.1
LOSSLESS_COMPILES = 2  # of plans that lose nothing, on top of the others
WORTH = 0.002  # the share of a step's time that dividing the layers must gain


class Rounds:
    """Rounds of one search: each solves, compiles and learns. What they compile is added to the
    trials.
    """

    def __init__(self, setting: Setting, trials: Trials):
        self.setting, self.trials = setting, trials
        self.solve_seconds = 0.0

    def without_loss(self) -> None:
        """Looks for a plan that loses nothing, where the fastest of those that fit loses accuracy:
        what is compiled decides whether one fits, not what was expected.
        """
        trials, limits = self.trials, self.setting.limits
        clock = clock_of(trials, self.setting.steps.backend.target)
        best = min(trials.fitting, key=clock.cautious, default=None)
        if best is None or not best.cost.is_lossy:
            return
        exact = dataclasses.replace(trials, lossless=True)  # adds to the same lists
        for _ in range(LOSSLESS_COMPILES):
            fitting = [t for t in trials.fitting if not t.cost.is_lossy]
            if any(t.total >= ENOUGH * limits.room for t in fitting):
                return
            picks = self._timed(candidates.within_budget, exact, 2)
            if not (fresh := self._fresh(picks)) and not fitting:
                fresh = self._fresh(self._timed(candidates.nearest, exact))
            if not fresh:
                return
            self._compile(fresh[:1])

    def _compile(self, picks: list[Solution]) -> None:
        """Compiles solutions, if there are any, and adds them to the trials."""
        trials = self.trials
        if not picks:
            return
        # Each trial keeps what the model said before it learned of the trial.
        expected = [trials.expected(pick) for pick in picks]
        steps = self.setting.attempt(*(p.actions for p in picks), least=trials.least)
        for step, pick, predicted in zip(steps, picks, expected):
            if isinstance(step, StepError):
                trials.refused.append(pick.actions)
                continue
            trials.tried.append(Trial(step, pick.cost, predicted, pick.gap))

    def least(self) -> None:
        """Compiles what takes the least bytes, before a budget is refused."""
        trials, limits = self.trials, self.setting.limits
        every = self._timed(least, self.setting, trials.refused)
        first = every[:2]  # unlike each other, since liveness estimates may be wrong about one
        self._compile(self._fresh(first))
        of = lambda picks: [t for t in trials.compiled if candidates.is_among(t.actions, picks)]
        if all(self._exceeds_by_far(t.total) for t in of(first)):
            return
        self._compile(self._fresh(every[2:]))
        if not any(limits.allow(t) for t in trials.tried):
            # What liveness estimates were off for these corrects them for assignments nearby.
            nearby = self._timed(corrected, self.setting, of(every), trials.refused)
            self._compile(self._fresh(nearby))

    def hasten(self) -> None:
        """Compiles the fastest plan without a limit on device bytes, if the profile calls it faster
        than the step as it is, which fits.
        """
        trials = self.trials
        problem = Problem(trials.profile, None, self.setting.limits.host_room)
        best = self._timed(candidates.fastest, problem)
        most = trials.baseline.cost.seconds - WORTH * trials.profile.step_seconds
        if best is None or best.cautious_seconds >= most:
            return
        if trials.profile.time_source == "roofline":
            return
        if candidates.is_among(best.actions, trials.compiled):
            return
        (step,) = self.setting.attempt(best.actions, least=trials.baseline.total)
        if not isinstance(step, StepError):
            trials.tried.append(Trial(step, best.cost, trials.expected(best), best.gap))

    def refine(self) -> None:
        """Solves for the room left by what was learned, compiles, and learns, until nothing is left
        to gain. What it compiles is added to the trials.
        """
        trials, limits = self.trials, self.setting.limits
        width = self.setting.steps.backend.width
        # No assignment of tags is faster than the best one without a limit on device bytes.
        best = self._timed(candidates.fastest, Problem(trials.profile, None, limits.host_room))
        least_seconds = best.cautious_seconds if best else 0.0
        while (left := self.setting.compiles_left) > 0:
            within, model = trials.within_budget, trials.model()
            # A plan that an earlier search saw fit is compiled before anything is called enough:
            # else a search with more history could return a slower plan than one with less.
            clock = clock_of(trials, self.setting.steps.backend.target)
            earlier = candidates.recalled(trials, trials.problem(model), clock.cautious)
            # A plan that fills the room, or is as fast as one without a limit, ends the search. One
            # of unknown worth, found by small changes, does not by filling it.
            done = any(
                (t.total >= ENOUGH * limits.room and t.gap < math.inf)
                or t.cost.cautious_seconds <= least_seconds
                for t in within
            )
            if done and earlier is None:
                return
            # Candidates in the order in which they are worth a compile. One more is solved for than
            # compiles go side by side, since some may have been compiled before.
            picks = [] if earlier is None else [earlier]
            picks += self._timed(candidates.within_budget, trials, width + 1)
            fresh = self._fresh(picks)
            # Nothing fits yet, and of the solver's answers none is expected to: try what is nearest
            # to the room.
            if not within and not fresh:
                smallest, *_ = self._timed(least, self.setting, trials.refused)
                if self._exceeds_by_far(trials.expected(smallest)):
                    return  # compiles show whether it does: `least`
                fresh = self._fresh(self._timed(candidates.nearest, trials))
            if not (fresh := fresh[: min(width, left)]):
                return
            self._compile(fresh)

    def _exceeds_by_far(self, total: int) -> bool:
        """Whether so many bytes are over the room by much."""
        room = self.setting.limits.room
        return total > room + HOPELESS * (room - self.trials.static)

    def _fresh(self, picks: list[Solution]) -> list[Solution]:
        """Those that were neither compiled nor refused by XLA."""
        fresh: list[Solution] = []
        for pick in picks:
            known = [t.actions for t in self.trials.compiled] + self.trials.refused
            known += [other.actions for other in fresh]
            if not any(candidates.alike(pick.actions, actions) for actions in known):
                fresh.append(pick)
        return fresh

    def divide(self, best: Trial, clock: Clock) -> tuple[Trial, Division | None]:
        """Returns the best plan that decides two groups of layers apart, with its division, if it
        is faster than `best` by `WORTH` and compiles within the limits; else `best` and None.

        A profile prices the pieces of a layer under a checkpoint. Of layers under none it knows the
        bytes alone, and may be wrong: where the clock calls such a plan slower, one without such
        layers is looked for.
        """
        divided, division, slower = self._divide(best, clock, whole=True)
        if division is None and slower:
            divided, division, _ = self._divide(best, clock, whole=False)
        return divided, division

    def _divide(
        self, best: Trial, clock: Clock, whole: bool
    ) -> tuple[Trial, Division | None, bool]:
        """The best plan of two groups of layers; `whole` allows that the last group is under no
        checkpoint. The third of what is returned says whether one with such layers fits, and the
        clock called it slower.
        """
        trials, limits = self.trials, self.setting.limits
        # The most seconds that a division may cost, to be worth its compile.
        worth = best.cost.cautious_seconds - WORTH * trials.profile.step_seconds
        chosen, short, seen, slower = None, 0, [], False
        while self.setting.compiles_left > 0:
            model = trials.model()
            # The memory model is of layers alike and is not fitted to divided plans. What their
            # predictions were short by, `short`, of walks or compiles, is added to its reference.
            base = trials.static + int(model.reference) + short
            problem = trials.problem(model)
            stored = _share_stored(trials, model) if whole else None
            division = self._timed(best_division, problem.within(limits.room - base), stored)
            if division is None or division.solution.actions in seen:
                break
            if division.solution.cautious_seconds > worth:
                break
            seen.append(division.solution.actions)
            predicted = base + division.bytes
            walked = self._walked(division.solution.actions, best)
            if walked is not None and walked > limits.room:
                if len(seen) >= MOST_WALKS:
                    break
                short += walked - predicted  # no compile is spent on what is not expected to fit
                continue
            (step,) = self.setting.attempt(division.solution.actions, least=best.total)
            if isinstance(step, StepError):
                break
            told = predicted if walked is None else walked
            solution, told = division.solution, max(trials.static, told)
            tried = Trial(step, solution.cost, told, solution.gap)
            short += tried.total - predicted
            if tried.total > limits.room or tried.host_bytes > limits.host_room:
                continue
            if clock.cautious(tried) >= clock.cautious(best):
                slower = bool(division.groups.whole)
                break
            best, chosen = tried, division
            worth = best.cost.cautious_seconds - WORTH * trials.profile.step_seconds
        return best, chosen, slower

    def _walked(self, actions: Actions, best: Trial) -> int | None:
        """Bytes of the step under actions of divided layers: what `best` compiled to, and what a
        walk says that they take more; None where nothing is walked through.
        """
        walks = self.trials.walks
        if walks is None:
            return None
        own, of_best = walks.told(actions), walks.told(best.actions)
        return None if own is None or of_best is None else best.total + own - of_best

    def _timed(self, solver, *arguments):
        """Calls `solver`, and adds the time that it takes to `solve_seconds`."""
        start = time.perf_counter()
        found = solver(*arguments)
        self.solve_seconds += time.perf_counter() - start
        return found


def _share_stored(trials: Trials, model: Expected) -> float | None:
    """Returns the share that XLA stores of the bytes that a trace counts for layers under no
    checkpoint: it stores fewer than every tensor that the backward reads. It is that of all blocks
    in the step with everything kept; None where that does not tell.
    """
    counted = sum(b.layers * b.everything_bytes for b in trials.profile.blocks)
    stored = trials.baseline.total - trials.static - model.reference
    return min(1.0, stored / counted) if counted and stored > 0 else None
