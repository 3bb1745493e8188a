"""A plan for people, as tables that say what is exact and what is not, and for programs, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.table import Table

from darlit.free_memory import readable
from darlit.grid.estimate import PEAK_TFLOPS, CellPlan, Machine
from darlit.precision import WARNED


class Figure(NamedTuple):
    """One line of a plan."""

    name: str
    text: Callable[[CellPlan], str]
    basis: str
    """Whether it is exact or an estimate, and on what assumption."""


def figures(plans: Sequence[CellPlan], machine: Machine) -> Table:
    """A column an experiment, a line a figure, and what the figure is worth."""
    table = Table(title_justify="left")
    table.add_column("", no_wrap=True)
    for plan in plans:
        table.add_column(plan.cell.name, justify="right", no_wrap=True)
    table.add_column("exact, or an estimate from what")
    for section in _sections(plans, machine):
        for name, text, basis in section:
            table.add_row(name, *(text(plan) for plan in plans), basis)
        table.add_section()
    return table


def summary(plans: Sequence[CellPlan]) -> Table:
    """A line a cell, and the totals."""
    hours = [plan.device_hours for plan in plans]
    totals = {
        "cell": f"{len(plans)} cells",
        "runs": str(sum(plan.runs for plan in plans)),
        "tokens": f"{sum(plan.tokens * plan.runs for plan in plans):.3g}",
        "FLOPs": f"{sum(plan.flops for plan in plans):.3g}",
        f"{_unit(plans)}-hours": _hours(
            None if None in hours else sum(plan.runs * (plan.device_hours or 0.0) for plan in plans)
        ),
        "checkpoint": readable(sum(plan.runs * plan.checkpoint_bytes for plan in plans)),
    }
    columns: dict[str, Callable[[CellPlan], str]] = {
        "cell": lambda plan: plan.cell.name,
        "runs": lambda plan: str(plan.runs),
        "parameters": lambda plan: f"{plan.parameters.total:,}",
        "active": lambda plan: f"{plan.parameters.active:,}",
        "pathway": lambda plan: f"{plan.parameters.pathway:,}",
        "tokens": lambda plan: f"{plan.tokens * plan.runs:.3g}",
        "FLOPs": lambda plan: f"{plan.flops:.3g}",
        **{
            name: partial(_total, recomputed=recomputed)
            for recomputed, name in ((False, "memory, kept"), (True, "memory, recomputed"))
            if any(recomputed in plan.memory for plan in plans)
        },
        "tokens/s": lambda plan: _speed(plan.tokens_per_second),
        f"{_unit(plans)}-hours": lambda plan: _hours(plan.device_hours and plan.runs * plan.device_hours),
        "checkpoint": lambda plan: readable(plan.runs * plan.checkpoint_bytes),
    }
    table = Table(show_footer=True)
    for name in columns:
        table.add_column(name, totals.get(name, ""), justify="left" if name == "cell" else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*(text(plan) for text in columns.values()))
    return table


def notes(plans: Sequence[CellPlan], machine: Machine) -> list[str]:
    """What the figures suppose."""
    layouts = sorted({_layout(plan) for plan in plans})
    lines = [f"For {'; '.join(layouts)}."]
    if not all(plan.runs == 1 for plan in plans):
        lines.append("Per cell, tokens, FLOPs, hours and checkpoint are those of all its runs.")
    if plans and plans[0].memory:
        lines.append(
            "Memory is one device's; * marks what the experiment does. Not in it: the GPU's context, the "
            "allocator's rounding and gaps, buffers of the communication library, data loaders."
        )
    for precision in sorted({plan.precision for plan in plans} & WARNED.keys()):
        lines.append(f"Warning: {precision}: {WARNED[precision]}.")
    if any(plan.flops_per_second is None for plan in plans):
        lines.append("No speed: the peak of this CPU is not known; state it with --peak_tflops.")
    elif machine.peak_tflops is None:
        peaks = [f"{peak:g} TFLOP/s ({of})" for peak, of in sorted({PEAK_TFLOPS[plan.precision] for plan in plans})]
        lines.append(f"Speed supposes {machine.utilisation:.0%} of {' or '.join(peaks)}.")
    return lines


def as_json(plans: Sequence[CellPlan], machine: Machine) -> dict[str, Any]:
    """Everything, in bytes, tokens, FLOPs and hours."""
    hours = [plan.device_hours for plan in plans]
    return {
        "assumptions": {
            "utilisation": machine.utilisation,
            "peak_tflops": {
                plan.precision: machine.peak_tflops or PEAK_TFLOPS[plan.precision][0]
                for plan in plans
                if plan.flops_per_second is not None
            },
            "notes": notes(plans, machine),
            "basis": {name.strip(): basis for section in _sections(plans, machine) for name, _, basis in section},
        },
        "experiments": [_as_json(plan) for plan in plans],
        "total": {
            "runs": sum(plan.runs for plan in plans),
            "tokens": sum(plan.tokens * plan.runs for plan in plans),
            "flops": sum(plan.flops for plan in plans),
            "device_hours": None if None in hours else sum(plan.runs * (plan.device_hours or 0.0) for plan in plans),
            "checkpoint_bytes": sum(plan.runs * plan.checkpoint_bytes for plan in plans),
        },
    }


def _as_json(plan: CellPlan) -> dict[str, Any]:
    return {
        "name": plan.cell.name,
        "file": plan.cell.source,
        "seeds": list(plan.cell.seeds),
        **{
            name: getattr(plan, name)
            for name in (
                *("device", "devices", "precision", "strategy", "tokens", "batch_tokens", "steps", "sequence_length"),
                *("batch_size", "accumulation", "checkpoint_layers", "flops_per_token", "history_bytes_per_token"),
                *("checkpoint_bytes", "train_tokens", "passes", "tokens_per_second", "device_hours"),
            )
        },
        "parameters": plan.parameters._asdict(),
        "memory_bytes": {
            "recomputed" if recomputed else "kept": {**vars(memory), "total": memory.total}
            for recomputed, memory in plan.memory.items()
        },
    }


def _sections(plans: Sequence[CellPlan], machine: Machine) -> list[list[Figure]]:
    unit = _unit(plans)
    sections = [
        [
            Figure("parameters", lambda plan: f"{plan.parameters.total:,}", "exact: counted on the model itself"),
            Figure("  a token meets", lambda plan: f"{plan.parameters.active:,}", "exact: k of E experts"),
            Figure("  the pathway's", lambda plan: f"{plan.parameters.pathway:,}", "exact"),
            Figure(
                "FLOPs per token",
                lambda plan: f"{plan.flops_per_token:.4g}",
                "exact for matrices and causal attention, forward and backward; pathway and recomputation not counted",
            ),
            Figure(
                "history per token",
                lambda plan: _history(plan.history_bytes_per_token),
                "exact: the pathway's state after the last branch",
            ),
        ],
        [
            Figure("steps", lambda plan: f"{plan.steps:,}", "exact"),
            Figure(
                "passes over the corpus",
                lambda plan: "not prepared here" if plan.passes is None else f"{plan.passes:,.2f}",
                "exact: trained tokens over the training tokens of the data folder",
            ),
            Figure(
                "micro-batch x accumulated",
                lambda plan: f"{plan.batch_size} x {plan.sequence_length} x {plan.accumulation}",
                "exact: data.batch_size, data.sequence_length, budget.batch_tokens",
            ),
        ],
    ]
    counted = {recomputed for plan in plans for recomputed in plan.memory}
    if counted:
        sections.append(_memory_section(counted))
    assumed = "as stated" if machine.peak_tflops else "of the card named below"
    return [
        *sections,
        [
            Figure(
                "tokens/s",
                lambda plan: _speed(plan.tokens_per_second),
                f"estimate: utilisation {machine.utilisation:g} of the peak {assumed}, over FLOPs per token",
            ),
            Figure(f"{unit}-hours of a run", lambda plan: _hours(plan.device_hours), "estimate: tokens at that speed"),
            Figure(
                "checkpoint",
                lambda plan: readable(plan.checkpoint_bytes),
                "exact for weights and AdamW's two moments; some KiB of records come on top",
            ),
        ],
    ]


def _memory_section(counted: set[bool]) -> list[Figure]:
    def part(name: str) -> Callable[[CellPlan], str]:
        return lambda plan: readable(getattr(plan.memory[plan.checkpoint_layers], name))

    section = [
        Figure("memory: parameters", part("parameters"), "exact"),
        Figure("  gradients", part("gradients"), "exact"),
        Figure("  optimizer", part("optimizer"), "exact: AdamW, two moments"),
        Figure(
            "  communication",
            part("communication"),
            "estimate, not measured: DDP's buckets, or what FSDP2 gathers of two layers and the root",
        ),
    ]
    most = "estimate: most bytes alive in a micro-batch, counted on the graph at two small depths, continued linearly"
    for recomputed, layers in ((False, "layers kept"), (True, "layers recomputed")):
        if recomputed in counted:
            section += [
                Figure(f"  activations, {layers}", partial(_activations, recomputed=recomputed), most),
                Figure(f"  in all, {layers}", partial(_total, recomputed=recomputed), "estimate: the sum"),
            ]
    return section


def _layout(plan: CellPlan) -> str:
    device = "GPU" if plan.device == "cuda" else "CPU process"
    return f"{plan.devices} {device}{'s' if plan.devices > 1 else ''}, {plan.strategy}, {plan.precision}"


def _unit(plans: Sequence[CellPlan]) -> str:
    return "CPU" if plans and all(plan.device == "cpu" for plan in plans) else "GPU"


def _history(size: int | None) -> str:
    return "not stated by the pathway" if size is None else readable(size)


def _activations(plan: CellPlan, recomputed: bool) -> str:
    return readable(plan.memory[recomputed].activations) if recomputed in plan.memory else "-"


def _total(plan: CellPlan, recomputed: bool) -> str:
    if recomputed not in plan.memory:
        return "-"
    mark = "*" if plan.checkpoint_layers == recomputed else ""
    return mark + readable(plan.memory[recomputed].total)


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def _hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
