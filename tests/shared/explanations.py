"""Makes explanations for tests of files, charts and pages."""

from jaxmem._result.memory.explanation import Explanation, Item, Part
from jaxmem._result.memory.live import Live, Phase, Series
from jaxmem._result.memory.moved import Moved

MIB = 2**20


def ramp(points: int, height: int) -> tuple[int, ...]:
    """Bytes that rise to `height` in the middle, and fall again."""
    middle = points // 2
    return tuple(height * (middle - abs(middle - i)) // middle for i in range(points))


def made_live(
    points: int = 40, tags: tuple[str, ...] = ("up", "gelu"), height: int = 30 * MIB
) -> Live:
    """A step of a forward loop and a backward loop, whose tags are saved in between."""
    parts = [Series("arguments", "parameters: p", (10 * MIB,) * points)]
    parts += [Series("saved", f"saved: {tag}", ramp(points, height)) for tag in tags]
    parts.append(Series("layer", "one layer's working memory, backward", ramp(points, height // 3)))
    half = points // 2
    phases = (Phase("forward", True, 0, half - 1), Phase("backward", True, half, points - 1))
    total = max(map(sum, zip(*(part.bytes for part in parts)))) + MIB
    return Live(5 * points, total, tuple(parts), phases)


MOVED = (
    Moved("offloaded: up", False, "dma", True, 30 * MIB, 30 * MIB, 1),
    Moved("params['layers']", False, "kernel", False, 10 * MIB, 0, 4),
    Moved("offloaded: up", True, "dma", True, 30 * MIB, 15 * MIB, 1),
)


def made_explanation(beside: bool = False, **other) -> Explanation:
    live = other.pop("live", made_live())
    at = live.peak
    parts = [Part(p.kind, p.name, p.bytes[at], (Item(p.name, p.bytes[at], 1),)) for p in live.parts]
    parts.append(Part("packing", "packing: gaps between buffers", MIB, (Item("gaps", MIB, 1),)))
    longer = made_live(60, ("up", "gelu", "probs"), 60 * MIB)
    kept = made_explanation(live=longer) if beside else None
    fields = {
        "target": "local",
        "plan": "under the plan" if beside else "everything kept",
        "total_bytes": live.total_bytes,
        "host_bytes": 0,
        "peak_at": "in the backward of a layer, at add_any",
        "parts": tuple(parts),
        "host_parts": (),
        "advice": "tagged tensors hold most",
        "live": live,
        "beside": kept,
        "transfers": MOVED,
    }
    return Explanation(**(fields | other))
