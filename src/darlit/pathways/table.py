"""The table of pathways, written from the code: ``darlit pathways [--write README.md]``.

Every row is a pathway that is really built; its numbers are `Pathway.cost` and the size of its parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from darlit.arguments import Parser
from darlit.errors import DarlitError
from darlit.markers import markers, replace_between
from darlit.pathways import Pathway, build

NAME = "darlit pathways"
BEGIN, END = markers(NAME)
BYTES = 2
"""Of a bfloat16 channel."""


class Arm(NamedTuple):
    """One arm of the comparison: a pathway with its options, block sizes for any depth of two layers or more."""

    pathway: str
    options: dict[str, Any]


ARMS = {
    "residual": Arm("residual", {}),
    "transparent": Arm("transparent", {}),
    "denseformer": Arm("denseformer", {}),
    "attnres_full": Arm("attnres", {}),
    "attnres_block": Arm("attnres", {"block_size": 2}),
    "hc2": Arm("hyper_connections", {"num_streams": 2}),
    "mhc2": Arm("mhc", {"num_streams": 2}),
    "mhc4": Arm("mhc", {"num_streams": 4}),
    "dar_full": Arm("dar", {}),
    "dar_block": Arm("dar", {"block_size": 2}),
    "dar_self_kv": Arm("dar", {"route": "self_kv"}),
    "dar_cross_v": Arm("dar", {"route": "cross_v"}),
    "dar_fixed_kv": Arm("dar", {"route": "fixed_kv", "query_init_std": 0.02}),
    "attnres_sep_v": Arm("attnres", {"block_size": 1, "sep_v": True}),
    "attnres_2q": Arm("attnres", {"block_size": 1, "num_queries": 2, "query_init_std": 0.02}),
}


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
    options = ", ".join(f"{name}={value}" for name, value in ARMS[arm].options.items())
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
