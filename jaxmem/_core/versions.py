"""Finds the versions of installed packages, and makes them comparable."""

import re
from importlib import metadata


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# The first jaxlib that reads arrays in host memory at the right offsets in a loop on a GPU. With
# older versions, a scan that offloads has wrong gradients (openxla 46231).
# Remove with jaxlib 0.11.0: the constant, and the obstacles that read it.
HOST_OFFSETS_SINCE = (0, 11, 1)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 12, 0) for "0.12.0", "0.12.0rc1" and "0.12.0.dev20260101".

    A candidate counts as the release that it is a candidate of. At least three numbers are
    returned, so that tuples compare.
    """
    numbers = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version.strip())
    found = tuple(int(part) for part in numbers[1].split(".")) if numbers else ()
    return found + (0,) * (3 - len(found))
