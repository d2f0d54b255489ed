"""Every error that Tangram raises on purpose.

    TangramError
    ├── BadRequest          what a user wrote in a pod cannot be granted by any cluster
    ├── BadDocument     an annotation, grant file or packet that a machine wrote cannot be read
    │   └── NewerVersion    it was written by a newer Tangram
    └── Refused         a request that is well formed and does not fit what is there

The text of an error is for the user: it names the object, the value found and the range allowed.
"""

from __future__ import annotations

from typing import Final

LONGEST_TEXT: Final = 1000
"""Characters of a BadDocument's text. Guessed: it fits a log line and an Event's note (1,024)."""


class TangramError(Exception):
    """Base of all errors that Tangram raises on purpose."""


class BadRequest(TangramError):
    """A pod requests something that is malformed or out of range. Shown to the user at admission."""


class BadDocument(TangramError):
    """A document between Tangram's own parts cannot be read. Nothing is granted from it and nothing freed because of it.

    What it quotes comes from a document that may be damaged, so a long text keeps its start (which object) and its end
    (what is allowed), and loses its middle.
    """

    def __init__(self, text: str) -> None:
        half = LONGEST_TEXT // 2
        super().__init__(text if len(text) <= LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}")


class NewerVersion(BadDocument):
    """A document was written by a newer version than this one reads."""


class Refused(TangramError):
    """A well-formed request does not fit what is there."""
