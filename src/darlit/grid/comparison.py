"""From the runs of one size to the rows of its table: every number a reader sees is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from darlit.data import LOSSY
from darlit.grid.claims import paper_claim
from darlit.grid.runs import Run, arm_order
from darlit.grid.statistics import Interval, mean, paired_interval, standard_deviation
from darlit.grid.summary import Summary

BASELINE = "residual"


@dataclass(frozen=True)
class Row:
    """One arm at one size. Losses in nats per token, memory in bytes; ``None`` where a number cannot be known.

    Everything against the baseline is computed on the seeds that both have finished.
    """

    size: str
    arm: str
    cell: str
    seeds: tuple[int, ...]
    missing: tuple[int, ...]
    val_loss: float | None = None
    val_loss_sd: float | None = None
    val_loss_best: float | None = None
    bits_per_byte: float | None = None
    delta_percent: float | None = None
    delta_percent_interval: Interval | None = None
    difference: float | None = None
    interval: Interval | None = None
    tokens_per_second: float | None = None
    throughput_ratio: float | None = None
    loss_at_equal_time: float | None = None
    share_below: float | None = None
    peak_memory: float | None = None
    memory_ratio: float | None = None
    parameters: int | None = None
    extra_parameters: int | None = None
    flops_per_token: float | None = None
    other_hardware: bool = False
    claim: str | None = None


@dataclass(frozen=True)
class Comparison:
    """One size: its rows, and the runs by cell that they were computed from."""

    size: str
    rows: tuple[Row, ...]
    runs: Mapping[str, Sequence[Run]]

    @property
    def baseline(self) -> str | None:
        """The baseline's cell, if it has a finished run."""
        return next((row.cell for row in self.rows if row.arm == BASELINE and row.seeds), None)


def compare(size: str, cells: Mapping[str, Sequence[Run]], asked: Mapping[str, Sequence[int]]) -> Comparison:
    """Compute the rows of one size from its checked runs.

    Args:
        size: the size's name.
        cells: finished runs by cell, in table order.
        asked: the seeds each cell should have; a cell with none finished still gets its row.
    """
    by_seed = {cell: {run.summary["seed"]: run.summary for run in runs} for cell, runs in cells.items()}
    baseline = next((by_seed[cell] for cell, runs in cells.items() if runs[0].summary["arm"] == BASELINE), {})
    rows = [_row(size, by_seed[cell], baseline, asked.get(cell, ())) for cell in cells]
    for cell in asked:
        if cell not in cells:
            arm = cell.removeprefix(f"{size}_")
            rows.append(Row(size, arm, cell, (), tuple(asked[cell]), claim=paper_claim(size, arm)))
    rows.sort(key=lambda row: (arm_order(row.arm), row.cell))
    return Comparison(size, tuple(rows), cells)


@dataclass(frozen=True)
class Difference:
    """Final loss of one arm minus another's, over the seeds that both have finished; ``None`` where there are none."""

    seeds: int
    mean: float | None
    percent: float | None
    interval: Interval | None

    @property
    def verdict(self) -> str:
        """What the interval says about "the first arm has the lower loss"."""
        if self.interval is None:
            return "no run yet" if self.mean is None else "one seed decides nothing"
        if self.interval.high < 0:
            return "holds"
        return "the reverse holds" if self.interval.low > 0 else "not decided"


def difference(comparison: Comparison, arm: str, other: str) -> Difference | None:
    """Return arm minus other at one size, or ``None`` where the size has no such two arms."""
    losses = {row.arm: _final_losses(comparison.runs.get(row.cell, ())) for row in comparison.rows}
    if arm not in losses or other not in losses:
        return None
    seeds = sorted(set(losses[arm]) & set(losses[other]))
    if not seeds:
        return Difference(0, None, None, None)
    differences = [losses[arm][seed] - losses[other][seed] for seed in seeds]
    below = mean([losses[other][seed] for seed in seeds])
    return Difference(len(seeds), mean(differences), 100 * mean(differences) / below, paired_interval(differences))


def _final_losses(runs: Sequence[Run]) -> dict[int, float]:
    return {run.summary["seed"]: run.summary["val_loss_final"] for run in runs}


