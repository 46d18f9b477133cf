"""Rules of the house that a machine can read: how packages are found and named, and what no file may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "control", "instance", "migration", "migrations")
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
ENVIRONMENT_READERS = {"api/settings.py"}
BROAD = {"Exception", "BaseException"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_bare_import_is_refused(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"ImportError: import this package as 'midstream.{package}'" in done.stderr


def test_packages_are_found_through_the_links() -> None:
    from setuptools import find_packages

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["tool"]["setuptools"]["packages"]["find"]["where"] == ["src"]
    found = set(find_packages(str(ROOT / "src")))
    for package in PACKAGES:
        link = ROOT / "src" / "midstream" / package
        assert link.is_symlink() and not link.readlink().is_absolute()
        for path in sources(package):
            if path.name == "__init__.py":
                dotted = ".".join(("midstream", *path.relative_to(ROOT).parent.parts))
                assert dotted in found


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in sources(*PACKAGES)}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_data_files_are_packaged() -> None:
    """Whatever lies beside the code and is no code must match a pattern, or a wheel lacks it."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["*"]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in {".py", ".pyc"}:
                assert (path.parent / "__init__.py").exists(), path
                assert any(path.match(pattern) for pattern in patterns), path


def test_no_pickle_anywhere() -> None:
    guilty = [
        (str(path), name)
        for path in sources(*PACKAGES, "tests")
        for name in imports(ast.parse(path.read_text()))
        if name.split(".")[0] in PICKLES
    ]
    assert guilty == []


def test_P29_only_the_settings_read_the_environment() -> None:
    guilty = []
    for path in sources(*PACKAGES):
        tree = ast.parse(path.read_text())
        used = ENVIRONMENT & ({*attributes(tree)} | {*imports(tree)})
        if used and str(path.relative_to(ROOT)) not in ENVIRONMENT_READERS:
            guilty.append((str(path), used))
    assert guilty == []


def test_no_mock_in_tests() -> None:
    guilty = [
        str(path)
        for path in sources("tests")
        if any(name.startswith("unittest.mock") or name == "mock" for name in imports(ast.parse(path.read_text())))
    ]
    assert guilty == []


def test_no_failure_is_swallowed() -> None:
    """`except Exception: pass`, or a bare `except:`, hides what went wrong."""
    guilty = []
    for path in sources(*PACKAGES, "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler):
                continue
            is_broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in BROAD)
            if node.type is None or (is_broad and all(isinstance(line, ast.Pass) for line in node.body)):
                guilty.append(f"{path}:{node.lineno}")
    assert guilty == []


def test_every_module_says_its_duty() -> None:
    silent = []
    for path in sources(*PACKAGES):
        tree = ast.parse(path.read_text())
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(str(path))
    assert silent == []


def test_every_setting_is_used() -> None:
    """A setting that nothing reads is a promise that nobody keeps."""
    from midstream.api.settings import Settings

    code = "\n".join(path.read_text() for path in sources("api"))
    unused = [name for name in Settings.model_fields if not re.search(rf"(settings|self)\.{name}\b", code)]
    assert unused == []


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()


@pytest.mark.parametrize("target", ["help", "demo", "test", "check", "up", "bench", "sim", "vllm", "clean"])
def test_make_targets_exist(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
