"""The measuring process: measures the points of a part in order, until a point fails, time is up,
or all points are measured.
"""

import importlib
import os
import sys
import threading
import time
import traceback

from experiments.errors import BAD_INPUT, InputError
from experiments.gpu_check.results import Results
from experiments.gpu_check.settings import Settings

# Exit codes: no time for the next point; the next point needs a new process.
UNFINISHED, AGAIN = 4, 5


def main(text: str) -> int:
    _end_with_parent()
    settings = Settings.read(text)
    results = Results(settings.path)
    from experiments.gpu_check.measure import about, check_cache

    try:
        results.describe(
            {"command": settings.command, "part": settings.part, "small": settings.small}
            | about(settings)
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    check_cache()
    part = importlib.import_module(settings.module)
    started = time.monotonic()
    for point in part.points(settings):
        if point in results.rows:
            continue
        if time.monotonic() - started > settings.seconds:
            return UNFINISHED
        results.begin(point)
        row = measured(part, point, settings, results.rows)
        results.add(point, row)
        print(
            f"{settings.part}: {point}: {row.get('error', 'measured')} ({row['took_seconds']:.1f}"
            " s)",
            flush=True,
        )
        if "error" in row:
            return AGAIN
    return 0


def measured(part, point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    """Returns the row of a point. An error is a row too."""
    begun = time.perf_counter()
    try:
        row = part.measure(point, settings, rows)
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        row = {"error": f"{type(error).__name__}: {error}"[:2000]}
    return row | {"took_seconds": time.perf_counter() - begun}


def _end_with_parent() -> None:
    """Ends this process if its parent is killed, so that the device is free for the next run."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(AGAIN)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
