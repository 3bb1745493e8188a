"""Links to files and folders are followed, loops of links end, and what is left out is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from darlit.__main__ import main
from darlit.data.errors import DataError
from darlit.data.sources import find_sources


def write(folder: Path, names: range) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in names:
        (folder / f"{number:02}.txt").write_text(f"text {number} " * 40)


def names(*specs: object) -> tuple[list[str], list[str]]:
    notes: list[str] = []
    sources, _ = find_sources([str(spec) for spec in specs], notes)
    return [source.url for source in sources], notes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """50 files, and 10 links to files elsewhere."""
    write(tmp_path / "corpus", range(50))
    write(tmp_path / "elsewhere", range(50, 60))
    for path in (tmp_path / "elsewhere").iterdir():
        (tmp_path / "corpus" / path.name).symlink_to(path)
    return tmp_path / "corpus"


def test_links_to_files_are_taken(corpus: Path) -> None:
    for spec in (corpus, f"{corpus}/*.txt", f"{corpus.parent}/corp*/*", f"{corpus}/**", f"file://{corpus}"):
        found, notes = names(spec)
        assert found == [f"{corpus}/{number:02}.txt" for number in range(60)]
        assert notes == []


def test_the_size_of_a_link_is_that_of_its_file(corpus: Path) -> None:
    sources, _ = find_sources([str(corpus)])
    assert {source.size for source in sources} == {len("text 10 " * 40), len("text 1 " * 40)}


@pytest.mark.parametrize("pattern", ["", "/**/*.txt", "/**"])
def test_linked_folders_are_taken(corpus: Path, pattern: str) -> None:
    write(corpus.parent / "more" / "inner", range(60, 70))
    (corpus / "linked").symlink_to(corpus.parent / "more")
    found, notes = names(f"{corpus}{pattern}")
    assert len(found) == 70
    assert f"{corpus}/linked/inner/69.txt" in found
    assert notes == []
    assert len(names(f"{corpus}/link*/*/*.txt")[0]) == 10
    (corpus.parent / "alias").symlink_to(corpus)
    assert len(names(f"{corpus.parent}/alias{pattern}")[0]) == 70


def test_loops_of_links_end_and_are_said(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To itself, to a folder above, and two folders to each other."""
    (corpus / "self").symlink_to(corpus)
    (corpus / "up").symlink_to("..")
    write(corpus / "a", range(60, 65))
    write(corpus / "b", range(65, 70))
    (corpus / "a" / "to_b").symlink_to(corpus / "b")
    (corpus / "b" / "to_a").symlink_to(corpus / "a")
    for spec in (str(corpus), f"{corpus}/**/*.txt"):
        found, notes = names(spec)
        assert len(found) == 70
        assert all("to_" not in url for url in found)
        assert f"{corpus}/self is a link to a folder that it is in: not followed" in notes
        assert f"{corpus}/up is a link to a folder that it is in: not followed" in notes
    assert main(["prepare", str(corpus), "--out", str(corpus.parent / "out"), "--val-fraction", "0.3"]) == 0
    captured = capsys.readouterr()
    assert f"{corpus}/self is a link to a folder that it is in: not followed" in captured.err
    assert sum(int(line.split()[1]) for line in captured.out.splitlines() if "documents" in line) == 70


def test_a_file_of_two_names_is_taken_once_and_said(corpus: Path) -> None:
    """Under its own name where that is among them."""
    (corpus / "00_again.txt").symlink_to(corpus / "07.txt")
    (corpus / "60.txt").symlink_to(corpus.parent / "elsewhere" / "55.txt")
    found, notes = names(corpus)
    assert found == [f"{corpus}/{number:02}.txt" for number in range(60)]
    assert notes == [
        f"{corpus}/00_again.txt is {corpus}/07.txt under another name: taken once",
        f"{corpus}/60.txt is {corpus}/55.txt under another name: taken once",
    ]


def test_a_link_to_nothing(corpus: Path) -> None:
    (corpus / "gone.txt").symlink_to("nowhere.txt")
    for spec in (corpus, f"{corpus}/*.txt", corpus / "gone.txt"):
        with pytest.raises(DataError, match=rf"{corpus}/gone\.txt: a link to nowhere\.txt, which does not exist"):
            names(spec)
    (corpus / "gone.txt").rename(corpus / "gone.png")  # of another ending: nothing that a folder gives
    assert len(names(corpus)[0]) == 60


def test_a_pipe_is_not_a_file(corpus: Path) -> None:
    os.mkfifo(corpus / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt: a pipe or a device, not a file"):
        names(f"{corpus}/*.txt")


def test_files_of_other_endings_are_said(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "picture.png").write_bytes(b"x")
    assert main(["prepare", str(corpus), "--out", str(corpus.parent / "out"), "--val-fraction", "0.3"]) == 0
    assert "left out for their endings: 1;" in capsys.readouterr().err


def test_hidden_folders_are_left_alone(corpus: Path) -> None:
    write(corpus / ".git", range(3))
    (corpus / ".git" / "gone.txt").symlink_to("nowhere")
    assert len(names(corpus)[0]) == 60
