"""How a search begins: with everything kept, and with a first guess.

The first guess is the solution for the usable bytes less the arguments and the estimated working
memory. The alternative was to compile full recomputation first. If a budget is large, the first
guess is good enough, and the search compiles no other plan. If a budget is small, the compiled
bytes of the first guess are the reference of the memory model. The guess resembles the plan that
the search will return, so that this reference is more exact than the bytes of full recomputation.

Everything kept is compiled even if its bytes are likely to exceed the budget by far. If the backend
compiles one program at a time, and an earlier compile of everything kept exceeds the usable bytes,
the search reuses that compile. A plan reports these bytes. XLA's estimate of the time of everything
kept is the origin from which every other time is counted. The compile also gives the bytes of the
arguments. If the backend compiles several programs at a time, it runs at the same time as the
compile of the first guess. Neither compile is stopped when the other one fits: both begin at the
same time, so that stopping one could save no more than the difference between their times.
"""

import dataclasses

from jaxmem._core.actions import AS_WRITTEN
from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._core.warn import warn
from jaxmem._cost.profile.options import recoded
from jaxmem._planner.search import candidates
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.estimates import agreed
from jaxmem._planner.search.least import least
from jaxmem._planner.search.local_search import local_search
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial, cost_as_written
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.solve.memory import working_bytes
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import least_bytes
from jaxmem._target.devices.support import host_loop_fault
from jaxmem.errors import BudgetError, StepError


def compile_baseline(search: Search, arguments: int) -> None:
    """Compiles the step with everything kept and, unless that fits, a first guess.

    If the backend compiles two programs at once, the guess is compiled at the same time as
    everything kept. Such a guess is based on the bytes of the arguments and on the compiles of
    earlier searches only.
    """
    profile, limits, kept = search.profile, search.limits, search.profile.everything_kept
    trial_of_kept = lambda step: Trial(step, everything(profile), step.total)
    # Separate the compiles of earlier searches into compiles of everything kept, whose latest one
    # counts, and compiles of plans. A plan with a choice that has no price here is ignored.
    known, recalled = None, search.recalled
    for step in search.history.recall():
        if step.actions == kept:
            known = trial_of_kept(step)
            continue
        step = _as_here(profile, step)
        if (cost := candidates.price_of(profile, step.actions)) is not None:
            recalled.append(Trial(step, cost, step.total))
    # Compile everything kept; at the same time a first guess, if the backend compiles two at once.
    guess = guessed = None
    if search.compiler.backend.parallel_compiles > 1:
        LOG.info("compiling the step with everything kept, and a first guess")
        search.compiler.start(kept)
        if search.history_as_written is not None and _too_large(search) is None:
            search.compiler.start(AS_WRITTEN)
        guess = first_guess(search, recalled, arguments)
        step, guessed = search.try_compile_buffers(kept, guess.actions)
        if isinstance(step, StepError):
            raise step
        search.baseline = trial_of_kept(step)
    elif known is not None and known.total > limits.usable_bytes:
        search.baseline = known  # a step that does not fit is not compiled again
    else:
        (step,) = search.compile_buffers(kept)
        search.baseline = trial_of_kept(step)
    search.trial_as_written = _compile_as_written(search)
    fits = search.baseline.total <= limits.usable_bytes
    if fits and (guess is None or guessed is None or isinstance(guessed, StepError)):
        return
    # On other backends the guess is compiled second, and uses the working memory of everything
    # kept.
    if guess is None or guessed is None:
        known_trials = [*search.trials, *recalled]
        guess = first_guess(search, known_trials, search.static)
        (guessed,) = search.try_compile_buffers(guess.actions, least=search.baseline.total)
    if isinstance(guessed, StepError):
        search.refused.append(guess.actions)
        guess = ActionSolution.of(ActionProblem(profile), profile.everything_recomputed)
        (guessed,) = search.compile_buffers(guess.actions, least=search.baseline.total)
    search.plan_trials.append(Trial(guessed, guess.cost, search.expected(guess), guess.gap))


