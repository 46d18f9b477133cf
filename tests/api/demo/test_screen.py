"""The demo's marks stand exactly where a request changed its engine, although the news of it come late."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from midstream.api.demo.vllm.chat import Answer, Delta
from midstream.api.demo.vllm.screen import Screen


def delta(text: str, *ids: int, at: float = 0.0) -> Delta:
    return Delta(at, text, ids)


async def shown(deltas: list[Delta], marks: list[tuple[int, str]], lag_s: float) -> str:
    said = io.StringIO()
    screen = Screen(Console(file=said, width=200, color_system=None), lag_s)
    for one in deltas:
        screen.feed(one)
    await asyncio.sleep(0.1)
    for index, text in marks:
        screen.mark(index, text)
    await screen.finish()
    return said.getvalue()


async def test_a_mark_stands_before_the_first_token_of_the_new_owner() -> None:
    now = asyncio.get_running_loop().time()
    deltas = [delta(f" t{number}", number, at=now) for number in range(6)]
    text = await shown(deltas, [(2, "a→b"), (4, "b→a")], lag_s=60.0)
    assert text == " t0 t1 ⟦a→b⟧ t2 t3 ⟦b→a⟧ t4 t5\n"


async def test_tokens_that_came_together_are_not_torn_apart() -> None:
    now = asyncio.get_running_loop().time()
    deltas = [delta("ab", 1, 2, at=now), delta("cde", 3, 4, 5, at=now), delta("f", 6, at=now)]
    assert await shown(deltas, [(3, "a→b")], lag_s=60.0) == "abcde ⟦a→b⟧f\n"


async def test_text_is_shown_while_it_appears() -> None:
    said = io.StringIO()
    screen = Screen(Console(file=said, width=200, color_system=None), 0.0)
    screen.feed(delta("here"))
    await asyncio.sleep(0.2)
    assert said.getvalue() == "here"
    await screen.finish()


def test_gaps_are_those_between_tokens() -> None:
    answer = Answer(deltas=(delta("a", 1, at=1.0), delta("bc", 2, 3, at=1.5), delta("d", 4, at=2.5)))
    assert [answer.gap_ms(index) for index in range(5)] == [None, 500.0, 0.0, 1000.0, None]
    assert (answer.ids, answer.text) == ((1, 2, 3, 4), "abcd")
