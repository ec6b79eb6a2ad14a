"""The wheels that compiling for a GPU without a GPU needs, and the command that installs them."""

from jaxmem._core.versions import installed
from jaxmem.errors import TargetError

PLUGIN_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def require_wheels(target: str) -> None:
    """Raises TargetError, with the command that helps, unless the CUDA plugin of jax's own version
    is installed.
    """
    wanted = installed("jax")
    found = {name: installed(name) for name in ("jaxlib", *PLUGIN_WHEELS)}
    if all(version == wanted for version in found.values()):
        return
    got = ", ".join(
        f"{name} {version or 'missing'}" for name, version in found.items() if version != wanted
    )
    raise TargetError(
        f"`target` {target!r} is compiled for by XLA's CUDA plugin, which must be of jax's own"
        f" version, {wanted}; got {got}. Install it (no GPU and no driver are needed):"
        f" {plugin_command()}, or pip install 'jaxmem[deviceless]'"
    )


def plugin_command() -> str:
    """What installs the CUDA plugin of jax's own version."""
    return install_command(*(f"{name}=={installed('jax')}" for name in PLUGIN_WHEELS))


def install_command(*wheels: str) -> str:
    """The command that installs these wheels, and nothing that they depend on."""
    return f"pip install --no-deps {' '.join(wheels)}"
