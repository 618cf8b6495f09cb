"""The docs name what the code has."""

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from shoal.cli.run.runfile import RunFile, load_run_file

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def leaf_keys(model: type[BaseModel]) -> set[str]:
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_section(kind)]
        keys |= leaf_keys(sections[0]) if sections else {name}
    return keys


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_every_key_of_a_run_file_is_documented() -> None:
    page = (ROOT / "docs" / "run-file.md").read_text()
    assert [key for key in sorted(leaf_keys(RunFile)) if f"`{key}`" not in page] == []


def test_a_run_file_stays_small() -> None:
    assert len(leaf_keys(RunFile)) < 125


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_run_files_are_valid(path: Path) -> None:
    assert load_run_file(path).run.name


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_readme_is_short_and_shows_what_it_must() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    for part in (
        "make demo",
        "docs/img/terminal.svg",
        "docs/img/page.png",
        "shoal demo",
        "shoal join URL",
        "**Not shown**",
        "docs/figures.md",
        "pip install 'shoal-rl[torch]'",
    ):
        assert part in text, part


def table_rows(path: Path) -> dict[str, str]:
    """Returns the other cells of every table row of a page, by its first cell."""
    rows = (
        line.strip("| ").split(" | ", 1) for line in path.read_text().splitlines() if line.startswith("| ")
    )
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_figures_of_the_readme_are_those_of_the_figures_page() -> None:
    figures = table_rows(ROOT / "docs" / "figures.md")
    shared = {name: cells for name, cells in table_rows(ROOT / "README.md").items() if name in figures}
    assert len(shared) >= 8, f"only these rows of the README are in docs/figures.md: {sorted(shared)}"
    for name, cells in shared.items():
        missing = set(NUMBER.findall(cells)) - set(NUMBER.findall(figures[name]))
        assert not missing, f"README.md, {name!r}: {sorted(missing)} are not in that row of docs/figures.md"


def test_every_number_of_the_readme_table_has_a_row_in_the_figures_page() -> None:
    """A new row with a number needs a row of the same name in docs/figures.md, or the test above would not see it."""
    figures = table_rows(ROOT / "docs" / "figures.md")
    for name, cells in table_rows(ROOT / "README.md").items():
        figure = cells.split(" | ")[0]
        assert name in figures or not re.search(r"[1-9]", figure), (
            f"README.md, {name!r}: not in docs/figures.md"
        )


def test_docs_have_at_most_30000_words() -> None:
    """Counts the words, not the bars of tables, of every page but the decision records.

    Experiments belong in bench/log, decisions in docs/decisions, which has a limit of its own.
    """
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"]
    words = [word for page in pages for word in page.read_text().split() if re.search(r"\w", word)]
    assert len(words) <= 30_000


def test_every_page_is_in_the_navigation() -> None:
    """`make docs` finds this too, but needs mkdocs."""
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f": {name}\n" in site, f"docs/{name} is not in mkdocs.yml"


def test_every_exit_code_is_documented() -> None:
    from shoal.cli.run import supervise

    text = (ROOT / "docs" / "cli.md").read_text()
    for name, code in vars(supervise).items():
        assert not name.startswith("EXIT_") or f"| {code} |" in text, name


def test_every_named_log_file_exists() -> None:
    sources = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "bench" / "log").glob("*.md")]
    for folder, pattern in (("docs", "*.md"), ("src", "*.py"), ("runs", "*.toml"), ("bench", "*.py")):
        sources += (ROOT / folder).rglob(pattern)
    for source in sources:
        for name in re.findall(r"2026-\d\d-[a-z0-9-]+\.md", source.read_text(encoding="utf-8")):
            assert (ROOT / "bench" / "log" / name).is_file(), f"{source.relative_to(ROOT)} names {name}"


def test_every_page_that_the_source_names_exists() -> None:
    """Error messages and docstrings send users to pages, which must exist after pages were moved."""
    for folder in ("src", "runs", "deploy", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".service", ".conf"):
                for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                    assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}"


def test_index_of_the_log_lists_every_file() -> None:
    folder = ROOT / "bench" / "log"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("2026-*.md"):
        assert f"]({path.name})" in index, f"bench/log/README.md does not list {path.name}"


def test_decision_records_are_few_and_short() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(records) <= 20
    for number, path in enumerate(records, 1):
        text = path.read_text(encoding="utf-8")
        assert path.name.startswith(f"{number:03d}-") and len(text.splitlines()) <= 20, path.name
        for part in ("**Context.**", "**Decision.**", "**Consequence.**"):
            assert part in text, f"{path.name} has no {part}"


def test_the_pictures_of_the_readme_ask_no_other_server() -> None:
    drawing = (ROOT / "docs" / "img" / "terminal.svg").read_text(encoding="utf-8")
    found = set(re.findall(r"https?://[^\s\"<)]+", drawing))
    assert {url for url in found if "127.0.0.1" not in url} <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
    assert "shoal" in drawing and "version" in drawing
