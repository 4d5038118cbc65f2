"""systemd units for a server host and a client host."""

from __future__ import annotations

import sys
from pathlib import Path

_UNIT = """\
# {title}: copy to /etc/systemd/system/{name}.service, then: systemctl enable --now {name}
[Unit]
Description={title}
After=network-online.target
Wants=network-online.target

[Service]
User={user}
ExecStart={python} -m lightning_fed deploy {command} {folder}
# 143: it was asked to end
SuccessExitStatus=143
Restart=on-failure
RestartSec=10
KillMode=control-group
TimeoutStopSec=30
Environment=OMP_NUM_THREADS=1
# caches go into the folder, too
Environment={home}
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
RestrictSUIDSGID=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={folder}{more}

[Install]
WantedBy=multi-user.target
"""


def unit(command: str, folder: Path, user: str = "lightning-fed", cwd: str = "") -> str:
    """A unit that runs ``lightning-fed deploy server`` or ``client`` for a folder.

    >>> "Restart=on-failure" in unit("client", Path("/srv/fed"))
    True
    """
    where = _quoted(folder.absolute())
    more = f" {_quoted(cwd)}" if cwd else ""
    title, name = f"lightning-fed {command}", f"lightning-fed-{command}"
    known = {"title": title, "name": name, "user": user, "python": _quoted(sys.executable), "command": command}
    return _UNIT.format(**known, folder=where, home=_quoted(f"HOME={folder.absolute()}"), more=more)


def _quoted(text: Path | str) -> str:
    """A word of a unit, whatever characters a path has.

    >>> print(_quoted("/srv/my fed/100%"))
    "/srv/my fed/100%%"
    """
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
