"""Every block of README, CONTRIBUTING and docs works as it stands.

Fast: every command is parsed by its verb's own parser, up to where it would begin to work. Slow: every block is typed
into a copy of the repository, page by page in order; DARLIT_MAX_STEPS shortens training runs, and PYTEST_ADDOPTS lets
test suites only collect their tests.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.__main__ import VERBS
from darlit.__main__ import main as darlit
from darlit.cli import DarlitCLI
from darlit.experiment import load_experiment
from pages import PAGES, ROOT, Block, Reader, blocks

ALL = {page: blocks(page) for page in PAGES}
NOT_RUN = {
    "README.md": ["needs GPUs"],
    "docs/experiments.md": ["needs the network and a corpus of yours", "needs GPUs", "needs Slurm", "needs Slurm"],
    "docs/experts.md": ["installs packages and needs GPUs"],
    "docs/performance.md": ["the full shapes take minutes of an idle machine; compares speeds; needs a GPU"],
    "docs/sharding.md": ["needs GPUs and Slurm", "needs GPUs"],
}
"""Blocks that no test machine can type, with the reason in the page. A new one is added here on purpose."""
CONTINUES = {"CONTRIBUTING.md": "README.md"}
"""Pages whose reader has placed the files of another page before."""
SHELL_WORDS = {"make", "source", "cat", "rm", "sbatch", ".venv/bin/python"}
COMMANDS = [
    pytest.param(words[1:], id=f"{block}-{' '.join(words[1:3])}")
    for page in PAGES
    for block in ALL[page]
    for words in block.commands
    if Path(words[0]).name == "darlit"
]


class _Parsed(Exception):  # noqa: N818, it is no error
    """A command line was accepted."""


def test_every_block_says_what_it_is() -> None:
    for page, found in ALL.items():
        fences = sum(line.lstrip().startswith("```") for line in (ROOT / page).read_text().splitlines())
        assert fences == 2 * len(found), page
        for block in found:
            assert block.language in ("bash", "console", "python", "yaml", "text"), block
            assert block.file or block.language != "yaml", f"{block}: its first line is no comment with a path"
            for words in block.commands:
                assert Path(words[0]).name == "darlit" or words[0] in SHELL_WORDS, f"{block}: {words[0]}"


def test_what_is_not_run_is_listed() -> None:
    found = {page: [block.not_run for block in ALL[page] if block.not_run] for page in PAGES}
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


def test_every_make_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {words[1] for found in ALL.values() for block in found for words in block.commands if words[0] == "make"}
    assert {"demo", "test", "lint", "test-slow"} <= targets
    for target in targets:
        assert f"\n{target}: " in makefile, target


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    """Where commands are parsed: the repository's experiments, and files that earlier blocks would have made."""
    folder = tmp_path_factory.mktemp("parsed")
    for name in ("configs", "experiments"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copytree(data_folder, folder / "data" / "mine")  # a cell may take its vocabulary from its data
    for page in PAGES:
        for block in ALL[page]:
            if block.language == "yaml" and block.file and not block.file.startswith("~"):
                (folder / block.file).write_text(block.text)
    return folder


def _parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command up to where it has parsed its words; raises `_Parsed` if it accepts them, else its exit status."""
    original = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: Any, *arguments: Any, **options: Any) -> Any:
        original(self, *arguments, **options)
        raise _Parsed

    def parsed(self: Any) -> None:
        raise _Parsed

    # Every verb but those of Lightning's command line parses with argparse; that one instantiates what it has parsed.
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(DarlitCLI, "instantiate_classes", parsed)
    return darlit(words)


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_parsed(words: list[str], reader_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader_folder)
    assert words[0] in VERBS
    for word in words:
        _leave_config_of_run(Path(word))
    if words[0] in ("fit", "validate") and any("scaled" in word or "my_cell" in word for word in words):
        pytest.skip("needs the module that the block before it places; typed by the slow test")
    with pytest.raises(_Parsed):
        _parse(words, monkeypatch)


def _leave_config_of_run(path: Path) -> None:
    """``runs/CELL/seed_N/config.yaml``, made from the cell's experiment as a run would have left it."""
    experiment = Path("experiments", f"{path.parent.parent.name}.yaml")
    if path.name == "config.yaml" and experiment.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(load_experiment(experiment)))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=str(block))
        for block in ALL["docs/experiments.md"]
        if block.language == "console"
        and block.commands[0][:3] in (["darlit", "grid", "check"], ["darlit", "grid", "list"])
    ],
)
def test_what_is_printed_is_what_is_shown(
    block: Block, reader_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reader_folder)
    (words,) = block.commands
    assert darlit(words[1:]) == 0
    assert f"$ {' '.join(words)}\n{capsys.readouterr().out}" == block.text


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "experiments/tiny_residual.yaml", "--gpu_count", "2"],
        ["fit", "--config", "experiments/tiny_residual.yaml", "--budget.token", "5"],
        ["fit", "--config", "experiments/tiny_nothing.yaml"],
        ["grid", "launch", "experiments/grids/first.yaml"],
        ["trian", "--config", "experiments/tiny_residual.yaml"],
    ],
)
def test_a_wrong_command_is_found(words: list[str], reader_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader_folder)
    try:
        status: Any = _parse(words, monkeypatch)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_as_typed(page: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "reader", PYTEST_ADDOPTS="--collect-only -p no:cacheprovider")
    for block in [block for block in ALL.get(CONTINUES.get(page, ""), []) if block.file] + ALL[page]:
        if block.language != "text" and not block.not_run:
            _type(reader, block)


def _type(reader: Reader, block: Block) -> None:
    print(f"{block}\n{block.text}", flush=True)
    # Committed runs are complete ones: beside shortened cells they would be runs of something else.
    reads_committed = any(word.startswith(("results/runs", "results/screening")) for word in block.script.split())
    reader.environment["DARLIT_MAX_STEPS"] = "" if reads_committed else "2"
    reader.type(block)
