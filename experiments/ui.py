"""Start the MLflow UI on this project's store, from any working directory: `python -m experiments.ui`.

The process turns into MLflow's own server, so Ctrl-C and SIGTERM reach it unchanged. Where
MLFLOW_TRACKING_URI names a server there is nothing to start: its address is printed.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from experiments import tracking


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: RET503 (the server takes over)
    """Serve until stopped. Returns 0 after printing a server's address, 1 after one line about an error."""
    options = _parse(arguments)
    root = tracking.project_root()
    uri = tracking.store_uri(root)
    if uri.startswith(("http://", "https://")):
        print(f"Runs go to the server of MLFLOW_TRACKING_URI: {tracking.public_uri(uri)}")
        return 0
    try:
        _check_free(options.host, options.port)
        tracking.open_store(root)
    except (OSError, tracking.StoreError) as error:
        print(f"experiments.ui: {error}", file=sys.stderr)
        return 1
    print(f"MLflow UI: http://{_in_address(options.host)}:{options.port}", flush=True)
    print(f"Store: {tracking.public_uri(uri)}. Stop with Ctrl-C.", flush=True)
    _become_server(options, root, uri)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.ui", description=__doc__)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument("--port", type=_port, default=5000, help="port to listen on (default: 5000)")
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not between 1 and 65535")
    return port


def _check_free(host: str, port: int) -> None:
    """Raise OSError with one line for the user where the server could not listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a connection of an earlier server that is still closing is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"can't listen on {host} port {port}: {reason}; choose another with --port") from error


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _become_server(options: argparse.Namespace, root: Path, uri: str) -> NoReturn:
    os.chdir(root)  # whatever the server writes beside the store belongs there too
    os.execve(sys.executable, _command(options, root, uri), {**os.environ, **_environment()})


def _command(options: argparse.Namespace, root: Path, uri: str) -> list[str]:
    server = [sys.executable, "-m", "mlflow", "ui", "--host", options.host, "--port", str(options.port)]
    artifacts = tracking.artifact_root(root, uri).as_uri()
    store = ["--backend-store-uri", uri, "--registry-store-uri", uri, "--default-artifact-root", artifacts]
    return [*server, *store, "--workers", "1", "--uvicorn-opts", "--log-level warning"]


def _environment() -> dict[str, str]:
    # Background jobs serve features of MLflow that this project has no use for; they cost six processes.
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    return {**tracking.MLFLOW_SETTINGS, **quiet}


if __name__ == "__main__":
    sys.exit(main())
