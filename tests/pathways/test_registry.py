"""Nothing is registered half: a pathway without module, experiment, docs, oracle or statements fails here."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

from darlit.catalog import cell_files
from darlit.errors import DarlitError
from darlit.experiment import load_experiments
from darlit.modules.arms import MODULES
from darlit.pathways import Pathway, build, contract, families, table
from darlit.pathways.table import ARMS, BEGIN, END

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/pathways.md").read_text(encoding="utf-8")
SIZES = ("tiny", "small")


def functions() -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing(family: type[Pathway]) -> list[str]:
    """What a registered pathway still owes."""
    name, owed = family.name, []
    if not any(module.pathway_name == name for module in MODULES.values()):
        owed.append("a LightningModule in darlit.modules.arms")
    if f"## `{name}`" not in DOCS:
        owed.append("a section in docs/pathways.md")
    if not any(function.startswith(f"test_{name}_equals_") for function in functions()):
        owed.append(f"an oracle test test_{name}_equals_...")
    if "At initialisation" not in (sys.modules[family.__module__].__doc__ or ""):
        owed.append("a statement on initialisation in its module's docstring")
    if family.cost is Pathway.cost or not all(hasattr(family, word) for word in ("title", "source", "keeps")):
        owed.append("title, source, keeps and cost()")
    if not any(arm.pathway == name for arm in ARMS.values()):
        owed.append("an arm in configs/arm/ and darlit.catalog")
    return owed


@pytest.mark.parametrize("name", families())
def test_a_registered_pathway_is_complete(name):
    assert missing(families()[name]) == []


def test_an_incomplete_pathway_is_told_everything_that_it_owes():
    class Unproven(Pathway):
        name = "unproven"

    assert families()["unproven"] is Unproven
    owed = missing(Unproven)
    del contract.DEFINED["unproven"]
    assert len(owed) == 6
    assert "unproven" not in families()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arm", ARMS)
def test_the_experiment_of_an_arm_builds_that_arm(arm, size):
    experiment = load_experiments(cell_files(f"{size}_{arm}"))["model"]
    cls = MODULES[experiment["class_path"]]
    options = experiment.get("init_args", {}).get("pathway", {})
    built = build(cls.pathway_name, num_branches=16, width=8, **options)
    wanted = build(ARMS[arm].pathway, num_branches=16, width=8, **ARMS[arm].options)
    assert cls.pathway_name == ARMS[arm].pathway
    assert dataclasses.asdict(built.options) == dataclasses.asdict(wanted.options)


def test_every_option_is_in_the_docs():
    for name, family in families().items():
        section = DOCS.split(f"## `{name}`")[1].split("\n## ")[0] + DOCS.split("## Fidelity notes")[1]
        for option in family.Options.__dataclass_fields__:
            assert f"`{option}`" in section, f"docs/pathways.md does not name {name}'s option {option}"


def test_the_readme_holds_the_generated_table():
    """``darlit pathways --write README.md`` writes it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count(BEGIN) == readme.count(END) == 1, "README.md needs both markers, once"
    assert readme.split(BEGIN)[1].split(END)[0].strip() == table.table().strip(), (
        "run: darlit pathways --write README.md"
    )


def test_writing_the_table(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert table.main(["--write", str(page), "--layers", "4", "--width", "64"]) == 0
    assert page.read_text() == f"before\n{BEGIN}\n{table.table(4, 64)}\n{END}\nafter\n"
    assert table.main(["--layers", "4", "--width", "64"]) == 0
    assert capsys.readouterr().out.strip() == table.table(4, 64)


def test_bad_input_of_the_table(tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(DarlitError, match="no such file"):
        table.main(["--write", str(page)])
    page.write_text(f"{END} {BEGIN}")
    with pytest.raises(DarlitError, match="once each"):
        table.main(["--write", str(page)])
    assert page.read_text() == f"{END} {BEGIN}"
    with pytest.raises(DarlitError, match="--layers 1 is not allowed"):
        table.main(["--layers", "1"])
