"""HTML pages about plans, runs and frontiers. A plan, the folder of a run or a frontier goes in;
one HTML file that needs no other file comes out (`report.py`).
"""
