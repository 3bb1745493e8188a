"""Golden tensors of the arms that no independent implementation covers; `make_golden` made them.

They say that the mathematics has not changed, not that it is right: for that there are the dense formulas.
"""

from __future__ import annotations

import json

import pytest
import torch

from pathways.make_golden import FOLDER, GOLDEN, compute


@pytest.mark.parametrize("variant", GOLDEN)
def test_golden(variant):
    wanted = json.loads((FOLDER / f"{variant}.json").read_text(encoding="utf-8"))
    got = compute(variant)
    assert list(got["gradients"]) == list(wanted["gradients"])
    pairs = [(got["final"], wanted["final"])]
    pairs += [(got["gradients"][name], wanted["gradients"][name]) for name in wanted["gradients"]]
    for ours, theirs in pairs:
        ours, theirs = (torch.tensor(values, dtype=torch.double) for values in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_there_is_no_file_without_a_test():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(GOLDEN)
