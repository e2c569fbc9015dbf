"""Every colour of the drawings by what it stands for, on light paper and on dark, for page and films."""

from sable.reports.looks import PALETTE

ROLES = {
    "paper": ("#fdfcfa", "#131416"),
    "floor": ("#f3f0ea", "#1d2024"),
    "line": ("#ddd8ce", "#32363c"),
    "ink": ("#1c1d20", "#eceae6"),
    "soft": ("#5d6068", "#a3a6ad"),
    "faint": ("#b9b6af", "#555a61"),
    "thing": ("#b8b0a2", "#5b5e64"),
    "wanted": ("#e0a100", "#f0b93a"),
    "goal": ("#2b2d31", "#d8d5cf"),
    "good": ("#2c8c4e", "#58c894"),
    "poor": ("#c8372d", "#ff8a7d"),
    "foe": ("#43464d", "#a8adb5"),
    "body": ("#8f959e", "#767c86"),
    "label": ("#ffffff", "#0e0f11"),
    **{f"a{k}": pair for k, pair in enumerate(PALETTE)},
}


def agent(index: int) -> str:
    """Return the colour of an agent; where agents are many it is told apart by its number."""
    return f"a{index % len(PALETTE)}"


def style() -> str:
    """Return the colours as custom properties of a page."""
    return (
        ":root { "
        + " ".join(f"--{n}: light-dark({light}, {dark});" for n, (light, dark) in ROLES.items())
        + " }"
    )


def light(role: str) -> tuple[int, int, int]:
    """Return a colour on light paper, as red, green and blue."""
    code = ROLES[role][0]
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)
