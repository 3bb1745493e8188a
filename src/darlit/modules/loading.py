"""Saved models: from a checkpoint, a run folder or an exported file back to the module that was trained.

Nothing here runs code from a file: checkpoints are read as plain tensors and values, exported files are safetensors.
The only module that is imported for a model is the one that the run's ``config.yaml`` names as ``class_path``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from torch import Tensor

from darlit import sharded_checkpoint, values
from darlit.checkpoint_io import find, read_checkpoint
from darlit.errors import DarlitError
from darlit.experiment import inner
from darlit.modules.arms import known_modules
from darlit.modules.exported import EXPORT_SUFFIX, read_export
from darlit.modules.language_module import LanguageModule
from darlit.run import RunFolder, difference
from darlit.settings import class_of

if TYPE_CHECKING:
    from darlit.data.manifest import Manifest
    from darlit.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class SavedModel:
    """A rebuilt model, and what its file and its run folder say about it."""

    module: LanguageModule
    """On the CPU, in evaluation mode."""
    path: Path
    """The file or folder that the weights come from."""
    step: int
    """Optimiser steps it was trained for."""
    tokenizer_description: dict[str, Any]
    """Kind, name, sha256, vocabulary and separator of the tokenizer it was trained with; empty: not known."""
    tokenizer_definition: str | None = None
    """Content of a ``tokenizer.json``, where the file carries it."""
    cell: str | None = None
    """Name of the run, where the file carries it."""
    run: dict[str, Any] = field(default_factory=dict)
    """The run's config.yaml; empty where there is none."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What the run was trained as (`darlit.run`); empty where the file does not say."""

    @property
    def name(self) -> str:
        """The run's cell, or the file's name."""
        return str(self.cell or self.run.get("cell") or self.path.stem)

    def manifest(self, data_folder: str | Path | None = None) -> Manifest:
        """The prepared data at ``data_folder``, by default those that the run was trained on.

        Raises:
            DarlitError: no such data, or data of another vocabulary.
        """
        from darlit.data.datamodule import TokenDataModule
        from darlit.data.manifest import open_manifest
        from darlit.data.verification import verify

        if data_folder is not None:
            manifest = open_manifest(data_folder)
            verify(manifest, "first_use")
        elif "data" not in self.run:
            raise DarlitError(
                f"{self.path} does not say which data it was trained on (it lies in no run folder); "
                "name the data with --data FOLDER"
            )
        else:
            recorded = self.run["data"]
            data = TokenDataModule(**{name: recorded[name] for name in ("folder", "tokenizer", "holdout")})
            data.prepare_data()
            check_data(self.identity, data.identity(), str(self.path))
            manifest = open_manifest(data.data_folder)
        manifest.check_sizes()
        described = manifest.content["tokenizer"]
        self._check(f"the data in {manifest.folder}", described["name"], described["sha256"], manifest.vocab_size)
        return manifest

    def tokenizer(self, given: str | None = None) -> Tokenizer:
        """The tokenizer that ``given`` names (``bytes`` or a tokenizer.json), by default the one it was trained with.

        Raises:
            DarlitError: none is to be found, or it is another one than the model was trained with.
        """
        from darlit.data.tokenizers import ByteTokenizer, SubwordTokenizer, load_tokenizer

        described = self.tokenizer_description
        if given is not None:
            tokenizer = load_tokenizer(given, described.get("separator_token"))
        elif self.tokenizer_definition is not None:
            tokenizer = SubwordTokenizer(self.tokenizer_definition, described["name"], described.get("separator_token"))
        elif described.get("kind") == "bytes":
            tokenizer = ByteTokenizer()
        else:
            tokenizer = self._tokenizer_of_data()
        self._check(f"tokenizer {given or tokenizer.name!r}", tokenizer.name, tokenizer.sha256, tokenizer.vocab_size)
        return tokenizer

    def _tokenizer_of_data(self) -> Tokenizer:
        remedy = "name it with --tokenizer bytes or --tokenizer FILE/tokenizer.json"
        if "data" not in self.run:
            raise DarlitError(f"{self.path} comes without a tokenizer; {remedy}")
        try:
            return self.manifest().tokenizer()
        except (DarlitError, OSError) as error:
            raise DarlitError(f"the tokenizer of {self.path} is not to be found ({error}); {remedy}") from error

    def _check(self, what: str, name: str, sha256: str, vocab_size: int) -> None:
        """Refuse another vocabulary than the one that the weights know."""
        rows = self.module.backbone.rows
        if vocab_size > rows:
            raise DarlitError(
                f"{what} has {vocab_size} token ids, {self.path} has backbone.vocab_size={rows}: another vocabulary; "
                "give the tokenizer or the data that it was trained with"
            )
        trained = self.tokenizer_description
        if trained and trained["sha256"] != sha256:
            raise DarlitError(
                f"{what} has the vocabulary of {name!r} (sha256 {sha256[:12]}), {self.path} was trained with "
                f"{trained['name']!r} (sha256 {trained['sha256'][:12]}); give the tokenizer or the data of that one"
            )


