"""Tests of packages that are installed in an environment of their own (`make stacks`): where they
are not, their files are not collected.
"""

import importlib.util

NEEDS = {
    "test_maxtext.py": "maxtext",
    "test_maxtext_flags.py": "maxtext",
    "test_tunix.py": "tunix",
}
collect_ignore = [
    file for file, package in NEEDS.items() if importlib.util.find_spec(package) is None
]
