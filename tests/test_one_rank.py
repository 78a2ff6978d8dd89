"""Calls that only one rank executes are found in the script's source, and no others."""

import linecache
import sys
import textwrap
from types import SimpleNamespace

import pytest

from shardkit.compat.one_rank import place_of_one_rank
from shardkit.runtime.process_control import ProcessControl


class Place(ProcessControl):
    num_processes, process_index, local_process_index = 2, 0, 0


def found_in(text: str) -> list[str | None]:
    """The line of the condition, for each call of `save()` that rank 0 executes."""
    file, found = f"<script {abs(hash(text))}>", []

    def save():
        found.append(place_of_one_rank(sys._getframe(1), "save"))

    text = textwrap.dedent(text)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    dist = SimpleNamespace(get_rank=lambda: 0)
    given = {"accelerator": Place(), "save": save, "dist": dist, "args": SimpleNamespace(saves=True, rank=8)}
    exec(compile(text, file, "exec"), given)
    return [None if one is None else one.removeprefix(file + ":") for one in found]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if accelerator.is_main_process:\n    save()", "1"),
        ("if args.saves and accelerator.is_main_process:\n    save()", "1"),
        ("def f():\n    if not accelerator.is_main_process:\n        return\n    save()\nf()", "2"),
        ("for i in [1]:\n    if not accelerator.is_main_process or not args.saves:\n        continue\n    save()", "2"),
        ("if 0 == accelerator.process_index:\n    save()", "1"),
        ("if accelerator.process_index in (0,):\n    save()", "1"),
        ("if accelerator.process_index < 1:\n    save()", "1"),
        ("if not accelerator.process_index:\n    save()", "1"),
        ("if accelerator.process_index != 0:\n    pass\nelse:\n    save()", "1"),
        ("if 0 < accelerator.process_index:\n    raise SystemExit\nelse:\n    save()", "1"),
        ("import sys\nif accelerator.process_index:\n    sys.exit()\nsave()", "2"),
        ("r = accelerator.process_index\nif r == 0:\n    save()", "2"),
        ("r = dist.get_rank()\nmaster = r == 0\nif master:\n    save()", "3"),
        ("import os\nr = int(os.environ.get('RANK', 0))\nif r == 0:\n    save()", "3"),
        ("def is_main():\n    return dist.get_rank() == 0\nif is_main():\n    save()", "3"),
        ("class T:\n    pass\nt = T()\nt.main = accelerator.is_main_process\nif t.main:\n    save()", "5"),
        ("if accelerator.is_main_process is True:\n    save()", "1"),
        ("if not (accelerator.is_main_process is False):\n    save()", "1"),
        ("save() if accelerator.is_main_process else None", "1"),
        ("accelerator.is_main_process and save()", "1"),
        ("not accelerator.is_main_process or save()", "1"),
        ("everyone = None\nif accelerator.is_main_process or everyone:\n    save()", "2"),
        ("[save() for _ in range(1) if accelerator.is_main_process]", "1"),
        ("while accelerator.is_main_process:\n    save()\n    break", "1"),
        ("try:\n    if accelerator.is_main_process:\n        save()\nfinally:\n    pass", "2"),
        ("@accelerator.on_main_process\ndef f():\n    save()\nf()", "on_main_process"),
        ("def f():\n    save()\nif accelerator.is_main_process:\n    f()", "3"),
    ],
)
def test_a_call_of_one_rank_is_found(text, line):
    if sys.version_info < (3, 11) and "\n" not in text:
        pytest.skip("only the line of a call is known")
    assert found_in(text) == [line]


@pytest.mark.parametrize(
    "text",
    [
        "if accelerator.is_main_process:\n    pass\nsave()",
        "if accelerator.is_main_process:\n    print()\nelse:\n    print()\nsave()",
        "if accelerator.is_main_process:\n    save()\nelse:\n    save()",
        "def f():\n    if accelerator.is_main_process:\n        save()\n        return\n    save()\nf()",
        "def f():\n    if not accelerator.is_main_process:\n        save()\n        return\n    save()\nf()",
        "if accelerator.is_main_process or args.saves:\n    save()",
        "if accelerator.process_index >= 0:\n    save()",
        "if accelerator.process_index in (0, 1):\n    save()",
        "if accelerator.process_index % 2 == 0:\n    save()",
        "if accelerator.process_index == accelerator.local_process_index:\n    save()",
        "for r in range(1):\n    if r == 0:\n        save()",
        "for rank in range(1):\n    if rank == 0:\n        save()",
        "save()",
        "for i in [1]:\n    if not accelerator.is_main_process:\n        continue\nsave()",
        "print(1) if accelerator.is_main_process else None; save()",
        "x = accelerator.is_main_process and 1\nsave()",
        "def f():\n    if accelerator.is_main_process and not args.saves:\n        return\n    save()\nf()",
        "main = accelerator.is_main_process\nmain = True\nif main:\n    save()",
        "def f(n):\n    if not accelerator.is_main_process:\n        return n\nf(1)\nsave()",
    ],
)
def test_a_call_of_all_ranks_is_not(text):
    assert set(found_in(text)) == {None}


def test_a_number_that_is_not_the_ranks_own_is_not_taken_for_it(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert found_in("rank = args.rank\nif rank == 8:\n    save()") == [None]
    assert found_in("if args.rank == 8:\n    save()") == [None]
