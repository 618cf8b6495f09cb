"""`shoal docs`: prints a page of the documentation, which an installed package carries with it."""

import argparse
import difflib
import threading
from importlib import metadata
from pathlib import Path

from shoal.cli.run.supervise import EXIT_OK

INSTALLED = "share/doc/shoal-rl"
"""Where a wheel puts the pages, below the environment's folder (pyproject.toml)."""


def docs(options: argparse.Namespace, stop: threading.Event) -> int:
    """Prints a page, or the names of all pages."""
    pages = find_pages()
    if not pages:
        raise ValueError("this installation has no pages; install shoal-rl from a wheel, or use a clone")
    if options.page is None:
        width = max(map(len, pages))
        for name, path in pages.items():
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            print(f"{name:<{width}}  {title}")
        return EXIT_OK
    name = options.page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        similar = difflib.get_close_matches(name, pages, 1)
        hint = f"did you mean {similar[0]}?" if similar else "`shoal docs` lists them"
        raise ValueError(f"no page {name!r}; {hint}")
    print(pages[name].read_text(encoding="utf-8"))
    return EXIT_OK


def find_pages() -> dict[str, Path]:
    """Returns the pages by name, from the clone that this package is in, or from the installed files."""
    clone = Path(__file__).parents[3] / "docs"
    if (clone / "run-file.md").is_file():
        found = {str(path.relative_to(clone)): path for path in clone.rglob("*.md")}
    else:
        try:
            files = metadata.files("shoal-rl") or []
        except metadata.PackageNotFoundError:
            files = []
        found = {
            str(file).partition(f"{INSTALLED}/")[2]: Path(str(file.locate()))
            for file in files
            if f"{INSTALLED}/" in str(file)
        }
    return {name.removesuffix(".md"): found[name] for name in sorted(found) if name.endswith(".md")}
