"""What a run is: its folder, its identity, its lock, and how its processes end. Torch-free, used by all of darlit.

A run is its *identity* and not the name of its folder: the resolved configuration without what may differ, the
fingerprint of its data, its seed and its budget. ``darlit fit`` writes it before the first step, every checkpoint and
the summary hold it, and whoever reads a run compares it with what is asked for.
"""

from __future__ import annotations

from darlit.run.folder import LOCK, WORKER_LOCK, Cell, RunFolder
from darlit.run.identity import (
    CONTINUED,
    DATA_FIELDS,
    MAY_DIFFER,
    SCHEMA_VERSION,
    UNSET,
    Recorded,
    difference,
    digest,
    field_name,
    flatten,
    identity_of,
    may_differ,
    read_recorded,
)
from darlit.run.lock import LockedError, hold, holder, in_slurm
from darlit.run.status import DONE, FAILED, INTERRUPTED, LOCKED

__all__ = [
    "CONTINUED",
    "DATA_FIELDS",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "LOCK",
    "LOCKED",
    "MAY_DIFFER",
    "SCHEMA_VERSION",
    "UNSET",
    "WORKER_LOCK",
    "Cell",
    "LockedError",
    "Recorded",
    "RunFolder",
    "difference",
    "digest",
    "field_name",
    "flatten",
    "hold",
    "holder",
    "identity_of",
    "in_slurm",
    "may_differ",
    "read_recorded",
]
