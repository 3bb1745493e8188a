"""Exact resume: the rest of an epoch and the epochs after it are the same, wherever the run was cut."""

from __future__ import annotations

import pickle
import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from darlit.data.errors import DataError
from darlit.data.loader import ResumableLoader, TokenDataset
from darlit.data.manifest import Manifest
from darlit.data.order import BatchOrder

LENGTH, BATCH = 64, 4


def make(
    prepared: Manifest,
    *,
    rank: int = 0,
    ranks: int = 1,
    batch: int = BATCH,
    length: int = LENGTH,
    iteration: int | None = None,
    **options: Any,
) -> ResumableLoader:
    dataset = TokenDataset(prepared, "train", length)
    order = BatchOrder(len(dataset), batch, rank, ranks, seed=7, max_batches=options.pop("max_batches", None))
    return ResumableLoader(dataset, order, {"fingerprint": prepared.fingerprint}, length=iteration, **options)


def take(loader: ResumableLoader, batches: int) -> list[torch.Tensor]:
    """The next batches, over as many epochs as it needs."""
    taken: list[torch.Tensor] = []
    while len(taken) < batches:
        taken.extend(islice(loader, batches - len(taken)))
    return taken


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def straight(prepared: Manifest) -> list[torch.Tensor]:
    loader = make(prepared)
    assert len(loader) > 20
    return take(loader, 3 * len(loader))


def test_batches(prepared: Manifest, straight: list[torch.Tensor]) -> None:
    assert straight[0].shape == (BATCH, LENGTH + 1)
    assert straight[0].dtype == torch.int64
    size = len(make(prepared))
    assert not torch.equal(straight[0], straight[size])  # another epoch, another order


def test_blocks_are_the_stream(prepared: Manifest) -> None:
    """Blocks follow each other without overlap inside a chunk; what a chunk has left over is not used."""
    import numpy as np

    dataset = TokenDataset(prepared, "train", LENGTH)
    stream = np.concatenate(
        [
            np.fromfile(prepared.folder / "train" / chunk["file"], dtype="<u2", offset=12)
            for chunk in prepared.split("train")["chunks"]
        ]
    )
    for block in range(len(dataset)):
        first = dataset.first_token(block)
        assert dataset[block].tolist() == stream[first : first + LENGTH + 1].tolist()
    assert len(dataset) == sum(c["tokens"] // (LENGTH + 1) for c in prepared.split("train")["chunks"])


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "iteration": 10**6}],
    ids=["0", "1", "2", "2-endless"],
)
def test_workers_change_nothing(prepared: Manifest, straight: list[torch.Tensor], options: dict[str, Any]) -> None:
    size = len(make(prepared))
    assert_same(take(make(prepared, **options), 2 * size + 3), straight[: 2 * size + 3])


def check_cut(
    prepared: Manifest, straight: list[torch.Tensor], cut: int, before: dict[str, Any], after: dict[str, Any]
) -> None:
    first = make(prepared, **before)
    taken = take(first, cut)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = make(prepared, **after)
    second.load_state_dict(state)
    assert_same(taken + take(second, len(straight) - cut), straight)


