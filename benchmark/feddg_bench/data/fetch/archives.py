"""Unpacking an archive whole or not at all, with nothing outside its folder."""

from __future__ import annotations

import shutil
import tarfile
import zlib
from pathlib import Path

from feddg_bench.common.errors import DataError


def unpack_archive(archive: Path, folder: Path, most_bytes: int) -> int:
    """Unpack a tar file, compressed or not, into a new folder that appears when all is written.

    What an earlier call left in the folder is replaced. An archive is refused if its files have
    more than ``most_bytes`` in total.

    Returns:
        Number of files.

    Raises:
        DataError: If the archive is damaged or too large, if a member would lie outside the folder
            or is a link or a device, or if the disk is full. Nothing is left then.
    """
    shutil.rmtree(folder, ignore_errors=True)
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = size = 0
    try:
        unfinished.mkdir(parents=True)
        with tarfile.open(archive, "r|*") as opened:  # read as a stream, so unpacked only once
            for member in opened:
                if not (member.isreg() or member.isdir()):
                    raise DataError(f"{archive} is not unpacked: {member.name!r} is no plain file")
                files, size = files + member.isreg(), size + member.size
                if size > most_bytes:
                    raise DataError(f"{archive} is not unpacked: more than {most_bytes:,} bytes")
                opened.extract(member, unfinished, filter="data")
        unfinished.replace(folder)
    except tarfile.FilterError as error:
        raise DataError(f"{archive} is not unpacked: {error}") from error
    except (tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise DataError(f"{archive} is damaged ({error}): get it again") from error
    except OSError as error:  # gzip's or the disk's
        text = error.strerror or error
        raise DataError(f"cannot unpack {archive}: {text}; make room or get it again") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return files
