"""The sbatch script and its options, without Slurm; what Slurm makes of them is tested in test_slurm.py."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.__main__ import main
from darlit.errors import DarlitError
from darlit.grid.cells import read_grid
from darlit.grid.slurm import ClusterOptions
from darlit.grid.unchanged import asked

REPOSITORY = Path(__file__).parents[2]
DEMO = Path("demo.yaml")


def _script(capsys: pytest.CaptureFixture[str], *options: str, grid: Path = DEMO) -> str:
    assert main(["grid", "submit", str(grid), "--dry-run", *options]) == 0
    return capsys.readouterr().out


def _directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict((line.split("=", 1) if "=" in line else (line, "")) for line in lines)


@pytest.fixture(autouse=True)
def _a_grid_of_two_runs_and_no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    DEMO.write_text("groups: {tiny: {size: tiny, arms: [residual, dar_full], seeds: [0]}}\n")


def test_the_script_holds_every_option_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(
        capsys, f"--runs_dir={tmp_path}", "--throttle=4", "--partition=gpu,long", "--account=lab1", "--qos=high",
        "--time=2-12:00:00", "--gpus=2", "--cpus=6", "--memory=64G", "--constraint=h100|a100",
    )  # fmt: skip
    assert _directives(script) == {
        "job-name": "demo", "array": "0-1%4", "output": f'"{tmp_path}/.submissions/demo-1/%a.out"',
        "partition": "gpu,long", "account": "lab1", "qos": "high", "time": "2-12:00:00",
        "gpus-per-node": "2", "ntasks-per-node": "2",
        "cpus-per-task": "6", "mem": "64G", "constraint": "h100|a100", "nodes": "1", "requeue": "",
        "open-mode": "append", "signal": "USR1@180",
    }  # fmt: skip
    assert script.count("#SBATCH --time") == 1
    assert f"\npython={sys.executable}\n" in script
    assert not list(tmp_path.glob(".submissions")), "a dry run writes nothing"


def test_templates_and_scripts_are_valid_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = [path.read_text() for path in sorted((REPOSITORY / "slurm").glob("*.sbatch"))]
    assert len(scripts) == 2
    scripts += [_script(capsys, f"--runs_dir={tmp_path}", *options) for options in ((), ("--nodes=4", "--gpus=8"))]
    for script in scripts:
        result = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert result.returncode == 0, result.stderr
        directives = _directives(script)
        assert {"requeue", "open-mode", "signal", "ntasks-per-node"} <= set(directives)


def test_more_than_one_node_takes_the_other_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(capsys, f"--runs_dir={tmp_path}", "--nodes=4", "--gpus=8")
    directives = _directives(script)
    assert (directives["nodes"], directives["ntasks-per-node"], directives["gpus-per-node"]) == ("4", "8", "8")
    assert "--trainer.num_nodes=" in script


def test_no_gpus_leaves_the_line_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpus-per-node" not in _script(capsys, f"--runs_dir={tmp_path}", "--gpus=0")


def test_settings_are_quoted_for_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = tmp_path / "a'b $(touch pwned); `touch pwned` & \"c"
    script = _script(capsys, f"--runs_dir={tmp_path}", f"--setup={hostile}")
    line = next(line for line in script.splitlines() if line.startswith("setup="))
    assert shlex.split(line) == [f"setup={hostile}"]
    hostile_line = ["--setup=a\n#SBATCH --wrap=b", f"--runs_dir={tmp_path}"]
    assert main(["grid", "submit", str(DEMO), "--dry-run", *hostile_line]) == 2
    assert "holds a line break or a control character" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("partition", "gpu; touch pwned"),
        ("partition", "gpu\n#SBATCH --wrap=true"),
        ("partition", ""),
        ("account", "$(id)"),
        ("qos", "a b"),
        ("constraint", "a;b"),
        ("time", "soon"),
        ("time", "1:00\n"),
        ("memory", "64 G"),
        ("gpus", -1),
        ("nodes", 0),
        ("cpus", 1.5),
        ("throttle", True),
    ],
)
def test_an_option_that_is_not_what_it_should_be_is_refused(option: str, value: Any) -> None:
    with pytest.raises(DarlitError, match=f"^{option} .* is not allowed; "):
        ClusterOptions(**{option: value})


def test_a_users_file_gives_defaults_and_options_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config" / "darlit" / "cluster.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump({"partition": "gpu", "account": "lab1", "throttle": 3}))
    directives = _directives(_script(capsys, f"--runs_dir={tmp_path}", "--partition=cpu"))
    assert (directives["partition"], directives["account"], directives["array"]) == ("cpu", "lab1", "0-1%3")
    file.write_text("partitoin: gpu\n")
    assert main(["grid", "submit", str(DEMO), "--dry-run", f"--runs_dir={tmp_path}"]) == 2
    assert "unknown key 'partitoin'; did you mean partition?" in capsys.readouterr().err


def test_only_what_is_not_done_is_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm in ("residual", "dar_full"):
        folder = tmp_path / f"tiny_{arm}" / "seed_0"
        folder.mkdir(parents=True)
        cell = next(cell for cell in read_grid(DEMO).cells if cell.arm == arm)
        (folder / "summary.json").write_text(json.dumps({"identity": asked(cell, seed=0), "devices": 1}))
        out = _script(capsys, f"--runs_dir={tmp_path}")
        if arm == "residual":
            assert _directives(out)["array"] == "1"
        else:
            assert out.startswith("nothing to submit: all 2 runs")


def test_without_slurm_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["grid", "submit", str(DEMO), f"--runs_dir={tmp_path / 'runs'}"]) == 2
    assert "sbatch is not installed here; submit from a login node, or use 'darlit grid run'" in capsys.readouterr().err
    assert not list((tmp_path / "runs" / ".submissions").glob("*"))
