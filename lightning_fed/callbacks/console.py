"""What is known about the console: whether it is a screen, and who writes there."""

from __future__ import annotations

import logging
import sys
from typing import Any


def is_screen() -> bool:
    """Whether standard output can redraw a line: a terminal or a notebook, not a file or a pipe."""
    return "ipykernel" in sys.modules or sys.stdout.isatty()


def console_loggers() -> list[logging.Logger]:
    """The loggers that write to the console themselves."""
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    return [logger for logger in known if isinstance(logger, logging.Logger) and console_handlers(logger)]


def console_handlers(logger: logging.Logger) -> list[logging.StreamHandler]:  # type: ignore[type-arg]
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, behind(sys.stdout), behind(sys.stderr))
    streams = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    return [handler for handler in streams if handler.stream in consoles]


def behind(stream: Any) -> Any:
    """The stream that rich has replaced to write above its bars; the same stream if it has not."""
    return getattr(stream, "rich_proxied_file", stream)
