"""The parameters of functions that a script gives."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

_NOT_COMPUTED: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    from annotationlib import Format

    _NOT_COMPUTED["annotation_format"] = Format.FORWARDREF


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """As inspect.signature, also where annotations name what only type checkers import: from Python 3.14 on such a
    function is valid, and inspect.signature of it a NameError."""
    return inspect.signature(function, **_NOT_COMPUTED)
