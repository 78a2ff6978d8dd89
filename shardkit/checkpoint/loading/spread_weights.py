"""How to shard tensors that an object's present state has not yet, as an average of the weights before its first
update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.files.layout import Index, TensorEntry


@dataclass(frozen=True)
class Weights:
    """The sharded parameters of a run that loads."""

    by_shape: Mapping[tuple[int, ...], DTensor]
    by_name: Mapping[str, DTensor]
    """Empty if the checkpoint's weights are sharded: what is whole beside them was whole for the script."""

    @classmethod
    def of(cls, models: Iterable[nn.Module], index: Index) -> Weights:
        named = [pair for model in models for pair in nn.Module.named_parameters(model)]
        sharded = {name: one for name, one in named if isinstance(one, DTensor)}
        of_models = [held for section, held in index.sections.items() if section.startswith("model")]
        were_whole = not any(entry.is_sharded for held in of_models for entry in held.values())
        return cls({tuple(one.shape): one for one in sharded.values()}, sharded if were_whole else {})

    def like(self, path: str, entry: TensorEntry) -> DTensor | None:
        """The parameter as which a tensor is sharded, if any: one that was saved sharded as one of its shape, a whole
        one as that of its name and shape."""
        if entry.is_sharded:
            return self.by_shape.get(entry.shape)
        named = (one for name, one in self.by_name.items() if path.endswith(f".{name}"))
        return next((one for one in named if tuple(one.shape) == entry.shape), None)


NO_WEIGHTS = Weights({}, {})
