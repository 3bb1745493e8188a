"""Sharded runs through the command line: interrupted, resumed, with other numbers of ranks, and put together."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cells import INTERRUPTED, fit, run_folder, summary, write_cell
from darlit import cli as darlit_cli
from darlit import sharded_checkpoint
from darlit.__main__ import main as darlit
from darlit.checkpoint_io import read_checkpoint
from darlit.errors import DarlitError
from darlit.modules.exported import read_export
from darlit.modules.loading import load
from modules.test_sharding import assert_close, run_ranks

STRATEGY = "darlit.modules.sharding.ShardedStrategy"
GLOBAL_BATCH = 12
BUDGET = {"budget__tokens": 20 * GLOBAL_BATCH * 32, "budget__batch_tokens": GLOBAL_BATCH * 32}


def fit_job(cell: Path, world: int, name: str, *options: str, **changes: Any) -> dict[str, Any]:
    arguments = [
        "fit", "--config", str(cell), "--config", str(cell.with_name("sharded.yaml")), "--cell", name,
        f"--trainer.devices={world}", f"--data.batch_size={GLOBAL_BATCH // world}", *options,
    ]  # fmt: skip
    return {"arguments": arguments, **changes}


def write_strategy(cell: Path) -> None:
    cell.with_name("sharded.yaml").write_text(f"trainer: {{strategy: {{class_path: {STRATEGY}}}}}")


def interrupted(cell: Path, world: int, name: str) -> dict[str, Any]:
    return fit_job(cell, world, name, interrupt=7, status=INTERRUPTED)


def resumed(cell: Path, world: int, name: str) -> dict[str, Any]:
    return fit_job(cell, world, name, "--ckpt_path", "last")


def folder(cell: Path, name: str) -> Path:
    return run_folder(cell).parent.parent / name / "seed_0"


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def cell(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded")
    cell = write_cell(out, data_folder, "dar_block", **BUDGET, model__init_args__backbone__implementation="reference")
    write_strategy(cell)
    return cell


@pytest.fixture(scope="module")
def runs(cell: Path) -> Path:
    """Of two ranks: a straight run, and one that a signal to the second rank ended and that then went on."""
    validate = ["validate", *fit_job(cell, 2, "straight", "--ckpt_path", "last")["arguments"][1:]]
    jobs = [
        fit_job(cell, 2, "straight"),
        interrupted(cell, 2, "resumed"),
        resumed(cell, 2, "resumed"),
        {"arguments": validate},
        {"arguments": ["predict", *validate[1:]]},
        fit_job(cell, 2, "spoilt", spoil=3, status=2),
    ]
    run_ranks(2, "sharded_fits.py", json.dumps(jobs))
    return folder(cell, "straight").parent.parent


def test_a_signal_to_one_rank_ends_all_and_the_resumed_run_is_the_straight_one_bit_for_bit(runs: Path) -> None:
    straight, continued = runs / "straight" / "seed_0", runs / "resumed" / "seed_0"
    expected, actual = (sharded_checkpoint.read(last(run))["state_dict"] for run in (straight, continued))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    assert summary(straight)["restarts"] == 0
    assert summary(continued)["restarts"] == 1
    assert summary(straight)["curve"]["val"]["loss"] == summary(continued)["curve"]["val"]["loss"]


def test_a_bad_loss_on_one_rank_stops_all_with_good_weights(runs: Path) -> None:
    path = runs / "spoilt" / "seed_0" / "checkpoints" / "before_non_finite.ckpt"
    saved = sharded_checkpoint.read(path)
    assert saved["global_step"] == 3
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values())


def test_a_sharded_run_is_the_run_of_one_process(runs: Path, cell: Path) -> None:
    """Same initial values, same batches, same record; sums in another order."""
    assert fit(cell, "--cell", "whole", f"--data.batch_size={GLOBAL_BATCH}") == 0
    whole, sharded = summary(folder(cell, "whole")), summary(runs / "straight" / "seed_0")
    for entry in ("parameters", "flops_per_token", "tokens_seen", "budget", "data", "optimizer", "backbone"):
        assert whole[entry] == sharded[entry], entry
    losses = [torch.tensor(each["curve"]["val"]["loss"]) for each in (sharded, whole)]
    assert_close(*losses, "validation losses", 1e-5)


def test_every_verb_takes_a_sharded_run(runs: Path, cell: Path, tmp_path: Path, capsys: Any) -> None:
    run = runs / "straight" / "seed_0"
    weights = {name.removeprefix("transformer."): value for name, value in read_whole(run).items()}
    for source in (run, last(run)):
        loaded = load(source)
        assert loaded.step == 20
        assert all(torch.equal(loaded.module.transformer.state_dict()[name], weights[name]) for name in weights)
    out = tmp_path / "model.safetensors"
    assert darlit(["export", str(run), "--out", str(out)]) == 0
    exported = read_export(out).weights
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert darlit(["generate", str(out), "--prompt", "def ", "--tokens", "4"]) == 0
    assert darlit(["generate", str(run), "--prompt", "def ", "--tokens", "4"]) == 0
    assert darlit(["analyze", "depth", str(run), "--out", str(tmp_path / "depth"), "--tokens", "64"]) == 0
    capsys.readouterr()
    # One process without shards evaluates it.
    plain = ["--config", str(cell), "--cell", "straight", "--ckpt_path", "last", "--data.batch_size=6"]
    assert darlit(["validate", *plain]) == 0
    printed = capsys.readouterr().out
    assert f"{summary(run)['val_loss_final']:.4f}"[:5] in printed
    # Of 16 sequences in batches of 2 x 6, the second rank has none in the second batch.
    sharded = torch.load(run / "predictions.pt", weights_only=True)
    assert darlit(["predict", *plain]) == 0
    torch.testing.assert_close(sharded, torch.load(run / "predictions.pt", weights_only=True))
    assert sharded.shape == (16, 32)


def read_whole(run: Path) -> dict[str, torch.Tensor]:
    return sharded_checkpoint.read(last(run))["state_dict"]


def test_a_run_is_not_continued_with_the_other_kind_of_checkpoint(runs: Path, cell: Path, data_folder: Path) -> None:
    with pytest.raises(DarlitError, match="saved by a run with the sharded strategy, this one is without it"):
        fit(cell, "--data.batch_size=12", "--ckpt_path", str(last(runs / "straight" / "seed_0")))
    options = {"budget__tokens": 2 * 256, "model__init_args__backbone__implementation": "reference"}
    other = write_cell(cell.parent / "other", data_folder, **options)
    assert fit(other) == 0
    with pytest.raises(DarlitError, match="saved by a run without the sharded strategy, this one is with it"):
        darlit_cli.main(fit_job(cell, 1, "other", "--ckpt_path", str(last(run_folder(other))))["arguments"])


def test_a_sharded_checkpoint_that_would_run_code_is_refused(runs: Path, tmp_path: Path) -> None:
    from trained import Payload

    copy, sign = tmp_path / "copy.ckpt", tmp_path / "sign"
    shutil.copytree(last(runs / "straight" / "seed_0"), copy)
    for name in (sharded_checkpoint.INDEX, sharded_checkpoint.VALUES):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(pickle.dumps(Payload(sign)))
        for read in (read_checkpoint, load):
            with pytest.raises(DarlitError, match="is refused: not a checkpoint of plain tensors and values"):
                read(copy)
        (copy / name).write_bytes(content)
    assert not sign.exists()
    (copy / "__0_0.distcp").unlink()
    with pytest.raises(DarlitError, match="is refused"):
        load(copy)
    (copy / sharded_checkpoint.VALUES).unlink()
    with pytest.raises(DarlitError, match="not a run folder"):
        load(copy)


@pytest.mark.slow
def test_any_number_of_ranks_continues_what_another_has_saved(cell: Path) -> None:
    """Saved by 2, read by 1 and 3; saved by 1 and by 3, read by 2. Three steps later the validation loss is equal."""
    worlds = [(2, 1), (2, 3), (1, 2), (3, 2)]
    names = {pair: f"from{pair[0]}to{pair[1]}" for pair in worlds}
    for world in (1, 2, 3):
        first = [interrupted(cell, world, names[pair]) for pair in worlds if pair[0] == world]
        run_ranks(world, "sharded_fits.py", json.dumps(first))
    moments = {pair: moments_of(last(folder(cell, names[pair]))) for pair in worlds}
    for world in (1, 2, 3):
        second = [resumed(cell, world, names[pair]) for pair in worlds if pair[1] == world]
        run_ranks(world, "sharded_fits.py", json.dumps([*second, fit_job(cell, world, f"straight{world}")]))
    expected = torch.tensor(summary(folder(cell, "straight2"))["curve"]["val"]["loss"])
    for pair, name in names.items():
        found = summary(folder(cell, name))
        assert found["restarts"] == 1
        assert_close(torch.tensor(found["curve"]["val"]["loss"]), expected, name, 1e-5)
        assert moments[pair] > 0


def moments_of(path: Path) -> int:
    """How many tensors of the optimiser's a checkpoint holds."""
    index = sharded_checkpoint._Reader(path).read_metadata()
    return sum(name.startswith("optimizer_0") for name in index.state_dict_metadata)