def time_baselines(search: Search) -> None:
    """Measures the seconds of the step with everything kept, and of the step as written, if they
    run on the device at hand.
    """
    as_written = search.with_checkpoints
    kept, *others = search.timed(search.baseline, *([] if as_written is None else [as_written]))
    if search.trial_as_written is not None:
        search.trial_as_written = others[0] if others else kept
    search.baseline = kept


def _too_large(search: Search) -> CompiledStep | None:
    """The step as written, if an earlier search compiled it and it does not fit; else None."""
    *_, known = [None, *(search.history_as_written.recall() if search.history_as_written else [])]
    return known if known and known.compiled.total_bytes > search.limits.usable_bytes else None


def _compile_as_written(search: Search) -> Trial | None:
    """The step as written. If the step as written keeps everything, this is the baseline. If it has
    checkpoints of its own, it is compiled, unless an earlier search compiled it and it does not
    fit. None if a plan's policies decide the step, or if XLA does not compile it.
    """
    if search.history_as_written is None:
        return None if search.planned else search.baseline
    step: CompiledStep | StepError | None = _too_large(search)
    if step is None:
        LOG.info("compiling the step as written")
        (step,) = search.try_compile_buffers(AS_WRITTEN, least=search.baseline.total)
    if isinstance(step, StepError):
        return None
    if step.host_bytes and (why := host_loop_fault(search.compiler.backend.target)):
        warn(
            f"plan: the step as written offloads tensors by checkpoints of its own, and {why}; its"
            " gradients may be wrong on this target, and it is left out of the plan. The"
            " plan's step is not concerned"
        )
        return None
    cost = cost_as_written(search.profile, search.baseline, step)
    return Trial(step, cost, step.total)


def _as_here(profile: Profile, step: CompiledStep) -> CompiledStep:
    """A compile of an earlier search, with its bytes changed to the codecs' capacities in this
    search.
    """
    actions, more = recoded(profile, step.actions)
    total = step.total + more
    return CompiledStep(actions, dataclasses.replace(step.compiled, total_bytes=total))


def first_guess(search: Search, known: list[Trial], static: int) -> ActionSolution:
    """Returns the fastest plan that estimates expect to fit. If they expect no plan to fit, returns
    the plan that exceeds the room by the fewest bytes.

    known: compiles to which the model of working memory is fitted; may be empty.
    static: bytes of the arguments.

    Raises BudgetError if every assignment needs more host memory than the limit.
    """
    profile, limits, estimates = search.profile, search.limits, search.estimates
    nothing = profile.everything_recomputed
    estimates.learn(nothing)

    def model() -> Additive:
        return estimates.model([(t.actions, t.working) for t in known])

    def solve(model: Additive) -> ActionSolution | None:
        room = limits.usable_bytes - static - int(model.reference)
        problem = ActionProblem(profile, room, limits.host_bytes, working_bytes(model))
        return candidates.solve_fastest(problem) or least_bytes(problem)

    available = limits.usable_bytes - static
    solution = agreed(solve, model, available, estimates)
    if solution is None:
        raise BudgetError(
            f"plan: `host_budget` is {show_bytes(limits.host_bytes)}, and no assignment of the"
            " actions allowed needs so little"
        )
    # The compiled bytes of an earlier search show that its plan fits. A guess is better only if it
    # is faster, and expected to fit.
    fitting = [t for t in known if limits.allow(t)]
    best = min(fitting, key=lambda t: t.cost.risk_adjusted_seconds, default=None)
    fits = solution.saved_bytes + model().predict(solution.actions) <= available
    if best is not None:
        faster = fits and solution.risk_adjusted_seconds < best.cost.risk_adjusted_seconds
        return solution if faster else ActionSolution.of(ActionProblem(profile), best.actions)
    if not fits:
        expected = estimates.expecting([(t.actions, t.working) for t in known])
        smallest, *_ = least(search)
        size = expected(smallest.actions)
        if size is not None and size > available:  # every other plan exceeds the room by more
            return smallest
        problem = ActionProblem(profile, None, limits.host_bytes)
        starts = [solution.actions, nothing, smallest.actions]
        solution = local_search(starts, problem, expected, available) or solution
    return solution
