"""Choosing the next token: a function of the candidates, the sampling parameters and the request's outputs alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import msgspec

from midstream.instance.engines.sim.model import EOS, FIRST_ID, MASK, Candidates, mix
from midstream.migration.protocol.messages import RequestSpec, Sampling

EOS_LOGIT = 30.0
"""Far above all others: when the model wants to end, it does, at any usual temperature."""

Entry = list[tuple[int, float]]


class Chooser:
    """The sampler of one run. Holds counts of its outputs, which follow from the outputs alone."""

    def __init__(self, spec: RequestSpec, outputs: Iterable[int] = ()) -> None:
        sampling = spec.sampling
        self._sampling = sampling
        self._seed = _seed(spec)
        self._stops = frozenset(sampling.stop_token_ids)
        self._banned = self._stops | {EOS}
        self._counts: dict[int, int] = {}
        self._penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        for token in outputs:
            self._note(token)

    def choose(self, candidates: Candidates, index: int) -> int:
        """The output token at `index`; counts it."""
        ids, logits = self._allowed(candidates, index)
        if self._penalised:
            logits = [logit - self._penalty(token) for token, logit in zip(ids, logits, strict=True)]
        if self._sampling.temperature == 0:
            token = ids[logits.index(max(logits))]
        else:
            token = _draw(ids, logits, self._sampling, self._noise(index))
        self._note(token)
        return token

    def finish(self, token: int, outputs: int) -> str | None:
        """`stop` or `length` if the run ends with `token` as its `outputs`-th output token."""
        sampling = self._sampling
        if outputs >= sampling.min_tokens and (token in self._stops or (token == EOS and not sampling.ignore_eos)):
            return "stop"
        return "length" if outputs >= sampling.max_tokens else None

    def entry(self, candidates: Candidates, token: int) -> bytes:
        """Log probabilities before penalties and temperature, as asked for: msgpack of [[id, logprob], …].

        The chosen token comes first, then the `logprobs` most likely ones.
        """
        ids, logits = self._with_eos(candidates)
        total = math.log(sum(math.exp(logit) for logit in logits))
        ranked = sorted(zip(ids, logits, strict=True), key=lambda pair: -pair[1])
        own = next((logit for candidate, logit in ranked if candidate == token), -EOS_LOGIT)
        best = ranked[: self._sampling.logprobs or 0]
        return encode_entry([(token, own - total), *((other, logit - total) for other, logit in best)])

    def _note(self, token: int) -> None:
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1

    def _with_eos(self, candidates: Candidates) -> tuple[Sequence[int], Sequence[float]]:
        if candidates.ends and not self._sampling.ignore_eos:
            return (EOS, *candidates.ids), (EOS_LOGIT, *candidates.logits)
        return candidates.ids, candidates.logits

    def _allowed(self, candidates: Candidates, index: int) -> tuple[Sequence[int], Sequence[float]]:
        ids, logits = self._with_eos(candidates)
        if index >= self._sampling.min_tokens or self._banned.isdisjoint(ids):
            return ids, logits
        pairs = [pair for pair in zip(ids, logits, strict=True) if pair[0] not in self._banned]
        if not pairs:
            return (self._first_allowed(),), (0.0,)
        return [token for token, _ in pairs], [logit for _, logit in pairs]

    def _first_allowed(self) -> int:
        token = FIRST_ID
        while token in self._banned:
            token += 1
        return token

    def _penalty(self, token: int) -> float:
        count = self._counts.get(token, 0)
        if not count:
            return 0.0
        return self._sampling.presence_penalty + self._sampling.frequency_penalty * count

    def _noise(self, index: int) -> float:
        """Uniform in [0, 1): counter-based, so that a moved or replayed run draws what it would have drawn."""
        return mix((self._seed + index) & MASK) / (1 << 64)


def encode_entry(entry: Entry) -> bytes:
    """One token's log probabilities as they travel: msgpack of [[id, logprob], …]."""
    return msgspec.msgpack.encode(entry)


def decode_entry(entry: bytes) -> Entry:
    """The inverse of `encode_entry`."""
    return msgspec.msgpack.decode(entry, type=Entry)


def _seed(spec: RequestSpec) -> int:
    """Unseeded requests are seeded by their id, so that every run of one is the same run."""
    if spec.sampling.seed is not None:
        return mix(spec.sampling.seed & MASK)
    return int.from_bytes(hashlib.blake2b(spec.request.encode(), digest_size=8).digest(), "little")


def _draw(ids: Sequence[int], logits: Sequence[float], sampling: Sampling, noise: float) -> int:
    """Sample with temperature, then top_k, then top_p, by the inverse of the cumulative distribution."""
    top = max(logits)
    inverse = 1.0 / sampling.temperature
    odds = [math.exp((logit - top) * inverse) for logit in logits]
    order: Sequence[int] = range(len(odds))
    if sampling.top_k > 0 or sampling.top_p < 1:
        order = _nucleus(odds, sampling)
    left = noise * sum([odds[i] for i in order])
    for i in order:
        left -= odds[i]
        if left < 0:
            return ids[i]
    return ids[order[-1]]


def _nucleus(odds: Sequence[float], sampling: Sampling) -> list[int]:
    """Indices of the `top_k` likeliest, cut where their share of the probability reaches `top_p`."""
    order = sorted(range(len(odds)), key=lambda i: (-odds[i], i))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    enough = sampling.top_p * sum(odds[i] for i in order)
    share = 0.0
    for kept, i in enumerate(order, 1):
        share += odds[i]
        if share >= enough:
            return order[:kept]
    return order