@pytest.mark.slow
def test_split_experts_are_continued_with_any_other_split(data_folder: Path, tmp_path: Path) -> None:
    """Saved by 4 ranks, two for the experts times two; continued by 2 ranks, with experts split or gathered.

    Without the load-balancing loss, which is that of a rank's own tokens and so not the same for 4 ranks and 2.
    """
    shape = {"num_experts": 4, "experts_per_token": 2, "ffn_width": 16, "implementation": "reference"}
    shape["load_balancing_weight"] = 0.0
    options = {f"model__init_args__backbone__{name}": value for name, value in shape.items()}
    cell = write_cell(tmp_path, data_folder, "dar_block", **BUDGET, **options)
    write_strategy(cell)
    split = "--trainer.strategy.expert_parallel_size=2"
    run_ranks(4, "sharded_fits.py", json.dumps([with_option(interrupted(cell, 4, "split"), split)]))
    shutil.copytree(folder(cell, "split"), folder(cell, "gathered"))
    jobs = [
        fit_job(cell, 2, "straight"),
        with_option(resumed(cell, 2, "split"), split),
        resumed(cell, 2, "gathered"),
    ]
    run_ranks(2, "sharded_fits.py", json.dumps(jobs))
    expected = torch.tensor(summary(folder(cell, "straight"))["curve"]["val"]["loss"])
    for name in ("split", "gathered"):
        assert_close(torch.tensor(summary(folder(cell, name))["curve"]["val"]["loss"]), expected, name, 1e-5)
        assert load(folder(cell, name)).step == 20


