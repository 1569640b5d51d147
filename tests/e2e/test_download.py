"""End-to-end tests of ``feddg-bench data download``, from servers on loopback."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from feddg_bench.common.errors import RunInterruptedError
from feddg_bench.config.keys import file_digest
from feddg_bench.data.fetch import hub, obtain, transfer
from feddg_bench.data.fetch.mirrors import Download
from feddg_bench.data.fetch.style_networks import WEIGHTS
from feddg_datasets.handwritten import Handwritten
from feddg_datasets.officehome import OfficeHome
from feddg_datasets.pacs import PACS
from feddg_datasets.rmnist import RotatedMNIST
from feddg_datasets.terraincognita import TerraIncognita
from feddg_methods.shared.style_transfer import build_style_backend
from feddg_methods.shared.vgg import ARCHITECTURES, LAYERS
from tests.fabricate import fabricate
from tests.loopback import serving

HERE = Path(__file__).parents[1]
COMMIT = "9" * 40
"""Commit of the imitated repositories."""
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]


@pytest.fixture
def feddg(feddg: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return ``feddg-bench data download`` without waiting times: status, output, messages."""
    for name in ("XDG_DATA_HOME", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "WAITS", (0.0, 0.0))

    def run(*arguments: object, command: str = "download") -> Outcome:
        return feddg("data", command, *arguments)

    return run


@pytest.fixture
def site() -> Iterator[Any]:
    with serving() as site:
        yield site


