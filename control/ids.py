"""Names of things, and the order of the log. No IO, no clock, no randomness."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from midstream.control.errors import BadInput

COMMIT_SOURCE = "control"
"""The one logical source under which all controllers commit; its incarnation is the log's generation."""


class Position(NamedTuple):
    """Where a fact stands in the log: (generation, seq), written `1764579000123-17`.

    A generation is one unbroken life of the Redis stream, numbered by the time in ms at which it began; `seq` is
    dense within it, from 0. Positions compare in log order across generations.
    """

    generation: int
    seq: int

    def __str__(self) -> str:
        return f"{self.generation}-{self.seq}"


START = Position(0, 0)
"""Before every fact: real generations are above 0."""


def parse_position(text: str) -> Position:
    """Read `1764579000123-17`. Raises `BadInput` for anything else."""
    generation, dash, seq = text.partition("-")
    if not (dash and generation.isascii() and generation.isdigit() and seq.isascii() and seq.isdigit()):
        raise BadInput(f"a log position looks like 1764579000123-17, not {text!r}")
    return Position(int(generation), int(seq))


class Owner(msgspec.Struct, frozen=True, order=True):
    """One start of one instance: the only thing that may own a request."""

    instance: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.instance}#{self.incarnation}"


class Node(msgspec.Struct, frozen=True):
    """One start of a process that speaks on the data plane, and where it listens.

    `name` is `gateway/<id>` or `llumlet/<instance>`; `address` is what a peer connects to
    (`tcp://127.0.0.1:40123`; in simulation the name itself).
    """

    name: str
    incarnation: int
    address: str


def migration_id(decided_at: Position, index: int) -> str:
    """The id of the `index`-th move decided at a position; deciding it twice gives the same id."""
    return f"m-{decided_at}-{index}"


def scaling_id(decided_at: Position, index: int) -> str:
    """The id of the `index`-th decision on scaling at a position; deciding it twice gives the same id."""
    return f"s-{decided_at}-{index}"


def scaling_instance(decided_at: Position, index: int) -> str:
    """The name of an instance that such a decision asks for."""
    return f"auto-{decided_at}-{index}"
