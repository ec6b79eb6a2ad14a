"""Make a JAX training step fit a byte budget at the least cost in time, confirmed by XLA before a
step runs.
"""

from typing import TYPE_CHECKING

from jaxmem._core.quiet import quiet_plugin_noise as _quiet_plugin_noise

if TYPE_CHECKING:
    from jaxmem._public import *  # noqa: F403

_quiet_plugin_noise()


def __getattr__(name: str):
    if name.startswith("_"):  # a file that is not imported yet, or nothing
        raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")
    from jaxmem import _public

    try:
        return getattr(_public, name)
    except AttributeError:
        raise AttributeError(
            f"module 'jaxmem' has no attribute {name!r}; it has {', '.join(__dir__())}"
        ) from None


def __dir__() -> list[str]:
    from jaxmem import _public

    return [name for name in vars(_public) if not name.startswith("_")]
