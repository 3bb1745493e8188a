"""What a run may ask of its data, checked without Lightning: the arguments of `darlit.data.datamodule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from darlit.data.errors import DataError
from darlit.fields import check_fields

Holdout = Literal["validation", "screening"]
"""What the default corpus holds out of training: the documents that results are reported on, or others, to choose
settings on, with those of the first left out altogether."""


@dataclass(frozen=True)
class DataOptions:
    """The arguments of `TokenDataModule`, which documents them; a test keeps the two equal."""

    folder: str | None = None
    tokenizer: str | None = None
    holdout: Holdout = "validation"
    sequence_length: int = 128
    batch_size: int = 16
    val_sequences: int | None = None
    num_workers: int = 0
    seed: int = 0
    verify: Literal["first_use", "always", "sizes"] = "first_use"

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        for name, lowest in (
            ("sequence_length", 1),
            ("batch_size", 1),
            ("val_sequences", 1),
            ("num_workers", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise DataError(f"{name} {value} must be at least {lowest}")
        if self.folder is None and self.tokenizer not in (None, "bytes", "bpe"):
            raise DataError(
                f"tokenizer {self.tokenizer!r}: the default corpus has bytes and bpe; for another one type "
                "darlit prepare SOURCE --out FOLDER --tokenizer ... and give the folder"
            )
        if self.folder is not None and self.holdout != "validation":
            raise DataError(
                f"holdout {self.holdout!r} is of the default corpus; for texts of your own prepare a second folder: "
                "darlit prepare SOURCE --out FOLDER --val-start 0.05"
            )
