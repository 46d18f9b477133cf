"""The engine port: what a llumlet needs from one LLM engine. One contract suite in `tests/contracts/test_engine.py`.

A *slot* is the engine-side name of one run or one reservation of a request, chosen by the llumlet and
never used twice. Engine state changes only at step boundaries; every call may be repeated, and calls
about a slot that is gone do nothing or raise `Refused("gone", …)` as documented.

KV never passes through this interface: the engine copies it with a transfer of its own, because in vLLM
it lives in worker processes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from midstream.control.state import Fingerprint, Load
from midstream.instance.engines.prefixes import PrefixLog
from midstream.migration.protocol.messages import RequestSpec, RunState
from midstream.migration.protocol.work import Reserved, RoundReport, Route

__all__ = ["BlockAccount", "Engine", "Output", "Reserved", "RoundReport", "Route", "SlotProgress"]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New output tokens of one slot. `first` is the index of `ids[0]` among the request's output tokens."""

    slot: str
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[bytes, ...] = ()
    finish: str | None = None
    """`stop` or `length` with the last tokens (or with none); `error:<what>` if the engine gave up on it."""


class SlotProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come. `phase`: `waiting prefill decode frozen`."""

    slot: str
    phase: str
    tokens: int
    """Prompt plus output tokens."""
    outputs: int
    computed: int
    blocks: int
    preemptions: int
    refusal: str | None = None
    """Why this run cannot be moved exactly (a code), `None` if it can."""


class BlockAccount(msgspec.Struct, frozen=True):
    """Where all blocks are; `owned + free + reserved == total` at every step boundary (P07).

    Blocks kept only by the prefix cache count as free. A block shared by several runs counts once.
    """

    total: int
    owned: int
    free: int
    reserved: int


class Engine(Protocol):
    """One engine. All coroutines run on the llumlet's event loop and never block it."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def blocks_total(self) -> int: ...

    @property
    def slots_max(self) -> int:
        """Requests that may run at once."""
        ...

    @property
    def tokens_max(self) -> int:
        """Longest prompt + output."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def failed(self) -> str:
        """Return, with a reason, only when the engine has died."""
        ...

    @property
    def prefixes(self) -> PrefixLog:
        """What its prefix cache holds, as its own events tell: a little late, never wrong for long."""
        ...

    def transfers(self) -> tuple[str, ...]:
        """Offers of the transfer backends it can send and receive with, best first (`transfers.choice`)."""
        ...

    async def submit(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> None:
        """Queue a run that continues after `outputs`, which count as generated, not as prompt.

        Sampling goes on exactly as if it had made them itself. Raises `Refused` (`too_long`, `bad_request`).
        A slot that exists already is left as it is.
        """
        ...

    async def abort(self, slot: str) -> int:
        """End a run in any phase, or a reservation, and free its blocks; return how many it held. Gone: 0.

        No output of the slot is delivered afterwards.
        """
        ...

    async def outputs(self) -> list[Output]:
        """Wait for and take the next outputs, in order per slot. One caller at a time."""
        ...

    def load(self) -> Load: ...

    def account(self) -> BlockAccount: ...

    def progress(self) -> tuple[SlotProgress, ...]:
        """All runs (not reservations), in arrival order."""
        ...

    async def describe(self, slot: str) -> SlotProgress:
        """Raises `Refused("gone")`."""
        ...

    async def copy(self, slot: str, first_block: int, route: Route, *, checksum: bool = False) -> RoundReport:
        """Copy what is final from `first_block` on: full blocks while it runs, all blocks once frozen.

        The copied blocks are pinned meanwhile; the run decodes on. Raises `TransferFailed`, or `Refused` with
        `gone` (finished or aborted) or `preempted` (its blocks changed under the copy). Cancellation leaves no pin.
        """
        ...

    async def freeze(self, slot: str) -> RunState:
        """At a step boundary take the run out of the batch and read its state.

        Every output up to the state was put into `outputs()` before this returns. The blocks stay. Works for
        waiting runs too (`computed` = 0, no blocks). Raises `Refused`: `gone`, or `finished` if its last step ended it.
        """
        ...

    async def thaw(self, slot: str) -> None:
        """Let a frozen run go on exactly where it was. Not frozen or gone: nothing."""
        ...

    async def reserve(
        self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], blocks: int, transfers: tuple[str, ...]
    ) -> Reserved:
        """Hold `blocks` blocks (all or nothing) and one run slot for an arriving run.

        Raises `Refused` (`no_blocks`, `no_slots`, `no_transfer`, `too_long`). Reserved blocks are never in the
        prefix cache and never given to others.
        """
        ...

    async def adopt(self, slot: str, state: RunState) -> None:
        """Turn a reservation whose blocks hold `state.blocks` blocks of KV into a run that goes on exactly.

        With `state.computed == 0` it joins the waiting queue. Raises `Refused("gone")` without a reservation.
        Writes through the reservation's handle are refused from then on.
        """
        ...
