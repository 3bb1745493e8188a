"""``darlit export CHECKPOINT_OR_RUN --out MODEL.safetensors``: weights, configuration and tokenizer in one file."""

from __future__ import annotations

from pathlib import Path

from darlit.arguments import Parser
from darlit.data.manifest import describe_tokenizer
from darlit.errors import DarlitError
from darlit.modules.exported import EXPORT_SUFFIX, Export, write_export
from darlit.modules.loading import SavedModel, load
from darlit.settings import class_of


def export(saved: SavedModel, path: Path, tokenizer: str | None = None) -> None:
    """Write a model with its tokenizer to one safetensors file, which `darlit.modules.loading.load` takes.

    Args:
        saved: the model.
        path: the new file.
        tokenizer: ``bytes`` or a tokenizer.json; default the one it was trained with.

    Raises:
        DarlitError: no tokenizer to be found, or another one than the model's.
    """
    found = saved.tokenizer(tokenizer)
    record = {
        "pathway": saved.module.pathway_name,
        "hyper_parameters": {key: dict(values) for key, values in saved.module.hparams.items()},
        "step": saved.step,
        "cell": saved.name,
        "identity": saved.identity,
        "tokenizer": describe_tokenizer(found),
        "tokenizer_definition": found.definition,
    }
    write_export(path, Export(record, saved.module.transformer.state_dict()))


def main(argv: list[str]) -> int:
    """Run the verb and return its exit status; bad input raises a one-line :class:`DarlitError`."""
    parser = Parser(prog="darlit export", description="One file with a model and all it needs.")
    parser.add_argument("model", type=Path, metavar="CHECKPOINT_OR_RUN", help="of a run folder its last.ckpt is taken")
    parser.add_argument("--out", type=Path, required=True, metavar=f"MODEL{EXPORT_SUFFIX}", help="the new file")
    parser.add_argument("--tokenizer", help="bytes or a tokenizer.json (default: the model's)")
    parser.add_argument("--class-path", help="my_module.MyLM of a model without its run folder (default: the run's)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    arguments = parser.parse_args(argv)
    if arguments.out.suffix != EXPORT_SUFFIX:
        raise DarlitError(f"--out {arguments.out} must end in {EXPORT_SUFFIX}")
    if arguments.out.exists() and not arguments.overwrite:
        raise DarlitError(f"--out {arguments.out} exists; give another name or add --overwrite")
    if arguments.class_path:
        class_of(arguments.class_path)  # its pathway is known from here on
    export(load(arguments.model), arguments.out, arguments.tokenizer)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.1f} MiB; type: darlit generate {arguments.out}")
    return 0
