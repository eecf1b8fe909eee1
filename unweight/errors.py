"""Every error that unweight raises on purpose.

A message says what is wrong with which object, what was expected, and what to do.
"""

from __future__ import annotations


class UnweightError(Exception):
    """Base of all errors of this package."""


class FormatError(UnweightError, ValueError):
    """A payload or a bundle can't be read."""


class UnsupportedVersionError(FormatError):
    """The file has a major version that this release doesn't read; ``rule`` is the specification's."""

    def __init__(self, what: str, found: int, supported: int, *, rule: str) -> None:
        super().__init__(f"{what} has format version {found}; this release reads {supported}. Upgrade unweight.")
        self.rule = rule
        self.found = found
        self.supported = supported


class UnsupportedFeatureError(FormatError):
    """The file needs a feature, or an encoding, that this release doesn't know; ``rule`` is the specification's."""

    def __init__(self, what: str, feature: str, *, rule: str) -> None:
        super().__init__(f"{what} needs {feature!r}, which this release doesn't know. Upgrade unweight.")
        self.rule = rule
        self.feature = feature


class CorruptFileError(FormatError):
    """Bytes break a rule of the specification.

    Attributes:
        rule: the rule's id in ``spec/``, e.g. ``"HUF-3"``.
        tensor: the tensor's name, when there is one.
        offset: the byte in the payload or file where the defect is, when it is known.
    """

    def __init__(self, rule: str, message: str, *, tensor: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.tensor = tensor
        self.offset = offset

    def __str__(self) -> str:
        where = f"tensor {self.tensor!r}: " if self.tensor else ""
        at = f" at byte {self.offset}" if self.offset is not None else ""
        return f"{where}{self.message}{at} (rule {self.rule}). The file is damaged: fetch or convert it again."


class TruncatedFileError(CorruptFileError):
    """A file or payload ends too early."""

    def __init__(self, what: str, needed: int, available: int, *, rule: str = "PAY-5") -> None:
        super().__init__(rule, f"{what} is cut short: {needed} bytes needed, {available} there")
        self.needed = needed
        self.available = available


class UnsupportedTensorError(UnweightError, TypeError):
    """The caller gave a tensor of a dtype or layout that can't be compressed."""


class UnsupportedModelError(UnweightError, TypeError):
    """A model has parts that a function can't work with."""


class DeviceError(UnweightError, RuntimeError):
    """No GPU, or one without what is needed."""


class CheckpointError(UnweightError, ValueError):
    """A checkpoint, or a target directory, isn't what the command needs."""


class InterruptedConversionError(CheckpointError):
    """An unfinished conversion is in the way: of another source, or still running."""


class DiskFullError(UnweightError, OSError):
    """There is no space left for the target."""


class DataError(UnweightError, ValueError):
    """A file of training examples can't be used."""


class AdapterError(UnweightError, ValueError):
    """An adapter doesn't fit the model, or can't be made for it."""


class TrainingError(UnweightError, RuntimeError):
    """Training can't go on."""


class NonFiniteError(TrainingError):
    """A loss or a gradient is infinite or not a number.

    Attributes:
        step: the step, from 1 on.
        culprit: the module or parameter where it was seen first.
    """

    def __init__(self, message: str, *, step: int, culprit: str) -> None:
        super().__init__(message)
        self.step = step
        self.culprit = culprit


class HubError(UnweightError, OSError):
    """The Hugging Face Hub refused, or couldn't be reached."""


class VerificationError(UnweightError):
    """A bundle is readable, but isn't equal to what it was compared with.

    Attributes:
        differences: one line for each difference.
    """

    def __init__(self, message: str, differences: list[str]) -> None:
        super().__init__(message)
        self.differences = differences


class MissingDependencyError(UnweightError, ImportError):
    """An optional dependency isn't installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f'{purpose} needs the package {package!r}. Install it with: pip install "unweight[{extra}]"')
