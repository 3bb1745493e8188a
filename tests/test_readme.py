"""What the README shows is true: its example of a new pathway works as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from darlit.backbone import BackboneConfig
from pages import blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONFIG = BackboneConfig(vocab_size=50, num_layers=2, width=16, num_heads=2, ffn_width=24, sequence_length=8)


def test_the_example_pathway_is_one_file_and_trains(tmp_path: Path) -> None:
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Scaled" in block)
    script = (
        f"{example}\n"
        "from darlit import pathways\nfrom darlit.backbone import BackboneConfig, Transformer\n"
        f"config = {CONFIG!r}\ntokens = torch.arange(18).view(2, 9)\n"
        "losses = []\n"
        "for name in ('scaled', 'residual'):\n"
        "    torch.manual_seed(0)\n"
        "    model = Transformer(config, pathways.build(name, num_branches=4, width=16))\n"
        "    losses.append(model.loss(tokens[:, :-1], tokens[:, 1:]))\n"
        "    losses[-1].backward()\n"
        "    assert all(parameter.grad is not None for parameter in model.parameters())\n"
        "assert torch.equal(*losses), losses\n"
        "assert 'scaled' in pathways.names()\n"
    )
    # In a process of its own: a registered pathway would stay for the other tests.
    (tmp_path / "scaled.py").write_text(script)
    result = subprocess.run([sys.executable, str(tmp_path / "scaled.py")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/pathways.md"])
def test_the_four_methods_work_as_shown(page: str) -> None:
    (example,) = (block.text for block in blocks(page) if block.language == "python" and "state.finish()" in block.text)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["hidden"].shape == names["embedding"].shape == (2, 10, 128)


def test_every_link_leads_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{name} links to {target}"


def test_every_experiment_and_command_that_is_named_exists() -> None:
    from darlit.__main__ import VERBS

    for path in re.findall(r"experiments/[\w./-]+\.yaml", README):
        assert (ROOT / path).is_file(), path
    for verb in re.findall(r"^darlit (\w+)", README, re.MULTILINE):
        assert verb in VERBS
