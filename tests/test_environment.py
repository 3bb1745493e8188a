"""Where a run finds itself: encodings, no home folder, blanks in paths, full disks and folders that are read-only."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cells import run_folder, write_cell
from darlit.__main__ import main
from darlit.atomic import partial_file, write_text
from darlit.cache_folder import cache_folder
from darlit.checkpoint_io import AtomicCheckpointIO
from darlit.errors import DarlitError
from darlit.ops import cpu_build
from darlit.run.status import FAILED_ON_DISK

ENCODINGS: dict[str, dict[str, str]] = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


def darlit(*arguments: str, **variables: str | None) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process with some variables set, or removed where None."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    return subprocess.run([sys.executable, "-m", "darlit", *arguments], capture_output=True, env=environment)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tables_are_written_and_printed_whatever_the_terminal_can_show(tmp_path: Path, encoding: str) -> None:
    from grid.fakes import make_summary, write_run

    for arm in ("residual", "dar_full"):
        for seed in (0, 1):
            write_run(tmp_path / "runs", make_summary("tiny", arm, seed))
    options = ("--out", str(tmp_path / "out"), "--figures", "none")
    result = darlit("results", str(tmp_path / "runs"), *options, **ENCODINGS[encoding])
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert "Δ" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_text_that_the_terminal_cannot_show_is_replaced(dar_run: Path, encoding: str) -> None:
    arguments = ("generate", str(dar_run), "--prompt", "Δx → é", "--tokens", "5")
    result = darlit(*arguments, **ENCODINGS[encoding])
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert b"?x" in result.stdout or b"?" in result.stdout


def test_choices_are_written_in_any_encoding(tmp_path: Path) -> None:
    from grid.fakes import make_summary, write_cell_file, write_run

    for arm in ("residual", "dar_full"):
        class_path = "ResidualLM" if arm == "residual" else "DualAttentionResidualLM"
        write_cell_file(tmp_path, f"tiny_{arm}", class_path)
        for seed in (0, 1):
            write_run(tmp_path / "runs", make_summary("tiny", arm, seed))
    grid = tmp_path / "grid.yaml"
    grid.write_text("groups: {tiny: {cells: [tiny_residual, tiny_dar_full], seeds: [0, 1], varies: [x]}}\n")
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: darlit grid choose grid -->\n<!-- end: darlit grid choose grid -->\n")
    arguments = ("grid", "choose", str(grid), "--runs_dir", str(tmp_path / "runs"))
    for into in ((), ("--into", str(page))):
        result = darlit(*arguments, *into, **ENCODINGS["C"])
        assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert "Δ" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"DARLIT_CACHE": "~/x"}, "HOME/x"),
        ({"DARLIT_CACHE": ""}, "HOME/.cache/darlit"),
        ({"DARLIT_CACHE": "  "}, "HOME/.cache/darlit"),
        ({"XDG_CACHE_HOME": "HOME/other"}, "HOME/other/darlit"),
        ({"XDG_CACHE_HOME": ""}, "HOME/.cache/darlit"),
    ],
)
def test_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    home = str(tmp_path)
    monkeypatch.setenv("HOME", home)
    for name in ("DARLIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("HOME", home))
    assert cache_folder() == Path(folder.replace("HOME", home))


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user that the system does not know, as in many containers."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("DARLIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_kernels_say_so_and_data_still_trains(tmp_path: Path, data_folder: Path) -> None:
    from darlit.grid.slurm import user_file

    with pytest.raises(DarlitError, match="no home folder for ~/.cache/darlit; set DARLIT_CACHE"):
        cache_folder()
    with pytest.warns(UserWarning, match="no home folder .* set DARLIT_CACHE"):
        assert cpu_build.library.__wrapped__() is None
    assert not user_file().is_file()
    assert main(["fit", "--config", str(write_cell(tmp_path, data_folder, budget__tokens=256))]) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize("named", ["{path}", "'{path}' -DNDEBUG", "env '{path}'"], ids=["path", "flag", "launcher"])
def test_a_compiler_with_a_blank_in_its_path_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    compiler = tmp_path / "my tools" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", named.format(path=compiler))
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path / "my cache, mine"))
    monkeypatch.setattr(cpu_build, "SOURCES", cpu_build.SOURCES[:1])
    monkeypatch.setattr(cpu_build, "FLAGS", ("-std=c++17", "-O0", "-fPIC", "-shared"))
    built = cpu_build._build()
    assert built.is_file()
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_a_library_of_openmp_is_found_with_blanks_in_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 11 /opt/my env/libgomp-a1.so.1\n7f02-7f03 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr(cpu_build, "MAPS", maps)
    assert cpu_build._openmp() == Path("/opt/my env/libgomp-a1.so.1")


@pytest.mark.parametrize("compiler", ["nowhere/g++", "'unbalanced", " "])
def test_a_compiler_that_is_not_there_is_one_warning(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="is not a program") as caught:
        assert cpu_build.library.__wrapped__() is None
    assert "\n" not in str(caught[0].message)


def _limit_file_size() -> None:
    """Writes beyond 100 kB fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk_is_one_line_and_leaves_no_partial_file(tmp_path: Path, data_folder: Path) -> None:
    cell = write_cell(tmp_path, data_folder)
    command = [sys.executable, "-W", "ignore", "-m", "darlit", "fit", "--config", str(cell)]
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=_limit_file_size)
    checkpoints = run_folder(cell) / "checkpoints"
    assert result.returncode == FAILED_ON_DISK
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("darlit: error:")]
    assert str(checkpoints / "best.ckpt") in line
    assert "make room there" in line
    assert list(checkpoints.iterdir()) == []


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(3)}, path)
    before = path.read_bytes()

    def full(checkpoint: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(3)}, path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["write", "sync", "rename"])
def test_a_file_is_complete_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "table.md"
    write_text(path, "before")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*{"write": (Path, "write_text"), "sync": (os, "fsync"), "rename": (Path, "replace")}[step], full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_text(path, "after")
    assert caught.value.filename == str(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_another_error_inside_leaves_nothing_and_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), partial_file(tmp_path / "a" / "b.txt") as partial:
        partial.write_text(str(1 / 0))
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("verb", ["fit", "results", "prepare"])
def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """A file where a folder should be: as good as a read-only folder, also for the administrator who runs this."""
    from grid.fakes import make_summary, write_run

    blocked = tmp_path / "blocked"
    blocked.write_text("")
    write_run(tmp_path / "runs", make_summary("tiny", "residual", 0))
    cell = write_cell(tmp_path, data_folder)
    arguments = {
        "fit": ["--config", str(cell), "--runs_dir", str(blocked)],
        "results": [str(tmp_path / "runs"), "--out", str(blocked / "out"), "--figures", "none"],
        "prepare": [str(cell), "--out", str(blocked / "corpus")],
    }
    assert main([verb, *arguments[verb]]) in (2, FAILED_ON_DISK)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("darlit: error:")]
    assert str(blocked) in line


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: list[str]) -> int:
        raise KeyError("bug")

    monkeypatch.setattr("darlit.grid.plan.main", broken)
    with pytest.raises(KeyError, match="bug"):
        main(["plan", "x.yaml"])
