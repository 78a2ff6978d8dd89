"""`shardkit checkpoint`: list, inspect, verify and compare checkpoints; convert from and to files of other programs."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from shardkit import sizes
from shardkit.checkpoint.commands import compare, describe
from shardkit.checkpoint.commands import merge as merging
from shardkit.checkpoint.commands import prune as pruning
from shardkit.checkpoint.exporting import export
from shardkit.checkpoint.files import folder, manifest, paths
from shardkit.checkpoint.files import verify as verifying
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import retention
from shardkit.cli import HELP, checkpoint_text, options
from shardkit.cli.advice import ADVICE
from shardkit.cli.progress import Progress
from shardkit.digits import number_of_flag
from shardkit.errors import EXIT_CHECK_FAILED, CheckpointCorrupted, CheckpointError
from shardkit.problems import Problems
from shardkit.storage.url import Place, Url, place_of
from shardkit.wording import counted

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, context_settings=HELP)


def _named(path: str) -> Place:
    """The place. An empty text, as from a shell variable that is not set, is not the current folder: prune would delete
    checkpoints there."""
    if path == "":
        raise typer.BadParameter("not the path of a folder (got ''); give a folder, or . for the current one.")
    return place_of(options.value_of(path))


def _on_disk(path: str) -> Path:
    found = _named(path)
    if isinstance(found, Url):
        raise typer.BadParameter(f"an object store is not supported here (got {found}); give a folder on a disk.")
    return found


# A Place. typer knows no unions, and before 0.29 makes a Path of what a parser gives for a parameter declared as one.
Where = Annotated[
    Any,
    typer.Argument(
        parser=_named,
        metavar="PATH",
        help="A checkpoint, a folder of checkpoints (its newest), or a project folder; or the URL of one.",
    ),
]
Each = Annotated[
    Any,
    typer.Argument(
        parser=_named,
        metavar="PATH",
        help="A checkpoint, a folder of checkpoints (all of them), or a project folder; or the URL of one.",
    ),
]
Series = Annotated[
    Any,
    typer.Argument(parser=_named, metavar="DIR", help="A folder of checkpoints, or a project folder; or its URL."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16, fp16 or fp64; by default as saved.")
]
ShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, such as 5GB or 500MB.")]


@app.callback()
def checkpoint() -> None:
    """List, inspect, verify, compare, merge, prune and convert saved training states."""


@app.command("list")
def list_(path: Series = Path(), as_json: options.AsJson = False) -> int:
    """List the checkpoints of a run, oldest first. Shows step, date, size, and whether all their files exist."""
    found = locate.checkpoints(path)
    latest = {parent: folder.read_latest(parent) for parent in {item.parent for item in found}}
    is_one = paths.real(found[0]) == paths.real(path)
    root = found[0] if is_one else found[0].parent if len(latest) == 1 else path
    rows = [_row(item) | {"latest": item.name == latest[item.parent]} for item in found]
    rows = [row for row, item in zip(rows, found, strict=True) if not (row["problem"] and _is_gone(item, path))]
    if as_json:
        print(json.dumps({"root": str(root), "checkpoints": rows}, indent=2))
        return 0
    print(f"{root}: {counted(len(rows), 'checkpoint')}")
    are_steps_in_two = len({item.parent for item in found if folder.STEP.fullmatch(item.name)}) > 1
    for row in rows:
        print("  " + checkpoint_text.row({**row, "name": row["path"]} if are_steps_in_two else row))
    return 0


def _row(path: Place) -> dict[str, Any]:
    named = folder.STEP.fullmatch(path.name)
    row: dict[str, Any] = {"step": int(named[1]) if named else None, "path": str(path)}
    row["name"] = None if named else path.name
    row |= {"pinned": retention.is_pinned(path), "problem": None}
    try:
        record = folder.inspect(path)
    except (CheckpointError, OSError) as error:
        return {**row, "problem": checkpoint_text.problem(error, path)}
    names = ("step", "kind", "world_size", "bytes", "created_utc", "epoch", "samples_seen", "save_id", "run_id", "nan")
    return row | {name: getattr(record, name) for name in names}


def _is_gone(found: Place, given: Place) -> bool:
    """Whether a checkpoint of a folder was deleted since it was found there, by the run that saves into it."""
    try:
        return found != given and not (manifest.exists(found) if isinstance(found, Url) else os.path.lexists(found))
    except OSError:
        return False


@app.command()
def inspect(
    path: Where = Path(),
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor: dtype, shape, placement.")] = False,
    as_json: options.AsJson = False,
) -> int:
    """Show the contents of a checkpoint. These are step, ranks, sizes, versions, and with --tensors every tensor."""
    found = locate.checkpoint(path)
    facts = describe.facts(found)
    if tensors:
        facts["tensors"] = describe.tensors(found)
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    for line in checkpoint_text.facts(facts):
        print(line)
    return 0


@app.command()
def verify(path: Each = Path(), as_json: options.AsJson = False) -> int:
    """Verify the digests of a checkpoint, or of all in a folder. Exit code 3 if one is damaged.

    Those that a run deletes meanwhile are left out; one that it replaces is verified again.
    """
    results = []
    for found in locate.checkpoints(path):
        problems, size = _damages(found)
        if problems and _is_gone(found, path):
            print(f"note: {found} was deleted before it was verified.", file=sys.stderr)
            continue
        results.append({"path": str(found), "bytes": size, "problems": problems})
        if not as_json:
            print("\n".join(problems) if problems else f"{found}: valid ({sizes.in_words(size)})")
    if as_json:
        print(json.dumps(results, indent=2))
    bad = sum(bool(result["problems"]) for result in results)
    if bad:
        raise CheckpointCorrupted(f"checkpoint: {bad} of {len(results)} damaged; resume from another checkpoint.")
    return 0


def _damages(path: Place) -> tuple[list[str], int]:
    try:
        found = verifying.open_checkpoint(path)
        with Progress("verified", found.manifest.bytes) as progress:
            problems = verifying.damages(found, progress.add)
        if problems and manifest.is_replaced(path, found.manifest):
            return _damages(path)
        return problems, found.manifest.bytes
    except (CheckpointError, OSError) as error:
        return [checkpoint_text.problem(error, path)], 0


@app.command()
def diff(first: Where, second: Where, as_json: options.AsJson = False) -> int:
    """Show the differences between two checkpoints. Exit code 1 if the states differ.

    Both are verified first. Exit code 3 if one is damaged.
    """
    one, two = locate.checkpoint(first), locate.checkpoint(second)
    size = 2 * (one.manifest.bytes + two.manifest.bytes)  # verified, then compared
    with _as_checkpoint_error(), Progress("compared", size) as progress:
        found = compare.compare(one, two, progress.add)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print("\n".join(checkpoint_text.difference(found)))
    return 0 if found.same_state else EXIT_CHECK_FAILED


@app.command()
def merge(
    path: Where,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", parser=_on_disk, metavar="PATH", help="The folder for the safetensors files."),
    ],
    dtype: Dtype = None,
    max_shard_size: ShardSize = "5GB",
    as_json: options.AsJson = False,
) -> int:
    """Export the model of a checkpoint as safetensors files. torch and Transformers open them. Verifies the digests."""
    problems = Problems()
    problems.of(export.folder_named, output, "--output")
    target = None if dtype is None else problems.of(export.dtype_named, dtype, "--dtype")
    limit = problems.of(export.size_in_bytes, max_shard_size, "--max-shard-size")
    problems.raise_all()
    assert limit is not None
    found = locate.checkpoint(path)
    notes = merging.notes(found, output)  # reads the checkpoint: before anything is written
    with _as_checkpoint_error(), Progress("merged", merging.model_bytes(found)) as progress:
        written = merging.merge(found, output, target, limit, progress.add)
    rows: list[dict[str, Any]] = [
        {"folder": str(where), "files": [file.name for file in files], "bytes": export.total_bytes(files)}
        for where, files in written.items()
    ]
    if as_json:
        print(json.dumps({"checkpoint": str(found.path), "step": found.manifest.step, "written": rows}, indent=2))
    else:
        for row in rows:
            held = f"{sizes.in_words(row['bytes'])} in {counted(len(row['files']), 'file')}"
            print(f"{row['folder']}: {held}, step {found.manifest.step}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


@app.command()
def pin(
    path: Where,
    undo: Annotated[bool, typer.Option("--undo", help="Remove the protection.")] = False,
    as_json: options.AsJson = False,
) -> int:
    """Protect a checkpoint from retention and prune."""
    chosen = locate.checkpoint(path).path
    with _as_checkpoint_error():
        retention.unpin(chosen) if undo else retention.pin(chosen)
    if as_json:
        print(json.dumps({"checkpoint": str(chosen), "pinned": not undo}, indent=2))
    else:
        print(f"{chosen}: {'no longer pinned' if undo else 'pinned'}")
    return 0


@app.command()
def prune(
    path: Series,
    keep_last: Annotated[str, typer.Option("--keep-last", metavar="N", help="How many of the newest to keep.")],
    keep_every: Annotated[
        str, typer.Option("--keep-every", metavar="N", help="Also keep multiples of so many steps.")
    ] = "0",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, delete nothing.")] = False,
    as_json: options.AsJson = False,
) -> int:
    """Delete older checkpoints, and files of killed saves. Verifies those that are kept; damaged ones are not counted.

    Pinned checkpoints are kept. Older ones are deleted unread. An error if a run saves into the folder.
    """
    problems = Problems()
    newest = problems.of(number_of_flag, "--keep-last", keep_last)
    multiples = problems.of(number_of_flag, "--keep-every", keep_every, 0)
    problems.raise_all()
    assert newest is not None and multiples is not None
    with _as_checkpoint_error():
        result = pruning.prune(locate.series(path), newest, multiples, dry_run, lambda found: _damages(found)[0])
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(checkpoint_text.pruned(result)))
    return 0


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            parser=_on_disk,
            metavar="SOURCE",
            help="A folder of Accelerate's save_state, torch's dcp.save or DeepSpeed's save_checkpoint.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            parser=_on_disk,
            metavar="PATH",
            help="The folder of checkpoints, or the project folder, to add it to.",
        ),
    ],
    step: Annotated[str | None, typer.Option(metavar="N", help="Its step; by default the optimizer's.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Names for the optimizers of a DDP checkpoint: a config.json, or module:function, which returns the "
            "model, or all models and optimizers.",
        ),
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Skip optimizer and scheduler.")] = False,
    as_json: options.AsJson = False,
) -> int:
    """Convert another program's checkpoint to one of shardkit. load_state and resume then load it."""
    from shardkit.checkpoint.commands.convert import convert as convert_into
    from shardkit.model.sources import describe_prepared

    number = number_of_flag("--step", step, 0, 10**18 - 1)
    prepared = None if model is None else describe_prepared(model)
    with _as_checkpoint_error():
        done = convert_into(source, output, number, prepared, weights_only)
    if as_json:
        print(json.dumps({**done.__dict__, "path": str(done.path)}, indent=2))
        return 0
    parts = f"{counted(done.models, 'model')}, {counted(done.optimizers, 'optimizer')}"
    print(f"{done.path}: step {done.step}, {parts}")
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Turns errors of the file system into CheckpointError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        advice = ADVICE.get(error.errno or 0, "look at that file or folder")
        text = f"checkpoint: {where}{error.strerror or error}; {advice}."
        raise CheckpointError(text) from error
