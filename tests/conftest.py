"""What all tests share: an own cache, and a small prepared data folder."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 kB of made-up code as bytes, prepared once for the whole session."""
    from darlit.data.prepare import Options, prepare

    sources = tmp_path_factory.mktemp("sources")
    for number in range(60):
        lines = [f"def function_{number}_{i}(x):\n    return x * {i} + {number * i % 97}\n" for i in range(20)]
        (sources / f"module_{number:02}.txt").write_text("\n".join(lines))
    out = tmp_path_factory.mktemp("data") / "corpus"
    prepare([str(sources)], out, Options(val_fraction=0.2))
    return out


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache."""
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Every test finds the handlers of a process started in a terminal, whatever ran before it or started the tests."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def dar_run(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a trained micro DAR model; tests that change it work on a copy."""
    from trained import train

    return train(tmp_path_factory.mktemp("dar"), data_folder, "dar_full")


@pytest.fixture(scope="session")
def residual_run(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a trained micro residual model."""
    from trained import train

    return train(tmp_path_factory.mktemp("residual"), data_folder, "residual")
