"""The table of pathways, written from the code: ``darlit pathways [--write README.md]``.

Every row is a pathway that is really built; its numbers are `Pathway.cost` and the size of its parameters.
"""

from __future__ import annotations

from pathlib import Path

from darlit.arguments import Parser
from darlit.catalog import arms
from darlit.errors import DarlitError
from darlit.markers import markers, replace_between
from darlit.pathways import Pathway, build

NAME = "darlit pathways"
BEGIN, END = markers(NAME)
BYTES = 2
"""Of a bfloat16 channel."""

ARMS = arms(num_layers=2)
"""The arms of `darlit.catalog` with blocks of two layers, for any depth of two layers or more."""


def table(num_layers: int = 12, width: int = 768) -> str:
    """The table as Markdown, for a model of ``num_layers`` layers of ``width`` channels."""
    head = ("arm", "pathway", "state kept per token", "moved per branch", "FLOPs per branch", "parameters", "source")
    rows = [
        _row(arm, build(pathway, num_branches=2 * num_layers, width=width, **options))
        for arm, (pathway, options) in ARMS.items()
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]
    note = (
        f"Per token, forward pass, {num_layers} layers, D = {width}, bfloat16, blocks of two layers. A source is an "
        "embedding, branch or block output that a read selects from; a vector is D channels. *Moved* is the least that "
        "a fused implementation reads and writes, the branches' own traffic left out; means over the branches."
    )
    return "\n".join([*lines, "", note])


def _row(arm: str, pathway: Pathway) -> tuple[str, ...]:
    cost, branches, kib = pathway.cost(), pathway.num_branches, pathway.width * BYTES / 1024
    if cost is None:
        raise DarlitError(f"pathway {pathway.name} states no cost: add cost() to list it in the table of pathways")
    default = type(pathway).Options()
    chosen = {name: value for name, value in ARMS[arm].options.items() if value != getattr(default, name)}
    options = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return (
        f"`{arm}`",
        pathway.title + (f" ({options})" if options else ""),
        f"{pathway.keeps}: {cost.kept} vectors, {cost.kept * kib:.1f} KiB",
        f"{cost.moved / branches:.1f} vectors, {cost.moved / branches * kib:.1f} KiB",
        f"{cost.flops * pathway.width / branches:,.0f}",
        f"{sum(parameter.numel() for parameter in pathway.parameters()):,}",
        pathway.source,
    )


def main(argv: list[str]) -> int:
    """``darlit pathways``: print the table, or write it between the markers of a Markdown file.

    Raises:
        DarlitError: see `replace_between`; or too few layers.
    """
    parser = Parser(prog="darlit pathways", description="The table of pathways and what they cost.")
    parser.add_argument("--layers", type=int, default=12, help="L of the model that is counted (default 12)")
    parser.add_argument("--width", type=int, default=768, help="D of the model that is counted (default 768)")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"write it between {BEGIN} and {END} instead")
    arguments = parser.parse_args(argv)
    if arguments.layers < 2:
        raise DarlitError(f"--layers {arguments.layers} is not allowed; at least 2, the blocks are of two layers")
    text = table(arguments.layers, arguments.width)
    if arguments.write:
        replace_between(arguments.write, NAME, text)
    else:
        print(text)
    return 0
