"""Sets JAX's options for a while, in every thread."""

import contextlib

import jax


@contextlib.contextmanager
def options(**values):
    """JAX's options have these values inside a `with` block."""
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
