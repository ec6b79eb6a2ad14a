"""Where parameters and optimizer states are stored while a step runs: on the device, in host
memory, or divided over devices.

A placement is counts of layers, the arguments of `split`. A placement object was the first choice.
Three counts are enough:

- The first layers (`persist`) remain on the device, since their backward comes last and their
  forward next.
- Layers with a copy of their parameters (`copies`) follow.
- The last layers have buffers (`buffers`), since their iteration of the backward comes soonest.

An array is stored in one memory. So the arrays of the layers become `Stacks`, a stack for each
memory. A copy and its master are one part of `Stacks` (`Copied`). The number of layers with buffers
is a static field of `Stacks`, since no array shows it. The joined form has neither copies nor
buffers. A checkpoint of a joined state therefore fits every placement; a checkpoint of stacks is
joined when it is read into another placement (`_train/checkpoints/restacked.py`).
"""
