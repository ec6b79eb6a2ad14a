"""How far AdamA's second moment is from Adam's while a ResNet trains: the mean of sqrt(v) /
sqrt(v') (AdamA, Fig. 4; M8).

    python -m benchmarks.adama_ratio

A ResNet of 14 layers on scikit-learn's digits, 200 steps of 64 images in N = 2, 4 and 8
microbatches, trained by AdamA, with the paper's second moment and with the row ratio. v gathers the
squares of the microbatches' gradients g_i / N, and is multiplied by the ratio of its row if there
is one; v' gathers the square of their sum, both along the same run and corrected for their start.
Each step has the mean of sqrt(v) / sqrt(v') over all values, and the median. Beside them is the
signal-to-noise ratio of the microbatches' gradients: |mean|² over the sum of variances, less 1 / N,
which is the noise in the mean itself; where noise rules it is 0 and may come out below. An array of
ratio s everywhere has sqrt(v) / sqrt(v') of sqrt((1 + s) / (1 + N s)): 1 where noise rules. Draws
adama_ratio.svg beside the JSON, whose first steps, far above 1 while gradients of blocks that start
as the identity are nearly 0, are cut off.
"""

import itertools

import jax
import jax.numpy as jnp

from benchmarks.shared.case import small_resnet
from benchmarks.shared.results import Benchmark, Report, measure
from experiments.data import images as image_data
from experiments.models import resnet
from experiments.running.images import read
from experiments.steps import images as image_step
from jaxmem._core.files import write_whole
from jaxmem._optim.adama import ratio
from jaxmem._result.svg import Axis, axis, element

WAYS = ("squares", "row")
COUNTS, SEED, COLOURS = (2, 4, 8), 0, ("#1f77b4", "#d62728", "#2ca02c")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 60, 40, 24


def watched_step(config):
    """step(state, v', batch) -> (state, v', the mean ratio, the median, signal-to-noise)."""
    train, gradient, o = (
        image_step.make_step(config),
        jax.grad(resnet.loss(config), has_aux=True),
        config.optimizer,
    )
    n = config.train.microbatches

    def whole_gradient(state, batch):
        def one(carry, part):
            total, statistics = carry
            grads, (statistics, _) = gradient(state.params, statistics, part)
            return (jax.tree.map(lambda t, g: t + g / n, total, grads), statistics), None

        parts = jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), batch)
        start = jax.tree.map(jnp.zeros_like, state.params), state.statistics
        return jax.lax.scan(one, start, parts)[0][0]

    def step(state, other, batch):
        other = jax.tree.map(
            lambda v, g: o.beta2 * v + (1 - o.beta2) * g * g, other, whole_gradient(state, batch)
        )
        state, metrics = train(state, batch)
        # both are divided by 1 - beta2^t, which cancels; an array that has seen no gradient has no
        # ratio
        pairs = zip(used(o.beta2, n, state.moments), jax.tree.leaves(other), strict=True)
        ratios = [jnp.where(w > 0, jnp.sqrt(v / jnp.where(w > 0, w, 1)), jnp.nan) for v, w in pairs]
        values = jnp.concatenate([r.reshape(-1) for r in ratios])
        return state, other, jnp.nanmean(values), jnp.nanmedian(values), metrics["snr"]

    return jax.jit(step, donate_argnums=(0, 1))


def used(b2: float, n: int, state) -> list:
    """The second moments that the update before this state was divided by."""
    nu = jax.tree.leaves(state.nu)
    if state.moments.square is None:
        return nu
    square = jax.tree.leaves(state.square)
    # With sums whose squares are the averages themselves the averages stay what they are.
    _, scaled = ratio.scaled(
        nu,
        square,
        [jnp.sqrt(s) for s in square],
        b2=b2,
        done=state.count,
        most=n,
        like=nu,
        axis_name=None,
        stacked=[None] * len(nu),
    )
    return scaled


