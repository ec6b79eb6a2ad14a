"""price(): compiles a step under an assignment written by hand, and returns a plan."""

import dataclasses

from jaxmem._core.actions import AS_WRITTEN, Actions, keeps_everything
from jaxmem._core.assignment import Decisions, leaves_as_written
from jaxmem._core.profile import Profile
from jaxmem._planner.hand.read import read_by_hand
from jaxmem._planner.outcome.searched import outcome
from jaxmem._planner.search.compile import Written
from jaxmem._planner.search.divide import Division, Groups
from jaxmem._planner.search.search import Found
from jaxmem._planner.search.trial import Limits, Trial, cost_as_written
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import priced
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target

UNLIMITED = 2**62  # bytes


def price(build, assignment: Decisions, *args, target: str | Target = "local") -> Plan:
    """Compiles a step under an assignment written by hand, and returns the assignment as a plan.

    The plan has the bytes and times of the step, and the bytes and times of the step with
    everything kept. For each tag, the plan's table shows the cost or the gain of the next best
    choice. The plan's `budget_bytes` are its compiled bytes.

    build, args, target: as for `jaxmem.plan`.
    assignment: the actions, such as `jaxmem.plans.Assignment({"block": {"up": Choice("keep")}})`.
      The assignment may have separate actions for groups of layers. A plan is accepted too, and is
      priced again.

    Raises TagError if the assignment names a block, a group of layers or a tag that the step does
    not have. Raises TagError also for a choice that the tag or the target does not support. Raises
    StepError and TargetError as `jaxmem.plan` does.
    """
    target = Target.parse(target)
    with backend_for(target) as backend:
        by_hand = read_by_hand(build, assignment, args, backend, "price")
        step, whole, actions = by_hand.step, by_hand.whole, by_hand.actions
        checkpointed = step.written is not None
        as_written = leaves_as_written(assignment)
        wanted = [whole.everything_kept, *([AS_WRITTEN] if checkpointed else [])]
        is_new = not keeps_everything(actions) and not as_written
        compiled = step.steps.compile(*wanted, *([actions] if is_new else []))
        for one in compiled:  # so that a later `plan` for these bytes need not compile it again
            history_as_written = step.written if one.actions == AS_WRITTEN else None
            (history_as_written or step.history).remember(one)
    kept, *others = compiled
    baseline = Trial(kept, everything(whole), kept.compiled.total_bytes)
    written = baseline if step.steps.written is Written.KEPT else None
    if checkpointed:
        cost = cost_as_written(whole, baseline, others[0])
        written = Trial(others[0], cost, others[0].compiled.total_bytes)
    by_assignment = Trial(compiled[-1], by_hand.cost, compiled[-1].compiled.total_bytes)
    trial = by_assignment if is_new else (written if as_written and written else baseline)
    limits = Limits(trial.total, UNLIMITED, UNLIMITED)
    # The memory model is fitted to undivided plans only.
    tried = [trial] if is_new and not by_hand.is_divided else []
    search = dataclasses.replace(step.search(limits), profile=whole, tried=tried, written=written)
    search.baseline = baseline
    division = _division(by_hand.profile, actions) if by_hand.is_divided else None
    return outcome(Found(search, trial, division), step.notes, taken="it was asked for")


def _division(profile: Profile, actions: Actions) -> Division:
    problem = ActionProblem(profile)
    return Division(Groups(profile), problem, priced(problem, actions), 0)
