"""A sheet of training examples as the network gets them, with their labels, as a PNG."""

import io
from collections.abc import Sequence

import numpy as np

IMAGES = 24
_COLUMNS = 6
_CELL = 128  # pixels
_LINE = 16  # pixels, of the label below each image
_GAP = 8
_CLIPPED = 0.5  # percent of the pixels at either end, so that a few bright ones do not darken all others


def draw(images: np.ndarray, labels: np.ndarray, class_names: Sequence[str] = ()) -> bytes:
    """Draws a sheet of images [n, height, width, 1, 3 or 4] with labels [n, ...]; returns a PNG.

    Values other than 0..255 in uint8 are stretched, all by the same factor, so that brightness can be compared.
    """
    from PIL import Image, ImageDraw, ImageFont

    pixels, font = _as_bytes(images), ImageFont.load_default(_LINE - 4)
    height, width = (round(side * _CELL / max(images.shape[1:3])) for side in images.shape[1:3])
    rows, across, down = -(-len(images) // _COLUMNS), _CELL + _GAP, height + _LINE + _GAP
    sheet = Image.new("RGB", (_COLUMNS * across + _GAP, rows * down + _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        row, column = divmod(i, _COLUMNS)
        x, y = _GAP + column * across, _GAP + row * down
        picture = Image.fromarray(image[:, :, 0] if image.shape[-1] == 1 else image).convert("RGB")
        is_enlarged = max(images.shape[1:3]) < _CELL  # then pixels are to be seen
        how = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.LANCZOS
        sheet.paste(picture.resize((max(width, 1), max(height, 1)), how), (x + (_CELL - width) // 2, y))
        text = caption(label, class_names)
        while text and pen.textlength(text, font) > _CELL:
            text = text.removesuffix("…")[:-1] + "…"
        pen.text((x + _CELL // 2, y + height + 1), text, "black", font, anchor="ma")
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _as_bytes(images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8:
        return images
    images = np.nan_to_num(images.astype(np.float32))
    low, high = np.percentile(images, [_CLIPPED, 100 - _CLIPPED])
    return np.uint8(np.clip((images - low) / ((high - low) or 1), 0, 1) * 255 + 0.5)


def caption(label: np.ndarray, class_names: Sequence[str]) -> str:
    """Returns a label as text: a class's name, the shares of two classes, the first numbers, or nothing for more."""
    label = np.asarray(label)
    if class_names and label.ndim == 0:
        return " ".join(class_names[label].split()) if 0 <= label < len(class_names) else str(label)
    if class_names and label.shape == (len(class_names),):
        largest = [i for i in np.argsort(-label, kind="stable")[:2] if label[i] > 0]
        return " ".join(class_names[i] if label[i] == 1 else f"{class_names[i]} {label[i]:.2f}" for i in largest)
    if label.ndim > 1 or not np.issubdtype(label.dtype, np.number):
        return ""
    return ", ".join(f"{number:.4g}" for number in label.reshape(-1)[:3])
