"""Downloads from loopback servers that drop connections, lie, refuse and change files."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.data.fetch import transfer
from feddg_bench.data.fetch.mirrors import Download
from feddg_bench.data.fetch.transfer import fetch
from tests.helpers import refused
from tests.loopback import serving

BODY = np.random.default_rng(0).bytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
WANTED = Download("file.bin", (), f"sha256:{SHA256}", len(BODY))
FILE = "/data/file.bin"
Trick = Callable[[Any, bytes], None]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(transfer, "TIMEOUT", 5.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site() -> Iterator[Any]:
    with serving() as site:
        site.files[FILE] = BODY
        yield site


@pytest.fixture
def other() -> Iterator[Any]:
    with serving() as site:
        site.files[FILE] = BODY
        yield site


def cut(after: int, **options: bool) -> Trick:
    return lambda handler, body: handler.serve(body, cut=after, **options)


def status(code: int, **headers: str) -> Trick:
    return lambda handler, _: handler.status(code, **headers)


def instead(body: bytes) -> Trick:
    return lambda handler, _: handler.serve(body)


def whole(handler: Any, body: bytes) -> None:
    """Send the whole file and ignore the requested range."""
    handler.serve(body, ranges=False)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


class TestOneMirror:
    def test_a_file_and_its_facts(self, site: Any, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        path = tmp_path / "new" / "file.bin"
        fetched = fetch([site.url + FILE], path, WANTED, lambda *now: seen.append(now))
        assert path.read_bytes() == BODY
        assert fetched == site.url + FILE
        assert left(path.parent) == ["file.bin"]
        assert seen[0] == (0, 300_000)
        assert seen[-1] == (300_000, 300_000)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def test_nothing_is_asked_for_what_is_here(self, site: Any, tmp_path: Path) -> None:
        path = tmp_path / "file.bin"
        path.write_bytes(BODY)
        assert fetch([site.url + FILE], path, WANTED) is None
        assert site.requests == []

    def test_a_connection_that_breaks_goes_on_at_that_byte(self, site: Any, tmp_path: Path) -> None:
        site.tricks[FILE] = [cut(100_000), cut(50_000), cut(1)]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert (tmp_path / "f").read_bytes() == BODY
        assert site.ranges(FILE) == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]

    def test_bytes_that_come_renew_patience(self, site: Any, tmp_path: Path) -> None:
        site.tricks[FILE] = [cut(10_000) for _ in range(20)]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert (tmp_path / "f").read_bytes() == BODY
        assert len(site.requests) == 21

    def test_a_server_without_ranges_starts_anew(self, site: Any, tmp_path: Path) -> None:
        site.tricks[FILE] = [cut(100_000), whole]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert (tmp_path / "f").read_bytes() == BODY
        assert site.ranges(FILE) == [None, "bytes=100000-"]

    def test_one_without_ranges_that_always_breaks_is_given_up(
        self, site: Any, tmp_path: Path
    ) -> None:
        site.tricks[FILE] = [cut(100_000, ranges=False)]
        site.stuck.add(FILE)
        with refused(DataError, "broke off after 100,000 of 300,000 bytes"):
            fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert len(site.requests) == 4  # the first, and three without new bytes
        assert left(tmp_path) == ["f.part"]

    @pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
    def test_trouble_that_passes(self, site: Any, tmp_path: Path, code: int) -> None:
        site.tricks[FILE] = [status(code)]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert len(site.requests) == 2

    def test_waits_grow_and_a_server_may_ask_for_longer(
        self, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited: list[float] = []
        monkeypatch.setattr(transfer, "WAITS", (1.0, 2.0, 4.0))
        monkeypatch.setattr(transfer.time, "sleep", waited.append)
        site.tricks[FILE] = [
            status(503),
            status(503, Retry_After="7"),
            status(429, Retry_After="x"),
        ]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert waited == [1.0, 7.0, 4.0]

    def test_silence_is_broken_off(
        self, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def silent(handler: Any, body: bytes) -> None:
            handler.serve(body, cut=1000)
            handler.wfile.flush()
            site.released.wait(20)

        monkeypatch.setattr(transfer, "TIMEOUT", 0.2)
        site.tricks[FILE] = [silent]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert (tmp_path / "f").read_bytes() == BODY
        assert site.ranges(FILE) == [None, "bytes=1000-"]

    def test_a_range_that_is_refused_is_dropped(self, site: Any, tmp_path: Path) -> None:
        site.tricks[FILE] = [cut(100_000), status(416)]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert site.ranges(FILE) == [None, "bytes=100000-", None]

    def test_a_part_with_wrong_bytes_gets_one_fresh_start(self, site: Any, tmp_path: Path) -> None:
        wrong = bytes(100_000) + BODY[100_000:]
        site.tricks[FILE] = [lambda handler, _: handler.serve(wrong, cut=150_000)]
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert (tmp_path / "f").read_bytes() == BODY
        assert site.ranges(FILE) == [None, "bytes=150000-", None]

    def test_lies_about_the_length(self, site: Any, tmp_path: Path) -> None:
        site.tricks[FILE] = [instead(BODY[:-1])]
        with refused(DataError, "offers 299,999 bytes instead of 300,000"):
            fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert left(tmp_path) == []

    def test_no_length_at_all(self, site: Any, tmp_path: Path) -> None:
        def endless(handler: Any, _: bytes) -> None:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b"x" * 1000)

        site.tricks[FILE] = [endless]
        with refused(DataError, "does not say how long the file is"):
            fetch([site.url + FILE], tmp_path / "f", Download("file.bin", (), f"sha256:{SHA256}"))

    def test_what_gzip_holds_is_what_counts(self, site: Any, tmp_path: Path) -> None:
        wanted = Download("file.bin", (), f"sha256:{SHA256}", unzipped=len(BODY))
        for number, level in enumerate((1, 9)):
            site.files[f"/{level}.gz"] = gzip.compress(BODY, level, mtime=number)
            fetch([f"{site.url}/{level}.gz"], tmp_path / str(level), wanted)
        site.files["/bomb.gz"] = gzip.compress(bytes(10**7))
        site.files["/short.gz"] = gzip.compress(BODY[:-1])
        site.files["/cut.gz"] = gzip.compress(BODY)[:-9]
        site.files["/none.gz"] = BODY
        reasons = {
            "bomb": "unpacks to more than 300,000 bytes",
            "short": "unpacks to 299,999 bytes instead of 300,000",
            "cut": "cannot be unpacked",
            "none": "cannot be unpacked",
        }
        for name, reason in reasons.items():
            with pytest.raises(DataError, match=reason):
                fetch([f"{site.url}/{name}.gz"], tmp_path / name, wanted)
        assert left(tmp_path) == ["1", "9"]

    def test_md5(self, site: Any, tmp_path: Path) -> None:
        md5 = hashlib.md5(BODY, usedforsecurity=False).hexdigest()
        fetch([site.url + FILE], tmp_path / "f", Download("f", (), f"md5:{md5}"))
        with refused(DataError, f"md5 {md5} instead of {'0' * 32}"):
            fetch([site.url + FILE], tmp_path / "g", Download("f", (), f"md5:{'0' * 32}"))


class TestSeveralMirrors:
    def test_the_next_one_after_404(self, site: Any, other: Any, tmp_path: Path) -> None:
        site.files.clear()
        fetched = fetch([site.url + FILE, other.url + FILE], tmp_path / "f", WANTED)
        assert fetched == other.url + FILE
        assert len(site.requests) == 1

    def test_the_next_one_after_wrong_bytes(self, site: Any, other: Any, tmp_path: Path) -> None:
        site.files[FILE] = bytes(len(BODY))
        fetched = fetch([site.url + FILE, other.url + FILE], tmp_path / "f", WANTED)
        assert fetched == other.url + FILE
        assert (tmp_path / "f").read_bytes() == BODY
        assert other.ranges(FILE) == [None]  # no resumption from wrong bytes

    def test_the_next_one_goes_on_where_a_checksum_will_tell(
        self, site: Any, other: Any, tmp_path: Path
    ) -> None:
        site.tricks[FILE] = [cut(100_000), status(404)]
        fetch([site.url + FILE, other.url + FILE], tmp_path / "f", WANTED)
        assert other.ranges(FILE) == ["bytes=100000-"]
        assert (tmp_path / "f").read_bytes() == BODY

    def test_all_fail_in_one_sentence(self, site: Any, other: Any, tmp_path: Path) -> None:
        site.files.clear()
        other.tricks[FILE] = [status(500)]
        other.stuck.add(FILE)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        nobody = f"http://user:secret@127.0.0.1:{port}/x?token=secret"
        with pytest.raises(DataError) as caught:
            fetch([site.url + FILE, other.url + FILE, nobody], tmp_path / "file.bin", WANTED)
        text = str(caught.value)
        assert "no mirror gave file.bin" in text
        assert f"{site.url[7:]}{FILE}: answers 404 Not Found;" in text
        assert "answers 500 Internal Server Error (4 times);" in text
        assert f"127.0.0.1:{port}/x: " in text
        assert "secret" not in text
        assert "\n" not in text
        assert len(other.requests) == 4
        assert left(tmp_path) == []


SMALL, OLD = BODY[:5000], BODY[5000:10_000]
"""A file and an older version of the same length."""


def old(after: int | None) -> Trick:
    return lambda handler, _: handler.serve(OLD, cut=after)


cuts = st.integers(0, 5000)
faults = st.one_of(
    st.builds(cut, cuts),
    st.builds(lambda after: cut(after, ranges=False), cuts),
    st.builds(status, st.sampled_from([404, 416, 429, 500, 503])),
    st.builds(old, st.integers(0, 4999)),
)
lies = st.sampled_from([instead(SMALL[:-1]), instead(SMALL + b"x"), instead(b""), old(None)])


class TestAnything:
    @given(data=st.data())
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_name_stands_for_the_right_file_or_for_none(
        self,
        data: st.DataObject,
        site: Any,
        other: Any,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        """For any behaviour of two servers, over two attempts."""
        path = tmp_path_factory.mktemp("any") / "f"
        wanted = Download("f", (), f"sha256:{hashlib.sha256(SMALL).hexdigest()}")
        for server in (site, other):
            server.files[FILE] = SMALL
            server.tricks[FILE] = data.draw(st.lists(faults | lies, max_size=8))
        for _ in range(2):
            with suppress(DataError):
                fetch([site.url + FILE, other.url + FILE], path, wanted)
                assert path.exists()
            assert not path.exists() or path.read_bytes() == SMALL
        for server in (site, other):
            server.tricks[FILE] = []
        fetch([site.url + FILE, other.url + FILE], path, wanted)
        assert path.read_bytes() == SMALL
        assert left(path.parent) == ["f"]


class TestAddresses:
    @pytest.mark.parametrize(
        "url",
        ["file:///etc/passwd", "ftp://a/b", "/etc/passwd", "http:///x", "data:,x", "http://[a"],
    )
    def test_only_the_web(self, url: str, tmp_path: Path) -> None:
        with refused(SettingsError, "expected http://"):
            fetch([url], tmp_path / "f", WANTED)

    def test_redirects(self, site: Any, other: Any, tmp_path: Path) -> None:
        site.tricks["/moved"] = [status(302, Location=other.url + FILE)]
        assert fetch([f"{site.url}/moved"], tmp_path / "f", WANTED) == f"{site.url}/moved"
        site.tricks["/moved"] = [status(302, Location="ftp://127.0.0.1/x")]
        with refused(DataError, "sends on to ftp:, which is not followed"):
            fetch([f"{site.url}/moved"], tmp_path / "g", WANTED)
        site.tricks["/moved"] = [status(302, Location=Path(__file__).as_uri())]
        with refused(DataError, "file:", "is not allowed"):
            fetch([f"{site.url}/moved"], tmp_path / "g", WANTED)
        assert left(tmp_path) == ["f"]

    def test_a_range_survives_a_redirect(self, site: Any, tmp_path: Path) -> None:
        site.tricks["/moved"] = [status(302, Location=FILE), status(302, Location=FILE)]
        site.tricks[FILE] = [cut(100_000)]
        fetch([f"{site.url}/moved"], tmp_path / "f", WANTED)
        assert site.ranges(FILE) == [None, "bytes=100000-"]

    def test_proxies_of_the_environment(
        self, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", site.url)
        monkeypatch.setenv("no_proxy", "")
        fetch([f"http://mirror.invalid{FILE}"], tmp_path / "f", WANTED)
        assert site.headers[0]["Host"] == "mirror.invalid"


class TestThisMachine:
    def test_no_room(self, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type(shutil.disk_usage(tmp_path))(10**6, 10**6, 250_000)
        monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: usage)
        with refused(DataError, "300,000 bytes are to come and 250,000 are free"):
            fetch([site.url + FILE], tmp_path / "f", WANTED)
        (tmp_path / "f.part").write_bytes(BODY[:60_000])
        fetch([site.url + FILE], tmp_path / "f", WANTED)  # 240,000 bytes remain

    def test_a_folder_that_cannot_be_written(self, site: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with refused(DataError, "choose another folder"):
            fetch([site.url + FILE], tmp_path / "file" / "f", WANTED)

    def test_a_whole_part_is_checked_and_not_fetched(self, site: Any, tmp_path: Path) -> None:
        (tmp_path / "f.part").write_bytes(BODY)
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert site.requests == []
        assert left(tmp_path) == ["f"]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_a_process_that_ends_leaves_what_the_next_one_goes_on_with(
        self, site: Any, tmp_path: Path, number: signal.Signals
    ) -> None:
        """While the other process runs, no second one can fetch the same file."""

        def slow(handler: Any, body: bytes) -> None:
            handler.serve(body, cut=100_000)
            handler.wfile.flush()
            site.released.wait(30)

        site.tricks[FILE] = [slow]
        code = (
            "import signal, sys\nfrom pathlib import Path\n"
            "from feddg_bench.data.fetch.transfer import fetch\n"
            "from feddg_bench.data.fetch.mirrors import Download\n"
            # Shells start background jobs with SIGINT ignored, and child processes inherit this.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "say = lambda done, _: print(done, flush=True)\n"
            f"wanted = Download('f', (), 'sha256:{SHA256}', 300000)\n"
            "fetch([sys.argv[1]], Path(sys.argv[2]), wanted, say)\n"
        )
        command = [sys.executable, "-c", code, site.url + FILE, str(tmp_path / "f")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            while int(child.stdout.readline()) < 100_000:
                pass
            with refused(DataError, "another process is fetching"):
                fetch([site.url + FILE], tmp_path / "f", WANTED)
            child.send_signal(number)
            assert child.wait(20) != 0
        assert (tmp_path / "f.part").read_bytes() == BODY[:100_000]
        assert not (tmp_path / "f").exists()
        fetch([site.url + FILE], tmp_path / "f", WANTED)
        assert site.ranges(FILE) == [None, "bytes=100000-"]
        assert (tmp_path / "f").read_bytes() == BODY
