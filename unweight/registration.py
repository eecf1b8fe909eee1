"""transformers learns of bundles: at once if it is loaded, else when it is.

`import unweight` calls `register_when_loaded`, which costs nothing without transformers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .errors import MissingDependencyError

OLDEST = (5, 22)
_NAME = "transformers"
# It comes with the first class of a model.
_TRIGGER = "transformers.quantizers"


def register_when_loaded() -> None:
    """Register now, or leave a hook that does when transformers' quantizers are imported.  Calls may be repeated."""
    if hasattr(sys.modules.get(_TRIGGER), "register_quantizer"):
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Make transformers load bundles.  Calls may be repeated.

    Raises:
        MissingDependencyError: transformers is missing, or too old.
    """
    check_version()
    from transformers.quantizers import auto

    if "unweight" in auto.AUTO_QUANTIZER_MAPPING:
        return
    from .quantizer import METHOD, UnweightConfig, UnweightQuantizer

    if METHOD in auto.AUTO_QUANTIZER_MAPPING:  # the import came here too
        return
    auto.register_quantization_config(METHOD)(UnweightConfig)
    auto.register_quantizer(METHOD)(UnweightQuantizer)
    # Callers' options for loading count only for classes in this tuple.
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (UnweightConfig,)  # type: ignore[assignment]


def check_version() -> None:
    """Whether transformers is one that can load bundles.

    Raises:
        MissingDependencyError: it isn't there, or too old.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(_NAME, "loading a model", "demo") from None
    parts = transformers.__version__.split(".")[:2]
    if tuple(int(part) for part in parts if part.isdecimal()) < OLDEST:
        raise MissingDependencyError(
            f"transformers>={OLDEST[0]}.{OLDEST[1]}", f"loading a model (this is {transformers.__version__})", "demo"
        )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets the module be loaded as ever, and registers behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's loader, and then `register`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        if "unweight.quantizer" in sys.modules:  # it is what imports transformers, and registers itself
            return
        try:
            register()
        except Exception as error:  # transformers works without us; models that need us say so then
            warnings.warn(f"unweight can't register with transformers: {error}", RuntimeWarning, stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
