"""Plans MaxText's own training step over the names of its remat policy `custom`, and prints the
plan as MaxText's flags.

python -m examples.stacks.maxtext --budget 40GiB --target h200 --out plan.json \\
    src/maxtext/configs/base.yml model_name=llama3.1-8b per_device_batch_size=4 hardware=gpu \\
    internal_compile=True internal_compile_num_devices=1
"""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.layers.nnx_decoders import NNXDecoder
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils
from maxtext.utils import sharding as maxtext_sharding

import jaxmem


class MaxTextStep(NamedTuple):
    """MaxText's training step of one configuration.

    config: MaxText's configuration.
    mesh: the mesh of devices.
    step: the training step, a function of a state and a batch.
    jitted: a function that jits a step with the shardings and the donation of MaxText.
    args: the shapes of the state and of the batch.
    """

    config: Any
    mesh: jax.sharding.Mesh
    step: Callable
    jitted: Callable
    args: tuple

    @contextlib.contextmanager
    def entered(self):
        """The context in which MaxText traces the step."""
        with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
            yield


def maxtext_step(arguments: list[str]) -> MaxTextStep:
    """The step of MaxText's trainer, made by the functions of MaxText.

    arguments: MaxText's command line: a file of settings, and settings such as `steps=10`.
    """
    config = pyconfig.initialize(["", *arguments])
    if config.compile_topology:
        mesh = train_compile.get_topology_mesh(config)
    else:
        devices = jax.devices()[: config.num_target_devices]
        mesh = maxtext_utils.get_mesh_from_config(config, devices)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
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
    return MaxTextStep(config, mesh, step, jitted, tuple(args))


def build_of(made: MaxTextStep) -> Callable:
    """Returns `build` for `jaxmem.plan`: a plan decides about the names of MaxText."""

    def build(plan):
        policy = lambda decoder: jaxmem.remat_policy(plan)

        def train_step(state, batch):
            with mock.patch.object(NNXDecoder, "get_remat_policy", policy):
                return made.step(state, batch)

        return made.jitted(train_step)

    return build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", required=True)
    parser.add_argument("--target", default="local")
    parser.add_argument("--out", help="the file of the plan")
    options, arguments = parser.parse_known_args()
    made = maxtext_step(arguments)
    with made.entered():
        plan = jaxmem.plan(
            build_of(made),
            *made.args,
            budget=options.budget,
            target=options.target,
            actions="lossless",
        )
    if options.out:
        plan.save(options.out)
    print(plan)
    print(" ".join(f"{flag}={value}" for flag, value in plan.to_maxtext().items()))


if __name__ == "__main__":
    main()
