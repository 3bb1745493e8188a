"""A step is always `accumulation` micro-batches, wherever epochs of the data end; counted, timed and logged once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from cells import BATCH_TOKENS, INTERRUPTED, STEPS, fit, interrupt_after, run_folder, summary, weights, write_cell
from darlit.data.loader import ResumableLoader, TokenDataset
from darlit.data.manifest import open_manifest
from darlit.data.order import BatchOrder
from darlit.errors import DarlitError
from darlit.grid.summary import read_summary
from darlit.modules import LanguageModule

ACCUMULATION = 4
EPOCH = 19


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape(folder: Path, epoch: int) -> tuple[int, int]:
    """A sequence length and a batch size with which an epoch of the data has this many batches."""
    manifest = open_manifest(folder)
    for length in range(32, 200):
        blocks = len(TokenDataset(manifest, "train", length))
        for batch in range(max(1, blocks // (epoch + 1)), blocks // epoch + 1):
            if blocks // batch == epoch:
                return length, batch
    raise AssertionError(f"no shape gives {epoch} batches")


def write_accumulating(folder: Path, data_folder: Path, epoch: int, **changes: Any) -> Path:
    length, batch = shape(data_folder, epoch)
    tokens = ACCUMULATION * length * batch
    budget = {"budget__tokens": STEPS * tokens, "budget__batch_tokens": tokens}
    data = {"data__sequence_length": length, "data__batch_size": batch, "data__val_sequences": 3}
    return write_cell(folder, data_folder, "residual", **{**budget, **data, **changes})


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So small that 20 steps of four micro-batches are several epochs."""
    from darlit.data.prepare import Options, prepare

    sources = tmp_path_factory.mktemp("sources")
    for number in range(16):
        lines = [f"def function_{number}_{i}(x):\n    return x * {i} + {number * i % 97}\n" for i in range(12)]
        (sources / f"module_{number:02}.txt").write_text("\n".join(lines))
    out = tmp_path_factory.mktemp("data") / "corpus"
    prepare([str(sources)], out, Options(val_fraction=0.2))
    return out


@pytest.fixture(scope="module")
def straight(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, Tensor]]]:
    """The run folder of 20 uninterrupted steps, and (steps before it, tokens) of every micro-batch."""
    cell = write_accumulating(tmp_path_factory.mktemp("straight"), small_data, EPOCH)
    seen: list[tuple[int, Tensor]] = []
    original = LanguageModule.training_step

    def noting(self: LanguageModule, tokens: Tensor, batch_idx: int) -> Any:
        seen.append((self.global_step, tokens))
        return original(self, tokens, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModule, "training_step", noting)
        assert fit(cell) == 0
    return run_folder(cell), seen


