"""The library's version; the format has its own (`unweight.format.limits`)."""

__version__ = "0.1.0"
