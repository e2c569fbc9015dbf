"""Scenes to GIF and MP4: the drawing, below a line that says how far the episode is and what it brought."""

import io
import subprocess
import typing as tp
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sable.errors import SableError
from sable.files import atomic_replacement, write_atomically
from sable.installation import pip_install
from sable.viewer.colours import ROLES, light
from sable.viewer.scene import Scene, Shape, in_order

WIDTH = 480
"""Pixels across."""
SHARPNESS = 2
"""Frames are drawn so many times larger, then shrunk: smooth edges."""
MOST_SECONDS = 60
MARK = b"made by sable watch"
"""What every film carries: no other file is replaced."""


@dataclass(frozen=True)
class Clip:
    """One episode to be filmed."""

    scene: Scene
    title: str
    captions: list[str]
    """One for every frame."""


def frames(clips: Sequence[Clip]) -> Iterator[Image.Image]:
    """Return every frame of every take; all are of one size."""
    size = max(_size(take.scene) for take in clips)
    for take in clips:
        scale, origin = _fit(take.scene, size)
        legend = _legend(take.scene, size)
        for caption, shapes in zip(take.captions, in_order(take.scene.frames), strict=True):
            image = Image.new("RGB", (size[0] * SHARPNESS, size[1] * SHARPNESS), light("paper"))
            pen = ImageDraw.Draw(image)
            for shape in shapes:
                _draw(pen, shape, scale, origin)
            for placed, unit, corner in legend:
                for shape in placed:
                    _draw(pen, shape, unit, corner)
            _head(pen, size, take.title, caption)
            yield image.reduce(SHARPNESS)


def gif(
    clips: Sequence[Clip], path: Path, *, progress: tp.Callable[[int], None] = lambda count: None
) -> Path:
    """Write the takes one after another as an animated GIF."""
    palette = _palette()
    pictures = []
    for count, image in enumerate(frames(clips)):
        pictures.append(image.quantize(palette=palette, dither=Image.Dither.NONE))
        progress(count + 1)
    buffer, pace = io.BytesIO(), 1000 / frame_rate(clips)
    pictures[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=[round(pace * beat) for beat in _durations(clips)],
        loop=0,
        comment=MARK,
    )
    write_atomically(path, buffer.getvalue())
    return path


def mp4(
    clips: Sequence[Clip], path: Path, *, progress: tp.Callable[[int], None] = lambda count: None
) -> Path:
    """Write the takes one after another as an MP4 (H.264), which every browser plays."""
    program = encoder()
    with atomic_replacement(path) as file:
        process = None
        for count, (image, beat) in enumerate(zip(frames(clips), _durations(clips), strict=True)):
            if process is None:
                process = _start(program, image.size, frame_rate(clips), file)
            for _ in range(beat):
                tp.cast(tp.IO[bytes], process.stdin).write(image.tobytes())
            progress(count + 1)
        assert process is not None
        _, complaint = process.communicate()
        if process.returncode:
            raise SableError(f"ffmpeg could not write the film: {complaint.decode(errors='replace').strip()}")
    return path


def encoder() -> str:
    """Find ffmpeg; refused where its package is not installed."""
    try:
        import imageio_ffmpeg
    except ImportError:
        raise SableError(
            f"an MP4 needs imageio-ffmpeg, which is not installed: {pip_install('video')}; "
            "--format gif needs nothing more"
        ) from None
    return imageio_ffmpeg.get_ffmpeg_exe()


def frame_rate(clips: Sequence[Clip]) -> float:
    """Return frames a second: slow enough to follow, fast enough that the film ends within a minute."""
    count = max(sum(len(take.captions) for take in clips), 1)
    return min(max(count / MOST_SECONDS, 2 if count < 30 else 5 if count < 120 else 8), 25)


def _durations(clips: Sequence[Clip]) -> list[int]:
    """Return how long each frame stands; the last of an episode a little longer."""
    rest = max(2, round(frame_rate(clips) * 1.2))
    return [beat for take in clips for beat in [1] * (len(take.captions) - 1) + [rest]]


