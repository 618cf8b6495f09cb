"""Which submission a validator was at when it died. One that took it down before is not tried for ever."""

import json
from pathlib import Path

MAX_DEATHS = 2


class Poison:
    """A small file: the submission being checked, and how often checking it did not come to an end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._deaths: dict[str, int] = {}
        if path.exists():
            try:
                self._deaths = {str(name): int(count) for name, count in json.loads(path.read_text()).items()}
            except (ValueError, AttributeError, TypeError):
                self._deaths = {}  # cut off by the crash it should have told of; the next one will be counted

    def begin(self, lease_id: str) -> bool:
        """Note that a check begins; False if it should not, because it ended the validator too often."""
        deaths = self._deaths.get(lease_id, 0)
        if deaths >= MAX_DEATHS:
            return False
        self._write(self._deaths | {lease_id: deaths + 1})
        return True

    def suspects(self, lease_id: str) -> bool:
        """Whether an earlier check of it, alone or with others, did not come to an end. To be asked after `begin`."""
        return self._deaths.get(lease_id, 0) > 1

    def end(self, lease_id: str) -> None:
        self._write({name: count for name, count in self._deaths.items() if name != lease_id})

    def _write(self, deaths: dict[str, int]) -> None:
        self._deaths = deaths
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(deaths))
        partial.replace(self._path)
