"""The LightningDataModule of prepared tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule

from darlit.data.chunks import CHUNK_TOKENS
from darlit.data.corpus import default_folder
from darlit.data.documents import DocumentPlace, documents_of_blocks
from darlit.data.errors import DataError
from darlit.data.loader import ResumableLoader, TokenDataset
from darlit.data.manifest import Manifest, open_manifest
from darlit.data.options import DataOptions, Holdout
from darlit.data.order import BatchOrder, EvaluationOrder
from darlit.data.tokenizers import Tokenizer
from darlit.data.verification import verify


def check_length(folder: str | None, tokenizer: str | None, holdout: Holdout, sequence_length: int) -> None:
    """Raise DataError for a sequence that the data cannot give, before a model of that length is built.

    A default corpus that is not prepared yet has chunks of the default size at most.
    """
    found = Path(folder) if folder is not None else default_folder(tokenizer or "bytes", holdout)
    if folder is not None or found.exists():
        open_manifest(found).check_length(sequence_length)
    elif sequence_length >= CHUNK_TOKENS:
        raise DataError(f"sequence_length {sequence_length}: the longest is {CHUNK_TOKENS - 1}; lower sequence_length")


class TokenDataModule(LightningDataModule):
    """Token blocks for language models. A batch is one int64 tensor ``tokens_BT1`` of shape
    ``[batch_size, sequence_length + 1]``: the model reads ``[:, :-1]`` and predicts ``[:, 1:]``.

    Training batches are always full. Under a trainer with ``max_steps`` they come as one epoch of the trainer, as long
    as the run, whatever the length of the corpus: a step is never cut by the end of an epoch. Evaluation yields every
    sequence once: its last batch may be shorter, and a rank that has no sequence left gets one row of -100, which
    counts in no loss.

    Args:
        folder: what ``darlit prepare`` wrote. Default: the Python standard library's sources, prepared in the
            cache folder (``$DARLIT_CACHE`` or ``~/.cache/darlit``) on first use.
        tokenizer: of the default corpus, ``bytes`` (default) or ``bpe``. With a folder, which has a tokenizer
            already, it is only compared.
        holdout: of the default corpus. ``validation`` is what results are reported on; ``screening`` holds out other
            documents, to choose settings on, and trains on neither.
        sequence_length: tokens the model sees; any length up to the folder's chunk size.
        batch_size: sequences a device and micro-batch.
        val_sequences: sequences of the validations of a fit, of ``validate`` and of ``predict``, over all devices,
            spread evenly over the validation split; default all. ``test`` always takes the complete split.
        num_workers: loader processes; 0 reads in the training process. Never changes the order.
        seed: order of the training sequences.
        verify: hash every file when the folder is new to this machine or has changed (``first_use``), in
            every run (``always``), or never (``sizes``). Sizes and the manifest are always checked.
    """

    def __init__(
        self,
        folder: str | None = None,
        tokenizer: str | None = None,
        holdout: Holdout = "validation",
        sequence_length: int = 128,
        batch_size: int = 16,
        val_sequences: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        verify: Literal["first_use", "always", "sizes"] = "first_use",
    ) -> None:
        super().__init__()
        DataOptions(
            folder=folder,
            tokenizer=tokenizer,
            holdout=holdout,
            sequence_length=sequence_length,
            batch_size=batch_size,
            val_sequences=val_sequences,
            num_workers=num_workers,
            seed=seed,
            verify=verify,
        )
        self.folder = folder
        self.tokenizer = tokenizer
        self.holdout = holdout
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_sequences = val_sequences
        self.num_workers = num_workers
        self.seed = seed
        self.verify = verify
        self._prepared = False
        self._manifest: Manifest | None = None
        self._train: ResumableLoader | None = None

    def prepare_data(self) -> None:
        """Prepare the default corpus where it is missing, and verify the folder, once. One process a machine."""
        if self._prepared:
            return
        if self.folder is None:
            from darlit.data.prepare import prepare_default

            prepare_default(self.tokenizer or "bytes", self.holdout, show_progress=True)
        verify(open_manifest(self.data_folder), self.verify)
        self._prepared = True

    def setup(self, stage: str | None = None) -> None:
        """Open the folder and check sizes, tokenizer and sequence length. Raises DataError."""
        manifest = open_manifest(self.data_folder)
        manifest.check_sizes()
        if self.tokenizer not in (None, manifest.content["tokenizer"]["name"]):
            raise DataError(
                f"{manifest.folder} was prepared with tokenizer {manifest.tokenizer_name!r}, not "
                f"{self.tokenizer!r}; leave the tokenizer out, or prepare another folder with it"
            )
        TokenDataset(manifest, "train", self.sequence_length)
        TokenDataset(manifest, "val", self.sequence_length)
        self._manifest = manifest

    @property
    def data_folder(self) -> Path:
        """The prepared folder in use."""
        if self.folder is not None:
            return Path(self.folder)
        return default_folder(self.tokenizer or "bytes", self.holdout)

    def identity(self) -> dict[str, Any]:
        """What the prepared data add to the identity of a run. Raises DataError where there are none."""
        manifest = open_manifest(self.data_folder)
        return {"data.fingerprint": manifest.fingerprint, "data.tokenizer": manifest.tokenizer_name}

    @property
    def manifest(self) -> Manifest:
        """The folder's manifest, after ``setup``."""
        if self._manifest is None:
            raise RuntimeError("the data is not set up; call prepare_data() and setup() first")
        return self._manifest

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.manifest.vocab_size

    @property
    def separator(self) -> int:
        """The token id that ends every document."""
        return self.manifest.separator

    @property
    def train_tokens(self) -> int:
        """Tokens of the training split: what one pass over the corpus is."""
        return int(self.manifest.split("train")["tokens"])

    def passes(self, tokens: int) -> float:
        """How often training on ``tokens`` tokens goes through the training split."""
        return tokens / self.train_tokens

    def token_bytes(self) -> np.ndarray:
        """Text bytes of every token id, int64 ``[vocab_size]``: bits per byte counts those of the scored targets."""
        return self.manifest.token_bytes()

    @property
    def fingerprint(self) -> str:
        """Equal for two folders exactly when training sees the same tokens in them."""
        return self.manifest.fingerprint

    @property
    def tokenizer_name(self) -> str:
        return self.manifest.tokenizer_name

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the folder, to turn text into ids and ids into text."""
        return self.manifest.tokenizer()

    def train_dataloader(self) -> ResumableLoader:
        dataset = TokenDataset(self.manifest, "train", self.sequence_length)
        order = BatchOrder(len(dataset), self.batch_size, *self._rank_of_ranks(), seed=self.seed)
        if (repeated := self._overfit_batches(len(order))) is not None:
            order = replace(order, seed=None, max_batches=repeated)
        self._train = self._loader(dataset, order, length=self._micro_batches_of_the_run())
        return self._train

    def val_dataloader(self) -> ResumableLoader:
        """``val_sequences`` of the validation split, the same in the same order every time."""
        return self._evaluation_loader(self.val_sequences)

    def test_dataloader(self) -> ResumableLoader:
        """The complete validation split: there is no other held-out data."""
        return self._evaluation_loader(None)

    def predict_dataloader(self) -> ResumableLoader:
        """The sequences of ``val_dataloader``."""
        return self._evaluation_loader(self.val_sequences)

    def documents_of_batch(self, back: int = 0) -> list[list[DocumentPlace]]:
        """Which documents the training batch holds that this rank was given last, by sequence.

        ``back`` asks for the batch so many before it.
        """
        if self._train is None or self._train.batches_given <= back:
            raise RuntimeError("there is no such training batch yet")
        blocks = self._train.blocks_of(self._train.batches_given - 1 - back)
        return documents_of_blocks(self.manifest, "train", self._train.dataset, blocks)

    def _evaluation_loader(self, sequences: int | None) -> ResumableLoader:
        dataset = TokenDataset(self.manifest, "val", self.sequence_length)
        if sequences is not None and sequences > len(dataset):
            raise DataError(
                f"val_sequences {sequences}: {dataset.folder} has {len(dataset)} of length {self.sequence_length}; "
                "lower it, or leave it out to use them all"
            )
        return self._loader(
            dataset, EvaluationOrder(len(dataset), self.batch_size, *self._rank_of_ranks(), take=sequences)
        )

    def _loader(
        self, dataset: TokenDataset, order: BatchOrder | EvaluationOrder, length: int | None = None
    ) -> ResumableLoader:
        return ResumableLoader(
            dataset,
            order,
            {"fingerprint": self.fingerprint},
            length=length,
            num_workers=self.num_workers,
            pin_memory=self._on_cuda(),
        )

    def _rank_of_ranks(self) -> tuple[int, int]:
        """This process's data-parallel rank and their number."""
        strategy: Any = getattr(self.trainer, "strategy", None)
        ranks = getattr(strategy, "distributed_sampler_kwargs", None)  # parallel strategies have it
        return (ranks["rank"], ranks["num_replicas"]) if ranks else (0, 1)

    def _micro_batches_of_the_run(self) -> int | None:
        """Training batches of this rank until ``max_steps``; None for a trainer that counts epochs instead."""
        steps = getattr(self.trainer, "max_steps", -1)
        return steps * self.trainer.accumulate_grad_batches if self.trainer and steps > 0 else None

    def _overfit_batches(self, batches: int) -> int | None:
        """How many batches the trainer wants to see again in every epoch, if it does."""
        wanted = getattr(self.trainer, "overfit_batches", 0)
        if not wanted:
            return None
        return max(1, int(batches * wanted)) if isinstance(wanted, float) else int(wanted)

    def _on_cuda(self) -> bool:
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return device is not None and device.type == "cuda"
