"""A version as a plain model folder that transformers and other programs load: no manifest, no deltas.

    FOLDER/newest          a link to plain/v16, replaced in one step when a newer version is written
    FOLDER/plain/v16/      the files of version 16, as hard links

The model `tiny` has one token per character and a tokenizer file of its own; its plain folder also has the same tokenizer as a
tokenizer.json, so that AutoTokenizer loads it.
"""

import json
import shutil
from pathlib import Path

from shoal.files import folder_beside, link_or_copy, replace_link
from shoal.model.tokenizer import CHAR_FILE, TOKENIZER_FILE, CharTokenizer

NEWEST = "newest"
PLAIN = "plain"
KEPT = 2
"""Number of plain folders that are kept, because a reader may still use the one before the newest."""
_LEFT_OUT = ("manifest.json", "model.safetensors.index.json")


def link_newest(source: Path, version: int, parent: Path) -> None:
    """Makes `parent/newest` a link to a plain folder of the version in `source`."""
    folder = parent / PLAIN / f"v{version}"
    write_plain_folder(source, folder)
    replace_link(parent / NEWEST, Path(PLAIN) / folder.name)
    for old in sorted(folder.parent.glob("v*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def write_plain_folder(source: Path, out: Path) -> None:
    """Writes the model in `source` to `out`, as hard links where the file system has them. Replaces an earlier `out`."""
    with folder_beside(out) as partial:
        for path in sorted(source.iterdir()):
            visible = path.is_file() and not path.name.startswith(".")
            if visible and path.suffix != ".delta" and path.name not in _LEFT_OUT:
                link_or_copy(path, partial / path.name)
        if (source / CHAR_FILE).exists():
            write_char_tokenizer(CharTokenizer.load(source), partial)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)


def write_char_tokenizer(tokenizer: CharTokenizer, folder: Path) -> None:
    """Writes the tokenizer as a tokenizer.json of the library `tokenizers`, and its settings for transformers."""
    specials = {"<pad>": tokenizer.PAD, "<bos>": tokenizer.BOS, "<eos>": tokenizer.EOS}
    begin = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for name, number in specials.items()
        ],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [tokenizer.BOS], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": specials | {char: 3 + place for place, char in enumerate(tokenizer.alphabet)},
            "unk_token": "<pad>",
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    for name, value in ((TOKENIZER_FILE, content), ("tokenizer_config.json", settings)):
        # It may be a hard link: writing would change the version that it came from.
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
