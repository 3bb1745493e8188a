"""The summary's schema: what is read, and what is said about a file that departs from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from darlit.grid.summary import TIMING_FIELDS, SummaryError, read_summary, validate, without_timing
from grid.fakes import make_summary


def test_a_summary_reads_back_as_it_was_written(tmp_path: Path) -> None:
    summary = make_summary("tiny", "dar_full", 3)
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary))
    assert read_summary(file) == {**summary, "identity": {}, "devices": 0}, "version 1 has neither"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("val_loss_final", "2.0", "field 'val_loss_final' is '2.0', expected float"),
        ("seed", 1.5, "field 'seed' is 1.5, expected int"),
        ("seed", True, "field 'seed' is True, expected int"),
        ("budget__tokens", None, "field 'budget.tokens' is None, expected int"),
        ("curve__val__loss", [1.0, None, 2.0, 3.0], "field 'curve.val.loss'"),
        ("curve__val__loss", [1.0], "unequal length"),
        ("versions", {"torch": 2}, "field 'versions.torch' is 2, expected str"),
        ("git_revision", 7, "field 'git_revision' is 7"),
        ("hardware", [], "field 'hardware' is [], expected a mapping"),
        ("schema_version", 3, "schema_version is 3, this darlit reads 1 to 2"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(SummaryError, match="somewhere") as error:
        validate(make_summary("tiny", "residual", 0, **{path: value}), where="somewhere")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_every_missing_field_is_named() -> None:
    for field in set(make_summary("tiny", "residual", 0)) - {"schema_version"}:
        summary = make_summary("tiny", "residual", 0)
        del summary[field]
        with pytest.raises(SummaryError, match=f"field '{field}' is missing"):
            validate(summary)


@pytest.mark.parametrize(
    ("path", "value", "kind"),
    [("passes", 13.0, "float"), ("loader_share", 0.25, "float"), ("data__train_tokens", 39_494, "int")],
)
def test_fields_that_older_summaries_lack_are_checked_where_they_are(path: str, value: Any, kind: str) -> None:
    assert validate(make_summary("tiny", "residual", 0, **{path: value}))
    field = path.replace("__", ".")
    with pytest.raises(SummaryError, match=rf"field '{field}' is 'x', expected {kind}"):
        validate(make_summary("tiny", "residual", 0, **{path: "x"}))


def test_a_file_cut_in_half_is_refused_by_name(tmp_path: Path) -> None:
    text = json.dumps(make_summary("tiny", "residual", 0))
    file = tmp_path / "summary.json"
    file.write_text(text[: len(text) // 2])
    with pytest.raises(SummaryError, match=r"summary\.json: not a JSON file"):
        read_summary(file)


def test_timing_fields_are_all_that_identical_runs_may_differ_in() -> None:
    first, second = (
        make_summary(
            "tiny", "residual", 0, tokens_per_second=speed, wall_time_s=speed, restarts=int(speed),
            step_time_median_s=speed, peak_memory_bytes=int(speed), git_revision=str(speed),
            hardware={"device": str(speed), "cores": 1, "memory_gib": speed, "gpus": 0},
            loader_share=speed / 4, versions={"torch": str(speed)}, curve__val__seconds=[0.0, speed, speed, speed],
        )
        for speed in (1.0, 2.0)
    )  # fmt: skip
    assert without_timing(validate(first)) == without_timing(validate(second))
    assert len(TIMING_FIELDS) == 11
    other = make_summary("tiny", "residual", 0, val_loss_final=2.0000000001)
    assert without_timing(validate(other)) != without_timing(validate(first))
