"""A pathway and its arm in a module of the user's own work with every verb, from the folder that holds the module."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cells import write_cell

README = Path(__file__).parents[2] / "README.md"
ARM = """
from darlit.backbone import BackboneConfig
from darlit.modules import LanguageModule, OptimizerConfig
from darlit.pathways import PathwayOptions


class ScaledLM(LanguageModule):
    pathway_name = "scaled"

    def __init__(
        self,
        pathway: PathwayOptions = PathwayOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
"""
CONSOLE = """
import json, sys
from darlit.__main__ import console
statuses = []
for arguments in json.loads(sys.stdin.read()):
    sys.argv = ["darlit", *arguments]
    try:
        console()
    except SystemExit as exit_:
        statuses.append(exit_.code)
print("statuses", statuses)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    """A folder with my_ideas.py (README's pathway), a trained run of it, and an export."""
    folder = tmp_path_factory.mktemp("own")
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "class Scaled(" in block
    )
    (folder / "my_ideas.py").write_text(example + ARM)
    cell = write_cell(
        folder, data_folder, "residual", budget__tokens=4 * 256, budget__validation_interval=1, runs_dir="runs",
        model__class_path="my_ideas.ScaledLM", pictures={"every_n_validations": 2},
    )  # fmt: skip
    cell.rename(folder / "own.yaml")
    # Not in the folder itself, whose modules Python would find then in any case.
    (folder.parent / "console.py").write_text(CONSOLE)
    return folder


def _type(folder: Path, *commands: list[str]) -> tuple[list[int], str]:
    """Exit statuses of commands typed one after another in ``folder``, in one new process, and all they printed."""
    result = subprocess.run(
        [sys.executable, str(folder.parent / "console.py")], cwd=folder, input=json.dumps(commands), text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    found = re.search(r"statuses (\[.*\])", result.stdout)
    assert found, result.stdout + result.stderr
    return json.loads(found[1]), result.stdout + result.stderr


def test_every_verb_knows_it(place: Path) -> None:
    config = "runs/own/seed_0/config.yaml"
    statuses, printed = _type(
        place,
        ["plan", "own.yaml", "--quick"],
        ["fit", "--config", "own.yaml"],
        ["validate", "--config", config, "--ckpt_path", "best"],
        ["predict", "--config", config, "--ckpt_path", "last"],
    )
    assert statuses == [0, 0, 0, 0], printed
    assert yaml.safe_load((place / config).read_text())["model"]["class_path"] == "my_ideas.ScaledLM"
    # In another process: nothing but config.yaml names the module.
    statuses, printed = _type(
        place,
        ["generate", "runs/own/seed_0", "--tokens", "3"],
        ["export", "runs/own/seed_0", "--out", "own.safetensors"],
        ["analyze", "all", "runs/own/seed_0", "--tokens", "64", "--batch-size", "2"],
        ["results", "runs"],
    )
    assert statuses == [0, 0, 2, 0], printed
    assert "scaled shows no states; let its start and _write call darlit.pathways.contract.observe" in printed
    # Away from its run a file names no module, and none is guessed: the user says which.
    shutil.copy(place / "runs/own/seed_0/checkpoints/last.ckpt", place / "alone.ckpt")
    statuses, printed = _type(
        place,
        ["generate", "own.safetensors"],
        ["generate", "alone.ckpt"],
        ["generate", "own.safetensors", "--tokens", "3", "--class-path", "my_idea.ScaledLM"],
        ["generate", "own.safetensors", "--tokens", "3", "--class-path", "my_ideas.ScaledLM"],
        ["export", "alone.ckpt", "--out", "again.safetensors", "--tokenizer", "bytes"],
    )
    assert statuses == [2, 2, 2, 0, 0], printed
    assert printed.count("name its class: --class-path my_module.MyLM") == 2
    assert "model.class_path is 'my_idea.ScaledLM': No module named 'my_idea'" in printed
    assert "Traceback" not in printed


def test_lightnings_loading_finds_the_class(place: Path) -> None:
    code = (
        "import my_ideas\nfrom darlit.modules import LanguageModule\n"
        "for base in (LanguageModule, my_ideas.ScaledLM):\n"
        "    module = base.load_from_checkpoint('runs/own/seed_0/checkpoints/last.ckpt')\n"
        "    assert type(module) is my_ideas.ScaledLM\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("class_path", "said"),
    [
        ("gone.ScaledLM", "model.class_path is 'gone.ScaledLM': No module named 'gone'"),
        ("my_ideas.Scaled", "which is not a darlit.modules.LanguageModule"),
        ("darlit.modules.residual.ResidualLM", "has pathway 'scaled', this darlit has attnres"),
    ],
)
def test_a_config_that_names_another_class(place: Path, tmp_path: Path, class_path: str, said: str) -> None:
    run = tmp_path / "seed_0"
    shutil.copytree(place / "runs/own/seed_0", run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["class_path"] = class_path
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    statuses, printed = _type(place, ["generate", str(run)])
    assert statuses == [2]
    assert said in printed
    assert "Traceback" not in printed
