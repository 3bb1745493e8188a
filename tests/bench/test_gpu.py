"""Every part of the suite for a GPU, made small and run on the CPU; boxes, cut runs and failing parts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch

from darlit import bench
from darlit.bench import gpu as suite
from darlit.bench import measure, peers
from darlit.bench import suites as bench_suites
from darlit.bench.arms import ARMS, Shape
from darlit.bench.measure import COPY_BYTES, DATA_SHEET_GBPS, copier
from darlit.bench.moe7b import MOE7B, SEQUENCES
from darlit.bench.report import table

BLANK = {"vocab_size": 64, "num_layers": 4, "width": 32, "num_heads": 2, "ffn_width": 16, "sequence_length": 16}
SCALE = suite.Scale(
    path=Shape(tokens=32, width=64, layers=4, dtype="bfloat16"),
    error=Shape(tokens=8, width=32, layers=4),
    step=replace(suite.FULL.step, **BLANK),
    moe7b=replace(MOE7B, **BLANK, num_experts=4, experts_per_token=2),
)


@pytest.fixture(autouse=True)
def _small_copy(monkeypatch):
    monkeypatch.setitem(COPY_BYTES, "cpu", 2**20)


def test_every_part_in_order_made_small(monkeypatch):
    graphs = []

    def replay(work, device):
        graphs.append(work)
        return work

    monkeypatch.setattr(suite, "captured", replay)
    rows = list(suite.gpu(1, SCALE))
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    assert list(dict.fromkeys(row["name"].split()[0] for row in rows)) == ["path", "step", "moe7b", "error"]
    for kind in ("path", "step"):
        assert by_name[f"{kind} residual"]["ratio"] == 1
        for arm in ARMS:
            assert by_name[f"{kind} {arm}"]["seconds"] > 0
            assert by_name[f"{kind} {arm} (CUDA graph)"]["seconds"] > 0
    assert len(graphs) == 2 * len(ARMS)
    assert "over_floor" in by_name["path dar_full (CUDA graph)"]
    assert by_name["step dar_full"]["tokens_per_second"] > 0
    assert by_name["moe7b residual torch"]["ratio"] == 1
    for arm in suite.FUSED:
        assert by_name[f"error {arm} float32"]["error"] < 1e-4
        assert by_name[f"error {arm} bfloat16"]["error"] > by_name[f"error {arm} float32"]["error"]
    for peer in peers.PEERS:  # last, measured or named
        row = by_name[f"path {peer}"]
        assert "seconds" in row or row["reason"]
    assert table("gpu", rows).count("\n") == len(rows) + 1


def test_the_full_scale_is_what_the_docs_say():
    assert suite.FULL.step.num_layers == suite.FULL.path.layers == 16
    assert SEQUENCES * MOE7B.sequence_length == suite.FULL.path.tokens == 16_384
    assert suite.SECONDS < 9 * 60
    # A part whose box is open must leave time for the four that our figures come from.
    assert sum(box for name, box, _ in suite._parts(1, SCALE) if name in ("path", "step", "moe7b", "error")) <= 450
    assert set(suite.FUSED) == set(ARMS) - {"residual"}


def test_a_copy_on_a_gpu_moves_four_gibibytes(monkeypatch):
    monkeypatch.setitem(COPY_BYTES, "meta", COPY_BYTES["cuda"])
    assert 2 * copier(torch.device("meta"))().nbytes >= 4 * 2**30


@pytest.mark.parametrize(("name", "share"), [("NVIDIA H200", 0.5), ("some other card", None)])
def test_the_data_sheet_beside_the_copy(monkeypatch, name, share):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    second = COPY_BYTES["cuda"] / (DATA_SHEET_GBPS["NVIDIA H200"] * 1e9) * 2
    times = {"copy": [second], "residual": [second], "dar_full": [2 * second]}
    monkeypatch.setattr(bench_suites, "moved_tensors", lambda arm, layers: COPY_BYTES["cuda"])
    shape = replace(suite.FULL.path, tokens=1, width=1, dtype="int8")
    copy, residual, dar = bench_suites.path_rows(times, shape)
    assert copy.get("data_sheet_gigabytes_per_second") == (share and 4800)
    assert copy.get("data_sheet_share") == residual.get("data_sheet_share") == (share and pytest.approx(share))
    assert dar.get("data_sheet_share") == (share and pytest.approx(share / 2))
    assert dar["over_floor"] == pytest.approx(2)


def test_a_part_is_cut_and_the_next_begins(monkeypatch):
    def slow():
        yield {"name": "kept"}
        try:
            time.sleep(60)
        except Exception:  # as an autotuner does
            yield {"name": "not reached"}

    def broken():
        raise ValueError("no such kernel\nmore")
        yield

    parts = [("slow", 0.2, slow), ("broken", 5, broken), ("last", 5, lambda: iter([{"name": "last"}]))]
    monkeypatch.setattr(suite, "_parts", lambda *_: parts)
    assert list(suite.gpu(1, SCALE)) == [
        {"name": "kept"},
        {"name": "slow", "reason": "cut after its 0 s"},
        {"name": "broken", "reason": "ValueError: no such kernel"},
        {"name": "last"},
    ]
    assert [row["reason"] for row in suite.gpu(1, SCALE, seconds=0)] == ["cut after its 0 s"] * 3


def test_an_arm_that_cannot_be_captured_says_why(monkeypatch):
    def captured(work, device):
        if work.pathway.name == "dar":
            raise RuntimeError("operation not permitted when stream is capturing")
        return work

    monkeypatch.setattr(suite, "captured", captured)
    by_name = {row["name"]: row for row in suite._paths(SCALE.path, 1)}
    assert "not permitted" in by_name["path dar_full (CUDA graph)"]["reason"]
    assert by_name["path attnres_full (CUDA graph)"]["seconds"] > 0


def test_a_killed_run_keeps_what_it_has(monkeypatch, tmp_path, capsys):
    def killed(rounds):
        yield {"name": "path residual", "seconds": 1.0}
        yield {"name": "path peer", "reason": "not installed"}
        raise KeyboardInterrupt

    file = tmp_path / "gpu.json"
    monkeypatch.setattr(suite, "gpu", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["gpu", "--json", str(file)])
    kept = json.loads(file.read_text())
    assert [row["name"] for row in kept["suites"]["gpu"]] == ["path residual", "path peer"]
    assert kept["shape"] == vars(suite.FULL.path)
    monkeypatch.setattr(suite, "gpu", lambda rounds: islice(killed(rounds), 2))
    assert bench.main(["gpu"]) == 0
    assert "path peer is not measured: not installed" in capsys.readouterr().out


def test_without_graphs_a_device_runs_the_work_itself():
    def work():
        return 1

    assert measure.captured(work, torch.device("cpu")) is work
