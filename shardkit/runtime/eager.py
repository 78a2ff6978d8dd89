"""Methods of the Accelerator and of prepared objects inside a function that the script compiles: they run as they are.

torch.compile would trace into them, where there are no kernels to be fused, and compile them again whenever a counter
has moved; 2.11 fails at attributes that they set. The model's own forward and what the script computes are compiled.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def eager(method: Method) -> Method:
    """The method, called without being traced. `torch.compiler.disable` alone would load the compiler at import."""

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*arguments, **named)
        return method(*arguments, **named)

    return run  # type: ignore[return-value]
