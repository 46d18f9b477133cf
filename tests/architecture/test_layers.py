"""Imports point one way, the pure part stays pure, and every module has its place (ARCHITECTURE.md)."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "control", "instance", "migration", "migrations")
PURE_MODULES = ("ids", "state", "events", "commands", "fold", "decide", "policies", "codec", "errors", "ports")
BANNED_IN_PURE = ("redis", "sqlalchemy", "fastapi", "vllm", "torch", "asyncio", "time", "random", "os", "logging")


@pytest.fixture(scope="module")
def contracts() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser


def listed(contracts: configparser.ConfigParser, contract: str, key: str) -> set[str]:
    text = contracts[f"importlinter:contract:{contract}"][key]
    return set(re.findall(r"[\w.]+", text))


def lint(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_contracts_hold() -> None:
    done = lint()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_a_wrong_import_breaks_the_contract(tmp_path: Path) -> None:
    package = tmp_path / "midstream"
    for name, text in {
        "__init__": "",
        "control/__init__": "",
        "control/ids": "import time\nfrom midstream.control import state\n",
        "control/state": "",
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_package = midstream\ninclude_external_packages = True\n"
        "[importlinter:contract:layers]\nname = layers\ntype = layers\n"
        "layers =\n    midstream.control.state\n    midstream.control.ids\n"
        "[importlinter:contract:pure]\nname = pure\ntype = forbidden\n"
        "source_modules = midstream.control.ids\nforbidden_modules = time\n"
    )
    code = (
        "import sys; sys.path.insert(0, '.'); sys.modules.pop('midstream', None);"
        "from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 broken" in done.stdout


def test_every_pure_module_is_under_the_ban(contracts: configparser.ConfigParser) -> None:
    sources = listed(contracts, "pure", "source_modules")
    wanted = {f"midstream.control.{name}" for name in PURE_MODULES}
    assert wanted | {"midstream.migration.protocol", "midstream.migration.plan"} <= sources
    assert set(BANNED_IN_PURE) <= listed(contracts, "pure", "forbidden_modules")


def test_every_module_is_in_a_layer(contracts: configparser.ConfigParser) -> None:
    layered = listed(contracts, "layers", "layers")
    lost = [module for module in modules() if not any(f"{module}.".startswith(f"{layer}.") for layer in layered)]
    assert lost == []


def modules() -> list[str]:
    """Dotted names of all modules, without the packages that only hold others."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_root = parts[1:] == ("__init__",) or parts == ("instance", "__init__")
            if not is_root and "versions" not in parts:
                found.append(".".join(("midstream", *parts)).removesuffix(".__init__"))
    return found
