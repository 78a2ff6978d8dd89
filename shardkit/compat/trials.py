"""The part of `accelerate.test_utils` that scripts use: a small model and dataset, and checks of tensors."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardkit.distributed import accelerators, collectives

torch_device = accelerators.kind() or "cpu"


@contextmanager
def assert_exception(exception_class: type[Exception], msg: str | None = None) -> Iterator[None]:
    """Raises AssertionError if the block does not raise such an exception, with `msg` in its message."""
    raised: Exception | None = None
    try:
        yield
    except exception_class as error:
        raised = error
    assert raised is not None, f"{exception_class.__name__} was not raised"
    assert msg is None or msg in str(raised), f"{msg!r} is not in {raised}"


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same values. Collective."""
    whole = collectives.gather(tensor[None])
    return all(bool(torch.equal(one, whole[0])) for one in whole)


class RegressionDataset(torch.utils.data.Dataset):
    """y = a x + b with a little noise."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = torch.Generator()
        if seed is not None:
            generator.manual_seed(seed)
        self.length = length
        self.x = torch.randn(length, generator=generator)
        self.y = a * self.x + b + 0.1 * torch.randn(length, generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """a x + b."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor | None = None) -> Any:
        return x * self.a + self.b  # type: ignore[operator]


def execute_subprocess_async(command: list[str], env: Any = None, **_: Any) -> int:
    """Run a command and return its exit code. Raises RuntimeError if it is not 0."""
    code = subprocess.run(command, env=env, stdout=sys.stdout, stderr=sys.stderr, check=False).returncode
    if code:
        raise RuntimeError(f"{' '.join(command)}: failed (got exit code {code}).")
    return code
