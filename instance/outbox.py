"""Output tokens of one run, kept until the request is done with: what may still have to be sent again."""

from __future__ import annotations

from midstream.instance.engines.base import Output


class Outbox:
    """All output tokens of one run in index order, the ones it started from included."""

    def __init__(self, ids: tuple[int, ...], logprobs: tuple[bytes, ...], now: float) -> None:
        self.ids = list(ids)
        self.given = len(ids)
        """Tokens it started from."""
        self.logprobs = list(logprobs)
        self.finish: str | None = None
        self.acknowledged = 0
        self.quiet_since = now
        """Loop time at which unacknowledged tokens last appeared or an acknowledgement last came."""

    @property
    def is_unheard(self) -> bool:
        """Has the gateway seen no token of this run yet."""
        return self.acknowledged <= self.given and self.finish is None

    def add(self, output: Output, now: float) -> None:
        """Append what the engine made. Raises ValueError on a hole: the engine broke its promise."""
        if output.first != len(self.ids):
            raise ValueError(f"{output.slot}: output {output.first} after {len(self.ids)} tokens")
        if self.acknowledged == len(self.ids):
            self.quiet_since = now
        self.ids += output.ids
        self.logprobs += output.logprobs
        self.finish = output.finish or self.finish

    def acknowledge(self, delivered: int, now: float) -> None:
        """The gateway holds tokens up to `delivered`."""
        if delivered > self.acknowledged:
            self.acknowledged = delivered
            self.quiet_since = now

    def is_overdue(self, now: float, patience_s: float) -> bool:
        """Is something unacknowledged (tokens, or the finish) for longer than `patience_s`."""
        is_pending = self.acknowledged < len(self.ids) or self.finish is not None
        return is_pending and now - self.quiet_since >= patience_s

    def since(self, first: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Token ids and log probabilities from index `first` on."""
        return tuple(self.ids[first:]), tuple(self.logprobs[first:])