def _row(size: str, runs: Mapping[int, Summary], baseline: Mapping[int, Summary], asked: Sequence[int]) -> Row:
    done = list(runs.values())
    first = done[0]
    losses = [run["val_loss_final"] for run in done]
    row = Row(
        size=size,
        arm=first["arm"],
        cell=first["cell"],
        seeds=tuple(sorted(runs)),
        missing=tuple(seed for seed in asked if seed not in runs),
        val_loss=mean(losses),
        val_loss_sd=standard_deviation(losses),
        val_loss_best=mean([run["val_loss_best"] for run in done]),
        bits_per_byte=None if first["data"]["tokenizer"].endswith(LOSSY) else mean([r["bits_per_byte"] for r in done]),
        tokens_per_second=mean([run["tokens_per_second"] for run in done]),
        peak_memory=mean([run["peak_memory_bytes"] for run in done]),
        parameters=first["parameters"]["total"],
        flops_per_token=first["flops_per_token"],
        claim=paper_claim(size, first["arm"]),
    )
    pairs = [(runs[seed], baseline[seed]) for seed in runs if seed in baseline]
    return _against_baseline(row, pairs) if pairs else row


def _against_baseline(row: Row, pairs: Sequence[tuple[Summary, Summary]]) -> Row:
    """Fill in what compares an arm with the baseline; ``pairs`` are (own, baseline) runs of the same seed."""
    ours, theirs = [own for own, _ in pairs], [base for _, base in pairs]
    row = replace(
        row,
        throughput_ratio=_ratio(
            [run["tokens_per_second"] for run in ours], [run["tokens_per_second"] for run in theirs]
        ),
        memory_ratio=_ratio([run["peak_memory_bytes"] for run in ours], [run["peak_memory_bytes"] for run in theirs]),
        loss_at_equal_time=mean([_loss_at(own, _training_seconds(base)) for own, base in pairs]),
        extra_parameters=ours[0]["parameters"]["total"] - theirs[0]["parameters"]["total"],
        other_hardware=any(_machine(own) != _machine(base) for own, base in pairs),
    )
    if row.arm == BASELINE:
        return row
    differences = [own["val_loss_final"] - base["val_loss_final"] for own, base in pairs]
    interval = paired_interval(differences)
    percent = 100 / mean([base["val_loss_final"] for base in theirs])
    return replace(
        row,
        delta_percent=percent * mean(differences),
        delta_percent_interval=interval and interval.scaled(percent),
        difference=mean(differences),
        interval=interval,
        share_below=_share_below(pairs),
    )


def _machine(run: Summary) -> tuple[str, int, int]:
    hardware = run["hardware"]
    return hardware["device"], hardware["cores"], hardware["gpus"]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    below = mean(theirs)
    return mean(ours) / below if below else None


def _training_seconds(run: Summary) -> float:
    seconds = run["curve"]["val"]["seconds"]
    return seconds[-1] if seconds else 0.0


def _loss_at(run: Summary, seconds: float) -> float:
    """Validation loss after so many training seconds: linear between evaluations, the final one after the end."""
    times, losses = run["curve"]["val"]["seconds"], run["curve"]["val"]["loss"]
    if not times or seconds >= times[-1]:
        return run["val_loss_final"]
    if seconds <= times[0]:
        return losses[0]
    after = next(i for i, time in enumerate(times) if time > seconds)
    share = (seconds - times[after - 1]) / (times[after] - times[after - 1])
    return losses[after - 1] + share * (losses[after] - losses[after - 1])


def _share_below(pairs: Sequence[tuple[Summary, Summary]]) -> float | None:
    """Return the share of common evaluation points, over all seeds, at which the first run's loss is the lower one."""
    below = points = 0
    for own, base in pairs:
        reference = dict(zip(base["curve"]["val"]["step"], base["curve"]["val"]["loss"], strict=True))
        for step, loss in zip(own["curve"]["val"]["step"], own["curve"]["val"]["loss"], strict=True):
            if step > 0 and step in reference:
                points += 1
                below += loss < reference[step]
    return below / points if points else None
