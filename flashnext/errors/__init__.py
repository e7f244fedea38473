"""The one tree of errors, by cause; raise a class of it with a message and context lines:

    raise SdistHashMismatchError("the sdist is not the pinned one", context=[f"expected {a}", f"found {b}"])

A class per stage (``base``) fixes the exit code; a subclass per kind of failure fixes id and hint.
"""

from flashnext.errors.base import *  # noqa: F403  (each of these modules has nothing else to give)
from flashnext.errors.bench import *  # noqa: F403
from flashnext.errors.building import *  # noqa: F403
from flashnext.errors.serving import *  # noqa: F403
from flashnext.errors.source import *  # noqa: F403
