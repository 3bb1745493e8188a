"""Submit a grid as one Slurm array: options, the sbatch script from its template, and what waits in the queue.

A submission is a folder, ``<runs_dir>/.submissions/<grid>-<n>/``: the grid and its experiments as they were checked,
so that later edits change nothing, the script, Slurm's own output and the job's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from darlit.atomic import write_text
from darlit.errors import DarlitError, nearest
from darlit.experiment import load_experiment
from darlit.grid.cells import Grid, read_grid
from darlit.values import dump

_TEMPLATES = Path(__file__).parents[3] / "slurm"


class SlurmError(DarlitError):
    """An option that cannot go into a script, or a command of Slurm that failed."""


@dataclass(frozen=True)
class ClusterOptions:
    """What a cluster needs to know; ``None`` leaves it to the template or to Slurm.

    Args:
        partition, account, qos, constraint: as for sbatch.
        time: limit of one attempt; a task that needs more requeues itself and goes on.
        gpus: GPUs a node; 0 trains on the CPU. One process a GPU.
        nodes: nodes a task.
        cpus: CPU cores a process.
        memory: memory a node, such as 64G.
        throttle: how many tasks may run at a time.
        setup: shell file that every task sources first (modules, environment).
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    memory: str | None = None
    throttle: int | None = None
    setup: str | None = None

    def __post_init__(self) -> None:
        for option, pattern, example in (
            ("partition", r"[\w.,-]+", "gpu or gpu,long"),
            ("account", r"[\w.-]+", "lab1"),
            ("qos", r"[\w.-]+", "normal"),
            ("constraint", r"[\w.&|*-]+", "h100"),
            ("time", r"(\d+-)?\d+(:\d+){0,2}", "24:00:00 or 2-00"),
            ("memory", r"\d+[KMGT]?", "64G"),
        ):
            value = getattr(self, option)
            if value is not None and not (isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)):
                raise SlurmError(f"{option} {value!r} is not allowed; write it like {example}")
        for option, least in (("gpus", 0), ("nodes", 1), ("cpus", 1), ("throttle", 1)):
            value = getattr(self, option)
            if value is not None and (type(value) is not int or value < least):
                raise SlurmError(f"{option} {value!r} is not allowed; give a whole number from {least}")

    @classmethod
    def read(cls, path: Path) -> ClusterOptions:
        """Read a YAML file of defaults.

        Raises:
            DarlitError: a missing or malformed file, or a key that is no option.
        """
        content = load_experiment(path)
        known = [field.name for field in fields(cls)]
        for key in content:
            if key not in known:
                raise SlurmError(f"{path}: unknown key {key!r}; {nearest(str(key), known)}")
        try:
            return cls(**content)
        except SlurmError as error:
            raise SlurmError(f"{path}: {error}") from error

    def over(self, defaults: ClusterOptions) -> ClusterOptions:
        """Return these options where they are given and the defaults elsewhere."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(defaults, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Submission:
    """What will be submitted: the folder it is kept in, the script, and the command."""

    folder: Path
    script: str
    command: tuple[str, ...]
    indices: tuple[int, ...]


def user_file() -> Path:
    """Where a user keeps a cluster's defaults."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    with contextlib.suppress(RuntimeError):  # no home folder: then there is no such file either
        base = base.expanduser()
    return base / "darlit" / "cluster.yaml"


def prepare(grid: Grid, runs_dir: Path, indices: Sequence[int], options: ClusterOptions) -> Submission:
    """Return the submission of some tasks of a grid; writes nothing.

    Raises:
        SlurmError: a path that cannot go into a script, or no template to write one from.
    """
    runs_dir = runs_dir.resolve()
    submissions = runs_dir / ".submissions"
    number = 1
    while (submissions / f"{grid.name}-{number}").exists():
        number += 1
    folder = submissions / f"{grid.name}-{number}"
    template = _TEMPLATES / ("multinode.sbatch" if (options.nodes or 1) > 1 else "array.sbatch")
    if not template.is_file():
        raise SlurmError(f"no template {template}; install darlit from a clone with 'pip install -e .'")

    throttle = f"%{options.throttle}" if options.throttle else ""
    directives: dict[str, str | None] = {
        "job-name": grid.name,
        "array": _ranges(indices) + throttle,
        "output": _output_pattern(folder),
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "time": options.time,
        "nodes": _text(options.nodes),
        "gpus-per-node": _text(options.gpus),
        "ntasks-per-node": None if options.gpus is None else str(max(1, options.gpus)),
        "cpus-per-task": _text(options.cpus),
        "mem": options.memory,
    }
    settings = {
        "python": sys.executable,
        "grid": str(folder / f"{grid.name}.yaml"),
        "runs_dir": str(runs_dir),
        "setup": str(Path(options.setup).resolve()) if options.setup else "",
    }
    script = _render(template.read_text(encoding="utf-8"), directives, settings)
    return Submission(folder, script, ("sbatch", "--parsable", str(folder / "array.sbatch")), tuple(indices))


