"""What the documents say must be so: links lead somewhere, commands, settings, facts and files that are named exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.routing import APIRoute

from midstream.api.admin import app as admin_app
from midstream.api.admin import routes_cluster, routes_operations, routes_requests
from midstream.api.cli import benches
from midstream.api.cli.main import app
from midstream.api.cli.reference import fields, markdown, variable
from midstream.api.traces import shipped_traces
from midstream.control import policies

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "control", "instance", "migration", "migrations")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
NOT_OURS = {"ImportError", "BaseEventLoop"}
EXAMPLES = {"InstanceSlowed", "dispatch_least_tokens.py", "loop.py", "factory.py"}
"""What the recipes in CONTRIBUTING.md would add: classes, and names of files."""

COMMAND: Any = typer.main.get_command(app)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_of(text: str) -> str:
    """Blocks and spans of code, one after the other."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*blocks, *spans])


def spans_of(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def test_the_documents_are_there() -> None:
    wanted = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/protocol.md", "docs/settings.md"}
    assert wanted <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", read(name)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        if not found.exists() or (anchor and anchor not in anchors(found.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def test_the_settings_page_is_current() -> None:
    assert read("docs/settings.md").rstrip() == markdown().rstrip(), "midstream settings --markdown > docs/settings.md"


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_named_exist(name: str) -> None:
    known = {variable(field) for _, field, _ in fields()}
    named = set(re.findall(r"\bMIDSTREAM_[A-Z_]*[A-Z]\b(?!…)", read(name)))
    assert named - known == set()


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_that_are_named_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", read("Makefile"), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", code_of(read(name))))
    assert named - targets == set()


def command_lines(text: str) -> Iterator[list[str]]:
    """Words of every `midstream …` line in code, after joining continued lines."""
    for line in code_of(text).replace("\\\n", " ").splitlines():
        found = re.match(r"^\s*(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?midstream((?: [^|#>]+)?)", line)
        if found and not found.group(1).lstrip().startswith(("…", "KIND", "COMMAND")):
            yield found.group(1).split()


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_are_named_exist(name: str) -> None:
    """Command, subcommand, and every long option."""
    wrong = []
    for words in command_lines(read(name)):
        command, path = COMMAND, ["midstream"]
        options = {option for param in command.params for option in param.opts}
        for word in words:
            if word.startswith("--"):
                if word.partition("=")[0] not in options:
                    wrong.append(" ".join([*path, word]))
            elif getattr(command, "commands", None) and re.fullmatch(r"[a-z]+", word):
                command = command.commands.get(word)
                path.append(word)
                if command is None:
                    wrong.append(" ".join(path))
                    break
                options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    assert wrong == []


def test_every_command_is_in_some_document() -> None:
    said = "\n".join(code_of(read(name)) for name in NAMES)
    missing = [name for name in COMMAND.commands if not re.search(rf"midstream {name}\b", said)]
    assert missing == []


def test_classes_that_are_named_exist() -> None:
    """Facts, messages, errors, ports: a word like `MoveDecided` in code is a class of ours."""
    known = {
        node.name
        for path in [*sources(), *(ROOT / "tests").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    named = {
        (name, word)
        for name in NAMES
        for span in spans_of(read(name))
        for word in re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", span)
    }
    assert {pair for pair in named if pair[1] not in known | NOT_OURS | EXAMPLES} == set()


def test_tests_that_are_named_exist() -> None:
    known = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = {word for name in NAMES for word in re.findall(r"\btest_[A-Z]\d+_\w+", read(name))}
    assert {word for word in named if f"def {word}(" not in known} == set()


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    """Paths from the root, beside the page, or in the code map in the folder of their section."""
    section, missing = "", []
    for line in read(name).splitlines():
        if heading := re.match(r"### `(\w+)/`", line):
            section = heading.group(1)
        elif line.startswith("#"):
            section = ""
        unlinked = re.sub(r"\[[^\]]*\]\([^)]*\)", "", line)
        for path in re.findall(r"`([\w./-]+\.(?:py|lua|md|yml|toml|csv|jsonl))`", unlinked):
            places = (ROOT / path, ROOT / section / path, (ROOT / name).parent / path)
            is_ours = "/" in path or section
            if is_ours and Path(path).name not in EXAMPLES and not any(place.exists() for place in places):
                missing.append(path)
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_where_they_are_said_to_be(name: str) -> None:
    """`one`, `other` in [`file.py`](path)."""
    wrong = []
    for functions, path in re.findall(r"((?:`\w+`,? (?:and )?)+)in \[`[\w./]+\.py`\]\(([\w./-]+)\)", read(name)):
        code = ((ROOT / name).parent / path).read_text(encoding="utf-8")
        wrong += [word for word in re.findall(r"`(\w+)`", functions) if f"def {word}(" not in code]
    assert wrong == []


def test_every_folder_with_code_is_on_the_map() -> None:
    text = read("ARCHITECTURE.md")
    folders = {path.parent.relative_to(ROOT) for path in sources() if path.name != "__init__.py"}
    spelt = {folder: {str(folder), "/".join(folder.parts[1:]) or str(folder)} for folder in folders}
    assert [str(folder) for folder, ways in spelt.items() if not any(f"`{way}/" in text for way in ways)] == []


def test_every_promise_and_rule_that_a_test_names_is_explained() -> None:
    explained = set(re.findall(r"^\| ([A-Z]\d+) \|", read("docs/promises.md"), re.M))
    used: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for words in re.findall(r"def test((?:_[A-Z]\d+)+)_", path.read_text(encoding="utf-8")):
            used |= {word for word in words.split("_") if word.startswith(("P", "R"))}
    assert used - explained == set()


def test_policies_benches_and_traces_are_in_the_readme_or_their_page() -> None:
    for page in ("README.md", "docs/policies.md"):
        said = read(page)
        assert [name for name in (*policies.DISPATCH, *policies.MOVES) if f"`{name}`" not in said] == [], page
    assert [name for name in benches.NAMES if f"## {name}\n" not in read("docs/benchmarks.md")] == []
    assert shipped_traces()


def test_every_route_of_the_admin_api_is_on_its_page() -> None:
    page = read("docs/api.md")
    missing = []
    for router in (routes_cluster, routes_operations, routes_requests, admin_app.meta):
        for part in (getattr(router, "router", router), getattr(router, "open_router", None)):
            for route in getattr(part, "routes", ()):
                if isinstance(route, APIRoute) and f"{min(route.methods)} {route.path}`" not in page:
                    missing.append(f"{min(route.methods)} {route.path}")
    assert [route for route in missing if not route.endswith("/undrain")] == []


def test_every_problem_code_of_the_admin_api_is_on_its_page() -> None:
    page = read("docs/api.md")
    code = "\n".join(path.read_text(encoding="utf-8") for path in [*(ROOT / "api/admin").glob("*.py")])
    code += read("api/auth.py") + read("api/guards.py") + read("api/problems.py")
    raised = set(re.findall(r"(?:Problem|_unauthorized)\((?:\d{3}, )?\"([a-z_]+)\"", code))
    assert {name for name in raised if not re.search(rf"\b{name}\b", page)} == set()


@pytest.mark.parametrize("name", NAMES)
def test_no_page_speaks_of_one_machine(name: str) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|tmp|home|root)/\S*", read(name)) == []
