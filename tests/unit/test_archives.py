"""Archives that try to leave their folder, to overwrite, or to fill the disk; and honest ones."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import tracemalloc
import unicodedata
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddg_bench.common.errors import DataError
from feddg_bench.data.fetch.archives import Limits, unpack

Make = Callable[..., Path]
Entries = list[tuple[str, bytes | None]]
"""Names and contents; folders have none."""


def make_zip(path: Path, entries: Entries) -> Path:
    with (
        warnings.catch_warnings(action="ignore"),  # of names that are there twice
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, content in entries:
            archive.writestr(
                zipfile.ZipInfo(name) if content is None else _info(name), content or b""
            )
    return path


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("x")
    info.filename = name  # the constructor would mend it
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def make_tar(path: Path, entries: Entries, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in entries:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.name = tarfile.DIRTYPE, name.rstrip("/")
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content or b""))
    return path


def make_tgz(path: Path, entries: Entries) -> Path:
    return make_tar(path, entries, "w:gz")


@pytest.fixture(params=[make_zip, make_tar, make_tgz])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda entries: request.param(tmp_path / "archive", entries)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(archive: Path, *words: str, limits: Limits | None = None) -> None:
    """Check that an archive is refused in one sentence, and that nothing is left of it."""
    before = contents(archive.parent)
    with pytest.raises(DataError) as caught:
        unpack(archive, archive.parent / "out", limits)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(archive.parent) == before


class TestHonestOnes:
    def test_files_and_folders(self, make: Make, tmp_path: Path) -> None:
        entries: Entries = [
            ("./", None),
            ("./a/", None),
            ("./a/one.jpg", b"1" * 3_000_000),
            ("a/two words.txt", b""),
            ("b/c/d/é.png", b"3" * 512),
            ("e/", None),
        ]
        archive = make(entries)
        assert unpack(archive, tmp_path / "out") == 3
        assert contents(tmp_path / "out") == {
            "a": None,
            "a/one.jpg": b"1" * 3_000_000,
            "a/two words.txt": b"",
            "b": None,
            "b/c": None,
            "b/c/d": None,
            "b/c/d/é.png": b"3" * 512,
            "e": None,
        }
        assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out"]

    def test_an_empty_one(self, make: Make, tmp_path: Path) -> None:
        assert unpack(make([]), tmp_path / "out") == 0
        assert contents(tmp_path / "out") == {}

    def test_archives_inside_stay_archives(self, make: Make, tmp_path: Path) -> None:
        inner = make_tgz(tmp_path / "inner", [("../evil", b"x")]).read_bytes()
        unpack(make([("inner.tar.gz", inner)]), tmp_path / "out")
        assert contents(tmp_path / "out") == {"inner.tar.gz": inner}

    def test_no_modes_are_taken_over(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "archive", "w") as archive:
            member = tarfile.TarInfo("run.sh")
            member.mode, member.uid, member.mtime = 0o6777, 12345, 5
            archive.addfile(member)
        unpack(tmp_path / "archive", tmp_path / "out")
        status = (tmp_path / "out/run.sh").stat()
        assert status.st_mode & 0o7111 == 0
        assert status.st_mtime > 10**9

    @pytest.mark.parametrize(
        "format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
    )
    def test_long_names_in_every_dialect(self, tmp_path: Path, format_: int) -> None:
        name = "/".join(["folder" * 7] * 3 + ["file" * 20])
        with tarfile.open(tmp_path / "archive", "w", format=format_) as archive:
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        unpack(tmp_path / "archive", tmp_path / "out")
        assert (tmp_path / "out" / name).read_bytes() == b"abc"

    def test_a_compressed_file_is_never_begun_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`tarfile` goes a byte back after members that fill their blocks: quadratic time."""
        entries: Entries = [(f"{i}.bin", bytes([i]) * 5120) for i in range(100)]
        archive = make_tgz(tmp_path / "archive", entries)
        monkeypatch.setattr(gzip.GzipFile, "seek", None)
        monkeypatch.setattr(gzip.GzipFile, "rewind", None)
        assert unpack(archive, tmp_path / "out") == 100
        assert contents(tmp_path / "out") == dict(entries)

    @given(
        entries=st.dictionaries(
            st.text("abcdef", min_size=1, max_size=4), st.binary(max_size=1100), max_size=8
        ),
        kind=st.sampled_from([make_zip, make_tar, make_tgz]),
    )
    @settings(max_examples=30, deadline=None)
    def test_what_goes_in_comes_out(
        self, entries: dict[str, bytes], kind: Make, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("unpacked")
        unpack(kind(folder / "archive", list(entries.items())), folder / "out")
        assert contents(folder / "out") == entries


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "../evil", "a/../../evil", "a/..", "..", "/etc/evil", "//evil", "C:/evil", "c:evil",
            "..\\evil", "a\\..\\..\\evil", "\\\\host\\evil", "a\nb", "",
        ],
    )  # fmt: skip
    def test_no_way_out(self, make: Make, name: str) -> None:
        refused(make([("good", b"1"), (name, b"evil")]), "is not unpacked: ", "name")

    def test_a_name_that_ends_early(self, tmp_path: Path) -> None:
        archive = make_zip(tmp_path / "archive", [("good_x_bad", b"1")])
        archive.write_bytes(archive.read_bytes().replace(b"good_x_bad", b"good\0x_bad"))
        refused(archive)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("a/b", "a/b"),
            ("a/b", "./a//b"),
            ("a/b", "A/b"),
            ("a/B", "a/b"),
            ("stra\u00dfe", "STRASSE"),
            ("caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")),
            ("a", "a/b"),
            ("a/b", "a"),
        ],
    )
    def test_no_second_file_of_a_name(self, make: Make, first: str, second: str) -> None:
        refused(make([(first, b"1"), (second, b"2")]), "there twice")

    def test_folders_twice_are_fine_but_not_in_two_cases(self, make: Make, tmp_path: Path) -> None:
        unpack(make([("a/", None), ("a/b", b"1"), ("a/", None), ("a/c", b"2")]), tmp_path / "out")
        assert contents(tmp_path / "out") == {"a": None, "a/b": b"1", "a/c": b"2"}

    @given(
        names=st.lists(
            st.lists(
                st.sampled_from(["..", ".", "", "a", "A", "b", "C:", "\\", "~"]), max_size=5
            ).map("/".join),
            max_size=4,
        ),
        kind=st.sampled_from([make_zip, make_tar]),
    )
    @settings(max_examples=150, deadline=None)
    def test_nothing_ever_lands_outside(
        self, names: list[str], kind: Make, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        root = tmp_path_factory.mktemp("names")
        (root / "inner").mkdir()
        archive = kind(root / "inner" / "archive", [(name, b"1") for name in names])
        try:
            files = unpack(archive, root / "inner" / "out")
        except DataError:
            files = 0
        outside = {p for p in root.rglob("*") if not p.is_relative_to(root / "inner" / "out")}
        assert outside == {root / "inner", archive}
        assert sum(path.is_file() for path in (root / "inner" / "out").rglob("*")) == files

    def test_nothing_is_unpacked_over(self, make: Make, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/mine").write_text("mine")
        refused(make([("mine", b"theirs")]), "exists already")


class TestKinds:
    @pytest.mark.parametrize(
        "kind",
        [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE],
    )
    def test_tar(self, tmp_path: Path, kind: bytes) -> None:
        with tarfile.open(tmp_path / "archive", "w") as archive:
            archive.addfile(tarfile.TarInfo("good"))
            member = tarfile.TarInfo("bad")
            member.type, member.linkname = kind, "good"
            archive.addfile(member)
        refused(tmp_path / "archive", "'bad' is neither a plain file nor a folder")

    def test_a_link_and_then_a_file_through_it(self, tmp_path: Path) -> None:
        (tmp_path / "victim").mkdir()
        with tarfile.open(tmp_path / "archive", "w") as archive:
            member = tarfile.TarInfo("link")
            member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "victim")
            archive.addfile(member)
            archive.addfile(tarfile.TarInfo("link/evil"))
        refused(tmp_path / "archive", "'link' is neither")

    def test_a_sparse_file(self, tmp_path: Path) -> None:
        """A few bytes that say they are a terabyte of holes."""
        with tarfile.open(tmp_path / "archive", "w", format=tarfile.PAX_FORMAT) as archive:
            member = tarfile.TarInfo("holes")
            member.pax_headers = {
                "GNU.sparse.major": "0",
                "GNU.sparse.minor": "1",
                "GNU.sparse.size": str(10**12),
                "GNU.sparse.map": f"0,0,{10**12},0",
            }
            archive.addfile(member)
        refused(tmp_path / "archive", "'holes'")

    @pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK])
    def test_zip(self, tmp_path: Path, kind: int) -> None:
        with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
            info = zipfile.ZipInfo("bad")
            info.create_system, info.external_attr = 3, (kind | 0o777) << 16
            archive.writestr(info, "/etc/passwd")
        refused(tmp_path / "archive", "'bad' is neither a file nor a folder")

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_unusual_compression(self, tmp_path: Path, method: int) -> None:
        with zipfile.ZipFile(tmp_path / "archive", "w", method) as archive:
            archive.writestr("a", b"1" * 1000)
        refused(tmp_path / "archive", "compressed in an unusual way")

    def test_encryption(self, tmp_path: Path) -> None:
        archive = make_zip(tmp_path / "archive", [("a", b"1")])
        data = bytearray(archive.read_bytes())
        data[data.index(b"PK\1\2") + 8] |= 1
        archive.write_bytes(data)
        refused(archive, "'a' is encrypted")


