"""The package index that pip uses, and where in it the pinned file lies. No host is named here.

pip itself is asked (its own option parser, which reads its environment variables and configuration files and
falls back to its built-in default), so that a mirror, a proxy or a private CA works here as it does there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

from pydantic import BaseModel, ConfigDict, ValidationError

from flashnext import net, proc
from flashnext.build.pin import Pin
from flashnext.errors import (
    FetchError,
    HttpStatusError,
    IndexHashMismatchError,
    IndexUnreadableError,
    IndexWithoutFileError,
    PipNotUsableError,
)

# Runs in a process of its own: pip's internals stay out of ours, and pip reads what it would read by itself.
_ASK_PIP = """
import json
from pip._internal.commands import create_command
options, _ = create_command("download").parse_args([])
names = ("index_url", "extra_index_urls", "find_links", "no_index", "cert", "client_cert", "proxy",
         "timeout", "retries", "trusted_hosts")
print(json.dumps({name: getattr(options, name) for name in names}))
"""
_ACCEPT = ", ".join(
    (
        "application/vnd.pypi.simple.v1+json",
        "application/vnd.pypi.simple.v1+html; q=0.1",
        "text/html; q=0.01",
    )
)
_PASSED_ON = ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")


class PipSettings(BaseModel):
    """What pip is configured with, in pip's own names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    index_url: str | None
    extra_index_urls: tuple[str, ...]
    find_links: tuple[str, ...]
    no_index: bool
    cert: str | None
    client_cert: str | None
    proxy: str | None
    timeout: float
    retries: int
    trusted_hosts: tuple[str, ...]

    def access(self) -> net.Access:
        return net.Access(
            timeout_s=self.timeout,
            retries=self.retries,
            proxy=self.proxy or None,
            cert=self.cert,
            client_cert=self.client_cert,
            trusted_hosts=self.trusted_hosts,
        )

    def indexes(self) -> list[str]:
        """The index URLs in the order to ask them; none where pip is told not to use any."""
        if self.no_index or not self.index_url:
            return []
        return list(dict.fromkeys((self.index_url, *self.extra_index_urls)))


def ask_pip(python: str = sys.executable) -> PipSettings:
    """Ask the pip of a Python for its settings. Raises PipNotUsableError with pip's own words."""
    names = [name for name in os.environ if name.startswith("PIP_")]
    done = proc.run(
        [python, "-P", "-c", _ASK_PIP], env=proc.environment(also=[*names, *_PASSED_ON]), timeout_s=60
    )
    try:
        if done.ok:
            return PipSettings.model_validate_json(done.out.strip().splitlines()[-1])
        words = done.err.strip().splitlines()[-3:] or [f"exit {done.code}"]
    except (ValidationError, IndexError) as error:
        words = [f"unexpected answer: {error}"]
    raise PipNotUsableError("pip cannot be asked for its index", context=[python, *words])


class _Links(HTMLParser):
    """The links of a simple index page (PEP 503)."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "base":
            self.base = urljoin(self.base, href)
        elif href and tag == "a":
            self.urls.append(urljoin(self.base, href))


class File(BaseModel):
    """A file that an index offers. ``size_bytes`` and ``sha256`` are what the index says, where it does."""

    model_config = ConfigDict(frozen=True)

    name: str
    url: str
    sha256: str | None = None
    size_bytes: int | None = None


def files_of_html(text: str, base: str) -> list[File]:
    """The files linked from an HTML page; hashes come from ``#sha256=`` fragments."""
    parser = _Links(base)
    parser.feed(text)
    found = []
    for url in parser.urls:
        parts = urlsplit(url)
        digest = re.search(r"(?:^|&)sha256=([0-9a-fA-F]{64})", parts.fragment)
        found.append(
            File(
                name=unquote(parts.path.rsplit("/", 1)[-1]),
                url=urlunsplit(parts._replace(fragment="")),
                sha256=digest.group(1).lower() if digest else None,
            )
        )
    return found


def files_of_json(text: str, base: str) -> list[File]:
    """The files of a JSON page (PEP 691). Raises ValueError, KeyError or TypeError for another shape."""
    found = []
    for item in json.loads(text)["files"]:
        found.append(
            File(
                name=item["filename"],
                url=urljoin(base, item["url"]),
                sha256=_text(item.get("hashes", {}).get("sha256")),
                size_bytes=item.get("size"),
            )
        )
    return found


def _text(value: Any) -> str | None:
    return value.lower() if isinstance(value, str) else None


