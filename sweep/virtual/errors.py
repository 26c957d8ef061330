"""The one error that the virtual GPU raises on purpose."""


class VirtualGpuError(Exception):
    """Something the user can change stands in the way; the message is one sentence that says what to do."""
