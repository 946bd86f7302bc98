"""What an error says about a name that nothing has: the nearest one that something has."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.0) -> str | None:
    """The known name most alike, or None where none is at least `cutoff` (0 to 1) alike."""
    return next(iter(difflib.get_close_matches(name, [str(one) for one in known], n=1, cutoff=cutoff)), None)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A line that says so, with the nearest name and all there are, in their order; `what` may be empty."""
    valid = [str(one) for one in known]
    found = nearest(name, valid)
    hint = f"did you mean {found!r}? Valid: {', '.join(valid)}" if found is not None else "there are none"
    return f"unknown {f'{what} ' if what else ''}{name!r}; {hint}"
