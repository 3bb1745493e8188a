"""A suite's rows as a table for people."""

from __future__ import annotations

from typing import Any

COLUMNS = {
    "seconds": ("ms", 1e3, "{:.1f}"),
    "branch_seconds": ("us a branch", 1e6, "{:.0f}"),
    "floor_seconds": ("floor ms", 1e3, "{:.1f}"),
    "over_floor": ("x floor", 1, "{:.2f}"),
    "ratio": ("ratio", 1, "{:.3f}"),
    "over_8_layers": ("/ 8 layers", 1, "{:.2f}"),
    "over_ours": ("/ ours", 1, "{:.2f}"),
    "over_reference": ("/ reference", 1, "{:.2f}"),
    "noise": ("noise", 100, "{:.0f}%"),
    "naive_over_this": ("naive / this", 1, "{:.1f}"),
    "tokens_per_second": ("tokens/s", 1, "{:.0f}"),
    "peak_bytes": ("peak MiB", 2**-20, "{:.0f}"),
    "saved_bytes": ("saved MiB", 2**-20, "{:.0f}"),
    "saved_ratio": ("saved ratio", 1, "{:.2f}"),
    "gigabytes_per_second": ("GB/s", 1, "{:.1f}"),
    "data_sheet_gigabytes_per_second": ("data sheet GB/s", 1, "{:.0f}"),
    "data_sheet_share": ("of data sheet", 100, "{:.0f}%"),
    "error": ("error", 1, "{:.1e}"),
}


def table(suite: str, rows: list[dict[str, Any]]) -> str:
    present = [key for key in COLUMNS if any(key in row for row in rows)]
    lines = [[suite, *(COLUMNS[key][0] for key in present)]]
    for row in rows:
        cells = [COLUMNS[key][2].format(row[key] * COLUMNS[key][1]) if key in row else "" for key in present]
        lines.append([row["name"], *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return (
        "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )
        + "\n"
    )
