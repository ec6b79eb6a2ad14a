"""Steps that are timed in turns run once before the first round, and once in each round."""

import jax.numpy as jnp

from benchmarks.shared.timing import SHARED, in_turns, over


def test_each_step_runs_once_in_each_round_with_the_state_that_it_returned():
    ran: list[str] = []

    def step(name: str):
        def run(state, batch):
            ran.append(name)
            return state + batch, {}

        return run

    groups = [{"a": step("a"), "b": step("b")}, {"c": step("c")}]
    states = {SHARED: jnp.float32(0), "c": jnp.float32(0)}
    clock, cores = in_turns(groups, 3, states, jnp.float32(1))
    assert (float(states[SHARED]), float(states["c"])) == (8, 4)
    assert ran[:3] == ["a", "b", "c"]
    for start in (3, 6, 9):
        turn = ran[start : start + 3]
        assert sorted(turn) == ["a", "b", "c"]
        assert turn[1] != "c", "the steps of a group run one after the other"
    assert [*clock] == [*cores] == ["a", "b", "c"]
    assert all(len(seconds) == 3 for seconds in (*clock.values(), *cores.values()))


def test_ratios_are_of_the_same_round():
    found = over([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert (found["lower_quartile"], found["median"], found["count"]) == (2.0, 2.0, 3)
