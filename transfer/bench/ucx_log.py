"""Which lanes UCX says it has chosen: it logs them when a connection is made, and nowhere else."""

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path

_CHOSEN = re.compile(r"\b(?:intra|inter)-node cfg#\d+\s+(?P<lanes>\S.*?)\s*$", re.MULTILINE)


def lanes(text: str) -> str:
    """Those of the last connection to another process in a log of level info; empty where it names none."""
    found = [match["lanes"] for match in _CHOSEN.finditer(text)]
    return " ".join(found[-1].split()) if found else ""


_LIBC = ctypes.CDLL(None)


class UcxLog:
    """The log of this process's agents. UCX reads its settings once: without effect where an agent was made before."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ucx.log"
        self._read = 0
        self.environment: Mapping[str, str] = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(self._file)}

    def lanes(self) -> str:
        """Chosen since the last call."""
        # UCX leaves its lines in the C library's buffer, where they would wait for a later call.
        _LIBC.fflush(None)
        try:
            text = self._file.read_text(errors="replace")
        except OSError:
            return ""
        new, self._read = text[self._read :], len(text)
        return lanes(new)
