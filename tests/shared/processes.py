"""Processes of a run in tests: threads with a common coordinator in this process."""

import concurrent.futures
import threading

import jax

from jaxmem._target.processes.channel import Channel


class Coordinator:
    """Stores values by keys, as the coordinator of jax.distributed does."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for one in [k for k in self.values if k == key or k.startswith(f"{key}/")]:
                del self.values[one]


def together(count, work, coordinator=None):
    """Returns the result or the error of `work(channel)` in each of `count` processes."""
    coordinator = coordinator or Coordinator()
    channels = [Channel(count, number, "a run", coordinator) for number in range(count)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, one) for one in channels]
    return [one.exception() or one.result() for one in futures]
