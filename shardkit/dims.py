"""How a dim of a tensor is divided over ranks: as torch.chunk and DTensor do."""


def part_of_dim(size: int, parts: int, number: int) -> tuple[int, int]:
    """Begin and length of the number-th of so many parts of a dim: equal ones, the last ones shorter or empty."""
    step = -(-size // parts)
    begin = min(number * step, size)
    return begin, min(step, size - begin)
