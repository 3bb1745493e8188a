"""Evaluation of every sequence once: the same losses, rows and order for any batch size and number of devices."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cells import BATCH_TOKENS, STEPS, fit, run_folder, summary, write_cell
from darlit.__main__ import main as darlit
from darlit.data.loader import TokenDataset
from darlit.data.manifest import open_manifest
from darlit.data.prepare import Options, prepare
from darlit.modules.loading import load
from modules.test_sharding import run_ranks


@pytest.fixture(scope="module")
def cell(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run; its 9 validation sequences leave the second of two ranks without one in a batch of 4."""
    cell = write_cell(tmp_path_factory.mktemp("cell"), data_folder, "residual", data__val_sequences=9)
    assert fit(cell) == 0
    return cell


def predicted(cell: Path, *options: str) -> torch.Tensor:
    assert darlit(["predict", "--config", str(cell), "--ckpt_path", "last", *options]) == 0
    path = run_folder(cell) / "predictions.pt"
    assert [file.name for file in path.parent.iterdir() if "predictions" in file.name] == [path.name]
    return torch.load(path, weights_only=True)


def chosen(data_folder: Path, sequences: int) -> torch.Tensor:
    dataset = TokenDataset(open_manifest(data_folder), "val", 32)
    return torch.stack([dataset[number * len(dataset) // sequences] for number in range(sequences)])


def test_prediction_has_a_row_for_every_sequence_in_order(cell: Path, data_folder: Path) -> None:
    """15 sequences at batch 8 give 15 rows, at any batch size the same ones."""
    tokens = chosen(data_folder, 15)
    module = load(run_folder(cell)).module
    with torch.no_grad():
        expected = module.predict_step(tokens, 0)
    for batch in (8, 4, 1, 32):
        rows = predicted(cell, "--data.val_sequences=15", f"--data.batch_size={batch}")
        assert rows.shape == (15, 32)
        torch.testing.assert_close(rows, expected)


def test_bits_per_byte_are_of_the_bytes_that_were_scored(cell: Path, data_folder: Path) -> None:
    """Nine sequences score 288 targets, of which the separators stand for no byte."""
    targets = chosen(data_folder, 9)[:, 1:]
    scored = int((targets != 256).sum())
    done = summary(run_folder(cell))
    nats = predicted(cell).double().sum().item()
    assert done["budget"]["val_tokens"] == targets.numel()
    assert done["data"]["bytes_per_token"] == pytest.approx(scored / targets.numel())
    assert done["bits_per_byte"] == pytest.approx(nats / math.log(2) / scored, rel=1e-5)


def test_bits_per_byte_of_subwords_count_what_their_text_has(tmp_path: Path) -> None:
    """The decoded text of every scored target, separators left out; far from the mean of the split on a short set."""
    for number in range(60):
        words = ("again and again the same few words " if number % 2 else "xq jv kz wp çü ") * (2 + number % 7)
        (tmp_path / f"{number}.txt").write_text(f"{number} {words}")
    data = tmp_path / "out" / "data"
    manifest = prepare([str(tmp_path)], data, Options(tokenizer="bpe", vocab_size=300, val_fraction=0.3))
    shape = {"model__init_args__backbone__vocab_size": 300, "data__sequence_length": 8, "data__val_sequences": 3}
    cell = write_cell(tmp_path / "cell", data, "residual", **shape, budget__tokens=512)
    assert fit(cell) == 0
    dataset = TokenDataset(manifest, "val", 8)
    tokenizer = manifest.tokenizer()
    alphabet = tokenizer.token_bytes()
    targets = torch.stack([dataset[number * len(dataset) // 3] for number in range(3)])[:, 1:]
    vocabulary = json.loads(tokenizer.definition or "")["model"]["vocab"]
    spelled = {number: len(token) for token, number in vocabulary.items()}  # one character a byte
    scored = sum(spelled.get(int(target), 0) for target in targets.flatten())
    assert scored == alphabet[targets.flatten()].sum()
    done = summary(run_folder(cell))
    assert done["data"]["bytes_per_token"] == pytest.approx(scored / 24)
    assert done["data"]["bytes_per_token"] != pytest.approx(manifest.bytes_per_token("val"), rel=0.02)
    assert done["bits_per_byte"] == pytest.approx(done["val_loss_final"] * 24 / math.log(2) / scored, rel=1e-5)


@pytest.mark.parametrize("verb", ["test", "validate"])
def test_a_loss_does_not_depend_on_the_batch_size(
    cell: Path, data_folder: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """`test` takes the complete validation split, `validate` the sequences that the fit validated on."""
    name = {"test": "test/loss", "validate": "val/loss"}[verb]
    losses = []
    for batch in (1, 7, 32):
        assert darlit([verb, "--config", str(cell), "--ckpt_path", "last", f"--data.batch_size={batch}"]) == 0
        losses.append(float(re.findall(rf"{name}\D+([\d.]+)", capsys.readouterr().out)[0]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    if verb == "validate":
        assert losses[0] == pytest.approx(summary(run_folder(cell))["val_loss_final"], rel=1e-6)
    else:
        count = len(TokenDataset(open_manifest(data_folder), "val", 32))
        rows = predicted(cell, f"--data.val_sequences={count}")
        assert losses[0] == pytest.approx(rows.double().mean().item(), rel=1e-6)


def test_two_ranks_evaluate_and_log_what_one_does(cell: Path) -> None:
    alone = predicted(cell)
    ddp = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=4"]
    twice = [*ddp, "--cell=twice", f"--budget.batch_tokens={2 * BATCH_TOKENS}", f"--budget.tokens={STEPS * 2 * 256}"]
    jobs = [
        {"arguments": ["predict", "--config", str(cell), "--ckpt_path=last", *ddp]},
        {"arguments": ["fit", "--config", str(cell), *twice]},
    ]
    (run_folder(cell) / "predictions.pt").unlink()
    run_ranks(2, "sharded_fits.py", json.dumps(jobs))
    torch.testing.assert_close(torch.load(run_folder(cell) / "predictions.pt", weights_only=True), alone)

    assert fit(cell, "--cell=once", f"--budget.batch_tokens={2 * BATCH_TOKENS}", twice[-1], "--data.batch_size=8") == 0
    one, two = (run_folder(cell).parent.parent / name / "seed_0" for name in ("once", "twice"))
    assert summary(two)["budget"]["val_tokens"] == summary(one)["budget"]["val_tokens"] == 9 * 32
    assert summary(two)["curve"]["val"]["loss"] == pytest.approx(summary(one)["curve"]["val"]["loss"], rel=1e-5)
    assert summary(two)["curve"]["train"]["loss"] == pytest.approx(summary(one)["curve"]["train"]["loss"], rel=1e-5)
    logged = []
    for run in (one, two):
        events = EventAccumulator(str(run))
        events.Reload()
        logged.append([(event.step, pytest.approx(event.value, rel=1e-5)) for event in events.Scalars("train/loss")])
    assert [step for step, _ in logged[0]] == [step for step, _ in logged[1]] == list(range(1, STEPS + 1))
    assert [loss.expected for _, loss in logged[0]] == [loss for _, loss in logged[1]]