@pytest.mark.slow
def test_the_headline_cell_made_small(data_folder: Path, tmp_path: Path) -> None:
    """experiments/moe7b_dar.yaml as it stands but for its size and the CPU, on two ranks."""
    root = Path(__file__).parents[2]
    shape = {"vocab_size": 257, "num_layers": 4, "width": 32, "num_heads": 2, "num_experts": 8, "ffn_width": 16}
    options = {
        **{f"model.backbone.{name}": value for name, value in {**shape, "experts": "torch"}.items()},
        "data.folder": data_folder,
        "data.sequence_length": 32,
        "data.val_sequences": 16,
        "budget.tokens": 20 * 256,
        "budget.batch_tokens": 256,
        "budget.validation_interval": 5,
        "runs_dir": tmp_path,
        "trainer.accelerator": "cpu",
        "trainer.devices": 2,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    job = {"arguments": ["fit", "--config", str(root / "experiments" / "moe7b_dar.yaml"), *arguments]}
    run_ranks(2, "sharded_fits.py", json.dumps([job]))
    run = tmp_path / "moe7b_dar" / "seed_0"
    assert summary(run)["precision"] == "bf16-mixed"
    assert load(run).step == 20


def with_option(job: dict[str, Any], option: str) -> dict[str, Any]:
    return {**job, "arguments": [*job["arguments"], option]}


@pytest.mark.slow
def test_a_batch_that_other_ranks_cannot_share_is_refused_in_one_line(cell: Path, capfd: Any) -> None:
    run_ranks(2, "sharded_fits.py", json.dumps([interrupted(cell, 2, "fixed")]))
    larger = [*resumed(cell, 1, "fixed")["arguments"], "--data.batch_size=6"]  # half of it at once, accumulated
    run_ranks(1, "sharded_fits.py", json.dumps([{"arguments": larger, "status": 2}]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_real_program_is_killed_and_goes_on(cell: Path, number: signal.Signals) -> None:
    """``python -m darlit fit`` starts its second process by itself; after the signal ``--ckpt_path last`` goes on."""
    name = f"killed_by_{number.name}"
    command = [sys.executable, "-m", "darlit", *fit_job(cell, 2, name)["arguments"]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 300
    while not last(folder(cell, name)).exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode in (INTERRUPTED if number == signal.SIGTERM else -number, 0)
    done = (folder(cell, name) / "summary.json").exists()
    assert read_checkpoint(last(folder(cell, name)))["global_step"] >= 5
    command = [sys.executable, "-m", "darlit", *resumed(cell, 2, name)["arguments"]]
    assert subprocess.run(command, check=False).returncode == 0
    assert summary(folder(cell, name))["restarts"] == (0 if done else 1)
