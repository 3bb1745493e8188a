"""``darlit data info|verify FOLDER``: what a prepared folder holds, and whether it is still whole."""

from __future__ import annotations

from darlit.arguments import Parser
from darlit.data.manifest import Manifest, open_manifest
from darlit.data.progress import Progress


def main(argv: list[str]) -> int:
    """The verb ``darlit data``: returns the exit status. Raises DataError."""
    parser = Parser(prog="darlit data", description="Look at prepared data, or check it.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{info,verify}")
    info = actions.add_parser("info", help="tokenizer, splits, sources and fingerprint")
    check = actions.add_parser("verify", help="read every file and compare it with the manifest")
    for action in (info, check):
        action.add_argument("folder", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    manifest = open_manifest(arguments.folder)
    if arguments.action == "info":
        _print_info(manifest)
    else:
        _verify(manifest)
    return 0


def _verify(manifest: Manifest) -> None:
    files = manifest.content["files"].values()
    with Progress(sum(file["bytes"] for file in files), enabled=True) as progress:
        progress.say("verifying")
        manifest.check_hashes(progress.skip)
    print(f"{manifest.folder}: whole: {len(files)} files agree with the manifest")


def _print_info(manifest: Manifest) -> None:
    manifest.check_sizes()
    content = manifest.content
    tokenizer = content["tokenizer"]
    print(f"folder       {manifest.folder}")
    print(f"fingerprint  {manifest.fingerprint}")
    print(
        f"tokenizer    {manifest.tokenizer_name}, vocabulary {tokenizer['vocab_size']:,}, "
        f"separator {tokenizer['separator']}, {content['dtype']}"
    )
    if manifest.lossy:
        print(f"lossy        {manifest.lossy}: losses and bits per byte leave this out")
    for name, split in content["splits"].items():
        print(
            f"{name:<13}{split['tokens']:,} tokens, {split['documents']:,} documents, {split['bytes']:,} bytes, "
            f"{manifest.bytes_per_token(name):.3f} bytes a token, {len(split['chunks'])} chunks"
        )
    print(f"sources      {len(content['sources'])} files, {sum(s['bytes'] for s in content['sources']):,} bytes")
    print(f"split rule   {content['split_rule']}")
    print(f"licence      {content['licence'] or 'not stated'}")
    print(f"made with    {', '.join(f'{name} {version}' for name, version in content['versions'].items())}")
