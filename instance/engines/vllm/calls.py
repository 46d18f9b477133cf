"""What the llumlet says to its engine core and to the workers, and what they answer: msgpack, no other types.

A call to the core travels as one argument of a vLLM utility call; a call to a worker's copier over a Unix
socket of its own, so that bytes never wait for a step.
"""

from __future__ import annotations

import msgspec

from midstream.control.state import Load
from midstream.instance.engines.base import BlockAccount, SlotProgress

REPORT_ID = ""
"""Request id of the core's outputs that carry a `Report`, under `REPORT_KEY`."""
REPORT_KEY = "midstream"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The core at one step boundary. `account` is `None` when counting again would cost too much now."""

    load: Load
    account: BlockAccount | None
    runs: tuple[SlotProgress, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What every core call returns: a value, or a refusal, and how things stand."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: tuple[str, str] | None = None
    """(code, reason)"""
    report: Report


# --- to the core ---------------------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True):
    """What there is: answered with `CoreFacts`."""


class CoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed properties of a started core."""

    blocks_total: int
    block_tokens: int
    block_bytes: int
    slots_max: int
    tokens_max: int
    layout: str
    dtype: str
    tensor_parallel: int
    workers: int
    vllm_version: str
    has_overlapping_steps: bool
    refusal: str | None
    """Why nothing of this engine can be moved."""


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """Start the workers' copiers; they connect to `socket`."""

    socket: str
    is_shared: bool = False
    """Whether KV is put into memory that other processes can map."""


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Queue a run after `outputs`. `request` is an encoded `EngineCoreRequest` whose id is the slot."""

    slot: str
    request: bytes
    outputs: tuple[int, ...]


class Submitted(msgspec.Struct, frozen=True):
    """`finish`: the outputs given were all there will be."""

    finish: str | None


class OfSlot(msgspec.Struct, frozen=True):
    """A call about one slot."""

    slot: str


class Freed(msgspec.Struct, frozen=True):
    """Blocks that a run or reservation held."""

    blocks: int


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the run's blocks from `first` on, as far as they are final, until `Unpin`."""

    slot: str
    first: int


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """Block ids in the run's order, the first of them being its `first`-th block."""

    pin: int
    block_ids: tuple[int, ...]


class Unpin(msgspec.Struct, frozen=True):
    """Let go. Answered with `Unpinned`; a pin that is not there is nothing."""

    pin: int


class Unpinned(msgspec.Struct, frozen=True, kw_only=True):
    """`fate`: `gone` or `preempted` since the pin, else `None` and the run's progress."""

    fate: str | None
    progress: SlotProgress | None


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen run's state. Its first `blocks` blocks hold its `computed` tokens."""

    outputs: tuple[int, ...]
    tokens: int
    computed: int
    blocks: int
    block_ids: tuple[int, ...]
    preemptions: int
    rng: bytes


class Reserve(msgspec.Struct, frozen=True, kw_only=True):
    """Hold blocks and a run slot."""

    slot: str
    request: bytes
    outputs: tuple[int, ...]
    blocks: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation: its blocks, of which the first `cached` have the right content already."""

    block_ids: tuple[int, ...]
    cached: int


class Adopt(msgspec.Struct, frozen=True, kw_only=True):
    """Turn the reservation into a run."""

    slot: str
    outputs: tuple[int, ...]
    computed: int
    preemptions: int
    rng: bytes


# --- from the core to all workers, through vLLM's own `collective_rpc` ------------------------------


class Insert(msgspec.Struct, frozen=True, kw_only=True):
    """Make the V1 runner know a run that did not begin here.

    `rng` is the generator's state, empty: derive it from the seed and the number of outputs.
    """

    slot: str
    request: bytes
    outputs: tuple[int, ...]
    computed: int
    block_ids: tuple[int, ...]
    rng: bytes


# --- to a worker's copier --------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First word of a copier."""

    rank: int
    block_bytes: int


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start the transfers. Done with their offers and addresses."""

    transfers: tuple[str, ...]
    bytes_per_s: float | None = None
    """What this worker may send."""
    host: str
    port: int
    advertise_host: str
    secret: bytes
    stall_s: float


class Expect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let the holder of `handle` write blocks number `first` .. of a reservation, which are `block_ids`."""

    transfer: str
    handle: str
    first: int
    block_ids: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Done when no write through the handle is in progress and, if `is_kept`, all of them are in KV memory."""

    transfer: str
    handle: str
    is_kept: bool


class SendBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy blocks to a reservation. `channel` names the connection to keep for the next copy."""

    channel: str
    transfer: str
    address: str
    handle: str
    first: int
    block_ids: tuple[int, ...]
    checksum: bool
    share: float = 1.0
    """Part of the time in which bytes move; the rest are pauses between some blocks and the next."""


class CancelCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop the work of an earlier call; it is answered as failed once it has let go of memory."""

    call: int


class HangUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Close the connection kept under this name."""

    channel: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call's result: of `Open` (offer, address) of each transfer; of `SendBlocks` bytes and time without pauses."""

    endpoints: tuple[tuple[str, str], ...] = ()
    copied_bytes: int = 0
    duration_ms: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call did not succeed. `is_unreachable`: because the other end was not reached at all."""

    reason: str
    is_unreachable: bool = False


ToCopier = Open | Expect | Forget | SendBlocks | CancelCall | HangUp
FromCopier = Hello | Done | Failed


class CopierCall(msgspec.Struct, frozen=True):
    """One numbered call to a copier."""

    number: int
    what: ToCopier


class CopierAnswer(msgspec.Struct, frozen=True):
    """The answer with the call's number; 0 for `Hello`."""

    number: int
    what: FromCopier
