"""Bytes alive in one process, by category, at every moment of a training step: a dispatch mode that sees each operator.

Storages are counted, each once regardless of how many tensors share it, from the operator that allocates it until its
last reference is gone. Storages of fake tensors have the size of the real ones.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardkit.plan.allocator import Recording
from shardkit.plan.rank_memory import CATEGORIES, Memory, Moment

_GATHERED = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "c10d::_allgather_base_")
# A random number that decides what runs is 0.5, by which random layer dropping (LayerDrop, stochastic depth) drops
# nothing, however it is written: the maximum of memory.
_DRAWN = 0.5
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    torch.ops.aten.lt.Scalar: operator.lt,
    torch.ops.aten.le.Scalar: operator.le,
    torch.ops.aten.gt.Scalar: operator.gt,
    torch.ops.aten.ge.Scalar: operator.ge,
}
# Which argument torch counts: the output of an all-gather (None: the result), the input of a reduce-scatter.
_PAYLOADS = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::broadcast_": ("broadcast", 0),
}


class MemoryTracker(TorchDispatchMode):
    """Inside, all allocations of operators are counted. `enter` starts a moment; `moments`: those so far.

    Each moment holds the memory at its peak. `payload_bytes`: bytes of the collectives by kind. `recording`:
    allocations and frees since the last restart. `host_bytes`: maximum of offloaded bytes; none if the device
    `is_on_host`, a CPU.
    """

    def __init__(self, is_on_host: bool = False) -> None:
        super().__init__()
        self._is_on_host = is_on_host
        self.moments: list[Moment] = []
        self.payload_bytes: dict[str, int] = {}
        self.recording = Recording()
        self.host_bytes = 0
        self._default = "activations"
        self._alive: dict[int, tuple[int, str, weakref.ref]] = {}
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._on_host = 0
        self._now = ("", "")
        self._peak, self._at_peak = 0, dict(self._bytes)
        self._is_passing = False
        self._fake_mode: Any = None
        self._depth = 0
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def enter(self, phase: str, unit: str = "", is_passing: bool = False) -> None:
        """Ends the current moment and starts another. A moment that `is_passing` is merged into the one before it,
        unless it is the last of its phase."""
        if self._now[0]:
            last = Moment(*self._now, Memory(**self._at_peak))
            if self._is_passing and phase == self._now[0] and self.moments:
                before = self.moments.pop()
                last = before if before.memory.total >= last.memory.total else Moment(*_name(before), last.memory)
            self.moments.append(last)
        if phase == "optimizer":
            self.recording.optimizer_at = len(self.recording.events)
        self._now, self._is_passing = (phase, unit), is_passing
        self._peak = self._total
        self._at_peak = dict(self._bytes)

    @property
    def unit(self) -> str:
        """The unit of the current moment."""
        return self._now[1]

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Inside, allocations are optimizer state, and a number can be read from a fake tensor: some optimizers scale
        their update by a norm. (In a model such a number could decide what runs, so reading one fails there.)"""
        found, self._default = self._default, "optimizer_state"
        try:
            yield
        finally:
            self._default = found

    def restart(self) -> None:
        """Clears moments and traffic; storages that are alive stay counted."""
        self.moments, self.payload_bytes, self._now = [], {}, ("", "")
        alive = ((key, size, category) for key, (size, category, _) in self._alive.items() if size)
        self.recording.restart((key, size, category == "optimizer_state") for key, size, category in alive)

    def count(self, tensors: Iterable[Any], category: str) -> None:
        """Assigns the tensors' storages to a category, whether already counted or not."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, category, is_final=True)
        self._note()

    def category_of(self, tensor: torch.Tensor) -> str | None:
        """The category that the tensor's storage is counted in."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found[1] if found else None

    def __enter__(self) -> MemoryTracker:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
        self._fake_mode = modes[-1] if modes else None
        self._depth = _depth(self._fake_mode)
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing()  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.recording.is_over = True
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs operators on the local tensors
        if function is torch.ops.aten._local_scalar_dense.default and self._default == "optimizer_state":
            # A step (its int is 1) or a product of decays: NAdam divides by one minus it.
            return 1.5 if args[0].is_floating_point() else 1
        drawn = getattr(args[0], "_drawn", None) if args else None
        if function is torch.ops.aten._local_scalar_dense.default and drawn is not None:
            return drawn
        result = _run(function, args, kwargs or {})
        if function is torch.ops.aten.rand.default and result.numel() == 1:
            result._drawn = _DRAWN
        if function in _COMPARISONS and drawn is not None:
            result._drawn = _COMPARISONS[function](drawn, args[1])
        if function._schema.name == "shardkit::to_host" and not self._is_on_host:
            self._add_on_host(result)
        elif not self._is_propagating():
            self._see(function._schema.name, args, kwargs or {}, result)
        return result

    def _is_propagating(self) -> bool:
        """DTensor computes global shapes in a separate fake mode, or by entering this one again
        (`ShardingPropagator._propagate_tensor_meta_non_cached`); none of these tensors is allocated in training."""
        from torch._guards import active_fake_mode

        mode = active_fake_mode()
        return mode is not self._fake_mode or _depth(mode) > self._depth

    def _see(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        category = self._default
        if name == "aten::_to_copy":
            category = self._of_copy(args[0])
        elif name == "aten::cat":
            category = self._of_joined(args[0], kwargs.get("out"))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, category)
        if name.startswith(("fsdp::", "c10d::")) or name in _PAYLOADS:
            self._see_collective(name, args, kwargs, result)
        self._note()

    def _of_copy(self, source: torch.Tensor) -> str:
        """A parameter cast to another dtype is a gathered one; a reduced gradient in another dtype stays a gradient."""
        kinds = {"parameters": "gathered", "gradients": "gradients", "reduction": "reduction"}
        return kinds.get(self.category_of(source) or "", self._default)

    def _of_joined(self, parts: list[torch.Tensor], out: torch.Tensor | None) -> str:
        """Shards of a dim other than 0 are joined in forward into a buffer of the parameter's, and gradients cut on
        that dim before they are reduced (`foreach_all_gather_copy_out`, `foreach_reduce`)."""
        found = {self.category_of(part) for part in parts}
        if found == {"gathered"} and out is not None:
            self.count([out], "gathered")
        return "reduction" if found == {"reduction"} else self._default

    def _see_collective(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name in _GATHERED:
            self.count(tree_leaves([result, kwargs.get("out")]), "gathered")
        if name == "fsdp::all_gather_copy_in":
            self._on_stream(tree_leaves(result), "gather")
        elif name == "fsdp::chunk_cat":
            self.count(tree_leaves([kwargs.get("out")]), "reduction")
        elif name == "c10d::_reduce_scatter_base_":
            self.count([args[1]], "reduction")
            self.count([args[0]], "gradients")
            self._on_stream([args[0]], "reduce")
        if name in _PAYLOADS:
            kind, position = _PAYLOADS[name]
            tensors = tree_leaves(result if position is None else args[position])
            sent = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
            self.payload_bytes[kind] = self.payload_bytes.get(kind, 0) + sent

    def _add(self, tensor: torch.Tensor, category: str, is_final: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._alive.get(key)
        if found is None:
            reference = weakref.ref(storage, partial(self._gone, key))
            self._alive[key] = (storage.nbytes(), category, reference)
            self.recording.begin(key, storage.nbytes(), "reduce" if category == "gradients" else "compute")
            self._change(category, storage.nbytes())
        elif is_final and found[1] != category:
            self._change(found[1], -found[0])
            self._alive[key] = (found[0], category, found[2])
            self._change(category, found[0])

    def _add_on_host(self, tensor: torch.Tensor) -> None:
        """Counts activations offloaded by `sharding/offload.py`."""
        size = tensor.untyped_storage().nbytes()
        self._on_host += size
        self.host_bytes = max(self.host_bytes, self._on_host)
        weakref.finalize(tensor.untyped_storage(), self._off_host, size)

    def _off_host(self, size: int) -> None:
        self._on_host -= size

    def _gone(self, key: int, _: weakref.ref) -> None:
        size, category, _ = self._alive.pop(key)
        self.recording.end(key)
        self._change(category, -size)

    def _on_stream(self, tensors: Iterable[Any], stream: str) -> None:
        """Moves the latest allocations of a collective to its stream (`foreach_all_gather`, `foreach_reduce`)."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self.recording.move(tensor.untyped_storage()._cdata, stream)

    def _resizing(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """FSDP frees and allocates gathered parameters by resizing their storages, without the dispatcher."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            found = self._alive.get(storage._cdata)
            if found is not None:
                self._alive[storage._cdata] = (storage.nbytes(), found[1], found[2])
                self.recording.end(storage._cdata)
                self.recording.begin(storage._cdata, storage.nbytes(), "compute")
                self._change(found[1], storage.nbytes() - found[0])
                self._note()
            return result

        return resize

    def _change(self, category: str, size: int) -> None:
        self._bytes[category] += size
        self._total += size

    def _note(self) -> None:
        """Equal sums replace older ones: a buffer's category is known only once it is used."""
        if self._total >= self._peak:
            self._peak = self._total
            self._at_peak = dict(self._bytes)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """The operator's result. For fake tensors torch accepts grouped matrix products in bf16 only, although its kernels
    accept other dtypes (`_meta_grouped_mm_common`, torch 2.13): others run in bf16, and the result gets their dtype."""
    if function is torch.ops.aten.mkldnn_rnn_layer.default:
        return _with_workspace(function(*args, **kwargs), *args)
    is_grouped = function is torch.ops.aten._grouped_mm.default
    if not is_grouped or not isinstance(args[0], FakeTensor) or args[0].dtype is torch.bfloat16:
        return function(*args, **kwargs)
    narrow = (args[0].to(torch.bfloat16), args[1].to(torch.bfloat16), *args[2:])
    return torch.empty_like(function(*narrow, **kwargs), dtype=args[0].dtype)


def _with_workspace(result: Any, batch: torch.Tensor, *others: Any) -> Any:
    """The result of one layer of an LSTM with what it saves for backward, which a fake one leaves empty
    (`mkldnn_rnn_layer` in torch/_meta_registrations.py, torch 2.13): each token's four gates, its cell before and
    after, and its hidden state, as torch's own kernel saves them (`_thnn_fused_lstm_cell`)."""
    hidden_size, is_trained = others[9], others[14]
    if not is_trained or not isinstance(result[3], FakeTensor):
        return result
    tokens = batch.shape[0] * batch.shape[1]
    return (*result[:3], result[3].new_empty(7 * tokens * hidden_size * batch.element_size()))


def _depth(fake_mode: Any) -> int:
    """How many times the fake mode is currently entered."""
    return len(fake_mode.enter_stack) if fake_mode is not None else 0


def _name(moment: Moment) -> tuple[str, str]:
    return moment.phase, moment.unit