class TestBombs:
    def test_the_total(self, make: Make, tmp_path: Path) -> None:
        entries: Entries = [(str(i), bytes(1000)) for i in range(10)]
        archive = make(entries)
        assert unpack(archive, tmp_path / "fits", Limits(bytes=10_000)) == 10
        refused(archive, "more than 9,999 bytes", limits=Limits(bytes=9_999))

    def test_the_number(self, make: Make, tmp_path: Path) -> None:
        archive = make([(str(i), b"") for i in range(10)])
        assert unpack(archive, tmp_path / "fits", Limits(members=10)) == 10
        refused(archive, "more than 9 members", limits=Limits(members=9))

    @pytest.mark.parametrize("kind", [make_zip, make_tgz])
    def test_the_ratio(self, kind: Make, tmp_path: Path) -> None:
        bomb = kind(tmp_path / "archive", [("zeros", bytes(40 * 2**20))])
        assert bomb.stat().st_size < 50_000
        refused(bomb, "unpacks to more than 16,777,216 bytes")
        assert unpack(bomb, tmp_path / "out", Limits(ratio=2000)) == 1

    def test_a_zip_that_lies_about_a_size(self, tmp_path: Path) -> None:
        archive = make_zip(tmp_path / "archive", [("a", bytes(5000))])
        data = archive.read_bytes()
        archive.write_bytes(data.replace(struct.pack("<I", 5000), struct.pack("<I", 10)))
        refused(archive, "damaged")

    def test_overlapping_members(self, tmp_path: Path) -> None:
        """One packed kernel that a thousand entries share counts a thousand times."""
        archive = make_zip(tmp_path / "one", [("a00", bytes(10**6))])
        data = archive.read_bytes()
        start, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
        entry = data[start:end]
        central = b"".join(entry.replace(b"a00", b"%03d" % i) for i in range(1000))
        tail = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1000, 1000, len(central), start, 0)
        (tmp_path / "one").write_bytes(data[:start] + central + tail)
        refused(tmp_path / "one", "more than 16,777,216 bytes")

    def test_a_header_that_would_fill_the_memory(self, tmp_path: Path) -> None:
        header = tarfile.TarInfo("pax")
        header.type, header.size = tarfile.XHDTYPE, 2**30
        with gzip.open(tmp_path / "archive", "wb", 1) as file:
            file.write(header.tobuf(tarfile.USTAR_FORMAT))
            for _ in range(64):
                file.write(bytes(2**20))
        tracemalloc.start()
        refused(tmp_path / "archive", "a header of 1,073,741,824 bytes")
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
        tracemalloc.stop()

    def test_padding_without_end(self, tmp_path: Path) -> None:
        archive = make_tar(tmp_path / "plain", [("a", b"1")])
        with gzip.open(tmp_path / "archive", "wb", 1) as file:
            file.write(archive.read_bytes())
            for _ in range(40):
                file.write(bytes(2**20))
        archive.unlink()
        refused(tmp_path / "archive", "unpacks to more bytes", limits=Limits(members=10))


