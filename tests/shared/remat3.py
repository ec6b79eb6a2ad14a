"""JAX's next checkpoint, for one test: the options `jax_remat3` and `jax_custom_vjp3`."""

import contextlib

import jax

NEXT = ("jax_remat3", "jax_custom_vjp3")


@contextlib.contextmanager
def options(*names: str):
    """JAX's options of these names are on."""
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def both(make):
    """Returns the results of `make()` with the options off and with the options on."""
    off = make()
    with options(*NEXT):
        return off, make()
