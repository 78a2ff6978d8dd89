"""Finds the names of Accelerate in a script's source: supported ones, refused ones, and differences in behavior.

Nothing is imported or run. Modules next to the script that it imports are read, too. Libraries are not: the names that
they use are recorded during a launch (`touched.py`).
"""

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from shardkit.compat import branches, names, rank_conditions, schedule_lengths
from shardkit.compat.bindings import Bindings, bindings, dotted, name_of
from shardkit.compat.differences import affecting
from shardkit.compat.members import ARGUMENTS, MEMBERS
from shardkit.launch import preloaded
from shardkit.wording import counted

BYTE_ORDER_MARK = "\ufeff"
TOO_DEEP = (RecursionError, MemoryError)
"""Errors of Python's parser, and of a walk over its tree, for expressions that are nested too deeply."""


@dataclass(frozen=True)
class Named:
    """A name in a line of a file."""

    file: str
    line: int
    name: str
    text: str = ""

    @property
    def place(self) -> str:
        """file:line."""
        return f"{self.file}:{self.line}"


@dataclass
class Found:
    """The names found. Those in `stands_in` (supported) and `refused` are dotted names below accelerate."""

    stands_in: list[Named] = field(default_factory=list)
    refused: list[Named] = field(default_factory=list)
    missing: list[Named] = field(default_factory=list)
    remarks: list[Named] = field(default_factory=list)
    unread: list[Named] = field(default_factory=list)
    """Files that are not Python for this interpreter."""

    def add(self, other: "Found") -> None:
        """Add the names of another file."""
        self.stands_in += other.stands_in
        self.refused += other.refused
        self.missing += other.missing
        self.remarks += other.remarks
        self.unread += other.unread


def scan_script(script: str, is_module: bool = False) -> Found:
    """The names in a script and in the modules next to it that it imports."""
    found = Found()
    for path in preloaded.own_files(script, is_module):
        found.add(scan_text(path.read_text(errors="replace"), path.name))
    return found


def scan_text(text: str, file: str) -> Found:
    """The names in one file; why there are none, if Python cannot read it."""
    try:
        return scan_tree(ast.parse(text.removeprefix(BYTE_ORDER_MARK)), file)
    except SyntaxError as error:
        return Found(unread=[Named(file, error.lineno or 1, "", error.msg)])
    except (ValueError, *TOO_DEEP):
        return Found(unread=[Named(file, 1, "", "nested too deeply, or of no text")])


def scan_tree(tree: ast.Module, file: str) -> Found:
    """The names in one file that Python has parsed; none where it is written for shardkit."""
    if _is_on_shardkit(tree):
        return Found()
    found, bound = Found(), bindings(tree)
    for module, name, line in bound.uses:
        _classify(found, file, line, module, name)
    _members(found, tree, file, bound)
    found.remarks += [Named(file, line, "num_processes", STRETCHED) for line in schedule_lengths.stretched(tree)]
    found.remarks += [
        Named(file, line, name, OF_ALL_RANKS) for line, name in schedule_lengths.lengths_over_all_ranks(tree, bound)
    ]
    found.remarks += [Named(file, line, "continue", SKIPS_AGAIN) for line in skips_by_hand(tree)]
    found.remarks += [Named(file, line, name, OF_ONE_RANK) for line, name in saves_of_one_rank(tree, bound)]
    return found


def _is_on_shardkit(tree: ast.Module) -> bool:
    """Whether the Accelerator of a file is shardkit's own, and nothing in it is Accelerate's."""
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    own = any(node.module == "shardkit" and alias.name == "Accelerator" for node in imported for alias in node.names)
    return own and not bindings(tree).uses


STRETCHED = (
    "the schedule's length is multiplied by the number of ranks, since Accelerate's scheduler steps once per rank; "
    "shardkit's steps once: remove the factor, or launch with --as-accelerate --accelerates-meaning scheduler"
)
OF_ALL_RANKS = (
    "before prepare a loader's length counts the batches of all ranks, and Accelerate's scheduler steps once per rank; "
    "shardkit's steps once: take the prepared loader's length, or launch with --as-accelerate --accelerates-meaning "
    "scheduler"
)
SKIPS_AGAIN = (
    "the loop drops the batches before a resumed step, but load_state has moved the loader past them: remove this, use "
    "skip_first_batches, or launch with --as-accelerate --accelerates-meaning position"
)
OF_ONE_RANK = (
    "only one rank calls it; where FSDP shards the model every rank must, and the call ends the run: take it out of "
    "the condition"
)
MEANINGS = {STRETCHED: "scheduler", OF_ALL_RANKS: "scheduler", SKIPS_AGAIN: "position"}
"""Remarks that do not hold in a run with this word of --accelerates-meaning."""


def _classify(found: Found, file: str, line: int, module: str, name: str) -> None:
    full = f"{module}.{name}" if module else name
    if name in names.places(module):
        _add(found.stands_in, Named(file, line, full))
    elif instead := names.refusals(module).get(name):
        _add(found.refused, Named(file, line, full, instead))
    elif not name.startswith("__"):
        _add(found.missing, Named(file, line, full, "not a name of accelerate, or unknown to shardkit"))


def _add(where: list[Named], one: Named) -> None:
    """Add a name unless the file already has it."""
    if all((known.file, known.name) != (one.file, one.name) for known in where):
        where.append(one)


