"""The DataModule under Lightning's Trainer: what the model sees, resumed or not, on one rank or two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

import darlit
from darlit.data.datamodule import TokenDataModule
from darlit.data.errors import DataError
from darlit.data.loader import FILLING, TokenDataset
from darlit.data.manifest import Manifest, open_manifest
from darlit.data.prepare import Options, prepare, prepare_default
from darlit.errors import DarlitError


class Recorder(pl.LightningModule):
    """A small model whose loss depends on every token, dropout included, and that notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(257, 1)
        self.seen: list[tuple[Any, ...]] = []

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = torch.nn.functional.dropout(self.table(tokens)[..., 0] + 1.0, 0.5)
        loss = (noise * torch.arange(1.0, 1 + tokens.shape[1])).mean() ** 2
        self.seen.append(("train", self.trainer.current_epoch, batch_idx, tokens.tolist(), loss.item()))
        return loss

    def validation_step(self, tokens: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(("val", self.global_step, batch_idx, tokens.tolist(), self.table(tokens).sum().item()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def run(folder: Path, steps: int, checkpoint: str | None = None, data: dict[str, Any] | None = None, **trainer: Any):  # type: ignore[no-untyped-def]
    pl.seed_everything(1, verbose=False)
    model = trainer.pop("model", Recorder)()
    options = {"sequence_length": 199, "batch_size": 8, "val_sequences": 16, **(data or {})}
    options = {
        "accelerator": "cpu",
        "max_steps": steps,
        "max_epochs": -1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 7,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer,
        "datamodule": TokenDataModule(folder=str(folder), **options),
    }
    datamodule = options.pop("datamodule")
    machine = pl.Trainer(**options)
    machine.fit(model, datamodule=datamodule, ckpt_path=checkpoint)
    return machine, model


def batches_an_epoch(folder: Path) -> int:
    """Of the data, with the sequence length and batch size of `run`; the trainer has one epoch of its own."""
    return len(TokenDataset(open_manifest(folder), "train", 199)) // 8


@pytest.fixture(scope="module")
def folder(prepared: Manifest) -> Path:
    return prepared.folder


def test_properties(prepared: Manifest) -> None:
    data = TokenDataModule(folder=str(prepared.folder))
    with pytest.raises(RuntimeError, match=r"call prepare_data\(\) and setup\(\) first"):
        _ = data.vocab_size
    data.prepare_data()
    data.setup("fit")
    assert (data.vocab_size, data.separator, data.tokenizer_name) == (257, 256, "bytes")
    assert data.fingerprint == prepared.fingerprint
    val = prepared.split("val")
    assert data.train_tokens == prepared.split("train")["tokens"]
    assert data.passes(3 * data.train_tokens) == 3
    tokens = np.concatenate([block.numpy() for block in data.test_dataloader()]).ravel()
    assert data.token_bytes()[tokens].sum() == (tokens != 256).sum()
    assert val["bytes"] == val["tokens"] - val["documents"]
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (16, 129)
    assert batch.dtype == torch.int64


def test_validation_is_the_same_every_time_and_spread_over_the_split(folder: Path) -> None:
    _, model = run(folder, 15)
    validations = [entry for entry in model.seen if entry[0] == "val"]
    assert [entry[1:3] for entry in validations] == [(7, 0), (7, 1), (14, 0), (14, 1)]
    assert [entry[3] for entry in validations[:2]] == [entry[3] for entry in validations[2:]]


def test_limited_validation_begins_anew(folder: Path) -> None:
    _, model = run(folder, 15, limit_val_batches=1, num_sanity_val_steps=1)
    validations = [entry[3] for entry in model.seen if entry[0] == "val"]
    assert len(validations) == 3  # the sanity check and two validations
    assert validations[0] == validations[1] == validations[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_under_the_trainer(folder: Path, tmp_path: Path, workers: int) -> None:
    """N + M steps are N + M steps of the straight run, at every kind of cut, losses to the bit."""
    data = {"num_workers": workers}
    _, straight = run(folder, 30, data=data)
    epoch = batches_an_epoch(folder)
    assert epoch < 25  # two epoch boundaries are inside
    cuts = sorted({1, 7, 13, epoch - 1, epoch, epoch + 1, 2 * epoch}) if workers == 0 else [5, epoch]
    for cut in cuts:
        machine, first = run(folder, cut, data=data)
        machine.save_checkpoint(tmp_path / "cut.ckpt")
        _, second = run(folder, 30, str(tmp_path / "cut.ckpt"), data=data)
        train = [entry for entry in (*first.seen, *second.seen) if entry[0] == "train"]
        assert [e[3] for e in train] == [e[3] for e in straight.seen if e[0] == "train"], cut


class SaveEverything(pl.Callback):
    """A checkpoint after every step, with torch's random state, which Lightning does not keep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def state_dict(self) -> dict[str, Any]:
        return {"random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random = state["random"]

    def on_train_start(self, *_: Any) -> None:
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


@pytest.mark.parametrize("limit", [None, 5])
def test_every_step_of_a_run_resumes_with_equal_losses(folder: Path, tmp_path: Path, limit: int | None) -> None:
    """Checkpoints written inside the run, dropout included; with limit_train_batches the epoch ends early."""
    options = {"limit_train_batches": limit} if limit else {}
    _, straight = run(folder, 30, callbacks=[SaveEverything(tmp_path)], **options)
    expected = [entry for entry in straight.seen if entry[0] == "train"]
    for step in (1, 5, 7, 11, 12, 13, 24, 29):
        (tmp_path / "again").mkdir(exist_ok=True)
        _, resumed = run(
            folder, 30, str(tmp_path / f"{step}.ckpt"), callbacks=[SaveEverything(tmp_path / "again")], **options
        )
        train = [entry for entry in resumed.seen if entry[0] == "train"]
        assert [entry[3:] for entry in train] == [entry[3:] for entry in expected[step:]], step


def test_resume_with_other_geometry_is_refused(folder: Path, tmp_path: Path) -> None:
    machine, _ = run(folder, 3)
    machine.save_checkpoint(tmp_path / "cut.ckpt")
    with pytest.raises(DataError, match="global_batch 8, this run 4"):
        run(folder, 6, str(tmp_path / "cut.ckpt"), data={"batch_size": 4})
    with pytest.raises(DataError, match="seed 0, this run 5"):
        run(folder, 6, str(tmp_path / "cut.ckpt"), data={"seed": 5})


def test_overfit_batches_repeat(folder: Path) -> None:
    _, model = run(folder, 8, overfit_batches=2, val_check_interval=2)
    batches = [entry[3] for entry in model.seen if entry[0] == "train"]
    assert batches[0:2] == batches[2:4] == batches[6:8]


def test_the_strategy_says_which_rank(folder: Path) -> None:
    data = TokenDataModule(folder=str(folder), batch_size=2)
    data.prepare_data()
    data.setup()
    seen = []
    for rank in range(2):
        strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": 2})
        data.trainer = SimpleNamespace(strategy=strategy, limit_train_batches=1.0, overfit_batches=0)  # type: ignore[assignment]
        seen.append(next(iter(data.train_dataloader())))
    data.trainer = None
    data.batch_size = 4
    assert torch.equal(torch.cat(seen), next(iter(data.train_dataloader())))


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 1), (1, 7), (1, 32), (2, 4), (3, 5), (4, 16)])
def test_evaluation_sees_every_sequence_once(folder: Path, ranks: int, batch_size: int) -> None:
    """Ranks without a sequence left get a row that no loss counts."""
    data = TokenDataModule(folder=str(folder), batch_size=batch_size, sequence_length=64, val_sequences=13)
    data.prepare_data()
    data.setup()
    seen: dict[str, list[list[int]]] = {"val_dataloader": [], "test_dataloader": [], "predict_dataloader": []}
    dataset = TokenDataset(data.manifest, "val", 64)
    for rank in range(ranks):
        strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks})
        data.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
        for name, rows in seen.items():
            for batch in getattr(data, name)():
                rows += [row.tolist() for row in batch if not (row == FILLING).all()]
    everything = [dataset[block].tolist() for block in range(len(dataset))]
    assert sorted(seen["test_dataloader"]) == sorted(everything)
    chosen = sorted(everything[number * len(dataset) // 13] for number in range(13))
    assert sorted(seen["val_dataloader"]) == sorted(seen["predict_dataloader"]) == chosen


@pytest.mark.slow
def test_two_ranks_see_the_global_order_and_resume_it(folder: Path, tmp_path: Path) -> None:
    """2 gloo ranks of batch 4, DDP and FSDP2, with a worker, see what 1 rank of batch 8 sees.

    Each is cut in mid-epoch and at the epoch's end and continued on two ranks; then a cut of two is continued by one.
    """
    alone, epoch = [entry[3] for entry in run(folder, 20)[1].seen if entry[0] == "train"], batches_an_epoch(folder)
    assert epoch < 20
    arguments = [str(folder), str(tmp_path), str(epoch)]
    processes = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(Path(__file__).parents[1]), str(Path(darlit.__file__).parents[1])]
    for rank in "01":
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
        environment |= {"LOCAL_RANK": rank, "RANK": rank, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "PYTHONPATH": os.pathsep.join(paths)}
        processes.append(
            subprocess.Popen([sys.executable, "-m", "data.two_ranks", *arguments], env={**os.environ, **environment})
        )
    assert [process.wait(timeout=900) for process in processes] == [0, 0]
    ranks = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(2)]
    assert set(ranks[0]) == {f"{strategy} {cut}" for strategy in ("ddp", "fsdp2") for cut in (5, epoch)}
    for name, batches in ranks[0].items():
        together = [mine + others for mine, others in zip(batches, ranks[1][name], strict=True)]
        assert together == alone, name
    _, resumed = run(folder, 20, str(tmp_path / "ddp 5.ckpt"))
    assert [entry[3] for entry in resumed.seen if entry[0] == "train"] == alone[5:]


def start(folder: Path, **options: Any) -> None:
    data = TokenDataModule(folder=str(folder), **options)
    data.prepare_data()
    data.setup()
    data.train_dataloader()
    data.val_dataloader()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length 0 must be at least 1"),
        ({"sequence_length": 5000}, "sequence_length 5000: the longest"),
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"batch_size": 10**6}, "one batch needs 1000000"),
        ({"val_sequences": 10**6}, "val_sequences 1000000: .* lower it, or leave it out"),
        ({"num_workers": -1}, "num_workers -1 must be at least 0"),
        ({"tokenizer": "bpe"}, "prepared with tokenizer 'bytes', not 'bpe'"),
    ],
)
def test_bad_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        start(folder, **options)


def test_default_corpus_has_two_tokenizers() -> None:
    with pytest.raises(DataError, match="the default corpus has bytes and bpe"):
        TokenDataModule(tokenizer="gpt2")


def test_one_folder_serves_several_lengths(folder: Path) -> None:
    for length in (1, 64, 128, 999):
        data = TokenDataModule(folder=str(folder), sequence_length=length, batch_size=1)
        data.prepare_data()
        data.setup()
        for loader in (data.train_dataloader(), data.test_dataloader(), data.predict_dataloader()):
            assert next(iter(loader)).shape == (1, length + 1)


def test_bpe_bytes_per_token(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"the same few words again and again {number} " * 30)
    options = Options(tokenizer="bpe", vocab_size=300, val_fraction=0.3)
    manifest = prepare([str(tmp_path)], tmp_path / "out" / "data", options)
    data = TokenDataModule(folder=str(manifest.folder), sequence_length=8, batch_size=1)
    data.prepare_data()
    data.setup()
    assert manifest.bytes_per_token("val") > 1.5
    assert data.vocab_size <= 300
    texts = data.load_tokenizer().decode(next(iter(data.test_dataloader()))[0].tolist())
    assert b"words" in texts or b"again" in texts or b"same" in texts


def _texts(folder: Path, split: str) -> set[bytes]:
    manifest = open_manifest(folder)
    chunks = [
        np.fromfile(folder / split / chunk["file"], dtype=manifest.content["dtype"])[-chunk["tokens"] :]
        for chunk in manifest.split(split)["chunks"]
    ]
    tokens = np.concatenate(chunks)
    ends = np.flatnonzero(tokens == manifest.separator)
    return {bytes(document[document != manifest.separator].tolist()) for document in np.split(tokens, ends)[:-1]}


def test_settings_are_chosen_on_other_documents_than_they_are_reported_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default corpus: hold-out A of the screening, validation set B, and what each of the two trains on."""
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path))
    b_folder, a_folder = (prepare_default("bytes", holdout) for holdout in ("validation", "screening"))
    a, b = _texts(a_folder, "val"), _texts(b_folder, "val")
    screening, training = _texts(a_folder, "train"), _texts(b_folder, "train")
    assert len(a) > 10
    assert len(b) > 10
    assert not a & b
    assert not screening & (a | b)
    assert not training & b
    assert training == screening | a
    data = TokenDataModule(holdout="screening")
    data.prepare_data()
    data.setup()
    assert data.manifest.folder == a_folder
    assert data.fingerprint != open_manifest(b_folder).fingerprint


def test_the_holdout_belongs_to_the_default_corpus(folder: Path) -> None:
    with pytest.raises(DataError, match=r"of the default corpus; for texts of your own .* --val-start 0\.05"):
        TokenDataModule(folder=str(folder), holdout="screening")
    with pytest.raises(DarlitError, match="data.holdout='a' .* must be validation, screening"):
        TokenDataModule(holdout="a")  # type: ignore[arg-type]
