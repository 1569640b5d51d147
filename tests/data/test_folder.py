"""Folder: domains and classes are those on disk, and no two folders are confused."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.data import image_folders
from feddg_bench.data.locations import remember_root
from feddg_bench.data.protocols import scenarios
from feddg_datasets.folder import Folder
from tests.fabricate import fabricate
from tests.helpers import refused


def image(*parts: str | Path) -> None:
    path = Path(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)


@pytest.fixture
def made(tmp_path):
    return fabricate("folder", tmp_path / "data")


def test_names_are_those_on_disk(made):
    dataset = Folder(made)
    assert dataset.domains == ("Day Light", "night", "rainy-day")
    assert dataset.classes == ("Car", "Fire Truck", "bus", "tram")
    assert dataset.letters == {"Day Light": "Day_Light", "night": "night", "rainy-day": "rainy_day"}
    names = {"domains": dataset.domains, "classes": dataset.classes}
    assert {**dataset.identity, **names} == dataset.identity
    records = dataset.records()
    counts = np.zeros((3, 4), dtype=int)
    np.add.at(counts, (records.domains, records.labels), 1)
    assert counts.tolist() == [[10] * 4, [10] * 4, [10, 10, 10, 0]]
    assert "rainy-day/Fire Truck/3.jpg" in records.paths


def test_scenarios_have_whole_names(made):
    dataset = Folder(made)
    found = scenarios("ltdo", dataset.domains, dataset.letters)
    assert found[0].name == "rainy_day-Day_Light-night"
    for select in ("Day_Light+night-rainy_day", "night+Day_Light-rainy_day", "rainy_day"):
        (scenario,) = scenarios("lodo", dataset.domains, dataset.letters, select)
        assert scenario.name == "Day_Light+night-rainy_day"
        assert scenario.test == "rainy-day"


def test_folders_are_listed_once_in_a_process_unless_they_change(made, monkeypatch):
    monkeypatch.setattr(image_folders, "_SETTLED", 0)
    read, iterdir = [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: read.append(path) or iterdir(path))
    first = Folder(made).records()
    assert {made, made / "night", made / "night" / "bus"} <= {*read}
    assert len(read) == len({*read})
    read.clear()
    assert Folder(made).records().paths == first.paths
    assert not read
    image(made, "night", "bus", "new.png")
    os.utime(made / "night" / "bus", ns=(1, 1))  # the clock of files may be coarse
    assert {*Folder(made).records().paths} == {*first.paths, "night/bus/new.png"}
    assert read == [made / "night" / "bus"]


def test_two_objects_do_not_share_names(made, tmp_path):
    for name in ("y", "z"):
        image(tmp_path / "b", "x", name, "1.png")
    first, second = Folder(made), Folder(tmp_path / "b")
    assert second.classes == ("y", "z")
    assert len(first.classes) == 4
    assert (Folder.domains, Folder.classes) == ((), ())


NFC, NFD = "\u00e9tang", "e\u0301tang"
"""The same name as usually stored by Windows and Linux (NFC) and by macOS (NFD)."""


def test_one_class_in_two_unicode_forms_is_one_class(made):
    for domain, name in (("Day Light", NFC), ("night", NFD), ("rainy-day", NFD)):
        (made / domain / "bus").rename(made / domain / name)
    dataset = Folder(made)
    assert dataset.classes == ("Car", "Fire Truck", "tram", NFC)
    records = dataset.records()
    assert np.count_nonzero(records.labels == 3) == 30
    assert f"night/{NFC}/3.jpg" in records.paths
    assert dataset.identity["classes"] == dataset.classes


def test_the_spelling_on_disk_stays_in_the_identity(made):
    (made / "night").rename(made / NFD)
    for domain in made.iterdir():
        (domain / "bus").rename(domain / NFD)
    dataset = Folder(made)
    assert dataset.domains == ("Day Light", NFD, "rainy-day")
    assert dataset.identity["classes"] == ("Car", "Fire Truck", NFD, "tram")
    assert dataset.letters[NFD] == NFD


@pytest.mark.parametrize("typed", [NFC, NFD])
def test_a_scenario_is_named_in_either_unicode_form(made, typed):
    (made / "night").rename(made / NFD)
    dataset = Folder(made)
    for select in (typed, f"rainy_day+Day_Light-{typed}"):
        (found,) = scenarios("lodo", dataset.domains, dataset.letters, select)
        assert found.name == f"Day_Light+rainy_day-{NFD}"
    (found,) = scenarios("ltdo", dataset.domains, dataset.letters, f"{typed}-rainy_day-Day_Light")
    assert found.train == (NFD,)


def test_two_forms_of_a_name_in_one_folder_are_refused(made):
    for name in (NFC, NFD):
        image(made, "night", name, "1.png")
    with refused(DataError, "taken for the same"):
        Folder(made)
    shutil.rmtree(made / "night" / NFD)
    for name in (f"{NFC}+x", f"{NFD} x"):
        image(made, name, "bus", "1.png")
    with refused(DataError, "do not differ without"):
        Folder(made)


@pytest.mark.parametrize(
    "name",
    [
        *("$RECYCLE.BIN", "lost+found", "@eaDir", "System Volume Information", "RECYCLER"),
        *(".ipynb_checkpoints", "__MACOSX", "#recycle", ".Trashes"),
    ],
)
def test_folders_of_a_system_are_no_data(made, name):
    """They are neither domains nor classes, and their files are not counted as skipped."""
    before = Folder(made)
    image(made, name, "S-1-5-21-1000", "1.png")
    image(made, "night", name, "1.png")
    image(made, "night", name, "2.png", "thumb.png")
    after = Folder(made)
    assert (after.domains, after.classes) == (before.domains, before.classes)
    assert after.identity == before.identity
    assert after.skipped() == ""


@pytest.mark.parametrize(
    ("place", "mode"), [("locked", 0o000), ("locked", 0o444), ("night/locked", 0o000)]
)
def test_a_folder_that_may_not_be_read_is_one_message(made, place, mode, monkeypatch):
    image(made, place, "bus", "1.png")
    locked = made / place
    if os.geteuid() != 0:
        locked.chmod(mode)
    else:  # root can read everything
        listed, looked = Path.iterdir, Path.is_dir

        def iterdir(path):
            if path == locked and mode == 0:
                raise PermissionError(13, "Permission denied", str(path))
            return listed(path)

        def is_dir(path):
            if path.parent == locked:
                raise PermissionError(13, "Permission denied", str(path))
            return looked(path)

        monkeypatch.setattr(Path, "iterdir", iterdir)
        monkeypatch.setattr(Path, "is_dir", is_dir)
    with refused(DataError, f"cannot read the folder {locked}", "Permission denied", "move it"):
        Folder(made)
    if os.geteuid() != 0:
        locked.chmod(0o700)


def test_every_ending_of_an_image_is_read(tmp_path):
    kinds = {"jpg": "JPEG", "jfif": "JPEG", "jpe": "JPEG", "tif": "TIFF", "TIFF": "TIFF"}
    kinds |= {"bmp": "BMP", "gif": "GIF", "webp": "WEBP", "ppm": "PPM", "png": "PNG"}
    for domain in ("x", "y"):
        for ending, kind in kinds.items():
            image(tmp_path, domain, "b", "0.png")
            image(tmp_path, domain, "a", "0.png")
            Image.new("RGB", (9, 9), (250, 250, 250)).save(
                tmp_path / domain / "a" / f"1.{ending}", format=kind
            )
    dataset = Folder(tmp_path)
    found = [i for i, path in enumerate(dataset.records().paths) if "/1." in path]
    assert len(found) == 2 * len(kinds)
    for index in found:
        assert abs(dataset.read(index, 8).astype(int) - 250).max() <= 2


def test_files_that_are_not_read_are_counted_by_ending(made):
    assert Folder(made).skipped() == ""
    for name in ("a.heic", "b.HEIC", "c.svg", "notes", "Thumbs.db", ".DS_Store"):
        (made / "night" / "bus" / name).write_bytes(b"x")
    image(made, "night", "loose.png")
    image(made, "night", "bus", "deep", "deeper.png")
    (made / "readme.txt").write_text("x")
    assert Folder(made).skipped() == (
        "6 files are not read: 2 .heic, 1 .txt, 1 .svg, 1 no ending, 1 image outside "
        f"<domain>/<class>/; `feddg-bench data check folder --data-root {made}` names them"
    )


def test_what_is_no_domain_is_left_out(made):
    (made / "notes").mkdir()
    (made / "notes" / "readme.txt").write_text("no image")
    (made / "splits" / "old").mkdir(parents=True)
    (made / "splits" / "old" / "a.csv").write_text("no image")
    (made / "night" / "empty").mkdir()
    image(made, ".hidden", "bus", "1.png")
    image(made, "__MACOSX", "bus", "1.png")
    image(made, "overview.png")
    dataset = Folder(made)
    assert dataset.domains == ("Day Light", "night", "rainy-day")
    assert dataset.classes == ("Car", "Fire Truck", "bus", "tram")


def test_folders_inside_class_folders_are_read(made, tmp_path):
    """As torchvision's ImageFolder reads them; a link to a folder above itself is not followed."""
    for name in ("batch 1/1.png", "batch 1/b/2.png", ".hidden/3.png", "@eaDir/4.png"):
        image(made, "night", "bus", name)
    image(tmp_path, "elsewhere", "5.png")
    (made / "night" / "bus" / "link").symlink_to(tmp_path / "elsewhere")
    (made / "night" / "bus" / "batch 1" / "loop").symlink_to(made / "night")
    dataset = Folder(made)
    deep = [path for path in dataset.records().paths if path.count("/") > 2]
    assert deep == [
        f"night/bus/{name}" for name in ("batch 1/1.png", "batch 1/b/2.png", "link/5.png")
    ]
    theirs = torchvision.datasets.ImageFolder(str(made / "rainy-day"))
    ours = [path for path in dataset.records().paths if path.startswith("rainy-day/")]
    assert len(theirs) == len(ours)
    assert dataset.nested() == (
        "images in folders inside <domain>/<class>/: 3 of 113, such as night/bus/batch 1/1.png"
    )
    assert dataset.skipped() == ""


