"""Pages of lists, in order of a key of names. A token is the key that a page ended at, so that what comes and goes
between two pages neither hides nor repeats anything else.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from controller.server import validation

T = TypeVar("T")
Key = tuple[str, ...]

MAX_SIZE = 1000
DEFAULT_SIZE = 100
# Longer than that of any key: three names of the most characters, four bytes each.
MAX_TOKEN = 8192


class Page(NamedTuple):
    """Which part of a list is wanted: up to `size` items with a larger key than `after`, from the start if None."""

    listing: str
    size: int
    after: Key | None


def wanted(listing: str, names: int, size: int, token: str) -> Page:
    """The page of a request to a list whose keys have so many names; raises RejectedError."""
    if size < 0:
        raise validation.invalid("page_size", "must not be negative")
    return Page(listing, min(size or DEFAULT_SIZE, MAX_SIZE), _read(listing, names, token) if token else None)


def cut(page: Page, items: Iterable[T], key: Callable[[T], Key]) -> tuple[list[T], str]:
    """The page's items, and the token of the next page, empty if there is none."""
    following = (item for item in items if page.after is None or key(item) > page.after)
    found = heapq.nsmallest(page.size + 1, following, key=key)
    if len(found) <= page.size:
        return found, ""
    last = json.dumps([page.listing, *key(found[page.size - 1])], ensure_ascii=False)
    return found[:-1], base64.urlsafe_b64encode(last.encode("utf-8", "surrogatepass")).decode()


def _read(listing: str, names: int, token: str) -> Key:
    refusal = validation.invalid("page_token", "must be a next_page_token of this list")
    if len(token) > MAX_TOKEN:
        raise refusal
    try:
        read = json.loads(base64.b64decode(token, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass"))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise refusal from error
    if not isinstance(read, list) or len(read) != names + 1 or not all(isinstance(part, str) for part in read):
        raise refusal
    if read[0] != listing:
        raise refusal
    return tuple(read[1:])
