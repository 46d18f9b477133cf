"""What the demo asks, and when it moves the answers."""

from __future__ import annotations

from typing import Final

import msgspec

from midstream.api.demo.vllm.chat import Ask
from midstream.migration.plan import BLOCKING, LIVE


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. Numbers of tokens say when something happens: at their arrival."""

    ask: Ask
    moves: tuple[tuple[int, str], ...] = ()
    """When each move is ordered, and how it goes."""
    kill_at: int | None = None
    """The engine is killed, so that the other one must compute everything again."""


_NOTES = (
    "On the {n}. day the keeper of the lighthouse wrote in the log that the wind came from the west, that {m} ships "
    "had passed the strait before noon, and that the lamp had burned {k} hours without a fault. "
)
LONG_LINES: Final = 26
"""About 1,500 tokens."""


def _long_prompt() -> str:
    days = "".join(_NOTES.format(n=n, m=3 + n * 7 % 11, k=8 + n * 5 % 6) for n in range(1, LONG_LINES + 1))
    return f"{days}\n\nTell in your own words what the keeper wrote."


ACTS: Final = (
    Act(
        ask=Ask(title="story", prompt="Tell me a short story about a lighthouse keeper and a whale.", tokens=96),
        moves=((30, LIVE),),
    ),
    Act(
        ask=Ask(
            title="seeded",
            prompt="Give me ideas for a rainy afternoon.",
            tokens=96,
            temperature=0.9,
            seed=7,
        ),
        moves=((30, LIVE),),
    ),
    Act(
        ask=Ask(title="three moves", prompt="Explain how a sailing ship works.", tokens=192),
        moves=((30, LIVE), (80, LIVE), (130, LIVE)),
    ),
    Act(
        ask=Ask(title="long prompt", prompt=_long_prompt(), tokens=80),
        moves=((20, LIVE), (50, BLOCKING)),
    ),
    Act(
        ask=Ask(title="engine killed", prompt=_long_prompt(), tokens=60),
        kill_at=24,
    ),
)
