"""The pages that readers type from, as blocks; and a reader who types them into a fresh copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n)?(?P<indent>[ ]*)```(?P<language>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_PATH = re.compile(r"# (?P<path>[\w~./-]+\.(?:py|yaml))$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    """bash, console (typed lines begin with ``$ ``), python, yaml, or text, which nobody types."""
    text: str
    not_run: str | None
    """Why a test machine cannot type it."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The path in the block's first comment, where it is the content of a file."""
        found = _PATH.match(self.text.split("\n", 1)[0]) if self.language in ("python", "yaml") else None
        return found and found["path"]

    @property
    def script(self) -> str:
        """What a reader types into a shell; empty for a block of another kind."""
        if self.language == "console":
            return "".join(f"{line[2:]}\n" for line in self.text.splitlines() if line.startswith("$ "))
        return self.text if self.language == "bash" else ""

    @property
    def commands(self) -> list[list[str]]:
        """The words of every line of the script, comments left out."""
        lines = self.script.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page, in order; those inside list items without their indentation."""
    content = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page,
            content.count("\n", 0, found.start("language")) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
            found["reason"],
        )
        for found in _FENCE.finditer(content)
    ]


class Reader:
    """Types blocks into a copy of the repository's tracked files, made as a new clone would be.

    Args:
        folder: does not exist yet; the copy is made in it, and the reader's home.
        environment: variables on top of this process's.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.clone, home = folder / "darlit", folder / "home"
        home.mkdir(parents=True)
        for file in _tracked():
            (self.clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.clone / file)
        self._lend_venv()
        self.here = self.clone
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{self.clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.clone / "src"),  # the environment's darlit is installed from elsewhere
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        for variable in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "RUNS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
            self.environment.pop(variable, None)

    def type(self, block: Block) -> None:
        """Place the block's file, or run it; fails with all that it printed."""
        if block.file is not None:
            path = Path(block.file.replace("~", self.environment["HOME"], 1))
            (self.here / path).parent.mkdir(parents=True, exist_ok=True)
            (self.here / path).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._run(block, [sys.executable, "-c", block.text])
        else:
            where = self.clone.parent / "where"
            self._run(block, ["bash", "-e", "-c", f"{block.script}\npwd > {shlex.quote(str(where))}"])
            self.here = Path(where.read_text().rstrip("\n"))

    def _run(self, block: Block, command: list[str]) -> None:
        result = subprocess.run(
            command, cwd=self.here, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=900, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{block} ended with status {result.returncode}:\n{result.stdout[-6000:]}"
        assert "Traceback (most recent call last)" not in result.stdout, f"{block}:\n{result.stdout[-6000:]}"

    def _lend_venv(self) -> None:
        """This process's environment as the clone's .venv, installed already: `make` has nothing to download."""
        venv = self.clone / ".venv"
        venv.mkdir()
        for part in Path(sys.prefix).iterdir():
            if not part.name.startswith("."):
                (venv / part.name).symlink_to(part)
        (venv / ".installed").touch()
        for source in ("pyproject.toml", "constraints.txt"):
            os.utime(self.clone / source, (0, 0))


def _tracked() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            yield Path(name)
