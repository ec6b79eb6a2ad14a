"""The lines of a plan's table: the costs of each tag's action, and of the next best action."""

import dataclasses

from jaxmem._core.actions import KEEP, Actions, Choice, choice_of, is_whole
from jaxmem._core.groups import keeps_everything
from jaxmem._core.profile import BlockClass, Option, Profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution, demanded
from jaxmem._planner.solve.solve import runner_up
from jaxmem._result.plan.rows import Row


def rows(
    problem: ActionProblem, actions: Actions, taken: str | None = None, kept: str | None = None
) -> tuple[Row, ...]:
    """Returns a line for each tag of each label.

    problem: the problem of the plan.
    actions: the plan's actions.
    taken: why the plan has an action although another action is predicted to be faster; None if the
      solver chose the actions.
    kept: the reason that the table gives if everything is kept; None if the reason is that
      everything fits.
    """
    profile, blocks = problem.profile, problem.profile.blocks
    solution = ActionSolution.of(problem, actions)
    problem, solution = _without_whole_blocks(problem, solution)
    if problem.room is not None:  # the compiled plan fits, even if its predicted bytes do not
        problem = problem.within(max(problem.room, solution.bytes))
    # Block classes of one label share their choices, and so share a line. A dict keeps the order.
    keys = dict.fromkeys((block.name, tag.name) for block in blocks for tag in block.tags)
    fits = kept or "everything fits"
    why_kept = fits if keeps_everything(actions) else "these layers are kept as they are"
    why_slower = taken or f"times are {100 * profile.uncertainty:.0f} % uncertain"

    def row(label: str, name: str) -> Row:
        chosen = actions.get(label, {})
        same = [b for b in blocks if b.name == label]
        block = next(b for b in same if b.occurrences(name))
        tags = block.occurrences(name)
        tag = tags[0]
        choice = choice_of(chosen, name)
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
            why=why_kept if is_whole(chosen) else _why(problem, solution, label, name, why_slower),
            layers=sum(b.layers for b in same),
            count=sum(t.turns for t in tags),
        )

    return tuple(row(*key) for key in keys)


def _without_whole_blocks(
    problem: ActionProblem, solution: ActionSolution
) -> tuple[ActionProblem, ActionSolution]:
    """The problem and the solution without the blocks that keep everything, and without the bytes
    of these blocks. So the table compares choices of tags with each other, and not with a block
    without a checkpoint.
    """
    kept = {label for label, tags in solution.actions.items() if is_whole(tags)}
    if not kept:
        return problem, solution
    costs = zip(solution.cost.blocks, problem.profile.blocks)
    kept_bytes = sum(cost.device_bytes * b.layers for cost, b in costs if b.name in kept)
    blocks = tuple(b for b in problem.profile.blocks if b.name not in kept)
    room = None if problem.room is None else max(0, problem.room - kept_bytes)
    profile = dataclasses.replace(problem.profile, blocks=blocks)
    rest = dataclasses.replace(problem, profile=profile, room=room)
    return rest, ActionSolution.of(rest, {b.name: solution.actions[b.name] for b in blocks})


def _options(block: BlockClass, name: str, choice: Choice) -> list[Option]:
    """The prices of a choice at each occurrence of a tag's name that has a price for the choice."""
    return [o for tag in block.occurrences(name) for o in tag.options if o.choice == choice]


def _own_seconds(profile: Profile, actions: Actions, block: str, tag: str, choice: Choice) -> float:
    """Returns the seconds that this tag's action adds to one layer: the seconds of its option, or
    of the recomputation that only this tag causes.

    profile, actions: the profile of the step, and the actions of all tags.
    block, tag: the label and the name of the tag.
    choice: the tag's choice in `actions`.
    """
    block_class = next(b for b in profile.blocks if b.name == block)
    if options := _options(block_class, tag, choice):
        return sum(o.seconds for o in options)
    if not (kept := _options(block_class, tag, KEEP)):
        return 0.0
    # The difference between the step's seconds with the tag recomputed and with the tag kept is net
    # of the seconds to keep the tag. These seconds are added to get the recomputation alone.
    runs = sum(b.runs for b in profile.blocks if b.name == block)
    with_kept = {**actions, block: actions.get(block, {}) | {tag: KEEP}}
    saved = evaluate(profile, actions).seconds - evaluate(profile, with_kept).seconds
    return max(0.0, saved / runs + sum(o.seconds for o in kept))


def _why(
    problem: ActionProblem, solution: ActionSolution, block: str, tag: str, why_slower: str
) -> str:
    """Returns, as a sentence of the table, the tag's action in the best plan without this choice,
    and the time by which this plan is slower.
    """
    if not demanded(problem.profile, solution, block, tag):
        return "nothing reads it again"
    other = runner_up(problem, solution, block, tag)
    if other is None:
        return "nothing else fits"
    choice, seconds = other
    if seconds <= -0.5e-6:  # the least difference that three digits of a millisecond show
        return f"{choice.action.value}: {1e3 * seconds:.3f} ms a step, but {why_slower}"
    return f"{choice.action.value}: +{1e3 * max(0.0, seconds):.3f} ms a step"
