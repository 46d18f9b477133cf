"""What the demo asks, and when it moves the answers."""

from __future__ import annotations

from typing import Final

import msgspec

from midstream.api.demo.vllm.chat import Ask


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. Numbers of tokens say when something happens: at their arrival."""

    ask: Ask
    moves_at: tuple[int, ...] = ()
    """Moves are ordered."""
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
        moves_at=(30,),
    ),
    Act(
        ask=Ask(
            title="seeded",
            prompt="Give me ideas for a rainy afternoon.",
            tokens=96,
            temperature=0.9,
            seed=7,
        ),
        moves_at=(30,),
    ),
    Act(
        ask=Ask(title="three moves", prompt="Explain how a sailing ship works.", tokens=192),
        moves_at=(30, 80, 130),
    ),
    Act(
        ask=Ask(title="long prompt", prompt=_long_prompt(), tokens=80),
        moves_at=(24,),
    ),
    Act(
        ask=Ask(title="engine killed", prompt=_long_prompt(), tokens=60),
        kill_at=24,
    ),
)
