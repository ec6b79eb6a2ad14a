"""Weighs small changes of a search's best plan by the whole step, where that takes a part of a
compile.

A profile prices pieces of a layer, each as a program of its own. In the whole step XLA fuses across
them: a tensor that is kept may cost nothing to write beside what is written in any case, and one
that is recomputed may have its weights gathered from other devices once more.
"""

import time
from collections.abc import Iterator

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._search import candidates
from jaxmem._search.clock import Clock, clock_of
from jaxmem._search.compile import CompiledStep
from jaxmem._search.trials import Setting, Trial, Trials

SECONDS = 60.0  # for all changes of a search
FASTER = 1e-4  # the share of a step's time by which a change must gain
NEARLY = 1.02  # of the room: working memory may be less under the change


def polish(setting: Setting, trials: Trials) -> None:
    """Adds to the trials what is faster than the best of them, by the clock, and fits: every tag
    kept, then changes of one tag to keep or to recompute, until none gains. Does nothing where a
    step's costs are known from a whole compile alone.
    """
    if not setting.steps.backend.assigns or not trials.fitting:
        return
    LOG.info("weighing changes of single tags by the whole step")
    polisher = _Polisher(setting, trials)
    polisher.weigh([_all_kept(trials.profile)])
    while not polisher.ended and polisher.passes():
        pass


class _Polisher:
    def __init__(self, setting: Setting, trials: Trials):
        self.setting, self.trials = setting, trials
        self.clock: Clock = clock_of(trials, setting.steps.backend.target)
        self.until = time.perf_counter() + SECONDS

    @property
    def ended(self) -> bool:
        return time.perf_counter() > self.until

    @property
    def best(self) -> Trial:
        return min(self.trials.fitting, key=self.clock.cautious)

    def passes(self) -> bool:
        """Weighs every change once, of whatever is the best by then; returns whether one gained."""
        before, width = self.best, self.setting.steps.backend.width
        left = list(_changes(self.trials.profile))
        while left and not self.ended:
            now, base = [], self.best
            while left and len(now) < width:
                actions = _changed(base.actions, *left.pop(0))
                now += [actions] if self._may_fit(actions, base) else []
            self.weigh(now)
        gained = self.clock.cautious(before) - self.clock.cautious(self.best)
        return gained > FASTER * self.clock.base

    def _may_fit(self, actions: Actions, base: Trial) -> bool:
        """Whether what is saved, beside the rest of `base`, is about as much as there is room for:
        a compile is worth no more where it plainly is not.
        """
        cost = candidates.price_of(self.trials.profile, actions)
        more = 0 if cost is None else cost.saved_bytes - base.cost.saved_bytes
        return base.total + more <= NEARLY * self.setting.limits.room

    def weigh(self, many: list[Actions]) -> None:
        """Weighs assignments that are new and have a price."""
        known = [*self.trials.compiled, *self.trials.recalled]
        refused = self.trials.refused
        fresh = []
        for actions in many:
            new = not candidates.is_among(actions, known)
            new = new and not any(candidates.alike(actions, other) for other in refused)
            cost = candidates.price_of(self.trials.profile, actions) if new else None
            if cost is not None:
                fresh.append((actions, cost))
        found = self.setting.steps.weigh(*(actions for actions, _ in fresh))
        for (actions, cost), step in zip(fresh, found):
            if not isinstance(step, CompiledStep):
                refused.append(actions)
                continue
            self.setting.history.remember(step)
            total = step.compiled.total_bytes
            self.trials.tried.append(Trial(step, cost, total))


def _all_kept(profile: Profile) -> Actions:
    return {b.name: {t.name: KEEP for t in b.tags} for b in profile.blocks}


def _changes(profile: Profile) -> Iterator[tuple[str, str]]:
    """Blocks and tags, those with the most bytes first."""
    size = lambda tag: max((o.device_bytes for o in tag.options), default=0)
    tags = {(b.name, t.name): b.layers * size(t) for b in profile.blocks for t in b.tags}
    yield from sorted(tags, key=lambda key: -tags[key])


def _changed(actions: Actions, block: str, tag: str) -> Actions:
    """The same with one tag recomputed that was not, or kept that was."""
    found = {label: dict(choices) for label, choices in actions.items()}
    own = found.setdefault(block, {})
    own.pop(REST, None)  # of everything kept, every tag is left as it is, and the rest recomputed
    own[tag] = KEEP if own.get(tag, RECOMPUTE) == RECOMPUTE else RECOMPUTE
    return found