@pytest.mark.parametrize("place", ["runs", "night/runs", "night/bus/runs", ""])
def test_the_suites_own_output_is_no_data(made, place):
    """A results folder inside the data; `figures` and `attacks` hold pictures."""
    before = Folder(made)
    results = made / place
    (results / "runs").mkdir(parents=True)
    (results / "runs" / "0123456789abcdef.json").write_text("{}")
    image(results, "figures", "all", "convergence.png")
    image(results, "figures", "convergence.png")
    image(results, "attacks", "a.png")
    after = Folder(made)
    assert after.identity == before.identity
    assert after.records().paths == before.records().paths
    assert after.skipped() == ""


def _move(root: Path, old: str, new: str) -> None:
    (root / new).parent.mkdir(parents=True, exist_ok=True)
    (root / old).rename(root / new)


WRONG = {
    "no endings": (
        ["{d}/{c}/1"],
        "its files have no ending",
        lambda root: [p.rename(f"{p}.png") for p in root.glob("*/*/1")],
    ),
    "another level": (
        ["{d}/images/{c}/1.png"],
        "has only the class images: if the folders in it are the classes, move them up, to",
        lambda root: [_move(root, f"{d}/images/{c}", f"{d}/{c}") for d in "xyz" for c in "ab"],
    ),
    "splits as classes": (
        ["{d}/train/{c}/1.png", "{d}/val/{c}/1.png"],
        "has splits (train, val) in place of classes: move the images to <domain>/<class>/<split>/",
        lambda root: [
            _move(root, f"{d}/{s}/{c}", f"{d}/{c}/{s}")
            for d in "xyz"
            for c in "ab"
            for s in ("train", "val")
        ],
    ),
    "splits as domains": (
        ["Train/{d}/{c}/1.png", "test/{d}/{c}/1.png"],
        "has splits (Train, test) in place of domains: move the images to",
        lambda root: [
            _move(root, f"{s}/{d}/{c}", f"{d}/{c}/{s}")
            for d in "xyz"
            for c in "ab"
            for s in ("Train", "test")
        ],
    ),
    "a folder too low": (["x/{c}/deep/1.png"], "so give the folder above", None),
    "a folder too high": (["all/{d}/{c}/1.png"], "give --data-root", None),
}


