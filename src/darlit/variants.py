"""Which pathway a cell's class trains, without importing it: Lightning comes with it and takes longer than a plan."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import darlit

MODULES = Path(darlit.__file__).parent / "modules"


@functools.cache
def pathway_names() -> dict[str, str]:
    """The ``pathway_name`` of every class in `darlit.modules`, by the class's name, as its source states it."""
    return {
        node.name: ast.literal_eval(line.value)
        for file in sorted(MODULES.glob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == ["pathway_name"]
    }
