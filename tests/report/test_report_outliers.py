"""A rectifier's counts and decisions on the page: cells are the channels that were counted, and
hostile text is text.
"""

import re

from jaxmem._train.rectifier.counts import Outliers
from jaxmem._train.report.outliers import decided, outlier_maps
from jaxmem._train.runs.run import Run
from tests.shared.report_pages import HOSTILE, page_of, write_run


def seen(step, places, channels=10, tag="up", block="block"):
    counts = tuple(len(of) for of in places)
    return Outliers(step, block, tag, channels, counts, (4.0,) * len(places), places)


def cells(figure):
    """(x, y, opacity) of the cells, in percent."""
    number = r'="([\d.]+)%?"'
    cell = f"x{number} width{number} y{number} height{number} opacity{number}"
    found = [(x, y, opacity) for x, _, y, _, opacity in re.findall(cell, figure)]
    return [tuple(map(float, cell)) for cell in found]


CODEC = "outlier_separated(group=64,scale=bfloat16,capacity=3)"


def test_cells_are_channels_by_steps():
    figure = outlier_maps(Run("r", None, outliers=(seen(1, ((2,), ())), seen(2, ((2, 9), (2,))))))
    assert cells(figure) == [(20.0, 0.0, 0.62), (20.0, 50.0, 1.0), (90.0, 50.0, 0.62)]
    assert "at step 2 at most 2 outliers in one of 2 tensors, 15.00 % of all channels" in figure
    assert "steps 1 to 2" in figure
    assert outlier_maps(Run("r", None)) == ""


def test_decisions_are_listed(tmp_path):
    rows = [
        {"step": 1, "taken": False, "why": HOSTILE, "predicted_seconds": 0.01},
        {
            "step": 1024, "taken": True, "event": "swap", "why": "faster", "step_seconds": 0.5,
            "changed": {"block/up": f"keep -> compress {CODEC}"},
        },
    ]  # fmt: skip
    table = decided(Run("r", None, decisions=tuple(rows)))
    assert HOSTILE not in table
    for text in ("declined", "swap", "1,024", "500.0 ms", "10.00 ms", "(capacity=3)"):
        assert text in table, text
    counts = [seen(4, ((3,),)).to_json()]
    folder = write_run(tmp_path / "r", losses=[1.0], decisions=rows, outliers=counts)
    page = page_of(tmp_path, folder)
    assert "<h3>Outliers</h3>" in page
    assert "<h3>Decisions</h3>" in page
