"""What one of Python 3.10 to 3.14 lacks, or reads otherwise, is not used, so that a run on one of them says something
of the others."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.signatures import signature

ROOT = Path(__file__).parent.parent
FOLDERS = ("shardkit", "templates", "benchmarks", "docs")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# https://docs.python.org/3/whatsnew/3.12.html, 3.13 and 3.14, "Removed" and "Deprecated"; 3.11 to 3.14, "New modules".
MISSING_MODULES = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "msilib", "nis", "nntplib"),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
    *("tomllib", "compression", "annotationlib", "concurrent.interpreters"),
}
MISSING = {
    *("ast.Num", "ast.Str", "ast.Bytes", "ast.NameConstant", "ast.Ellipsis", "pkgutil.find_loader"),
    *("pkgutil.get_loader", "ssl.wrap_socket", "locale.getdefaultlocale", "codecs.open", "asyncio.iscoroutinefunction"),
    *("asyncio.get_event_loop_policy", "asyncio.get_child_watcher", "configparser.SafeConfigParser"),
    *("datetime.datetime.utcnow", "datetime.datetime.utcfromtimestamp"),
    *("asyncio.TaskGroup", "asyncio.Runner", "asyncio.timeout", "contextlib.chdir", "datetime.UTC", "enum.StrEnum"),
    *("hashlib.file_digest", "itertools.batched", "math.cbrt", "math.sumprod", "os.process_cpu_count", "copy.replace"),
    *("warnings.deprecated", "queue.ShutDown", "ExceptionGroup", "BaseExceptionGroup"),
    *(f"typing.{name}" for name in ("Self", "Never", "LiteralString", "assert_never", "assert_type", "override")),
    *(f"typing.{name}" for name in ("Required", "NotRequired", "Unpack", "TypeVarTuple", "reveal_type", "TypeIs")),
}
# Processes are started, and what is shared with them made, by fork up to 3.13, and by forkserver from 3.14.
BY_DEFAULT_METHOD = {
    f"multiprocessing.{name}"
    for name in ("Process", "Pool", "Queue", "SimpleQueue", "JoinableQueue", "Event", "Lock", "Manager", "Barrier")
}


def problems(source: str) -> Iterator[str]:
    """What is wrong with a file, with the line."""
    nodes = [*ast.walk(ast.parse(source))]
    names = _imported(nodes)
    guarded = {inner for node in nodes if _asks_the_version(node, names) for inner in ast.walk(node)}
    for node in nodes:
        if node in guarded:
            continue
        for text in _problems_of(node, names, source):
            yield f"{getattr(node, 'lineno', 0)}: {text}"


def _asks_the_version(node: ast.AST, names: dict[str, str]) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Compare) and _full_name(test.left, names) == "sys.version_info"


def _imported(nodes: list[ast.AST]) -> dict[str, str]:
    """What each imported name stands for."""
    names: dict[str, str] = {}
    for node in nodes:
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names[one.asname or one.name] = f"{module}{one.name}"
    return names


def _problems_of(node: ast.AST, names: dict[str, str], source: str) -> Iterator[str]:
    match node:
        case ast.Import(names=imported):
            yield from (_missing(one.name) for one in imported if _is_missing(one.name))
        case ast.ImportFrom(module=str(module), level=0) if _is_missing(module):
            yield _missing(module)
        case ast.Name() | ast.Attribute() if _full_name(node, names) in MISSING:
            yield _missing(str(_full_name(node, names)))
        case ast.Call(func=called) if _full_name(called, names) in BY_DEFAULT_METHOD:
            yield f"{_full_name(called, names)} starts in another way from 3.14; use get_context(METHOD)"
        case ast.Call(func=called, args=[]) if _full_name(called, names) == "multiprocessing.get_context":
            yield "get_context() is another method from 3.14; name it"
        case ast.Call(func=called, keywords=[]) if _full_name(called, names) == "inspect.signature":
            yield "annotations may name what is not there from 3.14; use shardkit.signatures"
        case ast.Call(func=ast.Attribute(attr="extract" | "extractall"), keywords=named) if "tarfile" in source:
            yield from ["an archive has another filter from 3.14; name it"] * all(one.arg != "filter" for one in named)
        case ast.Subscript(value=ast.Attribute() | ast.Call(), slice=ast.Constant(value="__annotations__")):
            yield "__annotations__ of a __dict__ is not there from 3.14; use inspect.get_annotations"
        case ast.Try(finalbody=body) if any(_leaves(one) for one in body):
            yield "`finally` is left by return, break or continue, a warning from 3.14"


def _is_missing(module: str) -> bool:
    return bool({module, module.partition(".")[0]} & MISSING_MODULES)


def _missing(name: str) -> str:
    return f"{name} is not in all of Python 3.10 to 3.14"


def _full_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name that an expression stands for."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    inner = _full_name(node.value, names) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner else None


def _leaves(node: ast.AST) -> bool:
    """Whether the statement leaves its block; loops and functions inside of it are blocks of their own."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While | ast.Lambda):
        return False
    leaves = isinstance(node, ast.Return | ast.Break | ast.Continue)
    return leaves or any(_leaves(inner) for inner in ast.iter_child_nodes(node))


def test_nothing_is_used_that_some_python_lacks():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in problems(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import distutils.version", "1: distutils.version is not in all"),
        ("from pipes import quote", "1: pipes is not in all"),
        ("import tomllib", "1: tomllib is not in all"),
        ("from typing import Self\ndef a() -> Self: ...", "2: typing.Self is not in all"),
        ("import datetime as d\nd.datetime.utcnow()", "2: datetime.datetime.utcnow is not in all"),
        ("from datetime import datetime\ndatetime.utcnow()", "2: datetime.datetime.utcnow is not in all"),
        ("raise ExceptionGroup('', [])", "1: ExceptionGroup is not in all"),
        ("from multiprocessing import Process\nProcess()", "2: multiprocessing.Process starts in another way"),
        ("import multiprocessing as m\nm.get_context().Queue()", "2: get_context() is another method"),
        ("from inspect import signature as s\ns(f)", "2: annotations may name what is not there"),
        ("import tarfile\ntarfile.open('x').extractall('y')", "2: an archive has another filter"),
        ("vars(C)['__annotations__']", "1: __annotations__ of a __dict__"),
        ("def f():\n try: pass\n finally:\n  if 1: return 2", "2: `finally` is left"),
    ],
)
def test_each_such_use_is_found(source, said):
    assert any(line.startswith(said) for line in problems(source))


def test_what_asks_for_the_version_may_use_what_that_has():
    assert not [*problems("import sys\nif sys.version_info >= (3, 14):\n import annotationlib")]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="such a function is an error before Python 3.14")
def test_annotations_may_name_what_is_not_there():
    defined: dict[str, Any] = {}
    exec("def train(batch_size: Missing): ...", defined)
    assert [*signature(defined["train"]).parameters] == ["batch_size"]


def test_the_range_is_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in project
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert listed == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert "Python 3.10 to 3.14" in (ROOT / "README.md").read_text()
