"""Who writes which bytes, worked out without torch: every element once, whatever the mesh, and found again by a box."""

import json
from itertools import product
from math import prod

import pytest

from shardkit.checkpoint.files import index_json, layout
from shardkit.checkpoint.files.layout import Box, Index, Mesh, TensorEntry
from shardkit.dims import part_of_dim
from shardkit.errors import CheckpointCorrupted

MESHES = [
    (Mesh((1,)), (None,)),
    (Mesh((3,)), (None,)),
    (Mesh((4,)), (0,)),
    (Mesh((4,)), (1,)),
    (Mesh((2, 3)), (None, 0)),
    (Mesh((2, 2)), (0, 0)),
    (Mesh((2, 2)), (1, 0)),
    (Mesh((2, 2), (3, 2, 1, 0)), (0, None)),
]
SHAPES = [(7, 5), (2, 3), (250, 4), (1, 9), (0, 4)]


def cells(box):
    return set(product(*(range(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))))


@pytest.mark.parametrize("split", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("mesh", "placements"), MESHES)
def test_every_element_is_written_once_and_a_reader_finds_it(mesh, placements, split, monkeypatch):
    monkeypatch.setattr(layout, "SPLIT_BYTES", 1 if split else 1 << 20)
    for shape in SHAPES:
        entry = TensorEntry(shape, "F32", 0, placements)
        written = {rank: layout.chunk_of("w", entry, mesh, rank) for rank in range(mesh.size)}
        pieces = [cells(chunk.box) for chunk in written.values() if chunk]
        assert sum(map(len, pieces)) == prod(shape), "an element is written twice, or never"
        assert set().union(*pieces) == cells(entry.whole)
        for box in (entry.whole, Box((0, 1), (1, 2)), Box((1, 0), (max(shape[0] - 1, 0), 2))):
            found = dict(layout.saved_chunks("w", entry, mesh, box))
            wanted = {r: c.box for r, c in written.items() if c and c.box.overlap(box)}
            assert found == wanted


