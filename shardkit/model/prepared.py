"""What a script gives to `prepare`, by name: the parameters of its models, and the param groups of its optimizers."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prepared:
    """`models`: for each, the names of its parameters in order, tied ones once, and whether each is trained.
    `optimizers`: for each, its param groups, with parameters as (number of the model, name)."""

    models: list[dict[str, bool]]
    optimizers: list[list[list[tuple[int, str]]]]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Prepared":
        optimizers = [[[(number, name) for number, name in group] for group in one] for one in value["optimizers"]]
        return cls(value["models"], optimizers)
