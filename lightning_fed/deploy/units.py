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
Restart=on-failure
RestartSec=10
KillMode=control-group
TimeoutStopSec=30
Environment=OMP_NUM_THREADS=1
UMask=0077
NoNewPrivileges=yes
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
    where = folder.absolute()
    more = f" {cwd}" if cwd else ""
    title, name = f"lightning-fed {command} in {where}", f"lightning-fed-{command}"
    known = {"title": title, "name": name, "user": user, "python": sys.executable, "command": command}
    return _UNIT.format(**known, folder=where, more=more)
