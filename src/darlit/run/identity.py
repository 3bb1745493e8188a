"""The identity of a run: the resolved configuration without what may differ, its data, its seed and its budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from darlit.catalog import PATHWAYS
from darlit.errors import DarlitError

SCHEMA_VERSION = 2
"""Of ``summary.json``; version 1 had no identity."""

MAY_DIFFER = {
    "cell": "names the folder",
    "runs_dir": "where the folder lies",
    "overwrite": "what to do with an earlier run of the folder",
    "ckpt_path": "where to continue from; a run that continues another one says so in continued_from",
    "weights_only": "how a checkpoint is read; darlit reads plain tensors and values in any case",
    "trainer.accelerator": "where it runs",
    "trainer.devices": "where it runs; data.batch_size is compared as sequences over all devices",
    "trainer.num_nodes": "where it runs",
    "trainer.strategy": "where it runs, in one piece or in shards",
    "trainer.logger": "logging",
    "trainer.log_every_n_steps": "logging; the spacing of the training curve",
    "trainer.enable_autolog_hparams": "logging",
    "trainer.model_registry": "logging",
    "trainer.callbacks": "what watches a run",
    "trainer.enable_progress_bar": "what is printed",
    "trainer.enable_model_summary": "what is printed",
    "trainer.profiler": "measures time",
    "trainer.detect_anomaly": "looks for NaN",
    "trainer.deterministic": "which kernels run: rounding only",
    "trainer.benchmark": "which kernels run: rounding only",
    "trainer.inference_mode": "memory of an evaluation",
    "trainer.limit_test_batches": "darlit test only",
    "trainer.limit_predict_batches": "darlit predict only",
    "data.folder": "where the data lies; data.fingerprint says what it is",
    "data.tokenizer": "only compared with the data; the identity has the tokenizer of the data under this name",
    "data.num_workers": "who reads; never changes the order",
    "data.verify": "when files are hashed",
    "backbone.implementation": "speed and memory",
    "backbone.experts": "speed and memory",
    "backbone.checkpoint_layers": "speed and memory",
    "backbone.loss_chunk_tokens": "speed and memory",
    "memory_estimate": "a message before the first step",
    "pictures": "what TensorBoard shows",
    "throughput.clock": "how steps are timed; compared on its own when a run resumes and when a table is made",
}
"""Fields, each with all below it, in which two runs of one identity may differ, and why. Every other field counts."""

DATA_FIELDS = ("data.fingerprint", "data.tokenizer", "backbone.vocab_size")
"""What only the prepared data can say, the last one where an experiment leaves it open."""
CONTINUED = "continued_from"

# What Lightning takes for the same thing.
_SPELLINGS: dict[str, dict[Any, Any]] = {
    "trainer.precision": {
        None: "32-true", 32: "32-true", "32": "32-true", 64: "64-true", "64": "64-true", 16: "16-mixed",
        "16": "16-mixed", "bf16": "bf16-mixed",
    },
    "trainer.gradient_clip_algorithm": {None: "norm"},
}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """What a run was trained as.

    Args:
        identity: field -> plain value.
        devices: how many it ran on.
        partial: whether the record is a summary of version 1, which has some of the fields only.
    """

    identity: dict[str, Any]
    devices: int
    partial: bool = False

    def change(self, here: Mapping[str, Any]) -> str | None:
        """The first difference to another identity, as `difference` says it; fields that are not known do not count.

        Not known are what a partial record lacks, and of ``here`` the DATA_FIELDS of data that are not on this machine.
        """
        known = {field for field in {*self.identity, *here} if field in here or field not in DATA_FIELDS}
        if self.partial:
            known = self.identity.keys() & here.keys()
        sides = ({field: side[field] for field in known if field in side} for side in (self.identity, here))
        return difference(*sides)


def field_name(key: str) -> str:
    """The name of a configuration key in an identity and in errors: without ``model.init_args.``."""
    return key.removeprefix("model.init_args.")


def may_differ(field: str) -> bool:
    """Whether two runs of one identity may differ in this field."""
    return any(field == free or field.startswith(f"{free}.") for free in MAY_DIFFER)


def identity_of(config: Mapping[str, Any], data: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """Return what a run is, as flat field -> plain value.

    Args:
        config: the resolved configuration of ``darlit fit``, plain values.
        data: the values of DATA_FIELDS, as far as they are known.
        devices: over all nodes.
    """
    found: dict[str, Any] = {}
    for key, value in flatten("", config).items():
        field = field_name(key)
        if not may_differ(field):
            found[field] = _SPELLINGS.get(field, {}).get(value, value) if field in _SPELLINGS else value
    found["model.class_path"] = found["model.class_path"].rpartition(".")[2]
    found["data.batch_size"] *= devices
    return {**found, **data}


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return the first difference of two identities as ``field=value there, now it is value here``; None: equal.

    How many more fields differ is said too. A change of class comes before the options that come with it.
    """
    fields = sorted({*there, *here}, key=lambda field: (field != "model.class_path", field))
    differing = [field for field in fields if not _same(there.get(field, UNSET), here.get(field, UNSET))]
    if not differing:
        return None
    first = differing[0]
    more = f" (and {len(differing) - 1} more: {', '.join(differing[1:6])})" if len(differing) > 1 else ""
    return f"{first}={there.get(first, UNSET)!r}, now it is {here.get(first, UNSET)!r}{more}"


def digest(identity: Mapping[str, Any]) -> str:
    """A short name of an identity."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def read_recorded(file: Path) -> Recorded | None:
    """The identity that an ``identity.json`` or a ``summary.json`` holds; None: there is no such file.

    Raises:
        DarlitError: a damaged file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("schema_version") == 1:
            return Recorded(_identity_of_version_1(content), devices=1, partial=True)
        return Recorded(dict(content["identity"]), int(content["devices"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DarlitError(
            f"{file}: does not say what the run was trained as ({type(error).__name__}: {error}); copy the folder again"
        ) from error


def _identity_of_version_1(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of today's identity that a summary of version 1 holds."""
    classes = {pathway: name for name, pathway in PATHWAYS.items()}
    pathway, optimizer = dict(summary["pathway"]), dict(summary["optimizer"])
    clip = {"trainer.gradient_clip_val": optimizer.pop("gradient_clip")} if "gradient_clip" in optimizer else {}
    name = classes.get(pathway.pop("name"))  # None: of a module that is not among darlit's
    found = {
        **({} if name is None else {"model.class_path": name}),
        **clip,
        "trainer.precision": summary["precision"],
        "budget.tokens": summary["budget"]["tokens"],
        "budget.batch_tokens": summary["budget"]["batch_tokens"],
        "data.sequence_length": summary["budget"]["sequence_length"],
        "data.fingerprint": summary["data"]["fingerprint"],
        "data.tokenizer": summary["data"]["tokenizer"],
        "seed_everything": summary["seed"],
        **flatten("pathway", pathway),
        **flatten("optimizer", optimizer),
        **flatten("backbone", summary["backbone"]),
    }
    return {field: value for field, value in found.items() if not (may_differ(field) and field not in DATA_FIELDS)}


def flatten(name: str, value: Any) -> dict[str, Any]:
    """Leaves of nested mappings by dotted name, sorted; an empty mapping is a leaf."""
    if not isinstance(value, Mapping) or not value:
        return {name: value} if name else {}
    leaves: dict[str, Any] = {}
    for key in sorted(value, key=str):
        leaves |= flatten(f"{name}.{key}" if name else str(key), value[key])
    return leaves


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


def _same(there: Any, here: Any) -> bool:
    return bool(there == here) and isinstance(there, bool) == isinstance(here, bool)
