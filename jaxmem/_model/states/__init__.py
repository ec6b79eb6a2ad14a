"""Stores parameters and optimizer states while a step runs: on the device, in host memory, or
divided over devices. Stacked arrays of layers and a placement go in; `Stacks` in these memories
come out (`layout.py`), and loops read and replace their layers (`store.py`).

A placement is counts of layers, the arguments of `split`. A placement object was the first choice.
Three counts are enough:

- `persist`: the first layers remain on the device, since their backward ends a step and their
  forward begins the next step.
- `copies`: the layers after these have a copy of their parameters on the device.
- `buffers`: the last layers keep fetched parameters on the device, since the backward begins with
  these layers.

All arrays of a stack are stored in one memory. So the arrays of the layers become `Stacks`, a stack
for each memory. A copy and its master are one part of `Stacks` (`Copied`). The number of layers
with buffers is a static field of `Stacks`, since no array shows this number. The joined form has
neither copies nor buffers. A checkpoint of a joined state therefore fits every placement; a
checkpoint of stacks is joined when it is read into another placement
(`_train/checkpoints/restacked.py`).
"""
