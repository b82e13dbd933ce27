"""Damage to a file on disk, each at a random place."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

Damage = Callable[[random.Random, bytes], bytes]


def seeded_rng() -> random.Random:
    """Seeded differently each time; the environment variable SEED repeats a failed test."""
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    return random.Random(seed)


def flip(rng: random.Random, data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]


def flip_anywhere(rng: random.Random, data: bytes) -> bytes:
    return flip(rng, data, rng.randrange(len(data)))


def flip_in(word: bytes) -> Damage:
    """Flip a byte of a line that contains `word`."""

    def damage(rng: random.Random, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        number = rng.choice([number for number, line in enumerate(lines) if word in line])
        lines[number] = flip(rng, lines[number], rng.randrange(len(lines[number])))
        return b"".join(lines)

    return damage


def flip_an_end_of_line(rng: random.Random, data: bytes) -> bytes:
    return flip(rng, data, rng.choice([at for at, byte in enumerate(data) if byte == 10]))


def flip_a_checksum(rng: random.Random, data: bytes) -> bytes:
    return flip(rng, data, rng.choice([at for at, byte in enumerate(data) if byte == 10]) - rng.randrange(1, 9))


def random_range(rng: random.Random, data: bytes) -> tuple[int, int]:
    first = rng.randrange(len(data))
    return first, min(len(data), first + rng.choice([1, 30, 512, 4096]))


def zero(rng: random.Random, data: bytes) -> bytes:
    first, last = random_range(rng, data)
    return data[:first] + b"\0" * (last - first) + data[last:]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    first, last = random_range(rng, data)
    return data[:first] + data[last:]


def insert(rng: random.Random, data: bytes) -> bytes:
    first, _ = random_range(rng, data)
    return data[:first] + rng.randbytes(rng.choice([1, 100])) + data[first:]


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


DAMAGES: dict[str, Damage] = {
    "a byte anywhere": flip_anywhere,
    "a byte of a claim": flip_in(b'"claimed"'),
    "a byte of a start": flip_in(b'"started"'),
    "a byte of an end": flip_in(b'"done"'),
    "a byte of an acknowledgement": flip_in(b'"forgotten"'),
    "an end of line": flip_an_end_of_line,
    "a checksum": flip_a_checksum,
    "zeros": zero,
    "a part removed": cut_out,
    "random bytes inserted": insert,
    "truncated": truncate,
    "emptied": lambda rng, data: b"",
    "all replaced by garbage": lambda rng, data: rng.randbytes(len(data)),
}
