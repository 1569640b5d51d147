"""``feddg-bench predict``: predictions of a kept model for images."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Where
from feddg_bench.common.errors import DataError
from feddg_bench.common.files import check_writable, write_whole
from feddg_bench.common.terminal import say, terminal, text_table
from feddg_bench.common.titles import counted
from feddg_bench.data.image_folders import is_image, is_system
from feddg_bench.records.sources import FOLDERS


def predict_command(
    key: Annotated[
        str,
        typer.Argument(
            help="First letters of the key of a run with --keep, or a kept model's file."
        ),
    ],
    images: Annotated[
        list[Path],
        typer.Argument(help="Image files, or folders: every image file in them and below."),
    ],
    results: Where = FOLDERS[0],
    which: Annotated[str, typer.Option(help="Kept model: last or best.")] = "last",
    encoder: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights of the encoder of a model on features."),
    ] = None,
    csv_: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write labels and all probabilities there."),
    ] = None,
) -> None:
    """Print the class and its probability for each image.

    Images are resized as those of the data set were. A file that cannot be read is named at the
    end, after the predictions for the others, and the exit status is 2.
    """
    files = list(_files(images))
    if csv_ is not None:
        check_writable(csv_.parent)

    import torch

    from feddg_bench.runs.kept import load_model

    model = load_model(key, results, which, encoder)
    if model.transform is None:
        raise DataError(
            f"the model {key} was trained on images that are not RGB: in Python, give tensors to "
            f"its `predict`"
        )
    read, tensors, faults = [], [], []
    for file in files:
        try:
            tensors.append(model.transform(file))
            read.append(file)
        except DataError as error:
            faults.append(str(error))
    rows: list[list[str]] = []
    if tensors:
        prediction = model.predict(torch.stack(tensors))
        for place, (file, label) in enumerate(zip(read, prediction.labels.tolist(), strict=True)):
            row = [str(file)]
            if prediction.probabilities is None:
                row.append(f"{label:.6g}")
            else:
                shares = prediction.probabilities[place].tolist()
                row += [model.classes[label], *(f"{share:.6f}" for share in (max(shares), *shares))]
            rows.append(row)
    head = ["image", "value"]
    if model.classes:
        head = ["image", "label", "probability", *(f"p({name})" for name in model.classes)]
    if csv_ is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *rows])
        write_whole(csv_, text.getvalue().encode())
        say(f"Wrote {counted(len(rows), 'image')} to {csv_}")
    else:
        shown = [row[:2] + [f"{float(share):.3f}" for share in row[2:3]] for row in rows]
        terminal().print(text_table("", head[:3], shown, right=head[2:3]), highlight=False)
    if faults:
        raise DataError(
            f"could not read {len(faults)} of {counted(len(files), 'image')}: {faults[0]}"
        )


def _files(given: Iterable[Path]) -> Iterator[Path]:
    """Yield image files, those of folders sorted by name.

    Raises:
        DataError: If there is no such file or folder, or a folder holds no image.
    """
    for path in given:
        if path.is_dir():
            images = sorted(
                file
                for file in path.rglob("*")
                if is_image(file)
                and file.is_file()
                and not any(map(is_system, file.relative_to(path).parts))
            )
            if not images:
                raise DataError(f"the folder {path} holds no image file")
            yield from images
        elif path.exists():
            yield path
        else:
            raise DataError(f"there is no image {path}")
