"""Models of the Hugging Face hub: `org/name` or `org/name@revision` in, and a model folder out.

The package huggingface_hub does the work, and its own environment variables choose hub, cache and token (HF_ENDPOINT, HF_HOME,
HF_TOKEN). Only files that Shoal can publish are fetched: no pickled weights and no Python files.
"""

import functools
import re
from pathlib import Path
from typing import Any

_REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_REPO})(?:@(?P<revision>[\w./-]+))?")
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "LICENSE*", "NOTICE*"]
_UNWANTED = ["*/*"]
"""Folders inside a repository hold other formats, such as onnx/."""


def is_hub_name(model: str) -> bool:
    """Returns whether a model's name is one of the hub: `org/name` or `org/name@revision`, and no folder or file here."""
    return (
        _NAME.fullmatch(model) is not None
        and not Path(model).exists()
        and not model.endswith((".gguf", ".toml"))
    )


@functools.lru_cache(maxsize=4)  # a command asks several times, and a branch may move meanwhile
def hub_folder(model: str) -> Path:
    """Returns a folder with the model, downloaded now or earlier. Raises ValueError with the remedy if it cannot be downloaded."""
    match = _NAME.fullmatch(model)
    assert match is not None, model
    hub = import_hub(f'model = "{model}"')
    try:
        folder = hub.snapshot_download(
            match["repo"], revision=match["revision"], allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except Exception as error:  # the package raises errors of its own, of requests and of the system
        raise ValueError(
            f"model {model!r} is no folder here, and the hub's copy cannot be had ({_reason(error)}); check the name and the connection, or "
            f"download it elsewhere: hf download {match['repo']} --local-dir models/{match['repo'].partition('/')[2]}"
        ) from error
    return Path(folder)


def push_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a model folder to the hub and returns the address of the commit. The repository is created if it does not exist."""
    if not re.fullmatch(_REPO, repo):
        raise ValueError(f"{repo!r} is not the name of a repository; write ORG/NAME")
    hub = import_hub("shoal push")
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        done = hub.upload_folder(folder_path=str(folder), repo_id=repo, commit_message=message)
    except Exception as error:
        raise ValueError(
            f"nothing was pushed to {repo}: {_reason(error)}; check the connection, and log in with `hf auth login` or set HF_TOKEN to a "
            "token that may write"
        ) from error
    return str(getattr(done, "commit_url", "") or repo)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]


def import_hub(asked_for: str) -> Any:
    """Returns the package huggingface_hub; raises ValueError if it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{asked_for} needs the package huggingface_hub: pip install 'shoal-rl[hub]'"
        ) from None
    return huggingface_hub
