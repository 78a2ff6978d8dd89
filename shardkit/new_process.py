"""How a module of shardkit is started in a new Python."""

import sys
from collections.abc import Sequence

# The working folder, '', comes last. With -m it would be first already while Python looks for the module, and a json.py
# or types.py there would be imported in place of Python's own.
_LAST = "sys.path[0] or sys.path.append(sys.path.pop(0))"


def command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line that calls the module's `main()`; its `sys.argv[1:]` are the arguments."""
    return [sys.executable, "-c", f"import sys; {_LAST}; from {module} import main; main()", *arguments]
