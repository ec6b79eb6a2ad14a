"""The lines of a plan's table: what each tag costs under its action, and what the next best would
cost.
"""

from collections.abc import Mapping

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Action, Actions, Choice
from jaxmem._core.profile import Profile
from jaxmem._plan.plan import Row
from jaxmem._solver.cost import evaluate
from jaxmem._solver.solve import Solution, demanded, priced, runner_up


def rows(
    profile: Profile, actions: Actions, room: int, transients: Mapping, host_room: int | None
) -> tuple[Row, ...]:
    """One line a tag. `room`, `transients` and `host_room` are those that the plan was solved for
    (`solve`).
    """
    made, seen = [], set()
    solution = priced(profile, actions, transients)
    room = max(
        room, solution.bytes
    )  # the plan compiled within its budget, whatever is predicted of it
    for block in profile.blocks:
        chosen = actions.get(block.name, {})
        for tag in block.tags:
            if (block.name, tag.name) in seen:
                continue
            seen.add((block.name, tag.name))
            choice = KEEP if chosen.get(REST) == KEEP else chosen.get(tag.name, RECOMPUTE)
            option = next((o for o in tag.options if o.choice == choice), None)
            everything = chosen.get(REST) == KEEP
            limits = (room, transients, host_room)
            why = (
                "everything fits"
                if everything
                else _why(profile, solution, block.name, tag.name, *limits)
            )
            made.append(
                Row(
                    block=block.name,
                    tag=tag.name,
                    kind=tag.kind,
                    shape=tag.shape,
                    dtype=tag.dtype,
                    choice=choice,
                    bytes_before=block.values[tag.value],
                    bytes_after=option.device_bytes if option else 0,
                    milliseconds=1e3 * _own_seconds(profile, actions, block.name, tag.name, choice),
                    why=why,
                    layers=sum(b.layers for b in profile.blocks if b.name == block.name),
                )
            )
    return tuple(made)


def _with(actions: Actions, block: str, tag: str, choice: Choice) -> Actions:
    return {b: dict(tags) for b, tags in actions.items()} | {
        block: actions.get(block, {}) | {tag: choice}
    }


def _own_seconds(profile: Profile, actions: Actions, block: str, tag: str, choice: Choice) -> float:
    """Seconds a layer that this tag's action adds: its own option, or what is recomputed only
    because of it.
    """
    held = next(b for b in profile.blocks if b.name == block)
    option = next(
        (o for t in held.tags if t.name == tag for o in t.options if o.choice == choice), None
    )
    if option is not None:
        return option.seconds
    kept = next(
        (
            o
            for t in held.tags
            if t.name == tag
            for o in t.options
            if o.choice.action is Action.KEEP
        ),
        None,
    )
    if kept is None:
        return 0.0
    runs = sum(b.runs for b in profile.blocks if b.name == block)
    saved = (
        evaluate(profile, actions).seconds
        - evaluate(profile, _with(actions, block, tag, KEEP)).seconds
    )
    return max(0.0, saved / runs + kept.seconds)


def _why(
    profile: Profile,
    solution: Solution,
    block: str,
    tag: str,
    room: int,
    transients: Mapping,
    host_room,
) -> str:
    """What the best plan without this choice would take for the tag, and what that plan costs on
    top.
    """
    if not demanded(profile, solution, block, tag):
        return "nothing reads it again"
    other = runner_up(
        profile, solution, block, tag, room=room, transients=transients, host_room=host_room
    )
    if other is None:
        return "nothing else fits"
    choice, seconds = other
    return f"{choice.action.value}: +{1e3 * seconds:.3f} ms a step"
