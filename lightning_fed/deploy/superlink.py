"""``python -m lightning_fed.deploy.superlink``: Flower's SuperLink, which waits longer for its own database.

Flower keeps messages in SQLite, gives up after five seconds without the right to write, and answers 500. SuperNodes and
SuperExecs end at such an answer, the ServerApp with them: large messages on a busy disk would end a round. This is the
one file that uses a private name of Flower's.
"""

from __future__ import annotations

from flwr.supercore import sql_mixin
from flwr.superlink.cli import flower_superlink

#: Milliseconds that a statement waits for the right to write.
WAIT = 120_000


def main() -> None:
    """Run the SuperLink with the arguments of ``flower-superlink``."""
    others = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != "busy_timeout"]
    sql_mixin.SQLITE_PRAGMAS = (("busy_timeout", str(WAIT)), *others)  # type: ignore[assignment,unused-ignore]
    flower_superlink()


if __name__ == "__main__":
    main()
