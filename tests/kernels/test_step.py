"""A whole training step with INT4 tags, compiled for an H200 that is not there, with the kernels in
it.
"""

import jax
import pytest

from benchmarks.shared import assignments
from benchmarks.shared.case import Case
from jaxmem import codecs
from jaxmem._core.actions import Action, Choice
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.export import export_flat

pytest.importorskip("jax_triton", reason="kernels")
pytestmark = [pytest.mark.slow, pytest.mark.jax_defaults]
KINDS = {"qkv": "qkv", "probs": "softmax", "resid_in": "residual", "mid": "residual"}


def test_gpt_117m_with_every_tag_in_int4():
    with backend_for(Target.parse("h200")) as backend:
        case = Case("gpt_117m", backend, overrides=["plan.budget=none"])
        kept = assignments.keep_tags(case.profile)
        compressed = {}
        for block, tags in kept.items():
            codec = lambda tag: codecs.default_for(
                "mask" if tag.endswith("_mask") else KINDS.get(tag, "linear")
            )
            compressed[block] = {tag: Choice(Action.COMPRESS, str(codec(tag))) for tag in tags}
        exported, _ = export_flat(case.trace(compressed), "cuda", 90)
        small, large = (step.compiled for step in case.compile_buffers(compressed, kept))
        program = jax.export.deserialize(bytearray(exported)).mlir_module()
        # GPUs run the references of masks.
        others = sum(not tag.endswith("_mask") for tag in kept["block"])
        assert program.count("triton_kernel_call") >= 2 * others
        assert small.total_bytes < 0.75 * large.total_bytes
