"""What codecs move and hold on TPUs without hardware: as Pallas kernels, and as XLA compiles their
references.

    python -m benchmarks.tpu_codecs

Encoding and decoding are compiled alone, with codes in whatever order of axes XLA chooses, as in a
step. `least` is the bytes that each way must read and write, the tensor and its codes (`nbytes`).
`passes` are the bytes that all operations of the compiled program read and write, in the device's
memory or in a core's own memory (VMEM), over `least`. If XLA copies a tensor to VMEM before a
kernel reads it, `passes` counts the copy's two ends and the reading. `padded` is the codes' bytes
in tiles over `nbytes`.

Whole steps: eight layers of two products and a GELU over [4096, 1024] and [4096, 4096] bfloat16,
with everything kept and with each of their three tags compressed. Bytes are the compiler's buffer
assignment, seconds are jaxmem's roofline of the compiled step, which no TPU has confirmed.
"""

from tests.shared import tpus  # isort: skip  (sets libtpu's environment before JAX loads it)

import contextlib
import functools
import math
import statistics

import jax
import jax.numpy as jnp

import jaxmem
import jaxmem_kernels as jk
from benchmarks.shared.devices import compiled
from benchmarks.shared.results import Benchmark, Report, known, measure
from experiments.models.loops import scanned
from jaxmem import codecs
from jaxmem._core.actions import Action, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._target.hlo.roofline import TpuRates, tpu_costs

TPUS = ("v5e", "v5p", "v6e")
SHAPES = (
    ("bfloat16", (4096, 1024)),
    ("bfloat16", (4096, 4096)),
    ("bfloat16", (8, 1024, 768)),
    ("float32", (4096, 1024)),
    ("bfloat16", (4, 12, 1024, 64)),
)
CODECS = (
    "grouped_symmetric",
    "grouped_symmetric(stochastic=true)",
    "grouped_asymmetric",
    "channelwise_symmetric",
    "outlier_separated",
    "bit_mask",
)
WAYS = {"kernels": contextlib.nullcontext, "references": jk.references}
LAYERS, TOKENS, WIDTH = 8, 4096, 1024
TAGS = "in", "up", "gelu"
# Nothing but the device's memory takes time: a second a byte.
BYTES = TpuRates(
    bandwidth=1.0, products=math.inf, vector=math.inf, ring=math.inf, neighbours=math.inf
)


def moved(program) -> int:
    """Bytes that the operations of a compiled program read and write, in any memory."""
    return round(known(tpu_costs(program.as_text().replace("S(1)", ""), BYTES).seconds))


def alone(name: str, codec, shape: tuple[int, ...], dtype) -> dict:
    """What a codec's encoding and decoding of one tensor move."""
    nbytes = codec.nbytes(shape, dtype)
    least = nbytes + math.prod(shape) * dtype.itemsize
    row: dict = {"nbytes": nbytes, "least": least}
    for way, context in WAYS.items():
        with context():
            x = jax.ShapeDtypeStruct(shape, dtype)
            codes = jax.eval_shape(codec.encode, x)
            decode = lambda *codes: codec.decode(codes, shape, dtype)
            encoded = tpus.compiled(codec.encode, [x], name, free=(False, True))
            decoded = tpus.compiled(decode, codes, name, free=(True, False))
        held = known(encoded.memory_analysis()).output_size_in_bytes
        row[way] = {"padded": round(held / nbytes, 3)}
        for what, program in {"encode": encoded, "decode": decoded}.items():
            row[way][what] = {"passes": round(moved(program) / least, 2)}
    return row


def layer(w, x):
    """Two products and a GELU."""
    x = jaxmem.tag(x, "in", kind="residual")
    up = jaxmem.tag(x @ w["up"], "up", kind="linear")
    hidden = jaxmem.tag(jax.nn.gelu(up), "gelu", kind="gelu")
    return x + hidden @ w["down"]


def step(weights, x, policy):
    """A step of descent, with each layer under `policy`."""
    outputs = lambda weights: scanned(policy)(layer, weights, x, None)
    gradient = jax.grad(lambda w: jnp.square(outputs(w)).mean().astype(jnp.float32))(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradient)


def whole(name: str, choice: Choice) -> dict:
    """Bytes and estimated time of a step whose tags are all treated so."""
    policy = jaxmem.remat_policy(Assignment({"block": dict.fromkeys(TAGS, choice)}))
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weights = {"up": spec(LAYERS, WIDTH, 4 * WIDTH), "down": spec(LAYERS, 4 * WIDTH, WIDTH)}
    jitted = jax.jit(functools.partial(step, policy=policy), donate_argnums=0)
    found = compiled(name, jitted.trace(weights, spec(TOKENS, WIDTH)))
    milliseconds = round(1e3 * known(found.xla_seconds), 2)
    return {"MiB": round(found.total_bytes / 2**20, 1), "estimated_ms": milliseconds}


def steps(name: str) -> dict:
    """A step with everything kept, and with everything compressed by kernels and by references."""
    rows = {"keep": whole(name, Choice(Action.KEEP))}
    for codec in ("grouped_symmetric", "outlier_separated"):
        for way, context in WAYS.items():
            with context():
                compressed = Choice(Action.COMPRESS, str(codecs.parse(codec)))
                rows[f"{codec}, {way}"] = whole(name, compressed)
    return rows


def summary(report: Report) -> dict:
    """Medians over shapes and codecs, for each TPU and way."""
    rows = lambda name: [r for k, r in report.under(f"{name} ").items() if k != "steps"]
    median = lambda name, way, what: statistics.median(r[way][what]["passes"] for r in rows(name))
    return {
        f"{name} {way}": {
            f"median {what} passes": median(name, way, what) for what in ("encode", "decode")
        }
        for name in TPUS
        for way in WAYS
    }


def run(report: Report, name: str) -> None:
    for text in CODECS:
        codec = codecs.parse(text)
        for kind, shape in SHAPES:
            dtype = jnp.dtype(bool if text == "bit_mask" else kind)
            key = f"{name} {text} {dtype.name}{list(shape)}"
            report.once(key, alone, name, codec, shape, dtype)
    report.once(f"{name} steps", steps, name)


RESULTS = {"tpu_codecs": Benchmark(TPUS, run, summary)}

if __name__ == "__main__":
    measure("tpu_codecs", RESULTS)
