"""How processes that train a run end: exit statuses."""

from __future__ import annotations

DONE = 0
LOCKED = 73
"""Another process writes the run folder. Below INTERRUPTED: srun returns the highest status of its ranks."""
FAILED_ON_DISK = 74
"""A file could not be read or written (EX_IOERR): full disk, permissions, a folder that vanished."""
INTERRUPTED = 75
"""Stopped early by a signal, to be continued with ``--ckpt_path last`` (EX_TEMPFAIL)."""
FAILED = 76
"""Above INTERRUPTED: one failed rank must win."""
INTERRUPTED_BY_KEYBOARD = 130
"""Ctrl-C where there is nothing to save, as shells have it."""
