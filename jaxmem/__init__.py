"""Plans a JAX training step within a byte budget at the least step time, and verifies the plan with
XLA before a step runs.

`_public.py` lists the public names, and looks them up at first use: importing this package imports
no JAX. CONTRIBUTING.md has a table of the rooms, which are the folders of this package.
"""

from typing import TYPE_CHECKING

from jaxmem._core.quiet import quiet_plugin_noise as _quiet_plugin_noise

if TYPE_CHECKING:
    from jaxmem._public import *  # noqa: F403

    __version__: str

_quiet_plugin_noise()

_MOVED = {  # until version 0.3
    "BudgetError": "errors",
    "LOSSLESS": "plans",
    "Target": "plans",
    "compress_residuals": "ops",
    "install": "plans",
    "softmax": "ops",
}


def __getattr__(name: str):
    """Python calls this function for a name that the module does not have yet."""
    if name == "__version__":
        from jaxmem._core.versions import installed

        return installed("jaxmem") or "unknown"
    if name.startswith("_"):  # a submodule that is not imported yet, or an unknown name
        raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")
    from jaxmem import _public

    try:
        return getattr(_public, name)
    except AttributeError:
        pass
    if name in _MOVED:
        return _moved(name)
    known = ", ".join(__dir__())
    raise AttributeError(f"module 'jaxmem' has no attribute {name!r}; it has {known}")


def __dir__() -> list[str]:
    """Returns the names for `dir(jaxmem)` and for completion. Imports all public names, and JAX."""
    from jaxmem import _public

    return [*(name for name in vars(_public) if not name.startswith("_")), "__version__"]


def _moved(name: str):
    """Returns a public name that has moved to another module, and warns of the old name."""
    import importlib
    import warnings

    from jaxmem.errors import JaxmemWarning

    address = f"jaxmem.{_MOVED[name]}"
    warnings.warn(
        f"jaxmem.{name} is {address}.{name} now; the old name goes in version 0.3",
        JaxmemWarning,
        stacklevel=3,
    )
    return getattr(importlib.import_module(address), name)
