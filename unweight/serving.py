"""An OpenAI-compatible server for a bundle: transformers' own, in a process that knows the format.

``transformers serve`` has no way to be told to import something, so it would refuse a bundle.  ``unweight serve`` is
the same command after the import: all its options work.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import MissingDependencyError
from .registration import register

NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")


def serve(arguments: Sequence[str]) -> None:
    """Run ``transformers serve`` with these arguments, until it is interrupted.

    Raises:
        MissingDependencyError: a package that the server needs isn't installed.
    """
    import importlib.util

    for package in ("transformers", *NEEDED):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, "serving a model", "serve")
    register()
    from transformers.cli.transformers import app

    app(args=["serve", *arguments], prog_name="unweight", standalone_mode=False)
