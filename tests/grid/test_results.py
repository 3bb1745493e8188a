"""``darlit results`` from run folders to files: numbers by hand, marks, refusals, and equal bytes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from darlit.__main__ import main
from darlit.grid.comparison import compare
from darlit.grid.equal_budget import check_runs
from darlit.grid.figures import draw_deltas
from darlit.grid.runs import find_runs
from grid.fakes import make_summary, write_cell_file, write_loss, write_run


def _rows(out: Path) -> dict[str, dict[str, str]]:
    with (out / "table.csv").open(encoding="utf-8") as file:
        return {row["cell"]: row for row in csv.DictReader(file)}


def _run(runs: Path, out: Path, *more: str) -> int:
    return main(["results", str(runs), "--out", str(out), "--figures", "none", *more])


def test_every_number_of_the_table_by_hand(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for seed, (base, ours) in enumerate([(2.0, 1.9), (2.1, 1.9), (2.2, 1.9)]):
        write_loss(runs, "residual", seed, [5.0, 4.0, 3.0, base])
        write_loss(
            runs, "dar_full", seed, [5.0, 3.9, 3.1, ours],
            curve__val__seconds=[0.0, 10.0, 20.0, 40.0], tokens_per_second=50.0, peak_memory_bytes=1500,
            parameters__total=1100,
        )  # fmt: skip
    assert _run(runs, out) == 0
    residual, dar = _rows(out)["tiny_residual"], _rows(out)["tiny_dar_full"]

    assert float(residual["val_loss_mean"]) == pytest.approx(2.1)
    assert float(residual["val_loss_sd"]) == pytest.approx(0.1)
    assert residual["delta_percent"] == residual["paired_difference"] == residual["share_below_residual"] == ""
    assert float(dar["delta_percent"]) == pytest.approx(100 * (1.9 - 2.1) / 2.1)
    # Differences -0.1, -0.2, -0.3: t(0.95, 2) = 4.302653, half width 0.248414.
    assert float(dar["paired_difference"]) == pytest.approx(-0.2)
    assert float(dar["paired_low_95"]) == pytest.approx(-0.448414, abs=1e-6)
    assert float(dar["paired_high_95"]) == pytest.approx(0.048414, abs=1e-6)
    assert float(dar["throughput_ratio"]) == 0.5
    assert float(dar["memory_ratio"]) == 1.5
    assert dar["extra_parameters"] == "100"
    # After residual's 20 s, dar has done half of its steps: loss 3.1, while residual has finished.
    assert float(dar["loss_at_equal_time"]) == pytest.approx(3.1)
    assert float(residual["loss_at_equal_time"]) == pytest.approx(2.1)
    # Of steps 25, 50 and 100 dar is below at 25 and 100, under every seed; step 0 is before training.
    assert float(dar["share_below_residual"]) == pytest.approx(2 / 3)


def test_the_figure_shows_each_gain_with_its_interval(tmp_path: Path) -> None:
    for seed, (base, ours) in enumerate([(2.0, 1.9), (2.1, 1.9), (2.2, 1.9)]):
        write_loss(tmp_path, "residual", seed, [5.0, 4.0, 3.0, base])
        write_loss(tmp_path, "dar_full", seed, [5.0, 3.9, 3.1, ours])
    write_loss(tmp_path, "hc2", 1, [5.0, 4.0, 3.0, 2.31])
    comparison = compare("tiny", check_runs(find_runs(tmp_path)[0])["tiny"], {})
    axes = Figure().subplots()
    draw_deltas(comparison.rows, axes)

    assert [label.get_text() for label in axes.get_yticklabels()] == ["hc2", "dar_full"]  # residual is the zero line
    hc, dar_interval, dar, zero = (line.get_xdata() for line in axes.get_lines())
    assert hc == pytest.approx([10.0])  # one seed: a mark without an interval
    # As above, -0.2 with bounds -0.448414 and 0.048414, in percent of 2.1.
    assert dar == pytest.approx([-9.523810])
    assert dar_interval == pytest.approx([-21.353048, 2.305429], abs=1e-4)
    assert list(zero) == [0, 0]


def test_loss_at_equal_time_is_linear_between_evaluations(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    write_loss(runs, "dar_full", 0, [5.0, 4.0, 3.0, 2.0], curve__val__seconds=[0.0, 8.0, 16.0, 32.0])
    write_loss(runs, "hc2", 0, [5.0, 4.0, 3.0, 1.0], curve__val__seconds=[0.0, 1.0, 2.0, 3.0])
    assert _run(runs, out) == 0
    assert float(_rows(out)["tiny_dar_full"]["loss_at_equal_time"]) == pytest.approx(3.0 - 4 / 16)
    assert float(_rows(out)["tiny_hc2"]["loss_at_equal_time"]) == 1.0


def test_a_single_seed_shows_no_interval(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    write_loss(runs, "dar_full", 0, [5.0, 4.0, 3.0, 1.9])
    assert _run(runs, out) == 0
    row = _rows(out)["tiny_dar_full"]
    assert row["val_loss_sd"] == row["paired_low_95"] == row["paired_high_95"] == ""
    line = next(line for line in (out / "table.md").read_text().splitlines() if line.startswith("| dar_full"))
    assert "| 1.9000 | " in line
    assert "| −5.00 | −0.1000 | " in line
    assert "±" not in line
    assert "[" not in line


def test_rows_with_missing_seeds_say_so(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for seed in (0, 1, 2):
        write_loss(runs, "residual", seed, [5.0, 4.0, 3.0, 2.0 + seed])
    write_loss(runs, "dar_full", 1, [5.0, 4.0, 3.0, 1.5])
    assert _run(runs, out) == 0
    row = _rows(out)["tiny_dar_full"]
    assert (row["n"], row["seeds"], row["seeds_missing"]) == ("1", "1", "0 2")
    assert float(row["delta_percent"]) == pytest.approx(-50.0)  # against seed 1 of residual, 3.0, not its mean
    table = (out / "table.md").read_text()
    assert "| dar_full | 1 of 3 |" in table
    assert "tiny_dar_full: seeds 0, 2 missing" in table


def test_a_size_without_residual_says_that_nothing_is_compared(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "dar_full", 0, [5.0, 4.0, 3.0, 2.0])
    assert _run(runs, out) == 0
    assert _rows(out)["tiny_dar_full"]["throughput_ratio"] == ""
    assert "No finished residual run at this size" in (out / "table.md").read_text()


def test_other_hardware_is_marked(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    write_loss(runs, "dar_full", 0, [5.0, 4.0, 3.0, 2.0], hardware__device="another")
    assert _run(runs, out) == 0
    assert "1.00†" in (out / "table.md").read_text()
    assert "† trained on other hardware" in (out / "table.md").read_text()


def test_the_papers_claim_stands_beside_our_row_and_only_where_it_makes_one(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for size in ("tiny", "dense0.3b"):
        for arm in ("residual", "dar_full"):
            write_loss(runs, arm, 0, [5.0, 4.0, 3.0, 2.0], size=size)
    assert _run(runs, out) == 0
    rows = _rows(out)
    assert rows["tiny_dar_full"]["paper_claim"] == rows["dense0.3b_residual"]["paper_claim"] == ""
    assert "2.03 %" in rows["dense0.3b_dar_full"]["paper_claim"]


def test_sizes_and_arms_come_in_the_order_of_the_experiments(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for size in ("small", "dense0.1b", "tiny"):
        for arm in ("dar_full", "own_idea", "residual"):
            write_loss(runs, arm, 0, [5.0, 4.0, 3.0, 2.0], size=size)
    assert _run(runs, out) == 0
    arms = ("residual", "dar_full", "own_idea")
    assert list(_rows(out)) == [f"{size}_{arm}" for size in ("tiny", "small", "dense0.1b") for arm in arms]


def test_nothing_is_written_when_the_check_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_run(runs, make_summary("tiny", "residual", 0))
    write_run(runs, make_summary("tiny", "dar_full", 0, budget__tokens=1))
    assert _run(runs, out) == 2
    assert not out.exists()
    error = capsys.readouterr().err
    assert error.startswith("darlit: error: size tiny: tokens differs: 2000 in ")
    assert error.count("\n") == 1


def test_an_unfinished_run_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    (runs / "tiny_dar_full" / "seed_0").mkdir(parents=True)
    assert _run(runs, out) == 0
    assert list(_rows(out)) == ["tiny_residual"]
    assert re.sub(r"\s+", "", str(runs / "tiny_dar_full" / "seed_0")) in re.sub(r"\s+", "", capsys.readouterr().out)


@pytest.mark.parametrize(("make", "said"), [(False, "does not exist"), (True, "holds no finished run")])
def test_no_runs_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: bool, said: str) -> None:
    runs = tmp_path / "runs"
    if make:
        runs.mkdir()
    assert _run(runs, tmp_path / "results") == 2
    assert said in capsys.readouterr().err


def test_a_summary_in_another_runs_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    file = write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    shutil.copytree(file.parent, runs / "tiny_residual" / "seed_1")
    assert _run(runs, tmp_path / "results") == 2
    assert "says seed 0, its folder says 1" in capsys.readouterr().err


def test_the_same_runs_give_the_same_bytes_and_collected_summaries_the_same_tables(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        for arm in ("residual", "dar_full", "dar_block"):
            for size in ("tiny", "small"):
                write_loss(runs, arm, seed, [5.0, 4.0, 3.0, 2.0 - 0.01 * seed - 0.1 * len(arm)], size=size)
    moved = tmp_path / "moved"
    outs = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]
    assert main(["results", str(runs), "--out", str(outs[0]), "--figures", "svg"]) == 0
    shutil.move(runs, moved)
    assert main(["results", str(moved), "--out", str(outs[1]), "--figures", "svg"]) == 0
    assert main(["results", str(outs[0] / "runs"), "--out", str(outs[2]), "--figures", "svg"]) == 0
    files = sorted(path.relative_to(outs[0]) for path in outs[0].rglob("*") if path.is_file())
    assert {str(file) for file in files} >= {
        "README.md", "table.md", "table.csv", "table.tex", "runs/tiny_residual/seed_0.json",
        "figures/size_tiny.png", "figures/size_tiny.svg", "figures/gain_against_size.png",
    }  # fmt: skip
    for other in outs[1:]:
        assert sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file()) == files
        for file in files:
            assert (other / file).read_bytes() == (outs[0] / file).read_bytes(), file


def test_a_page_of_ones_own_takes_the_short_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out, page = tmp_path / "runs", tmp_path / "results", tmp_path / "page.md"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    page.write_text("Before.\n")
    assert _run(runs, out, f"--into={page}") == 2
    assert "needs one line '<!-- begin: darlit results -->'" in capsys.readouterr().err
    assert page.read_text() == "Before.\n"
    assert not out.exists()

    page.write_text("Before.\n<!-- begin: darlit results -->\nold\n<!-- end: darlit results -->\nAfter.\n")
    assert _run(runs, out, f"--into={page}") == 0
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("<!-- end: darlit results -->\nAfter.\n")
    assert "| arm | n | val loss | bits/byte |" in text
    assert "| residual | 1 | 2.0000 |" in text
    assert "FLOPs" not in text
    assert "old" not in text


def test_a_lossy_tokenizer_is_marked_in_every_table(tmp_path: Path) -> None:
    """Bits per byte of a text that was not kept cannot be known: no table states them, and the page says why."""
    runs, out = tmp_path / "runs", tmp_path / "results"
    for arm in ("residual", "dar_full"):
        write_loss(runs, arm, 0, [5.0, 4.0, 3.0, 2.0], data__tokenizer="words (lossy)")
    assert _run(runs, out) == 0
    assert [row["bits_per_byte_mean"] for row in _rows(out).values()] == ["", ""]
    note = "Tokenizer words (lossy) does not keep all of the texts"
    assert note in (out / "table.md").read_text()
    assert "| 2.0000 | — |" in (out / "table.md").read_text()
    assert "2.885" not in (out / "table.tex").read_text()


def test_latex_escapes_what_tex_would_read(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    write_loss(runs, "own_50%_$idea", 0, [5.0, 4.0, 3.0, 2.0])
    assert _run(runs, out) == 0
    assert r"own\_50\%\_\$idea & 1 &" in (out / "table.tex").read_text()


def test_a_diverged_run_is_shown_and_does_not_stop_the_table(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    write_loss(runs, "hc2", 0, [5.0, 4.0, float("nan"), float("nan")])
    assert main(["results", str(runs), "--out", str(out)]) == 0
    assert "| hc2 | 1 | nan |" in (out / "table.md").read_text()
    assert "diverged" in (out / "table.md").read_text()


def test_two_hundred_runs_become_one_table(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for cell in range(50):
        for seed in range(4):
            arm = f"arm{cell}" if cell else "residual"
            write_loss(runs, arm, seed, [5.0, 4.0, 3.0, 2.0 + 0.001 * cell])
    assert main(["results", str(runs), "--out", str(out)]) == 0
    assert len(_rows(out)) == 50
    assert len(list((out / "runs").rglob("*.json"))) == 200


def test_a_grid_file_lists_what_is_still_missing_and_leaves_out_what_it_does_not_name(tmp_path: Path) -> None:
    runs, out, grid = tmp_path / "runs", tmp_path / "results", tmp_path / "grid.yaml"
    for arm in ("residual", "dar_full", "hc2"):
        write_cell_file(tmp_path, f"tiny_{arm}")
    grid.write_text("groups: {tiny: {cells: [tiny_dar_full, tiny_residual, tiny_hc2], seeds: [0, 1]}}\n")
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    write_loss(runs, "residual", 1, [5.0, 4.0, 3.0, 2.2])
    write_loss(runs, "hc2", 1, [5.0, 4.0, 3.0, 1.1])
    write_loss(runs, "mhc2", 0, [5.0, 4.0, 3.0, 1.0])
    assert _run(runs, out, f"--grid={grid}") == 0
    rows = _rows(out)
    assert list(rows) == ["tiny_residual", "tiny_hc2", "tiny_dar_full"]
    assert [row["seeds_missing"] for row in rows.values()] == ["", "0", "0 1"]
    assert float(rows["tiny_hc2"]["delta_percent"]) == pytest.approx(-50.0)
    assert "| dar_full | 0 of 2 | — |" in (out / "table.md").read_text()


def test_a_loss_that_is_not_of_the_last_step_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {part: values[:-1] for part, values in make_summary("tiny", "residual", 0)["curve"]["val"].items()}
    file = write_run(tmp_path / "runs", make_summary("tiny", "residual", 0, curve__val=short, val_loss_final=3.0))
    assert _run(tmp_path / "runs", tmp_path / "out") == 2
    assert (
        f"{file}: was validated last at step 50 of 100: its loss is not that of its budget" in capsys.readouterr().err
    )
    never = {part: [] for part in short}
    file.write_text(json.dumps(make_summary("tiny", "residual", 0, curve__val=never)))
    assert _run(tmp_path / "runs", tmp_path / "out") == 2
    assert "was validated last at step 0 of 100" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_that_differ_in_any_field_of_their_identity_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm, sequences in (("residual", 16), ("dar_full", 8)):
        identity = {"data.val_sequences": sequences, "pathway.x": arm, "seed_everything": 0, "model.class_path": arm}
        write_run(tmp_path / "runs", make_summary("tiny", arm, 0, schema_version=2, identity=identity, devices=1))
    assert _run(tmp_path / "runs", tmp_path / "out") == 2
    assert "size tiny: validation sequences differs: 16 in " in capsys.readouterr().err


def test_the_page_is_beside_the_runs_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, committed = tmp_path / "runs", tmp_path / "results"
    write_loss(tmp_path / "others", "hc2", 0, [5.0, 4.0, 3.0, 2.0])
    assert _run(tmp_path / "others", committed) == 0
    before = {file: file.read_bytes() for file in committed.rglob("*") if file.is_file()}
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    monkeypatch.chdir(tmp_path)
    assert main(["results", "runs", "--figures", "none"]) == 0
    assert list(_rows(runs / "results")) == ["tiny_residual"]
    assert {file: file.read_bytes() for file in committed.rglob("*") if file.is_file()} == before
    assert main(["results", "runs", "--figures", "none"]) == 0, "a second time: the page is no run"


@pytest.mark.parametrize("other", ["row", "run", "page"])
def test_a_page_of_other_runs_is_only_replaced_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    if other == "page":
        out.mkdir()
        (out / "README.md").write_text("# My project\n")
        said = "was not written by darlit results"
    else:
        arm, said = ("hc2", "a row of tiny_hc2 seed 0") if other == "row" else ("residual", "another run of tiny_resid")
        write_loss(tmp_path / "others", arm, 0, [5.0, 4.0, 3.0, 2.5])
        assert _run(tmp_path / "others", out) == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert _run(runs, out) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.endswith("write elsewhere with --out FOLDER, or replace it with --overwrite\n")
    assert error.count("\n") == 1
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert _run(runs, out, "--overwrite") == 0
    assert list(_rows(out)) == ["tiny_residual"]


def test_a_page_grows_with_its_runs(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0])
    assert _run(runs, out) == 0
    shutil.rmtree(runs / "tiny_residual")
    write_loss(runs, "residual", 0, [5.0, 4.0, 3.0, 2.0], tokens_per_second=1.0)  # the same bits at another speed
    write_loss(runs, "dar_full", 0, [5.0, 4.0, 3.0, 1.9])
    assert _run(runs, out) == 0
    assert list(_rows(out)) == ["tiny_residual", "tiny_dar_full"]
