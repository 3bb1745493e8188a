"""The bench runs, counts its floors right, and its baseline check can fail. No timing is asserted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from darlit import bench
from darlit.bench import peers
from darlit.bench import suites as bench_suites
from darlit.bench.arms import Shape, moved_tensors
from darlit.bench.measure import ratio
from darlit.bench.moe7b import ARMS, MOE7B, moe7b
from darlit.errors import DarlitError
from darlit.experiment import load_experiment
from darlit.live_tensors import PeakMemory
from darlit.pathways import cost

SMALL = ["--tokens", "8", "--width", "64", "--layers", "4", "--rounds", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_suites_write_what_they_print(tmp_path, capsys):
    file = tmp_path / "numbers.json"
    assert bench.main(["path", "step", "memory", "parts", *SMALL, "--json", str(file)]) == 0
    suites = json.loads(file.read_text())["suites"]
    assert list(suites) == ["path", "step", "memory", "parts"]
    printed = capsys.readouterr().out
    for rows in suites.values():
        assert all(row["name"] in printed for row in rows)
    by_name = {row["name"]: row for row in suites["path"]}
    assert by_name["residual"]["ratio"] == 1
    assert "over_floor" in by_name["dar_full"]
    assert bench.main(["path", *SMALL, "--baseline", str(file)]) in (0, 1)


def test_bad_input_is_one_line(tmp_path):
    for arguments in (["fast"], ["path", "--tokens", "0"], ["path", "--baseline", str(tmp_path / "none.json")]):
        with pytest.raises(DarlitError) as error:
            bench.main(arguments)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_suite_without_a_gpu():
    with pytest.raises(DarlitError, match="needs a GPU"):
        bench.main(["gpu"])


def test_a_peer_that_cannot_run_is_named(monkeypatch, capsys):
    broken = peers.Peer("no-such-package", "no_such_package", peers.LigerMHC, needs_gpu=False)
    monkeypatch.setattr(peers, "PEERS", {"mine": broken, "gpu only": broken._replace(module="torch", needs_gpu=True)})
    monkeypatch.setattr(bench_suites, "SUITES", {**bench_suites.SUITES, "path": lambda shape, rounds: []})
    assert bench.main(["path", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "mine is not measured: not installed: pip install no-such-package" in printed
    assert "gpu only is not measured: needs a GPU" in printed
    assert peers.installed(Shape()) == {}


def results(suite, value, noise=0.01):
    return {"shape": vars(Shape()), "suites": {suite: [{"name": "dar_full", "ratio": value, "noise": noise}]}}


def test_worse_than_the_baseline_fails():
    assert not bench.compare(results("path", 10.0), results("path", 10.3))
    assert bench.compare(results("path", 10.0), results("path", 11.0))
    assert not bench.compare(results("path", 10.0), results("path", 11.0, noise=0.2))
    assert not bench.compare(results("step", 0.8), results("step", 0.95))
    assert bench.compare(results("step", 0.95), results("step", 0.8))
    with pytest.raises(DarlitError, match="has no"):
        bench.compare(results("path", 1.0), results("step", 1.0))


def test_floor_by_hand():
    """DAR-Full, one layer: 2 branches, 3 reads. See docs/performance.md for the rules."""
    start = 1 + 1 + 2 + 1  # the embedding for its logits; its gradient from itself, two answers
    read_1 = (1 + 2 + 2) + 3  # embedding, P^0, P^1 -> x, spread; gradient, x, spread
    read_2 = (1 + 2 + 2) + 3  # embedding, H^0, H^1 -> x, spread; gradient, x, spread
    write_0 = (1 + 2) + (1 + 2 + 2 + 1 + 1)  # y -> P; one answer, P, dP, y -> dy
    write_1 = (1 + 2 + 2) + (1 + 2 + 2 + 1 + 1 + 2)  # y, P -> H; one answer, H, P, y -> dy, dP
    assert moved_tensors("dar_full", 1) == start + read_1 + read_2 + write_0 + write_1


def test_floor_of_two_phases_by_hand(monkeypatch):
    """Saved: 1 + 2 c tensors of c blocks at each read but once, less two mixes of each read, written and read."""
    saved = {
        "dar_full": (9 * 2 - (9 + 8)) + (11 * 2 - (11 + 8)),  # c = 4, 5, two reads each
        "attnres_full": 0,  # an entry serves one read before the next
        "dar_block4": 0,  # c = 1, four reads
    }
    two = {arm: moved_tensors(arm, 6) for arm in saved}
    monkeypatch.setattr(cost, "prefetch_pays", lambda *case: False)
    for arm, number in saved.items():
        assert moved_tensors(arm, 6) - two[arm] == number


def test_ratio_and_its_noise():
    assert ratio([2.0, 4.0], [1.0, 2.0]) == (2.0, 0.0)
    middle, noise = ratio([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert middle == 2.5
    assert noise > 0


def test_peak_counts_each_storage_while_it_lives():
    with PeakMemory([]) as peak:
        a = torch.ones(1000)
        b = a + 1  # 8,000 bytes alive
        del a
        c = b.view(10, 100) * 2
        del b, c
    assert peak.peak == 8000
    assert peak.live == 0


def test_the_7b_suite_measures_every_arm_made_small() -> None:
    small = replace(
        MOE7B, vocab_size=64, num_layers=4, width=32, num_heads=2, ffn_width=16, num_experts=4, experts_per_token=2,
        sequence_length=16,
    )  # fmt: skip
    rows = list(moe7b(1, small, "cpu"))
    assert [row["name"] for row in rows] == [f"{arm} torch" for arm in ARMS]
    assert rows[0]["ratio"] == 1
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_the_7b_suite_is_the_experiments_shape() -> None:
    experiments = Path(__file__).parents[2] / "experiments"
    for arm, (_, options) in ARMS.items():
        model = load_experiment(experiments / f"moe7b_{arm}.yaml")["model"]["init_args"]
        shape = {name: value for name, value in model["backbone"].items() if name != "experts"}
        assert shape.items() <= asdict(MOE7B).items()
        assert model.get("pathway", {}) == options


def test_the_7b_suite_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DarlitError, match="needs a GPU"):
        list(moe7b(1))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_blocks_deeper_than_the_model_are_left_out_and_named(capsys, layers):
    shape = ["--tokens", "8", "--width", "64", "--layers", str(layers), "--rounds", "1", "--threads", "1"]
    assert bench.main(["path", "step", "memory", *shape]) == 0
    printed = capsys.readouterr().out
    for arm in ("attnres_block4", "dar_block4"):
        assert f"{arm} is not measured: its blocks have more than --layers {layers} layers" in printed
    assert "dar_full" in printed