@pytest.mark.parametrize("kind", WRONG)
def test_the_advice_for_a_wrong_folder_works(tmp_path, kind):
    names, words, remedy = WRONG[kind]
    root = tmp_path / "data"
    for d, c, name in itertools.product("xyz", "ab", names):
        path = root / name.format(d=d, c=c)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path, format="PNG")
    wrong = root / "x" if kind == "a folder too low" else root
    if kind == "a folder too low":
        for d, c in itertools.product("yz", "ab"):
            image(root, d, c, "1.png")
    with refused(DataError, words) as caught:
        Folder(wrong)
    if remedy is not None:
        remedy(root)
    elif kind == "a folder too high":
        wrong = Path(str(caught.value).rpartition("give --data-root ")[2])
    else:
        wrong = wrong.parent
    for left in sorted(root.glob("**/"), reverse=True):
        with contextlib.suppress(OSError):
            left.rmdir()
    dataset = Folder(wrong)
    assert (dataset.domains, dataset.classes) == (("x", "y", "z"), ("a", "b"))
    assert dataset.count(dataset.records()).min() > 0


def test_spellings_of_a_class_in_different_domains_are_one_class(made):
    (made / "rainy-day" / "Fire Truck").rename(made / "rainy-day" / "fire_truck")
    dataset = Folder(made)
    assert dataset.classes == ("Car", "Fire Truck", "bus", "tram")
    assert "rainy-day/Fire Truck/3.jpg" in dataset.records().paths


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("NIGHT/bus", "has both 'NIGHT' and 'night'"),
        ("night/fire-truck", "has both 'Fire Truck' and 'fire-truck'"),
        ("Day+Light/bus", "do not differ without"),
    ],
)
def test_names_that_read_alike_are_refused(made, new, message):
    image(made, new, "1.png")
    with pytest.raises(DataError, match=message):
        Folder(made)


