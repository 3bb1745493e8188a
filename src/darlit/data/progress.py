"""The progress bar of a preparation: MB/s, tokens and time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows how many source bytes are done; on anything but a terminal one line when it ends.

    Args:
        total: bytes of all sources.
        enabled: ``False`` shows nothing.
    """

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled
        self._bar: Any = None
        self._task: Any = None
        self._before = 0
        self._began = time.perf_counter()
        self._read = 0
        self._tokens = 0

    def __enter__(self) -> Progress:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TransferSpeedColumn(),
                TextColumn("{task.fields[tokens]:,} tokens"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("preparing", total=self._total, tokens=0)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._enabled and kind is None:
            seconds = time.perf_counter() - self._began
            speed = self._read / 1e6 / max(seconds, 1e-9)
            tokens = f"{self._tokens:,} tokens, " if self._tokens else ""
            print(f"{self._read / 1e6:.1f} MB, {tokens}{seconds:.1f} s, {speed:.1f} MB/s", file=sys.stderr)

    def skip(self, size: int) -> None:
        """A whole source is done (now, or in an earlier attempt)."""
        self._before += size
        self._show(self._before)

    def update(self, read: int, tokens: int) -> None:
        """``read`` bytes of the current source and ``tokens`` in all are done."""
        self._tokens = tokens
        self._show(self._before + read)

    def say(self, what: str) -> None:
        """What is being done now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def note(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self._enabled:
            print(line, file=sys.stderr) if self._bar is None else self._bar.console.print(line, markup=False)

    def _show(self, read: int) -> None:
        self._read = read
        if self._bar is not None:
            self._bar.update(self._task, completed=read, tokens=self._tokens)
