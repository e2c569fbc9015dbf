"""Every recipe says where it comes from."""

import re
from pathlib import Path

from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS

LOG = Path(__file__).resolve().parents[2] / "docs" / "research-log.md"


def test_the_research_log_names_the_origin_of_every_recipe():
    section = LOG.read_text().partition("### Where every recipe comes from")[2].partition("\n## ")[0]
    named = set()
    for system, tables, origin, seeds in re.findall(
        r"^\| `(\w+)` \|(.*?)\|(.*?)\|(.*?)\|$", section, re.MULTILINE
    ):
        assert origin.strip() and seeds.strip(), system
        named |= {(system, table) for table in re.findall(r"`(.*?)`", tables)}
    assert named == {(system, table) for system in SYSTEM_CONFIGS for table in settings.recipes(system)}
