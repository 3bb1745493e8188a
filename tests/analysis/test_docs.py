"""docs/analysis.md: its example runs as it is written, and its pictures are there and small."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from darlit.modules.loading import load

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


def test_the_example_runs(dar_run):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert "runs/tiny_dar_full/seed_0" in code
    names: dict = {}
    exec(code.replace("runs/tiny_dar_full/seed_0", str(dar_run)), names)
    with torch.no_grad():
        plain = load(dar_run).module(names["tokens_BT"])
    assert names["logits_BTV"].shape == plain.shape == (1, 12, 257)
    assert not torch.equal(names["logits_BTV"], plain)


def test_its_pictures_are_there_and_below_200_kib():
    pictures = [PAGE.parent / name for name in re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text())]
    assert len(pictures) == 4
    for picture in pictures:
        assert picture.read_bytes()[:4] == b"\x89PNG"
        assert picture.stat().st_size < 200 * 1024
