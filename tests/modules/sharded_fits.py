"""A rank of several: ``sharded_fits.py WORLD JOBS``, JOBS a JSON list of command lines to run one after the other."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from torch import Tensor

from cells import interrupt_after
from darlit.__main__ import main as darlit
from darlit.modules import LanguageModule


def run(job: dict[str, Any], last_rank: bool) -> None:
    """Run ``arguments``; all ranks exit with ``status``.

    In the step ``interrupt`` the last rank alone is signalled, in the step ``spoil`` it alone has a loss that is NaN.
    """
    with pytest.MonkeyPatch.context() as patch:
        if last_rank and job.get("interrupt"):
            interrupt_after(patch, job["interrupt"])
        if last_rank and job.get("spoil"):
            spoil(patch, job["spoil"])
        try:
            status = darlit(job["arguments"])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    assert status == job.get("status", 0), f"{job}: {status}"


def spoil(patch: pytest.MonkeyPatch, step: int) -> None:
    original = LanguageModule.training_step

    def spoilt(self: LanguageModule, tokens: Tensor, batch_idx: int) -> dict[str, Tensor]:
        outputs = original(self, tokens, batch_idx)
        return outputs if self.global_step != step else {**outputs, "loss": outputs["loss"] * float("nan")}

    patch.setattr(LanguageModule, "training_step", spoilt)


if __name__ == "__main__":
    world, jobs = int(sys.argv[1]), json.loads(sys.argv[2])
    for job in jobs:
        run(job, last_rank=int(os.environ["LOCAL_RANK"]) == world - 1)