def _members(found: Found, tree: ast.Module, file: str, bound: Bindings) -> None:
    """Find the members of Accelerator that are used, and the arguments of its constructor."""
    nodes = list(ast.walk(tree))
    made = schedule_lengths.schedules(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and bound.is_accelerator(node.value):
            if node.attr in MEMBERS and (text := MEMBERS[node.attr]).startswith("refused"):
                _add(found.refused, Named(file, node.lineno, f"Accelerator.{node.attr}", text.partition(": ")[2]))
            elif node.attr in MEMBERS:
                _add(found.stands_in, Named(file, node.lineno, f"Accelerator.{node.attr}"))
        elif isinstance(node, ast.Call) and bound.is_class(node.func):
            for keyword in node.keywords:
                _argument(found, file, keyword)
        elif (
            isinstance(node, ast.Call)
            and schedule_lengths.is_prepare(node.func, bound)
            and made & schedule_lengths.names_of(node.args)
        ):
            _add(found.stands_in, Named(file, node.lineno, "Accelerator.prepare_scheduler"))


def _argument(found: Found, file: str, keyword: ast.keyword) -> None:
    is_empty = isinstance(keyword.value, ast.Constant) and not keyword.value.value
    text = ARGUMENTS.get(keyword.arg or "", "")
    if text.startswith("refused") and is_empty:
        return
    if text.startswith("refused"):
        _add(found.refused, Named(file, keyword.lineno, f"Accelerator({keyword.arg}=)", text.partition(": ")[2]))
    elif text:
        _add(found.remarks, Named(file, keyword.lineno, f"Accelerator({keyword.arg}=)", text))


def skips_by_hand(tree: ast.Module) -> list[int]:
    """Lines of the `continue` by which a loop drops its batches before a step to resume at, in a script that calls
    load_state."""
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Attribute) and node.attr == "load_state" for node in nodes):
        return []
    counts = {name for node in nodes if isinstance(node, ast.For) for name in _counters(node)}
    skipping = [node for node in nodes if isinstance(node, ast.If) and _is_before_resumed(node.test, counts)]
    return sorted({one.lineno for node in skipping for one in ast.walk(node) if isinstance(one, ast.Continue)})


def _counters(loop: ast.For) -> list[str]:
    """The name that counts the batches, of a loop over enumerate(...)."""
    is_counted = isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == ["enumerate"]
    return dotted(loop.target.elts[0]) if is_counted and isinstance(loop.target, ast.Tuple) else []


def _is_before_resumed(test: ast.expr, counts: set[str]) -> bool:
    """Whether the test compares the count of a loop with a step whose name says that it is one to resume at."""
    compared = [node for node in ast.walk(test) if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt)]
    return any(
        name_of(node.left) in counts
        and any(word in name_of(node.comparators[0]).lower() for word in ("resum", "skip", "start"))
        for node in compared
    )


def saves_of_one_rank(tree: ast.Module, bound: Bindings) -> list[tuple[int, str]]:
    """(line, method) of the calls that need all weights, inside a condition that only one rank meets: methods of an
    Accelerator, and `save_pretrained` of an unwrapped model or a pipeline."""
    source = rank_conditions.source_of(tree)
    conditions = rank_conditions.Conditions(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _needs_weights(node.func, bound, source):
            call, path = branches.called(node), branches.path_to(tree, branches.place_of(node))
            if conditions.alone(path, call) is not None:
                found.append((node.lineno, call))
    return sorted(found)


def _needs_weights(method: ast.expr, bound: Bindings, source: rank_conditions.Source) -> bool:
    match method:
        case ast.Attribute(attr="save_state" | "save_model" | "get_state_dict", value=owner):
            return bound.is_accelerator(owner)
        case ast.Attribute(attr="save_pretrained", value=owner):
            values = [owner, *source.values.get(name_of(owner), [])]
            makers = [dotted(one.func) for one in values if isinstance(one, ast.Call)]
            return any("unwrap_model" in parts or "Pipeline" in "".join(parts) for parts in makers)
    return False


def differences(found: Found, taken_back: Collection[str] = ()) -> list[str]:
    """A line for each difference in behavior that affects a name that is used; `taken_back`: words of
    --accelerates-meaning."""
    named = {one.name for one in found.stands_in}
    return [f"differs: {one.text}." for one in affecting(named, taken_back)]


def holding(remarks: Iterable[Named], taken_back: Collection[str]) -> list[Named]:
    """The remarks that hold in a run with these words of --accelerates-meaning."""
    return [one for one in remarks if MEANINGS.get(one.text) not in taken_back]


def report(found: Found, taken_back: Collection[str] = ()) -> str:
    """The report as text; `taken_back`: words of --accelerates-meaning."""
    remarks = holding(found.remarks, taken_back)
    lines = [f"{one.place}: not valid Python for this interpreter ({one.text}); correct it." for one in found.unread]
    for title, group in (("not supported", found.refused), ("unknown", found.missing), ("remark", remarks)):
        lines += [f"{one.place}: {one.name}: {title}{': ' if one.text else ''}{one.text}." for one in group]
    lines += differences(found, taken_back)
    named = {one.name for one in found.stands_in}
    if not named and not lines:
        return "The script uses no name of accelerate. A launch reports at its end what the libraries use."
    summary = f"{counted(len(named), 'name')} of accelerate supported"
    counts = f"{len(found.refused)} not supported, {len(found.missing)} unknown"
    return "\n".join([*lines, f"{summary}, {counts}. Nothing was started (--check)."])
