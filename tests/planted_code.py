"""Makes a model folder name Python code, which a loader that trusts the folder would run."""

import json
from pathlib import Path

AUTO_MAP = {
    "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    "AutoConfig": "evil.Evil",
    "AutoModelForCausalLM": "evil.Evil",
}


def name_code(folder: Path, **more: object) -> None:
    """Adds the names of classes in `evil.py` to the folder's settings, and `more` keys."""
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        added = {"auto_map": AUTO_MAP, "trust_remote_code": True} | more
        (folder / name).write_text(json.dumps(settings | added))


EVIL = "import pathlib\npathlib.Path({mark!r}).touch()\n"


def plant_code(folder: Path, mark: Path) -> None:
    """Makes the files of a model folder name Python code beside them, which would create `mark`."""
    name_code(folder)
    for name in ("evil.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text(EVIL.format(mark=str(mark)))
