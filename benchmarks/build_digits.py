"""Write `qat/training/data/digits.png`, the bundled data set, from scikit-learn's copy of the UCI digits.

    pip install scikit-learn
    python benchmarks/build_digits.py qat/training/data/digits.png

One tile of 8 x 8 pixels per image, row by row in the set's own order, 60 tiles a row; grey value = 15 * ink (0 to 16).
The labels lie in the PNG's text chunk `Labels`, one digit per image in the same order; `Source`, `Copyright` and
`Description` name where it all comes from. What is written is read back and compared before the script ends.
Only whoever makes the file anew needs scikit-learn; `qat.training.data.datasets` reads the PNG with Pillow alone.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

SIDE, COLUMNS, GREY_PER_INK = 8, 60, 15

DESCRIPTION = (
    "1,797 handwritten digits (the test part of the UCI set, as in scikit-learn's load_digits): tiles of 8 x 8 pixels, "
    "60 a row; grey value = 15 * ink (0 to 16); labels in the text chunk 'Labels'"
)
SOURCE = (
    "E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI Machine Learning Repository, 1998. "
    "https://doi.org/10.24432/C50P49"
)
LICENCE = "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/"


def write_sheet(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write uint8 `images` (N, 8, 8) of values 0 to 16 and their `labels` (N,) of 0 to 9 as one grey PNG."""
    rows = -(-len(images) // COLUMNS)
    tiles = np.zeros((rows * COLUMNS, SIDE, SIDE), np.uint8)
    tiles[: len(images)] = images * GREY_PER_INK
    sheet = tiles.reshape(rows, COLUMNS, SIDE, SIDE).swapaxes(1, 2).reshape(rows * SIDE, COLUMNS * SIDE)
    text = PngImagePlugin.PngInfo()
    text.add_text("Title", "Optical Recognition of Handwritten Digits")
    text.add_text("Description", DESCRIPTION)
    text.add_text("Source", SOURCE)
    text.add_text("Copyright", LICENCE)
    text.add_text("Labels", "".join(map(str, labels.tolist())))
    Image.fromarray(sheet).save(path, optimize=True, pnginfo=text)


def read_sheet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (N, 8, 8), values 0 to 16, and labels (N,) of a sheet that `write_sheet` wrote."""
    with Image.open(path) as sheet:
        sheet.load()
        labels = np.array([int(digit) for digit in sheet.text["Labels"]])
        pixels = np.asarray(sheet)
    rows = pixels.shape[0] // SIDE
    tiles = pixels.reshape(rows, SIDE, COLUMNS, SIDE).swapaxes(1, 2).reshape(-1, SIDE, SIDE)
    return tiles[: len(labels)] // GREY_PER_INK, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the PNG to write")
    path = parser.parse_args().path

    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target
    if not np.array_equal(images, digits.images) or images.max() > 16:
        raise SystemExit("scikit-learn's digits are no longer whole numbers from 0 to 16: the sheet cannot hold them")
    write_sheet(path, images, labels)
    read_images, read_labels = read_sheet(path)
    if not (np.array_equal(read_images, images) and np.array_equal(read_labels, labels)):
        raise SystemExit(f"{path} does not read back as what was written")
    print(f"{path}: {len(images)} digits, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
