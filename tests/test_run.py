"""What a run is: names, folder, and the one line that tells two identities apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from darlit.errors import DarlitError
from darlit.run import LOCK, MAY_DIFFER, Cell, RunFolder, difference, hold, may_differ, read_recorded

ROOT = Path(__file__).parents[1]
THERE: dict[str, Any] = {"model.class_path": "A", "pathway.x": 1, "budget.tokens": 20, "trainer.precision": "32-true"}


def test_a_cell_is_size_and_arm() -> None:
    cell = Cell("dense0.1b_dar_block")
    assert (cell.size, cell.arm) == ("dense0.1b", "dar_block")
    assert Cell("mine").arm == "mine"
    sparse = Cell("tiny_moe_dar_block")
    assert (sparse.size, sparse.arm) == ("tiny_moe", "dar_block")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"budget.tokens": 30}, "budget.tokens=20, now it is 30"),
        ({"new": None}, "new=unset, now it is None"),
        ({"pathway.x": True}, "pathway.x=1, now it is True"),
        ({"pathway.x": 1.0}, None),
        (
            {"budget.tokens": 30, "model.class_path": "B", "pathway.y": 2},
            "model.class_path='A', now it is 'B' (and 2 more: budget.tokens, pathway.y)",
        ),
    ],
)
def test_a_difference_is_one_line_of_field_there_and_here(change: dict[str, Any], line: str | None) -> None:
    assert difference(THERE, {**THERE, **change}) == line
    assert (difference({**THERE, **change}, THERE) is None) == (line is None)


def test_a_field_that_may_differ_takes_all_below_it_along_and_nothing_beside_it() -> None:
    assert may_differ("trainer.strategy.init_args.expert_parallel_size")
    assert may_differ("trainer.logger")
    assert not may_differ("trainer.logger_of_mine")
    assert not may_differ("trainer.precision")


def test_the_documented_table_is_the_table() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    for field, reason in MAY_DIFFER.items():
        assert f"| `{field}` | {reason} |" in page, field
    rows = page.partition("### What may differ")[2].partition("\n#")[0]
    assert rows.count("\n| `") == len(MAY_DIFFER)


def test_a_folder_is_cleared_of_everything_but_its_locks_and_the_record_of_attempts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "seed_0")
    with hold(folder):
        folder.checkpoints.mkdir()
        folder.checkpoint("last").touch()
        for file in (folder.config, folder.record, folder.summary, folder.progress, folder.log):
            file.touch()
        folder.note(event="start")
        outside = tmp_path / "outside"
        outside.mkdir()
        (folder.path / "link").symlink_to(outside)
        folder.clear()
        assert {path.name for path in folder.path.iterdir()} == {LOCK, "log.txt", "attempts.jsonl"}
        assert outside.is_dir()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": 3, "devices": 1}', '{"schema_version": 1}'])
def test_a_damaged_record_is_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "identity.json"
    file.write_text(content)
    with pytest.raises(DarlitError, match=r"identity\.json: does not say what the run was trained as") as error:
        read_recorded(file)
    assert "\n" not in str(error.value)


def test_a_summary_of_version_1_has_the_fields_that_it_names(tmp_path: Path) -> None:
    recorded = read_recorded(ROOT / "results" / "runs" / "small_dar_block" / "seed_0.json")
    assert recorded is not None
    assert recorded.partial
    expected = {
        "model.class_path": "DualAttentionResidualLM",
        "pathway.block_size": 2,
        "trainer.gradient_clip_val": 1.0,
        "seed_everything": 0,
    }
    assert expected.items() <= recorded.identity.items()
    summary = json.loads((ROOT / "results" / "runs" / "small_dar_block" / "seed_0.json").read_text())
    assert recorded.identity["data.fingerprint"] == summary["data"]["fingerprint"]


def test_what_a_run_is_needs_no_torch() -> None:
    code = "import sys, darlit.run, darlit.grid.commands, darlit.grid.results; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
