"""Explanations as text for people: what was chosen, by which rule, and why not something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from midstream.api.cli.output import Output, show_item, write


def show_move(item: dict[str, Any], output: Output) -> None:
    """Why a move was ordered."""
    _show(item, output, _move(item))


def show_request(item: dict[str, Any], output: Output) -> None:
    """Why a request is where it is."""
    _show(item, output, _request(item))


def _show(item: dict[str, Any], output: Output, lines: Iterator[str]) -> None:
    if output is Output.table:
        write("\n".join(lines))
    else:
        show_item(item, output)


def _move(item: dict[str, Any]) -> Iterator[str]:
    yield f"{item['migration']}: {item['request']} from {_owner(item['source'])} to {_owner(item['target'])}"
    params = ", ".join(f"{name}={value}" for name, value in item["params"].items())
    yield f"rule      {item['policy']} v{item['policy_version']}" + (f" ({params})" if params else "")
    yield f"because   {item['reason']}"
    again = "gives the same" if item["is_rederived"] else "gives something else: see `midstream replay`"
    yield f"decided   at {item['decided_at']}; deciding again {again}"
    yield from _scored("weighed", item["candidates"])
    yield from _weighed("instances that could have been the target", item["targets"])
    yield from _weighed(
        f"other requests on {item['source']['instance']}, and whether they could have left", item["requests"]
    )
    if item["refused"]:
        yield "refused in the same tick:"
    for row in item["refused"]:
        yield f"  {row['policy']}: {row['request']} to {row['target']}: {row['reason']} ({row['code']})"


def _request(item: dict[str, Any]) -> Iterator[str]:
    yield f"{item['request']}: {item['status']}"
    for row in item["dispatches"]:
        yield f"{row['position']} dispatched ({row['cause']}) to {_owner(row['owner'])} at epoch {row['epoch']}"
        yield f"rule      {row['policy']}"
        yield f"because   {row['reason']}"
        yield from _scored("weighed", row["scores"])
        yield from _weighed("not candidates", [one for one in row["instances"] if one["code"]])
    for row in item["moves"]:
        named = " ".join(str(row[name]) for name in ("migration", "code") if row[name])
        yield f"{row['position']} {row['what']} {named}" + (f": {row['reason']}" if row["reason"] else "")
    if item["now"] is not None:
        yield f"now       {item['now']['reason'] or 'a policy may move it'}"
        yield from _weighed("instances that could be the target", item["now"]["targets"])


def _scored(word: str, scores: list[list[Any]]) -> Iterator[str]:
    if scores:
        yield f"{word:<10}" + ", ".join(f"{name} {score:.4g}" for name, score in scores)


def _weighed(heading: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield f"{heading}:"
    for row in rows:
        score = "" if row["score"] is None else f" {row['score']:.4g}"
        verdict = f"no: {row['reason']} ({row['code']})" if row["code"] else "yes"
        yield f"  {row['name']:<12}{score:>10}  {verdict}"


def _owner(owner: dict[str, Any]) -> str:
    return str(owner["instance"])
