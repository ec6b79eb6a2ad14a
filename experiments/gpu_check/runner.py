"""Runs a part: starts measuring processes, one at a time, and records why they ended."""

import dataclasses
import importlib
import os
import subprocess
import sys
import tempfile
import time

from experiments.gpu_check.child import AGAIN, UNFINISHED
from experiments.gpu_check.results import Results
from experiments.gpu_check.settings import Settings

GRACE = 20.0  # extra seconds for the running point when a part's time is up
ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # a program's cache key must not name its callers
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
    "PYTHONUNBUFFERED": "1",
}


def run_part(settings: Settings, retry: bool = False, grace: float = GRACE) -> Results:
    """Measures the missing points of a part for at most `settings.seconds`, and summarizes them."""
    part, end = importlib.import_module(settings.module), time.monotonic() + settings.seconds
    results = Results(settings.path)
    results.cut("the whole run was stopped")
    if retry:
        results.forget_errors()
    points, problem = list(part.points(settings)), None
    while any(p not in results.rows for p in points) and (left := end - time.monotonic()) > 0:
        code, tail = launch(dataclasses.replace(settings, seconds=left), left + grace)
        results = Results(settings.path)
        if code is None:
            results.cut(f"it went on for more than {settings.seconds:.0f} s")
            break
        if code not in (0, AGAIN, UNFINISHED):
            if results.running is None:
                problem = f"no process could measure (exit code {code}): {tail}"
                break
            results.add(
                results.running, {"error": f"its process ended with exit code {code}: {tail}"}
            )
        if code in (0, UNFINISHED):
            break
    missing = [p for p in points if p not in results.rows]
    results.end(
        summary=_summary(part, results.rows, settings),
        unfinished=missing,
        failed=[p for p in points if "error" in results.rows.get(p, {})],
        problem=problem,
    )
    return results


def launch(settings: Settings, timeout: float) -> tuple[int | None, str]:
    """Runs one process. Returns its exit code (None if it was killed) and the end of its standard
    error.
    """
    caches = {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(settings.cache, "programs"),
        "XDG_CACHE_HOME": settings.cache,
    } | ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if settings.small else {})
    command = [sys.executable, "-m", "experiments.gpu_check.child", settings.text()]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, env=ENVIRONMENT | os.environ | caches, stderr=errors)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        return code, errors.read()[-1500:].strip()


def _summary(part, rows: dict[str, dict], settings: Settings) -> dict:
    good = {point: row for point, row in rows.items() if "error" not in row}
    try:
        return part.summary(good, settings)
    except Exception as error:  # the rows are already written
        return {"error": f"{type(error).__name__}: {error}"}
