"""For tests: damage to a file on disk, each at a random place."""

from __future__ import annotations

import random
from collections.abc import Callable

Damage = Callable[[random.Random, bytes], bytes]


def flip(chance: random.Random, data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :]


def flip_anywhere(chance: random.Random, data: bytes) -> bytes:
    return flip(chance, data, chance.randrange(len(data)))


def flip_in(word: bytes) -> Damage:
    """In a line with this word in it."""

    def damage(chance: random.Random, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        number = chance.choice([number for number, line in enumerate(lines) if word in line])
        lines[number] = flip(chance, lines[number], chance.randrange(len(lines[number])))
        return b"".join(lines)

    return damage


def flip_an_end_of_line(chance: random.Random, data: bytes) -> bytes:
    return flip(chance, data, chance.choice([at for at, byte in enumerate(data) if byte == 10]))


def flip_a_checksum(chance: random.Random, data: bytes) -> bytes:
    return flip(
        chance, data, chance.choice([at for at, byte in enumerate(data) if byte == 10]) - chance.randrange(1, 9)
    )


def stretch(chance: random.Random, data: bytes) -> tuple[int, int]:
    first = chance.randrange(len(data))
    return first, min(len(data), first + chance.choice([1, 30, 512, 4096]))


def zero(chance: random.Random, data: bytes) -> bytes:
    first, last = stretch(chance, data)
    return data[:first] + b"\0" * (last - first) + data[last:]


def cut_out(chance: random.Random, data: bytes) -> bytes:
    first, last = stretch(chance, data)
    return data[:first] + data[last:]


def put_in(chance: random.Random, data: bytes) -> bytes:
    first, _ = stretch(chance, data)
    return data[:first] + chance.randbytes(chance.choice([1, 100])) + data[first:]


def truncate(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


DAMAGES: dict[str, Damage] = {
    "a byte anywhere": flip_anywhere,
    "a byte of a claim": flip_in(b'"claimed"'),
    "a byte of a start": flip_in(b'"started"'),
    "a byte of an end": flip_in(b'"done"'),
    "a byte of an acknowledgement": flip_in(b'"forgotten"'),
    "an end of line": flip_an_end_of_line,
    "a checksum": flip_a_checksum,
    "zeros": zero,
    "a part is gone": cut_out,
    "something foreign": put_in,
    "cut short": truncate,
    "all of it": lambda chance, data: b"",
    "all of it, garbage": lambda chance, data: chance.randbytes(len(data)),
}
