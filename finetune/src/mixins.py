"""Modules that become of another class, with a mixin before their own.

    become(module, mixin)   the module, with the mixin's forward pass
    restore(module)         what it was
    leave(module, mixin)    without this one

A module keeps its parameters' names, its hooks and its state, and copies and pickles of it are like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_classes: dict[tuple[type, type], Any] = {}


def _joined(own: type, mixin: type) -> Any:
    if (own, mixin) not in _classes:
        # With its own name, which is what configurations and messages have.
        members = {"__module__": own.__module__, "_fused_from": (own, mixin)}
        _classes[own, mixin] = type(own.__name__, (mixin, own), members)
    return _classes[own, mixin]


def _chain(cls: Any) -> tuple[type, list[type]]:
    """A module's own class, and the mixins that were put before it, the first one first."""
    mixins = []
    while "_fused_from" in cls.__dict__:
        cls, mixin = cls.__dict__["_fused_from"]
        mixins.append(mixin)
    return cls, mixins[::-1]


def _put_on(module: nn.Module, own: type, mixins: Sequence[type]) -> None:
    for mixin in sorted(mixins, key=lambda m: m._outermost):  # type: ignore[attr-defined]
        own = _joined(own, mixin)
    module.__class__ = own


def become(module: nn.Module, mixin: type) -> None:
    """Give a module the forward pass of ``mixin``; once."""
    if not isinstance(module, mixin):
        own, mixins = _chain(type(module))
        _put_on(module, own, [*mixins, mixin])


def restore(module: nn.Module) -> None:
    """Undo `become`, but for mixins that call the forward pass of the others."""
    own, mixins = _chain(type(module))
    _put_on(module, own, [m for m in mixins if m._outermost])  # type: ignore[attr-defined]


def leave(module: nn.Module, mixin: type) -> None:
    """Undo `become` for this mixin."""
    own, mixins = _chain(type(module))
    if mixin in mixins:
        _put_on(module, own, [m for m in mixins if m is not mixin])


def _empty(own: type[nn.Module], *mixins: type) -> nn.Module:
    cls: Any = own
    for mixin in mixins:
        cls = _joined(cls, mixin)
    made: nn.Module = cls.__new__(cls)
    return made


class Mixin:
    """What is put before a module's own class by `become`."""

    # Whether it calls the forward pass of the others.
    _outermost = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A joined class has no name of its own by which a pickle could find it."""
        joined = next(cls for cls in type(self).__mro__ if "_fused_from" in cls.__dict__)
        own, mixins = _chain(joined)
        return _empty, (own, *mixins), self.__dict__