def test_the_rule_is_dtensors():
    for size, parts in product((0, 1, 2, 5, 7, 250), (1, 2, 3, 4)):
        expected, left = [], size
        step = -(-size // parts)
        for number in range(parts):
            length = min(step, left)
            expected.append((min(number * step, size), length))
            left -= length
        assert [part_of_dim(size, parts, number) for number in range(parts)] == expected


def test_large_copies_are_spread_over_their_holders():
    index = Index(
        "sharded", 4, [Mesh((4,))], {"model": {f"w{n}": TensorEntry((4096, 1024), "F32", 0, (None,)) for n in "ab"}}
    )
    sizes = [sum(chunk.bytes for chunk in layout.chunks_of(index, "model", rank)) for rank in range(4)]
    assert sizes == [2 * 4096 * 1024] * 4


def test_runs_are_the_bytes_of_a_box():
    shape = (3, 4, 5)
    numbers = {cell: position for position, cell in enumerate(product(*map(range, shape)))}
    for box in (Box((0, 0, 0), shape), Box((1, 0, 0), (2, 4, 5)), Box((1, 1, 0), (2, 2, 5)), Box((0, 1, 2), (3, 1, 2))):
        found = [offset + byte for offset, length in layout.runs(shape, box, 2) for byte in range(length)]
        assert found == sorted(2 * numbers[cell] + byte for cell in cells(box) for byte in (0, 1))
    assert len(list(layout.runs(shape, Box((1, 0, 0), (2, 4, 5)), 2))) == 1
    assert list(layout.runs((), Box((), ()), 4)) == [(0, 4)]


def test_a_header_is_read_back_and_nonsense_is_refused():
    text = layout.header([("a", "F32", (2, 3)), ("b", "BF16", ()), ("c", "U8", (0, 3))], {"format": "pt"})
    assert len(text) % 8 == 0
    data = text + bytes(26)
    found = layout.read_header(lambda offset, length: data[offset : offset + length], len(data), "x")
    assert found["a"] == layout.Stored("F32", (2, 3), len(text), 24)
    assert found["b"] == layout.Stored("BF16", (), len(text) + 24, 2)
    broken = [
        data[:-1],
        data + b"x",
        b"\xff" * 8 + data[8:],
        data.replace(b'"F32"', b'"F99"'),
        data.replace(b"[0,24]", b"[0,20]"),
        data.replace(b'"b"', b'"a"'),
        b"",
    ]
    for wrong in broken:
        with pytest.raises(CheckpointCorrupted, match="x: "):
            layout.read_header(lambda offset, length, wrong=wrong: wrong[offset : offset + length], len(wrong), "x")


def test_the_index_survives_its_file():
    index = Index("full", 6, [Mesh((2, 3), names=("replicate", "shard")), Mesh((1,), (0,))])
    index.sections = {
        "model": {"b": TensorEntry((2,), "BF16", 1, (None,)), "a": TensorEntry((7, 5), "F32", 0, (None, 0))}
    }
    index.aliases = {"model": {"tied": "a"}}
    index.sort()
    assert list(index.sections["model"]) == ["a", "b"]
    text = json.loads(json.dumps(index_json.to_json(index)))
    assert index_json.from_json(text, "x") == index
    for damage in ("kind", "meshes", "sections", "aliases"):
        wrong = {**text, damage: "?"}
        with pytest.raises(CheckpointCorrupted, match="not an index"):
            index_json.from_json(wrong, "x")


def llama_70b_with_adam(ranks):
    """Index of the tensor list of a 70B Llama with Adam, and what one rank writes of it."""
    entries = {}
    for block in range(80):
        for name, shape in (("q", (8192, 8192)), ("k", (1024, 8192)), ("v", (1024, 8192)), ("o", (8192, 8192))):
            entries[f"model.layers.{block}.self_attn.{name}_proj.weight"] = shape
        for name in ("gate", "up"):
            entries[f"model.layers.{block}.mlp.{name}_proj.weight"] = (28672, 8192)
        entries[f"model.layers.{block}.mlp.down_proj.weight"] = (8192, 28672)
        entries[f"model.layers.{block}.norm1.weight"] = entries[f"model.layers.{block}.norm2.weight"] = (8192,)
    entries |= {"embed": (128256, 8192), "head": (128256, 8192), "norm": (8192,)}
    index = Index("sharded", ranks, [Mesh((ranks,))])
    index.sections["model"] = {name: TensorEntry(shape, "F32", 0, (0,)) for name, shape in entries.items()}
    index.sections["optim"] = {
        f"{name}/{key}": TensorEntry(shape, "F32", 0, (0,))
        for name, shape in entries.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return index


@pytest.mark.parametrize("ranks", [2, 4096])
def test_the_index_does_not_grow_with_the_ranks(ranks):
    index = llama_70b_with_adam(ranks)
    assert sum(map(len, index.sections.values())) == 2169
    assert len(json.dumps(index_json.to_json(index))) < 400_000
    chunks = [layout.chunks_of(index, section, ranks - 1) for section in index.sections]
    assert len(chunks[1]) == 2 * len(chunks[0])


@pytest.mark.parametrize(("saved", "loading"), [(4096, 64), (64, 4096)])
def test_a_reader_looks_at_overlapping_pieces_only(saved, loading):
    index, now = llama_70b_with_adam(saved), llama_70b_with_adam(loading)
    name = "model.layers.3.mlp.gate_proj.weight"
    entry = index.sections["model"][name]
    box = layout.local_box(entry, now.meshes[0], (loading // 2,))
    found = list(layout.saved_chunks(name, entry, index.meshes[0], box))
    assert len(found) == max(1, saved // loading)
    assert sum(piece.overlap(box).count for _, piece in found) == box.count
