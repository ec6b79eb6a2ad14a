"""Round numbers, for the marks along an axis."""

import math


def nice(low: float, high: float) -> list[float]:
    """At most five round numbers between two ends, which differ."""
    rough = (high - low) / 4
    # The step is the least of 1, 2, 2.5 and 5 times a power of ten that is not below `rough`; the
    # small terms keep a rounding error from leaving out the ticks at the ends.
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
