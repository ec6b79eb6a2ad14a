"""The lines of a plan's table: what each tag costs under its action, and what the next best would cost."""

from collections.abc import Mapping

from jaxmem._evaluate import evaluate
from jaxmem._plan import Row
from jaxmem._solve import open_choices
from jaxmem._types import KEEP, RECOMPUTE, REST, Action, Actions, Choice, Profile


def rows(profile: Profile, actions: Actions, transients: Mapping) -> tuple[Row, ...]:
    made, seen = [], set()
    for block in profile.blocks:
        chosen = actions.get(block.name, {})
        for tag in block.tags:
            if (block.name, tag.name) in seen:
                continue
            seen.add((block.name, tag.name))
            choice = KEEP if chosen.get(REST) == KEEP else chosen.get(tag.name, RECOMPUTE)
            option = next((o for o in tag.options if o.choice == choice), None)
            why = "everything fits" if chosen.get(REST) == KEEP else _why(profile, actions, block.name, tag, choice)
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
                )
            )
    return tuple(made)


def _with(actions: Actions, block: str, tag: str, choice: Choice) -> Actions:
    return {b: dict(tags) for b, tags in actions.items()} | {block: actions.get(block, {}) | {tag: choice}}


def _own_seconds(profile: Profile, actions: Actions, block: str, tag: str, choice: Choice) -> float:
    """Seconds a layer that this tag's action adds: its own option, or what is recomputed only because of it."""
    held = next(b for b in profile.blocks if b.name == block)
    option = next((o for t in held.tags if t.name == tag for o in t.options if o.choice == choice), None)
    if option is not None:
        return option.seconds
    kept = next((o for t in held.tags if t.name == tag for o in t.options if o.choice.action is Action.KEEP), None)
    if kept is None:
        return 0.0
    runs = sum(b.runs for b in profile.blocks if b.name == block)
    saved = evaluate(profile, actions).seconds - evaluate(profile, _with(actions, block, tag, KEEP)).seconds
    return max(0.0, saved / runs + kept.seconds)


def _why(profile: Profile, actions: Actions, block: str, tag, choice: Choice) -> str:
    """What the other choices for this one tag would cost, the rest of the plan as it is."""
    now = evaluate(profile, actions)
    others = []
    for other in open_choices(profile)[block, tag.name]:
        if other != choice:
            cost = evaluate(profile, _with(actions, block, tag.name, other))
            others.append((cost.seconds - now.seconds, cost.saved_bytes - now.saved_bytes, str(other.action.value)))
    slower = [o for o in others if o[1] <= 0 or o[0] > 0]
    if not others:
        return "the only choice"
    seconds, size, name = min(slower or others)
    return f"{name}: {1e3 * seconds:+.3f} ms, {size / 2**20:+.1f} MiB a step"
