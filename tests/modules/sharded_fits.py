"""A rank of several: ``sharded_fits.py WORLD JOBS``, JOBS a JSON list of command lines to run one after the other."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from cells import interrupt_after
from darlit.__main__ import main as darlit


def run(job: dict[str, Any], last_rank: bool) -> None:
    """Run ``arguments``; with ``interrupt`` the last rank alone is signalled in that step. All exit with ``status``."""
    with pytest.MonkeyPatch.context() as patch:
        if last_rank and job.get("interrupt"):
            interrupt_after(patch, job["interrupt"])
        try:
            status = darlit(job["arguments"])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    assert status == job.get("status", 0), f"{job}: {status}"


if __name__ == "__main__":
    world, jobs = int(sys.argv[1]), json.loads(sys.argv[2])
    for job in jobs:
        run(job, last_rank=int(os.environ["LOCAL_RANK"]) == world - 1)
