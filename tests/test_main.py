"""The verbs: help without torch, and one-line errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from darlit.__main__ import VERBS, main


def test_help_names_every_verb_and_imports_no_torch() -> None:
    code = (
        "import sys, darlit.__main__ as m; status = m.main(['--help'])\n"
        "assert status == 0 and not {'torch', 'lightning', 'numpy', 'litdata'} & set(sys.modules), sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for verb in VERBS:
        assert f"  {verb}" in result.stdout


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fti"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'fti'" in error
    assert "fit" in error


def test_a_missing_experiment_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "experiments/nowhere.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nowhere.yaml" in error


def test_ctrl_c_is_one_line_and_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("darlit.pathways.table.main", interrupted)
    assert main(["pathways"]) == 130
    assert capsys.readouterr().err == "darlit: pathways was interrupted\n"
