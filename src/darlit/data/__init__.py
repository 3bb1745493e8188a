"""From texts to batches: tokenizers, preparation into litdata chunks, a resumable loader, the DataModule.

Importing this package prepares, downloads and imports nothing heavy: take names from its modules
(``from darlit.data.datamodule import TokenDataModule``, ``from darlit.data.prepare import prepare``).
"""

LOSSY = " (lossy)"
"""Follows the name of a tokenizer that did not keep all of the texts, in summaries and tables."""
