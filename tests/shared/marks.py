"""Marks of whole folders, and of parameters of tests that only `make test-slow` runs."""

import functools
import pathlib

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Folders and files whose tests have a mark. After a minus sign: a file without its folder's mark.
FOLDERS = {
    "core": "adama blocks cli codecs compile core devices -devices/test_target.py"
    " experiments/command hlo -hlo/test_costs.py kernels/test_dispatch.py kernels/test_int4.py"
    " placement plan planner/choices"
    " -planner/choices/test_sizes.py planner/told profile rectifier released/test_direct.py"
    " released/test_form.py released/test_released.py released/test_streamed.py report runs"
    " -runs/test_together.py search -search/test_factors.py solver stack -stack/test_layers.py"
    " -stack/test_stack_deviceless.py -stack/test_stack_sharded.py tags trace"
    " -trace/test_filtered.py",
    "jax_defaults": "compile experiments -experiments/command/test_load.py"
    " -experiments/data/test_text.py -experiments/test_sources.py planner/choices"
    " -planner/choices/test_outliers.py profile released -released/test_direct_sharded.py"
    " -released/test_frozen.py -released/test_openpi.py"
    " -released/test_loss.py -released/test_loss_aux.py -released/test_loss_created.py"
    " -released/test_loss_sharded.py"
    " -released/test_released.py"
    " -released/test_released_sharded.py"
    " -released/test_zero3.py shapes states",
    "standard_promotion": "adama auto/test_auto.py auto/test_steps.py"
    " released/test_released.py runs -runs/test_folder.py -runs/test_revised_on_mesh.py"
    " -runs/test_together.py stack/test_layers.py",
    "todays_checkpoint": "blocks profile",
}


def of_folder(path: pathlib.PurePath) -> list[str]:
    """Returns the marks that a test file has by its folder. `path` is relative to tests/."""
    above = {str(path), *map(str, path.parents)}
    without = {f"-{one}" for one in above}
    listed = {mark: set(names.split()) for mark, names in FOLDERS.items()}
    return [mark for mark, names in listed.items() if names & above and not names & without]
