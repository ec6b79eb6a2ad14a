"""Training under a plan: the training loop and the folder of a run (`runs`), checkpoints
(`checkpoints`), the rectifier that revises a plan (`rectifier`), and pages about runs (`report`).
A compiled step, a first state and data go in; the trained state and files of results come out.
"""
