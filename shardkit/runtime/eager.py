"""Methods of the Accelerator and of prepared objects inside a function that the script compiles: they run as they are.

torch.compile would trace into them, where there are no kernels to be fused, and compile them again whenever a counter
has moved; 2.11 fails at attributes that they set. The model's own forward and what the script computes are compiled.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

Method = TypeVar("Method", bound=Callable[..., Any])


def eager(method: Method) -> Method:
    """The method, called without being traced. `torch.compiler.disable` alone would load the compiler at import."""

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return _untraced(run, method, arguments, named)
        return method(*arguments, **named)

    return run  # type: ignore[return-value]


@_disable_dynamo
def _untraced(run: Any, method: Any, arguments: Any, named: Any) -> Any:
    """The compiler would also compile `run` itself, again for each iterator of parameters that it is given."""
    if not hasattr(run, "_torchdynamo_disable"):
        from torch._dynamo.decorators import skip

        skip(run)
    return method(*arguments, **named)
