"""The results table in four forms: terminal, Markdown, LaTeX and CSV, from the same columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from darlit.data import LOSSY
from darlit.grid.comparison import Comparison, Row
from darlit.grid.statistics import Interval


@dataclass(frozen=True)
class Column:
    """A heading and how a row fills it; ``brief`` columns are the ones the terminal shows."""

    heading: str
    text: Callable[[Row], str]
    brief: bool = False


def markdown(comparison: Comparison, brief: bool = False) -> str:
    """Return the table of one size as GitHub Markdown, with its notes; ``brief`` has the terminal's columns."""
    columns = [column for column in COLUMNS if column.brief or not brief]
    lines = [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "|" + "|".join("---" if column.heading in _LEFT else "--:" for column in columns) + "|",
    ]
    for row in comparison.rows:
        lines.append("| " + " | ".join(column.text(row).replace("|", "\\|") for column in columns) + " |")
    found = notes(comparison)
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in found)


def latex(comparisons: Sequence[Comparison]) -> str:
    """Return one ``tabular`` for all sizes; it needs the package ``booktabs``."""
    lines = [
        "% written by: darlit results",
        "\\begin{tabular}{" + "".join("l" if column.heading in _LEFT else "r" for column in COLUMNS) + "}",
        "\\toprule",
        " & ".join(_escape(column.heading) for column in COLUMNS) + " \\\\",
    ]
    for comparison in comparisons:
        lines += ["\\midrule", f"\\multicolumn{{{len(COLUMNS)}}}{{l}}{{{_escape(comparison.size)}}} \\\\"]
        lines += [" & ".join(_escape(column.text(row)) for column in COLUMNS) + " \\\\" for row in comparison.rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def comma_separated(comparisons: Iterable[Comparison]) -> str:
    """Return every number of every row at full precision; an empty field is a number that cannot be known."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_CSV)
    for comparison in comparisons:
        for row in comparison.rows:
            writer.writerow([_csv_text(value(row)) for value in _CSV.values()])
    return buffer.getvalue()


def show(comparison: Comparison, console: Console) -> None:
    """Print the table of one size, narrowed to the columns that fit a terminal."""
    table = Table(title=f"size {comparison.size}", title_justify="left", title_style="bold")
    columns = [column for column in COLUMNS if column.brief]
    for column in columns:
        table.add_column(column.heading, justify="left" if column.heading in _LEFT else "right")
    for row in comparison.rows:
        table.add_row(*(column.text(row) for column in columns))
    console.print(table)
    for note in notes(comparison):
        console.print(note, style="dim", highlight=False)


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader of this size's table must know, in the order of importance."""
    found = []
    if comparison.baseline is None:
        found.append("No finished residual run at this size: nothing to compare with, those columns stay empty.")
    for row in comparison.rows:
        if row.missing:
            found.append(
                f"{row.cell}: {_plural(row.missing)} missing; its row holds {len(row.seeds)} of the seeds asked."
            )
    if any(run.summary["clock"] == "process" for runs in comparison.runs.values() for run in runs):
        found.append(
            "Times are the CPU time of a process with one thread (`throughput.clock: process`), not wall time: "
            "other work ran on the machine."
        )
    names = {run.summary["data"]["tokenizer"] for runs in comparison.runs.values() for run in runs}
    for name in sorted(name for name in names if name.endswith(LOSSY)):
        found.append(
            f"Tokenizer {name} does not keep all of the texts: no loss counts what is missing, and bits per byte "
            "cannot be known."
        )
    if any(row.other_hardware for row in comparison.rows):
        found.append("† trained on other hardware than residual: speed, time and memory do not compare.")
    if any(row.val_loss is not None and row.val_loss != row.val_loss for row in comparison.rows):
        found.append("A loss of nan is a run that diverged.")
    return found


def _plural(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def number(value: float | None, form: str) -> str:
    """A number with a minus sign that is one, a dash where it cannot be known."""
    return "—" if value is None else format(value, form).replace("-", "−")


def _count(row: Row) -> str:
    asked = len(row.seeds) + len(row.missing)
    return str(len(row.seeds)) if not row.missing else f"{len(row.seeds)} of {asked}"


def _loss(row: Row) -> str:
    spread = "" if row.val_loss_sd is None else f" ± {row.val_loss_sd:.4f}"
    return number(row.val_loss, ".4f") + spread


def interval_text(value: float | None, interval: Interval | None) -> str:
    """A paired difference with the bounds of its interval, where it has one."""
    if interval is None:
        return number(value, "+.4f")
    return f"{number(value, '+.4f')} [{number(interval.low, '+.4f')}, {number(interval.high, '+.4f')}]"


def _timed(value: float | None, form: str, row: Row) -> str:
    return number(value, form) + ("†" if row.other_hardware and value is not None else "")


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.0f} %"


_LEFT = ("arm", "the paper's claim")

COLUMNS = (
    Column("arm", lambda row: row.arm, brief=True),
    Column("n", _count, brief=True),
    Column("val loss", _loss, brief=True),
    Column("bits/byte", lambda row: number(row.bits_per_byte, ".4f"), brief=True),
    Column("Δ %", lambda row: number(row.delta_percent, "+.2f"), brief=True),
    Column("paired Δ [95 %]", lambda row: interval_text(row.difference, row.interval), brief=True),
    Column("below residual", lambda row: _percent(row.share_below), brief=True),
    Column("tokens/s", lambda row: number(row.tokens_per_second, ",.0f")),
    Column("tokens/s ×", lambda row: _timed(row.throughput_ratio, ".2f", row), brief=True),
    Column("loss at equal time", lambda row: _timed(row.loss_at_equal_time, ".4f", row)),
    Column("peak MiB", lambda row: number(row.peak_memory and row.peak_memory / 2**20, ",.0f")),
    Column("memory ×", lambda row: _timed(row.memory_ratio, ".2f", row), brief=True),
    Column("parameters", lambda row: number(row.parameters, ",")),
    Column("extra", lambda row: number(row.extra_parameters, "+,"), brief=True),
    Column("FLOPs/token", lambda row: number(row.flops_per_token, ".3g")),
    Column("the paper's claim", lambda row: row.claim or "—"),
)

_CSV: dict[str, Callable[[Row], object]] = {
    "size": lambda row: row.size,
    "arm": lambda row: row.arm,
    "cell": lambda row: row.cell,
    "n": lambda row: len(row.seeds),
    "seeds": lambda row: " ".join(map(str, row.seeds)),
    "seeds_missing": lambda row: " ".join(map(str, row.missing)),
    "val_loss_mean": lambda row: row.val_loss,
    "val_loss_sd": lambda row: row.val_loss_sd,
    "val_loss_best_mean": lambda row: row.val_loss_best,
    "bits_per_byte_mean": lambda row: row.bits_per_byte,
    "delta_percent": lambda row: row.delta_percent,
    "paired_difference": lambda row: row.difference,
    "paired_low_95": lambda row: row.interval and row.interval.low,
    "paired_high_95": lambda row: row.interval and row.interval.high,
    "share_below_residual": lambda row: row.share_below,
    "tokens_per_second": lambda row: row.tokens_per_second,
    "throughput_ratio": lambda row: row.throughput_ratio,
    "loss_at_equal_time": lambda row: row.loss_at_equal_time,
    "peak_memory_bytes": lambda row: row.peak_memory,
    "memory_ratio": lambda row: row.memory_ratio,
    "parameters": lambda row: row.parameters,
    "extra_parameters": lambda row: row.extra_parameters,
    "flops_per_token": lambda row: row.flops_per_token,
    "other_hardware": lambda row: int(row.other_hardware),
    "paper_claim": lambda row: row.claim,
}


def _csv_text(value: object) -> str:
    return "" if value is None else str(value)


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: "\\" + character for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "Δ": r"$\Delta$",
    "†": r"$\dagger$",
    "—": "---",
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
