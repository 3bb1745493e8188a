"""Before the first step a run says what it needs, and warns when that is not free."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cells import fit, write_cell
from darlit import free_memory
from darlit.backbone import BackboneConfig
from darlit.callbacks import memory_estimate
from darlit.callbacks.memory_estimate import MemoryEstimate, held_bytes
from darlit.free_memory import free_bytes, readable
from darlit.modules.arms import ResidualLM

GIB = 2**30


def start(monkeypatch: pytest.MonkeyPatch, free: int, **backbone: Any) -> list[str]:
    """What the callback says (first) and warns of (rest) before a run with ``free`` bytes left."""
    shape = BackboneConfig(num_layers=2, width=32, ffn_width=48, sequence_length=16, **backbone)
    module: Any = ResidualLM(backbone=shape)
    module.transformer.to(torch.float32)
    optimizer = torch.optim.AdamW(module.parameters())
    trainer: Any = SimpleNamespace(
        precision="32-true",
        is_global_zero=True,
        world_size=1,
        optimizers=[optimizer],
        datamodule=SimpleNamespace(batch_size=4),
    )
    said: list[str] = []
    monkeypatch.setattr(memory_estimate, "free_bytes", lambda device: free)
    monkeypatch.setattr(memory_estimate, "rank_zero_info", said.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MemoryEstimate().on_train_start(trainer, module)
    return [*said, *(str(warning.message) for warning in caught)]


def test_one_line_with_the_parts_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = start(monkeypatch, free=GIB)
    assert line.startswith("memory of a step on cpu, estimated: parameters ")
    assert all(part in line for part in ("gradients", "optimizer", "activations", "in all"))
    assert "\n" not in line


def test_a_warning_with_numbers_and_what_to_change_when_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _, warning = start(monkeypatch, free=100_000)
    assert "97.7 KiB are free" in warning
    assert "needs about" in warning
    for remedy in ("backbone.checkpoint_layers true (", "data.batch_size below 4", "more devices", "fsdp.yaml"):
        assert remedy in warning
    assert "\n" not in warning


def test_a_step_that_needs_values_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_values(*_: Any) -> None:
        raise RuntimeError("a value is needed here")

    monkeypatch.setattr(memory_estimate, "step_memory", needs_values)
    (warning,) = start(monkeypatch, free=GIB)
    assert "no estimate" in warning
    assert "a value is needed here" in warning


def test_a_cell_estimates_unless_told_not_to(
    data_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for enabled in (True, False):
        caplog.clear()
        cell = write_cell(tmp_path / str(enabled), data_folder, memory_estimate__enabled=enabled)
        assert fit(cell, "--budget.tokens", "512", "--budget.validation_interval", "1") == 0
        assert ("memory of a step on cpu" in caplog.text) == enabled


def test_what_is_done_already_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    _, warning = start(monkeypatch, free=100_000, checkpoint_layers=True)
    assert "checkpoint_layers" not in warning


def test_what_is_held_already_needs_no_room() -> None:
    module: Any = ResidualLM(backbone=BackboneConfig(num_layers=1, width=32))
    optimizer = torch.optim.AdamW(module.parameters())
    trainer: Any = SimpleNamespace(optimizers=[optimizer])
    size = sum(parameter.nbytes for parameter in module.parameters())
    assert held_bytes(trainer, module) == size
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert 3 * size <= held_bytes(trainer, module) < 3.01 * size


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/job\n", {"job/memory.max": "5000", "job/memory.current": "2000"}, 3000),
        ("0::/job/step\n", {"job/memory.max": "5000", "job/memory.current": "2000"}, 3000),
        ("0::/elsewhere\n", {"memory.max": "700", "memory.current": "1000"}, 0),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "2000"}, None),
        (
            "4:memory:/a\n1:cpu:/b\n",
            {"memory/a/memory.limit_in_bytes": "9000", "memory/a/memory.usage_in_bytes": "5000"},
            4000,
        ),
        (
            "0::/job\n",
            {"job/memory.max": "5000", "job/memory.current": "2000", "job/memory.stat": "anon 7\ninactive_file 500\n"},
            3500,
        ),
    ],
)
def test_the_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], left: int | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(free_memory, "_of_the_machine", lambda: 10**9)
    assert free_bytes(torch.device("cpu")) == (10**9 if left is None else left)


def test_free_memory_of_a_gpu_is_what_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_bytes(torch.device("cuda", 0)) == 123


def test_this_machine_has_some_memory_left() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 KiB"), (1536, "1.5 KiB"), (3.4 * 2**20, "3.4 MiB"), (117.2 * GIB, "117 GiB"), (2 * 1024 * GIB, "2 TiB")],
)
def test_sizes_are_written_in_the_unit_that_they_fill(size: float, text: str) -> None:
    assert readable(size) == text
