"""The parts of the GPU check, one file each. A part names its points, measures a point, and
summarizes the rows.
"""