def test_every_step_has_its_micro_batches_over_the_ends_of_epochs(straight: Any, small_data: Path) -> None:
    """20 steps of accumulation 4 over epochs of 19 micro-batches: 80, in the order of the epochs, none left out."""
    run, seen = straight
    assert [step for step, _ in seen] == [number // ACCUMULATION for number in range(STEPS * ACCUMULATION)]
    length, batch = shape(small_data, EPOCH)
    dataset = TokenDataset(open_manifest(small_data), "train", length)
    order = BatchOrder(len(dataset), batch, seed=0)
    assert len(order) == EPOCH
    expected = [blocks for epoch in range(5) for blocks in order.epoch(epoch)]
    for (_, tokens), blocks in zip(seen, expected, strict=False):
        assert torch.equal(tokens, dataset.__getitems__(list(blocks)))
    done = summary(run)
    assert done["tokens_seen"] == sum(tokens[:, 1:].numel() for _, tokens in seen) == done["budget"]["tokens"]
    assert done["curve"]["val"]["step"] == [5, 10, 15, 20]
    assert done["val_loss_final"] == done["curve"]["val"]["loss"][-1]
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == STEPS


@pytest.mark.parametrize(("cut", "workers"), [(4, 0), (5, 2), (14, 0), (19, 1)])
def test_an_accumulated_run_resumes_bitwise_around_the_ends_of_epochs(
    straight: Any, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, workers: int
) -> None:
    """Step 5 holds the first epoch's end, 19 ends together with the fourth; 5 is a validation too."""
    cell = write_accumulating(tmp_path, small_data, EPOCH, data__num_workers=workers)
    with monkeypatch.context() as patch:
        interrupt_after(patch, cut)
        assert fit(cell) == INTERRUPTED
    assert fit(cell, "--ckpt_path", "last") == 0
    for name, value in weights(straight[0]).items():
        assert torch.equal(weights(run_folder(cell))[name], value), name
    expected, actual = summary(straight[0]), summary(run_folder(cell))
    assert actual["curve"]["train"] == expected["curve"]["train"]
    assert actual["curve"]["val"]["loss"] == expected["curve"]["val"]["loss"]
    assert actual["tokens_seen"] == expected["tokens_seen"]


def test_a_step_may_be_longer_than_an_epoch(tmp_path: Path, small_data: Path) -> None:
    cell = write_accumulating(tmp_path, small_data, epoch=3, budget__validation_interval=8)
    assert fit(cell) == 0
    done = summary(run_folder(cell))
    assert done["curve"]["val"]["step"] == [8, 16, 20]
    assert done["tokens_seen"] == done["budget"]["tokens"]
    assert done["passes"] == done["tokens_seen"] / done["data"]["train_tokens"] > 15


def test_passes_over_the_corpus_are_said_before_and_after(
    straight: Any, small_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    tokens = open_manifest(small_data).split("train")["tokens"]
    done = summary(straight[0])
    assert done["data"]["train_tokens"] == tokens
    assert done["passes"] == pytest.approx(done["budget"]["tokens"] / tokens)
    assert 3.5 < done["passes"] < 4.5
    caplog.set_level("INFO", logger="lightning.pytorch")
    assert fit(write_accumulating(tmp_path, small_data, EPOCH)) == 0
    assert f"{done['passes']:.2f} passes over the corpus of {tokens:,}" in caplog.text


def test_tensorboard_shows_the_mean_of_a_step_under_its_number(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    original = LanguageModule.training_step

    def noting(self: LanguageModule, tokens: Tensor, batch_idx: int) -> Any:
        outputs = original(self, tokens, batch_idx)
        losses.append(float(outputs["cross_entropy"]))
        return outputs

    monkeypatch.setattr(LanguageModule, "training_step", noting)
    cell = write_accumulating(tmp_path, small_data, EPOCH)
    assert fit(cell) == 0
    means = torch.tensor(losses).view(STEPS, ACCUMULATION).mean(1).tolist()
    events = EventAccumulator(str(run_folder(cell)))
    events.Reload()
    done = summary(run_folder(cell))
    logged = events.Scalars("train/loss")
    assert [event.step for event in logged] == done["curve"]["train"]["step"] == list(range(1, STEPS + 1))
    assert [event.value for event in logged] == pytest.approx(means)
    assert done["curve"]["train"]["loss"] == pytest.approx(means)
    assert [event.step for event in events.Scalars("val/loss")] == done["curve"]["val"]["step"]
    batch_tokens = done["budget"]["batch_tokens"]
    assert [event.value for event in events.Scalars("train/tokens")] == [batch_tokens * n for n in range(1, STEPS + 1)]
    passes = {event.step: event.value for event in events.Scalars("epoch")}
    assert passes[STEPS] == pytest.approx(done["passes"])


@pytest.mark.parametrize("clock", ["wall", "process"])
@pytest.mark.usefixtures("one_thread")
def test_waiting_counts_in_wall_time_alone(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    """A sleep stands for waiting on a busy machine: wall time whatever else runs, and next to no CPU time."""
    original = LanguageModule.training_step

    def waiting(self: LanguageModule, *arguments: object) -> object:
        time.sleep(0.3)
        return original(self, *arguments)

    monkeypatch.setattr(LanguageModule, "training_step", waiting)
    experiment = write_cell(tmp_path, data_folder, budget__tokens=6 * BATCH_TOKENS, budget__validation_interval=4)
    assert fit(experiment, f"--throughput.clock={clock}") == 0
    record = read_summary(run_folder(experiment) / "summary.json")
    seconds = record["curve"]["val"]["seconds"]
    assert record["clock"] == clock
    assert len(seconds) == 2
    assert 0 < seconds[0] < seconds[1]
    assert record["tokens_per_second"] == pytest.approx(3 * BATCH_TOKENS / seconds[1])
    assert (record["step_time_median_s"] >= 0.3) == (clock == "wall")


def test_waiting_for_data_counts_as_time_and_is_shown_apart(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TokenDataset.__getitems__

    def slow(self: TokenDataset, blocks: list[int]) -> Tensor:
        time.sleep(0.2)
        return original(self, blocks)

    monkeypatch.setattr(TokenDataset, "__getitems__", slow)
    experiment = write_cell(tmp_path, data_folder, budget__tokens=6 * BATCH_TOKENS, data__val_sequences=8)
    assert fit(experiment) == 0
    done = summary(run_folder(experiment))
    seconds_a_step = BATCH_TOKENS / done["tokens_per_second"]
    assert seconds_a_step >= 0.2
    assert done["loader_share"] * seconds_a_step >= 0.2


def test_the_first_batch_after_a_validation_counts_what_it_waited(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a validation after every step every step begins after a pause."""
    original = ResumableLoader.__iter__

    def slow(self: ResumableLoader) -> Iterator[Tensor]:
        for tokens in original(self):
            self.seconds_waited += 100.0
            yield tokens

    monkeypatch.setattr(ResumableLoader, "__iter__", slow)
    steps = {"budget__tokens": 6 * BATCH_TOKENS, "budget__validation_interval": 1, "data__val_sequences": 8}
    experiment = write_cell(tmp_path, data_folder, **steps)
    assert fit(experiment) == 0
    done = summary(run_folder(experiment))
    assert 100 <= done["step_time_median_s"] < 150
    assert 0.6 < done["loader_share"] <= 1


def test_process_time_is_refused_with_more_threads(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    experiment = write_cell(tmp_path, data_folder, throughput__clock="process")
    with pytest.raises(
        DarlitError, match=r"clock=process .* one thread; here are 1 on cpu with 2: set OMP_NUM_THREADS=1"
    ):
        fit(experiment)
    assert not (run_folder(experiment) / "summary.json").exists()


@pytest.mark.usefixtures("one_thread")
def test_a_run_keeps_its_clock(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = write_cell(tmp_path, data_folder, throughput__clock="process")
    with monkeypatch.context() as patch:
        interrupt_after(patch, step=7)
        assert fit(experiment) == 75
    with pytest.raises(DarlitError, match="timed with throughput.clock=process, now it is wall"):
        fit(experiment, "--ckpt_path=last", "--throughput.clock=wall")
    assert fit(experiment, "--ckpt_path=last") == 0
    assert summary(run_folder(experiment))["tokens_seen"] == STEPS * BATCH_TOKENS
