"""The docs name what the code has."""

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from shoal.cli.run.runfile import RunFile, load_run_file
from shoal.wire.codes import CODES

ROOT = Path(__file__).parent.parent


def leaf_keys(model: type[BaseModel]) -> set[str]:
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_section(kind)]
        keys |= leaf_keys(sections[0]) if sections else {name}
    return keys


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.parametrize("key", sorted(leaf_keys(RunFile)))
def test_every_key_of_a_run_file_is_documented(key: str) -> None:
    assert f"`{key}`" in (ROOT / "docs" / "run-file.md").read_text(), f"docs/run-file.md does not name {key}"


def test_a_run_file_stays_small() -> None:
    assert len(leaf_keys(RunFile)) < 100


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.toml")), ids=lambda path: path.name)
def test_the_run_files_that_ship_are_good(path: Path) -> None:
    load_run_file(path)


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_explained(code: str) -> None:
    meaning = CODES[code]
    assert meaning.meaning and meaning.remedy
    assert (meaning.status > 0) == code.startswith("request.")


def test_the_readme_is_short_and_shows_what_it_must() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    for part in (
        "make demo",
        "docs/img/demo-reward.png",
        "shoal join URL",
        "**Not shown**",
        "docs/claims.md",
    ):
        assert part in text, part


def test_every_page_is_in_the_navigation() -> None:
    """`make docs` says so too, but not everybody has it at hand."""
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f": {name}\n" in site, f"docs/{name} stands nowhere in mkdocs.yml"


def test_every_exit_code_is_documented() -> None:
    from shoal.cli.run import supervise

    text = (ROOT / "docs" / "cli.md").read_text()
    for name, code in vars(supervise).items():
        assert not name.startswith("EXIT_") or f"| {code} |" in text, name