class TestDamage:
    @pytest.mark.parametrize("keep", [0.0, 0.2, 0.5, 0.9])
    def test_cut_short(self, make: Make, keep: float) -> None:
        archive = make([(f"{i}/{i}", bytes(range(256)) * 20) for i in range(20)])
        data = archive.read_bytes()
        archive.write_bytes(data[: int(len(data) * keep)])
        refused(archive, "damaged")

    def test_cut_between_members(self, tmp_path: Path) -> None:
        """`tarfile` alone takes this for the end."""
        archive = make_tar(tmp_path / "archive", [("a", b"1" * 512), ("b", b"2" * 512)])
        archive.write_bytes(archive.read_bytes()[:1024])
        refused(archive, "breaks off")

    def test_a_header_overwritten(self, tmp_path: Path) -> None:
        """`tarfile` alone takes this for the end, too."""
        archive = make_tar(tmp_path / "archive", [("a", b"1" * 512), ("b", b"2" * 512)])
        data = bytearray(archive.read_bytes())
        data[1024:1100] = b"?" * 76
        archive.write_bytes(data)
        refused(archive, "breaks off")

    @pytest.mark.parametrize("kind", [make_zip, make_tgz])
    def test_one_bit(self, kind: Make, tmp_path: Path) -> None:
        archive = kind(tmp_path / "archive", [("a", bytes(range(256)) * 200)])
        data = bytearray(archive.read_bytes())
        data[120] ^= 4
        archive.write_bytes(data)
        refused(archive, "damaged")

    def test_a_size_below_zero(self, tmp_path: Path) -> None:
        member = tarfile.TarInfo("a")
        header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        header[124:136] = b"\xff" * 11 + b"\x00"  # base 256: -256
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        (tmp_path / "archive").write_bytes(bytes(header) + bytes(1024))
        refused(tmp_path / "archive", "damaged")

    def test_no_archive(self, tmp_path: Path) -> None:
        (tmp_path / "archive").write_text("<html>404</html>\n" * 100)
        refused(tmp_path / "archive", "damaged")
        with pytest.raises(DataError, match="cannot unpack"):
            unpack(tmp_path / "absent", tmp_path / "out")

    @given(
        noise=st.binary(max_size=2000),
        magic=st.sampled_from([b"", b"PK\3\4", b"\x1f\x8b\x08\0"]),
    )
    @settings(max_examples=100, deadline=None)
    def test_noise(
        self, noise: bytes, magic: bytes, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("noise")
        (folder / "archive").write_bytes(magic + noise)
        refused(folder / "archive")