def _files_of_page(page: net.Page) -> list[File]:
    try:
        if page.media_type in ("application/vnd.pypi.simple.v1+json", "application/json"):
            return files_of_json(page.text, page.url)
        if page.media_type in ("application/vnd.pypi.simple.v1+html", "text/html"):
            return files_of_html(page.text, page.url)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexUnreadableError(
            "the index's page cannot be read",
            context=[net.shown(page.url), f"{type(error).__name__}: {error}"],
        ) from None
    raise IndexUnreadableError(
        "the index's answer is no package page",
        context=[net.shown(page.url), f"media type {page.media_type or 'not given'}"],
    )


def _local_folder(url: str) -> Path | None:
    """The path of a ``file:`` URL or of a plain path; None for anything else."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(url).expanduser() if "://" not in url else None


def _files_of_path(path: Path) -> list[File]:
    if path.is_dir():
        page = path / "index.html"
        listed = [File(name=p.name, url=p.absolute().as_uri()) for p in sorted(path.iterdir()) if p.is_file()]
        return listed if not page.is_file() else listed + _files_of_path(page)
    if path.is_file() and path.suffix in (".html", ".htm"):
        return files_of_html(path.read_text(encoding="utf-8", errors="replace"), path.absolute().as_uri())
    return []


def _with_credentials(url: str, index: str) -> str:
    """The file's URL with the index's user name and password, where both are on one host (as pip does)."""
    file, base = urlsplit(url), urlsplit(index)
    if "@" in base.netloc and "@" not in file.netloc and file.netloc == base.netloc.rsplit("@", 1)[-1]:
        return urlunsplit(file._replace(netloc=base.netloc))
    return url


def _pick(files: list[File], pin: Pin, where: str) -> File:
    named = [file for file in files if file.name == pin.filename]
    if not named:
        raise IndexWithoutFileError(
            f"the index has no {pin.filename}", context=[where, f"{len(files)} other files are listed"]
        )
    for file in named:
        if file.sha256 in (None, pin.sha256) and file.size_bytes in (None, pin.size_bytes):
            return file
    raise IndexHashMismatchError(
        f"the index offers another {pin.filename}",
        context=[
            where,
            f"expected sha256 {pin.sha256}, {pin.size_bytes} bytes",
            *(f"offered  sha256 {f.sha256}, {f.size_bytes or '?'} bytes" for f in named),
        ],
    )


def find(pin: Pin, place: str, web: net.Downloader, *, is_index: bool) -> File:
    """The pinned file at one place: an index URL, or a find-links folder or page.

    Raises IndexWithoutFileError, IndexHashMismatchError, IndexUnreadableError, or what net raises.
    """
    project = re.sub(r"[-_.]+", "-", pin.name).lower()
    url = f"{place.rstrip('/')}/{project}/" if is_index else place
    folder = _local_folder(url)
    if folder is not None:
        return _pick(_files_of_path(folder), pin, str(folder))
    try:
        page = web.get_text(url, accept=_ACCEPT)
    except HttpStatusError as error:
        if is_index and "404" in error.message:
            raise IndexWithoutFileError(
                f"the index has no project {project}", context=error.context
            ) from None
        raise
    file = _pick(_files_of_page(page), pin, net.shown(page.url))
    return file.model_copy(update={"url": _with_credentials(file.url, place)})


def places(settings: PipSettings) -> Iterator[tuple[str, bool]]:
    """Where pip would look, nearest first: (place, whether it is an index)."""
    yield from ((place, False) for place in settings.find_links)
    yield from ((place, True) for place in settings.indexes())


def local_file(file: File) -> Path | None:
    """The file's path where it lies on this machine already."""
    return _local_folder(file.url) if urlsplit(file.url).scheme == "file" else None


def most_telling(errors: list[FetchError], pin: Pin) -> FetchError:
    """One error for several places that all failed, with every place in its context."""
    if not errors:
        return IndexWithoutFileError(
            f"pip is configured with no index and no folder that has {pin.filename}",
            context=["see `pip config list`: no-index, find-links"],
        )
    rank = [IndexHashMismatchError, HttpStatusError, IndexUnreadableError]
    ranked = [next((e for e in errors if isinstance(e, kind)), None) for kind in rank]
    others = [e for e in errors if not isinstance(e, IndexWithoutFileError)]
    chosen = next((e for e in ranked if e is not None), others[0] if others else errors[-1])
    notes = [f"also: {e.message} ({', '.join(e.context[:1])})" for e in errors if e is not chosen]
    return type(chosen)(chosen.message, context=[*chosen.context, *notes])
