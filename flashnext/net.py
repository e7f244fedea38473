"""The only importer of httpx: downloads from a package index, probes of servers on loopback."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import netrc
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx

from flashnext import __version__
from flashnext.errors import (
    CacheNotWritableError,
    FetchError,
    HttpStatusError,
    IndexUnreachableError,
    NoSpaceError,
    SdistHashMismatchError,
    SdistSizeMismatchError,
    SdistTruncatedError,
)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIRST_PAUSE_S = 0.25
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def shown(url: str) -> str:
    """A URL without its user name and password, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1]))


@dataclass(frozen=True)
class Access:
    """How to reach an index: what pip is configured with. ``retries`` are those after the first try."""

    timeout_s: float = 15.0
    retries: int = 5
    proxy: str | None = None
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A fetched text: the URL after redirects, its media type without parameters, its text."""

    url: str
    media_type: str
    text: str


class Downloader:
    """HTTP with pip's settings; a context manager that owns its connections."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._clients: dict[bool, httpx.Client] = {}

    def __enter__(self) -> Downloader:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def _client(self, url: str) -> httpx.Client:
        """The client for a URL; hosts that pip trusts are not asked for a valid certificate."""
        parts = urlsplit(url)
        names = {parts.hostname, f"{parts.hostname}:{parts.port}"}
        trusted = bool(names & set(self.access.trusted_hosts))
        if trusted not in self._clients:
            proxy = self.access.proxy
            if proxy and "://" not in proxy:
                proxy = f"http://{proxy}"
            self._clients[trusted] = httpx.Client(
                verify=False if trusted else self._tls(),
                proxy=proxy or None,
                timeout=self.access.timeout_s,
                follow_redirects=True,
                headers={"User-Agent": f"flashnext/{__version__}", "Accept-Encoding": "identity"},
            )
        return self._clients[trusted]

    def _tls(self) -> ssl.SSLContext:
        """pip's --cert, else the bundles that requests reads, else the system's store and httpx's own."""
        named = [self.access.cert, *(os.environ.get(name) for name in _CA_VARIABLES)]
        bundle = next((Path(name) for name in named if name), None)
        try:
            if bundle is not None:
                folder = bundle.is_dir()
                context = ssl.create_default_context(
                    cafile=None if folder else str(bundle), capath=str(bundle) if folder else None
                )
            else:
                context = httpx.create_ssl_context()
                context.load_default_certs()
            if self.access.client_cert:
                context.load_cert_chain(self.access.client_cert)
        except OSError as error:
            raise IndexUnreachableError(
                "the certificates that pip is configured with cannot be read",
                context=[f"{bundle or self.access.client_cert}: {error}"],
            ) from None
        return context

    def _pauses(self) -> Iterator[float]:
        """Seconds to wait before each further try, doubling as pip's do."""
        for i in range(max(self.access.retries, 0)):
            yield _FIRST_PAUSE_S * 2**i

    def get_text(self, url: str, *, accept: str) -> Page:
        """Fetch a page.

        Raises HttpStatusError, or IndexUnreachableError where no answer came; server errors (5xx, 429) and
        lost connections are tried again first.
        """
        pauses = self._pauses()
        while True:
            try:
                answer = self._client(url).get(url, headers={"Accept": accept}, auth=_netrc(url))
                error = _status_error(url, answer)
            except (httpx.HTTPError, httpx.InvalidURL) as problem:
                answer, error = None, _unreachable(url, problem)
            if error is None and answer is not None:
                media_type = answer.headers.get("content-type", "").split(";")[0].strip().lower()
                return Page(str(answer.url), media_type, answer.text)
            pause = next(pauses, None)
            if pause is None or not _passing(answer):
                raise error or IndexUnreachableError(f"no answer from {shown(url)}")
            time.sleep(pause)

    def download(
        self,
        url: str,
        target: Path,
        *,
        size_bytes: int,
        sha256: str,
        at: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Download into ``target``, which appears only when size and hash are right.

        Bytes go to ``<target>.part``, which a later call resumes; it is hashed as a whole before it is used.
        ``at(n)`` is told how many bytes are there. A resumed part that turns out wrong is thrown away and the
        file is fetched once from the start. Raises NoSpaceError, CacheNotWritableError, HttpStatusError,
        IndexUnreachableError, SdistTruncatedError, SdistSizeMismatchError, SdistHashMismatchError.
        """
        part = target.with_name(target.name + ".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            resumed = part.exists()
            _need_space(part, size_bytes)
            try:
                self._fill(url, part, size_bytes, at)
                _check(url, part, size_bytes, sha256)
            except (SdistHashMismatchError, SdistSizeMismatchError):
                part.unlink(missing_ok=True)
                if not resumed:
                    raise
                self._fill(url, part, size_bytes, at)
                _check(url, part, size_bytes, sha256)
            part.replace(target)
        except OSError as error:
            raise _storage_error(error, part) from None
        except (SdistHashMismatchError, SdistSizeMismatchError):
            part.unlink(missing_ok=True)
            raise

    def _fill(self, url: str, part: Path, size_bytes: int, at: Callable[[int], None]) -> None:
        """Append to the part file until it has its size; a try that brought bytes gives the tries back."""
        pauses = self._pauses()
        most = _size(part)
        while True:
            had = _size(part)
            if had == size_bytes:
                return
            if had > size_bytes:
                part.unlink()
                had = 0
            answer = None
            try:
                with self._request(url, had) as answer:
                    error = _status_error(url, answer)
                    if error is None:
                        _append(answer, part, had, size_bytes, at)
                        have = _size(part)
                        if have == size_bytes:
                            return
                        error = _truncated(url, have, size_bytes)
            except (httpx.HTTPError, httpx.InvalidURL) as problem:
                have = _size(part)
                error = _truncated(url, have, size_bytes, problem) if have else _unreachable(url, problem)
            if answer is not None and answer.status_code == 416:
                part.unlink(missing_ok=True)  # the server's file ends before our part does
                error = _truncated(url, had, size_bytes)
            if _size(part) > most:
                most = _size(part)
                pauses = self._pauses()
            pause = next(pauses, None)
            if pause is None or not _passing(answer):
                raise error
            time.sleep(pause)

    @contextlib.contextmanager
    def _request(self, url: str, offset: int) -> Iterator[httpx.Response]:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self._client(url).stream("GET", url, headers=headers, auth=_netrc(url)) as answer:
            yield answer


def _netrc(url: str) -> httpx.Auth | None:
    """The user's .netrc, unless the URL brings a user name (which httpx then uses by itself)."""
    if "@" not in urlsplit(url).netloc:
        # No file, or one that is not netrc's: pip goes on without it too.
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return httpx.NetRCAuth()
    return None


def _passing(answer: httpx.Response | None) -> bool:
    """Whether a fault may pass by itself: no answer, a cut answer, or a server that says so."""
    return (
        answer is None
        or answer.status_code < 400
        or answer.status_code in (408, 416, 429, 500, 502, 503, 504)
    )


def _status_error(url: str, answer: httpx.Response) -> FetchError | None:
    if answer.status_code in (200, 206):
        return None
    return HttpStatusError(
        f"HTTP {answer.status_code} {answer.reason_phrase}".rstrip(), context=[shown(str(answer.url) or url)]
    )


def _unreachable(url: str, problem: Exception) -> IndexUnreachableError:
    detail = str(problem) or type(problem).__name__
    return IndexUnreachableError(
        f"{urlsplit(url).hostname or 'the index'} cannot be reached", context=[shown(url), detail]
    )


def _truncated(url: str, have: int, want: int, problem: Exception | None = None) -> SdistTruncatedError:
    lines = [shown(url), f"expected {want} bytes", f"found    {have} bytes (kept to be resumed)"]
    return SdistTruncatedError(
        "the download ended too early", context=[*lines, str(problem)] if problem else lines
    )


def _append(answer: httpx.Response, part: Path, had: int, size_bytes: int, at: Callable[[int], None]) -> None:
    """Write an answer's body: after what is there for a 206 that starts there, else from the start."""
    start = re.match(r"bytes (\d+)-", answer.headers.get("content-range", ""))
    follows = answer.status_code == 206 and start is not None and int(start.group(1)) == had
    if answer.status_code == 206 and not follows:
        part.unlink(missing_ok=True)  # a server that answers another range: the next try asks for all
        return
    have = had if follows else 0
    with part.open("ab" if follows else "wb") as stream:
        at(have)
        for block in answer.iter_raw():  # as it arrives: a block size would lose the rest when a line is cut
            have += len(block)
            if have > size_bytes:
                raise SdistSizeMismatchError(
                    "the file is larger than the pinned one",
                    context=[shown(str(answer.url)), f"expected {size_bytes} bytes"],
                )
            stream.write(block)
            at(have)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _check(url: str, part: Path, size_bytes: int, sha256: str) -> None:
    with part.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise SdistHashMismatchError(
            "the downloaded file is not the pinned one",
            context=[
                shown(url),
                f"expected sha256 {sha256}",
                f"found    sha256 {found}",
                f"{size_bytes} bytes",
            ],
        )


def _need_space(part: Path, size_bytes: int) -> None:
    need = size_bytes - _size(part)
    free = shutil.disk_usage(part.parent).free
    if free < need:
        raise NoSpaceError(
            "not enough space for the download",
            context=[f"{part.parent}: {need / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"],
        )


def _storage_error(error: OSError, part: Path) -> FetchError:
    if error.errno in NO_SPACE:
        part.unlink(missing_ok=True)  # a part that fills the disk helps nobody
        return NoSpaceError("no space left for the download", context=[f"{part.parent}: {error.strerror}"])
    return CacheNotWritableError("the download cannot be stored", context=[f"{part}: {error.strerror}"])
