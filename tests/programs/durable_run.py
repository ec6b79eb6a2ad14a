"""A run that is killed and goes on: python -m tests.programs.durable_run OUT STEPS.

It prints the digest of the last state. `PAUSE` seconds pass in each step.
"""

import hashlib
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

tx = jaxmem.adamaw_a(1e-2, accumulation_steps=2, second_moment="row")


def first():
    params = {"w": jax.random.normal(jax.random.key(0), (16, 16)) / 4, "b": jnp.zeros(16)}
    return params, tx.init(params), jax.random.key(1)


@jax.jit
def step(state, batch):
    params, moments, key = state
    key, noise = jax.random.split(key)
    x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)
    loss = lambda p: (jnp.tanh(x @ p["w"] + p["b"]) ** 2).mean() * batch["scale"]
    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = tx.update(grads, moments, params)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
    return (optax.apply_updates(params, updates), moments, key), metrics


def batch(number):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    rng = np.random.default_rng(number)
    return {"x": rng.standard_normal((8, 16)).astype(np.float32), "scale": np.float32(1)}


def digest(state):
    params, moments, key = state
    arrays = jax.tree.leaves((params, moments, jax.random.key_data(key)))
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()


def main(out: str, steps: str) -> None:
    with jaxmem.runs.record(out, resume=True) as run:
        given = {"steps": int(steps), "run": run, "save_every": 0, "keep": 3}
        said = lambda number, row: print("step", number, flush=True)
        state = jaxmem.runs.train(step, first, batch, **given, each=said)
        run.summary({"config": "durable", "steps": int(steps), "digest": digest(state)})
    print("digest", digest(state))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except jaxmem.runs.Interrupted as error:
        sys.exit(128 + error.number)
