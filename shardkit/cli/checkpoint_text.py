"""The text output of `shardkit checkpoint`."""

from typing import TYPE_CHECKING, Any

from shardkit import sizes
from shardkit.cli.advice import ADVICE
from shardkit.errors import CheckpointError
from shardkit.storage.url import Place
from shardkit.wording import counted, first_few

if TYPE_CHECKING:
    from shardkit.checkpoint.commands.compare import CheckpointDifference, Magnitude


def row(row: dict[str, Any]) -> str:
    """One checkpoint of a list; with its name if it is not named by its step."""
    if row["problem"]:
        return f"step {'?' if row['step'] is None else row['step']:>8}  DAMAGED  {row['problem']}"
    marks = [name for name, key in (("latest", "latest"), ("pinned", "pinned"), ("NaN", "nan")) if row[key]]
    facts = f"{row['kind']:<7}  {counted(row['world_size'], 'rank'):>9}  {sizes.in_words(row['bytes']):>9}  {date(row)}"
    name = [] if row["name"] is None else [row["name"]]
    return "  ".join([f"step {row['step']:>8}", facts, ", ".join(["complete", *marks]), *name])


def facts(facts: dict[str, Any]) -> list[str]:
    mesh = " x ".join(f"{name} {size}" for name, size in zip(*(facts["mesh"].get(k, []) for k in ("names", "shape"))))  # noqa: B905
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        facts["path"],
        f"  step      {facts['step']}, epoch {facts['epoch']}, {facts['samples_seen']:,} samples seen",
        f"  saved     {date(facts)}, {facts['kind']}, {counted(facts['world_size'], 'rank')}"
        + (f", mesh {mesh}" if mesh else ""),
        f"  by        {versions}; run {facts['run_id'][:12]}",
        f"  size      {sizes.in_words(facts['bytes'])} in {counted(facts['files'], 'file')}, {facts['digest']} digests",
    ]
    for section, part in facts["sections"].items():
        if part["tensors"]:
            kinds, tied = ", ".join(part["dtypes"]), f"; {len(part['tied'])} tied" if part["tied"] else ""
            held = f"{sizes.in_words(part['bytes'])}, {counted(part['tensors'], 'tensor')}"
            lines.append(f"  {section:<9} {held}, {part['elements']:,} elements, {kinds}{tied}")
    if facts["nan"]:
        lines.append(f"  NaN       in {first_few(facts['nan'], 3)}")
    if own := facts.get("own"):
        files = f", {counted(own['files'], 'file')} of {sizes.in_words(own['bytes'])}" if own["files"] else ""
        lines.append(f"  per rank  {', '.join(own['of'])}: different on each rank{files}")
    for section, entries in facts.get("tensors", {}).items():
        lines += [
            f"  {section}: {name}  {e['dtype']} {e['shape']} {' '.join(e['placements'])}" for name, e in entries.items()
        ]
    return lines


def difference(found: "CheckpointDifference") -> list[str]:
    lines = [f"{name}: {pair[0]} | {pair[1]}" for name, pair in found.facts.items()]
    lines += _some([f"only in the first: {name}" for name in found.only_first])
    lines += _some([f"only in the second: {name}" for name in found.only_second])
    lines += _some([f"{name}: {pair[0]} | {pair[1]}" for name, pair in found.other_shape.items()])
    lines += _some([f"{name}: {magnitude(found.magnitudes[name])}" for name in found.other_values])
    lines += [f"state: {name} {_values_apart(found.state_values.get(name, {}))}" for name in found.other_state]
    unequal = len(found.other_values) + len(found.other_shape)
    return [*lines, f"{counted(found.equal, 'tensor')} equal, {unequal} not."]


def _values_apart(unequal: "dict[str, tuple[Any, Any]]") -> str:
    """`lr 0.1 | 0.05`: the first values of a state that differ; `differs` where they are no single ones."""
    single = [(place, pair) for place, pair in unequal.items() if place and not any(map(_has_parts, pair))]
    if not single:
        return "differs"
    text = "differs: " + ", ".join(f"{place} {one} | {two}" for place, (one, two) in single[:_VALUES_SHOWN])
    more = len(unequal) - len(single[:_VALUES_SHOWN])
    return f"{text}, {more:,} more (--json lists all)" if more else text


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, list))


_VALUES_SHOWN = 3
# Two steps of a run differ in every tensor: a model has hundreds, its optimizer thousands.
_SHOWN = 20


def _some(lines: list[str]) -> list[str]:
    """The first lines of each section (`model: ...`), and how many are left out."""
    shown = list[str]()
    for section in dict.fromkeys(line.partition(":")[0] for line in lines):
        own = [line for line in lines if line.partition(":")[0] == section]
        shown += own[:_SHOWN]
        shown += [f"{section}: {len(own) - _SHOWN:,} more (--json lists all)"] if len(own) > _SHOWN else []
    return shown


def pruned(result: dict[str, Any]) -> list[str]:
    verb = "would delete" if result["dry_run"] else "deleted"
    lines = [f"kept, not counted: {problem}" for problem in result["damaged"]]
    lines += [f"{verb} {found} (leftover of a killed save)" for found in result["debris"]]
    lines += [f"{verb} {found}" for found in result["removed"]]
    end = " (dry run)" if result["dry_run"] else ""
    return [*lines, f"{counted(len(result['removed']), 'checkpoint')}, {sizes.in_words(result['bytes'])}{end}"]


def date(row: dict[str, Any]) -> str:
    return f"{row['created_utc'][:19].replace('T', ' ')} UTC"


def magnitude(found: "Magnitude") -> str:
    """`12 of 4,096 values differ, at most by 0.0013 (relative: 0.021)`."""
    if not found.count:
        return "no value differs, only their bits: signs of zeros, or kinds of NaN"
    text = f"{found.count:,} of {found.of:,} values differ"
    if found.max_abs is None:
        return f"{text}, by non-finite amounts"
    return f"{text}, at most by {found.max_abs:.3g} (relative: {found.max_rel:.3g})"


def problem(error: CheckpointError | OSError, path: Place) -> str:
    """Why a checkpoint cannot be used."""
    if isinstance(error, CheckpointError):
        return str(error)
    advice = ADVICE.get(error.errno or 0, "check its permissions")
    return f"{error.filename or path}: cannot be read ({error.strerror}); {advice}."
