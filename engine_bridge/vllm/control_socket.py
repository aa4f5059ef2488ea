"""Opens the control socket: where it may lie, who may reach it, what becomes of a dead one.

It speaks no protocol.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Final

from trimtab.engine_bridge.vllm.control_errors import ControlSocketError

_LONGEST_PATH_BYTES: Final = 107
_BACKLOG: Final = 16
_OTHERS_WRITE: Final = 0o022
_KNOCK_S: Final = 0.5


def rank_path(path: Path | str, rank: int) -> Path:
    """The socket of one data-parallel rank: `control.sock`, `control.dp1.sock`, ..."""
    path = Path(path)
    return path if rank == 0 else path.with_name(f"{path.stem}.dp{rank}{path.suffix}")


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`.

    Raises:
        ControlSocketError: it has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ControlSocketError("control_tcp", value=text, bound="host:port")
    return host.strip("[]"), int(port)


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket that this user alone may reach.

    Args:
        path: The folder is made if it is missing; a socket that nobody listens on is replaced.

    Raises:
        ControlSocketError: the path is too long, the folder is not safe, something else is there,
            or an engine listens on it.
    """
    path = path.absolute()
    if len(os.fsencode(path)) > _LONGEST_PATH_BYTES:
        raise ControlSocketError(
            "control_socket", value=str(path), bound=f"at most {_LONGEST_PATH_BYTES} bytes long"
        )
    try:
        _check_folder(path.parent)
        _clear(path)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The file gets the descriptor's mode: it is never open to others, not for a moment.
            os.fchmod(server.fileno(), 0o600)
            server.bind(str(path))
            path.chmod(0o600)
            server.listen(_BACKLOG)
            server.setblocking(False)
        except OSError:
            server.close()
            raise
    except OSError as error:
        raise ControlSocketError(
            f"control_socket {path}: {error.strerror or error}", remedy="choose another path"
        ) from error
    return server


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on a TCP port.

    Raises:
        ControlSocketError: the address is not this machine's, or is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ControlSocketError(
            f"control_tcp {host}:{port}: {error.strerror or error}",
            remedy="choose another address or port",
        ) from error
    server.setblocking(False)
    return server


def remove(path: Path, inode: int) -> None:
    """Remove the socket file, if it is still the one with this inode."""
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except OSError:
        pass  # Gone, or the folder is: there is nothing left to tidy.


def _check_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise ControlSocketError(
            f"control_socket: folder {folder}",
            value=f"owner {found.st_uid}",
            bound="owned by the engine's user or root",
            remedy="choose another folder",
        )
    # In a sticky folder such as /tmp others may add files, but not replace ours.
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise ControlSocketError(
            f"control_socket: folder {folder}",
            value=f"mode {stat.S_IMODE(found.st_mode):o}",
            bound="writable by its owner alone",
            remedy=f"chmod go-w {folder}",
        )


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on; refuse anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ControlSocketError(
            f"control_socket {path}", bound="a socket or nothing", remedy="move what is there away"
        )
    if found.st_uid != os.geteuid():
        raise ControlSocketError(
            f"control_socket {path}",
            value=f"owner {found.st_uid}",
            bound="owned by the engine's user",
            remedy="choose another path",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_KNOCK_S)
        code = knock.connect_ex(str(path))
    if code != errno.ECONNREFUSED:
        raise ControlSocketError(
            f"control_socket {path}: another engine listens on it",
            remedy="stop it or choose another path",
        )
    path.unlink(missing_ok=True)
