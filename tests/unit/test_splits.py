"""Splits: numbers of held-out images, and valid and invalid split files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.data.dataset import Listing
from feddg_bench.data.protocols import Scenario, scenarios
from feddg_bench.data.splits import (
    SPLITS,
    read_split_csv,
    scenarios_with_files,
    split_by_domain,
)
from tests.helpers import refused

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
LETTERS = {"photo": "p", "art_painting": "a", "cartoon": "c", "sketch": "s"}
CLASSES = ("dog", "elephant")


def scenario(name: str) -> Scenario:
    protocol = "ltdo" if name.count("-") == 2 else "lodo"
    cycle = ("art_painting", "photo", "sketch", "cartoon")
    return scenarios(protocol, cycle, LETTERS, name)[0]


# ------------------------------------------------------------------------------- our own splits


def images(sizes):
    """Return domains and labels of a data set with ``sizes`` images of each domain and class."""
    table = np.array(sizes)
    domains, labels = np.indices(table.shape).reshape(2, -1)
    order = np.random.default_rng(0).permutation(table.sum())
    return (np.repeat(v, table.ravel())[order] for v in (domains, labels))


def split(name, sizes, *, id_val=0.05, id_test=0.05, seed=0):
    domains, labels = images(sizes)
    splits = split_by_domain(
        scenario(name),
        domains,
        labels,
        DOMAINS,
        id_val_fraction=id_val,
        id_test_fraction=id_test,
        seed=seed,
    )
    return splits, domains, labels


SIZES = [(379, 100), (30, 21), (10, 50), (70, 9)]


@pytest.mark.parametrize("name", ["ac-p-s", "cs-a-p", "pa-s-c", "acs-p", "pcs-a"])
def test_every_image_is_in_one_split_of_its_domains_role(name):
    splits, domains, _ = split(name, SIZES)
    role = scenario(name)
    assert list(splits) == [s for s in SPLITS if s != "val" or role.val is not None]
    assert sorted(np.concatenate(list(splits.values()))) == list(range(len(domains)))
    for key, index in splits.items():
        assert index.dtype == np.int64
        assert index.tolist() == sorted(index)
        held = {DOMAINS[d] for d in domains[index]}
        assert held <= set({"val": (role.val,), "test": (role.test,)}.get(key, role.train))


def test_fractions_are_taken_of_every_domain_and_class():
    splits, domains, labels = split("ac-p-s", SIZES)

    def count(key, domain, label):
        index = splits[key]
        return np.count_nonzero((domains[index] == domain) & (labels[index] == label))

    # 379: round(18.95) = 19, round(18.0) = 18; 100: 5, round(4.75) = 5
    # 30: round(1.5) = 2, round(1.4) = 1; 21: round(1.05) = 1, round(1.0) = 1
    held_out = {(0, 0): (19, 18), (0, 1): (5, 5), (1, 0): (2, 1), (1, 1): (1, 1)}
    for (domain, label), (num_test, num_val) in held_out.items():
        assert count("id_test", domain, label) == num_test
        assert count("id_val", domain, label) == num_val
        assert count("train", domain, label) == SIZES[domain][label] - num_test - num_val


def test_halves_go_to_the_even_number():
    sizes = [(10, 30), (50, 70), (1, 1), (1, 1)]
    splits, domains, labels = split("ac-p-s", sizes, id_val=0)
    assert "id_val" not in splits
    index = splits["id_test"]
    counts = [
        np.count_nonzero((domains[index] == d) & (labels[index] == y))
        for d in (0, 1)
        for y in (0, 1)
    ]
    assert counts == [0, 2, 2, 4]  # of 0.5, 1.5, 2.5 and 3.5


def test_fedccrl_holds_out_a_tenth_of_every_domain():
    splits, domains, _ = split("ac-p-s", [(100,), (55,), (7,), (8,)], id_val=0.1, id_test=0)
    assert np.bincount(domains[splits["train"]]).tolist() == [90, 49]
    assert np.bincount(domains[splits["id_val"]]).tolist() == [10, 6]
    assert "id_test" not in splits


def test_splits_depend_on_seed_and_scenario_alone():
    def held_out(name, seed):
        return split(name, SIZES, seed=seed)[0]["id_test"].tolist()

    assert held_out("acs-p", 1) == held_out("acs-p", 1)
    assert held_out("acs-p", 1) != held_out("acs-p", 2)
    _, domains, _ = split("acs-p", SIZES)
    art = [[i for i in held_out(name, 1) if domains[i] == 0] for name in ("acs-p", "as-c-p")]
    assert len(art[0]) == len(art[1])
    assert art[0] != art[1]


def test_no_training_image_left_is_refused():
    with refused(DataError, "no images; lower data.id_val_fraction"):
        split("ac-p-s", [(1,), (1,), (1,), (1,)], id_test=0.9)


# ------------------------------------------------------------------------------- split files

PATHS = [f"{d}/{c}/pic_{i:03d}.jpg" for d in DOMAINS for c in CLASSES for i in (1, 2, 3)]
DOMAIN_OF = np.repeat(np.arange(4), 6)
LABEL_OF = np.tile(np.repeat([0, 1], 3), 4)
COLUMNS = ("", "split", "domain_remapped", "domain", "category", "y", "path")
AC_P_S = {"art_painting": "train", "cartoon": "train", "photo": "val", "sketch": "test"}
ACS_P = {"art_painting": "train", "cartoon": "train", "photo": "test", "sketch": "train"}


def rows(splits=AC_P_S):
    """Return the rows of a valid file; images 1 and 3 are held out within their domain."""
    table = []
    for i, path in enumerate(PATHS):
        domain, category, _ = path.split("/")
        table.append(
            {
                "": i,
                "split": splits[domain],
                "domain_remapped": (2, 1, 0, 3)[DOMAIN_OF[i]],
                "domain": domain,
                "category": category,
                "y": LABEL_OF[i],
                "path": path,
            }
        )
    table[1]["split"], table[3]["split"] = "id_val", "id_test"
    return table


def write(folder: Path, table, columns=COLUMNS) -> Path:
    path = folder / "splits.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)
    return path


class Listed:
    """A data set with only a list of images."""

    title = "PACS"
    letters: ClassVar = LETTERS
    official: ClassVar = {}

    def __init__(self, paths=PATHS, domains=DOMAIN_OF, labels=LABEL_OF, classes=CLASSES):
        self.listed = Listing(tuple(paths), labels, domains)
        self.domains, self.classes = DOMAINS, classes

    def records(self):
        return self.listed


def read(path: Path, name="ac-p-s"):
    return read_split_csv(path, scenario(name), Listed())


def refuse(folder, table, message, *, name="ac-p-s", columns=COLUMNS):
    with pytest.raises(DataError, match=message) as caught:
        read(write(folder, table, columns), name)
    assert "\n" not in str(caught.value)


def test_a_file_is_read_whatever_its_order(tmp_path):
    splits = read(write(tmp_path, rows()[::-1], COLUMNS[::-1]))
    assert {key: index.tolist() for key, index in splits.items()} == {
        "train": [0, 2, *range(4, 12)],
        "id_val": [1],
        "id_test": [3],
        "val": list(range(12, 18)),
        "test": list(range(18, 24)),
    }


def test_a_file_without_a_validation_domain_fits_lodo(tmp_path):
    splits = read(write(tmp_path, rows(ACS_P)), "acs-p")
    assert list(splits) == ["train", "id_val", "id_test", "test"]
    assert splits["test"].tolist() == list(range(12, 18))


def test_only_three_columns_are_needed(tmp_path):
    assert len(read(write(tmp_path, rows(), ("split", "domain", "path")))["train"]) == 10


def test_paths_may_differ_in_suffix_dot_and_slashes(tmp_path):
    table = rows()
    table[0]["path"] = "./" + PATHS[0]
    table[20]["path"] = PATHS[20].replace(".jpg", ".png")
    table[21]["path"] = PATHS[21].replace(".jpg", ".JPEG")
    table[22]["path"] = PATHS[22].replace("/", "\\")
    assert len(read(write(tmp_path, table))["test"]) == 6


def test_an_exact_path_wins_over_another_suffix(tmp_path):
    paths = ["art_painting/dog/1.png", "art_painting/dog/1.jpg", "photo/dog/1.jpg"]
    path = tmp_path / "splits.csv"
    path.write_text(
        "split,domain,path\ntrain,art_painting,./art_painting/dog/1.png\n"
        "id_val,art_painting,art_painting/dog/1.jpg\ntest,photo,photo/dog/1.jpg\n"
    )
    dataset = Listed(paths, np.array([0, 0, 2]), np.zeros(3, int))
    splits = read_split_csv(path, scenario("acs-p"), dataset)
    assert splits["train"].tolist() == [0]
    assert splits["id_val"].tolist() == [1]


NFC, NFD = "\u00e9tude", "e\u0301tude"


class Accents(Listed):
    """The same with accents in a domain, a class and a file, as macOS stores them."""

    letters: ClassVar = {NFD: NFD, "photo": "p"}

    def __init__(self):
        paths = [f"{NFD}/{NFD}/{NFD}.jpg", f"{NFD}/dog/1.jpg", "photo/dog/1.jpg"]
        super().__init__(paths, np.array([0, 0, 1]), np.array([1, 0, 0]), ("dog", NFD))
        self.domains = (NFD, "photo")


@pytest.mark.parametrize("name", [NFC, NFD])
def test_names_are_compared_in_one_unicode_form(tmp_path, name):
    path, dataset = tmp_path / "splits.csv", Accents()
    path.write_text(
        f"split,domain,category,y,path\ntrain,{name},{name},1,{name}/{name}/{name}.png\n"
        f"train,{name},dog,0,{name}/dog/1.jpg\ntest,photo,dog,0,photo/dog/1.jpg\n",
        encoding="utf-8",
    )
    (found,) = scenarios("lodo", dataset.domains, dataset.letters, "photo")
    for given in (found, None):
        splits = read_split_csv(path, given, dataset)
        assert {key: index.tolist() for key, index in splits.items()} == {
            "train": [0, 1],
            "test": [2],
        }
    ((scenario, file),) = scenarios_with_files(path, "lodo", dataset, f"{name}-p")
    assert (scenario.name, file) == (f"{NFD}-p", path)


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = write(tmp_path, rows(), ("split", "domain", "path"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read(path)["train"]) == 10


@pytest.mark.parametrize("column", ["split", "domain", "path"])
def test_a_missing_column_is_named(tmp_path, column):
    columns = tuple(c for c in COLUMNS if c != column)
    refuse(tmp_path, rows(), f"line 1: there is no column '{column}'", columns=columns)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("split", "vall", "line 9: unknown split 'vall'; did you mean 'val'"),
        ("split", "", "line 9: the name of a split is empty"),
        ("path", "cartoon/dog/pic_9.jpg", "line 9: the data set has no image 'cartoon/dog/pic_9"),
        ("path", PATHS[3], f"line 9: image {PATHS[3]} is already in line 5"),
        ("domain", "sketch", "line 9: domain is 'sketch' but the image lies in 'cartoon'"),
        ("category", "elephant", "line 9: category is 'elephant' but the image's is 'dog'"),
        ("y", 1, "line 9: y is 1 but the image's label is 0"),
        ("y", "dog", "line 9: y is 'dog', not a whole number"),
    ],
)
def test_a_wrong_cell_is_named_by_its_line(tmp_path, column, value, message):
    table = rows()
    table[7][column] = value
    refuse(tmp_path, table, message)


@pytest.mark.parametrize("offset", [1, -1])
def test_labels_that_are_all_shifted_are_said_to_be(tmp_path, offset):
    table = rows()
    for row in table:
        row["y"] += offset
    refuse(tmp_path, table, f"labels differ by a constant {offset} ")


def test_absent_images_are_counted(tmp_path):
    refuse(tmp_path, rows()[2:], f"lacks 2 of the data set's 24 images, such as {PATHS[0]}")


def test_a_short_row_is_named_by_its_line(tmp_path):
    path = write(tmp_path, rows())
    path.write_text(path.read_text() + "24,train\n")
    with refused(DataError, "line 26: the data set has no image ''"):
        read(path)


@pytest.mark.parametrize(
    ("splits", "name", "message"),
    [
        (
            AC_P_S,
            "cs-a-p",
            "line 2: art_painting is in split train but scenario cs-a-p has it as val domain",
        ),
        (
            ACS_P,
            "ac-s-p",
            "line 20: sketch is in split train but scenario ac-s-p has it as val domain",
        ),
        (
            AC_P_S,
            "acp-s",
            "line 14: photo is in split val but scenario pac-s has it as train domain",
        ),
        (AC_P_S | {"cartoon": "test"}, "ac-p-s", "line 8: cartoon is in split test"),
    ],
)
def test_a_file_of_another_scenario_says_where(tmp_path, splits, name, message):
    refuse(tmp_path, rows(splits), message, name=name)


def test_without_a_scenario_that_of_the_file_is_meant(tmp_path):
    path = write(tmp_path, rows())
    expected = read(path)
    splits = read_split_csv(path, None, Listed())
    assert {k: v.tolist() for k, v in splits.items()} == {
        k: v.tolist() for k, v in expected.items()
    }
    with refused(DataError, "no scenario"):
        read_split_csv(write(tmp_path, rows(AC_P_S | {"cartoon": "test"})), None, Listed())


def test_a_held_out_image_among_the_training_images_is_refused(tmp_path):
    table = rows()
    table[20]["split"] = "id_val"
    refuse(tmp_path, table, "line 22: sketch is in split id_val .* as test domain")


def test_a_file_without_training_images_is_refused(tmp_path):
    table = rows()
    for row in table:
        row["split"] = "id_val" if row["split"] == "train" else row["split"]
    refuse(tmp_path, table, "training split has no images")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00PK", b'split,domain,path\n"train,\x00'])
def test_what_is_no_split_file_is_refused(tmp_path, content):
    path = tmp_path / "splits.csv"
    path.write_bytes(content)
    with refused(DataError, "splits.csv"):
        read(path)


def test_a_missing_file_is_refused(tmp_path):
    with refused(DataError, "absent.csv: No such file"):
        read(tmp_path / "absent.csv")


PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}


@pytest.mark.parametrize(
    ("name", "train", "id_val", "id_test", "val", "test"),
    [
        ("ac-p-s", {"art_painting": 1853, "cartoon": 2125}, 201, 213, 1670, 3929),
        ("acs-p", {"art_painting": 1852, "cartoon": 2122, "sketch": 3559}, 378, 410, None, 1670),
    ],
)
def test_a_file_of_the_size_of_pacs(tmp_path, name, train, id_val, id_test, val, test):
    role = scenario(name)
    paths, cells = [], []
    held_out = ["id_val"] * id_val + ["id_test"] * id_test
    for domain, size in PACS.items():
        for i in range(size):
            key = "val" if domain == role.val else "test"
            if domain in train:
                key = "train" if i < train[domain] else held_out.pop()
            paths.append(f"{domain}/dog/pic_{i:04d}.jpg")
            cells.append({"split": key, "domain": domain, "path": paths[-1]})
    assert not held_out
    domains = np.repeat(np.arange(4), list(PACS.values()))
    path = write(tmp_path, cells, ("split", "domain", "path"))
    splits = read_split_csv(path, role, Listed(paths, domains, np.zeros(9991, int)))
    expected = {
        "train": sum(train.values()),
        "id_val": id_val,
        "id_test": id_test,
        "val": val,
        "test": test,
    }
    assert {key: len(index) for key, index in splits.items()} == {
        key: size for key, size in expected.items() if size
    }
    assert len(np.unique(np.concatenate(list(splits.values())))) == 9991
    assert np.bincount(domains[splits["train"]], minlength=4).tolist() == [
        train.get(domain, 0) for domain in DOMAINS
    ]


# ------------------------------------------------------------------------------ scenarios of files


class Pictures:
    title = "PACS"
    domains = ("art_painting", "photo", "sketch", "cartoon")
    letters: ClassVar = LETTERS
    official: ClassVar = {}


ROLES_OF = {
    "cs-a-p": {"cartoon": "train", "sketch": "train", "art_painting": "val", "photo": "test"},
    "ac-s-p": {"cartoon": "train", "art_painting": "train", "sketch": "val", "photo": "test"},
    "acs-p": {"cartoon": "train", "art_painting": "train", "sketch": "train", "photo": "test"},
}


def write_roles(folder, name, roles, more=()):
    cells = [{"split": split, "domain": d, "path": f"{d}/x"} for d, split in roles.items()]
    cells += [{"split": "id_val", "domain": "cartoon", "path": "cartoon/y"}, *more]
    return write(folder, cells, ("split", "domain", "path")).rename(folder / name)


@pytest.mark.parametrize("name", ROLES_OF)
def test_a_split_file_tells_its_scenario(tmp_path, name):
    path = write_roles(tmp_path, "any.csv", ROLES_OF[name])
    protocol, other = ("ltdo", "lodo") if name.count("-") == 2 else ("lodo", "ltdo")
    assert scenarios_with_files(path, protocol, Pictures) == [(scenario(name), path)]
    assert scenarios_with_files(path, protocol, Pictures, name) == [(scenario(name), path)]
    with refused(SettingsError, f"--protocol {protocol} --scenario {name}"):
        scenarios_with_files(path, other, Pictures)


def test_a_folder_holds_a_file_for_each_scenario(tmp_path):
    files = {name: write_roles(tmp_path, f"{name}.csv", r) for name, r in ROLES_OF.items()}
    write_roles(tmp_path, "metadata.csv", ROLES_OF["cs-a-p"])  # a copy

    def found(*arguments):
        return {s.name: file for s, file in scenarios_with_files(tmp_path, *arguments)}

    assert found("ltdo", Pictures) == {"cs-a-p": files["cs-a-p"]}  # ac-s-p is no default scenario
    assert found("lodo", Pictures) == {"acs-p": files["acs-p"]}
    both = found("ltdo", Pictures, "ac-s-p,cs-a-p")
    assert list(both.items()) == [(name, files[name]) for name in ("ac-s-p", "cs-a-p")]
    files["cs-a-p"].unlink()
    (tmp_path / "metadata.csv").unlink()
    assert found("ltdo", Pictures) == {"ac-s-p": files["ac-s-p"]}
    with refused(SettingsError, "cs-a-p"):
        found("ltdo", Pictures, "cs-a-p")


def test_files_that_fit_no_scenario_or_twice_the_same_are_refused(tmp_path):
    write_roles(tmp_path, "a.csv", ROLES_OF["cs-a-p"])
    write_roles(tmp_path, "b.csv", dict(reversed(ROLES_OF["cs-a-p"].items())))
    with refused(DataError, "b.csv and", "a.csv"):
        scenarios_with_files(tmp_path, "ltdo", Pictures)
    mixed = [{"split": "test", "domain": "cartoon", "path": "cartoon/z"}]
    path = write_roles(tmp_path, "c.csv", ROLES_OF["cs-a-p"], mixed)
    with refused(DataError, "no scenario"):
        scenarios_with_files(path, "ltdo", Pictures)
    (tmp_path / "empty").mkdir()
    with refused(SettingsError, "nothing"):
        scenarios_with_files(tmp_path / "empty", "ltdo", Pictures)