def test_resume_at_many_cuts(prepared: Manifest, straight: list[torch.Tensor]) -> None:
    size = len(make(prepared))
    boundaries = {0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}
    for cut in sorted(boundaries | set(range(5, len(straight), 13))):
        check_cut(prepared, straight, cut, {}, {})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_workers": 2}, {"num_workers": 2}),
        ({"num_workers": 2, "iteration": 10**6}, {"num_workers": 2, "iteration": 10**6}),
        ({"num_workers": 2}, {"num_workers": 0}),
        ({}, {"num_workers": 1}),
    ],
    ids=["2-2", "endless", "2-0", "0-1"],
)
def test_resume_with_workers(
    prepared: Manifest, straight: list[torch.Tensor], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Mid-epoch and at the boundary, with workers, the same or another number after it."""
    size = len(make(prepared))
    for cut in (1, size - 1, size, size + 3):
        check_cut(prepared, straight[: 2 * size + 2], cut, before, after)


@pytest.mark.slow
def test_200_random_cuts(prepared: Manifest) -> None:
    """Random (step, workers, length, ranks) before and after, against one uninterrupted single-rank run."""
    generator = random.Random(0)
    size = len(make(prepared, length=249))
    assert 15 < size < 40
    straight = take(make(prepared, length=249), 3 * size)

    def run(ranks: int, workers: tuple[int, int | None], state: Any, batches: int) -> tuple[list[torch.Tensor], Any]:
        """The global batches of so many ranks, and the place that all of them save."""
        rows, states = [], []
        for rank in range(ranks):
            place = {"rank": rank, "ranks": ranks, "batch": BATCH // ranks, "length": 249}
            loader = make(prepared, **place, num_workers=workers[0], iteration=workers[1])
            if state is not None:
                loader.load_state_dict(state)
            rows.append(take(loader, batches))
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states)
        return [torch.cat(row) for row in zip(*rows, strict=True)], states[0]

    seen = set()
    while len(seen) < 200:
        cut, (ranks_before, ranks_after) = generator.randrange(2 * size + 1), generator.choices((1, 2, 4), k=2)
        kinds = [(0, None), (1, None), (2, None), (2, 10 * size)]
        before, after = generator.choices(kinds, weights=(5, 1, 1, 1), k=2)
        seen.add((cut, ranks_before, ranks_after, before, after))
        taken, state = run(ranks_before, before, None, cut)
        resumed, _ = run(ranks_after, after, pickle.loads(pickle.dumps(state)), size)
        assert_same(taken + resumed, straight[: cut + size])


def test_an_iteration_left_early_skips_nothing(prepared: Manifest, straight: list[torch.Tensor]) -> None:
    """Each iteration continues where the last one stopped, resumed or not."""
    size, limit = len(make(prepared)), 11
    for cut in (0, 3, limit, limit + 1, 8 * limit, 9 * limit - 2):
        loader = make(prepared)
        taken: list[torch.Tensor] = []
        while len(taken) < size + 2 * limit:
            if len(taken) <= cut < len(taken) + limit:
                taken.extend(islice(loader, cut - len(taken)))
                state, loader = loader.state_dict(), make(prepared)
                loader.load_state_dict(state)
                taken.extend(islice(loader, limit - cut % limit))
            else:
                taken.extend(islice(loader, limit))
        assert_same(taken, straight[: len(taken)])


def test_an_iteration_has_the_length_of_the_loader(prepared: Manifest) -> None:
    loader = make(prepared)
    assert len(list(loader)) == len(loader)
    take(loader, 5)
    assert len(list(loader)) == len(loader) - 5
    take(loader, 5)
    resumed = make(prepared)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == len(loader) - 5
    assert len(list(resumed)) == len(loader)


def test_an_iteration_may_span_epochs(prepared: Manifest, straight: list[torch.Tensor]) -> None:
    """The run as one epoch of the trainer: cut anywhere, the rest of it follows."""
    size = len(make(prepared))
    length = 2 * size + 7
    assert_same(list(make(prepared, iteration=length)), straight[:length])
    for cut in (1, size - 1, size, size + 1, 2 * size, length - 1):
        loader = make(prepared, iteration=length)
        taken = list(islice(loader, cut))
        resumed = make(prepared, iteration=length)
        resumed.load_state_dict(loader.state_dict())
        assert_same(taken + list(resumed), straight[:length])


def test_what_is_waited_for_is_counted(prepared: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("darlit.data.loader.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    loader = make(prepared)
    take(loader, 4)
    assert loader.seconds_waited == 4 * 3.0  # from each request to its batch, not from batch to request


def test_iterators_made_and_dropped_move_nothing(prepared: Manifest, straight: list[torch.Tensor]) -> None:
    """Lightning makes an iterator for a finished epoch when it resumes, and does not use it."""
    loader = make(prepared)
    iter(loader)
    assert_same(take(loader, 3), straight[:3])
    resumed = make(prepared)
    resumed.load_state_dict(loader.state_dict())
    iter(resumed)
    iter(resumed)
    assert_same(take(resumed, 5), straight[3:8])


def test_two_iterators_at_once_are_refused(prepared: Manifest) -> None:
    loader = make(prepared)
    one = iter(loader)
    next(one)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="iterated again"):
        next(one)


def test_global_random_state_is_untouched(prepared: Manifest) -> None:
    """Dropout and initialisation do not depend on how often data was iterated."""
    before = torch.get_rng_state()
    take(make(prepared, num_workers=1), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0"}, "fingerprint .* give the same data folder"),
        ({"seed": 8}, "seed 8, this run 7; set seed as it was"),
        ({"sequence_length": 32}, "sequence_length 32, this run 64"),
        ({"global_batch": 8}, "keep ranks x batch_size the same"),
    ],
)
def test_refuses_a_place_without_meaning(prepared: Manifest, change: dict[str, Any], message: str) -> None:
    loader = make(prepared)
    state = loader.state_dict()
    state["identity"].update(change)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict(state)


@pytest.mark.parametrize("length", [0, 1000, 10**6])
def test_sequence_longer_than_the_data(prepared: Manifest, length: int) -> None:
    with pytest.raises(DataError, match=f"sequence_length {length}: the longest .* is 999 and the shortest 1"):
        TokenDataset(prepared, "train", length)


def test_longest_sequence(prepared: Manifest) -> None:
    dataset = TokenDataset(prepared, "train", 999)
    assert dataset[len(dataset) - 1].shape == (1000,)


def test_dataset_pickles_for_spawned_workers(prepared: Manifest) -> None:
    dataset = TokenDataset(prepared, "train", LENGTH)
    first = dataset[0]
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[0], first)
