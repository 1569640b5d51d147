"""Unpacking of archives: valid ones, path traversal, archive bombs, damaged files."""

from __future__ import annotations

import io
import resource
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import DataError
from feddg_bench.data.fetch.obtain import unpack_archive

ROOM = 10**8


def make(path: Path, entries: list[tuple[str, bytes | None]], mode: str = "w:gz") -> Path:
    """Write an archive; an entry without content is a folder."""
    with tarfile.open(path, mode) as archive:
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(archive: Path, word: str, room: int = ROOM) -> None:
    """Check that an archive is refused with a one-line message and leaves no files behind."""
    before = contents(archive.parent)
    with pytest.raises(DataError, match=word) as caught:
        unpack_archive(archive, archive.parent / "out", room)
    assert "\n" not in str(caught.value)
    assert contents(archive.parent) == before


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_files_and_folders(tmp_path, mode):
    entries = [("./a", None), ("./a/one.jpg", b"1" * 3_000_000), ("b/c/é.png", b"3" * 512)]
    archive = make(tmp_path / "archive", entries, mode)
    expected = {"a": None, "a/one.jpg": b"1" * 3_000_000, "b": None, "b/c": None}
    expected["b/c/é.png"] = b"3" * 512
    for _ in range(2):  # the second call replaces the first call's output
        assert unpack_archive(archive, tmp_path / "out", ROOM) == 2
        assert contents(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out"]


def test_no_file_becomes_a_program_of_another_user(tmp_path):
    with tarfile.open(tmp_path / "archive", "w") as archive:
        member = tarfile.TarInfo("run.sh")
        member.mode, member.uid = 0o6777, 12345
        archive.addfile(member)
    unpack_archive(tmp_path / "archive", tmp_path / "out", ROOM)
    status = (tmp_path / "out/run.sh").stat()
    assert status.st_mode & 0o7022 == 0
    assert status.st_uid == tmp_path.stat().st_uid


@given(
    names=st.lists(
        st.lists(st.sampled_from(["..", ".", "", "a", "A", "b", "C:", "~"]), max_size=5).map(
            "/".join
        ),
        max_size=4,
    )
)
def test_nothing_ever_lands_outside(names, tmp_path_factory):
    root = tmp_path_factory.mktemp("names")
    (root / "inner").mkdir()
    archive = make(root / "inner" / "archive", [(name, b"1") for name in names])
    try:
        unpack_archive(archive, root / "inner" / "out", ROOM)
    except DataError:
        assert not (root / "inner" / "out").exists()
    outside = {p for p in root.rglob("*") if not p.is_relative_to(root / "inner" / "out")}
    assert outside == {root / "inner", archive}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", ".."])
def test_a_way_out_is_refused(tmp_path, name):
    refused(make(tmp_path / "archive", [("good", b"1"), (name, b"evil")]), "not unpacked")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_only_plain_files(tmp_path, kind):
    with tarfile.open(tmp_path / "archive", "w") as archive:
        archive.addfile(tarfile.TarInfo("good"))
        member = tarfile.TarInfo("bad")
        member.type, member.linkname = kind, "good"
        archive.addfile(member)
    refused(tmp_path / "archive", "'bad' is no plain file")


def test_bombs(tmp_path):
    archive = make(tmp_path / "archive", [(str(i), bytes(1000)) for i in range(10)])
    assert unpack_archive(archive, tmp_path / "fits", 10_000) == 10
    refused(archive, "more than 9,999 bytes", 9_999)
    with tarfile.open(tmp_path / "archive", "w", format=tarfile.PAX_FORMAT) as sparse:
        member = tarfile.TarInfo("holes")
        sizes = {"size": str(10**12), "map": f"0,0,{10**12},0", "major": "0", "minor": "1"}
        member.pax_headers = {f"GNU.sparse.{key}": value for key, value in sizes.items()}
        sparse.addfile(member)
    refused(tmp_path / "archive", "more than")


@pytest.mark.parametrize("keep", [0.0, 0.2, 0.5, 0.9])
def test_an_archive_cut_short(tmp_path, keep):
    entries = [(f"{i}/{i}", bytes(range(256)) * 20) for i in range(20)]
    archive = make(tmp_path / "archive", entries)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * keep)])
    refused(archive, "damaged|cannot unpack")


@given(noise=st.binary(max_size=2000), magic=st.sampled_from([b"", b"\x1f\x8b\x08\0"]))
def test_noise(noise, magic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise")
    (folder / "archive").write_bytes(magic + noise)
    refused(folder / "archive", "damaged|cannot unpack")


def test_a_full_disk(tmp_path):
    archive = make(tmp_path / "archive", [("a", bytes(10_000))])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        refused(archive, "make room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert unpack_archive(archive, tmp_path / "out", ROOM) == 1
