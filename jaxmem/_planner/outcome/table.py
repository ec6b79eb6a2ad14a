"""The lines of a plan's table: what each tag costs under its action, and what the next best action
would cost.
"""

import dataclasses

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions, Choice, keeps_everything
from jaxmem._core.profile import BlockClass, Option, Profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution, demanded, priced
from jaxmem._planner.solve.solve import runner_up
from jaxmem._result.plan.rows import Row


def rows(
    problem: Problem, actions: Actions, taken: str | None = None, kept: str | None = None
) -> tuple[Row, ...]:
    """Returns a line for each tag of each label.

    problem: what the plan was solved for.
    actions: the plan's.
    taken: why they are the plan's where other choices are predicted to be faster; None where the
      solver took them.
    kept: what to say where everything is kept; None where that is since everything fits.
    """
    profile, blocks = problem.profile, problem.profile.blocks
    solution = priced(problem, actions)
    problem, solution = _without_whole_blocks(problem, solution)
    if problem.room is not None:  # the plan compiled within its budget, whatever is predicted of it
        problem = problem.within(max(problem.room, solution.bytes))
    # Classes of one label share their decisions, and so a line; a dict keeps the order.
    places = dict.fromkeys((block.name, tag.name) for block in blocks for tag in block.tags)
    fits = kept or "everything fits"
    whole = fits if keeps_everything(actions) else "these layers are kept as they are"
    known = f"times are {100 * profile.uncertainty:.0f} % uncertain"
    said = whole, taken or known
    return tuple(_row(profile, problem, solution, actions, *place, *said) for place in places)


def _without_whole_blocks(problem: Problem, solution: Solution) -> tuple[Problem, Solution]:
    """What was decided of blocks under a checkpoint, and the room that the others leave to them:
    choices of tags are compared with each other, and not with doing without a checkpoint.
    """
    whole = {label for label, tags in solution.actions.items() if tags.get(REST) == KEEP}
    if not whole:
        return problem, solution
    costs = zip(solution.cost.blocks, problem.profile.blocks)
    held = sum(cost.device_bytes * b.layers for cost, b in costs if b.name in whole)
    blocks = tuple(b for b in problem.profile.blocks if b.name not in whole)
    room = None if problem.room is None else max(0, problem.room - held)
    profile = dataclasses.replace(problem.profile, blocks=blocks)
    rest = dataclasses.replace(problem, profile=profile, room=room)
    return rest, priced(rest, {b.name: solution.actions[b.name] for b in blocks})


def _row(
    profile: Profile,
    problem: Problem,
    solution: Solution,
    actions: Actions,
    label: str,
    name: str,
    of_whole: str,
    of_faster: str,
) -> Row:
    """A line of the table.

    profile: the step's, with every block.
    problem, solution: of the blocks under a checkpoint.
    actions: what is decided for all blocks.
    label, name: those of the tag.
    of_whole: what to say of a tag whose block is under no checkpoint.
    of_faster: what to say where another choice is predicted to be faster.
    """
    chosen = actions.get(label, {})
    same = [b for b in profile.blocks if b.name == label]
    block = next(b for b in same if b.places(name))
    places = block.places(name)
    tag = places[0]
    everything = chosen.get(REST) == KEEP
    choice = KEEP if everything else chosen.get(name, RECOMPUTE)
    return Row(
        block=label,
        tag=name,
        kind=tag.kind,
        shape=tag.shape,
        dtype=tag.dtype,
        choice=choice,
        bytes_before=block.tag_bytes(name),
        bytes_after=sum(o.device_bytes for o in _options(block, name, choice)),
        milliseconds=1e3 * _own_seconds(profile, actions, label, name, choice),
        why=of_whole if everything else _why(problem, solution, label, name, of_faster),
        layers=sum(b.layers for b in same),
        count=sum(t.turns for t in places),
    )


def _options(block: BlockClass, name: str, choice: Choice) -> list[Option]:
    """The prices of a choice at each place of a name, of those that have one."""
    return [o for tag in block.places(name) for o in tag.options if o.choice == choice]


def _with(actions: Actions, block: str, tag: str, choice: Choice) -> Actions:
    """The actions with another choice for one tag."""
    return {b: dict(tags) for b, tags in actions.items()} | {
        block: actions.get(block, {}) | {tag: choice}
    }


def _own_seconds(profile: Profile, actions: Actions, block: str, tag: str, choice: Choice) -> float:
    """Returns the seconds that this tag's action adds to one layer: those of its option, or what is
    recomputed only because of it.

    profile, actions: the step, and what is decided for all of its tags.
    block, tag: the label and the name of the tag.
    choice: what `actions` says of it.
    """
    held = next(b for b in profile.blocks if b.name == block)
    if options := _options(held, tag, choice):
        return sum(o.seconds for o in options)
    if not (kept := _options(held, tag, KEEP)):
        return 0.0
    # What a step would save if the tag were kept is net of the cost of keeping it, which is added
    # again to get the recomputation alone.
    runs = sum(b.runs for b in profile.blocks if b.name == block)
    saved = (
        evaluate(profile, actions).seconds
        - evaluate(profile, _with(actions, block, tag, KEEP)).seconds
    )
    return max(0.0, saved / runs + sum(o.seconds for o in kept))


def _why(problem: Problem, solution: Solution, block: str, tag: str, of_faster: str) -> str:
    """Returns what the best plan without this choice would take for the tag, and what that plan
    costs on top, as a sentence of the table.
    """
    if not demanded(problem.profile, solution, block, tag):
        return "nothing reads it again"
    other = runner_up(problem, solution, block, tag)
    if other is None:
        return "nothing else fits"
    choice, seconds = other
    if seconds <= -0.5e-6:  # what three digits of a millisecond show
        return f"{choice.action.value}: {1e3 * seconds:.3f} ms a step, but {of_faster}"
    return f"{choice.action.value}: +{1e3 * max(0.0, seconds):.3f} ms a step"
