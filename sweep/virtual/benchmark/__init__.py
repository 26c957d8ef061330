"""Compares the virtual GPU with figures that others measured on real GPUs, using the software of their time."""
