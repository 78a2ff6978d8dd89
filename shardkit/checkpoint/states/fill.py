"""Reads saved tensors: directly into the memory of a tensor where possible, else through one small buffer.

    saved.fill(section, name, tensor)            into a live tensor, in place
    saved.new(section, name, like, device)       into a new tensor

Extra memory is one buffer, regardless of the size of the tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.files import disk, layout
from shardkit.checkpoint.files.layout import Box, Stored, TensorEntry
from shardkit.checkpoint.files.verify import Files, Piece
from shardkit.checkpoint.states import tensors
from shardkit.distributed import accelerators, xla
from shardkit.distributed.host_memory import can_pin_for
from shardkit.distributed.tensors import local_part, sharded_like
from shardkit.errors import CheckpointCorrupted

# Shorter byte ranges are read together with the bytes between them: one call costs as much as reading so many bytes.
RUN_BYTES = 64 << 10


def entry_of_parameter(index: layout.Index, fqn: str) -> TensorEntry | None:
    """The index entry of a parameter, by its name in optimizer states (`1:fqn` in the second model); or None."""
    number, colon, name = fqn.partition(":")
    section, name = (layout.section_name("model", int(number)), name) if colon and number.isdigit() else ("model", fqn)
    name = index.aliases.get(section, {}).get(name, name)
    return index.sections.get(section, {}).get(name)


def _nothing(count: int) -> None: ...


class Saved:
    """The tensors of a checkpoint, including the per-rank tensors of the saving rank `own_rank` (None: of no rank)."""

    def __init__(self, files: Files, own_rank: int | None = None, work: Callable[[int], None] = _nothing) -> None:
        self.files, self.work = files, work
        own = "" if own_rank is None else layout.own_file(own_rank, files.checkpoint.manifest.world_size)
        self._own = own if files.has(own) else ""
        self._memory: dict[bool, torch.Tensor] = {}  # the buffer: in ordinary, and in pinned memory

    @property
    def index(self) -> layout.Index:
        return self.files.checkpoint.index

    def names(self, section: str) -> Iterable[str]:
        """All tensors of a section without per-rank ones, in file order."""
        return self.index.sections.get(section, {})

    def entry(self, section: str, name: str) -> TensorEntry:
        """The index entry of a tensor. Raises CheckpointCorrupted if there is none."""
        own = self._own_stored(section, name)
        if own is not None:
            return TensorEntry(own.shape, own.dtype, 0, ())
        found = self.index.sections.get(section, {}).get(name)
        if found is None:
            where = self.files.checkpoint.path
            raise CheckpointCorrupted(f"{where}: {section}: {name} is missing; the checkpoint is damaged.")
        return found

    def new(
        self, section: str, name: str, like: torch.Tensor | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """The tensor in new memory: sharded as `like` if that is a DTensor of the same shape, else whole; with the
        strides of `like`, since fused optimizers need those of the parameter.

        `device`: default: that of `like` if it is sharded, else the CPU.
        """
        entry = self.entry(section, name)
        dtype = tensors.TORCH_DTYPES[entry.dtype]
        if device is not None and device.type == "xla":
            host = torch.empty(entry.shape, dtype=dtype, device="cpu")
            self.fill(section, name, host)
            return xla.like(host, like)
        is_alike = like is not None and tuple(like.shape) == entry.shape
        if is_alike and isinstance(like, DTensor) and self._own_stored(section, name) is None:
            found = _empty_like(like, dtype, device)
        elif is_alike and like is not None and not isinstance(like, DTensor) and not xla.is_xla(like):
            pins = _is_pinned(device, like)
            found = torch.empty_like(like, dtype=dtype, device=device or "cpu", requires_grad=False, pin_memory=pins)
        else:
            found = torch.empty(entry.shape, dtype=dtype, device=device or "cpu")
        self.fill(section, name, found)
        return found

    def fill(self, section: str, name: str, tensor: torch.Tensor) -> None:
        """Read this rank's part of the tensor into it, in place. Shape and dtype must be those that were saved."""
        if xla.is_xla(tensor):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self.fill(section, name, host)
            xla.replace_(tensor, host)
            return
        into, box = local_part(tensor), tensors.held_box(tensor)
        with torch.no_grad():
            for piece in self._pieces(section, name, box):
                part = box.overlap(piece.box)
                if part is not None:
                    self._fill_part(piece, part.inside(piece.box), tensors.narrow(into, part.inside(box)))
        if not into.is_inference():
            torch.autograd.graph.increment_version(into)

    def _pieces(self, section: str, name: str, box: Box) -> Iterable[Piece]:
        own = self._own_stored(section, name)
        if own is None:
            return self.files.pieces(section, name, box)
        return [Piece(self._own, Box((0,) * len(own.shape), own.shape), own)]

    def _own_stored(self, section: str, name: str) -> Stored | None:
        return self.files.header(self._own).get(f"{section}:{name}") if self._own else None

    def _fill_part(self, piece: Piece, source: Box, into: torch.Tensor) -> None:
        """Copy a box of a stored tensor; directly into memory if source and target are contiguous."""
        file, where = self.files.source(piece.file), self.files.where(piece.file)
        run = layout.only_run(piece.stored.shape, source, layout.ITEM_BYTES[piece.stored.dtype])
        if run is not None and into.is_cpu and into.is_contiguous() and not (into.is_conj() or into.is_neg()):
            for low in range(0, run[1], disk.BLOCK_BYTES):
                block = tensors.memory(into)[low : low + disk.BLOCK_BYTES]
                disk.read_into(file, block, piece.stored.begin + run[0] + low, where)
                self.work(len(block))
        elif into.ndim:
            self._by_rows(file, where, piece.stored, source, into)
        else:
            self._by_rows(file, where, replace(piece.stored, shape=(1,)), Box((0,), (1,)), into.view(1))

    def _by_rows(self, file: disk.Source, where: str, stored: Stored, source: Box, into: torch.Tensor) -> None:
        """Read whole rows of dim 0, as many as fit the buffer, and copy the requested part. Rows that are long, or of
        which a small part is requested, are read one by one in the same way."""
        row_bytes = max(1, stored.bytes // stored.shape[0])
        inner = Box(source.offsets[1:], source.sizes[1:])
        run = layout.only_run(stored.shape[1:], inner, layout.ITEM_BYTES[stored.dtype])
        is_sparse = run is not None and RUN_BYTES <= run[1] < row_bytes
        if len(stored.shape) > 1 and (is_sparse or row_bytes > disk.BLOCK_BYTES):
            for number in range(source.sizes[0]):
                at = stored.begin + (source.offsets[0] + number) * row_bytes
                self._by_rows(file, where, Stored(stored.dtype, stored.shape[1:], at, row_bytes), inner, into[number])
            return
        at_once = max(1, disk.BLOCK_BYTES // row_bytes)
        for first in range(0, source.sizes[0], at_once):
            count = min(at_once, source.sizes[0] - first)
            block = self._block(stored.dtype, (count, *stored.shape[1:]), pins=not into.is_cpu)
            at = stored.begin + (source.offsets[0] + first) * row_bytes
            disk.read_into(file, tensors.memory(block), at, where)
            box = Box((0, *source.offsets[1:]), (count, *source.sizes[1:]))
            wanted = tensors.narrow(block, box)
            into[first : first + count].copy_(wanted)
            self.work(wanted.numel() * wanted.element_size())

    def _block(self, dtype: str, shape: tuple[int, ...], pins: bool) -> torch.Tensor:
        """The buffer, as a tensor of this shape; in pinned memory for copies to a device, if it has such."""
        size = layout.bytes_of(dtype, shape)
        if pins not in self._memory:  # pinning initializes the device, which a tool on the CPU must leave alone
            is_pinned = pins and accelerators.can_pin()
            self._memory[pins] = torch.empty(disk.BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        return self._memory[pins][:size].view(tensors.TORCH_DTYPES[dtype]).view(shape)


def _empty_like(like: DTensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """An uninitialized tensor of this dtype, sharded as `like`; on its device where none is given."""
    local = local_part(like)
    pins = _is_pinned(device, local)
    return sharded_like(torch.empty(local.shape, dtype=dtype, device=device or local.device, pin_memory=pins), like)


def _is_pinned(device: torch.device | None, like: torch.Tensor) -> bool:
    """Whether a tensor that is asked for in host memory is for copies from and to the device."""
    return device is not None and device.type == "cpu" and can_pin_for(like)
