"""The first layout: its tables were made as they were."""

revision, down_revision = "1", None


def upgrade() -> None:
    """Nothing: whoever is here has it."""
