"""How long-running functions tell what they have done: the command line shows it, Python is quiet by default."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """Takes the amount of work and what is done of it, in bytes of the original checkpoint."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self, done: int, stored: int = 0) -> None:
        """``done`` more bytes are processed; they take ``stored`` bytes."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...


class Quiet:
    """Says nothing."""

    def start(self, what: str, total: int) -> None:
        pass

    def advance(self, done: int, stored: int = 0) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Bar:
    """A bar on the console with bytes, rate, ratio and time left.  Use as a context manager."""

    def __init__(self, console: Console) -> None:
        from rich import progress as rich_progress

        class Ratio(rich_progress.ProgressColumn):
            def render(self, task: rich_progress.Task) -> str:
                stored = task.fields.get("stored", 0)
                return f"{stored / task.completed:.1%}" if stored and task.completed else ""

        self._console = console
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.DownloadColumn(),
            rich_progress.TransferSpeedColumn(),
            Ratio(),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: rich_progress.TaskID | None = None
        self._stored = 0

    def start(self, what: str, total: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._stored = 0
        self._task = self._bar.add_task(what, total=total, stored=0)

    def advance(self, done: int, stored: int = 0) -> None:
        if self._task is not None:
            self._stored += stored
            self._bar.update(self._task, advance=done, stored=self._stored)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
