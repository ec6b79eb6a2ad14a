"""The wheels that compiling for a device that is not there needs, and what installs them."""

import re
from importlib import metadata

from jaxmem._core.versions import installed
from jaxmem._target.devices.target import Target
from jaxmem.errors import TargetError

PLUGIN_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def require_wheels(target: Target) -> None:
    """Raises TargetError, with the command that helps, unless what compiles for a target is
    installed: the CUDA plugin, or libtpu, of the version that jax asks for.
    """
    _require_libtpu(target) if target.platform == "tpu" else _require_plugin(target)


def plugin_command() -> str:
    """What installs the CUDA plugin of jax's own version."""
    return install_command(*(f"{name}=={installed('jax')}" for name in PLUGIN_WHEELS))


def libtpu_command() -> str:
    """What installs the libtpu that jax asks for."""
    return install_command(f"'libtpu=={_wanted_libtpu()}'")


def install_command(*wheels: str) -> str:
    """The command that installs these wheels, and nothing that they depend on."""
    return f"pip install --no-deps {' '.join(wheels)}"


def _require_plugin(target: Target) -> None:
    """Raises TargetError unless XLA's CUDA plugin has JAX's version."""
    wanted = installed("jax")
    found = {name: installed(name) for name in ("jaxlib", *PLUGIN_WHEELS)}
    if all(version == wanted for version in found.values()):
        return
    got = ", ".join(
        f"{name} {version or 'missing'}" for name, version in found.items() if version != wanted
    )
    raise TargetError(
        f"`target` {str(target)!r} is compiled for by XLA's CUDA plugin, which must be of jax's own"
        f" version, {wanted}; got {got}. Install it (no GPU and no driver are needed):"
        f" {plugin_command()}, or pip install 'jaxmem[deviceless]'"
    )


def _require_libtpu(target: Target) -> None:
    """Raises TargetError unless libtpu has the version that JAX requires."""
    wanted, found = _wanted_libtpu(), installed("libtpu")
    if found is not None and f"{found}.".startswith(wanted.rstrip("*")):
        return
    raise TargetError(
        f"`target` {str(target)!r} is compiled for by libtpu, of the version that jax"
        f" {installed('jax')} asks for, {wanted}; got {found or 'none'}. Install it (no TPU is"
        f" needed): {libtpu_command()}, or pip install 'jaxmem[tpu]'"
    )


def _wanted_libtpu() -> str:
    """The version of libtpu that jax's own extra names, such as "0.0.42.*"; "*" where it names
    none.
    """
    needs = metadata.requires("jax") or []
    found = (re.match(r"libtpu\s*\(?==\s*([\d.*]+)", need) for need in needs)
    return next((m[1] for m in found if m), "*")
