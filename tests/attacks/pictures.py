"""Images and folders that start programs, never end, or disguise their type."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from tests.attacks.lab import Lab, Outcome, call

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
(%pipe%touch /tmp/owned) (w) file
showpage
%%EOF
"""
RUN = (
    *("--dataset", "folder", "--protocol", "ltdo", "--scenario", "ab-c-d", "--workers", 1),
    *("--clients", 4, "--per-round", 2, "--rounds", 1),
)
SMALL = ("data.image_size=8", "backbone.name=small_cnn", "backbone.pretrained=false")


def pictures(folder: Path, *, domains: int = 4, images: int = 12) -> Path:
    """Write a folder of domains with two classes each."""
    rng = np.random.default_rng(0)
    for domain in "abcdefgh"[:domains]:
        for label in ("x", "y"):
            where = folder / domain / label
            where.mkdir(parents=True)
            for number in range(images):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(where / f"{number:02}.png")
    return folder


def few(lab: Lab) -> tuple[object, ...]:
    """Return the arguments of a run on a few pictures, which are decoded quickly."""
    folder = lab.root / "pictures"
    if not folder.exists():
        pictures(folder)
    return (*RUN, "--data-root", folder, *SMALL)


def both(lab: Lab, attack: str, folder: Path, *, may_pass: bool = False) -> None:
    """Check and train on a folder: each command refuses it in one sentence, or finishes."""
    checked = lab.apart("data", "check", "folder", "--data-root", folder)
    fine = checked.code in (0, 1, 2) and "Traceback" not in checked.err
    lab.add(f"data check: {attack}", tell(checked), fine)
    out = lab.folder()
    ran = lab.apart("run", *RUN, "--data-root", folder, "--results", out, *SMALL)
    lab.add(f"run: {attack}", tell(ran), ran.refused or (may_pass and ran.code == 0))


def tell(outcome: Outcome) -> str:
    """Return a description of a command's end."""
    return f"exit {outcome.code}: {outcome.sentence}"


def formats(lab: Lab) -> None:
    """A file named .png is read only if it has one of the photo formats."""
    folder = pictures(lab.folder())
    (folder / "b/x/zz.png").write_bytes(EPS)
    both(lab, "an EPS named .png", folder)
    lab.add(
        "an EPS named .png: ghostscript",
        "started" if started(lab) else "not started",
        not started(lab),
    )
    folder = pictures(lab.folder())
    (folder / "b/x/zz.png").write_bytes(b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n")
    both(lab, "a PDF named .png", folder)
    folder = pictures(lab.folder())
    (folder / "b/x/zz.png").write_text("<html>not found</html>")
    both(lab, "a page named .png", folder)
    folder = pictures(lab.folder())
    Image.new("1", (17_000, 17_000)).save(folder / "b/x/zz.png")
    both(lab, "a picture of 289 megapixels", folder)
    depth(lab)


def started(lab: Lab) -> bool:
    """Return whether a trap on the PATH was started."""
    return (lab.root / "started").exists()


def depth(lab: Lab) -> None:
    """16-bit images become 8-bit images of the same brightness, or are refused."""
    from feddg_bench.data.dataset import read_image

    folder = lab.folder()
    ramp = np.linspace(0, 65_535, 32 * 32).reshape(32, 32)
    kinds = {
        "16 bits": Image.fromarray(ramp.astype(np.uint16)),
        "32-bit integers": Image.fromarray(ramp.astype(np.int32)),
        "floats": Image.fromarray((ramp / 65_535).astype(np.float32)),
    }
    for name, image in kinds.items():
        path = folder / ("z.png" if name == "16 bits" else "z.tif")
        image.save(path)
        pixels, failed = call(read_image, path, 32)
        mean = -1.0 if pixels is None else float(pixels.mean())
        right = failed.startswith("refused") if failed else abs(mean - 127.5) < 2
        lab.add(f"a grey picture of {name}", failed or f"mean {mean:.1f} of 127.5", right)


def devices(lab: Lab) -> None:
    """Endless files, dangling links and circular links."""
    folder = pictures(lab.folder())
    os.mkfifo(folder / "b/x/zz.png")
    both(lab, "a FIFO among the images", folder, may_pass=True)
    folder = pictures(lab.folder())
    (folder / "b/x/zz.png").symlink_to("/dev/zero")
    both(lab, "a link to /dev/zero among the images", folder, may_pass=True)
    folder = pictures(lab.folder())
    (folder / "b/x/zz.png").symlink_to(folder / "gone.png")
    both(lab, "a link that goes nowhere", folder, may_pass=True)
    folder = pictures(lab.folder())
    (folder / "b/x/loop.png").symlink_to("loop.png")
    both(lab, "a link to itself", folder, may_pass=True)
    folder = pictures(lab.folder())
    (folder / "b/x/up").symlink_to(folder / "b", target_is_directory=True)
    both(lab, "a folder that holds itself", folder, may_pass=True)
    folder = pictures(lab.folder())
    (folder / "b/x/dir.png").mkdir()
    both(lab, "a folder named .png", folder, may_pass=True)
    fifo = lab.folder() / "w.safetensors"
    os.mkfifo(fifo)
    for weights in (fifo, "/dev/zero", "/dev/null", "/"):
        outcome = lab.apart(
            "run", "--scenario", "ip-o-c", "--rounds", 1, "--workers", 1, "--per-round", 1,
            "--results", lab.folder(), f"backbone.weights={weights}", "backbone.pretrained=true",
            "data.image_size=32", "backbone.name=mobilenet_v2",
        )  # fmt: skip
        lab.refused(f"weights from {Path(weights).name or weights}", outcome)
    split = lab.folder() / "split.csv"
    os.mkfifo(split)
    for path in (split, "/dev/zero"):
        outcome = lab.apart("run", "--results", lab.folder(), "--split-csv", path, "--workers", 1)
        lab.refused(f"a split file {Path(path).name}", outcome)


def names(lab: Lab) -> None:
    """Names that are not text, or that contain terminal escapes."""
    folder = pictures(lab.folder())
    Path(os.fsdecode(os.fsencode(folder / "b/x") + b"/\xff\xfe.png")).write_bytes(b"no picture")
    both(lab, "a name that is not UTF-8", folder, may_pass=True)
    folder = pictures(lab.folder())
    name = "\x1b]0;owned\x07\x1b[31mred\nfeddg-bench: error: forged.png"
    (folder / "b/x" / name).write_bytes(b"no picture")
    for attack, arguments in (
        ("data check", ("data", "check", "folder", "--data-root", folder)),
        ("run", ("run", *RUN, "--data-root", folder, "--results", lab.folder(), *SMALL)),
    ):
        outcome = lab.feddg(*arguments)
        raw = [c for c in outcome.out + outcome.err if ord(c) < 32 and c not in "\n\r\t"]
        forged = "\nfeddg-bench: error: forged" in outcome.err + outcome.out
        happened = f"{len(raw)} control characters, {'a' if forged else 'no'} forged line"
        lab.add(
            f"{attack}: a name with escapes and a new line",
            happened,
            not raw and not forged and outcome.code in (1, 2),
        )


def attack(lab: Lab) -> None:
    """Try all pictures."""
    # Forks of this process need not repeat its imports.
    clean = lab.feddg("run", *few(lab), "--results", lab.folder())
    lab.add("pictures as they are", tell(clean), clean.code == 0)
    for part in (formats, devices, names):
        part(lab)
