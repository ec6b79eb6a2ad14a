"""The plan: its data and text (`plan.py`, `rows.py`, `timeline.py`), its file (`file.py`), its HTML
(`html.py`, `timeline_figure.py`), its flags of MaxText (`maxtext.py`), and the differences of two
plans (`difference.py`).
"""