def load(path: str | Path) -> SavedModel:
    """Rebuild the model of a checkpoint, a run folder (its ``last.ckpt``) or a file that darlit export wrote.

    A checkpoint is a file or, from a sharded run, a folder, which this one process puts together.

    Raises:
        DarlitError: no such file, a damaged one, one that would run code, or one of an unknown architecture.
    """
    path = _checkpoint_file(Path(path))
    if path.suffix == EXPORT_SUFFIX:
        export = read_export(path)
        saved = export.saved
        module = _rebuild(_variant(saved["pathway"], path), saved["hyper_parameters"], export.weights, path)
        return SavedModel(
            module,
            path,
            saved["step"],
            saved["tokenizer"] or {},
            saved["tokenizer_definition"],
            saved["cell"],
            identity=saved["identity"],
        )
    checkpoint = read_checkpoint(path, with_weights=True)
    weights = {
        name.removeprefix("transformer."): tensor
        for name, tensor in checkpoint["state_dict"].items()
        if name.startswith("transformer.")
    }
    run = _run_config(path)
    variant = _variant(checkpoint["darlit"]["pathway"], path, run)
    module = _rebuild(variant, checkpoint["hyper_parameters"], weights, path)
    described = checkpoint["darlit"].get("tokenizer") or {}
    return SavedModel(
        module,
        path,
        checkpoint["global_step"],
        described,
        run=run,
        identity=checkpoint.get("identity", {}),
    )


def check_data(identity: Mapping[str, Any], data: Mapping[str, Any], where: str) -> None:
    """Refuse other data than a run was trained on: what it trained on may be what they hold out.

    Args:
        identity: of the run; without a fingerprint, nothing is compared.
        data: identity of the data at hand (`TokenDataModule.identity`).
        where: the checkpoint, for the error.

    Raises:
        DarlitError: another fingerprint.
    """
    name = "data.fingerprint"
    if name in identity and identity[name] != data[name]:
        raise DarlitError(
            f"{where} was trained with {difference({name: identity[name]}, {name: data[name]})}: other data, or "
            "another split of them; give data.folder and data.holdout as they were, or prepare the data again as then"
        )


def variant_of(checkpoint: Path) -> type[LanguageModule]:
    """Return the class that a checkpoint was trained as.

    Raises:
        DarlitError: a file that is missing, damaged or not darlit's, or a class that cannot be imported.
    """
    path = _checkpoint_file(checkpoint)
    return _variant(read_checkpoint(path)["darlit"]["pathway"], path, _run_config(path))


def _checkpoint_file(path: Path) -> Path:
    allowed = f"give a run folder, a checkpoint, or a {EXPORT_SUFFIX} file that darlit export wrote"
    if path.is_dir() and not sharded_checkpoint.is_sharded(path):
        last = find(RunFolder(path).checkpoint("last"))
        if last is None:
            raise DarlitError(f"{path} is not a run folder (it has no checkpoints/last.ckpt); {allowed}")
        return last
    if not path.exists():
        raise DarlitError(f"{path} does not exist; {allowed}")
    return path


def _run_config(checkpoint: Path) -> dict[str, Any]:
    run = RunFolder(checkpoint.parent.parent)
    path = run.config
    if checkpoint.parent != run.checkpoints or not path.is_file():
        return {}
    try:
        config = values.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, DarlitError) as error:
        raise DarlitError(f"{path}: not a readable config.yaml ({' '.join(str(error).split())})") from error
    if not isinstance(config, dict):
        raise DarlitError(f"{path}: not the config.yaml that darlit fit wrote; copy the run folder again")
    return config


def _variant(pathway: str, where: Path, run: dict[str, Any] | None = None) -> type[LanguageModule]:
    """The class of a saved model: the one that its run's config.yaml names, else the known one with this pathway."""
    class_path = inner(run or {}, "model").get("class_path")
    arms = {module.pathway_name: module for module in known_modules()}
    variant: Any = class_of(str(class_path)) if class_path else ""
    if not isinstance(variant, str):
        if variant.pathway_name != pathway:
            raise DarlitError(
                f"{where} has pathway {pathway!r}, {class_path} of its config.yaml has {variant.pathway_name!r}; "
                "restore the class that it was trained with"
            )
        return cast(type[LanguageModule], variant)
    if pathway not in arms:
        raise DarlitError(
            f"{where} has pathway {pathway!r}, this darlit has {', '.join(sorted(arms))}; "
            "name its class: --class-path my_module.MyLM"
        )
    return arms[pathway]


def _rebuild(
    variant: type[LanguageModule], hyper_parameters: dict[str, Any], weights: dict[str, Tensor], where: Path
) -> LanguageModule:
    try:
        # A variant's own parameters have defaults and take the plain dictionaries of a checkpoint.
        module = variant(**hyper_parameters)
        module.transformer.load_state_dict(weights)
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DarlitError(f"{where} is of another darlit version, its model cannot be rebuilt ({reason})") from error
    return module.eval()
