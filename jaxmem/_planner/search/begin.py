"""How a search begins: with everything kept, and with a first guess.

The first guess is a plan that is solved for the bytes that the arguments leave. The alternative is
full recomputation. If the budget has bytes to spare, the first guess is also the last compile.
Otherwise its bytes are the reference of the memory model, and are nearer to the answer than the
bytes of an extreme assignment.

Everything kept is compiled even if its bytes may be plainly over the budget, unless an earlier
search saw that they are. A plan reports these bytes. XLA's estimate of the time of everything kept
is the origin from which every other time is counted. Its compile tells the bytes of the arguments,
and runs at the same time as the first guess. Neither of the two compiles is stopped when the other
one fits: both begin at the same time, so that stopping one could save no more than the difference
between their times.
"""

import dataclasses

from jaxmem._core.actions import AS_WRITTEN
from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._core.warn import warn
from jaxmem._cost.profile.options import recoded
from jaxmem._planner.search import candidates
from jaxmem._planner.search.compile import CompiledStep, Written
from jaxmem._planner.search.estimates import agreed
from jaxmem._planner.search.least import least
from jaxmem._planner.search.local_search import local_search
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial, cost_as_written
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution, priced
from jaxmem._planner.solve.solve import least_bytes
from jaxmem._target.devices.support import misreading
from jaxmem.errors import BudgetError, StepError


def begin(search: Search, arguments: int) -> None:
    """Compiles the step with everything kept and, unless that fits, a first guess.

    Where the backend compiles two programs at once, the guess is compiled beside everything kept.
    Such a guess knows only the bytes of the arguments, and what earlier searches compiled.
    """
    profile, limits, kept = search.profile, search.limits, search.profile.everything_kept
    whole = lambda step: Trial(step, everything(profile), step.total)
    # Sort what earlier searches compiled into everything kept, of which the latest counts, and
    # plans. A plan that takes a choice without a price in this profile tells nothing.
    known, recalled = None, search.recalled
    for step in search.history.recall():
        if step.actions == kept:
            known = whole(step)
            continue
        step = _as_here(profile, step)
        if (cost := candidates.price_of(profile, step.actions)) is not None:
            recalled.append(Trial(step, cost, step.total))
    # Compile everything kept, with a guess beside it where two compile at once.
    guess = guessed = None
    if search.steps.backend.width > 1:
        LOG.info("compiling the step with everything kept, beside a first guess")
        search.steps.begin(kept)
        if search.written_history is not None and _too_large(search) is None:
            search.steps.begin(AS_WRITTEN)
        guess = _first_guess(search, recalled, arguments)
        step, guessed = search.try_compile(kept, guess.actions)
        if isinstance(step, StepError):
            raise step
        search.baseline = whole(step)
    elif (
        known is not None and known.total > limits.usable_bytes
    ):  # what does not fit is not compiled again
        search.baseline = known
    else:
        (step,) = search.compile(kept)
        search.baseline = whole(step)
    search.written = _written(search)
    fits = search.baseline.total <= limits.usable_bytes
    if fits and (guess is None or guessed is None or isinstance(guessed, StepError)):
        return
    # Elsewhere the guess comes second, and reckons with the working memory of everything kept.
    if guess is None or guessed is None:
        known_trials = [*search.compiled, *recalled]
        guess = _first_guess(search, known_trials, search.static)
        (guessed,) = search.try_compile(guess.actions, least=search.baseline.total)
    if isinstance(guessed, StepError):
        search.refused.append(guess.actions)
        guess = priced(Problem(profile), profile.everything_recomputed)
        (guessed,) = search.compile(guess.actions, least=search.baseline.total)
    search.tried.append(Trial(guessed, guess.cost, search.expected(guess), guess.gap))


def time_baselines(search: Search) -> None:
    """Measures the step with everything kept, and as written, where they run here."""
    own = search.checkpointed
    kept, *others = search.timed(search.baseline, *([] if own is None else [own]))
    if search.written is not None:
        search.written = others[0] if others else kept
    search.baseline = kept


def _too_large(search: Search) -> CompiledStep | None:
    """The step as written, where an earlier search saw that it does not fit."""
    *_, known = [None, *(search.written_history.recall() if search.written_history else [])]
    return known if known and known.compiled.total_bytes > search.limits.usable_bytes else None


def _written(search: Search) -> Trial | None:
    """The step as written: the baseline where that keeps everything. Where it has checkpoints of
    its own it is compiled, unless an earlier search saw that it does not fit; None where XLA does
    not compile it.
    """
    if search.written_history is None:
        return search.baseline if search.steps.written is Written.KEPT else None
    step: CompiledStep | StepError | None = _too_large(search)
    if step is None:
        LOG.info("compiling the step as written")
        (step,) = search.try_compile(AS_WRITTEN, least=search.baseline.total)
    if isinstance(step, StepError):
        return None
    if step.host_bytes and (version := misreading(search.steps.backend.target)):
        warn(
            "plan: the step as written offloads tensors by checkpoints of its own, and jaxlib"
            f" {version} reads offloaded tensors of a loop at wrong offsets on this target (fixed"
            " in 0.11.1), so that its gradients are wrong; it is left out of the plan: update"
            " jaxlib, or run the step under the plan"
        )
        return None
    cost = cost_as_written(search.profile, search.baseline, step)
    return Trial(step, cost, step.total)


def _as_here(profile: Profile, step: CompiledStep) -> CompiledStep:
    """A remembered compile as it would be if its codecs had the room that they have here."""
    actions, more = recoded(profile, step.actions)
    total = step.total + more
    return CompiledStep(actions, dataclasses.replace(step.compiled, total_bytes=total))


def _first_guess(search: Search, known: list[Trial], static: int) -> Solution:
    """Returns the fastest plan that estimates expect to fit, or the plan nearest to the room where
    none is.

    known: compiles that tell of working memory; may be empty.
    static: bytes of the arguments.

    Raises BudgetError if no assignment needs as little host memory as is allowed.
    """
    profile, limits, estimates = search.profile, search.limits, search.estimates
    nothing = profile.everything_recomputed
    estimates.learn(nothing)

    def model() -> Expected:
        return estimates.model([(t.actions, t.working) for t in known])

    def answer(model: Expected) -> Solution | None:
        room = limits.usable_bytes - static - int(model.reference)
        problem = Problem(profile, room, limits.host_bytes, model.working)
        return candidates.fastest(problem) or least_bytes(problem)

    beside = limits.usable_bytes - static
    solution = agreed(answer, model, beside, estimates)
    if solution is None:
        raise BudgetError(
            f"plan: `host_budget` is {show_bytes(limits.host_bytes)}, and no assignment of the"
            " actions allowed needs so little"
        )
    # What an earlier search saw fit is certain. A guess is worth more if it is faster, and expected
    # to fit.
    fitting = [t for t in known if limits.allow(t)]
    best = min(fitting, key=lambda t: t.cost.cautious_seconds, default=None)
    fits = solution.saved_bytes + model().predict(solution.actions) <= beside
    if best is not None:
        faster = fits and solution.cautious_seconds < best.cost.cautious_seconds
        return solution if faster else priced(Problem(profile), best.actions)
    if not fits:
        expected = estimates.expecting([(t.actions, t.working) for t in known])
        smallest, *_ = least(search)
        size = expected(smallest.actions)
        if size is not None and size > beside:  # nothing is nearer to the room
            return smallest
        problem = Problem(profile, None, limits.host_bytes)
        starts = [solution.actions, nothing, smallest.actions]
        solution = local_search(starts, problem, expected, beside) or solution
    return solution
