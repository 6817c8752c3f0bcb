"""One training job with every fault, for the gauntlet, the soak, the siege, the nodes and the tests.

`launch.py` starts it under torchrun and changes the behavior of its ranks through the file of `control.py`. `device.py`
has the two kinds of device, `model.py` the model and its batches, `loop.py` the loop, and `__main__.py` is the program.
"""
