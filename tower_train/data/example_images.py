"""A picture of training examples as the network gets them, with their labels, as a PNG."""

import io
from collections.abc import Sequence

import numpy as np

IMAGES = 24
_COLUMNS = 6
_MOST_CLASSES = 4  # of an example
_CELL = 128  # pixels
_LINE = 16  # pixels, of each line of the label below an image
_SIZE = _LINE - 4  # of letters
_GAP = 8
_CLIPPED = 0.5  # percent of the pixels at either end, so that a few bright ones do not darken all others


def draw(images: np.ndarray, labels: np.ndarray, class_names: Sequence[str] = ()) -> bytes:
    """Draws images [n, height, width, 1, 3 or 4] with labels [n, ...]; returns a PNG.

    Values other than 0..255 in uint8 are stretched, all by the same factor, so that brightness can be compared.
    """
    from PIL import Image, ImageDraw, ImageFont

    pixels = as_bytes(images)
    size = images.shape[1:3]
    height, width = (round(side * _CELL / max(size)) for side in size)
    texts = [caption(label, class_names) for label in labels]
    try:
        font = ImageFont.truetype("DejaVuSans.ttf", _SIZE)  # of most Linuxes; Pillow's own writes ASCII and little else
    except OSError:
        font = ImageFont.load_default(_SIZE)
    rows, across = -(-len(images) // _COLUMNS), _CELL + _GAP
    down = height + _LINE * max(map(len, texts)) + _GAP
    canvas = Image.new("RGB", (_COLUMNS * across + _GAP, rows * down + _GAP), "white")
    pen = ImageDraw.Draw(canvas)
    for i, (image, lines) in enumerate(zip(pixels, texts, strict=True)):
        row, column = divmod(i, _COLUMNS)
        x, y = _GAP + column * across, _GAP + row * down
        canvas.paste(thumbnail(image, _CELL).convert("RGB"), (x + (_CELL - width) // 2, y))
        for line, text in enumerate(lines):
            while text and pen.textlength(text, font) > _CELL:
                text = text.removesuffix("…")[:-1] + "…"
            pen.text((x + _CELL // 2, y + height + line * _LINE), text, "black", font, anchor="ma")
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()


def thumbnail(image: np.ndarray, side: int):
    """Returns an image [height, width, 1, 3 or 4] of uint8 for Pillow, its longer side that many pixels."""
    from PIL import Image

    picture = Image.fromarray(image[:, :, 0] if image.shape[-1] == 1 else image)
    scale = side / max(picture.size)
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS  # enlarged pixels are to be seen
    return picture.resize([max(1, round(scale * each)) for each in picture.size], how)


def as_bytes(images: np.ndarray) -> np.ndarray:
    """Returns images in uint8, stretched if they have another dtype."""
    if images.dtype == np.uint8:
        return images
    images = np.nan_to_num(images.astype(np.float32))
    low, high = np.percentile(images, [_CLIPPED, 100 - _CLIPPED])
    return np.uint8(np.clip((images - low) / ((high - low) or 1), 0, 1) * 255 + 0.5)


def caption(label: np.ndarray, class_names: Sequence[str]) -> list[str]:
    """Returns a label as lines: a class's name, the shares of classes, the first numbers, or nothing for more."""
    label = np.asarray(label)
    if class_names and label.ndim == 0:
        return [" ".join(class_names[label].split()) if 0 <= label < len(class_names) else str(label)]
    if label.shape == (len(class_names),):
        label = label.astype(float)  # it may be of booleans
        shares = {class_names[i]: f"{label[i]:.2f}" for i in np.argsort(-label, kind="stable")[:_MOST_CLASSES]}
        return [name if share == "1.00" else f"{share} {name}" for name, share in shares.items() if share != "0.00"]
    if label.ndim > 1 or not np.issubdtype(label.dtype, np.number):
        return []
    return [", ".join(f"{number:.4g}" for number in label.reshape(-1)[:3])]
