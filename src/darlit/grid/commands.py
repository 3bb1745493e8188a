"""``darlit grid check|list|plan|submit|run|status|collect|choose GRID``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from darlit.arguments import Parser
from darlit.errors import DarlitError
from darlit.experiment import shortening
from darlit.grid import choices, local, plan, slurm
from darlit.grid.cells import Grid, Task, read_grid
from darlit.grid.collect import collect, kept_summary
from darlit.grid.equal_budget import check_grid
from darlit.grid.status import status_table
from darlit.grid.unchanged import check_file, check_folders
from darlit.grid.worker import Stopper, work
from darlit.markers import replace_between
from darlit.run import DONE, FAILED, INTERRUPTED, WORKER_LOCK, holder


def main(argv: list[str]) -> int:
    """Run the verb and return its exit status; bad input raises a one-line :class:`DarlitError`."""
    ours, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = _parser()
    arguments = parser.parse_args(ours)
    if options and arguments.verb != "run":
        parser.error("only 'run' takes options of darlit fit after --")
    arguments.options = options
    if arguments.verb in ("submit", "run") and (line := shortening()):
        print(line, flush=True)
    return arguments.run(read_grid(arguments.grid, arguments.only), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="darlit grid", description="Cells x seeds under one budget.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, run, line in (
        ("check", _check, "refuse a grid whose cells do not share one budget"),
        ("list", _list, "one run a line, numbered as a Slurm array selects them"),
        ("plan", _plan, "what each cell and the whole grid will cost"),
        ("submit", _submit, "send what is not done to Slurm as one array"),
        ("run", _run, "work what is not done on this machine"),
        ("status", _status, "how far each run is"),
        ("collect", _collect, "copy the summaries of finished runs, to be kept with the sources"),
        ("choose", _choose, "each cell against the first of its group, paired over seeds"),
    ):
        verb = verbs.add_parser(name, help=line, description=line)
        verb.set_defaults(run=run)
        verb.add_argument("grid", type=Path, metavar="GRID", help="a grid file, such as experiments/grids/tiny.yaml")
        verb.add_argument(
            "--only", type=_names, default=(), metavar="CELL,...", help="these of its cells, or patterns: 'dense1b_*'"
        )
        if name in ("submit", "run", "status", "collect", "choose"):
            verb.add_argument(
                "--runs_dir", type=Path, default=Path("runs"), help="where run folders lie (default: runs)"
            )
        _OPTIONS.get(name, lambda verb: None)(verb)
    return parser


def _submit_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    verb.add_argument("--throttle", type=int, help="tasks that may run at a time")
    verb.add_argument("--time", help="limit of one attempt, such as 24:00:00")
    for option in ("partition", "account", "qos", "constraint"):
        verb.add_argument(f"--{option}", help="as for sbatch")
    verb.add_argument("--gpus", type=int, help="GPUs a node, one process each; 0 trains on the CPU")
    verb.add_argument("--nodes", type=int, help="nodes a task; above 1 the multi-node template is used")
    verb.add_argument("--cpus", type=int, help="CPU cores a process")
    verb.add_argument("--memory", help="memory a node, such as 64G")
    verb.add_argument("--setup", help="shell file that every task sources first")
    verb.add_argument("--cluster", type=Path, help=f"YAML file with defaults of these options (default: {_USER_FILE})")


def _run_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--processes", type=int, default=1, help="runs at a time (default: 1)")
    verb.add_argument("--threads", type=int, help="computing threads of each (default: cores / processes)")
    verb.add_argument("--gpus", type=int, default=0, help="divide the processes among the first N visible GPUs")
    verb.add_argument("--kept", type=Path, metavar="FOLDER", help="collected summaries, whose runs are done too")
    verb.add_argument("--index", type=int, help="work this one run, as a Slurm array task does")
    verb.epilog = "What follows -- goes to darlit fit, the same for all runs: ... -- --trainer.accelerator=gpu"


def _status_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--watch", type=float, metavar="SECONDS", help="refresh until nothing runs or waits any more")


def _collect_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--out", type=Path, help="where to (default: results/runs in the folder of runs)")
    verb.add_argument("--replace", action="store_true", help="also where another run of the cell and seed is kept")


def _choose_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--into", type=Path, metavar="FILE", help="write the tables between their markers in this file")
    verb.add_argument(
        "--partial", action="store_true", help="also runs that were validated last before their last step; marks them"
    )


def _names(text: str) -> list[str]:
    return text.split(",")


_USER_FILE = "~/.config/darlit/cluster.yaml"
_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "plan": plan.add_options,
    "submit": _submit_options,
    "run": _run_options,
    "status": _status_options,
    "collect": _collect_options,
    "choose": _choose_options,
}


def _check(grid: Grid, _: argparse.Namespace) -> int:
    for size, cells in check_grid(grid).items():
        seeds = ", ".join(map(str, cells[0].seeds))
        print(f"size {size}: {len(cells)} cells share one budget; seeds {seeds}")
    return 0


def _list(grid: Grid, _: argparse.Namespace) -> int:
    for task in grid.tasks:
        print(f"{task.index}\t{task.cell.name}\t{task.seed}\t{task.cell.source}")
    return 0


def _plan(grid: Grid, arguments: argparse.Namespace) -> int:
    check_grid(grid)
    return plan.run(grid.cells, arguments)


def _submit(grid: Grid, arguments: argparse.Namespace) -> int:
    check_grid(grid)
    given = slurm.ClusterOptions(
        **{name: getattr(arguments, name) for name in slurm.ClusterOptions.__dataclass_fields__}
    )
    options = given.over(_cluster_defaults(arguments.cluster))
    check_folders(grid.tasks, arguments.runs_dir)
    queued = {} if arguments.dry_run else slurm.queued_tasks(arguments.runs_dir)
    left = [task for task in grid.tasks if not _taken(task, arguments.runs_dir, queued)]
    if not left:
        print(f"nothing to submit: all {len(grid.tasks)} runs of {grid.name} are done, running or waiting")
        return 0
    submission = slurm.prepare(grid, arguments.runs_dir, [task.index for task in left], options)
    if arguments.dry_run:
        print(submission.script, end="")
        return 0
    job = slurm.submit(submission, grid)
    print(f"job {job}: {len(left)} of {len(grid.tasks)} runs; Slurm's output: {submission.folder}")
    print(f"follow it with: darlit grid status {arguments.grid} --runs_dir {arguments.runs_dir}")
    return 0


def _run(grid: Grid, arguments: argparse.Namespace) -> int:
    for option in ("processes", "threads"):
        if getattr(arguments, option) is not None and getattr(arguments, option) < 1:
            raise DarlitError(f"--{option} {getattr(arguments, option)} is not allowed; give a whole number from 1")
    if arguments.index is not None:
        return _run_one(grid, arguments)
    check_grid(grid)
    check_folders(grid.tasks, arguments.runs_dir, arguments.options)
    left = [
        task for task in grid.tasks if not task.folder(arguments.runs_dir).is_done and not _is_kept(task, arguments)
    ]
    left.sort(key=lambda task: task.cell.seeds.index(task.seed))  # seed by seed: a part of a grid is balanced
    print(f"{grid.name}: {len(grid.tasks) - len(left)} of {len(grid.tasks)} runs are done", flush=True)
    slots = local.make_slots(min(arguments.processes, max(1, len(left))), arguments.threads, arguments.gpus)

    def report(outcome: local.Outcome) -> None:
        print(f"{_name(outcome.task)}: {_ENDS[outcome.status]} after {outcome.seconds:.0f} s", flush=True)

    outcomes = local.run_tasks(left, arguments.runs_dir, slots, arguments.options, report)
    statuses = [outcome.status for outcome in outcomes]
    if FAILED in statuses:
        print(f"failed runs say why in log.txt; see: darlit grid status {arguments.grid}", file=sys.stderr)
        return 1
    return INTERRUPTED if INTERRUPTED in statuses else 0


def _run_one(grid: Grid, arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.index < len(grid.tasks):
        raise DarlitError(f"--index {arguments.index} is not in {grid.file}; it has runs 0 to {len(grid.tasks) - 1}")
    task = grid.tasks[arguments.index]
    check_folders([task], arguments.runs_dir, arguments.options)
    # Without --gpus the run has what Slurm, or its shell, lets it see.
    gpu = local.make_slots(1, arguments.threads, arguments.gpus)[0].gpu
    stopper = Stopper()
    stopper.install()
    print(f"{_name(task)}: {task.folder(arguments.runs_dir).path}", flush=True)
    status = work(
        task, arguments.runs_dir, stopper, arguments.options, {"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else None
    )
    print(f"{_name(task)}: {_ENDS[status]}", flush=True)
    return status


def _status(grid: Grid, arguments: argparse.Namespace) -> int:
    console = _console()
    table, counts = status_table(grid, arguments.runs_dir, slurm.queued_tasks(arguments.runs_dir))
    if arguments.watch is None:
        console.print(table)
        return 0
    with Live(table, console=console, auto_refresh=False) as live:
        while counts["running"] or counts["queued"]:
            time.sleep(arguments.watch)
            table, counts = status_table(grid, arguments.runs_dir, slurm.queued_tasks(arguments.runs_dir))
            live.update(table, refresh=True)
    return 0


def _collect(grid: Grid, arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.runs_dir / "results" / "runs"
    copied, kept = collect(grid, arguments.runs_dir, out, arguments.replace)
    print(f"{grid.name}: {kept + len(copied)} of {len(grid.tasks)} runs in {out}, {len(copied)} of them new")
    return 0


def _choose(grid: Grid, arguments: argparse.Namespace) -> int:
    tables = choices.markdown(choices.compare(grid, arguments.runs_dir, arguments.partial))
    if arguments.into is None:
        print(tables, end="")
    else:
        replace_between(arguments.into, f"darlit grid choose {grid.name}", f"\n{tables}")
        print(f"written: {arguments.into}")
    return 0


_ENDS = {
    DONE: "done",
    INTERRUPTED: "stopped, to be continued",
    FAILED: "failed",
    None: "left alone, another process works it",
}


def _name(task: Task) -> str:
    return f"{task.cell.name} seed {task.seed}"


def _taken(task: Task, runs_dir: Path, queued: dict[tuple[str, int], str]) -> bool:
    folder = task.folder(runs_dir)
    writer = holder(folder) or holder(folder, WORKER_LOCK)
    return folder.is_done or (task.cell.name, task.seed) in queued or writer is not None


def _is_kept(task: Task, arguments: argparse.Namespace) -> bool:
    """Whether a summary of the run was collected; one of another experiment raises DarlitError."""
    if arguments.kept is None or not kept_summary(task, arguments.kept).is_file():
        return False
    check_file(task.cell, task.seed, kept_summary(task, arguments.kept), arguments.options)
    return True


def _cluster_defaults(file: Path | None) -> slurm.ClusterOptions:
    if file is not None:
        return slurm.ClusterOptions.read(file)
    default = slurm.user_file()
    return slurm.ClusterOptions.read(default) if default.is_file() else slurm.ClusterOptions()


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=140)