def follow(way: str, microbatches: str) -> dict[str, list[float]]:
    config = small_resnet(
        n := int(microbatches.removeprefix("N=")), SEED, f"optimizer.second_moment={way}"
    )
    images, state = read(config), image_step.init_state(config)
    other, step, rows = jax.tree.map(jnp.zeros_like, state.params), watched_step(config), []
    for number in range(1, config.train.steps + 1):
        batch = image_data.sample(images.train, config.train.seed, number, config.train.batch)
        state, other, *found, snr = step(state, other, batch)
        rows.append((*map(float, found), float(snr) - 1 / n))
    return dict(zip(("ratio", "median", "signal to noise"), map(list, zip(*rows))))


def figure(rows: dict[int, dict[str, list[float]]], scaled: dict[int, dict]) -> str:
    """Three panels over steps: the ratio without and with the row ratio, with 1 marked, and
    signal-to-noise with 0 marked. Values beyond a frame are drawn on the frame.
    """
    of = lambda which, name: [row[name] for row in which.values()]
    ratios, noise = axis(0.95, 1.15), axis(-0.5, 1.0)
    panels = [
        panel("mean of √v / √v′", of(rows, "ratio"), 0, ratios, 1.0),
        panel("the same with the row ratio", of(scaled, "ratio"), HEIGHT, ratios, 1.0),
        panel("signal to noise", of(rows, "signal to noise"), 2 * HEIGHT, noise, 0.0),
    ]
    names = [
        element("text", f"N = {n}", x=LEFT + 70 * i, y=14, fill=COLOURS[i])
        for i, n in enumerate(rows)
    ]
    white = element("rect", width="100%", height="100%", fill="white")
    look = {"font_family": "sans-serif", "font_size": 12, "xmlns": "http://www.w3.org/2000/svg"}
    inner = white + "".join(names + panels)
    return element("svg", inner, viewBox=f"0 0 {WIDTH} {3 * HEIGHT}", **look) + "\n"


def panel(title: str, lines: list[list[float]], top: int, y: Axis, mark: float) -> str:
    steps = axis(0, len(lines[0]))
    left = lambda step: round(LEFT + (WIDTH - 16 - LEFT) * steps.percent(step) / 100, 1)
    base, tall = top + HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP - 10
    high = lambda value: round(base - tall * y.percent(value) / 100, 1)
    text = lambda x, y, said, at="middle": element("text", said, x=x, y=y, text_anchor=at)
    across = lambda value, **look: element(
        "line", x1=LEFT, x2=WIDTH - 16, y1=high(value), y2=high(value), **look
    )
    marks = [text(LEFT, top + TOP + 4, title, "start"), text(WIDTH / 2, base + 34, "step")]
    for value, said in y.ticks:
        marks += [text(LEFT - 6, high(value) + 4, said, "end"), across(value, stroke="#ddd")]
    marks += [text(left(step), base + 18, said) for step, said in steps.ticks]
    marks.append(across(mark, stroke="#555", stroke_dasharray=4))
    for line, colour in zip(lines, COLOURS):
        points = " ".join(f"{left(i)},{high(v)}" for i, v in enumerate(line))
        marks.append(element("polyline", points=points, fill="none", stroke=colour))
    return "".join(marks)


def summary(report: Report) -> dict:
    rows, scaled = ({n: report[f"{way}, N={n}"] for n in COUNTS} for way in WAYS)
    write_whole(report.path.with_suffix(".svg"), figure(rows, scaled))
    within = lambda values: sum(abs(r - 1) <= 0.01 for r in values) / len(values)
    return {
        name: {
            "least": min(row["ratio"]),
            "largest": max(row["ratio"]),
            "mean of the last 50 steps": sum(row["ratio"][-50:]) / 50,
            "median of the last 50 steps": sum(row["median"][-50:]) / 50,
            "steps within 1 % of 1": within(row["ratio"]),
            "medians within 1 % of 1": within(row["median"]),
        }
        for name, row in report.results.items()
    }


CASES = itertools.product(WAYS, (f"N={n}" for n in COUNTS))
RESULTS = {"adama_ratio": Benchmark(CASES, row=follow, summary=summary)}

if __name__ == "__main__":
    measure("adama_ratio", RESULTS)
