"""``results/README.md``: the tables and figures with what is needed to read and to check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from darlit.grid.claims import ORDER_CLAIMS
from darlit.grid.comparison import Comparison, difference
from darlit.grid.summary import Summary
from darlit.grid.table import interval_text, markdown, number

HEAD = "# Results\n\nWritten by `darlit results` from the summaries in `runs/`; the same summaries give the same bytes."
"""How every page of results begins."""

_DEFINITIONS = """\
## How to read the tables

- **val loss**: validation loss at the end of the budget in nats per token, mean ± sample standard deviation
  over n seeds.
- **Δ %**: mean loss against the residual arm's on the seeds that both have; negative is better.
- **paired Δ [95 %]**: loss minus residual's loss under the same seed, mean and two-sided t-interval; a single
  seed has no interval.
- **below residual**: share of common evaluation points, over all seeds, at which the arm's loss is the lower one.
- **tokens/s ×, memory ×**: ratio to residual. **extra**: parameters more than residual.
- **loss at equal time**: the arm's validation loss once it has trained as long as the residual run of its seed took,
  linear between evaluations. Its schedule still aims at the full token budget, so a slower arm is read before its
  learning rate has come down.
- **the paper's claim**: what the paper reports for that size and arm, for comparison; not our measurement.
"""


_HOW_CLAIMS_ARE_READ = """\
The paper's claims are about its own scale; this is what the same comparison gives at ours. "Holds" and "the reverse
holds" are said where the 95 % interval of the paired difference excludes 0, interval by interval, without a correction
for their number: of twenty, one may do so by chance."""


_HOW_INSIDE_IS_READ = """\
One seed of each model, after its last step, on validation text, by `darlit analyze`. Drawn from the numbers in
`analysis/`."""


class Section(NamedTuple):
    """An analysis of some of the models: a line each, and pictures."""

    title: str
    lines: Sequence[str]
    figures: Sequence[Path]


def readme(
    comparisons: Sequence[Comparison], figures: Sequence[Path], notes: str = "", inside: Sequence[Section] = ()
) -> str:
    """Return the Markdown page.

    Args:
        comparisons: one a size.
        figures: relative to where the page will lie, as those of the sections.
        notes: a person's words.
        inside: what was found in some of the models.
    """
    parts = [HEAD]
    if notes:
        parts += ["## In words", "From `notes.md`, written by hand.", notes.strip()]
    for comparison in comparisons:
        parts += [
            f"## {comparison.size}",
            *_partial(comparison),
            _provenance(comparison),
            markdown(comparison).rstrip(),
        ]
        parts += _pictures([figure for figure in figures if figure.stem == f"size_{comparison.size}"])
        parts += _claims(comparison)
    across = [figure for figure in figures if figure.stem == "gain_against_size"]
    if across:
        parts += ["## Gain against model size", *_pictures(across)]
    if inside:
        parts += ["## Inside the models", _HOW_INSIDE_IS_READ]
    for section in inside:
        parts += [
            f"### {section.title[0].upper()}{section.title[1:]}",
            "\n".join(f"- {line}" for line in section.lines),
        ]
        parts += _pictures(section.figures)
    return "\n\n".join([*parts, _DEFINITIONS])


def _partial(comparison: Comparison) -> list[str]:
    done = sum(len(row.seeds) for row in comparison.rows)
    missing = sum(len(row.missing) for row in comparison.rows)
    if not missing:
        return []
    return [f"**Partial: {done} of {done + missing} runs are finished. n says how many each row has.**"]


def _claims(comparison: Comparison) -> list[str]:
    """Claims about two arms against their paired difference here; those about arms that the size lacks are left out."""
    lines = []
    for claim in ORDER_CLAIMS:
        found = difference(comparison, claim.lower, claim.higher)
        if found is not None:
            lines.append(
                f"| {claim.claim} | {claim.source} | {claim.lower} − {claim.higher} | {found.seeds} | "
                f"{number(found.percent, '+.2f')} | {interval_text(found.mean, found.interval)} | {found.verdict} |"
            )
    if not lines:
        return []
    head = ["| claim | whose, and where | arms | n | Δ % | paired Δ [95 %] | here |", "|---|---|---|--:|--:|--:|---|"]
    return [f"### Claims, and this size ({comparison.size})", _HOW_CLAIMS_ARE_READ, "\n".join([*head, *lines])]


def _provenance(comparison: Comparison) -> str:
    runs = [run.summary for of_cell in comparison.runs.values() for run in of_cell]
    if not runs:
        return "No finished run."
    first, budget = runs[0], runs[0]["budget"]
    lines = [
        f"- budget: {budget['tokens']:,} tokens in {budget['steps']:,} steps of {budget['batch_tokens']:,} tokens, "
        f"sequence length {budget['sequence_length']:,}; validated on {budget['val_tokens']:,} tokens",
        f"- data: `{first['data']['fingerprint'][:16]}`, tokenizer {first['data']['tokenizer']} "
        f"({first['data']['vocab_size']:,} tokens, {first['data']['bytes_per_token']:.3g} bytes each)",
        f"- precision: {first['precision']}; clock: {first['clock']}",
        f"- hardware: {_distinct(runs, _hardware)}",
        f"- versions: {_distinct(runs, _versions)}",
        f"- git revision: {_distinct(runs, lambda run: (run['git_revision'] or 'unknown')[:12])}",
    ]
    return "\n".join(lines)


def _hardware(run: Summary) -> str:
    machine = run["hardware"]
    gpus = f"{machine['gpus']} × " if machine["gpus"] > 1 else ""
    return f"{gpus}{machine['device']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"


def _versions(run: Summary) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))


def _distinct(runs: Sequence[Summary], describe: Callable[[Summary], str]) -> str:
    return "; ".join(sorted({describe(run) for run in runs}))


def _pictures(figures: Sequence[Path]) -> list[str]:
    return [f"![{figure.stem.replace('_', ' ')}]({figure.as_posix()})" for figure in figures]