def _start(program: str, size: tuple[int, int], pace: float, file: Path) -> subprocess.Popen:
    command = [program, "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{size[0]}x{size[1]}", "-r", f"{pace:.3f}", "-i", "-", "-an", "-c:v", "libx264"]
    command += ["-pix_fmt", "yuv420p", "-crf", "20", "-movflags", "+faststart"]
    command += ["-metadata", f"comment={MARK.decode()}", "-f", "mp4", str(file)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


_HEAD, _LINE, _MARGIN = 52, 22, 12


def _size(scene: Scene) -> tuple[int, int]:
    """Return pixels of a film, even as H.264 wants them: the drawing fits a square."""
    side = WIDTH - 2 * _MARGIN
    drawn = side * min(1.0, scene.height / scene.width)
    height = _HEAD + drawn + _MARGIN + _LINE * len(_legend_lines(scene)) + _MARGIN
    return WIDTH, 2 * round(height / 2)


def _fit(scene: Scene, size: tuple[int, int]) -> tuple[float, tuple[float, float]]:
    """Return pixels per unit, and where the scene's corner goes."""
    side = WIDTH - 2 * _MARGIN
    scale = side / max(scene.width, scene.height)
    return scale * SHARPNESS, (
        (_MARGIN + (side - scene.width * scale) / 2) * SHARPNESS,
        _HEAD * SHARPNESS,
    )


def _legend_lines(scene: Scene) -> list[list[tuple[list[Shape], str, float]]]:
    """Return the legend in lines that fit: (icon, text, where it begins)."""
    lines, x = [[]], float(_MARGIN)
    for shapes, text in scene.legend:
        wide = 24 + _font(12).getlength(text) + 14
        if x + wide > WIDTH and lines[-1]:
            lines.append([])
            x = float(_MARGIN)
        lines[-1].append((shapes, text, x))
        x += wide
    return lines if scene.legend else []


def _legend(scene: Scene, size: tuple[int, int]) -> list[tuple[list[Shape], float, tuple[float, float]]]:
    placed, lines = [], _legend_lines(scene)
    top = size[1] - _MARGIN / 2 - _LINE * len(lines)
    for number, line in enumerate(lines):
        y = top + number * _LINE
        for shapes, text, x in line:
            placed.append((shapes, 16 * SHARPNESS, (x * SHARPNESS, (y + 2) * SHARPNESS)))
            word = ("text", 0, x + 22, y + 10, 12, text, "soft", "start")
            placed.append(([word], SHARPNESS, (0.0, 0.0)))
    return placed


def _head(pen: ImageDraw.ImageDraw, size: tuple[int, int], title: str, caption: str) -> None:
    for shape in (
        ("text", 0, _MARGIN, 16, 15, title, "ink", "start"),
        ("text", 0, _MARGIN, 36, 13, caption, "soft", "start"),
    ):
        _draw(pen, shape, SHARPNESS, (0.0, 0.0))


def _draw(pen: ImageDraw.ImageDraw, shape: Shape, scale: float, origin: tuple[float, float]) -> None:
    kind, _, *rest = shape

    def place(points: Sequence[float]) -> list[tuple[float, float]]:
        return [
            (x * scale + origin[0], y * scale + origin[1])
            for x, y in zip(points[::2], points[1::2], strict=True)
        ]

    if kind == "rect":
        x, y, width, height, fill, line, line_width, radius = rest
        inset = line_width / 2 if line else 0  # SVG draws a line astride the edge; Pillow inside it
        (left, top), (right, bottom) = place((x - inset, y - inset, x + width + inset, y + height + inset))
        box = (left, top, max(right - 1, left), max(bottom - 1, top))
        pen.rounded_rectangle(
            box,
            (radius + inset) * scale if radius else 0,
            _colour(fill),
            _colour(line),
            _thick(line_width, scale),
        )
    elif kind == "disc":
        x, y, radius, fill, line, line_width = rest
        ((x, y),) = place((x, y))
        reach = (radius + (line_width / 2 if line else 0)) * scale
        box = (x - reach, y - reach, x + reach, y + reach)
        pen.ellipse(box, _colour(fill), _colour(line), _thick(line_width, scale))
    elif kind == "path":
        points, line, line_width = rest
        spots, thick = place(points), max(line_width * scale, 1.0)
        pen.line(spots, _colour(line), round(thick), joint="curve")
        if thick > 4:
            for x, y in spots:
                reach = thick / 2
                pen.ellipse((x - reach, y - reach, x + reach, y + reach), _colour(line))
    elif kind == "area":
        points, fill = rest
        pen.polygon(place(points), _colour(fill))
    else:
        x, y, size, text, fill, where = rest
        anchor = {"start": "lm", "middle": "mm", "end": "rm"}[where]
        pen.text(place((x, y))[0], text, _colour(fill), _font(size * scale), anchor=anchor)


def _colour(role: str) -> tuple[int, int, int] | None:
    return light(role) if role else None


def _thick(line_width: float, scale: float) -> int:
    return max(1, round(line_width * scale)) if line_width else 0


_FONTS: dict[int, tp.Any] = {}


def _font(size: float) -> tp.Any:
    """Return Pillow's own font, which is there on every machine."""
    return _FONTS.setdefault(round(size), ImageFont.load_default(max(round(size), 4)))


def _palette() -> Image.Image:
    """Return our colours, and steps between each and what it is drawn on: a GIF has 256 colours at most."""
    base = [np.array(light(role), float) for role in ROLES]
    grounds = [np.array(light(role), float) for role in ("paper", "floor")]
    blends = [ground + (one - ground) * k / 5 for one in base for ground in grounds for k in range(1, 6)]
    unique = list(dict.fromkeys(tuple(round(float(x)) for x in one) for one in [*base, *blends]))[:256]
    image = Image.new("P", (1, 1))
    image.putpalette([x for one in unique for x in one])
    return image
