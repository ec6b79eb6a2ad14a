"""MaxText's own training step, made by its own functions, for a few layers of a small decoder."""

import pathlib
import tempfile
from collections.abc import Sequence

import maxtext

from examples.stacks.maxtext import MaxTextStep
from examples.stacks.maxtext import maxtext_step as step_of

BASE = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"


def settings(
    policy: str,
    attention: str = "dot_product",
    layers: int = 8,
    width: int = 1024,
    extra: Sequence = (),
) -> list[str]:
    """The command line of MaxText under one of its remat policies, such as "full"."""
    out = tempfile.mkdtemp()
    return [
        str(BASE), f"base_emb_dim={width}", "base_num_query_heads=8", "base_num_kv_heads=8",
        f"base_mlp_dim={4 * width}", f"base_num_decoder_layers={layers}", "head_dim=128",
        "vocab_size=8192", "per_device_batch_size=4", "max_target_length=1024", "hardware=cpu",
        "dataset_type=synthetic", f"attention={attention}", "scan_layers=True",
        f"remat_policy={policy}", "skip_jax_distributed_system=True", "enable_checkpointing=False",
        "run_name=jaxmem", f"base_output_directory={out}", *extra,
    ]  # fmt: skip


def maxtext_step(*args, **kwargs) -> MaxTextStep:
    """The step of MaxText's trainer under the `settings`."""
    return step_of(settings(*args, **kwargs))
