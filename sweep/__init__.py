"""What fits and what is fastest on your GPUs, before a long fine-tuning run.

Nothing is imported here: `sweep.virtual` must work in an environment that has neither Hydra nor the rest.
"""

__version__ = "0.1.0"
