"""As much of `valkey-cli -p PORT` as docker-compose.yml uses: commands on stdin, replies on stdout."""

from __future__ import annotations

import socket
import sys

TIMEOUT_S = 3.0


def main() -> None:
    """Send each line as an inline command and print what comes back."""
    port = int(sys.argv[sys.argv.index("-p") + 1])
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as server, server.makefile("rw") as stream:
            for command in sys.stdin:
                stream.write(command)
                stream.flush()
                sys.stdout.write(stream.readline().removeprefix("+"))
    except OSError as error:
        sys.exit(f"Could not connect: {error}")


if __name__ == "__main__":
    main()
