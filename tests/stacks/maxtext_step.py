"""MaxText's own training step, made by its own functions, for a few layers of a small decoder."""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import maxtext
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils
from maxtext.utils import sharding as maxtext_sharding

BASE = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"


class MaxTextStep(NamedTuple):
    """A step, its arguments as shapes, and what must be entered to trace it.

    jitted: `step` as MaxText jits it, with its shardings and donation.
    """

    step: Callable
    jitted: Any
    args: tuple
    entered: Callable[[], contextlib.AbstractContextManager]


def maxtext_step(
    policy: str,
    attention: str = "dot_product",
    layers: int = 8,
    width: int = 1024,
    extra: Sequence = (),
) -> MaxTextStep:
    """The step of MaxText's trainer under one of its remat policies, such as "full"."""
    out = tempfile.mkdtemp()
    config = pyconfig.initialize(
        [
            "", str(BASE), f"base_emb_dim={width}", "base_num_query_heads=8", "base_num_kv_heads=8",
            f"base_mlp_dim={4 * width}", f"base_num_decoder_layers={layers}", "head_dim=128",
            "vocab_size=8192", "per_device_batch_size=4", "max_target_length=1024", "hardware=cpu",
            "dataset_type=synthetic", f"attention={attention}", "scan_layers=True",
            f"remat_policy={policy}", "skip_jax_distributed_system=True",
            "enable_checkpointing=False", "run_name=jaxmem", f"base_output_directory={out}", *extra,
        ]
    )  # fmt: skip
    if config.compile_topology:
        mesh = train_compile.get_topology_mesh(config)
    else:
        devices = jax.devices()[: config.num_target_devices]
        mesh = maxtext_utils.get_mesh_from_config(config, devices)

    @contextlib.contextmanager
    def entered():
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    with entered():
        args, _, state_shardings, _, graph = train_compile.get_shaped_inputs(mesh, config)
        data = maxtext_sharding.get_input_data_sharding(config, mesh)
        made = maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, state_shardings, graph, config
        )
    step, in_shardings, out_shardings, static, donated = made
    jitted = lambda f: jax.jit(
        f,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static,
        donate_argnums=donated,
    )
    return MaxTextStep(step, jitted, tuple(args), entered)
