"""Seconds per iteration without a GPU: what an iteration asks of the device, counted, times what a GPU can do.

`count` runs in the worker on the virtual device and needs torch; everything else is pure and runs in the parent. An
estimate is never a measurement: it carries its model's version and its uncertainty wherever it goes.
"""