def test_a_name_of_separators_alone_is_refused(tmp_path):
    for name in ("a", "b"):
        image(tmp_path, "+", name, "1.png")
    with refused(DataError, "do not differ"):
        Folder(tmp_path)


def test_wrong_folders_get_a_hint(made, tmp_path):
    with pytest.raises(DataError, match=rf": give --data-root {made}$"):
        Folder(tmp_path)
    with refused(DataError, "its folders hold images themselves"):
        Folder(made / "night")
    with refused(DataError, "has no images in folders <domain>/<class>/<image>: give"):
        Folder(made / "night" / "bus")
    for path in (made / "night").rglob("*.jpg"):
        path.rename(path.with_suffix(".heic"))
    (tmp_path / "only").mkdir()
    (made / "night").rename(tmp_path / "only" / "night")
    with refused(DataError, "files .heic are not read"):
        Folder(tmp_path / "only")
    with refused(SettingsError, "there is no folder", "nowhere"):
        Folder(tmp_path / "nowhere")
    with refused(DataError, "needs --data-root DIR"):
        Folder()


def test_names_change_the_fingerprint(made):
    before = Folder(made).fingerprint()
    (made / "night").rename(made / "darkness")
    after = Folder(made)
    assert after.fingerprint() != before
    assert after.identity["domains"] == ("Day Light", "darkness", "rainy-day")


def test_two_folders_of_the_same_names_are_two_data_sets(made, tmp_path):
    before = Folder(made).identity
    again = tmp_path / "again"
    shutil.copytree(made, again)
    assert Folder(again).identity == before
    path = next((again / "night").rglob("*.*"))
    path.write_bytes(path.read_bytes() + b"x")
    assert Folder(again).identity != before
    path.unlink()
    assert Folder(again).identity != before


def test_names_that_do_not_show_are_refused(made):
    (made / "night").rename(made / "ni\x1b[31mght")
    with refused(DataError, "rename it") as caught:
        Folder(made)
    assert "\x1b" not in str(caught.value).replace(str(made), "")


def test_the_folder_noted_for_it_wins_over_that_of_all(made, tmp_path, monkeypatch):
    (tmp_path / "others").mkdir()
    monkeypatch.setenv("FEDDG_DATA", str(tmp_path / "others"))
    monkeypatch.setenv("FEDDG_CONFIG", str(tmp_path / "settings.yaml"))
    remember_root(made, "folder")
    assert Folder().folder == made