def submit(submission: Submission, grid: Grid) -> str:
    """Write the submission's folder, hand the script to sbatch, and return the job's number.

    Raises:
        SlurmError: Slurm is not installed here, or refuses; nothing is left behind then.
    """
    folder = submission.folder
    try:
        _freeze(grid, folder)
        write_text(folder / "array.sbatch", submission.script)
        job = _slurm(submission.command).split(";")[0].strip()
        write_text(folder / "job.json", json.dumps({"job": job, "grid": f"{grid.name}.yaml"}) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return job


def queued_tasks(runs_dir: Path) -> dict[tuple[str, int], str]:
    """By cell and seed, what squeue says of the tasks that submissions of this folder have waiting or running."""
    jobs = {}
    for file in sorted((runs_dir / ".submissions").glob("*/job.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        jobs[content["job"]] = file.parent / content["grid"]
    if not jobs or shutil.which("squeue") is None:
        return {}
    listing = _slurm(["squeue", "--me", "--noheader", "--array", "--format=%A|%K|%F|%T|%r"])
    queued: dict[tuple[str, int], str] = {}
    for line in listing.splitlines():
        _, index, array, state, reason = line.strip().split("|")
        if array in jobs and index.isdigit():
            task = read_grid(jobs[array]).tasks[int(index)]
            queued[task.cell.name, task.seed] = f"{state.lower()} in Slurm ({reason}), job {array}_{index}"
    return queued


def _freeze(grid: Grid, folder: Path) -> None:
    """Write the grid with one group a cell, and its experiments without bases: numbered as the grid itself."""
    groups = {cell.name: {"cells": [cell.name], "seeds": list(cell.seeds)} for cell in grid.cells}
    write_text(folder / f"{grid.name}.yaml", dump({"groups": groups}))
    for cell in grid.cells:
        if cell.name == grid.name:
            raise SlurmError(f"{grid.file}: grid and cell are both named '{grid.name}'; rename the grid file")
        write_text(folder / f"{cell.name}.yaml", dump(dict(cell.config)))


def _render(template: str, directives: Mapping[str, str | None], settings: Mapping[str, str]) -> str:
    """Put values into a template: ``#SBATCH --key=`` lines and the ``name=`` lines of its settings.

    A directive's ``None`` keeps the template's line; a GPU count of 0 removes it.
    """
    given = {key: value for key, value in directives.items() if value is not None}
    lines = []
    for line in template.splitlines():
        directive = re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?(.*)", line)
        setting = re.match(r"([a-z_]+)=", line)
        if directive and directive[1] in given:
            continue
        if line.startswith("# --- settings"):
            lines += [
                f"#SBATCH --{key}={value}" for key, value in given.items() if (key, value) != ("gpus-per-node", "0")
            ]
            lines.append("")
        if setting and setting[1] in settings:
            line = f"{setting[1]}={shlex.quote(settings[setting[1]])}"
            _refuse_control(settings[setting[1]])
        lines.append(line)
    return "\n".join(lines) + "\n"


def _output_pattern(folder: Path) -> str:
    """Slurm's output file as a directive: quoted for sbatch's own parser, with its % patterns escaped."""
    _refuse_control(str(folder))
    if '"' in str(folder) or "\\" in str(folder):
        raise SlurmError(
            f"path {str(folder)!r} holds a quote or a backslash, which sbatch mangles; choose another folder"
        )
    return '"' + str(folder).replace("%", "%%") + '/%a.out"'


def _refuse_control(text: str) -> None:
    if not text.isprintable():
        raise SlurmError(f"path {text!r} holds a line break or a control character; choose another folder")


def _ranges(indices: Sequence[int]) -> str:
    """Return sorted indices as sbatch writes them: 0-3,7."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def _slurm(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not installed here; submit from a login node, or use 'darlit grid run'"
        ) from None
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise SlurmError(f"{command[0]} refused: {reason}")
    return result.stdout
