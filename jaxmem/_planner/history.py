"""What a step compiled to under earlier plans, from the database: the next search for it starts
with that evidence.

It guides; it proves nothing. A plan that is returned was compiled by the search that returns it.
"""

import dataclasses
import json
import os

from jaxmem._core.actions import Action, Actions, Choice
from jaxmem._core.database import Database
from jaxmem._device.target import Target
from jaxmem._jax.jaxpr import text_of
from jaxmem._xla.compiled import Compiled

MOST = 48  # of the latest


class History:
    """Of one step, told by its jaxpr under no plan, on one target."""

    def __init__(self, database: Database, target: Target, jaxpr):
        flags = os.environ.get("XLA_FLAGS", "") if target.local else ""
        self._database, self._device = database, f"{target} {target.kind}"
        self._step = f"{flags}\n{text_of(jaxpr)}"

    def recall(self) -> list[tuple[Actions | None, Compiled]]:
        """Actions (None: everything kept) and what they compiled to; what cannot be read is left
        out.
        """
        found = []
        for actions, result in self._database.read_tried(self._device, self._step, MOST):
            try:
                found.append((_parse(actions), Compiled(**json.loads(result))))
            except (ValueError, TypeError, AttributeError):
                continue
        return found

    def remember(self, actions: Actions | None, compiled: Compiled) -> None:
        self._database.write_tried(
            self._device, self._step, _text(actions), json.dumps(dataclasses.asdict(compiled))
        )


def _text(actions: Actions | None) -> str:
    plain = actions and {
        b: {t: [c.action.value, c.codec] for t, c in sorted(a.items())} for b, a in actions.items()
    }
    return json.dumps(plain, sort_keys=True)


def _parse(text: str) -> Actions | None:
    plain = json.loads(text)
    if plain is None:
        return None
    return {
        b: {t: Choice(Action(action), codec) for t, (action, codec) in a.items()}
        for b, a in plain.items()
    }