def refused(outcome: Outcome, *words: str) -> None:
    code, _, err = outcome
    assert code == 2
    assert err.startswith("feddg-bench: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err


def settings_of(tmp_path: Path) -> str:
    return (tmp_path / "home/.config/feddg-bench/settings.yaml").read_text()


@pytest.fixture
def digits(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """MNIST's four files with made-up digits, served and offered at ``/mnist`` of the site."""
    made = fabricate("rmnist", tmp_path / "made") / "mnist"
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    site.files.update({f"/mnist/{name}": content for name, content in files.items()})
    offers = tuple(
        Download(name, (f"{site.url}/mnist",), checksum=f"sha256:{_sha256(content)}")
        for name, content in sorted(files.items())
    )
    promise(monkeypatch, RotatedMNIST, downloads=offers, counts={})
    return files


def promise(monkeypatch: pytest.MonkeyPatch, dataset: type, **values: Any) -> None:
    """Replace a data set's promises during a test."""
    for name, value in values.items():
        monkeypatch.setattr(dataset, name, value)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class TestFiles:
    def test_fetched_checked_and_noted(
        self, feddg: Run, digits: dict[str, bytes], tmp_path: Path
    ) -> None:
        code, out, err = feddg("rmnist")
        folder = tmp_path / "home/.local/share/feddg-bench/rmnist"
        lines = out.splitlines()
        assert (code, err) == (0, "")
        assert lines[0] == "RotatedMNIST, about 12 MB; licence: CC BY-SA 3.0 (MNIST)"
        assert lines[1].startswith("source: https://ossci-datasets")
        assert lines[2] == f"to: {folder}"
        assert "train-labels-idx1-ubyte.gz: " in out
        assert "checksum as published" in out
        assert f"RotatedMNIST in {folder}: 600 images" in out
        assert any(line.startswith("clean: ") for line in lines)
        assert settings_of(tmp_path) == f"data_roots:\n  rmnist: {folder}\n"
        assert {p.name: p.read_bytes() for p in folder.glob("*.gz")} == digits
        assert sorted(p.name for p in folder.iterdir()) == sorted([*digits, "download.json"])
        receipt = json.loads((folder / "download.json").read_text())
        assert receipt["licence"] == RotatedMNIST.licence
        entry = receipt["files"]["train-images-idx3-ubyte.gz"]
        assert entry["checksum"] == f"sha256:{_sha256(digits['train-images-idx3-ubyte.gz'])}"
        assert entry["url"].endswith("/mnist/train-images-idx3-ubyte.gz")
        assert feddg("rmnist", command="check")[0] == 0

    @pytest.mark.usefixtures("digits")
    def test_a_second_time_nothing_is_fetched(self, feddg: Run, site: Any, tmp_path: Path) -> None:
        target = tmp_path / "elsewhere"
        feddg("rmnist", "--to", target)
        before = len(site.requests)
        code, out, _ = feddg("rmnist", "--to", target)
        assert code == 0
        assert out.count("was here already") == 4
        (target / "t10k-labels-idx1-ubyte.gz").unlink()
        feddg("rmnist", "--to", target)
        (target / "t10k-labels-idx1-ubyte.gz").write_bytes(b"spoilt since")
        assert feddg("rmnist", "--to", target)[0] == 0
        assert before == 4
        assert site.requests[4:] == [("/mnist/t10k-labels-idx1-ubyte.gz", None)] * 2

    @pytest.mark.usefixtures("digits")
    def test_the_data_folder_of_the_environment(
        self, feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDDG_DATA", str(tmp_path / "data"))
        assert feddg("rmnist")[0] == 0
        assert (tmp_path / "data/rmnist/train-images-idx3-ubyte.gz").exists()
        monkeypatch.setenv("FEDDG_CONFIG", os.devnull)
        assert feddg("rmnist", command="check")[0] == 0

    @pytest.mark.usefixtures("digits")
    def test_all_fail(self, feddg: Run, site: Any, tmp_path: Path) -> None:
        del site.files["/mnist/train-images-idx3-ubyte.gz"]
        outcome = feddg("rmnist", "--to", "x")
        refused(
            outcome,
            "no mirror gave train-images-idx3-ubyte.gz",
            "/mnist/train-images-idx3-ubyte.gz: answers 404 Not Found",
            "by hand: https://ossci-datasets.s3.amazonaws.com/mnist",
        )
        assert Path("x/t10k-labels-idx1-ubyte.gz").exists()  # complete files stay
        assert not (tmp_path / "home/.config").exists()

    def test_nothing_of_the_user_is_overwritten(
        self, feddg: Run, digits: dict[str, bytes], site: Any, tmp_path: Path
    ) -> None:
        mine = tmp_path / "x" / "train-images-idx3-ubyte.gz"
        mine.parent.mkdir()
        mine.write_bytes(b"mine")
        refused(feddg("rmnist", "--to", "x"), f"{mine} exists", "move it away")
        assert mine.read_bytes() == b"mine"
        mine.write_bytes(digits[mine.name])  # a file from the user, which is accepted
        assert feddg("rmnist", "--to", "x")[0] == 0
        assert site.ranges("/mnist/train-images-idx3-ubyte.gz") == []

    @pytest.mark.usefixtures("digits")
    def test_bad_input(self, feddg: Run, tmp_path: Path) -> None:
        refused(feddg("rmnits"), "did you mean 'rmnist'")
        refused(feddg("rmnist", "--mirror", "ftp://a"), "cannot fetch from 'ftp://a'")
        (tmp_path / "file").write_text("")
        refused(feddg("rmnist", "--to", "file"), "is no folder", "--to")
        (tmp_path / "x").mkdir()
        (tmp_path / "x/download.json").write_text("[]")
        refused(feddg("rmnist", "--to", "x"), "download.json was not written by a download")

    def test_the_real_mnist(self, site: Any, test_data: Path, tmp_path: Path) -> None:
        """The declared checksums are those of the real files, however they are compressed."""
        for path in (test_data / "mnist").glob("*.gz"):
            site.files[f"/{path.name}"] = path.read_bytes()
        obtain.obtain(RotatedMNIST, tmp_path / "x", [site.url])
        assert len(RotatedMNIST(tmp_path / "x").records().paths) == 70_000  # counts are checked

    def test_tables_are_checked_by_their_images(
        self, feddg: Run, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Handwritten: UCI's tables may have other ends of lines, but no other digits."""
        made = fabricate("handwritten", tmp_path / "made") / "handwritten"
        site.files.update({f"/{path.name}": path.read_bytes() for path in made.iterdir()})
        offers = tuple(
            replace(
                offer,
                mirrors=(site.url,),
                checksum=_checksum(offer, made / offer.name),
                unzipped=offer.unzipped and len(gzip.decompress((made / offer.name).read_bytes())),
            )
            for offer in Handwritten.downloads
        )
        promise(monkeypatch, Handwritten, downloads=offers, counts={}, duplicates=0)
        text = site.files["/semeion.data"]
        site.files["/semeion.data"] = text.replace(b"\n", b" \r\n")
        code, out, err = feddg("handwritten", "--to", "x")
        assert (code, err) == (0, "")
        assert out.count("its images are the right ones") == 4
        assert "1,300 images" in out
        Path("x/semeion.data").unlink()
        site.files["/semeion.data"] = text.replace(b"1", b"0", 1)
        refused(feddg("handwritten", "--to", "x"), "no mirror gave semeion.data", "sha256")
        site.files["/semeion.data"] = b"<html>moved</html>"
        refused(feddg("handwritten", "--to", "x"), "gives a wrong file: it cannot be decoded")


def _checksum(offer: Download, path: Path) -> str:
    """Return the checksum that a download of this file must have."""
    if offer.content is None:
        return f"sha256:{_sha256(gzip.decompress(path.read_bytes()))}"
    return f"sha256:{_sha256(offer.content(path))}"


def tar_of(folder: Path, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder / name, name)
    return buffer.getvalue()


class TestArchives:
    ANNOTATIONS, IMAGES = "eccv_18_annotation_files", "eccv_18_all_images_sm"
    UNPACK: ClassVar = {
        "eccv_18_annotations.tar.gz": ANNOTATIONS,
        "eccv_18_all_images_sm.tar.gz": IMAGES,
    }

    @pytest.fixture
    def offered(self, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """TerraIncognita's archives with made-up images, offered at the site."""
        made = fabricate("terraincognita", tmp_path / "made") / "terra_incognita"
        site.files["/eccv_18_annotations.tar.gz"] = tar_of(made, self.ANNOTATIONS)
        site.files["/eccv_18_all_images_sm.tar.gz"] = tar_of(made, self.IMAGES)
        offers = tuple(
            Download(name, (site.url,), f"sha256:{_sha256(site.files['/' + name])}", unpack=inside)
            for name, inside in self.UNPACK.items()
        )
        # Four of the copies: in each place, one image has two labels.
        promise(monkeypatch, TerraIncognita, downloads=offers, duplicates=4)

    @pytest.mark.usefixtures("offered")
    def test_unpacked_and_remembered(self, feddg: Run, site: Any, tmp_path: Path) -> None:
        code, out, _ = feddg("terraincognita", "--to", "x")
        assert code == 0
        assert out.count("checksum as published") == 2
        assert "220 files unpacked" in out
        assert "TerraIncognita in " in out
        names = sorted(path.name for path in Path("x").iterdir())
        assert names == ["download.json", self.IMAGES, self.ANNOTATIONS]
        assert feddg("terraincognita", "--to", "x")[1].count("was here already") == 2
        assert len(site.requests) == 2
        assert settings_of(tmp_path) == f"data_roots:\n  terraincognita: {tmp_path / 'x'}\n"

    @pytest.mark.usefixtures("offered")
    def test_a_stopped_unpacking_is_done_again_without_fetching(
        self, feddg: Run, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(*_: object) -> int:
            raise RunInterruptedError(signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(obtain, "unpack_archive", stop)
            assert feddg("terraincognita", "--to", "x")[0] == 143
        assert feddg("terraincognita", "--to", "x")[0] == 0
        assert [path for path, _ in site.requests] == [
            "/eccv_18_annotations.tar.gz",
            "/eccv_18_all_images_sm.tar.gz",
        ]

    def offer(self, site: Any, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
        """Publish another annotations archive."""
        name = "eccv_18_annotations.tar.gz"
        site.files[f"/{name}"] = content
        checksum = f"sha256:{_sha256(content)}"
        offer = Download(name, (site.url,), checksum, unpack=self.ANNOTATIONS)
        promise(monkeypatch, TerraIncognita, downloads=(offer,))

    def test_an_evil_archive(
        self, feddg: Run, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            archive.addfile(tarfile.TarInfo("../../../evil"))
        self.offer(site, monkeypatch, buffer.getvalue())
        refused(feddg("terraincognita", "--to", "x"), "evil", "outside", "by hand: ")
        assert not list(tmp_path.rglob("evil"))

    def test_another_archive(
        self, feddg: Run, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = fabricate("terraincognita", tmp_path / "made") / "terra_incognita"
        self.offer(site, monkeypatch, tar_of(made, self.IMAGES))
        refused(feddg("terraincognita", "--to", "x"), f"holds no folder {self.ANNOTATIONS}")


class TestLicences:
    @pytest.mark.parametrize("name", ["pacs", "officehome"])
    def test_research_only(self, feddg: Run, name: str) -> None:
        outcome = feddg(name)
        refused(outcome, "for research only", "http", "--accept-licence")
        assert outcome[1] == ""

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("femnist", "worksheets.codalab.org"),
            ("minidomainnet", "ai.bu.edu"),
            ("domainnet", "ai.bu.edu"),
            ("vlcs", "DomainBed"),
            ("office31", "jhoffman/domainadapt"),
            ("officecaltech10", "jhoffman/domainadapt"),
            ("digits5", "non-commercial"),
            ("digitsdg", "non-commercial"),
            ("digits4", "comes with scikit-learn"),
            ("folder", "folder of yours"),
        ],
    )
    def test_what_is_not_offered(self, feddg: Run, name: str, words: str) -> None:
        outcome = feddg(name, "--accept-licence")
        refused(outcome, "is not downloaded: ", words)
        assert outcome[1] == ""


def parquet(
    rows: list[tuple[Any, str, int]], classes: tuple[str, ...] | list[str], **features: object
) -> bytes:
    """Return a table in the format of Hugging Face's `datasets`."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    about = {
        "image": {"_type": "Image"},
        "domain": {"dtype": "string", "_type": "Value"},
        "label": {"names": list(classes), "_type": "ClassLabel"},
        **features,
    }
    images, domains, labels = zip(*rows, strict=True)
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table(
        {
            "image": pyarrow.array(list(images), kind),
            "domain": pyarrow.array(list(domains)),
            "label": pyarrow.array(list(labels), pyarrow.int64()),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": about}})})
    buffer = io.BytesIO()
    write_table(table, buffer)
    return buffer.getvalue()


def picture(seed: int, form: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


class TestHub:
    CLASSES = tuple(reversed(PACS.classes))
    """An order other than the data set's: labels must be understood by name."""

    @pytest.fixture(autouse=True)
    def here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("huggingface_hub")
        pytest.importorskip("pyarrow")
        counts: Mapping[str, tuple[int, ...]] = dict.fromkeys(PACS.domains, (2,) * 7)
        promise(monkeypatch, PACS, counts=counts, signatures=None)

    @staticmethod
    def rows() -> list[tuple[Any, str, int]]:
        """Two images of each class and domain; sketches are PNG files with the JPEG ending."""
        return [
            (
                {
                    "bytes": picture(
                        100 * d + 2 * label + i, "PNG" if domain == "sketch" else "JPEG"
                    ),
                    "path": None if domain == "photo" else f"pic_{i}.jpg",
                },
                domain,
                label,
            )
            for d, domain in enumerate(PACS.domains)
            for label in range(7)
            for i in range(2)
        ]

    @staticmethod
    def offer(site: Any, repository: str, branch: str, tables: list[bytes]) -> None:
        """Serve the required routes of Hugging Face; files are redirected."""
        revision = COMMIT
        said = {"id": repository, "sha": revision}
        site.files[f"/api/datasets/{repository}/revision/{branch}"] = json.dumps(said).encode()
        listed = [{"type": "file", "oid": "1" * 40, "size": 9, "path": "data/README.md"}]
        for number, table in enumerate(tables):
            name = f"data/train-{number:05d}-of-{len(tables):05d}.parquet"
            lfs = {"oid": _sha256(table), "size": len(table), "pointerSize": 134}
            listed.append({"type": "file", "oid": "2" * 40, "size": len(table), "path": name,
                           "lfs": lfs})  # fmt: skip
            site.files[f"/cdn/{lfs['oid']}"] = table
            site.tricks[f"/datasets/{repository}/resolve/{revision}/{name}"] = [
                lambda handler, _, oid=lfs["oid"]: handler.status(302, Location=f"/cdn/{oid}")
            ]
            site.stuck.add(f"/datasets/{repository}/resolve/{revision}/{name}")
            site.heads[f"/datasets/{repository}/resolve/{revision}/{name}"] = {
                "X_Repo_Commit": revision,
                "X_Linked_Etag": f'"{lfs["oid"]}"',
                "X_Linked_Size": str(len(table)),
            }
        site.files[f"/api/datasets/{repository}/tree/{revision}/data"] = json.dumps(listed).encode()

    def pacs(self, site: Any, *tables: bytes) -> None:
        offer = PACS.downloads[0]
        self.offer(site, offer.repository, offer.revision, list(tables))

    def test_images_come_into_folders(
        self, feddg: Run, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = self.rows()
        self.pacs(site, parquet(rows[:30], self.CLASSES), parquet(rows[30:], self.CLASSES))
        oid = next(path for path in site.files if path.startswith("/cdn/"))
        site.tricks[oid] = [lambda handler, body: handler.serve(body, cut=3000)]
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        code, out, _ = feddg("pacs", "--accept-licence", "--to", "x")
        assert code == 0
        assert "licence: none stated; research use" in out
        assert "flwrlabs/pacs: " in out
        assert "in 2 tables" in out
        assert "56 images" in out
        assert "clean: nothing differs; results compare" in out
        assert "not read" not in out  # the receipt is not counted as a stray file
        assert len(site.ranges(oid)) == 2  # the transfer broke off and was resumed
        dataset = PACS(tmp_path / "x")
        assert len(dataset.records().paths) == 56
        names = {path.rpartition("/")[2] for path in dataset.records().paths}
        assert names == {"pic_0.jpg", "pic_1.jpg", "pic_0.png", "pic_1.png"} | {
            f"row{row:06d}.jpg" for row in range(14, 28)
        }
        for image, domain, label in rows[:14]:
            path = tmp_path / "x" / domain / self.CLASSES[label] / image["path"]
            assert path.read_bytes() == image["bytes"]
        assert sorted(p.name for p in Path("x").iterdir()) == sorted(
            [*PACS.domains, "download.json"]
        )
        before = len(site.requests)
        assert "was here already" in feddg("pacs", "--accept-licence", "--to", "x")[1]
        assert len(site.requests) == before
        receipt = json.loads(Path("x/download.json").read_text())["files"]["flwrlabs/pacs"]
        assert receipt["revision"] == COMMIT

    def test_a_table_with_other_bytes(self, feddg: Run, site: Any) -> None:
        self.pacs(site, parquet(self.rows(), self.CLASSES))
        (oid,) = (path for path in site.files if path.startswith("/cdn/"))
        good = site.files[oid]
        site.files[oid] = good[:50] + bytes([good[50] ^ 1]) + good[51:]
        run = ("pacs", "--accept-licence", "--to", "x", "--mirror", site.url)
        refused(feddg(*run), "SHA-256", _sha256(good))
        site.files[oid] = good
        assert feddg(*run)[0] == 0

    def test_another_endpoint(self, feddg: Run, site: Any) -> None:
        self.pacs(site, parquet(self.rows(), self.CLASSES))
        mirrors = ("--mirror", f"{site.url}/none", "--mirror", site.url)
        code, _, err = feddg("pacs", "--accept-licence", "--to", "x", *mirrors)
        assert code == 0, err
        outcome = feddg("pacs", "--accept-licence", "--to", "y", *mirrors[:2])
        refused(outcome, "cannot fetch flwrlabs/pacs", "404", "by hand: https://www.eecs")

    def test_names_of_officehome(
        self, feddg: Run, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        promise(monkeypatch, OfficeHome, counts={})
        domains = ("Art", "Clipart", "Product", "Real World")
        rows: list[tuple[Any, str, int]] = [
            ({"bytes": picture(65 * d + label), "path": "00001.jpg"}, domain, label)
            for d, domain in enumerate(domains)
            for label in range(65)
        ]
        offer = OfficeHome.downloads[0]
        table = parquet(rows, [name.replace("_", " ") for name in OfficeHome.classes])
        self.offer(site, offer.repository, offer.revision, [table])
        code, _, _ = feddg("officehome", "--accept-licence", "--to", "x", "--mirror", site.url)
        assert code == 0
        assert Path("x/real_world/Alarm_Clock/00001.jpg").read_bytes() == rows[195][0]["bytes"]

    def test_tables_of_something_else(self, feddg: Run, site: Any) -> None:
        rows, classes = self.rows(), self.CLASSES
        image = {"bytes": picture(0), "path": "../../../evil.jpg"}
        cases: dict[str, bytes] = {
            "other classes": parquet(rows, ["cow", *classes[1:]]),
            "does not say which classes": parquet(rows, classes, label={"_type": "Value"}),
            "hold 1 images of cartoon/dog": parquet(rows[:-1], classes),
            "hold 3 images of art_painting/person": parquet(
                [*rows[:-1], (image, "art_painting", 0)], classes
            ),
            "unknown domain 'clay'": parquet([(image, "clay", 0), *rows[1:]], classes),
            "unknown label 7": parquet([(image, "photo", 7), *rows[1:]], classes),
            "unknown label None": parquet([(image, "photo", None), *rows[1:]], classes),
            "neither JPEG nor PNG": parquet(
                [({"bytes": b"<svg>", "path": "a.svg"}, "photo", 0), *rows[1:]], classes
            ),
            "row 0 is neither": parquet(
                [({"bytes": None, "path": "/etc/passwd"}, "photo", 0), *rows[1:]], classes
            ),
            "cannot read the tables": b"PAR1" + bytes(100) + b"PAR1",
        }
        for number, (words, table) in enumerate(cases.items()):
            self.pacs(site, table)
            outcome = feddg("pacs", "--accept-licence", "--to", number, "--mirror", site.url)
            refused(outcome, words)
            assert [path.name for path in Path(str(number)).iterdir()] == [".download"], words

    def test_a_name_that_leads_elsewhere(self, feddg: Run, site: Any, tmp_path: Path) -> None:
        rows = self.rows()
        for row, name in enumerate(("../../../evil.jpg", "a\\b.jpg", "no.txt", ".hidden.jpg")):
            rows[row][0]["path"] = name
        rows[5][0]["path"] = rows[4][0]["path"] = "Same.jpg"
        self.pacs(site, parquet(rows, self.CLASSES))
        feddg("pacs", "--accept-licence", "--to", "x", "--mirror", site.url)
        found = {p.name for p in (tmp_path / "x/art_painting").rglob("*") if p.is_file()}
        assert found == {
            "evil.jpg", "row000001.jpg", "row000002.jpg", "row000003.jpg", "Same.jpg",
            "row000005.jpg", "pic_0.jpg", "pic_1.jpg",
        }  # fmt: skip

    def test_the_users_images_stay(self, feddg: Run, site: Any, tmp_path: Path) -> None:
        self.pacs(site, parquet(self.rows(), self.CLASSES))
        (tmp_path / "x/photo").mkdir(parents=True)
        outcome = feddg("pacs", "--accept-licence", "--to", "x", "--mirror", site.url)
        refused(outcome, f"{tmp_path / 'x/photo'} exists")
        assert site.requests == []

    def test_without_the_extra(
        self, feddg: Run, monkeypatch: pytest.MonkeyPatch, site: Any
    ) -> None:
        monkeypatch.setattr(hub, "find_spec", lambda _: None)
        outcome = feddg("pacs", "--accept-licence", "--to", "x", "--mirror", site.url)
        refused(outcome, "huggingface_hub and pyarrow", "pip install 'feddg-bench[hub]'")


class Hostile:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def checkpoint(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


class TestWeights:
    """AdaIN's networks, with made-up checkpoints whose tensors have the real names and shapes."""

    ENCODER, DECODER = "20191110-132643_E20.pth", "20191111-092553_E20.pth"
    REAL = WEIGHTS["vgg19_16x"]

    @pytest.fixture
    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)

        def made(channels: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
            tensors = {}
            for name, (width, out) in channels.items():
                side = 1 if name in ("0", "41_aux") else 3
                tensors[f"conv{name}.weight"] = torch.randn(
                    out, width, side, side, generator=generator
                )
                tensors[f"conv{name}.bias"] = torch.randn(out, generator=generator)
            return tensors

        widths = (3, *ARCHITECTURES["vgg19_16x"].widths)
        pairs = dict(zip(LAYERS, pairwise(widths), strict=True))
        return {
            "encoder": made({"0": (3, 3), **pairs, "41_aux": (128, 512)}),
            "decoder": made({name: pair[::-1] for name, pair in pairs.items()}),
        }

    @pytest.fixture
    def files(self, parts: dict[str, Any]) -> dict[str, bytes]:
        return {
            self.ENCODER: checkpoint({"model": parts["encoder"], "epoch": 20}),
            self.DECODER: checkpoint({"epoch": 20, "model": parts["decoder"]}),
        }

    def offer(
        self,
        site: Any,
        monkeypatch: pytest.MonkeyPatch,
        files: Mapping[str, bytes],
        digest: str | None = None,
    ) -> None:
        """Publish checkpoints with matching checksums."""
        site.files.update({f"/{name}": content for name, content in files.items()})
        made = {
            prefix: Download(
                name, (site.url,), f"sha256:{_sha256(files[name])}", size=len(files[name])
            )
            for prefix, name in (("encoder.", self.ENCODER), ("decoder.", self.DECODER))
        }
        offer = replace(self.REAL, parts=made, digest=digest)
        monkeypatch.setitem(WEIGHTS, "vgg19_16x", offer)

    def test_fetched_converted_and_usable(
        self,
        feddg: Run,
        site: Any,
        files: dict[str, bytes],
        parts: dict[str, dict[str, torch.Tensor]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        both = {f"{part}.{key}": t for part, tensors in parts.items() for key, t in tensors.items()}
        wanted = save(both)
        self.offer(site, monkeypatch, files, _sha256(wanted))
        code, out, err = feddg("vgg19_16x")
        folder = tmp_path / "home/.local/share/feddg-bench/weights"
        path = folder / "vgg19_16x_adain.safetensors"
        assert (code, err) == (0, "")
        assert out.splitlines()[0].endswith("; licence: MIT")
        assert f"to: {folder}\n" in out
        assert out.count("checksum right") == 2
        assert out.endswith("use it: hyper.style=vgg19_16x\n")
        assert path.read_bytes() == wanted
        assert sorted(p.name for p in folder.iterdir()) == ["download.json", path.name]
        entry = json.loads((folder / "download.json").read_text())["files"][path.name]
        assert entry["sha256"] == _sha256(wanted)
        assert entry["url"] == [f"{site.url}/{self.ENCODER}", f"{site.url}/{self.DECODER}"]
        build_style_backend("vgg19_16x", weights=str(path))

    def test_a_second_time_nothing_is_fetched(
        self, feddg: Run, site: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.offer(site, monkeypatch, files)
        code, out, _ = feddg("vgg19_16x", "--to", "x")
        path = Path("x/vgg19_16x_adain.safetensors")
        assert (code, out.split()[-1]) == (0, f"hyper.style_weights={path.absolute()}")
        content = path.read_bytes()
        assert "was here already" in feddg("vgg19_16x", "--to", "x")[1]
        assert len(site.requests) == 2
        path.write_bytes(b"spoilt since")
        assert feddg("vgg19_16x", "--to", "x")[0] == 0
        assert path.read_bytes() == content

    def test_a_connection_that_breaks(
        self, feddg: Run, site: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.offer(site, monkeypatch, files)
        site.tricks[f"/{self.DECODER}"] = [
            lambda handler, body: handler.serve(body, cut=1000, ranges=False)
        ]
        site.stuck.add(f"/{self.DECODER}")
        refused(
            feddg("vgg19_16x", "--to", "x"), self.DECODER, "broke off after 1,000 of", "by hand:"
        )
        assert not Path("x/vgg19_16x_adain.safetensors").exists()
        site.tricks.clear()
        assert feddg("vgg19_16x", "--to", "x")[0] == 0
        assert site.ranges(f"/{self.ENCODER}") == [None]  # complete files are not fetched again
        assert site.ranges(f"/{self.DECODER}")[-1] == "bytes=1000-"

    @pytest.mark.parametrize("other", [lambda data: data[:-1] + b"?", lambda data: data + b"more"])
    def test_other_bytes(
        self,
        feddg: Run,
        site: Any,
        files: dict[str, bytes],
        monkeypatch: pytest.MonkeyPatch,
        other: Callable[[bytes], bytes],
    ) -> None:
        self.offer(site, monkeypatch, files)
        site.files[f"/{self.DECODER}"] = other(files[self.DECODER])
        refused(feddg("vgg19_16x", "--to", "x"), f"no mirror gave {self.DECODER}", "instead of")
        assert not Path("x/vgg19_16x_adain.safetensors").exists()
        assert not Path("x/.download", self.DECODER).exists()

    def test_a_hostile_checkpoint_runs_nothing(
        self,
        feddg: Run,
        site: Any,
        files: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        made = tmp_path / "made"
        evil = checkpoint({"model": {"conv41.weight": Hostile(made)}, "epoch": 20})
        self.offer(site, monkeypatch, {**files, self.DECODER: evil})
        refused(feddg("vgg19_16x", "--to", "x"), self.DECODER, "never loaded")
        assert not made.exists()
        assert not Path("x/vgg19_16x_adain.safetensors").exists()

    @pytest.mark.parametrize("content", [{"epoch": 20}, {"model": 3}, [1, 2]])
    def test_a_checkpoint_without_tensors(
        self,
        feddg: Run,
        site: Any,
        files: dict[str, bytes],
        monkeypatch: pytest.MonkeyPatch,
        content: Any,
    ) -> None:
        self.offer(site, monkeypatch, {**files, self.DECODER: checkpoint(content)})
        refused(feddg("vgg19_16x", "--to", "x"), self.DECODER, "not a mapping")

    def test_other_bytes_after_conversion(
        self, feddg: Run, site: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.offer(site, monkeypatch, files, digest="0" * 64)
        refused(feddg("vgg19_16x", "--to", "x"), "vgg19_16x_adain.safetensors", "safetensors")
        assert not Path("x/vgg19_16x_adain.safetensors").exists()

    def test_bad_input(
        self, feddg: Run, site: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.offer(site, monkeypatch, files)
        Path("x").mkdir()
        Path("x/vgg19_16x_adain.safetensors").write_bytes(b"mine")
        refused(feddg("vgg19_16x", "--to", "x"), "exists", "move it away")
        assert Path("x/vgg19_16x_adain.safetensors").read_bytes() == b"mine"
        refused(feddg("vgg19_x16"), "did you mean 'vgg19_16x'")
        assert site.requests == []

    def test_the_real_file(self, test_data: Path) -> None:
        """The pinned digest matches the file that records name."""
        path = test_data / "weights" / self.REAL.file
        assert file_digest(path) == self.REAL.digest
